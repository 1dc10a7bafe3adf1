"""Collections of embedding layers: on any number of workers what NumPy says of the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from hypothesis import given, settings
from hypothesis import strategies as st

import distributed_embeddings as de
import sok
from tests.sok import collections_of_tables as cases
from tests.sok.threads_world import run_world

BOTH = pytest.mark.parametrize("of", [keras, tf_keras], ids=["keras3", "tf_keras"])


def collection_of(of=keras):
    return sok.layers.for_keras(of).EmbeddingCollection


class Scaled:
    """Mixed into a layer of each Keras: one that is no Embedding, as programs have them."""

    def __init__(self, input_dim, output_dim, **kwargs):
        super().__init__(**kwargs)
        self.input_dim, self.output_dim = input_dim, output_dim

    def build(self, _):
        self.rows = self.add_weight(name="rows", shape=(self.input_dim, self.output_dim), initializer="ones")
        self.built = True

    def call(self, ids):
        return 2.0 * tf.gather(tf.convert_to_tensor(self.rows), ids)

    def get_config(self):
        return {**super().get_config(), "input_dim": self.input_dim, "output_dim": self.output_dim}


SCALED = {
    of: of.utils.register_keras_serializable("tests")(type("Scaled", (Scaled, of.layers.Layer), {}))
    for of in (keras, tf_keras)
}


def train(seed, workers, monkeypatch, steps=2, make=None):
    """What each rank gets of random tables, plans and batches, trained by plain SGD; and what is to come of it."""
    random = np.random.default_rng(seed)
    tables = cases.tables_of(random)
    map_of = [*range(len(tables)), *random.integers(len(tables), size=random.integers(3)).tolist()]
    placements = [cases.placement_of(random, table.dim, workers) for table in tables]
    size = int(random.integers(workers, 9))
    batches = [[cases.batch_of(random, tables[t], size) for t in map_of] for _ in range(steps)]
    parts = cases.parts_of(random, size, workers)
    form = random.choice(["ragged", "sparse"])
    starts = [random.normal(size=[table.rows, table.dim]).astype(np.float32) for table in tables]
    shapes = [cases.look_up(tables[t], starts[t], ids).shape for t, ids in zip(map_of, batches[0], strict=True)]
    upstream = [random.normal(size=[shape[0], shape[-1]]).astype(np.float32) for shape in shapes]

    def rank(transport):
        layers = [
            sok.Embedding(table.rows, table.dim, combiner=table.combiner, name=f"t{i}")
            for i, table in enumerate(tables)
        ]
        if make is None:
            collection = sok.parallel.EmbeddingCollection(layers, map_of, placements)
        else:
            collection = make(layers, map_of)
        collection.set_weights(starts)
        optimizer, outputs = sok.optimizers.SGD(0.1), []
        for batch in batches:
            mine = parts[transport.rank]
            own = [cases.as_input(tables[t], ids[mine], form) for t, ids in zip(map_of, batch, strict=True)]
            with tf.GradientTape() as tape:
                found = collection(own)
                ups = [
                    u[mine] if out.shape.rank == 2 else u[mine][:, None] for u, out in zip(upstream, found, strict=True)
                ]
                loss = tf.add_n([tf.reduce_sum(out * up) for out, up in zip(found, ups, strict=True)])
            variables = collection.trainable_variables
            variables = [v if isinstance(v, tf.Variable) else v.value for v in variables]  # what those of Keras 3 hold
            grads = sok.DistributedGradientTape(tape, sok.Sum).gradient(loss, variables)
            optimizer.apply_gradients([p for p in zip(grads, variables, strict=True) if hasattr(p[1], "table_name")])
            for grad, variable in zip(grads, variables, strict=True):
                if not hasattr(variable, "table_name"):
                    variable.assign_sub(0.1 * tf.convert_to_tensor(grad))
            outputs.append([out.numpy() for out in found])
        return (
            outputs,
            collection.get_weights(all_ranks=True),
            [c for c in transport.collectives if "/refused" not in c],
        )

    expected, matrices = [], [start.copy() for start in starts]
    for batch in batches:
        expected.append([cases.look_up(tables[t], matrices[t], ids) for t, ids in zip(map_of, batch, strict=True)])
        changes = [np.zeros_like(matrix) for matrix in matrices]
        for t, ids, u in zip(map_of, batch, upstream, strict=True):
            u = u if tables[t].combiner is not None else np.repeat(u[:, None], len(ids[0]), 1)
            changes[t] += cases.gradient(tables[t], matrices[t], ids, u)
        matrices = [matrix - 0.1 * change for matrix, change in zip(matrices, changes, strict=True)]
    return run_world(workers, rank, monkeypatch), expected, matrices, parts


def check(seed, workers, monkeypatch, make=None):
    results, expected, matrices, parts = train(seed, workers, monkeypatch, make=make)
    for result, part in zip(results, parts, strict=True):
        if isinstance(result, BaseException):
            raise result
        outputs, weights, _ = result
        for of_step, of_batch in zip(outputs, expected, strict=True):
            for output, whole in zip(of_step, of_batch, strict=True):
                if part.stop > part.start:
                    np.testing.assert_allclose(output, whole[part], rtol=1e-4, atol=1e-5)
        for weight, matrix in zip(weights, matrices, strict=True):
            np.testing.assert_allclose(weight, matrix, rtol=1e-4, atol=1e-5)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3, 4]))
def test_random_tables_and_plans_give_what_numpy_says_of_the_whole_batch(seed, workers):
    with pytest.MonkeyPatch.context() as monkeypatch:
        check(seed, workers, monkeypatch)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from(["basic", "memory_balanced", "memory_optimized"]),
    st.tuples(*[st.one_of(st.none(), st.integers(5, 120))] * 3),
)
def test_random_tables_by_merlins_plans_give_what_numpy_says_of_the_whole_batch(seed, workers, strategy, thresholds):
    columns, rows, copies = thresholds
    arguments = {"column_slice_threshold": columns, "row_slice_threshold": rows, "data_parallel_threshold": copies}

    def make(layers, map_of):
        return de.DistributedEmbedding(layers, strategy, input_table_map=map_of, **arguments)

    with pytest.MonkeyPatch.context() as monkeypatch:
        check(seed, workers, monkeypatch, make)


def test_all_tables_together_make_three_collectives_a_step(monkeypatch):
    for workers, steps in ((2, 1), (2, 2), (3, 2)):
        results, *_ = train(7, workers, monkeypatch, steps)
        for _, _, collectives in results:
            of_tables = [name.rpartition("/")[2].partition(".")[0] for name in collectives]
            first = of_tables.index("keys")
            assert of_tables[first : first + 3] == ["keys", "rows", "grads"]
            assert of_tables.count("grads") == steps


@BOTH
def test_layers_of_any_class_and_ids_of_any_form_are_looked_up(of):
    layers = [
        of.layers.Embedding(1000, 4, "ones"),
        sok.layers.for_keras(of).Embedding(50, 2, "ones", combiner="mean"),
        SCALED[of](10, 3),
        sok.layers.for_keras(of).Embedding(None, 2, "ones", combiner="sum"),
    ]
    collection = collection_of(of)(layers, [0, 0, 1, 2, 3, 0], dtype="float32")
    outputs = collection(
        [
            tf.constant([[1], [2]]),
            tf.ragged.constant([[1], []], dtype=tf.int64),
            tf.sparse.from_dense([[1, 2], [3, 0]]),
            tf.constant([1, 2]),
            tf.constant([["to", "be"], ["or", "not"]]),
            [[[1, 2]], [[3, 4]]],
        ]
    )
    assert [tuple(out.shape) for out in outputs] == [(2, 1, 4), (2, None, 4), (2, 2), (2, 3), (2, 2), (2, 1, 2, 4)]
    assert [float(tf.reduce_max(out)) for out in outputs] == [1, 1, 1, 2, 2, 1]
    assert not layers[0].built and not layers[2].built


def model_of(of):
    layers = [of.layers.Embedding(100, 4), sok.layers.for_keras(of).Embedding(80, 2, combiner="sum"), SCALED[of](5, 2)]
    a, b, c = (of.Input((n,), dtype="int64") for n in (1, 3, 2))
    collection = collection_of(of)(layers, placements=[sok.column_wise(2), sok.data_parallel(), None], name="all")
    flat = [of.layers.Flatten()(out) for out in collection([a, b, c])]
    return of.Model([a, b, c], of.layers.Dense(1)(of.layers.Concatenate()(flat)))


@BOTH
def test_a_model_with_a_collection_is_trained_saved_and_loaded(of, tmp_path):
    model = model_of(of)
    model.compile(sok.DistributedOptimizer(of.optimizers.Adagrad(0.5)), "mse")
    ids = [np.arange(8).reshape(8, 1), np.arange(24).reshape(8, 3), np.arange(16).reshape(8, 2) % 5]
    before = [np.array(weight) for weight in model.get_layer("all").get_weights()]
    model.fit(ids, np.ones([8, 1]), verbose=0)
    after = model.get_layer("all").get_weights()
    changed = [(a != b).any(axis=1).sum() for a, b in zip(before, after, strict=True)]
    assert changed == [8, 24, 5]
    model.save(tmp_path / "model.keras")
    loaded = of.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(ids, verbose=0), model.predict(ids, verbose=0))
    copy = loaded.get_layer("all")
    assert copy.embeddings[0].embedding_variable.placement == sok.column_wise(2)
    for a, b, rows in zip(copy.get_weights(), after, (8, 80, 5), strict=True):  # of tables those that a step has seen
        np.testing.assert_array_equal(a[:rows], b[:rows])


def test_weights_come_from_arrays_and_files_in_chunks(tmp_path):
    layers = [sok.Embedding(100, 4), sok.Embedding(7, 3), SCALED[keras](5, 2)]
    collection = sok.parallel.EmbeddingCollection(layers)
    random = np.random.default_rng(3)
    weights = [random.normal(size=shape).astype(np.float32) for shape in ((100, 4), (7, 3), (5, 2))]
    np.save(tmp_path / "0.npy", weights[0])
    np.save(tmp_path / "1.npy", weights[1])
    for use_lock in (False, True):
        collection.set_weights([np.zeros_like(weight) for weight in weights])
        collection.set_weights([tmp_path / "0.npy", str(tmp_path / "1.npy"), weights[2]], chunk=30, use_lock=use_lock)
        for chunk in (1, 30, 10**6):
            for found, weight in zip(collection.get_weights(chunk=chunk), weights, strict=True):
                np.testing.assert_array_equal(found, weight)


def test_only_rank_0_gets_weights_if_asked_so(monkeypatch):
    def rank(_):
        layers = [sok.Embedding(100, 4, "ones"), sok.Embedding(90, 3, "ones")]
        collection = sok.parallel.EmbeddingCollection(layers, placements=[sok.column_wise(2), sok.table_wise(1)])
        return [[weight.shape for weight in collection.get_weights(all_ranks)] for all_ranks in (True, False)]

    shapes = [(100, 4), (90, 3)]
    assert run_world(2, rank, monkeypatch) == [[shapes, shapes], [shapes, []]]


def test_a_bad_id_in_one_table_on_one_worker_is_raised_on_all(monkeypatch):
    def rank(transport):
        layers = [sok.Embedding(100, 4, combiner="sum"), sok.Embedding(90, 3)]
        collection = sok.parallel.EmbeddingCollection(layers, placements=[sok.column_wise(2), sok.table_wise(1)])
        ids = tf.constant([[5, 95 if transport.rank == 0 else 1]])
        return collection([ids, ids])

    for error in run_world(2, rank, monkeypatch):
        assert isinstance(error, tf.errors.InvalidArgumentError) and "95" in str(error)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sok.parallel.EmbeddingCollection([sok.Embedding(100, 4)], [0, 1]), "`input_table_map` must be"),
        (lambda: sok.parallel.EmbeddingCollection([sok.Embedding(100, 4)], placements=[]), "one for each of the 1"),
        (lambda: sok.parallel.EmbeddingCollection([sok.Embedding(100, 4)])([]), "must be a list of 1, one for each"),
        (lambda: sok.parallel.EmbeddingCollection([sok.Embedding(100, 4)])(tf.constant([1])), "must be a list of 1"),
        (lambda: sok.parallel.EmbeddingCollection([sok.Embedding(100, 4)])([tf.constant([True])]),
         "must be integers. Received: bool"),
        (lambda: sok.parallel.EmbeddingCollection([sok.Embedding(100, 4)]).set_weights([]), "expecting 1 weights"),
        (lambda: sok.parallel.EmbeddingCollection([sok.Embedding(100, 4)]).set_weights([np.ones([99, 4])]),
         r"must have shape \(100, 4\). Received: shape \(99, 4\)"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_words(call, message):
    with pytest.raises(ValueError, match=message):
        call()
