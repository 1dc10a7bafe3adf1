"""Which collective is which: names, functions in functions, batches that differ between ranks, many at once."""

import numpy as np
import tensorflow as tf

import sok
from sok.job import context
from sok.lookup import lookup
from sok.lookup.feature import Csr, Feature

v1 = tf.compat.v1


def table(name, dim=4, rows=1000, **arguments):
    return sok.EmbeddingVariable(dim, rows, name=name, initializer="ones", **arguments)


def keys_of(world, count, start=0):
    """Ids of this rank's own, another number of them on each."""
    return tf.range(count, dtype=tf.int64) + 100 * world.rank + start


def check_tables_whose_names_are_alike_are_looked_up_at_once(world, monkeypatch):
    if world.size > 1:  # through sockets, where nothing else keeps them apart
        monkeypatch.setattr(context.get_transport(), "is_direct", False)
    tables = [table(name) for name in ("like", "item", "like_1", "like+1", "Like", "用户", "商品")]
    keys = keys_of(world, 6)

    @tf.function
    def step():
        group = lookup.lookup_group([Feature(t, Csr(keys, [0, 6]), "sum") for t in tables[:2]])
        return tf.add_n([tf.reduce_sum(lookup.lookup_rows(t, keys)) for t in tables[2:]] + [tf.reduce_sum(group)])

    for _ in range(5):
        assert step().numpy() == 7 * 6 * 4


def check_functions_in_functions_with_uneven_batches(world):
    t, optimizer = table("calls_nested"), sok.optimizers.SGD(1.0)

    @tf.function
    def inner(keys):
        return lookup.lookup_rows(t, keys)

    inner(tf.zeros([7], tf.int64))  # traced alone on all ranks; below, some have to trace it anew, and some do not

    @tf.function
    def step(keys, flag):
        with tf.GradientTape() as tape:
            rows = lookup.lookup_rows(t, keys)
            total = tf.reduce_sum(rows) + tf.reduce_sum(inner(keys)) + tf.reduce_sum(inner(keys[:3]))
        gradient = tape.gradient(total, t)
        if flag:
            total += tf.reduce_sum(inner(keys)) + tf.reduce_sum(lookup.lookup_rows(t, keys[:1]))
        for _ in tf.range(2):
            total += tf.reduce_sum(inner(keys))
        optimizer.apply_gradients([(gradient, t)])
        return total

    expected = {}
    for i, count in enumerate((7, 5, 7, 9)):
        mine = count - world.rank
        flag = i % 2 == 0
        got = step(keys_of(world, mine), tf.constant(flag))
        times = np.full(mine, 2.0)
        times[:3] += 1
        rows = np.array([expected.get(k, 1.0) for k in range(mine)])
        assert got.numpy() == 4 * (np.sum((times + 2 + flag) * rows) + flag * rows[0])
        expected.update({k: rows[k] - times[k] for k in range(mine)})
    found = lookup.lookup_rows(t, keys_of(world, 9), training=False).numpy()[:, 0]
    np.testing.assert_array_equal(found, [expected.get(k, 1.0) for k in range(9)])


def check_a_rank_that_traces_anew_while_others_do_not(world):
    tables = [table(f"calls_anew_{i}") for i in range(2)]

    @tf.function
    def step(keys):
        return sum(tf.reduce_sum(lookup.lookup_rows(t, keys)) for t in tables for _ in range(2))

    for i in range(6):
        count = 3 + (i if world.rank == 0 else 0)
        assert step(keys_of(world, count)).numpy() == 4 * 4 * count


def check_many_lookups_of_one_v1_step(world):
    """More than are ever under way in a function: nothing in a v1 graph keeps one table's exchange behind another's."""
    count = 70
    keys = np.random.default_rng(world.rank).integers(0, 10**9, [count, 8192])  # too many to travel inline
    with tf.Graph().as_default(), v1.Session() as session:
        rows = [lookup.lookup_rows(table(f"calls_v1_{i}", 1, 60_000), tf.constant(keys[i])) for i in range(count)]
        sums = [tf.reduce_sum(r) for r in rows]
        session.run(v1.global_variables_initializer())
        for _ in range(2):
            assert session.run(sums) == [8192] * count


def check_exchanges_of_two_tables_do_not_wait_for_each_other(world):
    if world.size == 1:
        return
    a, b = table("calls_a"), table("calls_b")
    step = tf.function(lambda k: (lookup.lookup_rows(a, k), lookup.lookup_rows(b, k)))
    ops = step.get_concrete_function(tf.TensorSpec([None], tf.int64)).graph.get_operations()
    before = {op.name: [i.op for i in op.inputs] + op.control_inputs for op in ops}

    def of(name):
        return {op.name for op in ops if f"sok/{name}/".encode() in [op.node_def.attr["collective"].s[: len(name) + 5]]}

    # Keys and rows: each begins, moves, and is done.
    assert len(of("calls_a")) == len(of("calls_b")) == 6
    reached, todo = set(), list(of("calls_b"))
    while todo:
        op = todo.pop()
        if op not in reached:
            reached.add(op)
            todo += [earlier.name for earlier in before[op]]
    assert not reached & of("calls_a")
