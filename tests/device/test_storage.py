"""Tables on a GPU that has room for few of their rows are what tables on the CPU are, whatever is done with them."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sok
from tests.sok import storage_cases
from tests.sok.rule_cases import CASES

from .conftest import GPU
from .tier_cases import COUNTS, CPU, DIM, FILL, LITTLE, RULES, Twins, assert_close, key_of, new_table


@pytest.fixture(autouse=True, scope="module")
def job():
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in storage_cases.LITTLE.items():  # of rows in a file few are in memory
            monkeypatch.setenv(name, value)
        sok.Init(seed=1)
        yield


def some(rng):
    """Numbers of keys: a few, with repeats and new ones."""
    few = [*range(12), *range(FILL - 6, FILL + 6), *range(200, 210), *rng.integers(0, FILL, 30)]
    return rng.choice(few, rng.integers(0, 60))


def many(rng):
    """More than there is room for."""
    return rng.permutation(FILL)[: rng.integers(FILL // 2, FILL)]


ACTIONS = {
    "look up": lambda twins, rng, rule: twins.look_up(some(rng)),
    "look up and make": lambda twins, rng, rule: twins.look_up(some(rng), training=True),
    "read many": lambda twins, rng, rule: twins.read(many(rng)),
    "train": lambda twins, rng, rule: twins.train(rule, some(rng)),
    "train without slots": lambda twins, rng, rule: twins.train("SGD", some(rng)),
    "assign": lambda twins, rng, rule: twins.assign(np.unique(some(rng))),
    "assign many": lambda twins, rng, rule: twins.assign(many(rng)),
    "erase": lambda twins, rng, rule: twins.erase(np.unique(some(rng))),
    "erase many": lambda twins, rng, rule: twins.erase(many(rng)),
    "save": lambda twins, rng, rule: twins.save(),
    "save what changed": lambda twins, rng, rule: twins.save(incremental=True),
    "save in the background": lambda twins, rng, rule: [
        save.result() for save in twins.save(asynchronous=True, incremental=rng.random() < 0.5)
    ],
    "restore": lambda twins, rng, rule: twins.restore(),
    "exchange": lambda twins, rng, rule: twins.exchange(int(rng.choice([60_000, LITTLE, 10**7]))),
    "check": lambda twins, rng, rule: twins.check(),
}
POLICIES = {"admission": sok.Admission(after=2), "eviction": sok.Eviction(older_than=3, every=2)}


# Programs are short already: to shrink one takes minutes.
@settings(
    max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    program=st.lists(st.sampled_from(list(ACTIONS)), min_size=6, max_size=11),
    rule=st.sampled_from(list(RULES)),
    kind=st.sampled_from(["hashed", "identity", "with policies"]),
    over_a_file=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_program_leaves_the_same_rows(tmp_path_factory, program, rule, kind, over_a_file, seed):
    options = POLICIES if kind == "with policies" else {}
    twins = Twins(tmp_path_factory.mktemp("program"), over_a_file, kind != "identity", options)
    rng = np.random.default_rng(seed)
    for action in program:
        ACTIONS[action](twins, rng, rule)
    twins.train(rule, some(rng))
    twins.read(many(rng))
    twins.check()


@pytest.mark.parametrize("over_a_file", [False, True], ids=["memory", "file"])
@pytest.mark.parametrize("rule", RULES)
def test_rows_that_go_home_and_come_again_are_trained_as_on_the_cpu(tmp_path, rule, over_a_file):
    twins, rng = Twins(tmp_path, over_a_file), np.random.default_rng(2)
    for step in range(8):
        twins.train(rule, (rng.integers(0, 250, 60) + 120 * step) % (FILL + 50))
        if step % 3 == 1:
            twins.read(np.arange(FILL))  # all others
    twins.check()
    stats = twins.tables[1].stats()
    assert stats["gpu_misses"] > 2 * FILL > 4 * stats["gpu_cache_rows"]
    assert (stats.get("bytes_read", 0) > 0) == over_a_file


@pytest.mark.parametrize("name", ["lamb", "ftrl", "amsgrad", "rowwise_adagrad", "lazy_adam_by_row", "momentum"])
def test_rules_of_every_kind_train_rows_that_go_home(name):
    twins = [new_table(device, gpu_bytes=60_000) for device in (CPU, GPU)]
    optimizers = [CASES[name].make(0.1) for _ in twins]
    for step in range(8):
        keys = tf.constant(np.random.default_rng(step).integers(0, 100, 60) + 40 * step)
        losses = []
        for table, optimizer in zip(twins, optimizers, strict=True):
            with tf.device(table.handle.device):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.square(tf.nn.embedding_lookup(table, keys) - 1.0))
                optimizer.apply_gradients([(tape.gradient(loss, table), table)])
                table.sparse_read(tf.range(400, dtype=tf.int64))
            losses.append(loss)
        np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)
    keys, rows = twins[0].export()
    np.testing.assert_array_equal(twins[1].export()[0], keys)
    np.testing.assert_allclose(twins[1].export()[1], rows, rtol=1e-4, atol=1e-5)
    assert twins[1].stats()["gpu_misses"] > len(keys)


@pytest.mark.parametrize("ways", [(GPU, GPU), (CPU, GPU), (GPU, CPU)])
def test_what_one_table_saves_another_follows(tmp_path, ways):
    table, served = (new_table(device, gpu_bytes=gpu) for device, gpu in zip(ways, (LITTLE, 45_000), strict=True))
    optimizer = sok.optimizers.Adagrad(0.1)
    table.assign(key_of(np.arange(FILL)), np.ones([FILL, DIM], np.float32))
    sok.save(tmp_path, [table], [optimizer], incremental=True)
    follower = sok.follow(tmp_path, {table.table_name: served})
    for step in range(3):
        with tf.device(table.handle.device):
            with tf.GradientTape() as tape:
                rows = tf.nn.embedding_lookup(table, tf.constant(key_of(np.arange(50) + 300 * step)))
                loss = tf.reduce_sum(tf.square(rows))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        table.erase(key_of([3, 4, 700]) + step)
        with tf.device(served.handle.device):
            served.sparse_read(key_of(np.arange(900)))  # those that will change are there
        saving = sok.save(tmp_path, [table], [optimizer], incremental=True, asynchronous=step == 1)
        if saving is not None:
            saving.result()
        assert follower.poll()
        with tf.device(served.handle.device):
            assert_close(served.sparse_read(key_of(np.arange(FILL))), table.sparse_read(key_of(np.arange(FILL))))
        assert_close(np.sort(served.export()[0]), np.sort(table.export()[0]))


@pytest.mark.parametrize("as_function", [True, False])
def test_functions_train_and_evaluate(as_function):
    told = []
    for device in (CPU, GPU):
        table, optimizer = new_table(device), sok.optimizers.Adam(0.01)
        table.assign(key_of(np.arange(FILL)), np.ones([FILL, DIM], np.float32))

        def step(keys, seen, table=table, optimizer=optimizer):
            with tf.GradientTape() as tape:
                (pooled,) = sok.group_embedding_lookup_sparse([table], [keys[:, None]], combiners="sum")
                others = sok.group_embedding_lookup([table], [keys[::-1]])[0]
                loss = tf.reduce_sum(tf.square(pooled) + others)
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
            return loss, tf.reduce_sum(table.sparse_read(seen))

        call = tf.function(step, reduce_retracing=True) if as_function else step
        with tf.device(device):
            for number in range(6):
                keys = key_of(np.random.default_rng(number).integers(0, FILL + 40, 150))
                told.append(np.array(call(tf.constant(keys), tf.constant(key_of(np.arange(FILL))))))
        told.append(table.export()[1].numpy())
    for found, expected in zip(told[7:], told[:7], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert table.stats()["gpu_misses"] > 6 * FILL / 2


def test_keras_fits_evaluates_and_predicts(tmp_path):
    ids = np.random.default_rng(0).integers(0, FILL, [300, 1, 2])

    def trained(device, storage):
        keras.utils.set_random_seed(1)
        with tf.device(device):
            options = sok.TableOptions(seed=5, storage=storage)
            layer = sok.DistributedEmbedding("mean", 2 * FILL, 4, slot_num=1, max_nnz=2, table=options)
            inputs = keras.Input([1, 2], dtype="int64")
            model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(layer(inputs))))
            model.compile(sok.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
            history = model.fit(ids, np.ones([300, 1]), batch_size=60, epochs=2, verbose=0, shuffle=False).history
            loss = model.evaluate(ids, np.ones([300, 1]), batch_size=50, verbose=0)
            return layer, [*history["loss"], loss], model.predict(ids, batch_size=50, verbose=0)

    storage = sok.Storage(gpu_bytes=60_000, memory_bytes=storage_cases.MEMORY, path=tmp_path)
    (layer, losses, told), (_, expected_losses, expected) = trained(GPU, storage), trained(CPU, None)
    table = layer.embedding_variable
    assert "GPU" in table.handle.device and table.stats()["gpu_misses"] > 600
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    np.testing.assert_allclose(told, expected, rtol=1e-3, atol=1e-5)
    assert type(layer).from_config(layer.get_config()).get_config()["table"]["storage"] == storage.get_config()


def test_a_session_trains_saves_and_restores(tmp_path):
    told = []
    for device in (CPU, GPU):
        with tf.Graph().as_default(), tf.device(device):
            table = new_table(device, name=f"of_session_{device[1:4]}")
            ids, values = tf.compat.v1.placeholder(tf.int64, [None]), tf.compat.v1.placeholder(tf.float32, [None, DIM])
            assign, exported = table.assign(ids, values), table.export()
            read = table.sparse_read(ids)
            loss = tf.reduce_sum(tf.square(tf.nn.embedding_lookup(table, ids)))
            optimizer = sok.optimizers.Adagrad(0.1)
            update = optimizer.apply_gradients([(tf.gradients(loss, [table])[0], table)])
            folder = tmp_path / device[1:4]
            with tf.compat.v1.Session(config=tf.compat.v1.ConfigProto(allow_soft_placement=True)) as session:
                session.run(tf.compat.v1.global_variables_initializer())
                session.run(assign, {ids: np.arange(FILL), values: np.ones([FILL, DIM])})
                for step in range(5):
                    feed = {ids: (np.arange(150) * 3 + 100 * step) % FILL}
                    told.append(session.run([loss, update], feed)[0])
                    told.append(session.run(read, {ids: np.arange(FILL)}))
                    if step == 2:
                        sok.save(str(folder), [table], [optimizer], session=session)
                        kept = session.run(exported)
                sok.restore(str(folder), [table], [optimizer], session=session)
                for one, other in zip(session.run(exported), kept, strict=True):
                    np.testing.assert_array_equal(one, other)
                told += list(kept)
    half = len(told) // 2
    for found, expected in zip(told[half:], told[:half], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["Adagrad", "Adam"])
def test_dumped_tables_are_loaded(tmp_path, rule):
    twins = Twins(tmp_path / "twins")
    twins.train(rule, np.arange(0, 300, 5))
    for table, optimizers in zip(twins.tables, twins.optimizers, strict=True):
        folder = str(tmp_path / table.table_name)
        sok.dump(folder, table, optimizers[rule])
        before = dict(zip(*(part.numpy().tolist() for part in table.export()), strict=True))
        with tf.device(table.handle.device):
            table.sparse_read(key_of(np.arange(FILL)))
        table.assign(key_of(np.arange(FILL)), np.zeros([FILL, DIM], np.float32))
        sok.load(folder, table, optimizers[rule])
        assert dict(zip(*(part.numpy().tolist() for part in table.export()), strict=True)) == before
    twins.train(rule, np.arange(200, 500, 5))
    twins.check()


def test_rows_that_leave_are_told_as_they_were_trained():
    for eviction in (sok.Eviction(older_than=2, every=1), sok.Eviction(norm_below=0.5, every=2)):
        told = [{}, {}]
        for found, device in zip(told, (CPU, GPU), strict=True):
            table, optimizer = new_table(device, eviction=eviction), sok.optimizers.Adam(0.05)
            table.on_evicted(
                lambda keys, rows, found=found: found.update(zip(keys.tolist(), rows.tolist(), strict=True))
            )
            for step in range(12):
                keys = np.random.default_rng(step).integers(0, 300, 40) + 10 * step
                with tf.device(device):
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_sum(tf.square(tf.nn.embedding_lookup(table, tf.constant(keys)) - 1.0))
                    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        assert told[0].keys() == told[1].keys() and len(told[0]) > 20
        for key, row in told[0].items():
            np.testing.assert_allclose(told[1][key], row, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("as_function", [True, False])
def test_tables_of_every_kind_are_one_group(as_function):
    """Some with little room, with policies, with rows that keys share, and one that is on the GPU alone."""
    shared = {"admission": sok.Admission(after=3, shared_rows=4096), "placement": sok.row_wise(hash=True)}
    kinds = [{}, {"storage": None, "dim": 5}, POLICIES, {"storage": None}, {"capacity": 9_000, **shared}, {"dim": 5}]
    told = []
    for device in (CPU, GPU):
        tables = [new_table(device, **kind) for kind in kinds]
        optimizer = sok.optimizers.Adagrad(0.1)

        def step(keys, tables=tables, optimizer=optimizer):
            ids = [keys[:, None], keys[1:, None], keys[:, None], keys[:, None], keys[::2, None], keys[:, None]]
            with tf.GradientTape() as tape:
                found = sok.group_embedding_lookup_sparse([*tables, tables[0]], [*ids, keys[5:, None]], "sum")
                loss = tf.add_n([tf.reduce_sum(tf.square(one - 1.0)) for one in found])
            optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
            return [loss, *found]

        call = tf.function(step, reduce_retracing=True) if as_function else step
        with tf.device(device):
            for number in range(9):
                keys = np.random.default_rng(number).integers(0, 150, 80) + 60 * (number // 2)
                told.append([np.array(part) for part in call(tf.constant(keys))])
        told.append([part.numpy() for table in tables for part in table.export()])
        told.append([np.array([table.stats()[name] for name in COUNTS]) for table in tables])
    half = len(told) // 2
    for found, expected in zip(told[half:], told[:half], strict=True):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert told[-1][2][COUNTS.index("evicted")] > 50 < tables[0].stats()["gpu_misses"]


def test_threads_read_while_one_trains_and_saves(tmp_path):
    table, errors = new_table(GPU, tmp_path / "rows"), []
    rows = np.random.default_rng(0).normal(size=[FILL, DIM]).astype(np.float32)
    table.assign(np.arange(FILL), rows)

    def reads(seed):
        rng = np.random.default_rng(seed)
        for _ in range(60):
            keys = rng.integers(500, FILL, 90)
            (pooled,) = sok.group_embedding_lookup_sparse([table], [tf.constant(keys)[:, None]], training=False)
            np.testing.assert_array_equal(pooled, rows[keys])
            np.testing.assert_array_equal(table.sparse_read(keys), rows[keys])

    def trains(_):
        optimizer = sok.optimizers.SGD(0.1)
        for step in range(30):
            with tf.GradientTape() as tape:
                keys = tf.constant(np.random.default_rng(step).integers(0, 500, 60))
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, keys))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
            if step % 10 == 5:
                sok.save(tmp_path / "saved", [table])

    def run(function, seed):
        try:
            with tf.device(GPU):
                function(seed)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=one) for one in [(trains, 0), (reads, 1), (reads, 2), (reads, 3)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for step in range(30):
        np.subtract.at(rows, np.random.default_rng(step).integers(0, 500, 60), 0.1)
    np.testing.assert_allclose(table.sparse_read(np.arange(FILL)), rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key_dtype", [tf.int32, tf.uint32, tf.uint64])
def test_keys_of_every_type_come_and_go(key_dtype):
    kind, contents = key_dtype.as_numpy_dtype, []
    for device in (CPU, GPU):
        table, optimizer = new_table(device, key_dtype=key_dtype), sok.optimizers.LazyAdam(0.1)
        with tf.device(device):
            for step in range(6):
                keys = kind(np.iinfo(kind).max - 1900) + np.random.default_rng(step).integers(0, 1900, 150).astype(kind)
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.square(sok.group_embedding_lookup([table], [tf.constant(keys)])[0]))
                optimizer.apply_gradients([(tape.gradient(loss, table), table)])
                table.sparse_read(table.export()[0])
        contents.append(table.export())
    for found, expected in zip(contents[1], contents[0], strict=True):
        assert_close(found, expected)


def test_a_failed_restore_changes_nothing(tmp_path):
    large, small = new_table(GPU), new_table(GPU, capacity=700, gpu_bytes=60_000)
    large.assign(np.arange(FILL), np.ones([FILL, DIM], np.float32))
    sok.save(tmp_path, [large])
    rows = np.random.default_rng(0).normal(size=[600, DIM]).astype(np.float32)
    small.assign(np.arange(600), rows)
    with tf.device(GPU):
        small.sparse_read(np.arange(600))
        with pytest.raises(tf.errors.ResourceExhaustedError, match="full: all 700 rows"):
            sok.restore(tmp_path, {large.table_name: small})
        np.testing.assert_array_equal(small.sparse_read(np.arange(600)), rows)
    np.testing.assert_array_equal(np.sort(small.export()[0]), np.arange(600))
