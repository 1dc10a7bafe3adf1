"""`tf.staged`, `tf.make_prefetch_hook` and the options of a session, on one worker; several: checks_staged.py."""

import copy
import logging
import threading
import time

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from tensorflow.python.client import session as tf_session

import sok
from sok.base import _ops as sok_ops
from sok.table import state
from tests.sok.staged_cases import asynchronous, batches_of, deeprec, same, samples, train


@pytest.fixture(autouse=True)
def _names():
    with deeprec():
        yield


def read(staged, hooks=(), config=None, feed_dict=None):
    """All batches of a stage."""
    found = []
    with tf.train.MonitoredTrainingSession(config=config, hooks=[tf.make_prefetch_hook(), *hooks]) as session:
        while not session.should_stop():
            found.append(session.run(staged, feed_dict))
    return found


def test_a_stage_gives_the_batches_in_their_order_and_structure():
    with tf.Graph().as_default():
        data = tf.data.Dataset.range(1, 6).map(
            lambda i: {
                "dense": tf.fill([i], i),
                "sparse": tf.sparse.from_dense([[i, 0], [0, 2 * i]]),
                "text": tf.as_string(i),
                "ragged": tf2.RaggedTensor.from_row_lengths(tf.range(i), [i, 0]),
            }
        )
        batch = tf.data.make_one_shot_iterator(data).get_next()
        staged = tf.staged({**batch, "none": None}, capacity=2)
        assert staged["none"] is None and isinstance(staged["sparse"], tf.SparseTensor)
        assert staged["dense"].shape.as_list() == [None]
        del staged["none"]
        found = read(staged)
    assert [one["text"] for one in found] == [b"1", b"2", b"3", b"4", b"5"]
    for i, one in enumerate(found, 1):
        np.testing.assert_array_equal(one["dense"], np.full(i, i))
        np.testing.assert_array_equal(one["sparse"].values, [i, 2 * i])
        assert one["ragged"].to_list() == [list(range(i)), []]


def test_runs_that_do_not_need_the_stage_take_no_batch():
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        ids = tf.staged(batches_of(*samples(0, 32))[0])
        count = tf.assign_add(step, tf.cast(tf.reduce_sum(ids) >= 0, tf.int64))
        with tf.train.MonitoredTrainingSession(hooks=[tf.make_prefetch_hook()]) as session:
            while not session.should_stop():
                assert session.run(step) == session.run(count) - 1
                last = session.run(step)
                session.run({"a": [step], "b": (tf.train.get_global_step(),)})
    assert last == 4


def test_a_batch_that_is_given_is_not_taken():
    with tf.Graph().as_default():
        data = tf.data.Dataset.range(2).map(lambda i: (tf.sparse.from_dense([[i + 1, 0]]), i + 1))
        sparse, dense = tf.staged(tf.data.make_one_shot_iterator(data).get_next())
        total = tf.sparse.reduce_sum(sparse) + dense
        of_sparse, found = tf.SparseTensorValue([[0, 0]], [50], [1, 2]), []
        with tf.train.MonitoredTrainingSession(hooks=[tf.make_prefetch_hook()]) as session:
            pair = {(sparse.values, dense): (np.array([50]), 3), sparse.indices: [[0, 0]], sparse.dense_shape: [1, 2]}
            for one in (None, {sparse: of_sparse, dense: 3}, pair, None):
                found.append(session.run(total, one))
        assert found == [2, 53, 53, 4]


def test_what_another_hook_asks_for_is_of_the_same_batch():
    seen = []

    class Watch(tf.train.SessionRunHook):
        def before_run(self, run_context):
            return tf.train.SessionRunArgs(total)

        def after_run(self, run_context, run_values):
            seen.append(run_values.results)

    with tf.Graph().as_default():
        ids = tf.staged(batches_of(*samples(0, 32))[0])
        total = tf.reduce_sum(ids)
        found = read(ids, [Watch()])
    assert seen == [one.sum() for one in found] and len(seen) == 4


def test_stages_may_be_chained():
    with tf.Graph().as_default():
        first = tf.staged(batches_of(*samples(0, 64))[0], capacity=2)
        second = tf.staged({"twice": 2 * first}, capacity=3)
        found = read(second["twice"])
    np.testing.assert_array_equal(np.concatenate(found), 2 * samples(0, 64)[0])


def test_what_is_fed_when_batches_are_read():
    with tf.Graph().as_default():
        place, other = tf.placeholder(tf.int64, []), tf.placeholder(tf.int64, [2])
        data = tf.data.make_one_shot_iterator(tf.data.Dataset.range(3))
        generator = iter([[np.int64([10 * i, 1])] for i in range(9)])
        staged = tf.staged(place + other, {place: data.get_next()}, items=[other], feed_generator=generator)
        found = read(staged)
        of_generator = tf.staged(1 * other, items=[other], feed_generator=iter([[[1, 2]], [[3, 4]]]))
        assert [one.tolist() for one in read(of_generator)] == [[1, 2], [3, 4]]
    assert [one.tolist() for one in found] == [[0, 1], [11, 2], [22, 3]]


def test_several_threads_read_all_batches_once_and_no_more_than_are_kept():
    reads, at_once = [], []
    lock = threading.Lock()

    def note(i):
        with lock:
            reads.append(int(i))
        return i

    with tf.Graph().as_default():
        data = tf.data.make_one_shot_iterator(tf.data.Dataset.range(40)).get_next()
        staged = tf.staged(tf.numpy_function(note, [data], tf.int64), capacity=3, num_threads=3)
        found = []
        with tf.train.MonitoredTrainingSession(hooks=[tf.make_prefetch_hook()]) as session:
            while not session.should_stop():
                found.append(int(session.run(staged)))
                at_once.append(len(reads) - len(found))
    assert sorted(found) == list(range(40)) and max(at_once) <= 3 + 3


def test_errors_of_reading():
    def fail(i):
        if i == 2:
            raise ValueError("nothing to see")
        return i

    with tf.Graph().as_default():
        data = tf.data.make_one_shot_iterator(tf.data.Dataset.range(5)).get_next()
        read_one = tf.numpy_function(fail, [data], tf.int64)
        ignoring = tf.staged(read_one, ignored_exception_types=[tf.errors.UnknownError, tf.errors.InvalidArgumentError])
        found = [int(one) for one in read(ignoring)]
        assert found == [0, 1, 3, 4]
        closing = tf.staged(read_one, closed_exception_types=[tf.errors.UNKNOWN, tf.errors.INVALID_ARGUMENT])
        assert [int(one) for one in read(closing)] == [0, 1]
        plain, found = tf.staged(read_one), []
        with (
            pytest.raises(tf.errors.OpError, match="nothing to see"),
            tf.train.MonitoredTrainingSession(hooks=[tf.make_prefetch_hook()]) as session,
        ):
            while not session.should_stop():
                found.append(int(session.run(plain)))
        assert found == [0, 1]


def test_no_thread_reads_on_after_the_session_where_what_it_ignores_goes_on():
    calls = iter(range(10**9))

    def fail():
        if next(calls):
            raise ValueError("nothing to see")
        return np.int64(1)

    with tf.Graph().as_default():
        batch = tf.numpy_function(fail, [], tf.int64)
        staged = tf.staged(batch, ignored_exception_types=[tf.errors.OpError, RuntimeError])
        with tf.train.MonitoredTrainingSession(hooks=[tf.make_prefetch_hook()]) as session:
            assert session.run(staged) == 1
    threads = [t for t in threading.enumerate() if t.name.startswith("sok-stage")]
    for thread in threads:
        thread.join(10)
    assert not [t for t in threads if t.is_alive()]


def test_without_the_hook_the_error_says_so():
    with tf.Graph().as_default():
        ids = tf.staged(batches_of(*samples(0, 8))[0])
        with (
            pytest.raises(tf.errors.InvalidArgumentError, match="needs_make_prefetch_hook"),
            tf.train.MonitoredTrainingSession() as session,
        ):
            session.run(ids)


def test_asynchronous_embeddings_are_those_of_the_step():
    same(train("sessions_one", 0, 2, "adam"), train("sessions_one", 0, 0, "adam"))


def test_a_session_without_hooks():
    with tf.Graph().as_default():
        batch = batches_of(*samples(0, 24))[0]
        table = tf.get_embedding_variable("sessions_plain", 2, initializer=tf.ones_initializer())
        found = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.staged(batch)))
        with tf.Session(config=asynchronous(2)) as session:
            session.run(tf.global_variables_initializer())
            assert [session.run(found) for _ in range(3)] == [8 * 3 * 2] * 3
            with pytest.raises(tf.errors.OutOfRangeError, match="'prefetch' has no more batches"):
                session.run(found)
    assert not [t for t in threading.enumerate() if t.name.startswith("sok-stage")]


def test_a_session_that_is_made_anew_goes_on_with_the_batches_that_were_read(monkeypatch):
    """The step that was lost is made again with its own batch, and no batch is left out or seen twice."""
    lost = iter([3, 4, 11])
    due, runs = next(lost), []
    run = tf.Session.run

    def flaky(self, fetches, feed_dict=None, options=None, run_metadata=None):
        nonlocal due
        if isinstance(fetches, dict) and "caller" in fetches and fetches["caller"] is ids:
            runs.append(1)
            if len(runs) == due:
                due = next(lost, 0)
                raise tf.errors.AbortedError(None, None, "lost")
        return run(self, fetches, feed_dict, options, run_metadata)

    monkeypatch.setattr(tf.Session, "run", flaky)
    for capacity in (0, 2):
        runs.clear()
        with tf.Graph().as_default():
            table = tf.get_embedding_variable("sessions_lost", 2)
            ids = tf.staged(batches_of(*samples(0, 80))[0], capacity=3)
            tf.nn.embedding_lookup(table, ids)
            found = read(ids, config=asynchronous(capacity))
        batches = [one.tolist() for one in np.split(samples(0, 80)[0], 10)]
        numbers = [batches.index(one.tolist()) for one in found]
        # A new session reads the data from their beginning, after what had been read: by then 3 batches at the least.
        assert numbers[:3] == [0, 1, 2] and numbers[-1] == 9 and len(runs) == len(numbers) + 3
        assert all(after in (before + 1, 0) for before, after in zip(numbers, numbers[1:], strict=False)), numbers
        assert numbers.count(0) <= 4
        lost = iter([3, 4, 11])
        due = next(lost)


def test_what_a_generator_gave_while_the_session_was_lost_is_not_left_out(monkeypatch):
    run, steps, is_reading = tf.Session.run, [], threading.Event()

    def lose_one(self, fetches, *args, **kwargs):
        if isinstance(fetches, dict) and "caller" in fetches:
            steps.append(1)
            if len(steps) == 3:
                is_reading.clear()
                assert is_reading.wait(10)
                raise tf.errors.AbortedError(None, None, "lost")
        return run(self, fetches, *args, **kwargs)

    def slowly(i):
        is_reading.set()
        time.sleep(0.1)
        return i

    monkeypatch.setattr(tf.Session, "run", lose_one)
    with tf.Graph().as_default():
        place = tf.placeholder(tf.int64, [])
        batch = tf.numpy_function(slowly, [place], tf.int64)
        found = read(tf.staged(batch, capacity=20, items=[place], feed_generator=iter([[i] for i in range(12)])))
    assert found == list(range(12))


def test_thread_pools(caplog):
    config = asynchronous(1)
    pool = config.session_stage_subgraph_thread_pool.add()
    pool.inter_op_threads_num, pool.intra_op_threads_num, pool.global_name = 2, 2, "of_stages"
    config.graph_options.optimizer_options.async_embedding_options.use_stage_subgraph_thread_pool = True
    message = config.to_message()
    assert [(p.num_threads, p.global_name) for p in message.session_inter_op_thread_pool] == [(0, ""), (2, "of_stages")]
    with tf.Graph().as_default():
        batch = batches_of(*samples(0, 16))[0]
        ids = tf.staged(batch, use_stage_subgraph_thread_pool=True, stage_subgraph_thread_pool_id=0)
        assert len(read(ids, config=config)) == 2
        wrong = tf.staged(batch, use_stage_subgraph_thread_pool=True, stage_subgraph_thread_pool_id=5)
        with pytest.raises(tf.errors.InvalidArgumentError, match="inter_op_thread_pool: 6"):
            read(wrong, config=config)
    config.graph_options.optimizer_options.async_embedding_options.stage_subgraph_thread_pool_id = 1
    with pytest.raises(ValueError, match=r"stage_subgraph_thread_pool_id` must be .*: there are 1\. Received: 1\."):
        tf.Session(config=config)


def test_options_that_are_missing_or_wrong():
    for missing in ("threads_num", "capacity"):
        config = asynchronous(3)
        setattr(config.graph_options.optimizer_options.async_embedding_options, missing, 0)
        with pytest.raises(ValueError, match=rf"async_embedding_options\.{missing}` must be set .*Received: 0\."):
            tf.Session(config=config)
    options = tf.ConfigProto().graph_options.optimizer_options
    with pytest.raises(TypeError, match="'do_async_embedding' must be bool. Received: 1"):
        options.do_async_embedding = 1
    with pytest.raises(TypeError, match="'capacity' must be int. Received: True"):
        options.async_embedding_options.capacity = True
    with pytest.raises(AttributeError, match="no field 'capacities'. There are: threads_num, capacity"):
        options.async_embedding_options.capacities = 2
    with pytest.raises(AttributeError, match="cannot be assigned"):
        options.async_embedding_options = 2
    with pytest.raises(AttributeError):
        options.do_asink_embedding = True  # of TensorFlow's own message


def test_a_config_is_tensorflows_own_besides():
    config = tf.ConfigProto(allow_soft_placement=True, device_count={"CPU": 1})
    config.gpu_options.allow_growth = True
    config.graph_options.optimizer_options.opt_level = -1
    config.inter_op_parallelism_threads = 3
    message = config.to_message()
    config.session_stage_subgraph_thread_pool.add().inter_op_threads_num = 3
    config.graph_options.optimizer_options.async_embedding_options.capacity = 7
    copied = copy.deepcopy(config)
    assert copied.graph_options.optimizer_options.async_embedding_options.capacity == 7
    copied.graph_options.optimizer_options.do_async_embedding = True
    assert not config.graph_options.optimizer_options.do_async_embedding
    assert copied.to_message() == config.to_message() and len(copied.session_stage_subgraph_thread_pool) == 1
    assert message.allow_soft_placement and message.gpu_options.allow_growth and message.device_count["CPU"] == 1
    assert (message.graph_options.optimizer_options.opt_level, message.inter_op_parallelism_threads) == (-1, 3)
    with tf.Graph().as_default(), tf.Session(config=config) as session:
        assert session.run(tf.constant(2)) == 2
        assert session.run.__self__ is session  # nothing stands for it


def test_smart_stage_is_off_and_that_is_said(caplog):
    config = asynchronous(1)
    config.graph_options.optimizer_options.do_smart_stage = True
    tf.train.mark_target_node([])
    with caplog.at_level(logging.WARNING, "sok"), tf.Graph().as_default():
        tf.Session(config=config).close()
    assert "do_smart_stage" in caplog.text and "off" in caplog.text


def test_arguments_of_staged():
    with tf.Graph().as_default():
        ids = tf.constant([1])
        for what in ({"capacity": 0}, {"num_threads": True}):
            with pytest.raises(ValueError, match=f"`{next(iter(what))}` must be a whole number, at least 1"):
                tf.staged(ids, **what)
        with pytest.raises(ValueError, match="`items` and `feed_generator` together"):
            tf.staged(ids, items=[ids])
        with pytest.raises(ValueError, match="`stage_subgraph_thread_pool_id` must be"):
            tf.staged(ids, use_stage_subgraph_thread_pool=True, stage_subgraph_thread_pool_id=-1)
        with pytest.raises(TypeError, match="`features` must be tensors"):
            tf.staged([1])
        with pytest.raises(ValueError, match="`stale` must be"):
            tf.staged(ids, stale=0)
        with pytest.raises(ValueError, match=r"The graph has no stage: call sok\.deeprec\.staged"):
            sok.deeprec.batch_weight()
    with pytest.raises(RuntimeError, match="is for v1 graphs"):
        sok.deeprec.staged(tf.constant([1]))
    with pytest.raises(RuntimeError, match="is for v1 graphs"):
        tf2.function(sok.deeprec.staged)(tf.constant([1]))


def test_uninstall_gives_sessions_back():
    sok.deeprec.uninstall()
    try:
        assert not hasattr(tf, "staged") and tf.ConfigProto.__module__.startswith("tensorflow")
        assert tf_session.BaseSession.__init__.__module__.startswith("tensorflow")
    finally:
        sok.deeprec.install()


def test_rows_in_files_are_read_ahead(tmp_path, monkeypatch):
    monkeypatch.setenv("SOK_STORAGE_FRAMES", "64")
    found, reads = [], []
    for capacity in (0, 1):
        with tf.Graph().as_default():
            table = sok.EmbeddingVariable(
                2, 1000, name="sessions_file", storage=sok.Storage(memory_bytes=2**22, path=tmp_path / str(capacity))
            )
            keys = np.arange(600) % 300  # each twice, and in between all others, for which the cache has no room
            ids = tf.staged(batches_of(keys, keys, 20)[0])
            rows = tf.nn.embedding_lookup(table, ids)
            optimizer = sok.DistributedOptimizer(tf.train.AdagradOptimizer(0.1))
            update = optimizer.minimize(tf.reduce_sum(tf.square(rows)))
            counts = sok_ops.lib().sok_table_storage(table.handle)
            with tf.train.MonitoredTrainingSession(
                config=asynchronous(capacity), hooks=[tf.make_prefetch_hook()]
            ) as session:
                while not session.should_stop():
                    found.append(session.run([rows, update])[0])
                    reads.append(session.run(counts)[state._STORAGE.index("read_ahead")])
    same(found[:30], found[30:])
    assert reads[29] == 0 and reads[-1] > 150
