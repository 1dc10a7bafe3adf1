"""`sok.elastic` on one worker: commits, going back to them, and what is refused."""

import shutil

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import CheckpointError
from sok.job import context

GONE = "Horovod has been shut down. This was caused by an exception on one of the ranks"


@pytest.fixture(autouse=True)
def _job():
    sok.shutdown()
    yield
    sok.shutdown()


@pytest.fixture
def rejoined(monkeypatch):
    """Whether all agreed, each time that another job was to begin; this one goes on."""
    calls = []
    monkeypatch.setattr(context, "rejoin", calls.append)
    monkeypatch.setattr(context, "is_elastic", lambda: True)
    return calls


def make(path, **values):
    table = sok.EmbeddingVariable(dim=2, capacity=100, name="table", initializer="ones")
    optimizer, weights = sok.optimizers.Adam(0.1), tf.Variable([1.0, -1.0])
    state = sok.elastic.State(path, [table, [optimizer, weights]], **{"step": 0, **values})
    return state, table, optimizer, weights


def take_step(table, optimizer, weights, number):
    keys = tf.constant([number, number + 1], tf.int64)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, keys) * weights * 2)
    of_table, of_weights = tape.gradient(loss, [table, weights])
    optimizer.apply_gradients([(of_table, table)])
    weights.assign_sub(0.1 * of_weights)


def contents(table, optimizer, weights):
    keys, rows = (tensor.numpy() for tensor in table.export())
    order = np.argsort(keys)
    return keys[order].tolist(), rows[order].tolist(), weights.numpy().tolist(), int(optimizer.iterations)


def test_a_lost_worker_takes_all_back_to_the_last_commit(tmp_path, rejoined):
    state, *made = make(tmp_path)
    reached, committed = [], []

    @sok.elastic.run
    def train(state, more):
        reached.append(state.step)
        if committed:
            assert contents(*made) == committed[0]
        while state.step < 6:
            take_step(*made, state.step)
            state.step += 1
            if state.step == 4:
                state.commit()
                committed.append(contents(*made))
            if state.step == 5 and not rejoined:
                raise tf.errors.UnknownError(None, None, GONE)
        return more

    assert train(state, "given") == "given"
    assert reached == [0, 4] and rejoined == [False] and state.step == 6
    assert int(made[0].step) == 6 and int(made[1].iterations) == 6
    assert len(list(tmp_path.glob("elastic-*"))) == 1
    # A job that is started anew goes on from there.
    sok.shutdown()
    state, *made = make(tmp_path)
    assert sok.elastic.run(lambda state: (state.step, contents(*made)))(state) == (4, committed[0])


def test_other_errors_are_passed_on(tmp_path, rejoined):
    state, *_ = make(tmp_path)

    def fail(state):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        sok.elastic.run(fail)(state)
    assert rejoined == []


def test_without_a_launcher_a_lost_worker_ends_the_others(tmp_path):
    state, *_ = make(tmp_path)

    def lose(state):
        raise tf.errors.UnknownError(None, None, GONE)

    with pytest.raises(tf.errors.UnknownError, match="shut down"):
        sok.elastic.run(lose)(state)


def test_an_elastic_job_of_horovodrun_is_refused(tmp_path, monkeypatch):
    state, *_ = make(tmp_path)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(RuntimeError, match="Start it by `sok elastic"):
        sok.elastic.run(lambda state: None)(state)


def test_workers_that_come_let_nothing_be_done_again(tmp_path, rejoined, monkeypatch):
    state, *made = make(tmp_path)
    reached, told = [], [False, True, False]
    monkeypatch.setattr(context, "are_changes", lambda: told.pop() if told else False)

    @sok.elastic.run
    def train(state):
        reached.append(state.step)
        while state.step < 3:
            take_step(*made, state.step)
            state.step += 1
            state.commit()

    train(state)
    assert reached == [0, 2] and int(made[0].step) == 3 and rejoined == [True]


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`tracked` holds no embedding table"):
        sok.elastic.State(tmp_path, [tf.Variable(1.0)])
    with pytest.raises(ValueError, match="'commit' for itself"):
        sok.elastic.State(tmp_path, [tf.Variable(1.0)], commit=3)
    with pytest.raises(TypeError, match=r"takes a sok\.elastic\.State first. Received: 3"):
        sok.elastic.run(lambda state: None)(3)
    state, *_ = make(tmp_path)
    sok.elastic.run(lambda state: None)(state)
    sok.shutdown()
    table = sok.EmbeddingVariable(dim=2, capacity=100, name="table", initializer="ones")
    other = sok.elastic.State(tmp_path, [table, sok.optimizers.Adam(0.1), tf.Variable([1.0])], step=0)
    with pytest.raises(ValueError, match=r"has shape \(1,\).*it has \(2,\)"):
        sok.elastic.run(lambda state: None)(other)
    (dense,) = tmp_path.glob("elastic-*.npz")
    dense.write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="elastic-.*cannot be read"):
        sok.elastic.run(lambda state: None)(other)


@pytest.mark.parametrize("rows", [0, 2])
def test_a_loss_before_the_first_commit_starts_anew_what_has_no_rows(tmp_path, rejoined, monkeypatch, rows):
    state, table, *_ = make(tmp_path)
    if rows:
        table.assign(tf.constant([3, 8], tf.int64), tf.ones([2, 2]))
    save, lost = state._save, [True]

    def lose():
        if lost.pop():
            sok.shutdown()  # as rejoining does
            sok.Init()
            lost.append(False)
            raise tf.errors.UnknownError(None, None, GONE)
        lost.append(False)
        save()

    monkeypatch.setattr(state, "_save", lose)
    if rows:
        with pytest.raises(RuntimeError, match="lost before the first commit, and tables held rows"):
            sok.elastic.run(lambda state: state.step)(state)
    else:
        assert sok.elastic.run(lambda state: state.step)(state) == 0
        assert table.job is context.get_job() and rejoined == [False]


def test_a_loss_without_any_commit_left_says_so(tmp_path, rejoined):
    state, *_ = make(tmp_path / "saves")

    def lose(state):
        shutil.rmtree(tmp_path / "saves")
        raise tf.errors.UnknownError(None, None, GONE)

    with pytest.raises(RuntimeError, match="A worker is lost, and .*saves holds no commit"):
        sok.elastic.run(lose)(state)
