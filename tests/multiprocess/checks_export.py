"""Export of a model whose tables are spread over the workers, and errors of one worker that all of them raise."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.job import context
from tests.multiprocess.harness import World

IDS = np.arange(-30, 60).reshape(15, 6)


def shared_folder(folder: Path) -> Path:
    """Rank 0's folder, on all ranks."""
    return folder.parent / "files_of_rank_0"


def make_model(name):
    """A model with four tables, of which one lies on the last rank alone; each rank has stored its rows."""
    hashed = sok.EmbeddingVariable(3, 100, name=f"{name}_hashed", initializer="normal", key_dtype=tf.int32)
    identity = sok.EmbeddingVariable(2, 40, name=f"{name}_identity", initializer="normal", hashed=False)
    placed = sok.EmbeddingVariable(4, 100, name=f"{name}_placed", owner=context.size() - 1, key_dtype=tf.uint64)
    tables = [hashed, identity, placed]
    rng = np.random.default_rng(3)
    for table, keys in ((hashed, np.arange(-20, 20)), (identity, np.arange(7)), (placed, np.arange(20))):
        rows = rng.normal(size=(len(keys), table.dim)).astype("f")
        table.assign(keys.astype(table.key_dtype.as_numpy_dtype), rows)
    layer = sok.DistributedEmbedding("mean", 100, 5, 1, 10, name=f"{name}_layer", embedding_initializer="normal")

    class Model(tf.Module):
        def __call__(self, ids):
            small = tf.cast(tf.math.floormod(ids, 40), tf.int64)
            pooled = sok.group_embedding_lookup_sparse(
                tables,
                [tf.cast(ids, tf.int32), small, tf.cast(small, tf.uint64)],
                ["sum", "mean", "sqrtn"],
                training=False,
            )
            return tf.concat([*pooled, layer(ids, training=False)[:, 0]], 1)

    return Model(), layer


def check_a_worker_without_memory_for_keys_stops_an_export_on_all(world: World, tmp_path_of_rank, monkeypatch):
    def out_of_memory(*_, **__):
        raise MemoryError("no room for keys")

    class NumPyThatDoesNotSort:
        sort = staticmethod(out_of_memory)

        def __getattr__(self, name):
            return getattr(np, name)

    sok.Init()
    model, _ = make_model("memory")
    folder = shared_folder(tmp_path_of_rank)
    for rank, name, value in (
        (world.size - 1, "sok.saved_model.model.key_words", out_of_memory),
        (0, "sok.saved_model.frozen_table.np", NumPyThatDoesNotSort()),
    ):
        with monkeypatch.context() as patch, pytest.raises((MemoryError, RuntimeError), match="no room for keys"):
            if world.rank == rank:
                patch.setattr(name, value)
            sok.export_saved_model(model, str(folder / "none"), signatures=tf.TensorSpec([None, 6], tf.int64, "ids"))
    assert not (folder / "none").exists()


def check_export_gathers_rows_of_all_workers(world: World, tmp_path_of_rank, monkeypatch):
    monkeypatch.setattr("sok.saved_model.rows.PIECE_BYTES", 100)
    sok.Init()
    model, layer = make_model("export")
    layer(tf.constant(IDS[world.rank :: world.size] % 17), training=True)
    path = str(shared_folder(tmp_path_of_rank) / "model")
    expected = model(tf.constant(IDS)).numpy()
    for native in (True, False):
        spec = tf.TensorSpec([None, 6], tf.int64, "ids")
        report = sok.export_saved_model(model, path, signatures=spec, native=native, overwrite=True)
        rows = {table.name: table.num_rows for table in report.tables}
        assert sorted(rows.values()) == [17, 20, 40, 40 * world.size]
        actual = tf.saved_model.load(path).signatures["serving_default"](ids=tf.constant(IDS))["output_0"].numpy()
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
    return actual if world.rank == 0 else None


def check_an_export_that_fails_on_one_rank_fails_on_all(world: World, tmp_path_of_rank, monkeypatch):
    sok.Init()
    model, _ = make_model("failing")
    spec = tf.TensorSpec([None, 6], tf.int64, "ids")
    folder = shared_folder(tmp_path_of_rank) / "failing"
    last = world.size - 1

    def fails(**options):
        sok.export_saved_model(model, folder, **{"signatures": spec, **options})

    def expect(rank, error, text, **options):
        """`error` of that rank, on all."""
        with pytest.raises(error, match=f"rank {rank} of {world.size}: .*{text}" if world.size > 1 else text):
            fails(**options)

    expect(last, ValueError, "`row_dtype` must be", row_dtype="int3" if world.rank == last else None)
    with monkeypatch.context() as broken:

        def full_disk(*args):
            raise OSError("no space left")

        broken.setattr("sok.saved_model.checkpoint.PiecewiseCheckpoint.add", full_disk)
        expect(0, OSError, "no space left")
    if world.size > 1:
        other = sok.EmbeddingVariable(1, 10, name="failing_other")
        differs = {"signatures": {"a": (lambda x: other.sparse_read(x), spec)}} if world.rank == last else {}
        with pytest.raises(ValueError, match="same on all workers.*'failing_other'"):
            fails(**differs)
    assert world.rank > 0 or not list(folder.parent.glob("failing*"))
    fails()  # and now it works
    assert world.rank > 0 or folder.exists()


def check_a_session_exports_rows_of_all_workers(world: World, tmp_path_of_rank):
    sok.Init()
    v1 = tf.compat.v1
    path = str(shared_folder(tmp_path_of_rank) / "of_session")
    with tf.Graph().as_default(), v1.Session() as session:
        layer = sok.DistributedEmbedding(
            "mean", 100, 5, 1, 10, name="session_layer", embedding_initializer="normal", key_dtype="uint32"
        )
        other = sok.EmbeddingVariable(2, 40, name="session_identity", initializer="normal", hashed=False)
        ids = v1.placeholder(tf.int64, [None, 6])
        keys = tf.cast(ids % 40, tf.uint32)
        pooled = layer(keys, training=True)[:, 0]
        copied = sok.EmbeddingVariable(
            3, 50, name="session_copied", initializer="normal", placement=sok.data_parallel()
        )
        rows, own_rows = sok.group_embedding_lookup([other, copied], [ids % 40, ids % 7])
        summed = tf.concat([pooled, tf.reduce_sum(rows, 1), tf.reduce_sum(own_rows, 1)], 1)
        session.run(v1.global_variables_initializer())
        session.run(summed, {ids: IDS[world.rank :: world.size]})
        signatures = {"serving_default": ({"ids": ids}, {"y": summed})}
        report = sok.export_saved_model(session, path, signatures=signatures)
        expected = session.run(summed, {ids: IDS})
    assert sorted(table.num_rows for table in report.tables) == [7, 40, 40 * world.size]
    actual = tf.saved_model.load(path).signatures["serving_default"](ids=tf.constant(IDS))["y"].numpy()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
