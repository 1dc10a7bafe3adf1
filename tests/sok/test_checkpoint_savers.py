"""What is refused by the savers for several workers, and how they behave with one."""

import os
import shutil
from unittest import mock

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import keras_files
from tests.messages import saying
from tests.sok.checkpoint_cases import DIM, new_table

v1 = tf.compat.v1


def model_with_table():
    layer = sok.DistributedEmbedding("sum", 100, DIM, slot_num=1, max_nnz=1)
    return keras.Sequential([keras.Input([1], dtype="int64"), layer]), layer.embedding_variable


def test_weights_need_a_file_of_keras_and_a_table(tmp_path):
    model, _ = model_with_table()
    for call in (sok.save_weights, sok.load_weights):
        with pytest.raises(ValueError, match=saying("`path`", "in '.weights.h5'", "Received: 'weights'")):
            call(model, "weights")
        with pytest.raises(ValueError, match="holds no embedding table"):
            call(keras.Sequential([keras.layers.Dense(1)]), "m.weights.h5")


def test_weights_without_the_folder_beside_are_refused(tmp_path):
    model, table = model_with_table()
    table.assign([1], np.ones([1, DIM]))
    path = str(tmp_path / "m.weights.h5")
    with pytest.raises(FileNotFoundError, match=saying("m.weights.h5.sok", "no such folder")):
        sok.load_weights(model, path)
    sok.save_weights(model, path)
    shutil.rmtree(path + ".sok")
    with pytest.raises(FileNotFoundError, match=saying("m.weights.h5.sok", "no such folder")):
        sok.load_weights(model, path)
    assert table.sparse_read([1]).numpy().tolist() == [[1.0] * DIM]


def test_a_model_that_is_another_finds_its_tables_by_their_place(tmp_path):
    (model, table), (other, other_table) = model_with_table(), model_with_table()
    table.assign([1], np.ones([1, DIM]))
    sok.save_weights(model, tmp_path / "m.weights.h5")
    with pytest.warns(UserWarning, match="has another seed"):
        sok.load_weights(other, tmp_path / "m.weights.h5")
    assert other_table.sparse_read([1]).numpy().tolist() == [[1.0] * DIM]


def two_tables(names, turned=False):
    """A model of two layers, and their tables; `turned`: it has the second layer first."""
    inputs = keras.Input([1], dtype="int64")
    layers = [sok.DistributedEmbedding("sum", 100, DIM, slot_num=1, max_nnz=1, name=name) for name in names]
    vectors = [layer(inputs) for layer in (layers[::-1] if turned else layers)]
    return keras.Model(inputs, vectors), [layer.embedding_variable for layer in layers]


def test_tables_of_the_same_names_are_found_by_them_whatever_their_order(tmp_path):
    saved, tables = two_tables(["by_name_a", "by_name_b"])
    for value, table in enumerate(tables):
        table.assign([1], np.full([1, DIM], value))
    sok.save_weights(saved, tmp_path / "m.weights.h5")
    found = keras_files._as_saved(str(tmp_path / "m.weights.h5"), {"0": tables[1], "1": tables[0]})
    assert found == {table.table_name: table for table in tables}
    others = {"0": new_table(name="other_a"), "1": new_table(name="other_b")}
    assert keras_files._as_saved(str(tmp_path / "m.weights.h5"), others) == others


def test_tables_and_dense_weights_of_two_saves_are_refused(tmp_path, monkeypatch):
    model, table = model_with_table()
    path = tmp_path / "best.weights.h5"
    table.assign([1], np.ones([1, DIM]))
    sok.save_weights(model, path)
    table.assign([1], np.zeros([1, DIM]))
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "save_weights", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sok.save_weights(model, path)
    with pytest.raises(
        ValueError, match=r"best.weights.h5: .* saved with the tables of g000001-.* lie those of g000002-"
    ):
        sok.load_weights(model, path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["best.weights.h5", "best.weights.h5.sok"]
    sok.save_weights(model, path)
    sok.load_weights(model, path)
    with h5py.File(path, "r+") as file:  # of a sok that did not say it
        del file.attrs["sok_generation"]
    sok.load_weights(model, path)


def test_managers_call_init_fn_where_there_is_nothing(tmp_path):
    calls = []
    checkpoint = tf.train.Checkpoint(table=new_table())
    manager = sok.CheckpointManager(checkpoint, tmp_path, None, init_fn=lambda: calls.append(1))
    assert manager.restore_or_initialize() is None
    assert (calls, manager.checkpoints, manager.directory) == ([1], [], str(tmp_path))
    manager.save(checkpoint_number=8)
    assert manager.latest_checkpoint == str(tmp_path / "ckpt-8")
    assert manager.restore_or_initialize() == manager.latest_checkpoint
    assert calls == [1]


def test_managers_save_what_has_no_table_and_what_gets_one_later(tmp_path):
    checkpoint = tf.train.Checkpoint(weight=tf.Variable(3.0))
    manager = sok.CheckpointManager(checkpoint, tmp_path, 1)
    path = manager.save()
    assert not os.path.exists(path + ".sok")
    manager.restore(path).assert_consumed()
    checkpoint.table = new_table()
    checkpoint.table.assign([1], np.ones([1, DIM]))
    path = manager.save()
    late = tf.train.Checkpoint(weight=tf.Variable(0.0))
    sok.CheckpointManager(late, tmp_path, 1).restore(path)
    late.table = new_table()  # with one worker
    assert late.table.sparse_read([1]).numpy().tolist() == [[1.0] * DIM]


def test_managers_say_what_is_missing(tmp_path):
    manager = sok.CheckpointManager(tf.train.Checkpoint(table=new_table()), tmp_path, 1)
    with pytest.raises(tf.errors.NotFoundError, match="ckpt-9"):
        manager.restore(str(tmp_path / "ckpt-9"))
    path = manager.save()
    shutil.rmtree(path + ".sok")
    with pytest.warns(UserWarning, match="No rows .*embedding table"):
        manager.restore(path)


def test_hooks_refuse_what_makes_no_sense(tmp_path):
    for steps in (0, -1, True, 1.5, None):
        with pytest.raises(ValueError, match=saying("`save_steps`", "whole number of at least 1")):
            sok.hooks.CheckpointSaverHook(tmp_path, save_steps=steps)
    with tf.Graph().as_default():
        tf.Variable(1.0, use_resource=True)
        with pytest.raises(ValueError, match="holds no embedding table"):
            sok.hooks.CheckpointSaverHook(tmp_path, 1).begin()
        sok.EmbeddingVariable(DIM, 10)
        with pytest.raises(ValueError, match="needs tf.compat.v1.train.get_or_create_global_step"):
            sok.hooks.CheckpointSaverHook(tmp_path, 1).begin()


def test_hooks_ask_for_the_step_alone_when_a_save_is_near(tmp_path, monkeypatch):
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        new_table(name="asked")
        train = v1.assign_add(step, 1)
        hook, saved = sok.hooks.CheckpointSaverHook(tmp_path, save_steps=50), []
        monkeypatch.setattr(hook, "_save", lambda session, at: saved.append(at) or setattr(hook, "_last_step", at))
        with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            runs = mock.Mock(side_effect=v1.Session.run)
            monkeypatch.setattr(v1.Session, "run", lambda *args, **kwargs: runs(*args, **kwargs))
            for _ in range(150):
                session.run(train)
            assert runs.call_count < 150 + 3 * 10
    assert saved == [50, 100, 150]


def test_hooks_remove_tables_of_saves_that_never_came_to_be(tmp_path):
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        new_table(name="swept")
        train = v1.assign_add(step, 1)
        hook = sok.hooks.CheckpointSaverHook(tmp_path, save_steps=2)
        with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            session.run(train)
            (tmp_path / "model.ckpt-1.sok").mkdir()
            (tmp_path / "model.ckpt-1.sok" / "manifest.json").write_text("of a save that was killed before the rest")
            session.run(train)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["model.ckpt-2.sok"]


def test_hooks_restore_a_session_that_had_to_be_made_again(tmp_path):
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        table = sok.EmbeddingVariable(1, 10, initializer="zeros")
        next_step = v1.assign_add(step, 1)
        store = table.assign([1], tf.cast(step, tf.float32)[None, None])
        read = table.sparse_read([1])
        with v1.train.MonitoredTrainingSession(hooks=[sok.hooks.CheckpointSaverHook(tmp_path, 3)]) as session:
            for _ in range(5):
                session.run(next_step)
                session.run(store)
            assert session.run(read).tolist() == [[5.0]]
        assert sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".sok") == [
            "model.ckpt-3.sok",
            "model.ckpt-5.sok",
        ]
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        table = sok.EmbeddingVariable(1, 10, initializer="zeros")
        read = table.sparse_read([1])
        hook = sok.hooks.CheckpointSaverHook(tmp_path, 3, tables=[table])
        with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            # Of step 5: run calls count, and the row was stored in the call after the step was.
            assert session.run(read).tolist() == [[5.0]]


def test_callbacks_save_the_epochs_that_are_better(tmp_path):
    for mode, saved in (("min", [2, 4]), ("max", [2, 3])):
        model, table = model_with_table()
        callback = sok.callbacks.ModelCheckpoint(
            tmp_path / (mode + "-{epoch}-{loss:.1f}.weights.h5"), "loss", save_best_only=True, mode=mode
        )
        callback.set_model(model)
        for epoch, loss in enumerate([np.nan, 2.0, 3.0, 1.0, np.nan, 2.5]):
            table.assign([1], np.full([1, DIM], epoch))
            callback.on_epoch_end(epoch, {"loss": loss, "text": "x"})
        files = sorted(path.name for path in tmp_path.glob(f"{mode}-*.h5"))
        assert [int(name.split("-")[1]) for name in files] == saved
        sok.load_weights(model, tmp_path / files[-1])
        assert table.sparse_read([1]).numpy().tolist() == [[saved[-1] - 1.0] * DIM]
    with pytest.raises(ValueError, match="`mode` must be"):
        sok.callbacks.ModelCheckpoint("m.weights.h5", mode="auto")
    with pytest.raises(ValueError, match="`filepath` must end in"):
        sok.callbacks.ModelCheckpoint("m.keras")
    with pytest.raises(ValueError, match=saying("The logs have no 'val_loss'", "loss")):
        sok.callbacks.ModelCheckpoint("m.weights.h5", save_best_only=True).on_epoch_end(0, {"loss": 1.0})


def test_callbacks_save_each_epoch_of_fit(tmp_path):
    layer = sok.DistributedEmbedding("sum", 100, DIM, slot_num=1, max_nnz=1)
    model = keras.Sequential([keras.Input([1], dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(sok.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    callback = sok.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5")
    model.fit(np.arange(8)[:, None], np.ones([8, 1]), epochs=2, verbose=0, callbacks=[callback])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "1.weights.h5",
        "1.weights.h5.sok",
        "2.weights.h5",
        "2.weights.h5.sok",
    ]
