"""The collectives: what they move and add, in all modes, and how they are counted and named."""

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.job import context
from sok.job.context import unique_collective_name

MOVED = (
    tf.uint8,
    tf.int32,
    tf.int64,
    tf.uint32,
    tf.uint64,
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.float64,
    tf.bool,
)


def rows_of(rank, num_rows, dtype=tf.float32):
    """Rows [num_rows, 2] that say where they come from."""
    return tf.cast(100 * rank + tf.range(2 * num_rows), dtype) if dtype != tf.bool else tf.range(2 * num_rows) % 3 == 0


def routed(size, counts, dtype=tf.float32):
    """What rank `to` must receive: counts[from][to] rows of each rank."""
    sent = [tf.reshape(rows_of(rank, sum(counts[rank]), dtype), [-1, 2]).numpy() for rank in range(size)]
    starts = [np.concatenate([[0], np.cumsum(counts[rank])]) for rank in range(size)]
    return [
        np.concatenate([sent[rank][starts[rank][to] : starts[rank][to + 1]] for rank in range(size)])
        for to in range(size)
    ]


def exchange_of(counts, world, dtype=tf.float32):
    mine = counts[world.rank]
    tensor = tf.reshape(rows_of(world.rank, sum(mine), dtype), [-1, 2])
    received, splits = context.get_transport().all_to_all(tensor, tf.constant(mine, tf.int32), "exchange")
    assert received.dtype == dtype and splits.dtype == tf.int32
    np.testing.assert_array_equal(splits, [counts[rank][world.rank] for rank in range(world.size)])
    expected = routed(world.size, counts, dtype)[world.rank]
    np.testing.assert_array_equal(received.numpy(), expected)
    return received


def check_all_to_all_moves_every_dtype(world):
    counts = [[rank + 2 * to + 1 for to in range(world.size)] for rank in range(world.size)]
    for dtype in MOVED:
        exchange_of(counts, world, dtype)


def check_all_to_all_with_nothing_to_send(world):
    size = world.size
    exchange_of([[0] * size for _ in range(size)], world)  # nobody
    exchange_of([[0] * size if rank == 0 else [2] * size for rank in range(size)], world)  # not rank 0
    exchange_of([[3 if to == size - 1 else 0 for to in range(size)] for _ in range(size)], world)  # all to the last


def check_all_to_all_keeps_trailing_dimensions(world):
    tensor = tf.reshape(tf.range(world.size * 2 * 3 * 4, dtype=tf.float32), [world.size * 2, 3, 4])
    received, _ = context.get_transport().all_to_all(tensor, [2] * world.size, "trailing")
    assert received.shape == tensor.shape
    back, _ = context.get_transport().all_to_all(received, [2] * world.size, "trailing")
    np.testing.assert_array_equal(back, tensor)


def check_all_to_all_refuses_what_is_no_number(world):
    if world.size > 1:
        with pytest.raises(TypeError, match="dtype must be one of uint8.*Received: string"):
            context.get_transport().all_to_all(tf.constant(["a"] * world.size), [1] * world.size, "strings")


def check_static_shapes_survive_in_graphs(world):
    transport = context.get_transport()
    shapes = {}

    @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([world.size], tf.int32)])
    def step(x, splits):
        received, received_splits = transport.all_to_all(x, splits, unique_collective_name("shapes"))
        summed = transport.grouped_all_reduce([x[:1]], unique_collective_name("shapes_sum"), average=True)[0]
        gathered = transport.all_gather(x, unique_collective_name("shapes_gather"))
        shapes.update(received=received.shape, splits=received_splits.shape, summed=summed.shape, all=gathered.shape)
        return received

    step(tf.ones([world.size, 3]), [1] * world.size)
    assert shapes["received"].as_list() == [None, 3] and shapes["all"].as_list() == [None, 3]
    assert shapes["splits"] == [world.size] and shapes["summed"][1] == 3


def check_grouped_all_reduce_sums_and_averages(world):
    transport = context.get_transport()
    total = sum(range(1, world.size + 1))
    mine = world.rank + 1
    tensors = [
        tf.constant(float(mine)),
        tf.fill([2, 3], float(mine)),
        tf.zeros([0, 4]),
        tf.constant([mine], tf.float64),
        tf.constant([mine], tf.float16),
        tf.constant([mine], tf.bfloat16),
    ]
    for average in (False, True):
        expected = total / world.size if average else total
        results = transport.grouped_all_reduce(tensors, "sums", average=average)
        for result, tensor in zip(results, tensors, strict=True):
            assert result.dtype == tensor.dtype and result.shape == tensor.shape
            np.testing.assert_allclose(tf.cast(result, tf.float64), np.full(tensor.shape, expected), rtol=1e-3)
    sums = transport.grouped_all_reduce([tf.constant([mine], tf.int64)], "whole", average=False)
    np.testing.assert_array_equal(sums[0], [total])
    assert transport.grouped_all_reduce([], "nothing", average=True) == []
    if world.size > 1:
        with pytest.raises(TypeError, match="average .*float16.*Received: int64"):
            transport.grouped_all_reduce([tf.constant([mine], tf.int64)], "whole", average=True)


def check_a_group_of_one_dtype_is_one_collective(world):
    tensors = [tf.ones([4]), tf.ones([2, 2]), tf.constant(1.0)]
    with sok.trace() as t:
        context.get_transport().grouped_all_reduce(tensors, "sok/group", average=False)
    assert t.collectives == (world.size > 1)
    if world.size > 1:
        (one,) = t.by_name.values()
        assert list(t.by_name) == ["sok/group"] and one.pop("seconds") > 0
        assert one == {"kind": "all_reduce", "collectives": 1, "bytes": 4 * (4 + 4 + 1)}


def check_all_gather_takes_uneven_rows(world):
    mine = tf.fill([world.rank, 2], world.rank)
    gathered = context.get_transport().all_gather(mine, "uneven")
    np.testing.assert_array_equal(gathered, np.repeat(np.arange(world.size), np.arange(world.size))[:, None] * [1, 1])
    if world.size > 1:
        with pytest.raises(ValueError, match="must have rows"):
            context.get_transport().all_gather(tf.constant(1.0), "scalar")


def check_broadcast_gives_the_root_s_bits(world):
    transport, root = context.get_transport(), world.size - 1
    mine = np.array([np.nan, -0.0, world.rank], np.float32)
    received = transport.broadcast(tf.constant(mine), root, "bits").numpy()
    expected = np.array([np.nan, -0.0, root], np.float32)
    np.testing.assert_array_equal(received.view(np.int32), expected.view(np.int32))
    big = transport.broadcast(tf.constant([2**63 + world.rank], tf.uint64), root, "unsigned")
    assert big.numpy() == [2**63 + root]
    with pytest.raises(ValueError, match=r"`root_rank` must be.*Received: 9"):
        transport.broadcast(tf.constant(1.0), 9, "root")
    assert transport.broadcast_numpy(np.array([world.rank]), "array", root) == [root]


def two_sums(x):
    transport = context.get_transport()
    return [
        transport.grouped_all_reduce([factor * x], unique_collective_name("step"), average=False)[0]
        for factor in (1.0, 2.0)
    ]


def check_collectives_work_in_functions(world):
    expected = float(sum(range(world.size)))
    function = tf.function(two_sums)
    for _ in range(3):
        a, b = function(tf.constant(float(world.rank)))
        assert (a.numpy(), b.numpy()) == (expected, 2 * expected)


def check_collectives_work_in_v1_graphs(world):
    root, expected = world.size - 1, float(sum(range(world.size)))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        array = context.get_transport().broadcast_numpy(np.array([world.rank]), "array", root)
        assert array == [root]
        fetches = two_sums(tf.constant(float(world.rank)))
        for _ in range(3):
            assert session.run(fetches) == [expected, 2 * expected]


def check_collectives_on_constants_run_in_every_step(world):
    # Horovod's ops do not say that they are stateful: TensorFlow would fold or merge them.
    transport = context.get_transport()

    @tf.function
    def step():
        one = [transport.grouped_all_reduce([tf.ones([3])], unique_collective_name("same"), False)[0] for _ in range(2)]
        transport.barrier(unique_collective_name("unread"))
        return one

    step()
    with sok.trace() as t:
        for _ in range(4):
            step()
    assert t.collectives == (4 * 3 if world.size > 1 else 0)


def check_names_do_not_depend_on_what_else_a_rank_has_traced(world):
    transport = context.get_transport()

    @tf.function
    def only_here():
        return [unique_collective_name("named") for _ in range(5)] and tf.constant(0)

    for _ in range(world.rank):
        only_here.get_concrete_function()
    with tf.name_scope(f"scope_of_rank_{world.rank}"):

        @tf.function
        def step(x):
            with tf.name_scope(f"inner_of_rank_{world.rank}"):
                return transport.grouped_all_reduce([x], unique_collective_name("named"), average=False)[0]

        assert step(tf.constant(1.0)).numpy() == world.size


def check_two_calls_of_an_inner_function_are_not_mixed_up(world):
    # Both calls have collectives of the same names in one step, and nothing between them says which is first.
    transport = context.get_transport()

    @tf.custom_gradient
    def sum_over_ranks(x):
        def grad(upstream):
            name = unique_collective_name("twice/grad")
            return transport.grouped_all_reduce([upstream], name, average=False)[0]

        return transport.grouped_all_reduce([x], unique_collective_name("twice"), average=False)[0], grad

    @tf.function
    def inner(x, y):
        return tf.reduce_sum(sum_over_ranks(x) * y)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = inner(x, tf.constant([1.0, 2.0])) + inner(2.0 * x, tf.constant([10.0, 20.0]))
        return loss, tape.gradient(loss, x)

    for i in range(30):
        x = tf.constant([1.0, float(i)])
        loss, grad = step(x)
        np.testing.assert_allclose(loss, world.size * (21.0 * 1 + 42.0 * i), rtol=1e-6)
        np.testing.assert_allclose(grad, world.size * np.array([21.0, 42.0]), rtol=1e-6)


def check_a_job_can_end_and_begin_again(world):
    sok.shutdown()
    sok.Init(global_batch_size=24, seed=3)
    context.get_transport().barrier("again")


def check_one_worker_says_for_all_how_they_send(world, monkeypatch):
    ways = {("0", "0"): (False, False), ("0", "1"): (True, False), ("1", "0"): (True, True)}
    for (shares_memory, uses_tcp), expected in ways.items():
        sok.shutdown()
        if world.rank == world.size - 1:
            monkeypatch.setenv("SOK_SHARED_MEMORY", shares_memory)
            monkeypatch.setenv("SOK_TCP", uses_tcp)
        sok.Init(global_batch_size=24, seed=3)
        transport = context.get_transport()
        if world.size > 1:
            assert (transport.is_direct, transport.shares_memory) == expected
            sent = tf.range(world.size) + 10 * world.rank
            received, _ = transport.all_to_all(sent, tf.ones([world.size], tf.int32), "test/ways")
            np.testing.assert_array_equal(received, 10 * np.arange(world.size) + world.rank)
    sok.shutdown()
    monkeypatch.undo()
    sok.Init(global_batch_size=24, seed=3)


def check_what_is_large_goes_through_shared_memory(world, monkeypatch):
    """Ranks of one host; envelopes and inline data."""
    if world.size > 1:
        assert context.get_transport().shares_memory
        compare_with_horovod(world, monkeypatch)


def compare_with_horovod(world, monkeypatch):
    """What is sent without Horovod, large and small and nothing."""
    transport = context.get_transport()
    assert transport.is_direct
    rng = np.random.default_rng(world.rank)

    @tf.function
    def send(x, splits):
        return transport.all_to_all(x, splits, "test/shared")

    for step in range(12):
        top = (0, 3, 5_000, 300_000)[step % 4]  # below and above what travels inline
        splits = rng.integers(0, top + 1, world.size).astype(np.int32)
        for dtype in (np.float32, np.int64, np.int32, np.float64):
            x = rng.integers(-(2**31), 2**31, splits.sum()).astype(dtype)
            received, sizes = send(tf.constant(x), tf.constant(splits))
            with monkeypatch.context() as m:
                m.setattr(transport, "is_direct", False)
                expected, expected_sizes = transport.all_to_all(tf.constant(x), tf.constant(splits), "test/not_shared")
            np.testing.assert_array_equal(received, expected)
            np.testing.assert_array_equal(sizes, expected_sizes)
            assert received.dtype == dtype
    groups = [tf.constant(rng.normal(size=n), tf.float32) for n in (1, 0, 7, 300_001)]
    for average in (False, True):
        sums = transport.grouped_all_reduce(groups, "test/direct_sums", average=average)
        with monkeypatch.context() as m:
            m.setattr(transport, "is_direct", False)
            expected = transport.grouped_all_reduce(groups, "test/sums", average=average)
        for one, other in zip(sums, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    with sok.trace() as trace:
        send(tf.zeros([world.size * 50_000], tf.float32), tf.fill([world.size], 50_000))
    # One collective, of the bytes that were handed over and not of the envelopes.
    assert (trace.collectives, trace.bytes) == (1, 4 * 50_000 * world.size)


def check_sums_are_added_up_in_the_order_of_ranks(world):
    transport = context.get_transport()
    if not getattr(transport, "is_direct", False):
        return
    rng = np.random.default_rng(world.rank)

    @tf.function
    def add(tensors, average):
        return transport.grouped_all_reduce(tensors, f"test/ordered_sums/{average}", average=average)

    # Parts below and above what travels inline, of which each rank has as many or one fewer; none at all.
    for sizes in ((1, 0, 7), (5_000, 3), (40_000, 70_001), (0,)):
        for dtype in (np.float32, np.float64, np.int32, np.int64):
            values = [(rng.normal(size=[n, 1]) * 1e6).astype(dtype) for n in sizes]
            all_of_them = [transport.all_gather(tf.constant(one[np.newaxis]), "test/values").numpy() for one in values]
            for average in (False, True)[: 2 if np.issubdtype(dtype, np.floating) else 1]:
                expected = [one[0].copy() for one in all_of_them]
                for rank in range(1, world.size):
                    expected = [so_far + one[rank] for so_far, one in zip(expected, all_of_them, strict=True)]
                if average:
                    expected = [one / dtype(world.size) for one in expected]
                for sums in (add(values, average), transport.grouped_all_reduce(values, "test/eager_sums", average)):
                    for one, other in zip(sums, expected, strict=True):
                        np.testing.assert_array_equal(one, other, strict=True)


def check_sums_of_unlike_numbers_are_refused_by_all(world):
    transport = context.get_transport()
    if not getattr(transport, "is_direct", False):
        return
    with pytest.raises(tf.errors.FailedPreconditionError, match="test/unlike.*another number of values"):
        # Of two workers one has as many numbers to add up with as without the one that is too many.
        transport.grouped_all_reduce([tf.zeros([2 * world.size + (world.rank == 0)])], "test/unlike", average=False)


def check_a_message_of_another_dtype_is_refused(world):
    if world.size == 1:
        return
    dtype = tf.int32 if world.rank else tf.int64
    with pytest.raises(tf.errors.FailedPreconditionError, match="test/dtype.*another dtype"):
        context.get_transport().all_to_all(tf.zeros([world.size], dtype), tf.ones([world.size], tf.int32), "test/dtype")
