"""Large outputs come from memory that is used again: they must be as independent as any tensors, and not pile up."""

import pathlib
import resource

import numpy as np
import tensorflow as tf

import sok
from tests.ops.tables import NativeTable


def test_outputs_that_are_held_keep_their_values():
    table = NativeTable(dim=64, capacity=50_000)
    batches = [np.arange(i * 7, i * 7 + 20_000) for i in range(6)]
    held = [table.lookup(keys)[0] for keys in batches]  # 5 MB each
    copies = [h.numpy().copy() for h in held]
    del held[4], held[1]
    more = [table.lookup(keys + 1)[0] for keys in batches]  # in the memory of those that died
    for tensor, copy in zip(held, [copies[0], copies[2], copies[3], copies[5]], strict=True):
        np.testing.assert_array_equal(tensor, copy)
    np.testing.assert_array_equal(more[0][:-1], copies[0][1:])


def test_an_output_may_be_changed_by_what_consumes_it():
    # TensorFlow writes into a buffer that nobody else holds. The table must not notice.
    table = NativeTable(dim=64, capacity=30_000)
    keys = np.arange(20_000)
    first = table.lookup(keys)[0].numpy().copy()

    @tf.function
    def consume(keys):
        return tf.nn.relu(table.lookup(keys)[0] + 100.0) * 0.0

    for _ in range(3):
        assert not np.any(consume(tf.constant(keys)))
    np.testing.assert_array_equal(table.lookup(keys)[0], first)


def test_memory_does_not_grow_from_step_to_step():
    table = NativeTable(dim=128, capacity=60_000)
    rng = np.random.default_rng(1)
    peak = []
    for step in range(40):  # of 20 to 25 MB each
        table.lookup(np.arange(int(rng.integers(40_000, 50_000))))
        if step in (9, 39):
            peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    assert peak[1] - peak[0] < 100


def test_many_small_outputs_share_a_block_and_stay_independent():
    dim, tables, batch = 16, 40, 1024  # 64 KiB an output, 2.5 MiB together
    parameters = [sok.EmbeddingVariable(dim, 2 * batch, name=f"output_pool_{t}") for t in range(tables)]
    keys = [np.arange(t, t + batch) for t in range(tables)]

    def look_up(shift):
        ids = [tf.RaggedTensor.from_row_lengths(k + shift, np.ones(batch, np.int64)) for k in keys]
        return sok.group_embedding_lookup_sparse(parameters, ids, "sum")

    first = look_up(0)
    copies = [one.numpy().copy() for one in first]
    kept = first[7]
    del first
    second = look_up(1)
    np.testing.assert_array_equal(kept, copies[7])
    for one, copy in zip(second, copies, strict=True):
        np.testing.assert_array_equal(one[:-1], copy[1:])


def test_sums_take_the_memory_of_their_rows_not_of_their_ids(lib):
    def peak():  # kilobytes of address space
        status = pathlib.Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmPeak")).split()[1])

    ids, dim = 1_000_000, 2048  # 8 GB, if no id came twice
    before = peak()
    unique, sums = lib.sok_group_lookup_grad(
        [tf.ones([1, dim])],
        [tf.zeros([ids], tf.int64)],
        [tf.constant([0, ids], tf.int64)],
        [tf.zeros([0])],
        M=1,
        table_of=[0],
        dims=[dim],
        combiners=["sum"],
    )
    assert peak() - before < 1 << 20
    np.testing.assert_array_equal(unique[0], [0])
    np.testing.assert_array_equal(sums[0], np.full([1, dim], ids, np.float32))
