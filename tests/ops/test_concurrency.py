"""Several threads on one table. A row is always written whole, with all elements equal, so a torn row would show."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from tests.ops.tables import NativeTable
from tests.reference.initial_values import Initializer
from tests.reference.judge import assert_same

DIM = 33
ZERO = Initializer("constant", 0.0)


def run_together(*jobs):
    """Runs the jobs in threads of their own and raises the first error."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.result(timeout=120)


def assert_whole(rows):
    rows = np.asarray(rows)
    assert_same(rows, np.repeat(rows[:, :1], rows.shape[1], axis=1))


@pytest.mark.parametrize("insert", [False, True])
def test_readers_never_see_half_an_update(rng, insert):
    table = NativeTable(dim=DIM, init=ZERO)
    keys = np.arange(400)
    row_ids = table.lookup(keys)[1].numpy()
    updates = 40

    def update():
        for _ in range(updates):
            table.apply(np.tile(row_ids, 2), np.full((800, DIM), -0.5), hyper=(1.0,))

    def read():
        for step in range(updates):
            wanted = np.concatenate([keys, [1_000 + step]])  # one new key each time
            rows = table.lookup(wanted, insert=insert)[0].numpy()
            assert_whole(rows)
            assert_whole(table.lookup_combine(keys, np.arange(401), insert=insert)[0])

    run_together(update, update, read, read)
    assert_same(table.lookup(keys)[0], np.full((400, DIM), 2.0 * updates))


def test_threads_that_insert_the_same_keys_agree():
    table = NativeTable(dim=4, capacity=20_000)
    found = {}

    def insert(thread):
        order = np.random.default_rng(thread).permutation(20_000)
        ids = np.zeros(20_000, np.int64)
        for part in np.split(order, 20):
            ids[part] = table.lookup(part)[1].numpy()
        found[thread] = ids

    run_together(*[lambda t=t: insert(t) for t in range(4)])
    assert table.size() == 20_000
    for thread in range(1, 4):
        assert_same(found[thread], found[0])
    assert sorted(found[0].tolist()) == list(range(20_000))
    assert_same(table.lookup(np.arange(100))[0], table.expected.lookup(np.arange(100), insert=False))


def test_updates_of_several_threads_all_count():
    table = NativeTable(dim=3, init=ZERO)
    row_ids = table.lookup(np.arange(1_000))[1].numpy()

    def update():
        for _ in range(25):
            table.apply(row_ids, np.full((1_000, 3), -1.0))

    run_together(*[update] * 4)
    assert_same(table.lookup(np.arange(1_000))[0], np.full((1_000, 3), 100.0))


def test_readers_live_with_erasing_assigning_and_new_slots():
    table = NativeTable(dim=DIM, init=ZERO)
    keys = np.arange(300)

    def assign():
        for step in range(30):
            table.assign(keys, np.full((300, DIM), float(step)))

    def erase():
        for _ in range(30):
            table.erase(keys[::2])

    def widen():
        for i in range(8):
            table.apply([], np.zeros((0, DIM)), rule="adagrad", slot_set=f"set {i}", hyper=(0.1, 0.1, 1e-7))

    def read():
        for _ in range(60):
            rows, row_ids = table.lookup(keys, insert=False)
            assert_whole(rows)
            assert_same(rows.numpy()[row_ids.numpy() < 0], np.zeros(((row_ids.numpy() < 0).sum(), DIM)))
            assert_whole(table.lookup(keys)[0])

    run_together(assign, erase, widen, read, read)
    # An odd key is only ever assigned: its last value stays. An even one may have been erased after that.
    left = table.as_dict()
    for key in keys.tolist():
        assert left.get(key, (0.0,))[0] in ((29.0,) if key % 2 else tuple(float(s) for s in range(30)))


def test_a_dataset_map_looks_up_while_training_goes_on():
    table = NativeTable(dim=DIM, init=ZERO)
    keys = tf.range(256, dtype=tf.int64)
    row_ids = table.lookup(keys)[1]
    dataset = tf.data.Dataset.range(60).map(
        lambda i: table.lookup(tf.concat([keys, [10_000 + i]], 0))[0], num_parallel_calls=4
    )
    steps = 0
    for rows in dataset.prefetch(2):
        table.apply(row_ids, np.full((256, DIM), -1.0))
        steps += 1
        assert_whole(rows)
    assert steps == 60
    assert_same(table.lookup(keys)[0], np.full((256, DIM), 60.0))
    assert table.size() == 256 + 60


def test_parallel_branches_of_one_function_use_two_tables():
    first, second = NativeTable(dim=8), NativeTable(dim=8, seed=99)

    @tf.function
    def both(keys):
        return first.lookup(keys)[0], second.lookup(keys)[0]

    keys = np.arange(3_000)
    for _ in range(5):
        got = both(tf.constant(keys))
        assert_same(got[0], first.lookup(keys)[0])
        assert_same(got[1], second.lookup(keys)[0])
    assert not np.array_equal(got[0], got[1])


def test_an_export_is_one_point_in_time():
    # An erasure between the keys and their rows would show as initial values: zeros.
    table = NativeTable(dim=DIM, init=ZERO)
    keys = np.arange(2_000)
    table.assign(keys, np.full((2_000, DIM), 7.0))

    def erase():
        for part in np.split(keys, 200):
            table.erase(part)

    def export():
        for _ in range(60):
            exported, rows = table.export()
            assert_same(rows, np.full((len(exported), DIM), 7.0))

    run_together(erase, export, export)
    assert table.size() == 0
