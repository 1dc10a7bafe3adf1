"""Rows of tables over files are read ahead of their step: results are the same to the bit, and steps read nothing."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sok
from sok.lookup.lookup import lookup_rows
from tests.messages import saying
from tests.sok.ahead_cases import BETWEEN, OPTIMIZERS, compare
from tests.sok.checkpoint_cases import contents
from tests.sok.storage_cases import FILL, LITTLE, MEMORY, key_of, new_table
from tests.sok.test_storage_faults import damage


@pytest.fixture(autouse=True, scope="module")
def job():
    sok.Init(seed=1)


@pytest.fixture(autouse=True)
def little(monkeypatch):
    for name, value in LITTLE.items():
        monkeypatch.setenv(name, value)


def with_frames(monkeypatch, count):
    monkeypatch.setenv("SOK_STORAGE_FRAMES", str(count))


def test_any_program_is_the_synchronous_loop(tmp_path_factory, monkeypatch):
    with_frames(monkeypatch, 9)
    read = []

    @settings(
        max_examples=8,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        in_function=st.booleans(),
        depth=st.integers(1, 3),
        between=st.lists(st.sampled_from(BETWEEN), min_size=2, max_size=5),
        seed=st.integers(0, 99),
        schedule=st.sampled_from([{}, {"rows": True}]),
    )
    def programs(optimizer, in_function, depth, between, seed, schedule):
        folder = tmp_path_factory.mktemp("ahead")
        program = compare(optimizer, in_function, depth, between, folder, seed=seed, kind="in a file", **schedule)
        read.append(program.tables[0].stats()["read_ahead"])

    programs()
    assert sum(count > 0 for count in read) > len(read) / 2


def filled(folder, dim=16, rows=FILL):
    """A table with rows, and what they are."""
    table = new_table(folder, dim, rows)
    values = np.random.default_rng(2).normal(size=[rows, dim]).astype(np.float32)
    table.assign(key_of(np.arange(rows)), values)
    return table, values


def trained(table, optimizer, batches, **schedule):
    """Trains; gives what each step has counted: hits, misses, and rows that were read ahead until it ended."""

    @tf.function(reduce_retracing=True)
    def step(ids, ticket):
        with tf.GradientTape() as tape, ticket:
            loss = tf.reduce_sum(tf.square(lookup_rows(table, ids)))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    def now():
        stats = table.stats()
        return np.array([stats.get(name, 0) for name in ("hits", "misses", "read_ahead")])

    counts = [now()]
    for ids, ticket in sok.ahead(batches, lambda ids: lookup_rows(table, ids), **schedule):
        step(ids, ticket)
        counts.append(now())
    return np.diff(counts, axis=0)


def some_batches(count, keys, rows=FILL):
    rng = np.random.default_rng(7)
    return [tf.constant(key_of(rng.permutation(rows)[:keys])) for _ in range(count)]


@pytest.mark.parametrize("depth", [1, 3])
def test_steps_read_nothing_of_what_has_room(tmp_path, monkeypatch, depth):
    with_frames(monkeypatch, 150 * (depth + 1))
    table, _ = filled(tmp_path)
    optimizer = sok.optimizers.Adagrad(0.1)
    trained(table, optimizer, [tf.constant(key_of([1]))])  # makes the accumulators, and reads all rows for that
    counts = trained(table, optimizer, some_batches(20, 100), depth=depth)
    # A row of this step that was updated is kept for the next one no longer, and may have left by then.
    assert counts[:, 1].sum() <= 20 and counts[:, :2].sum() == 20 * 200  # for the lookup, and for the update
    assert counts[:, 2].sum() > 20 * 100 / 3


def test_a_batch_that_is_larger_than_the_cache_is_read_in_part(tmp_path, monkeypatch):
    with_frames(monkeypatch, 100)
    table, _ = filled(tmp_path)
    other, _ = filled(None)
    counts = []
    for one in (table, other):
        optimizer = sok.optimizers.Adagrad(0.1)
        trained(one, optimizer, some_batches(2, 10))
        counts.append(trained(one, optimizer, some_batches(6, 700)))
    assert contents(table) == contents(other)
    counts = counts[0]
    assert (counts[:, 2] <= 2 * 50).all() and counts[:, 2].sum() > 0  # half of the cache, of at most two batches


def test_a_damaged_row_is_an_error_of_its_own_step(tmp_path):
    table, values = filled(tmp_path)
    table.assign(key_of(np.arange(300, FILL)), values[300:])  # puts the first ones out
    damage(tmp_path, values[17])
    batches = [tf.constant(key_of(numbers)) for numbers in ([3, 4], [5, 17, 6], [7, 8], [17], [5, 6])]
    said = []
    for ids, ticket in sok.ahead(batches, lambda ids: lookup_rows(table, ids), depth=4):
        try:
            with ticket:
                lookup_rows(table, ids)
            said.append("fine")
        except tf.errors.DataLossError as error:
            assert str(int(key_of(17))) in str(error) and table.table_name in str(error)
            said.append("damaged")
    assert said == ["fine", "damaged", "fine", "damaged", "fine"]
    with pytest.raises(tf.errors.DataLossError, match=saying(table.table_name, "damaged")):
        table.export()
    np.testing.assert_array_equal(table.sparse_read(key_of([5, 18])).numpy(), values[[5, 18]])


def test_keys_without_a_row_get_none_before_their_step(tmp_path):
    table, _ = filled(tmp_path)
    pipeline = iter(sok.ahead(some_batches(9, 50, 2 * FILL), lambda ids: lookup_rows(table, ids), depth=4))
    for _ in range(3):
        next(pipeline)
    assert int(table.num_rows()) == FILL and int(table.ids_seen) == 0


def test_a_lookup_of_tables_in_memory_has_no_such_op(tmp_path):
    tables = [new_table(folder, 3) for folder in (None, tmp_path)]
    for table, expected in zip(tables, (0, 1), strict=True):
        pipeline = sok.ahead(some_batches(1, 5), lambda ids, table=table: lookup_rows(table, ids))
        next(iter(pipeline))
        operations = [op.type for op in pipeline._pipeline.plan._send.graph.get_operations()]
        assert operations.count("Sok>ReadAhead") == expected


def test_fit_is_plain_fit_to_the_bit(tmp_path, monkeypatch):
    with_frames(monkeypatch, 300)
    numbers = itertools.count()

    def fitted(is_ahead):
        keras.utils.set_random_seed(1)
        storage = sok.Storage(memory_bytes=MEMORY, path=tmp_path / str(next(numbers)))
        layer = sok.DistributedEmbedding(
            "mean", 2 * FILL, 16, slot_num=1, max_nnz=8, table=sok.TableOptions(seed=5, storage=storage)
        )
        inputs = keras.Input([1, 8], dtype="int64")
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(layer(inputs))))
        model.compile(sok.DistributedOptimizer("adagrad"), "mse")
        ids = np.random.default_rng(0).integers(0, FILL, [320, 1, 8])
        data = tf.data.Dataset.from_tensor_slices((ids, np.ones([320, 1]))).batch(16)
        wrapped = sok.prefetch(data, model) if is_ahead else data
        history = model.fit(wrapped, epochs=3, verbose=0)
        told = model.predict(wrapped, verbose=0)
        stats = layer.embedding_variable.stats()
        return [history.history, told.tobytes(), contents(layer.embedding_variable)], stats

    (plain, without), (early, ahead) = fitted(False), fitted(True)
    assert plain == early
    assert without["read_ahead"] == 0 < ahead["read_ahead"] and ahead["misses"] < without["misses"] / 2
