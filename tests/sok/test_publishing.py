"""What a job publishes as it trains, and those who follow: rows, deletions and dense weights of one step."""

import re
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.summary.summary_iterator import summary_iterator

import sok
from sok.checkpoint import feed, publishing, read_manifest
from tests.messages import saying
from tests.sok.feed_cases import DIM, new_table, train
from tests.sok.threads_world import checked, run_world


@pytest.fixture(scope="module", autouse=True)
def init():
    sok.Init()


class Clock:
    """Stands for `time` in sok.checkpoint.publishing."""

    def __init__(self, patch):
        self.now = 100.0
        patch.setattr(publishing, "time", self)

    def monotonic(self):
        return self.now


def rows(table):
    keys, values = (t.numpy() for t in table.export())
    return dict(zip(keys.tolist(), values.tolist(), strict=True))


def saves(folder):
    return len(read_manifest(folder).links)


def pair(name, **settings):
    """A table that is trained, one that follows, and a dense weight of each."""
    trained, served = new_table(name, **settings), new_table(f"{name}_there", **settings)
    return trained, served, tf.Variable(0.0), tf.Variable(0.0)


def followed(folder, trained, served, there, **more):
    return sok.follow(folder, {trained.table_name: served}, dense={"weight": there}, **more)


# When.


def test_every_so_many_steps(tmp_path):
    publisher = sok.Publisher(tmp_path, new_table("steps"), every_steps=3, dense=False)
    assert [publisher.step() for _ in range(7)] == [False, False, True, False, False, True, False]
    publisher.publish()  # and so many steps after that
    assert [publisher.step() for _ in range(3)] == [False, False, True] and saves(tmp_path) == 4


def test_neither_steps_nor_seconds_publish_where_only_the_program_does(tmp_path):
    publisher = sok.Publisher(tmp_path, new_table("by_hand"), dense=False)
    assert not any(publisher.step() for _ in range(20)) and list(tmp_path.iterdir()) == []
    publisher.publish()
    assert saves(tmp_path) == 1


@pytest.mark.parametrize("seconds", [0.01, 0.5, 3.0])
def test_every_so_many_seconds(tmp_path, monkeypatch, seconds):
    clock = Clock(monkeypatch)
    publisher, at = sok.Publisher(tmp_path, new_table("seconds"), every_seconds=10, dense=False), []
    for _ in range(round(65 / seconds)):
        clock.now += seconds
        if publisher.step():
            at.append(clock.now - 100)
    apart = np.diff([0, *at])
    assert len(at) >= 5 and (apart >= 10).all() and (apart < 10 + 2 * seconds).all()


def test_steps_that_take_longer_and_shorter_are_no_reason_to_wait_for_long(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    publisher, at = sok.Publisher(tmp_path, new_table("uneven"), every_seconds=10, dense=False), []
    for seconds in [0.1] * 250 + [1.0] * 60 + [0.1] * 500:
        clock.now += seconds
        if publisher.step():
            at.append(clock.now - 100)
    assert len(at) >= 8 and np.diff([0, *at]).max() <= 100  # a guess of the steps before is ten times too long, once
    assert (np.diff(at)[-3:] <= 10.5).all()


def test_most_steps_look_at_no_clock_of_another_worker(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    publisher, looks = sok.Publisher(tmp_path, new_table("looks"), every_seconds=10, dense=False), []
    together = publishing.together
    monkeypatch.setattr(publishing, "together", lambda *args: looks.append(args[1]) or together(*args))
    for _ in range(1000):
        clock.now += 0.1
        publisher.step()
    assert saves(tmp_path) >= 9 and len(looks) <= 4 * saves(tmp_path)


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"every_steps": 1, "every_seconds": 1}, ValueError, "not both"),
        ({"every_steps": 0}, ValueError, "every_steps"),
        ({"every_steps": 1.5}, (TypeError, ValueError), "every_steps"),
        ({"every_seconds": 0}, ValueError, "positive number. Received: 0"),
        ({"every_seconds": float("nan")}, ValueError, "positive number"),
        ({"every_seconds": float("inf")}, ValueError, "positive number"),
        ({"every_seconds": "1"}, ValueError, "positive number. Received: '1'"),
        ({"every_seconds": True}, ValueError, "positive number. Received: True"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, settings, error, said):
    with pytest.raises(error, match=saying(said)):
        sok.Publisher(tmp_path, new_table("refused"), dense=False, **settings)
    with pytest.raises(ValueError, match=saying("`dense=True` is for a Keras model")):
        sok.Publisher(tmp_path, new_table("refused")).publish()


def test_workers_that_ask_for_others_are_told(tmp_path, monkeypatch):
    def worker(transport):
        sok.Publisher(tmp_path, new_table("apart"), every_steps=1 + transport.rank)

    for result in run_world(2, worker, monkeypatch):
        assert isinstance(result, ValueError) and "sok.Publisher: [every_steps, every_seconds]" in str(result)


# What.


def test_a_follower_gets_rows_deletions_and_weights_of_one_step(tmp_path):
    trained, served, weight, there = pair("one_step")
    publisher = sok.Publisher(tmp_path, trained, dense={"weight": weight}, max_chain=3)
    follower, optimizer = followed(tmp_path, trained, served, there), sok.optimizers.Adagrad(0.1)
    lengths = []
    for step in range(8):
        train(trained, optimizer, [step, step + 1, 50])
        trained.erase([step - 2])
        weight.assign(step)
        publisher.publish()
        trained.assign([50], np.full([1, DIM], -1.0))  # is of the next one
        weight.assign(-1)
        lengths.append(saves(tmp_path))
        if step % 3 != 1:  # else it is behind
            assert follower.poll() and not follower.poll()
            expected = rows(trained) | {50: rows(served)[50]}
            assert rows(served) == expected and float(there) == step and rows(served)[50] != [-1.0] * DIM
            assert follower.generation == read_manifest(tmp_path).generation
    assert lengths == [1, 2, 3, 1, 2, 3, 1, 2]  # a chain that is full begins anew


def test_a_follower_that_was_away_catches_up(tmp_path):
    trained, served, weight, there = pair("away")
    publisher, follower = sok.Publisher(tmp_path, trained, dense={"weight": weight}), None
    for away in (1, 3, 7):
        for number in range(away):
            trained.assign([number, 100 * away], np.full([2, DIM], away + number))
            trained.erase([number - 1])
            weight.assign(away + number)
            if number == 4:
                sok.save(tmp_path, trained, dense={"weight": weight})  # a full one in between
            publisher.publish()
        follower = follower or followed(tmp_path, trained, served, there)
        assert follower.poll() and rows(served) == rows(trained) and float(there) == float(weight)


def test_rows_that_are_evicted_leave_followers_too(tmp_path):
    trained, served, weight, there = pair("evicted", eviction=sok.Eviction(older_than=2, every=1))
    publisher, optimizer = sok.Publisher(tmp_path, trained, dense={"weight": weight}), sok.optimizers.SGD(0.1)
    follower, gone = followed(tmp_path, trained, served, there), set()
    for step in range(6):
        train(trained, optimizer, [step, step + 1])
        publisher.publish()
        follower.poll()
        assert rows(served) == rows(trained)
        gone |= set(range(step)) - set(rows(served))
    assert gone


def test_a_model_of_keras_is_published_by_a_callback(tmp_path):
    ids = keras.Input([2], dtype="int64")
    hidden = keras.layers.Flatten()(sok.Embedding(100, 2, name="by_callback")(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.BatchNormalization()(hidden)))
    model.compile(sok.DistributedOptimizer("sgd"), "mse")
    data, publish = (np.arange(16).reshape(8, 2), np.ones([8, 1])), sok.callbacks.Publish(tmp_path, every_steps=3)
    for epochs in (1, 2):
        model.fit(*data, batch_size=2, epochs=epochs, verbose=0, callbacks=[publish])
        table = next(v for v in model.weights if "by_callback" in v.name)
        piece = {
            key: row for p in sok.deltas(tmp_path) for key, row in zip(p.keys.tolist(), p.rows.tolist(), strict=True)
        }
        assert piece == rows(table)
        reader = tf.train.load_checkpoint(str(tmp_path / read_manifest(tmp_path).dense.name))
        kept = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
        for variable in model.weights:
            if variable is not table:
                assert any(np.array_equal(np.asarray(variable), value) for value in kept.values()), variable.path
    assert saves(tmp_path) == 2 + 3  # of four steps, of eight; each time at the end, too


def test_a_callback_publishes_the_model_of_the_fit_it_is_given_to(tmp_path):
    def model(name):
        ids = keras.Input([2], dtype="int64")
        hidden = keras.layers.Flatten()(sok.Embedding(100, 2, name=name)(ids))
        made = keras.Model(ids, keras.layers.Dense(1)(hidden))
        made.compile(sok.DistributedOptimizer("sgd"), "mse")
        return made

    data, publish = (np.arange(8).reshape(4, 2), np.ones([4, 1])), sok.callbacks.Publish(tmp_path, every_steps=100)
    model("of_the_first_fit").fit(*data, verbose=0, callbacks=[publish])
    with pytest.warns(UserWarning, match="not changes alone: it holds the tables"):
        model("of_the_second_fit").fit(*data, verbose=0, callbacks=[publish])
    assert [table.name for table in read_manifest(tmp_path).tables] == ["of_the_second_fit"]


# How far behind.


def test_the_lag_is_told_and_written_for_tensorboard(tmp_path, monkeypatch):
    trained, served, weight, there = pair("lag")
    follower = followed(tmp_path / "feed", trained, served, there, log_dir=tmp_path / "logs")
    assert follower.lag is None and not follower.poll()
    publisher = sok.Publisher(tmp_path / "feed", trained, dense={"weight": weight})
    for _ in range(2):
        publisher.publish()
        follower.poll()
        assert 0 <= follower.lag < 60
    with monkeypatch.context() as patch:
        patch.setattr(feed, "seconds_since", lambda _: 77.0)
        assert follower.lag == 77.0 and not follower.poll()
        patch.setattr(feed, "seconds_since", lambda _: -3.0)  # another host's clock
        assert follower.lag == 0.0
    (file,) = (tmp_path / "logs").iterdir()
    told = [
        (event.step, value.tag, float(tf.make_ndarray(value.tensor)))
        for event in summary_iterator(str(file))
        for value in event.summary.value
    ]
    assert [(step, tag) for step, tag, _ in told] == [(n, "feed/lag_seconds") for n in (1, 2, 2)]
    assert told[-1][2] == 77.0 and all(0 <= seconds < 60 for *_, seconds in told[:-1])


# One save, for all who read.


@pytest.mark.parametrize("max_chain", [1, 3])
def test_readers_see_rows_and_weights_of_one_save(tmp_path, max_chain):
    trained, served, weight, there = pair("read")
    publisher = sok.Publisher(tmp_path, trained, dense={"weight": weight}, max_chain=max_chain)
    follower, over, wrong, seen = followed(tmp_path, trained, served, there), threading.Event(), [], set()
    keys = np.arange(100)

    def polls():
        while not over.is_set():
            follower.poll()

    def reads():
        while not over.is_set():
            with follower.reading():
                found, value = served.sparse_read(keys).numpy(), float(there)
                count = int(served.size())
            if follower.generation is not None and count and not (found == value).all():
                wrong.append((value, np.unique(found)))
            seen.add(value)

    threads = [threading.Thread(target=body) for body in (polls, reads, reads)]
    for thread in threads:
        thread.start()
    for number in range(1, 41):
        trained.assign(keys, np.full([100, DIM], number))
        weight.assign(number)
        publisher.publish()
    over.set()
    for thread in threads:
        thread.join(60)
    follower.poll()
    assert not wrong and len(seen) > 2 and float(there) == 40


def test_nobody_reads_where_a_save_takes_the_place_of_the_one_that_is_read(tmp_path, monkeypatch):
    trained, served, weight, there = pair("replaced")
    dense, keys = {"weight": weight}, [1, 2]
    follower, found = followed(tmp_path, trained, served, there), []

    def publish(value):
        trained.assign(keys, np.full([2, DIM], value))
        weight.assign(value)
        sok.save(tmp_path, trained, dense=dense)

    def reads():
        with follower.reading():
            found.append((np.unique(served.sparse_read(keys).numpy()).tolist(), float(there)))

    publish(1.0)
    follower.poll()
    publish(2.0)
    readers, restore = [], feed.restore

    def slowly(*args, **kwargs):
        if not readers:
            publish(3.0)
        generation = restore(*args, **kwargs)
        readers.append(threading.Thread(target=reads))
        readers[-1].start()
        return generation

    monkeypatch.setattr(feed, "restore", slowly)
    assert follower.poll()
    for reader in readers:
        reader.join(30)
    assert found == [([3.0], 3.0)] * 2 and follower.generation == read_manifest(tmp_path).generation
    reads()
    assert found[-1] == ([3.0], 3.0)


def test_publishers_that_are_killed_leave_no_mix_to_who_follows(forked, tmp_path):
    script = Path(__file__).with_name("publishing_killed_script.py")
    environment = {"CUDA_VISIBLE_DEVICES": "-1"}
    done = forked.run(script, tmp_path / "run", str(tmp_path / "feed"), "5", "1", environment=environment)
    assert done.status == 0, done.stderr[-4000:]
    seen, last = map(int, re.findall(r"\d+", done.stdout))
    assert seen >= 3 and last >= 10
    assert sok.checkpoint.verify(tmp_path / "feed") == []


def test_several_workers_publish_and_follow_together(tmp_path, monkeypatch):
    def worker(transport):
        trained, served = (sok.EmbeddingVariable(DIM, 200, name=n, seed=5) for n in ("trained", "served"))
        weight, there = tf.Variable(0.0), tf.Variable(0.0)
        publisher = sok.Publisher(tmp_path, trained, dense={"weight": weight}, every_steps=2)
        follower, published = sok.follow(tmp_path, {"trained": served}, dense={"weight": there}), []
        for step in range(4):
            key = 2 * step + transport.rank
            trained.assign([key], np.full([1, DIM], step))
            weight.assign(step + 100 * transport.rank)  # rank 0's counts
            published.append(publisher.step())
        assert follower.poll() and rows(served) == rows(trained) and float(there) == 3.0
        return published

    assert checked(run_world(2, worker, monkeypatch)) == [[False, True, False, True]] * 2
