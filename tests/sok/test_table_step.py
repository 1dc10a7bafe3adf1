"""The step of a table: one more with every update call, kept by whatever keeps the table."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.checkpoint import manifest as manifests
from sok.lookup.lookup import lookup_rows
from sok.table import state
from tests.sok.threads_world import checked, run_world

KEYS = tf.constant([1, 2], tf.int64)
OPTIMIZERS = {
    "fused": lambda: sok.optimizers.Adam(0.1),
    "stock on rows": lambda: sok.OptimizerWrapper(tf_keras.optimizers.RMSprop(0.1, momentum=0.5)),
    "distributed": lambda: sok.DistributedOptimizer(keras.optimizers.Adam(0.1)),
    "distributed, tf_keras": lambda: sok.DistributedOptimizer(tf_keras.optimizers.Adam(0.1)),
}


def made(name):
    return sok.EmbeddingVariable(2, 50, name=name, seed=1)


def gradient_of(table, keys=KEYS):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(lookup_rows(table, keys) - 1.0))
    return tape.gradient(loss, table)


def no_rows():
    return tf.IndexedSlices(tf.zeros([0, 2]), tf.zeros([0], tf.int64))


def saved_steps(folder):
    return [link.tables[0].step for link in manifests.read_manifest(folder).links]


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_every_call_counts_with_a_gradient_or_without(which, call):
    tables, weight, optimizer = [made("a"), made("b")], tf.Variable([1.0]), OPTIMIZERS[which]()

    def step(kind):
        grads = {"rows": gradient_of(tables[1]), "no rows": no_rows(), "none": None}
        pairs = [(gradient_of(tables[0]), tables[0]), (grads[kind], tables[1]), (tf.constant([1.0]), weight)]
        optimizer.apply_gradients([pair for pair in pairs if pair[1] is not weight or which != "fused"])

    for number, kind in enumerate(("rows", "no rows", "none"), 1):
        call(lambda kind=kind: step(kind))
        assert [int(table.step) for table in tables] == [number, number]
    with pytest.warns(UserWarning) if which == "fused" else tf.name_scope(""):
        pairs = [(None, tables[1]), (tf.constant([1.0]), weight)]
        call(lambda: optimizer.apply_gradients(pairs[: 1 if which == "fused" else 2]))
    assert [int(table.step) for table in tables] == [3, 4]


def test_a_call_that_fails_does_not_count(call):
    table, optimizer = made("failed"), sok.optimizers.SGD(0.1, nonfinite_gradients="raise")
    bad = tf.IndexedSlices(tf.fill([1, 2], np.nan), gradient_of(table).indices[:1])
    with pytest.raises(tf.errors.InvalidArgumentError):
        call(lambda: optimizer.apply_gradients([(bad, table)]))
    assert int(table.step) == 0


def test_a_session_counts(tmp_path):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table, optimizer = made("in_session"), sok.optimizers.Adagrad(0.1)
        loss = tf.reduce_sum(lookup_rows(table, tf.constant([1, 2], tf.int64)))
        update = optimizer.apply_gradients([(tf.gradients(loss, table)[0], table)])
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(3):
            session.run(update)
        sok.save(tmp_path, table, optimizer, session=session)
        session.run(update)
        assert session.run(table.step) == 4
        sok.restore(tmp_path, table, optimizer, session=session)
        assert session.run(table.step) == 3 and saved_steps(tmp_path) == [3]


def test_checkpoints_deltas_and_followers_keep_it(tmp_path):
    table, optimizer, copy, served = made("kept"), sok.optimizers.SGD(0.1), made("copy"), made("served")
    follower = sok.follow(tmp_path, {"kept": served})
    for number in (1, 2):
        optimizer.apply_gradients([(gradient_of(table), table)])
        sok.save(tmp_path, table, incremental=True)
        assert follower.poll() and int(served.step) == number
    assert saved_steps(tmp_path) == [1, 2]
    for piece in sok.deltas(tmp_path):
        piece.apply({"kept": copy})
    assert int(copy.step) == 2
    optimizer.apply_gradients([(gradient_of(table), table)])
    saving = sok.save(tmp_path / "beside", table, asynchronous=True)
    optimizer.apply_gradients([(no_rows(), table)])
    saving.result()
    assert saved_steps(tmp_path / "beside") == [3] and int(table.step) == 4
    sok.compact(tmp_path)
    sok.restore(tmp_path, table)
    assert int(table.step) == 2 and saved_steps(tmp_path) == [2]


def test_a_file_of_keras_keeps_it(tmp_path):
    model = keras.Sequential([keras.Input((2,), dtype="int64"), sok.layers.DistributedEmbedding("sum", 50, 2, 2, 1)])
    table = model.layers[-1].embedding_variable
    sok.optimizers.SGD(0.1).apply_gradients([(gradient_of(table), table)])
    model.save_weights(tmp_path / "m.weights.h5")
    table.erase(KEYS)
    sok.table.state.set_step(table, 9)
    model.load_weights(tmp_path / "m.weights.h5")
    assert int(table.step) == 1


def test_of_a_checkpoint_without_steps_the_most_that_optimizers_counted(tmp_path):
    table, adam, sgd = made("older"), sok.optimizers.Adam(0.1, name="a"), sok.optimizers.Adagrad(0.1, name="b")
    for optimizer in (adam, sgd, sgd):
        optimizer.apply_gradients([(gradient_of(table), table)])
    sok.save(tmp_path, table, [adam, sgd])
    path = tmp_path / manifests.NAME
    body = json.loads(path.read_text())
    del body["checksum"]
    assert body["version"] == 1 and body["tables"][0].pop("step") == 3  # what reads it need not know steps
    path.write_text(json.dumps({**body, "checksum": manifests.checksum(body)}))
    assert saved_steps(tmp_path) == [None]
    sok.restore(tmp_path, table, [adam, sgd])
    assert int(table.step) == 2


def test_workers_that_disagree_are_warned(tmp_path, monkeypatch):
    def program(transport):
        table, optimizer = made("uneven"), sok.optimizers.SGD(0.1)
        for _ in range(1 + transport.rank):
            optimizer.apply_gradients([(no_rows(), table)])
        sok.save(tmp_path, table)

    with pytest.warns(UserWarning, match=r"disagree about the step of table 'uneven': by rank \[1, 2\].*Saved is 2"):
        checked(run_world(2, program, monkeypatch))
    assert saved_steps(tmp_path) == [2]


def test_a_negative_step_is_refused():
    table = sok.EmbeddingVariable(2, 10)
    with pytest.raises(tf.errors.InvalidArgumentError, match="`step` must not be negative. Received: -1"):
        state.set_step(table, -1)
    assert int(table.step) == 0
