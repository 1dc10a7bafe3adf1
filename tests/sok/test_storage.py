"""Tables over a file are what tables in memory are, bit for bit, whatever is done with them."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sok
from tests.sok.checkpoint_cases import contents
from tests.sok.storage_cases import FILL, LITTLE, MEMORY, RULES, SLOTS, Twins, key_of, least_bytes, new_table


@pytest.fixture(autouse=True, scope="module")
def job():
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in LITTLE.items():
            monkeypatch.setenv(name, value)
        sok.Init(seed=1)
        yield


def some(rng, many):
    """Numbers of keys: a few, with repeats and new ones, or more distinct ones than there is room for."""
    if many:
        return rng.permutation(FILL)[: rng.integers(FILL // 2, FILL)]
    return rng.choice([*range(12), *range(FILL - 6, FILL + 6), *range(200, 210)], rng.integers(0, 40))


def one_of(rng, rules):
    return rules[rng.integers(len(rules))]


ACTIONS = {
    "look up": lambda twins, rng, rules: twins.look_up(some(rng, False)),
    "look up many": lambda twins, rng, rules: twins.look_up(some(rng, True)),
    "look up and make": lambda twins, rng, rules: twins.look_up(some(rng, False), training=True),
    "train": lambda twins, rng, rules: twins.train(one_of(rng, rules), some(rng, False)),
    "train many": lambda twins, rng, rules: twins.train(one_of(rng, rules), some(rng, True)),
    "assign": lambda twins, rng, rules: twins.assign(np.unique(some(rng, False))),
    "erase": lambda twins, rng, rules: twins.erase(np.unique(some(rng, rng.random() < 0.2))),
    "save": lambda twins, rng, rules: twins.save(),
    "save what changed": lambda twins, rng, rules: twins.save(incremental=True),
    "save in the background": lambda twins, rng, rules: [
        save.result() for save in twins.save(asynchronous=True, incremental=rng.random() < 0.5)
    ],
    "exchange": lambda twins, rng, rules: twins.exchange(),
}
POLICIES = {"admission": sok.Admission(after=2), "eviction": sok.Eviction(older_than=3, every=2)}


# Programs are short already: to shrink one takes minutes.
@settings(
    max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    program=st.lists(st.sampled_from(list(ACTIONS)), min_size=5, max_size=9),
    rules=st.lists(st.sampled_from(list(RULES)), min_size=1, max_size=2, unique=True),
    kind=st.sampled_from(["hashed", "identity", "with policies"]),
    seed=st.integers(0, 2**31),
)
def test_any_program_leaves_the_same_rows(tmp_path_factory, program, rules, kind, seed):
    options = POLICIES if kind == "with policies" else {}
    twins = Twins(tmp_path_factory.mktemp("program"), 64, kind != "identity", options)
    rng = np.random.default_rng(seed)
    for action in program:
        ACTIONS[action](twins, rng, rules)
    twins.train(rules[0], some(rng, True))
    twins.check()
    assert twins.tables[1].stats()["bytes_written"] > 0


@pytest.mark.parametrize(
    ("dim", "rule"), [(1, "Adagrad"), (3, "own rule"), (16, "SGD"), (16, "LazyAdam"), (64, "Adam"), (64, "Adagrad")]
)
def test_rows_of_any_length_are_trained_in_waves(tmp_path, dim, rule):
    row_bytes, rows = 4 * dim * (1 + SLOTS[rule]), 5_000
    twins = Twins(tmp_path, dim, rows=rows)
    for step in range(3):
        twins.train(rule, np.random.default_rng(step).permutation(rows)[: rows - 50])
        twins.train(rule, np.arange(step, step + 20))
    twins.look_up(np.arange(rows))
    twins.check()
    stats = twins.tables[1].stats()
    assert stats["misses"] > rows and stats["bytes_read"] > 0 and stats["bytes_written"] > 2 * rows * row_bytes
    assert stats["cache_rows"] < rows / 2
    assert stats["bytes_in_file"] < 2.3 * 8192 * (row_bytes + 16) + 2**18  # which are reserved for 4,096 rows at a time


def test_a_second_optimizer_widens_rows_that_are_in_the_file(tmp_path):
    twins = Twins(tmp_path, dim=64)
    for rule in ("SGD", "Adagrad", "Adam", "LazyAdam"):
        twins.train(rule, np.arange(0, FILL, 3))
        twins.check()


def test_training_goes_on_while_rows_in_the_file_are_saved(tmp_path):
    rows = 6_000
    twins = Twins(tmp_path, dim=64, rows=rows)
    twins.train("Adagrad", np.arange(0, rows, 2))
    before = contents(twins.tables[0])
    saves = twins.save(asynchronous=True)
    for step in range(3):
        twins.train("Adagrad", np.arange(step * 300, step * 300 + 300))
    assert len(saves) == 2
    for save in saves:
        save.result()
    twins.check()
    assert twins.tables[1].stats()["cache_rows"] < rows
    restored = new_table(tmp_path / "restored", 64, rows)
    sok.restore(twins.saves[1], {twins.tables[1].table_name: restored}, sok.optimizers.Adagrad(0.1))
    assert contents(restored) == before


def test_a_segment_may_hold_more_rows_than_the_cache(tmp_path):
    twins = Twins(tmp_path, dim=16)
    ids = tf.RaggedTensor.from_row_lengths(twins.keys(np.arange(FILL)), [FILL - 1, 0, 1])
    twins.each(lambda table, _: sok.lookup_sparse(table, ids, combiners="sum"))
    twins.each(lambda table, _: sok.lookup_sparse(table, ids, combiners="mean"))
    assert twins.tables[1].stats()["cache_rows"] < FILL


def test_evaluation_between_steps_makes_and_changes_nothing(tmp_path):
    twins = Twins(tmp_path)
    for step in range(3):
        twins.train("Adam", np.arange(step * 5, 40))
        twins.look_up(np.arange(FILL + 500))
        twins.each(lambda table, _: table.sparse_read(twins.keys([0, 5, FILL + 10])))
    twins.check()
    assert twins.tables[1].stats()["rows"] == FILL


def test_the_least_memory_is_enough_and_less_is_refused(tmp_path):
    def make(memory_bytes):
        return sok.EmbeddingVariable(3, 10**5, storage=sok.Storage(memory_bytes=memory_bytes, path=tmp_path))

    least = least_bytes(make, lambda table: None)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f"memory_bytes of at least {least}.*Received: {least - 1}"
    ):
        make(least - 1)
    assert make(least).stats()["cache_rows"] == 16
    with_rows = least_bytes(make, lambda table: table.assign(np.arange(5000), np.ones([5000, 3])))
    table = make(with_rows)
    table.assign(np.arange(5000), np.ones([5000, 3]))
    assert least < with_rows and table.stats()["bytes_in_memory"] <= with_rows
    assert table.sparse_read(np.arange(5000)).numpy().min() == 1.0


def test_without_tests_it_keeps_two_thousand_rows(tmp_path, monkeypatch):
    for name in LITTLE:
        monkeypatch.delenv(name)
    make = lambda memory_bytes: sok.EmbeddingVariable(  # noqa: E731
        3, 10**5, storage=sok.Storage(memory_bytes=memory_bytes, path=tmp_path)
    )
    least = least_bytes(make, lambda table: None)
    assert make(least).stats()["cache_rows"] == 2048 and least > 2**20


def test_rows_whose_keys_leave_no_memory_are_refused_before_anything_is_stored(tmp_path):
    storage = sok.Storage(memory_bytes=2**21, path=tmp_path)
    table = sok.EmbeddingVariable(3, 10**6, seed=5, name="crowded", storage=storage)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="'crowded'.*memory_bytes=2097152.*at least [0-9]"):
        for first in range(0, 10**6, 1000):
            table.assign(np.arange(first, first + 1000), np.full([1000, 3], first, np.float32))
    assert 10_000 < first < 500_000 and int(table.num_rows()) == first
    for begin in range(0, first, 5000):
        keys = np.arange(begin, min(begin + 5000, first))
        np.testing.assert_array_equal(table.sparse_read(keys).numpy()[:, 0], keys // 1000 * 1000)


def test_what_was_in_memory_and_what_was_not_is_counted(tmp_path):
    table = new_table(tmp_path, dim=16)
    table.assign(key_of(np.arange(FILL)), np.ones([FILL, 16]))
    room = table.stats()["cache_rows"]
    assert 16 <= room < FILL / 2
    read = lambda numbers: table.sparse_read(key_of(numbers))  # noqa: E731
    read(np.arange(10))
    read(np.arange(10))  # now in memory, whatever the first call did
    before = table.stats()
    read(np.tile(np.arange(10), 2))
    after = table.stats()
    come = {name: after[name] - before[name] for name in after}
    assert (come["hits"], come["misses"], come["bytes_read"]) == (10, 0, 0)
    read(np.arange(FILL))
    come = {name: count - after[name] for name, count in table.stats().items()}
    assert come["misses"] >= FILL - room and come["bytes_read"] > 0
    assert come["bytes_written"] == 0  # nothing had changed
    stats = table.stats()
    assert stats["rows_in_memory"] <= stats["cache_rows"] == room
    assert stats["bytes_in_memory"] <= table.options.storage.memory_bytes
    assert FILL * 64 <= stats["bytes_in_file"] <= 1.8 * 4096 * 80 + 2**17
    assert set(sok.EmbeddingVariable(2, 10).stats()) == {"rows", "candidates", "made", "refused", "evicted"}


def test_the_same_calls_leave_the_same_rows_in_memory(tmp_path):
    def counts():
        table, rng = new_table(tmp_path, 16), np.random.default_rng(3)
        table.assign(key_of(np.arange(FILL)), np.ones([FILL, 16]))
        for _ in range(10):
            table.sparse_read(key_of(rng.geometric(0.01, 300) % FILL))
        return table.stats()

    assert counts() == counts()


def test_a_layer_trains_over_a_file(tmp_path):
    import keras

    def trained(**table):
        keras.utils.set_random_seed(1)
        options = sok.TableOptions(seed=5, **table)
        layer = sok.DistributedEmbedding("mean", 2 * FILL, 64, slot_num=1, max_nnz=8, table=options)
        model = keras.Sequential(
            [keras.Input([1, 8], dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)]
        )
        model.compile(sok.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
        ids = np.random.default_rng(0).integers(0, FILL - 1, [1600, 1, 8])
        model.fit(ids, np.ones([1600, 1]), batch_size=800, epochs=2, verbose=0, shuffle=False)
        model.evaluate(ids[:50], np.ones([50, 1]), verbose=0)
        return layer

    storage = sok.Storage(memory_bytes=MEMORY, path=tmp_path)
    layer = trained(storage=storage)
    assert contents(layer.embedding_variable) == contents(trained().embedding_variable)
    assert layer.embedding_variable.stats()["bytes_written"] > 0
    assert type(layer).from_config(layer.get_config()).get_config()["table"]["storage"] == storage.get_config()


def test_scalars_tell_of_the_file(tmp_path):
    table = new_table(tmp_path / "rows", 16)
    table.assign(key_of(np.arange(FILL)), np.ones([FILL, 16]))
    scalars = sok.callbacks.TableScalars(tmp_path / "logs", tables=table)
    table.sparse_read(key_of(np.arange(FILL)))
    told = {tag.split("/")[2]: value for tag, value in scalars.write(1).items()}
    stats = table.stats()
    assert told["bytes_in_memory"] == stats["bytes_in_memory"] and told["bytes_in_file"] == stats["bytes_in_file"]
    assert 0 < told["bytes_read"] <= stats["bytes_read"] and 0 <= told["hit_rate"] < 0.9
    assert "candidates" not in told and "hit_rate" not in {tag.split("/")[2] for tag in scalars.write(2)}
