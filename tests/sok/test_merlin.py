"""Merlin's names: what its programs call, over sok; and each defect that was confirmed in it, by its number there."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import distributed_embeddings as de
import distributed_embeddings.python.layers.dist_model_parallel as dmp
import sok
from distributed_embeddings.python.layers import embedding as de_layers
from distributed_embeddings.python.ops import embedding_lookup_ops
from tests.sok.threads_world import checked, run_world

BOTH = pytest.mark.parametrize("of", [keras, tf_keras], ids=["keras3", "tf_keras"])
STRATEGIES = ("basic", "memory_balanced", "memory_optimized")
RAGGED = tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64)


def matrices(sizes, seed=0):
    random = np.random.default_rng(seed)
    return [random.normal(size=size).astype(np.float32) for size in sizes]


def layers_of(sizes, combiner="sum"):
    return [de.Embedding(rows, width, combiner=combiner) for rows, width in sizes]


def outputs_of(workers, monkeypatch, sizes, inputs, combiner="sum", weights=None, **arguments):
    """Each rank's outputs for its third or half of the batch, and all matrices as rank 0 gets them."""
    weights = matrices(sizes) if weights is None else weights

    def rank(transport):
        layer = de.DistributedEmbedding(layers_of(sizes, combiner), **arguments)
        layer.set_weights(weights)
        outputs = [out.to_tensor() if isinstance(out, tf.RaggedTensor) else out for out in layer(inputs)]
        return [out.numpy() for out in outputs], layer.get_weights()

    return checked(run_world(workers, rank, monkeypatch))


def expected_of(sizes, inputs, map_of, combiner="sum"):
    """Stock TensorFlow's answers in one process."""
    found = []
    for ids, table in zip(inputs, map_of, strict=True):
        matrix = tf.constant(matrices(sizes)[table])
        if combiner is None:
            rows = tf.gather(matrix, ids)
            found.append(rows.to_tensor() if isinstance(rows, tf.RaggedTensor) else rows)
        elif isinstance(ids, tf.SparseTensor):
            found.append(tf.nn.embedding_lookup_sparse(matrix, ids, None, combiner=combiner))
        else:
            found.append(tf.reduce_sum(tf.gather(matrix, ids), -2))
    return [np.asarray(out) for out in found]


def same(outputs, expected):
    for out, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)


def test_names_are_where_programs_import_them():
    assert dmp.DistributedEmbedding is de.DistributedEmbedding and dmp.broadcast_variables is de.broadcast_variables
    assert de_layers.Embedding is de.Embedding and de_layers.ConcatOneHotEmbedding is de.ConcatOneHotEmbedding
    assert embedding_lookup_ops.embedding_lookup is de.embedding_lookup
    assert de.dist_model_parallel is dmp and set(de.__all__) <= set(dir(de)) and de.__version__ == sok.__version__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = de.nothing


@pytest.mark.parametrize("make", [tf.Variable, tf.constant], ids=["variable", "tensor"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_1_as_many_ids_as_samples_are_not_one_each(make, combiner):
    (matrix,) = matrices([(5, 3)])
    scale = {"sum": 1.0, "mean": 0.5, "sqrtn": 0.5**0.5}[combiner]
    expected = [scale * (matrix[1] + matrix[2]), np.zeros(3), matrix[3]]
    for ids in (RAGGED, RAGGED.to_sparse()):
        same([de.embedding_lookup(make(matrix), ids, combiner)], [expected])


def test_lookups_pool_nothing_without_a_combiner_and_have_gradients():
    (matrix,) = matrices([(5, 3)])
    variable = tf.Variable(matrix)
    np.testing.assert_array_equal(de.embedding_lookup(variable, [[4, 0], [1, 1]]), matrix[[[4, 0], [1, 1]]])
    rows = de.embedding_lookup(variable, RAGGED)
    assert rows.shape.as_list() == [3, None, 3]
    np.testing.assert_array_equal(rows.flat_values, matrix[[1, 2, 3]])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(de.embedding_lookup(variable, tf.ragged.constant([[1, 2, 1], [2]]), "sum"))
    gradient = tape.gradient(loss, variable)
    assert sorted(gradient.indices.numpy().tolist()) == [1, 2] and gradient.values.shape == [2, 3]
    np.testing.assert_array_equal(tf.convert_to_tensor(gradient)[:, 0], [0, 2, 2, 0, 0])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0], RAGGED, "sum"), TypeError, "param must be Tensor"),
        ((tf.zeros([5, 3]), tf.constant([1])), ValueError, "Only support 2D input"),
        ((tf.zeros([5, 3]), tf.zeros([1, 2, 3], tf.int64), "sum"), ValueError, "Only support 2D input"),
        ((tf.zeros([5, 3]), RAGGED.to_sparse()), ValueError, "for a SparseTensor. Received: None"),
        ((tf.zeros([5, 3]), RAGGED, "max"), ValueError, "must be 'sum', 'mean' or 'sqrtn'. Received: 'max'"),
        ((tf.Variable(tf.zeros([3, 3])), RAGGED, "sum"), tf.errors.InvalidArgumentError, "3"),
        ((tf.zeros([3, 3]), RAGGED, "sum"), tf.errors.InvalidArgumentError, "3"),
    ],
)
def test_9_what_cannot_be_looked_up_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        de.embedding_lookup(*arguments)


UNEVEN = [(10, 16), (500, 32), (100, 32), (100, 8), (50, 16), (50, 4), (100, 8), (100, 4)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_2_slices_that_meet_unevenly_take_and_give_weights(strategy, monkeypatch):
    inputs = [tf.constant([[1, 2], [3, 4]])] * len(UNEVEN)
    results = outputs_of(4, monkeypatch, UNEVEN, inputs, strategy=strategy, column_slice_threshold=800)
    for outputs, weights in results:
        same(outputs, expected_of(UNEVEN, inputs, range(len(UNEVEN))))
        # 5: the other ranks get nothing, not something.
        assert len(weights) in (0, len(UNEVEN))
    same(results[0][1], matrices(UNEVEN))
    assert [len(weights) for _, weights in results[1:]] == [0, 0, 0]


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_table_and_four_workers(strategy, width, monkeypatch):
    """Merlin refuses a rank without a table."""
    inputs = [tf.constant([[1, 2], [9, 9]])]
    results = outputs_of(4, monkeypatch, [(10, width)], inputs, strategy=strategy)
    for outputs, _ in results:
        same(outputs, expected_of([(10, width)], inputs, [0]))
    same(results[0][1], matrices([(10, width)]))


def test_3_shared_tables_whose_slices_meet_give_the_right_outputs(monkeypatch):
    sizes, map_of = [(100, 4), (50, 4)], [1, 0, 0]
    inputs = [tf.constant([[1, 2]]), tf.constant([[3, 40]]), tf.constant([[49, 0]])]
    arguments = {"input_table_map": map_of, "strategy": "memory_balanced", "column_slice_threshold": 200}
    for outputs, _ in outputs_of(2, monkeypatch, sizes, inputs, **arguments):
        same(outputs, expected_of(sizes, inputs, map_of))


@BOTH
def test_4_what_a_table_says_of_itself_is_kept(of):
    make = of.layers.Embedding
    layers = [make(100, 4, "zeros"), make(80, 4, "ones"), make(90, 4, "ones", trainable=False)]
    layer = de.for_keras(of).DistributedEmbedding(layers)
    outputs = layer([tf.constant([1])] * 3)
    assert [float(tf.reduce_mean(out)) for out in outputs] == [0, 1, 1]
    assert len(layer.trainable_variables) == 2 and len(layer.non_trainable_variables) == 1


def test_6_paths_are_taken_beside_copies(monkeypatch, tmp_path):
    sizes = [(10, 4), (100, 8), (400, 8)]
    paths = [str(tmp_path / f"{i}.npy") for i in range(3)]
    for path, matrix in zip(paths, matrices(sizes), strict=True):
        np.save(path, matrix)
    inputs = [tf.constant([[1, 2]])] * 3
    arguments = {"data_parallel_threshold": 50, "row_slice_threshold": 3000}
    results = outputs_of(2, monkeypatch, sizes, inputs, weights=paths, **arguments)
    for outputs, _ in results:
        same(outputs, expected_of(sizes, inputs, range(3)))
    same(results[0][1], matrices(sizes))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_7_8_13_14_any_form_of_ids_is_looked_up_by_any_number_of_workers(workers, monkeypatch):
    """Sparse ids; none pooled, of any rank; ragged ids of tables in rows; tables in rows without a GPU."""
    sizes = [(10, 4), (200, 8), (600, 8)]
    arguments = {"data_parallel_threshold": 50, "row_slice_threshold": 3000}
    pooled = [RAGGED.to_sparse(), RAGGED.to_sparse(), RAGGED.to_sparse()]
    for outputs, _ in outputs_of(workers, monkeypatch, sizes, pooled, "mean", **arguments):
        same(outputs, expected_of(sizes, pooled, range(3), "mean"))
    deep = tf.constant([[[1, 2], [3, 4]]])
    for ids in (tf.constant([1, 5]), tf.constant([[1], [2]]), tf.constant([[1, 2, 3]]), deep, RAGGED):
        for outputs, _ in outputs_of(workers, monkeypatch, sizes, [ids] * 3, None, **arguments):
            same(outputs, expected_of(sizes, [ids] * 3, range(3), None))


class Doubled(keras.layers.Layer):
    """A layer of a program's own."""

    def __init__(self, input_dim, output_dim, **kwargs):
        super().__init__(**kwargs)
        self.input_dim, self.output_dim = input_dim, output_dim

    def build(self, _):
        self.rows = self.add_weight(name="rows", shape=(self.input_dim, self.output_dim), initializer="ones")

    def call(self, ids):
        return 2 * tf.gather(tf.convert_to_tensor(self.rows), ids)

    def get_config(self):
        return {**super().get_config(), "input_dim": self.input_dim, "output_dim": self.output_dim}


def test_10_under_mixed_precision_rows_of_workers_are_not_averaged(monkeypatch):
    def rank(transport):
        layers = [keras.layers.Embedding(100, 4, "ones"), Doubled(10, 4)]
        layer = de.DistributedEmbedding(layers, dtype="mixed_bfloat16")
        ids = tf.constant([1 + transport.rank])
        with tf.GradientTape() as tape:
            outputs = layer([ids, ids])
            loss = tf.add_n([tf.reduce_sum(tf.cast(out, tf.float32)) for out in outputs])
        assert {out.dtype for out in outputs} == {tf.bfloat16}
        variables = layer.trainable_variables
        gradients = de.DistributedGradientTape(tape).gradient(loss, variables)
        keras.optimizers.SGD(1.0).apply_gradients(zip(gradients, variables, strict=True))
        return layer.get_weights(all_ranks=True)

    for table, custom in checked(run_world(2, rank, monkeypatch)):
        np.testing.assert_array_equal(table[:4, 0], [1, 0.5, 0.5, 1])
        np.testing.assert_array_equal(custom[:4, 0], [1, 0, 0, 1])


def test_a_tape_lets_stock_optimizers_train_tables_until_the_job_ends():
    sok.shutdown()
    stock = keras.optimizers.SGD.__mro__
    before = [vars(cls).get("apply") for cls in stock]
    sok.Init()
    layer = de.Embedding(10, 2, embeddings_initializer="ones")

    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([[1]])))
        return de.DistributedGradientTape(tape).gradient(loss, layer.trainable_variables)

    for _ in range(2):
        found = gradients()
        keras.optimizers.SGD(0.25).apply_gradients(zip(found, layer.trainable_variables, strict=True))
    np.testing.assert_array_equal(layer.get_weights()[0][:2], [[1, 1], [0.5, 0.5]])
    assert [vars(cls).get("apply") for cls in stock] != before
    sok.shutdown()
    assert [vars(cls).get("apply") for cls in stock] == before


def model_of(of):
    names = de.for_keras(of)
    ids, more = of.Input((2,), dtype="int64"), of.Input((1,), dtype="int64")
    layers = [names.Embedding(100, 4, combiner="sum"), of.layers.Embedding(80, 3)]
    arguments = {"strategy": "memory_balanced", "column_slice_threshold": 200}
    first, second = names.DistributedEmbedding(layers, name="tables", **arguments)([ids, more])
    joined = of.layers.Concatenate()([first, of.layers.Flatten()(second)])
    return of.Model([ids, more], of.layers.Dense(1)(joined))


@BOTH
def test_12_a_model_is_saved_with_what_its_optimizer_knows_of_rows(of, tmp_path):
    model = model_of(of)
    model.compile(de.DistributedOptimizer(of.optimizers.Adagrad(0.5)), "mse")
    ids, labels = [np.arange(16).reshape(8, 2), np.arange(8).reshape(8, 1)], np.ones([8, 1])
    model.fit(ids, labels, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = of.models.load_model(tmp_path / "model.keras")
    layer = loaded.get_layer("tables")
    assert layer.strategy.column_slice_threshold == 200 and layer.strategy.strategy == "basic"  # of one worker
    for one in (model, loaded):
        one.fit(ids, labels, verbose=0, shuffle=False)
    np.testing.assert_allclose(loaded.predict(ids, verbose=0), model.predict(ids, verbose=0), rtol=1e-5)


@BOTH
def test_15_an_integer_lookup_is_restored(of, tmp_path):
    layer = de.for_keras(of).IntegerLookup(4)
    assert layer(tf.constant([[7, 9], [7, -2]], tf.int64)).numpy().tolist() == [[1, 2], [1, 3]]
    model = of.Sequential([of.Input((2,), dtype="int64"), layer])
    model.save(tmp_path / "model.keras")
    tf.train.Checkpoint(layer=layer).write(str(tmp_path / "checkpoint"))
    copy = type(layer).from_config(layer.get_config())
    tf.train.Checkpoint(layer=copy).read(str(tmp_path / "checkpoint")).assert_consumed()
    loaded = of.models.load_model(tmp_path / "model.keras").layers[-1]
    by_weights = type(layer)(4)
    by_weights.set_weights(layer.get_weights())
    for restored in (copy, loaded, by_weights):
        assert restored.get_vocabulary() == [-1, 7, 9, -2]
        assert restored(tf.constant([5, -2, -1, 9, 6], tf.int64)).numpy().tolist() == [4, 3, 0, 2, 0]


@BOTH
def test_keys_are_numbered_in_order_of_appearance_until_there_is_no_room(of):
    layer = de.for_keras(of).IntegerLookup(3)
    number = tf.function(lambda ids: layer(ids))
    assert number(tf.constant([[7, 9], [7, 5]], tf.int64)).numpy().tolist() == [[1, 2], [1, 3]]
    assert number(tf.constant([11, 7, -1], tf.int64)).numpy().tolist() == [0, 1, 0]
    assert layer.get_vocabulary() == [-1, 7, 9, 5]
    ragged = layer(tf.ragged.constant([[5], [], [9, 8]], dtype=tf.int64))
    assert ragged.to_list() == [[3], [], [2, 0]]
    assert layer(ragged.to_sparse()).values.numpy().tolist() == [0, 0, 0]
    extreme = de.for_keras(of).IntegerLookup(10)
    keys = [-(2**63), 2**63 - 1, -2, -3, 0]
    assert extreme(tf.constant(keys, tf.int64)).numpy().tolist() == [1, 2, 3, 4, 5]
    assert extreme.get_vocabulary() == [-1, *keys]
    # More new keys than room in one batch.
    small = de.for_keras(of).IntegerLookup(2)
    assert small(tf.constant([4, 4, 3, 2, 4, 1], tf.int64)).numpy().tolist() == [1, 1, 2, 0, 1, 0]
    assert small(tf.zeros([0, 2], tf.int64)).shape == (0, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: de.IntegerLookup(3)(tf.constant([1])), "must be int64. Received: int32"),
        (lambda: de.IntegerLookup(0), "`max_tokens` must be a whole number"),
        (lambda: de.IntegerLookup(2).set_weights([[1, 1]]), "at most 2 different keys, without -1"),
        (lambda: de.IntegerLookup(2).set_weights([[1, -1]]), "at most 2 different keys, without -1"),
        (lambda: de.Embedding(0, 4), "`input_dim` must be"),
        (lambda: de.Embedding(10, 4, combiner="sum")(tf.constant([1])), "must have an axis to combine"),
        (lambda: de.Embedding(10, 4, combiner="most"), "must be 'sum', 'mean' or 'sqrtn'"),
        (lambda: de.ConcatOneHotEmbedding([3, 4], 2)(tf.constant([[1]])), r"must be \[B, 2\]"),
        (lambda: de.DistributedEmbedding([de.Embedding(10, 4)], strategy="best"), "Unsupported shard strategy best"),
        (lambda: de.DistributedEmbedding([de.Embedding(10, 4)]).set_weights([]), "You called `set_weights"),
    ],
)
def test_what_makes_no_sense_is_refused_with_words(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@BOTH
def test_16_layers_of_both_keras_work_without_a_gpu(of):
    names = de.for_keras(of)
    layer = names.Embedding(10, 4, combiner="sum", name="plain")
    (matrix,) = matrices([(10, 4)])
    layer.set_weights([matrix])  # before any call
    same([layer(RAGGED)], [[matrix[1] + matrix[2], np.zeros(4), matrix[3]]])
    assert layer(tf.zeros([2, 3, 5], tf.int64)).shape == (2, 3, 4)
    config = layer.get_config()
    assert config["use_custom_kernel"] is True and "table" not in config
    assert names.Embedding.from_config(config).get_config() == config
    stock = of.layers.Embedding(10, 4, mask_zero=True).get_config()
    assert names.Embedding.from_config(stock).input_dim == 10
    concat = names.ConcatOneHotEmbedding([3, 4], 2)
    np.testing.assert_array_equal(concat(tf.constant([[2, 3]]))[0], np.asarray(concat.params)[[2, 6]])
    assert type(concat).from_config(concat.get_config()).feature_sizes == [3, 4]


def test_tables_that_are_offloaded_are_the_hosts_on_all_workers(monkeypatch):
    """Of table 1 each rank has two columns; rank 0 has table 0, too, and leaves table 1 to its host."""
    sizes = [(10, 4), (30, 4), (8, 4)]

    def rank(transport):
        arguments = {"column_slice_threshold": 60, "gpu_embedding_size": 95}
        layer = de.DistributedEmbedding(layers_of(sizes), **arguments)
        hosted = [config["cpu_offload"] for of_rank in layer.strategy.local_configs for config in of_rank]
        before = len(transport.collectives)
        layer([tf.constant([[1, 2]])] * 3)
        # Without a GPU all of them are in one place, and one exchange.
        assert len(transport.collectives) - before == 2
        again = type(layer).from_config(layer.get_config())
        assert [one.get_config()["table"]["on_host"] for one in again.embeddings] == [
            layer.strategy.is_offloaded(table) for table in range(3)
        ]
        return hosted, [one.embedding_variable.options.on_host for one in layer.embeddings]

    (hosted, options), others = checked(run_world(2, rank, monkeypatch))
    assert (hosted, options) == others and options == [False, True, False]
    assert sorted(hosted) == [False, False, False, True]


def test_what_has_no_table_cannot_be_on_the_host():
    collection = sok.parallel.EmbeddingCollection
    with pytest.raises(ValueError, match="`on_host` must have one for each of the 1 layers. Received: 2."):
        collection([sok.Embedding(100, 4)], on_host=[True, False])
    for layer, placements in (Doubled(3, 2), None), (sok.Embedding(100, 4), [sok.data_parallel()]):
        with pytest.raises(ValueError, match="must have a table, and no copies, to be on_host. It has: "):
            collection([layer], placements=placements, on_host=[True])
    small = collection([sok.Embedding(3, 4, "ones")], on_host=[True])
    np.testing.assert_array_equal(small([tf.constant([1])])[0], np.ones([1, 4]))
    assert small.embeddings[0].embedding_variable.options.on_host


def test_auto_places_by_what_a_step_costs(monkeypatch):
    def rank(_):
        layers = layers_of([(100, 4), (10**5, 16)])
        plan = {"machine": "cpu_2_cores", "pin": {"table_0": "table_wise(1)"}, "hotness": [1, 30, 2], "batch": 512}
        layer = de.DistributedEmbedding(layers, strategy="auto", input_table_map=[0, 1, 0], plan=plan)
        assert layer.strategy is None and layer.plan.step_ms > 0
        outputs = layer([tf.constant([[1, 2]])] * 3)
        return [table.where.kind for table in layer.plan.tables], [out.shape[1] for out in outputs]

    for kinds, widths in checked(run_world(2, rank, monkeypatch)):
        assert kinds[0] == "table_wise" and widths == [4, 16, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"strategy": "auto", "column_slice_threshold": 80},
            "`column_slice_threshold` has no effect here: 'auto' decides",
        ),
        ({"strategy": "auto", "row_slice_threshold": 80}, "`row_slice_threshold` has no effect here"),
        ({"strategy": "auto", "data_parallel_threshold": 80}, "`data_parallel_threshold` has no effect here"),
        ({"plan": {"batch": 8}}, "`plan` has no effect here: Merlin's strategies ask for no plan. .* strategy='auto'"),
    ],
)
def test_what_a_strategy_does_not_ask_for_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        de.DistributedEmbedding(layers_of([(10, 4)]), **arguments)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
def test_ids_of_the_whole_batch_need_no_exchange_of_keys(workers, strategy, monkeypatch):
    sizes, map_of, size = [(30, 8), (20, 4), (50, 6)], [2, 0, 1, 0], 12
    random = np.random.default_rng(workers)
    ids = [random.integers(0, sizes[t][0], [size, 2]) for t in map_of]
    ups = [random.normal(size=[size, sizes[t][1]]).astype(np.float32) for t in map_of]
    more = {"column_slice_threshold": 120} if strategy != "auto" else {"plan": {"machine": "cpu_2_cores", "batch": 12}}

    def rank(transport):
        layer = de.DistributedEmbedding(
            layers_of(sizes), strategy=strategy, dp_input=False, input_table_map=map_of, **more
        )
        layer.set_weights(matrices(sizes))
        held = layer.inputs_of_ranks[transport.rank]
        if strategy != "auto":
            assert held == layer.strategy.input_ids_list[transport.rank]
        part = slice(size // workers * transport.rank, size // workers * (transport.rank + 1))
        before = len(transport.collectives)
        with tf.GradientTape() as tape:
            outputs = layer([tf.ragged.constant(ids[i], dtype=tf.int64) for i in held])
            loss = tf.add_n([tf.reduce_sum(out * up[part]) for out, up in zip(outputs, ups, strict=True)])
        variables = [v for v in layer.trainable_variables if v.placement.holds(transport.rank, workers)]
        gradients = tape.gradient(loss, variables) if variables else tape.gradient(loss, layer.trainable_variables)
        made = [name.rpartition("/")[2].partition(".")[0] for name in transport.collectives[before:]]
        sok.optimizers.SGD(0.1).apply_gradients(zip(gradients, variables, strict=False))
        return [out.numpy() for out in outputs], layer.get_weights(), made, part

    results = checked(run_world(workers, rank, monkeypatch))
    for outputs, _, made, part in results:
        same(outputs, [out[part] for out in expected_of(sizes, ids, map_of)])
        assert made == ["rows", "grads"]
    wanted = matrices(sizes)
    for one, table, up in zip(ids, map_of, ups, strict=True):
        np.subtract.at(wanted[table], one, 0.1 * up[:, None])
    same(results[0][1], wanted)


@pytest.mark.parametrize("is_frozen", [False, True], ids=["none", "a frozen one"])
def test_a_worker_without_a_table_that_is_trained_takes_part_in_the_gradient(is_frozen, monkeypatch):
    (matrix,) = matrices([(10, 2)])

    def rank(transport):
        layers = [sok.Embedding(10, 2, combiner="sum"), sok.Embedding(10, 3, combiner="sum", trainable=False)]
        layers, owners = layers[: 1 + is_frozen], [sok.table_wise(0), sok.table_wise(1)][: 1 + is_frozen]
        layer = sok.parallel.EmbeddingCollection(layers, placements=owners, dp_input=False)
        layer.set_weights([matrix, np.ones([10, 3], np.float32)][: 1 + is_frozen])
        before = len(transport.collectives)
        with tf.GradientTape() as tape:
            outputs = layer([tf.constant([[1], [2]])] * len(layer.inputs_of_ranks[transport.rank]))
            loss = tf.reduce_sum(outputs[0])
        variables = layer.trainable_variables
        sok.optimizers.SGD(1.0).apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        assert len(transport.collectives) - before == 2
        return layer.get_weights()[0]

    for found in checked(run_world(2, rank, monkeypatch)):
        np.testing.assert_allclose(found[:4], matrix[:4] - [[0], [1], [1], [0]], rtol=1e-6)


@pytest.mark.parametrize(("ids", "message"), [([[9, 60]] * 4, "no row number: 60"), ([[1]] * 3, "a multiple of 2: 3")])
def test_what_is_wrong_with_the_whole_batch_is_raised_on_all_workers(ids, message, monkeypatch):
    def rank(transport):
        layer = de.DistributedEmbedding(layers_of([(30, 8), (50, 8)]), dp_input=False)
        return layer([tf.constant(ids if transport.rank == 1 else [[1]] * 4)])

    for error in run_world(2, rank, monkeypatch):
        assert isinstance(error, tf.errors.InvalidArgumentError) and message in str(error)


def test_what_cannot_bring_the_whole_batch_is_refused():
    collection = sok.parallel.EmbeddingCollection
    with pytest.raises(ValueError, match="whole on one worker or in columns, with dp_input=False. It has: row_wise"):
        collection([sok.Embedding(100, 4)], dp_input=False)
    layer = collection([sok.Embedding(100, 4)], placements=[sok.table_wise(0)], dp_input=False)
    with pytest.raises(ValueError, match=r"must have shape \[B\], or its layer a `combiner`"):
        layer([tf.constant([[1, 2]])])
    assert layer([tf.constant([1, 2])])[0].shape == (2, 4)
    regular = sok.Embedding(100, 4, embeddings_regularizer="l2")
    with pytest.raises(ValueError, match="must have no regularizer"):
        collection([regular], placements=[sok.table_wise(0)], dp_input=False)
