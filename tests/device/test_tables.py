"""Tables on a GPU: saving, restoring, and all that looks at one from outside, as on the CPU."""

import gc

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.table import state as table_state
from tests.matrix.own_rule import Damped

from .conftest import GPU

CPU = "/CPU:0"
DIM = 5
KEYS = 60
OPTIMIZERS = ("SGD", "Adagrad", "LazyAdam", "Adam", "RowWiseAdam")
ACROSS = [(GPU, CPU), (CPU, GPU)]
WAYS = [(GPU, GPU), *ACROSS]


def table_on(device, name, **arguments):
    with tf.device(device):
        table = sok.EmbeddingVariable(DIM, arguments.pop("capacity", 500), seed=3, name=name, **arguments)
    assert device.strip("/") in table.handle.device
    return table


def losses_of(table, optimizer, seed, steps=3):
    """The losses of some steps, few of which touch the same rows."""
    rng = np.random.default_rng(seed)
    losses = []
    with tf.device(table.handle.device):
        for _ in range(steps):
            keys = tf.cast(rng.integers(0, KEYS, 20), table.key_dtype)
            with tf.GradientTape() as tape:
                rows = sok.group_embedding_lookup([table], [keys])[0]
                loss = tf.reduce_sum(tf.square(rows - 0.1))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
            losses.append(float(loss))
    return losses


def content_of(table, slot_set=None):
    """{key: (row, slots)}"""
    keys, rows = (tensor.numpy() for tensor in table.export())
    if slot_set is None:
        return dict(zip(keys.tolist(), rows, strict=True))
    slot_keys, slots, _ = (tensor.numpy() for tensor in table.slots(slot_set))
    np.testing.assert_array_equal(slot_keys, keys)
    return {k: np.concatenate([r, s]) for k, r, s in zip(keys.tolist(), rows, slots, strict=True)}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, values in found.items():
        np.testing.assert_allclose(values, expected[key], rtol=1e-5, atol=1e-7, err_msg=str(key))


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("saved_on", "restored_on"), WAYS)
def test_restored_tables_go_on_wherever_they_are(tmp_path, saved_on, restored_on, name, hashed):
    table = table_on(saved_on, "moved", hashed=hashed)
    optimizer = getattr(sok.optimizers, name)(0.1)
    losses_of(table, optimizer, 1)
    sok.save(tmp_path, [table], [optimizer])
    second, other = table_on(restored_on, "moved_here", hashed=hashed), getattr(sok.optimizers, name)(0.1)
    second.assign(tf.constant([499], tf.int64), np.ones([1, DIM], np.float32))  # which the checkpoint does not have
    sok.restore(tmp_path, {table.table_name: second}, [other])
    assert restored_on.strip("/") in second.handle.device
    sets = table_state.slot_sets(table)
    assert [(s.name, s.rule) for s in sets] == [(optimizer.slot_set, optimizer.rule)]
    assert [(s.rule, s.num_slots) for s in table_state.slot_sets(second)] == [(s.rule, s.num_slots) for s in sets]
    assert_same(content_of(second, other.slot_set), content_of(table, optimizer.slot_set))
    assert int(second.size()) == int(table.size())
    np.testing.assert_allclose(losses_of(second, other, 2), losses_of(table, optimizer, 2), rtol=1e-5)
    assert_same(content_of(second, other.slot_set), content_of(table, optimizer.slot_set))


@pytest.mark.parametrize(("saved_on", "restored_on"), ACROSS)
def test_a_chain_of_deltas_is_read_wherever_it_was_written(tmp_path, saved_on, restored_on):
    table, optimizer = table_on(saved_on, "chained"), sok.optimizers.Adam(0.1)
    losses_of(table, optimizer, 1)
    sok.save(tmp_path, [table], [optimizer])
    losses_of(table, optimizer, 2)
    table.erase(table.export()[0][:3])
    sok.save(tmp_path, [table], [optimizer], incremental=True)
    assert sum(file.rows for file in sok.checkpoint.read_manifest(tmp_path).files) < int(table.size())
    second, other = table_on(restored_on, "chained_here"), sok.optimizers.Adam(0.1)
    sok.restore(tmp_path, {table.table_name: second}, [other])
    assert_same(content_of(second, other.slot_set), content_of(table, optimizer.slot_set))
    np.testing.assert_allclose(losses_of(second, other, 3), losses_of(table, optimizer, 3), rtol=1e-4)


@pytest.mark.parametrize(("trained_on", "served_on"), ACROSS)
def test_a_table_follows_one_that_is_trained_elsewhere(tmp_path, trained_on, served_on):
    table, optimizer, served = (
        table_on(trained_on, "leads"),
        sok.optimizers.Adagrad(0.1),
        table_on(served_on, "follows"),
    )
    sok.save(tmp_path, [table], [optimizer], incremental=True)
    follower = sok.follow(tmp_path, {table.table_name: served})
    for seed in range(2):
        losses_of(table, optimizer, seed)
        table.erase(table.export()[0][:2])
        sok.save(tmp_path, [table], [optimizer], incremental=True)
        assert follower.poll()
        assert_same(content_of(served), content_of(table))
    assert not follower.poll()


def test_a_failed_restore_changes_nothing(tmp_path):
    table = table_on(GPU, "large")
    table.assign(tf.range(100, dtype=tf.int64), np.ones([100, DIM], np.float32))
    sok.save(tmp_path, [table])
    small = table_on(GPU, "small", capacity=50)
    small.assign(tf.constant([7], tf.int64), np.full([1, DIM], 2.0, np.float32))
    with pytest.raises(tf.errors.ResourceExhaustedError, match="full"):
        sok.restore(tmp_path, {table.table_name: small})
    assert_same(content_of(small), {7: np.full(DIM, 2.0)})


@pytest.mark.parametrize("key_dtype", [tf.int64, tf.int32, tf.uint32, tf.uint64])
def test_keys_of_every_type_come_out_as_they_went_in(key_dtype, tmp_path):
    kind = key_dtype.as_numpy_dtype
    keys = np.array([0, 3, np.iinfo(kind).max, np.iinfo(kind).min, 5], kind)
    expected = dict(zip(keys.tolist(), np.arange(5 * DIM, dtype=np.float32).reshape(5, DIM), strict=True))
    table = table_on(GPU, "typed", key_dtype=key_dtype)
    table.assign(keys, np.arange(5 * DIM, dtype=np.float32).reshape(5, DIM))
    assert_same(content_of(table), expected)
    assert int(table.size()) == len(expected)
    sok.save(tmp_path, [table])
    assert int(table.erase(keys[1:3])) == 2
    assert int(table.erase(keys[1:3])) == 0
    sok.restore(tmp_path, [table])
    assert_same(content_of(table), expected)


def test_calls_of_a_table_in_a_function(device):
    table = table_on(device, "in_function")

    @tf.function
    def step(keys, rows):
        table.assign(keys, rows)
        erased = table.erase(keys[:1])
        return erased, table.size(), *table.export()

    erased, size, keys, rows = step(tf.constant([4, 2, 9], tf.int64), tf.ones([3, DIM]))
    assert (int(erased), int(size)) == (1, 2)
    np.testing.assert_array_equal(keys, [2, 9])
    np.testing.assert_array_equal(rows, np.ones([2, DIM]))
    table.reserve(400)
    num_new = table.restore_rows([2, 3], np.ones([2, DIM]), np.ones([2, DIM]), slot_set="Adagrad", rule="adagrad")
    assert int(num_new) == 1
    assert content_of(table, "Adagrad").keys() == {2, 9, 3}
    with pytest.raises(tf.errors.InvalidArgumentError, match="can reserve 0 to 500"):
        table.reserve(501)
    with pytest.raises(tf.errors.FailedPreconditionError, match="no .*slot set 'none'"):
        table.slots("none")
    with pytest.raises(tf.errors.InvalidArgumentError, match="'adagrad' .*'lazy_adam'"):
        table.restore_rows([2], np.ones([1, DIM]), np.ones([1, 2 * DIM]), slot_set="Adagrad", rule="lazy_adam")
    with pytest.raises(tf.errors.ResourceExhaustedError, match="in_function"):
        table.assign(np.arange(600), np.ones([600, DIM], np.float32))
    assert int(table.size()) == 3
    assert "rows 3 of 500" in repr(table)


def test_keys_outside_an_identity_table(device):
    table = table_on(device, "narrow", hashed=False, num_keys=10)
    for call in (lambda: table.assign([3, 10], np.ones([2, DIM])), lambda: table.erase([-1])):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"narrow.*is outside \[0, 10\)"):
            call()
    assert int(table.size()) == 0


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
def test_dumped_tables_are_loaded(tmp_path, name):
    """The old format, with the state of the optimizer."""
    with tf.device(GPU):
        table, optimizer = sok.DynamicVariable(DIM, name="dumped"), getattr(sok.optimizers, name)(0.1)
        losses_of(table, optimizer, 1)
        sok.dump(str(tmp_path), table, optimizer)
        before = content_of(table, optimizer.slot_set if name != "SGD" else None)
        losses_of(table, optimizer, 2)
        sok.load(str(tmp_path), table, optimizer)
        after = content_of(table, optimizer.slot_set if name != "SGD" else None)
    assert_same({key: after[key] for key in before}, before)


def test_slots_of_a_rule_of_ones_own_are_refused_in_words(tmp_path):
    tables = [table_on(device, "own_rule") for device in (CPU, GPU)]
    optimizers = [Damped(0.1) for _ in tables]
    losses_of(tables[0], optimizers[0], 1, steps=4)
    sok.save(str(tmp_path), tables[0])
    restored = {tables[0].table_name: tables[1]}
    for call in (lambda: losses_of(tables[1], optimizers[1], 1, steps=4), lambda: sok.restore(str(tmp_path), restored)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="is on a GPU.*'damped.*cannot lie"):
            call()
    sok.restore(str(tmp_path), restored, slots=False)
    assert_same(content_of(tables[1]), content_of(tables[0]))


def test_a_session_saves_and_restores(tmp_path):
    with tf.Graph().as_default(), tf.device(GPU):
        table = sok.EmbeddingVariable(DIM, 100, name="of_session")
        assign = table.assign(tf.constant([1, 2], tf.int64), tf.ones([2, DIM]))
        erase, size, exported = table.erase(tf.constant([1], tf.int64)), table.size(), table.export()
        with tf.compat.v1.Session() as session:
            session.run(assign)
            sok.save(str(tmp_path), [table], session=session)
            assert session.run(erase) == 1
            assert session.run(size) == 1
            sok.restore(str(tmp_path), [table], session=session)
            keys, rows = session.run(exported)
            sok.save(str(tmp_path), [table], session=session, incremental=True, asynchronous=True).result()
            assert [file.rows for link in sok.checkpoint.read_manifest(tmp_path).links for file in link.files] == [2, 0]
    np.testing.assert_array_equal(np.sort(keys), [1, 2])
    np.testing.assert_array_equal(rows, np.ones([2, DIM]))


def test_a_session_leaves_the_choice_of_device_to_tensorflow(tmp_path):
    with tf.Graph().as_default():
        table = sok.EmbeddingVariable(DIM, 100, name="anywhere")
        assign = table.assign(tf.constant([1, 2], tf.int64), tf.ones([2, DIM]))
        with tf.compat.v1.Session() as session:
            session.run(assign)
            sok.save(str(tmp_path), [table], session=session)
            sok.restore(str(tmp_path), [table], session=session)
            assert session.run(table.size()) == 2


@pytest.mark.parametrize("hashed", [True, False])
def test_counts_of_a_table_are_those_of_the_cpu(tmp_path, hashed):
    told = []
    for device in (CPU, GPU):
        table = table_on(device, f"counted_{hashed}_{device[1]}", hashed=hashed)
        seen = [table.stats()]
        losses_of(table, sok.optimizers.Adagrad(0.1), seed=1)
        seen.append(table.stats())
        table.erase([1, 2, 3, 499])
        seen.append(table.stats())
        sok.save(tmp_path / device[1], table)
        table.assign(np.arange(100), np.zeros([100, DIM]))
        seen.append(table.stats())
        sok.restore(tmp_path / device[1], table)
        seen.append(table.stats())
        details = table.stats(details=True)
        assert 4 * DIM * seen[-1]["rows"] < details["bytes_in_memory"] < 2**30 and details["bytes_exchanged"] == 0
        scalars = sok.callbacks.TableScalars(tmp_path / f"scalars_{device[1]}", tables=table, details=True).write(1)
        assert scalars[f"tables/{table.table_name}/bytes_in_memory"] == details["bytes_in_memory"]
        assert (device == CPU) or details["collisions"] == 0
        told.append(seen)
    assert told[0] == told[1]
    assert [set(one) for one in told[1]] == [{"rows", "candidates", "made", "refused", "evicted"}] * 5
    rows, made = ([one[what] for one in told[1]] for what in ("rows", "made"))
    assert rows[0] == made[0] == 0 < rows[2] < rows[1] == made[1] == made[2]
    assert rows[3] >= 100 and made[3] > made[2] and (rows[4], made[4]) == (rows[2], made[3])


def test_tables_of_two_devices_do_not_swap():
    a, b = table_on(CPU, "here"), table_on(GPU, "there")
    with pytest.raises(tf.errors.OpError):
        table_state.swap(a, b.handle)
    with pytest.raises(tf.errors.OpError):
        table_state.swap(b, a.handle)


def test_what_a_step_found_bad_is_told_once_by_the_next_call():
    table = table_on(GPU, "nan")
    optimizer = sok.optimizers.SGD(0.1, nonfinite_gradients="raise")
    with tf.device(GPU):
        with tf.GradientTape() as tape:
            rows = sok.group_embedding_lookup([table], [tf.constant([1], tf.int64)])[0]
            loss = tf.reduce_sum(rows * float("nan"))
        gradient = tape.gradient(loss, table)
    before = table.export()[1].numpy()
    with pytest.raises(tf.errors.InvalidArgumentError, match="holds NaN or infinity"):
        optimizer.apply_gradients([(gradient, table)])
        table.size()
    np.testing.assert_array_equal(table.export()[1], before)


def test_an_id_outside_an_identity_table_is_told_by_a_later_lookup():
    with tf.device(GPU):
        table = sok.EmbeddingVariable(2, 10, hashed=False, name="outside", initializer="ones")
        rows = table.sparse_read(tf.constant([3, 77], tf.int64)).numpy()
        np.testing.assert_array_equal(rows, [[1.0, 1.0], [0.0, 0.0]])
        with pytest.raises(tf.errors.InvalidArgumentError, match="outside.*77"):
            for _ in range(200):  # the first of them ask, a later one hears
                table.sparse_read(tf.constant([3], tf.int64)).numpy()
        table.sparse_read(tf.constant([3], tf.int64))  # once
        assert int(table.size()) == 0  # nothing was inserted


def test_tables_take_their_memory_from_tensorflows_pool():
    def in_use():
        return tf.config.experimental.get_memory_info(GPU.strip("/"))["current"]

    gc.collect()  # what tests before have left
    before = in_use()
    with tf.device(GPU):
        table = sok.EmbeddingVariable(64, 20000, name="pooled_memory")
    table.reserve(20000)
    assert in_use() - before >= 20000 * 64 * 4
    del table
    gc.collect()
    assert in_use() - before <= 4096  # a tensor of the runtime's own


def test_a_table_that_finds_no_memory_in_the_pool_says_how_much_there_is():
    with tf.device(GPU):
        table = sok.EmbeddingVariable(1024, 1 << 31, name="too_large_for_the_pool")
    with pytest.raises(
        tf.errors.ResourceExhaustedError, match="too_large_for_the_pool.*TensorFlow's allocator of this device"
    ):
        table.reserve(1 << 31)
