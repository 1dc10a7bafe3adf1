"""Initial values depend on seed, key and initializer: not on the number of workers, nor on how a table was made."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.table.initializers import BANK_ROWS
from tests.sok.threads_world import checked, run_world

NUM_KEYS, DIM = 10, 4

INITIALIZERS = [
    *("ones", "random_uniform", "random_normal", "truncated_normal", "variance_scaling"),
    *(f"{family}_{kind}" for family in ("glorot", "he", "lecun") for kind in ("uniform", "normal")),
    tf.keras.initializers.VarianceScaling(2.0, "fan_avg", "untruncated_normal", seed=3),
    tf.keras.initializers.Orthogonal(seed=3),
    lambda shape, dtype: tf.cast(tf.reshape(tf.range(tf.reduce_prod(shape)), shape), dtype),
]


def of_column(name, initializer):
    item = tf.feature_column.categorical_column_with_identity("item", NUM_KEYS)
    column = sok.feature_column.embedding_column(item, DIM, initializer=initializer)
    layer = tf_keras.layers.DenseFeatures([column], name=name)
    layer.build(None)
    return layer.trainable_weights[0]


def share():
    return -(-NUM_KEYS // sok.size())


def v1_table(name, initializer):
    with tf.compat.v1.variable_scope("", initializer=initializer):
        return sok.deeprec.get_embedding_variable(name, DIM, capacity=NUM_KEYS)


WAYS = {
    "hashed": lambda name, i: sok.EmbeddingVariable(DIM, NUM_KEYS, name=name, initializer=i),
    "row numbers": lambda name, i: sok.EmbeddingVariable(
        DIM, share(), name=name, initializer=i, hashed=False, num_keys=NUM_KEYS
    ),
    "on one worker": lambda name, i: sok.EmbeddingVariable(DIM, NUM_KEYS, name=name, initializer=i, owner=0),
    "variable": lambda name, i: sok.Variable(shape=(NUM_KEYS, DIM), name=name, initializer=i),
    "localized": lambda name, i: sok.Variable(shape=(NUM_KEYS, DIM), name=name, initializer=i, mode="localized:0"),
    "dynamic": lambda name, i: sok.DynamicVariable(DIM, name=name, initializer=i, max_capacity=NUM_KEYS),
    # Not by `embedding_variable`: a lock of the process keeps its threads, which are ranks here, from doing it at once.
    "layer": lambda name, i: sok.All2AllDenseEmbedding(
        NUM_KEYS, DIM, 1, 1, embedding_initializer=i, name=name
    )._make_table(),
    "column": of_column,
    "of DeepRec": v1_table,
}


def rows_by_rank(size, ways, monkeypatch):
    """Of each rank, for each way and initializer, the initial rows of all keys."""

    def program(transport):
        tables = [make(f"values_{n}", i) for make in ways for n, i in enumerate(INITIALIZERS)]
        # Not by sparse_read, which a dynamic variable makes rows with.
        return np.stack([sok.EmbeddingVariable.sparse_read(t, np.arange(NUM_KEYS)) for t in tables])

    return checked(run_world(size, program, monkeypatch))


@pytest.fixture(autouse=True)
def one_process():
    sok.shutdown()
    sok.Init()
    yield
    sok.shutdown()


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_the_same_for_any_number_of_workers(way, monkeypatch):
    (alone,) = rows_by_rank(1, [WAYS[way]], monkeypatch)
    assert len({row.tobytes() for row in alone}) == len(INITIALIZERS)
    for size in (2, 3):
        for rows in rows_by_rank(size, [WAYS[way]], monkeypatch):
            np.testing.assert_array_equal(rows, alone)


def test_ways_that_say_the_same_give_the_same_rows(monkeypatch):
    def spread(way):
        (rows,) = rows_by_rank(1, [WAYS[way]], monkeypatch)
        return rows[:11].std(axis=(1, 2))  # names differ, and so do values

    for way in WAYS:
        np.testing.assert_allclose(spread(way), spread("hashed"), rtol=0.5)


@pytest.mark.parametrize("initializer", ["glorot_uniform", tf.keras.initializers.HeNormal()])
def test_a_scale_by_the_number_of_rows_wants_that_number(initializer):
    with pytest.raises(ValueError, match="max_capacity.*random_normal"):
        sok.DynamicVariable(16, initializer=initializer)
    assert sok.DynamicVariable(16, initializer=initializer, max_capacity=100).capacity == 100
    by_row = tf.keras.initializers.VarianceScaling(mode="fan_out")
    assert np.abs(sok.DynamicVariable(16, initializer=by_row).sparse_read([1, 2])).max() > 0.01


def test_deeprecs_tables_are_scaled_as_deeprec_scales_them():
    with tf.compat.v1.variable_scope("", initializer=tf.compat.v1.glorot_uniform_initializer()):
        table = sok.deeprec.get_embedding_variable("scaled", 16)
        of_a_size = sok.deeprec.get_embedding_variable("of_a_size", 16, capacity=84)
    limit = (6 / (BANK_ROWS + 16)) ** 0.5
    assert (table._initializer_spec.a, table._initializer_spec.b) == pytest.approx((-limit, limit))
    assert of_a_size._initializer_spec.b == pytest.approx((6 / 100) ** 0.5)


def test_a_column_takes_the_ids_of_its_categorical_column_and_no_others(monkeypatch):
    def program(transport):
        table = of_column("legal", "ones")
        table.sparse_read(tf.constant([NUM_KEYS - 1], tf.int64))
        return table.sparse_read(tf.constant([NUM_KEYS + 1], tf.int64))

    for size in (1, 2, 3):
        for error in run_world(size, program, monkeypatch):
            assert isinstance(error, tf.errors.InvalidArgumentError) and f"key {NUM_KEYS + 1}" in error.message


def test_a_second_run_in_a_process_is_the_first_again(tmp_path):
    def run(path):
        sok.shutdown()
        sok.Init(seed=1)
        tables = [sok.EmbeddingVariable(2, 10, name="again"), sok.EmbeddingVariable(2, 10, name="again")]
        tables += [sok.DynamicVariable(2), sok.Variable(shape=(5, 2), initializer="random_normal")]
        optimizers = [sok.optimizers.Adam(0.1) for _ in range(2)]
        with tf.GradientTape() as tape:
            loss = sum(
                tf.reduce_sum(sok.lookup_sparse(t, tf.ragged.constant([[1, 2]]), combiners="sum")) for t in tables
            )
        rows = np.stack([sok.EmbeddingVariable.sparse_read(t, [3, 4]) for t in tables])
        optimizers[1].apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
        sok.save(str(path), tables[:2], optimizers=[optimizers[1]])
        return [t.table_name for t in tables], [o._slot_set for o in optimizers], rows, tables

    names, slot_sets, rows, tables = run(tmp_path / "first")
    assert names == ["again", "again_1", "sok_dynamic_Variable_0", "sok_static_Variable_0"]
    assert slot_sets == ["Adam", "Adam_1"]
    names_again, slot_sets_again, rows_again, tables_again = run(tmp_path / "second")
    assert (names_again, slot_sets_again) == (names, slot_sets)
    np.testing.assert_array_equal(rows_again, rows)
    sok.restore(str(tmp_path / "first"), tables_again[:2])


def test_names_are_given_out_once_though_many_threads_ask():
    names = sok.base.names.Names()
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        given = list(pool.map(lambda _: names.take("table", "a"), range(200)))
    assert sorted(given) == sorted(["a", *(f"a_{n}" for n in range(1, 200))])
    assert names.take("optimizer", "a") == "a" and names.take("table", "a_1") == "a_1_1"
