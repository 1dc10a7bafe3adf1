"""Starting a job by TF_CONFIG, without Horovod. Runs first, on the workers of `clusters.py`."""

import functools

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.job import context
from sok.job.transport import cluster


def check_a_worker_of_tf_config_that_has_not_called_init_is_told_to(world):
    with pytest.raises(RuntimeError, match=rf"TF_CONFIG of {world.size} workers.*Call sok.Init"):
        sok.size()


def check_a_launch_by_horovodrun_beside_tf_config_is_refused(world, monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(RuntimeError, match="HOROVOD_SIZE=2 and TF_CONFIG of .* both name the workers.*unset TF_CONFIG"):
        sok.Init()


@functools.cache
def strategy():
    """The one of this program, as a user makes it."""
    cluster.wait_longer()  # than 10 s, on a machine that does other things
    return tf.distribute.MultiWorkerMirroredStrategy()


def check_init_meets_the_workers_of_a_strategy(world):
    assert strategy().num_replicas_in_sync == world.size
    with pytest.raises(RuntimeError, match=r"MultiWorkerMirroredStrategy\), and sok.Init has not been called"):
        sok.size()
    assert sok.Init(global_batch_size=24, seed=3, deadline=120).numpy() == b"OK"
    assert (sok.rank(), sok.size(), sok.local_rank()) == (world.rank, world.size, world.rank)
    assert context.get_transport().name == "tensorflow" and not hvd.is_initialized()
    assert repr(context.get_job()).endswith(f"rank {world.rank} of {world.size}, tensorflow, seed 3>")
    assert context.get_transport().gpu_tensors() == "staged through the host (TensorFlow's collectives over gRPC)"


def check_different_arguments_are_raised_on_all_workers_of_a_cluster(world):
    sok.shutdown()
    with pytest.raises(tf.errors.InvalidArgumentError, match="sok.Init: all workers must pass the same `seed`"):
        sok.Init(seed=world.rank)
    sok.Init(global_batch_size=24, seed=3, deadline=120)


def check_a_v1_graph_is_refused(world):
    with tf.Graph().as_default():
        with pytest.raises(RuntimeError, match="do not reach other workers from a v1 graph.*horovodrun"):
            context.get_transport().barrier("v1")
        sok.shutdown()
        with pytest.raises(RuntimeError, match="sok.Init: .*do not reach other workers from a v1 graph"):
            sok.Init()
    sok.Init(global_batch_size=24, seed=3, deadline=120)


def check_ranks_in_different_collectives_all_raise_and_go_on(world):
    transport = context.get_transport()
    for other in (
        {"name": "meet/b", "tensor": tf.zeros([world.size])},
        {"name": "meet/a", "tensor": tf.zeros([world.size, 2])},
        {"name": "meet/a", "tensor": tf.zeros([world.size], tf.int64)},
    ):
        mine = other if world.rank == 0 else {"name": "meet/a", "tensor": tf.zeros([world.size])}
        with pytest.raises(tf.errors.FailedPreconditionError, match=f"{mine['name']}.*it was in another call"):
            transport.all_to_all(splits=tf.ones([world.size], tf.int32), **mine)
    with pytest.raises(tf.errors.FailedPreconditionError, match="another dtype or shape"):
        transport.grouped_all_reduce([tf.zeros([2 + world.rank])], "meet/sum", average=False)

    @tf.function
    def uneven(x):
        return transport.grouped_all_reduce([x], "meet/uneven", average=False)

    with pytest.raises(tf.errors.InvalidArgumentError, match="meet/uneven.*it was in another call"):
        uneven(tf.zeros([2 + world.rank]))
    np.testing.assert_array_equal(transport.all_gather(tf.constant([world.rank]), "meet/end"), range(world.size))


def check_splits_that_do_not_fit_are_raised_on_all_workers(world):
    transport, x = context.get_transport(), tf.zeros([world.size])
    splits = tf.ones([world.size], tf.int32) * (2 if world.rank == 1 else 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the splits of rank 1 are negative, or do not sum"):
        transport.all_to_all(x, splits, "splits")
    with pytest.raises(tf.errors.InvalidArgumentError, match="the splits of a rank are negative, or do not sum"):
        tf.function(lambda: transport.all_to_all(x, splits, "splits/0"))()
    np.testing.assert_array_equal(transport.all_to_all(x, tf.ones_like(splits), "splits")[1], [1] * world.size)


def check_messages_of_many_sizes_keep_their_rows(world):
    transport, rng = context.get_transport(), np.random.default_rng(world.rank)

    @tf.function(reduce_retracing=True)
    def there_and_back(x, splits):
        there, counts = transport.all_to_all(x, splits, "sizes/there/0")
        return transport.all_to_all(there, counts, "sizes/back/0")

    for top in (0, 1, 15, 16, 17, 1000, 30_000):
        splits = rng.integers(0, top + 1, world.size).astype(np.int32)
        x = rng.normal(size=(splits.sum(), 3)).astype(np.float32)
        back, counts = there_and_back(tf.constant(x), tf.constant(splits))
        np.testing.assert_array_equal(back, x)
        np.testing.assert_array_equal(counts, splits)


def check_several_collectives_are_under_way_at_once(world):
    # Which of them a rank begins first is up to TensorFlow: each rank builds them in another order.
    transport = context.get_transport()

    @tf.function
    def step(x):
        numbers = list(range(12))
        if world.rank:
            numbers.reverse()
        sums = {n: transport.grouped_all_reduce([x + float(n)], f"many/{n}", average=False)[0] for n in numbers}
        return [sums[n] for n in range(12)]

    for i in range(5):
        expected = [world.size * (i + n) for n in range(12)]
        np.testing.assert_allclose(step(tf.constant(float(i))), expected)
