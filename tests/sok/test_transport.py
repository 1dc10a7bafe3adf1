"""The transport of one worker, and counting. Several workers: tests/multiprocess/checks_transport.py."""

import ctypes
import functools
import gc
import os
import time
import types
import weakref
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import sok
from sok.base import _ops, tracing
from sok.job.transport import ordering
from sok.job.transport.horovod import HorovodTransport, _named
from sok.job.transport.local import LocalTransport
from sok.job.transport.ordering import in_turn
from sok.lookup.feature import Group

ROOT = Path(__file__).resolve().parents[2]


def test_a_world_of_one_gives_everything_back_uncounted(call):
    transport = LocalTransport()
    x = tf.reshape(tf.range(6.0), [3, 2])
    with sok.trace() as t:
        received, splits = call(lambda x: transport.all_to_all(x, tf.constant([3]), "a"), x)
        (summed,) = call(lambda x: transport.grouped_all_reduce([x], "b", average=True), x)
        gathered = call(lambda x: transport.all_gather(x, "c"), x)
        sent = call(lambda x: transport.broadcast(x, 0, "d"), x)
        transport.barrier("e")
    for result in (received, summed, gathered, sent, transport.broadcast_numpy(x.numpy(), "f")):
        np.testing.assert_array_equal(result, x)
    assert transport.gpu_tensors() == "on the device (one worker: nothing is sent)"
    assert splits.numpy().tolist() == [3] and t.collectives == 0
    with pytest.raises(ValueError, match=r"`root_rank` must be 0.*Received: 1"):
        transport.broadcast(x, 1, "g")


def test_both_transports_have_the_whole_interface():
    for kind in (LocalTransport, HorovodTransport):
        assert not kind.__abstractmethods__


def test_names_are_made_legal_for_nodes_of_a_graph():
    names = ["sok/user_1/keys/0", "sok/User+1/keys/0", "sok/用户/keys", "a b", "-", "_", ".", "", "a//b", ">a", "a>b"]
    legal = [_named(name)["name"] for name in names]
    step = tf.function(lambda x: [tf.identity(x, name=name) for name in legal], autograph=False)
    graph = step.get_concrete_function(tf.TensorSpec([])).graph
    assert {op.name for op in graph.get_operations()} >= set(legal)
    assert len(step(tf.constant(1.0))) == len(names)  # TensorFlow looks at the names once more when it runs them


# Names that were one to Horovod once, and what makes such.
TABLE_NAMES = st.one_of(
    st.sampled_from(["user", "user_1", "user+1", "user++1", "User", "用户", "商品", "a b", "a_b", "a:b", "a/b", "a>b"]),
    st.text("u_1+/>.-5fU é", min_size=1, max_size=6),
    st.text(min_size=1, max_size=4),
)
COLLECTIVES = st.tuples(
    TABLE_NAMES, st.integers(1, 3), st.sampled_from(["keys", "rows", "grads"]), st.sampled_from(["", "/0", "/1", "/10"])
)


@given(COLLECTIVES, COLLECTIVES)
def test_no_two_collectives_have_one_name(one, other):
    def name_of(table, num_tables, what, number):
        tables = [types.SimpleNamespace(table_name=t) for t in (table, *map(str, range(1, num_tables)))]
        return _named(f"{Group(tuple(tables)).name}/{what}{number}")["name"]

    # Nor do they differ by case alone: in one graph TensorFlow would give the second another name.
    assert (name_of(*one).lower() == name_of(*other).lower()) == (one == other)


def test_collectives_of_one_name_run_in_program_order():
    order = []

    def note(number):
        time.sleep(0.01 * (8 - number))  # the first take longest: run at once, they would end last
        order.append(int(number))
        return number

    def collective(number):
        # Not stateful, as Horovod's ops are not.
        return in_turn("test/turn", lambda _: tf.numpy_function(note, [number], tf.int32, stateful=False))

    inner = tf.function(collective, autograph=False)

    @functools.partial(tf.function, autograph=False)
    def step(start):
        return [(inner if i % 3 else collective)(start + i) for i in range(8)]

    for _ in range(3):
        order.clear()
        step(tf.constant(0))
        assert order == list(range(8))


def test_a_worker_does_not_take_its_own_region_for_that_of_a_peer_with_its_process_number():
    # Containers of one machine: their first processes have one number, and one boot id.
    lib = _ops.lib()
    offers = [lib.sok_shared_offer(rank=0, size=2).numpy() for _ in range(2)]
    assert offers[0][3] == offers[1][3] and offers[0][4] != offers[1][4]
    stranger = offers[1].copy()
    stranger[4] = offers[0][4]  # what a peer in another container says: this number is not in our region
    assert lib.sok_shared_can_read(tf.constant(np.stack([offers[0], offers[1]])), rank=0).numpy().all()
    assert lib.sok_shared_can_read(tf.constant(np.stack([offers[1], stranger])), rank=0).numpy().tolist() == [
        True,
        False,
    ]


def test_an_address_at_which_nobody_can_listen_is_left_out():
    lib = _ops.lib()
    hosts = ("127.0.0.1", "192.0.2.1", "a")
    here, nowhere, wrong = (lib.sok_shared_offer(rank=1, size=2, host=host) for host in hosts)
    assert here[-1] > 0 and nowhere[-1] == wrong[-1] == 0
    assert lib.sok_shared_can_read(tf.stack([nowhere, wrong]), rank=1).numpy().all()
    assert not lib.sok_mail_connect(tf.stack([wrong, here]), [False, True])  # rank 1 calls rank 0, and has no number


@pytest.mark.skipif(os.geteuid() != 0, reason="another network namespace needs root")
def test_workers_in_two_networks_of_one_machine_are_not_on_one_host():
    lib, libc = _ops.lib(), ctypes.CDLL(None, use_errno=True)
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    before = lib.sok_shared_offer(rank=0, size=2).numpy()
    if libc.unshare(0x40000000) != 0:  # CLONE_NEWNET
        os.close(here)
        pytest.skip(f"no network namespace can be made: {os.strerror(ctypes.get_errno())}")
    try:
        after = lib.sok_shared_offer(rank=0, size=2).numpy()
    finally:
        assert libc.setns(here, 0) == 0
        os.close(here)
    assert before[3] != after[3]
    assert lib.sok_shared_can_read(tf.constant(np.stack([before, after])), rank=0).numpy().tolist() == [True, False]


NAMES = (b"test/a", b"test/b")


def test_collectives_of_other_names_do_not_wait_for_each_other():
    lib = _ops.lib()
    assert lib.sok_mail_connect(lib.sok_shared_offer(rank=0, size=1)[tf.newaxis], [True])

    def collective(x, name):
        def build(turns):
            counted = tracing.count(x, name, "all_to_all", turns)
            received, _ = lib.sok_shared_all_to_all(counted, [2], turns, collective=name, rank=0, in_graph=True)
            return tracing.done(received, name, turns)

        return in_turn(name, build)

    @tf.function
    def step(x):
        return collective(x, "test/a"), collective(2.0 * x, "test/b")

    ops = step.get_concrete_function(tf.TensorSpec([2])).graph.get_operations()
    of = {
        name: [op for op in ops if op.type.startswith("Sok>") and op.get_attr("collective") == name] for name in NAMES
    }
    assert [len(of[name]) for name in NAMES] == [3, 3]
    before_b = of[b"test/b"]
    for op in before_b:
        before_b += [other for other in (*(i.op for i in op.inputs), *op.control_inputs) if other not in before_b]
    assert not set(of[b"test/a"]) & set(before_b)
    a, b = step(tf.constant([1.0, 2.0]))
    assert a.numpy().tolist() == [1, 2] and b.numpy().tolist() == [2, 4]


def test_what_orders_collectives_ends_with_the_functions_that_have_them():
    def traced(name):
        function = tf.function(lambda x: in_turn(name, lambda _: x + 1))
        function(tf.constant(1))
        return function

    first = traced("test/ends/a")
    kept, handle = traced("test/ends/b"), weakref.ref(ordering._turns["test/ends/b"])
    del first
    gc.collect()
    assert [name for name in ordering._turns if name.startswith("test/ends")] == ["test/ends/b"]
    assert kept(tf.constant(1)).numpy() == 2 and handle() is ordering._turns["test/ends/b"]


# Counting.


def test_counts_are_those_inside_the_with_also_of_functions_traced_before():
    @tf.function
    def step(x):
        first, second = tracing.count_group([x, tf.zeros([4, 2])], "test/group", "all_reduce")
        return tracing.count(first, "test/one", "all_to_all") + tf.reduce_sum(second)

    step(tf.ones([3]))
    with sok.trace() as t:
        step(tf.ones([3]))
        inside = t.collectives
        step(tf.ones([3]))
    step(tf.ones([3]))
    assert (inside, t.collectives, t.bytes) == (2, 4, 2 * (12 + 32 + 12))
    assert _without_seconds(t.by_name) == {
        "test/group": {"kind": "all_reduce", "collectives": 2, "bytes": 88},
        "test/one": {"kind": "all_to_all", "collectives": 2, "bytes": 24},
    }


def _without_seconds(by_name):
    return {name: {k: v for k, v in one.items() if k != "seconds"} for name, one in by_name.items()}


def test_a_trace_tells_each_lookup_with_its_time():
    """Names as sok/lookup/exchange.py makes them; real ones: tests/multiprocess/checks_lookup.py."""
    pause = {"sok/a/keys": 0.0, "sok/a/rows": 0.0, "sok/b+2/grads": 0.03}
    with sok.trace() as t:
        for name, seconds in pause.items():
            x = tracing.count(tf.ones([2]), f"{name}/0", "all_to_all")
            time.sleep(seconds)
            tracing.done(x, f"{name}/0")
        for name in ("sok/a/keys/1", "sok/a/keys", "sok/dense_gradients/0", "sok/a/size"):
            tracing.done(tracing.count(tf.ones([2]), name, "all_to_all"), name)
    took = [one["seconds"] for one in t.by_lookup.values()]
    assert took == sorted(took, reverse=True) and t.by_lookup["b+2"]["seconds"] >= 0.03  # slept so long
    assert t.by_name["sok/b+2/grads/0"]["seconds"] == t.by_lookup["b+2"]["seconds"]
    assert _without_seconds(t.by_lookup) == {
        "a": {"calls": 2, "collectives": 3, "bytes": 24},
        "a (1)": {"calls": 1, "collectives": 1, "bytes": 8},
        "b+2": {"calls": 0, "collectives": 1, "bytes": 8},
    }
    first, *lookups = str(t).splitlines()
    assert first == "7 collectives, 56 bytes"
    assert [line.partition(":")[0] for line in lookups] == [f"lookup '{name}'" for name in t.by_lookup]
    assert sok.collective_counts(reset=True)["by_name"]["sok/b+2/grads/0"]["seconds"] > 0


def test_counts_can_be_read_and_reset_anywhere():
    sok.collective_counts(reset=True)
    tracing.count(tf.ones([2]), "test/reset", "barrier")
    with tf.Graph().as_default():
        assert sok.collective_counts()["collectives"] == 1
    assert sok.collective_counts(reset=True)["by_name"]["test/reset"]["bytes"] == 8
    assert sok.collective_counts() == {"collectives": 0, "bytes": 0, "by_name": {}}


def test_bytes_of_lookups_outlive_a_reset_and_end_with_the_job():
    for what in ("keys", "rows/1", "ahead2/rows", "stats"):
        tracing.count(tf.zeros([3]), f"sok/of_a_job+1/{what}", "all_to_all")
    assert tracing.bytes_of_lookups()["sok/of_a_job+1"] == 36
    sok.collective_counts(reset=True)
    tracing.count(tf.zeros([3]), "sok/of_a_job+1/keys", "all_to_all")
    assert tracing.bytes_of_lookups()["sok/of_a_job+1"] == 48
    tracing.end_job()  # names are free for other tables
    tracing.count(tf.zeros([2]), "sok/of_a_job+1/grads", "all_to_all")
    assert tracing.bytes_of_lookups()["sok/of_a_job+1"] == 8


def test_a_trace_that_was_not_entered_says_so():
    with pytest.raises(RuntimeError, match="inside a `with`"):
        _ = sok.trace().collectives


@pytest.mark.parametrize("value, is_told", [("1", True), ("0", False)])
def test_the_environment_asks_for_a_summary_at_the_end(forked, tmp_path, value, is_told):
    code = (
        "import tensorflow as tf; from sok.base import tracing; tracing.summarize_at_exit(3);"
        "tracing.count(tf.ones([4]), 'test/end', 'all_to_all')"
    )
    told = forked.run(code, tmp_path, environment={"SOK_TRACE": value})
    assert told.status == 0
    assert ("sok: rank 3: 1 collectives, 16 bytes" in told.stderr) is is_told
    assert ("all_to_all  test/end" in told.stderr) is is_told
