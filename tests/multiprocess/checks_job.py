"""Starting a job: what Init checks, how ranks agree, how a job ends and another begins. Runs first."""

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.job import context
from sok.lookup.lookup import lookup_rows

keras.utils.set_random_seed(7)


def check_a_worker_that_has_not_called_init_is_told_to(world):
    if world.size > 1:
        with pytest.raises(RuntimeError, match=rf"HOROVOD_SIZE={world.size}.*Call sok.Init"):
            sok.size()
    assert not hvd.is_initialized()


def check_init_joins_the_job(world):
    ok = sok.Init(global_batch_size=24, seed=3)
    assert ok.numpy() == b"OK"
    assert (sok.rank(), sok.size(), sok.local_rank()) == (world.rank, world.size, world.rank)
    assert context.get_global_batch_size() == 24 and context.get_seed() == 3
    assert hvd.is_initialized() and hvd.size() == world.size
    assert context.get_transport().name == ("local" if world.size == 1 else "horovod")


def check_init_again_does_nothing(world):
    with sok.trace() as t:
        assert sok.Init(global_batch_size=24, seed=3).numpy() == b"OK"
        assert sok.Init().numpy() == b"OK"
    assert t.collectives == 0
    with pytest.raises(ValueError, match=r"seed=3\. Received: seed=4"):
        sok.Init(seed=4)


def check_init_refuses_a_batch_that_cannot_be_split(world):
    sok.shutdown()
    if world.size > 1:
        for batch, message in ((world.size + 1, "divisible by"), (world.size - 1, "at least the number of workers")):
            with pytest.raises(ValueError, match=rf"{message}.*Received: {batch}"):
                sok.Init(global_batch_size=batch)


def check_ranks_that_pass_different_arguments_all_raise(world):
    if world.size == 1:
        return
    for first, others in (({"seed": 1}, {"seed": 2}), ({"global_batch_size": 24}, {}), ({"seed": "x"}, {"seed": 1})):
        with pytest.raises(tf.errors.InvalidArgumentError, match="sok.Init: .*the same"):
            sok.Init(**(others if world.rank else first))


def check_in_a_v1_graph_init_is_checked_when_it_is_run(world):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        init = sok.Init(seed=5)
        with sok.trace() as t:
            assert [session.run(init), session.run(init)] == [b"OK", b"OK"]
        assert t.collectives == (world.size > 1), "the second run is a no-op"
    sok.shutdown()
    if world.size > 1:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            init = sok.Init(seed=world.rank)
            for _ in range(2):  # not only the first time
                with pytest.raises(tf.errors.InvalidArgumentError, match="sok.Init: all workers"):
                    session.run(init)
        sok.shutdown()


def check_init_joins_a_job_that_the_user_started(world, monkeypatch):
    # No launcher is seen now, but Horovod runs in this process.
    monkeypatch.delenv("HOROVOD_SIZE")
    if world.size > 1:
        with pytest.raises(RuntimeError, match="hvd.init.. was called"):
            sok.size()
    sok.Init()
    assert sok.size() == world.size
    sok.shutdown()
    assert hvd.is_initialized()


def check_a_launcher_that_horovod_does_not_understand_is_an_error(world, monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(world.size + 1))
    with pytest.raises(RuntimeError, match=rf"OMPI_COMM_WORLD_SIZE={world.size + 1}, but Horovod sees {world.size}"):
        sok.Init()


def check_a_second_job_of_the_process_does_what_the_first_did(world):
    runs = []
    for _ in range(2):
        sok.Init(seed=3)
        table, optimizer = sok.EmbeddingVariable(2, 50, name="again"), sok.optimizers.Adam(0.1)

        def step(keys, table=table, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(lookup_rows(table, keys) - 1.0))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])

        keys, compiled = tf.constant([1, 2, world.rank + 2, 7], tf.int64), tf.function(step)
        for call in (step, compiled):
            call(keys)
        for before, of_before, _ in runs:
            for way in (before.total_size, lambda: lookup_rows(before, keys), lambda: of_before(keys[:2])):  # noqa: B023
                with pytest.raises(RuntimeError, match=rf"'again' is of a job that has ended: <Job .*{world.size}, "):
                    way()
            if world.size > 1:  # alone, it has no collective
                with pytest.raises(tf.errors.InvalidArgumentError, match="was traced in a job that has ended"):
                    of_before(keys)
        assert int(table.total_size()) == len({1, 2, 7, *range(2, world.size + 2)})
        runs.append((table, compiled, table.sparse_read(tf.range(9, dtype=tf.int64)).numpy()))
        sok.shutdown()
    (first, _, rows), (second, _, rows_again) = runs
    assert first.table_name == second.table_name == "again"
    np.testing.assert_array_equal(rows, rows_again)


def check_the_job_of_all_following_checks_starts(world):
    sok.Init(global_batch_size=24, seed=3)
    everyone = context.get_transport().all_gather(tf.constant([world.rank]), "here")
    np.testing.assert_array_equal(everyone, range(world.size))
