"""Savers that people use, with several workers. What a check returns is read by one worker in test_savers.py."""

import os
import shutil
import warnings

import keras
import numpy as np
import tensorflow as tf

import sok
from sok.job import context
from sok.job.job import Job
from sok.job.transport.local import LocalTransport
from sok.lookup.lookup import lookup_rows
from tests.sok.checkpoint_cases import DIM

KEYS = np.arange(-40, 40).astype(np.int64)
KEPT_BY_HOOK = ["model.ckpt-18.sok", "model.ckpt-20.sok"]  # of 4, 8, 10, and after the restore 14, 18, 20


def _shared_folder(tmp_path_of_rank, name):
    folder = tmp_path_of_rank.parent / "shared" / name
    os.makedirs(folder, exist_ok=True)
    return str(folder)


def _trackables():
    """A table and a dense weight that are trained by all workers, with what trains them."""
    sok.Init()
    table = sok.EmbeddingVariable(DIM, 200, name="saver", seed=5)
    return tf.train.Checkpoint(table=table, optimizer=sok.optimizers.Adam(0.01), weight=tf.Variable(0.0))


def _batch(step):
    return np.random.default_rng(step).choice(KEYS, 16)


def _train(saved, steps, share=1):
    """Losses of each step. share: of how many workers that all do the same steps, which sum their gradients."""
    losses = []
    for step in steps:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(lookup_rows(saved.table, tf.constant(_batch(step))) - 1.0))
            mine = loss / share
        saved.optimizer.apply_gradients([(tape.gradient(mine, saved.table), saved.table)])
        losses.append(float(loss))
    return losses


def check_a_manager_saves_the_rows_of_all_workers(world, tmp_path_of_rank):
    folder = _shared_folder(tmp_path_of_rank, "manager")
    saved = _trackables()
    saved.weight.assign(3.0)
    manager = sok.CheckpointManager(saved, folder, max_to_keep=2)
    assert manager.latest_checkpoint is None and manager.restore_or_initialize() is None
    for last in (5, 10, 15):
        _train(saved, range(last - 5, last))
        path = manager.save()
    saved_rows = saved.table.sparse_read(KEYS).numpy()
    assert path == os.path.join(folder, "ckpt-3") == manager.latest_checkpoint
    assert sorted(n for n in os.listdir(folder) if n.endswith(".sok")) == ["ckpt-2.sok", "ckpt-3.sok"]
    assert manager.checkpoints == [os.path.join(folder, "ckpt-2"), path]
    assert int(saved.save_counter) == 3
    other = _trackables()
    again = sok.CheckpointManager(other, folder, max_to_keep=2)
    assert again.restore_or_initialize() == path
    assert (float(other.weight), int(other.optimizer.iterations), int(other.save_counter)) == (3.0, 15, 3)
    np.testing.assert_array_equal(other.table.sparse_read(KEYS), saved.table.sparse_read(KEYS))
    np.testing.assert_allclose(_train(other, range(15, 25)), _train(saved, range(15, 25)), rtol=1e-6)
    assert again.save().endswith("ckpt-4")
    return path, saved_rows


def check_a_manager_keeps_slots_and_powers_of_an_optimizer_of_tf_1(world, tmp_path_of_rank):
    folder = _shared_folder(tmp_path_of_rank, "tf_1")

    def model():
        return tf.train.Checkpoint(
            table=sok.EmbeddingVariable(DIM, 200, name="tf_1", seed=5),
            weight=tf.Variable([1.0, 2.0]),
            optimizer=sok.DistributedOptimizer(tf.compat.v1.train.AdamOptimizer(0.1)),
        )

    def train(model, steps):
        variables = [model.weight, model.table]
        for step in steps:
            with tf.GradientTape() as tape:
                rows = tf.reduce_sum(lookup_rows(model.table, tf.constant(_batch(step + world.rank))))
                loss = tf.reduce_sum(tf.square(model.weight)) + tf.square(rows - 1.0)
            model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return model.weight.numpy(), model.table.sparse_read(KEYS).numpy()

    saved, other = model(), model()
    train(saved, range(4))
    sok.CheckpointManager(saved, folder, max_to_keep=1).save()
    sok.CheckpointManager(other, folder, max_to_keep=1).restore_or_initialize()
    assert int(other.optimizer.embedding_optimizer.iterations) == 4
    for found, expected in zip(train(other, range(4, 8)), train(saved, range(4, 8)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def check_what_a_manager_of_one_worker_saved_all_workers_restore(world, tmp_path_of_rank, monkeypatch):
    folder = _shared_folder(tmp_path_of_rank, "from_one")
    with monkeypatch.context() as patch:  # each for itself, and rank 0 where all will look
        alone = Job(LocalTransport())
        patch.setattr(context, "get_job", lambda: alone)
        saved = _trackables()
        saved.weight.assign(3.0)
        _train(saved, range(10))
        own = str(tmp_path_of_rank / "from_one") if world.rank else folder
        sok.CheckpointManager(saved, own, max_to_keep=2).save()
        rows, losses = saved.table.sparse_read(KEYS).numpy(), _train(saved, range(10, 20))
    context.get_transport().barrier("test/saved_by_one")
    other = _trackables()
    assert sok.CheckpointManager(other, folder, max_to_keep=2).restore_or_initialize().endswith("ckpt-1")
    assert (float(other.weight), int(other.optimizer.iterations)) == (3.0, 10)
    assert int(other.table.total_size()) == len(np.unique(np.concatenate([_batch(step) for step in range(10)])))
    np.testing.assert_array_equal(other.table.sparse_read(KEYS), rows)
    np.testing.assert_allclose(_train(other, range(10, 20), share=world.size), losses, rtol=1e-5)


def check_plain_checkpoints_of_one_worker_never_wait_for_the_others(world, tmp_path_of_rank):
    saved = _trackables()
    _train(saved, range(3))
    before = saved.table.sparse_read(KEYS).numpy()
    if world.size == 1:
        return
    if world.rank == 0:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            path = saved.save(str(tmp_path_of_rank / "alone"))
            saved.restore(path).assert_consumed()
        texts = [str(warning.message) for warning in said]
        assert any("are not saved here" in text for text in texts), texts
        assert any("No rows were restored" in text for text in texts), texts
        assert not os.path.exists(path + ".sok")
    np.testing.assert_array_equal(saved.table.sparse_read(KEYS), before)


def check_what_is_wrong_on_one_worker_is_raised_on_all(world, tmp_path_of_rank):
    folder = _shared_folder(tmp_path_of_rank, "wrong")
    saved = _trackables()
    manager = sok.CheckpointManager(saved, folder, max_to_keep=None)
    path = manager.save()
    wrong = path if world.rank == 0 else path + "0"  # on the others: another path, or none
    if world.size > 1:
        for call in (lambda: manager.restore(wrong), lambda: manager.save(checkpoint_number=7 + world.rank)):
            try:
                call()
            except (ValueError, tf.errors.OpError) as error:
                assert "rank" in str(error), error
            else:
                raise AssertionError("no error")
    context.get_transport().all_gather(tf.constant([1.0]), "test/still_together")
    manager.restore(path).assert_consumed()


def model_with_table():
    sok.Init()
    layer = sok.DistributedEmbedding("sum", 200, DIM, slot_num=2, max_nnz=1, embedding_initializer="ones")
    model = keras.Sequential([keras.Input([2], dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(sok.DistributedOptimizer(keras.optimizers.Adam(0.05)), "mse")
    return model, layer.embedding_variable


def check_weights_of_keras_models_are_saved_by_all_workers(world, tmp_path_of_rank):
    path = _shared_folder(tmp_path_of_rank, "keras") + "/model.weights.h5"
    model, table = model_with_table()
    ids, labels = np.random.default_rng(world.rank).choice(KEYS, [64, 2]), np.zeros([64, 1], np.float32)
    # Workers have other losses, and one of them decides.
    save = sok.callbacks.ModelCheckpoint(path, "loss", save_best_only=True)
    callbacks = [sok.callbacks.BroadcastVariablesCallback(), save]
    model.fit(ids, labels, 16, verbose=0, shuffle=False, callbacks=callbacks)
    rows, bias = table.sparse_read(KEYS).numpy(), model.layers[-1].get_weights()[1]
    other, other_table = model_with_table()
    sok.load_weights(other, path)
    np.testing.assert_array_equal(other_table.sparse_read(KEYS), rows)
    for mine, restored in zip(model.layers[-1].get_weights(), other.layers[-1].get_weights(), strict=True):
        np.testing.assert_array_equal(mine, restored)
    losses = [m.fit(ids, labels, 16, epochs=3, verbose=0, shuffle=False).history["loss"] for m in (model, other)]
    # What was saved has caught up, the other catches up later, in other steps of rounding.
    np.testing.assert_allclose(*losses, rtol=1e-5)
    return path, rows, bias


def check_hooks_save_and_restore_with_all_workers(world, tmp_path_of_rank):
    for mode in ("files", "versions"):
        _save_and_restore_by_hook(world, _shared_folder(tmp_path_of_rank, f"hook_{mode}"), mode, tmp_path_of_rank)


def _save_and_restore_by_hook(world, folder, mode, own_folder):
    sok.Init()
    storage = None if mode == "files" else sok.Storage(memory_bytes=2**23, path=own_folder / "rows")

    def run(steps):
        with tf.Graph().as_default():
            step = tf.compat.v1.train.get_or_create_global_step()
            table = sok.EmbeddingVariable(DIM, 200, name="hooked", seed=5, storage=storage)
            optimizer = sok.optimizers.Adam(0.01)
            keys = (tf.range(16, dtype=tf.int64) * (step + 3)) % 40
            loss = tf.reduce_mean(tf.square(lookup_rows(table, keys) - 1.0))
            update = optimizer.apply_gradients([(tf.gradients(loss, [table])[0], table)])
            with tf.control_dependencies([update]):
                train = tf.compat.v1.assign_add(step, 1)
            saver = tf.compat.v1.train.Saver(max_to_keep=2)
            hook = sok.hooks.CheckpointSaverHook(folder, save_steps=4, saver=saver, mode=mode)
            with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
                return [session.run([loss, train])[0] for _ in range(steps)]

    losses = run(10) + run(10)
    np.testing.assert_array_equal(sorted(n for n in os.listdir(folder) if n.endswith(".sok")), KEPT_BY_HOOK)
    context.get_transport().all_gather(tf.constant([1.0]), "test/folder_was_seen")  # by all, before it goes
    if world.rank == 0:
        shutil.rmtree(folder)
    context.get_transport().all_gather(tf.constant([1.0]), "test/folder_is_empty")
    np.testing.assert_allclose(losses, run(20), rtol=1e-6)
