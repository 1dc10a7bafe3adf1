"""Checkpoints of real workers."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.checkpoint import read_manifest, verify
from sok.job import context
from sok.job.job import Job
from sok.job.transport.local import LocalTransport
from sok.lookup.lookup import lookup_rows
from sok.table.state import slot_sets

DIM = 3
DATA = Path(__file__).resolve().parents[1] / "data"


def shared_folder(world, tmp_path_of_rank, name):
    """One folder for all ranks."""
    return tmp_path_of_rank.parent / f"{name}_of_{world.size}"


def make(names="", world=None):
    owner = world.size - 1 if world is not None else None
    return [
        sok.EmbeddingVariable(DIM, 400, name=f"hashed{names}", seed=5),
        sok.EmbeddingVariable(DIM, 400, name=f"plain{names}", seed=5, hashed=False),
        sok.EmbeddingVariable(DIM, 400, name=f"small{names}", seed=5, owner=owner or 0),
    ]


def train(tables, optimizer, steps):
    """Steps that depend on their number alone, whoever does them; the losses of all ranks together."""
    transport, losses = context.get_transport(), []
    for step in steps:
        keys = np.random.default_rng(step).geometric(0.05, 24).astype(np.int64)
        mine = keys[transport.rank :: transport.size]
        with tf.GradientTape() as tape:
            rows = [table_rows(table, mine) for table in tables]
            loss = sum(tf.reduce_sum(tf.square(r - 1.0)) for r in rows)
        grads = tape.gradient(loss, tables)
        optimizer.apply_gradients(zip(grads, tables, strict=True))
        losses.append(float(transport.grouped_all_reduce([loss], "loss", average=False)[0]))
    return losses


def table_rows(table, keys):
    from sok.lookup.lookup import lookup_rows

    return lookup_rows(table, tf.constant(keys))


def contents(tables):
    return [dict(zip(k.numpy().tolist(), v.numpy().tolist(), strict=True)) for k, v in (t.export() for t in tables)]


def check_a_job_goes_on_from_its_checkpoint(world, tmp_path_of_rank):
    folder = shared_folder(world, tmp_path_of_rank, "goes_on")
    tables, optimizer = make("_a", world), sok.optimizers.Adam(0.05)
    train(tables, optimizer, range(6))
    sok.save(folder, tables, optimizer)
    others, fresh = make("_b", world), sok.optimizers.Adam(0.5)
    sok.restore(folder, {t.table_name: o for t, o in zip(tables, others, strict=True)}, fresh)
    assert contents(others) == contents(tables)
    np.testing.assert_allclose(train(others, fresh, range(6, 26)), train(tables, optimizer, range(6, 26)), rtol=1e-5)
    manifest = read_manifest(folder)
    assert manifest.world_size == world.size
    assert [len(table.files) for table in manifest.tables] == [world.size, world.size, 1]
    return sum(table.rows for table in manifest.tables)


def check_each_rank_erases_its_part_and_one_the_files(world, tmp_path_of_rank):
    folder = shared_folder(world, tmp_path_of_rank, "erased")
    tables, optimizer = make("_erased", world), sok.optimizers.Adam(0.05)
    if world.size > 1:
        tables.append(sok.EmbeddingVariable(4, 400, name="cut_erased", seed=5, placement=sok.column_wise(2)))
    train(tables, optimizer, range(3))
    keys, dims = [401, 402, 403], [table.dim for table in tables]
    for table, dim in zip(tables, dims, strict=True):
        if table.hashed:
            table.assign(keys, np.full([3, dim], 1234.5))
    sok.save(folder, tables, optimizer, incremental=True)
    train(tables, optimizer, range(3, 5))
    sok.save(folder, tables, optimizer, incremental=True)
    train(tables, optimizer, range(5, 7))
    asked = {table.table_name: [*keys, 1, 9999] for table in tables}
    expected = [{key: row for key, row in rows.items() if key not in (*keys, 1)} for rows in contents(tables)]
    report = sok.erase(tables, asked, checkpoints=[folder])
    assert report.is_complete and report.nowhere == (9999,), str(report)
    by_name = {place.path: place.removed for place in report.places}
    assert [by_name[table.table_name] for table in tables] == [4, 1, 4, 4][: len(tables)]
    assert contents(tables) == expected
    saved = b"".join(path.read_bytes() for path in folder.glob("*.shard"))
    assert np.full(2, 1234.5, np.float32).tobytes() not in saved and verify(folder) == []
    assert len(read_manifest(folder).links) == 1
    sok.restore(folder, tables)  # also at the step before
    assert not any({*keys, 1} & set(rows) for rows in contents(tables))
    # What one worker finds wrong, all are told; nothing has changed.
    with pytest.raises(FileNotFoundError, match="no checkpoint, export or dump here"):
        sok.erase(tables, [2], checkpoints=[folder / "none"])
    if world.size > 1:
        with pytest.raises(ValueError, match="must be the same on all workers"):
            sok.erase(tables, [world.rank])
    return [len(rows) for rows in contents(tables)]


def check_what_many_saved_one_restores(world, tmp_path_of_rank, monkeypatch):
    folder = shared_folder(world, tmp_path_of_rank, "to_one")
    tables, optimizer = make("_c", world), sok.optimizers.Adam(0.05)
    train(tables, optimizer, range(6))
    sok.save(folder, tables, optimizer)
    everywhere = context.get_transport().all_gather(tf.constant([[int(t.size()) for t in tables]]), "sizes").numpy()
    expected = train(tables, optimizer, range(6, 10))
    with monkeypatch.context() as patch:
        alone = Job(LocalTransport())
        patch.setattr(context, "get_job", lambda: alone)
        others, fresh = make("_d"), sok.optimizers.Adam(0.5)
        sok.restore(folder, {t.table_name: o for t, o in zip(tables, others, strict=True)}, fresh)
        assert [int(o.size()) for o in others] == everywhere.sum(0).tolist()
        if world.rank == 0:
            np.testing.assert_allclose(train(others, fresh, range(6, 10)), expected, rtol=1e-5)
            assert verify(folder) == []


def check_slots_of_stock_optimizers_go_from_one_to_many_and_back(world, tmp_path_of_rank, monkeypatch):
    folders = [shared_folder(world, tmp_path_of_rank, f"stock_slots_{i}") for i in range(2)]

    def optimizer_of():
        return sok.OptimizerWrapper(tf_keras.optimizers.RMSprop(0.05, momentum=0.5))

    def state(tables, optimizer):
        """By key the row and its slots, of each table: of this rank."""
        columns = [[t.export()[1], *(optimizer.get_slot(t, name) for name in ("velocity", "momentum"))] for t in tables]
        keys = [t.export()[0].numpy().tolist() for t in tables]
        return [dict(zip(k, np.hstack(c).tolist(), strict=True)) for k, c in zip(keys, columns, strict=True)]

    def restored(folder, names):
        others, optimizer = make(names, world if names == "_h" else None), optimizer_of()
        saved = [f"{kind}_g" if folder == folders[0] else f"{kind}_h" for kind in ("hashed", "plain", "small")]
        sok.restore(folder, dict(zip(saved, others, strict=True)), optimizer)
        assert int(optimizer.iterations) == 6
        return others, optimizer

    everyone, alone = context.get_transport(), Job(LocalTransport())
    with monkeypatch.context() as patch:  # every rank alone, and so does the same
        patch.setattr(context, "get_job", lambda: alone)
        tables, optimizer = make("_g"), optimizer_of()
        train(tables, optimizer, range(6))
        expected = state(tables, optimizer)
        assert all(len(rows) > 10 and np.any(np.array([*rows.values()])[:, DIM:]) for rows in expected)
        if world.rank == 0:
            sok.save(folders[0], tables, optimizer)
    everyone.barrier("stock_slots/saved")
    shared, again = restored(folders[0], "_h")
    for rows, table, then in zip(state(shared, again), shared, expected, strict=True):
        assert rows == {key: then[key] for key in rows} and int(table.total_size()) == len(then)
    sok.save(folders[1], shared, again)
    with monkeypatch.context() as patch:
        patch.setattr(context, "get_job", lambda: alone)
        back, again = restored(folders[1], "_i")
        assert state(back, again) == expected
        np.testing.assert_allclose(train(back, again, [6]), train(tables, optimizer, [6]), rtol=1e-6)


def check_a_checkpoint_of_three_workers_is_restored_by_any_number(world):
    tables = make("_e", world)
    sok.restore(DATA / "checkpoint_of_3_workers", dict(zip(("hashed", "plain", "small"), tables, strict=True)))
    for table, size in zip(tables, (60, 50, 40), strict=True):
        keys = np.arange(size)
        assert int(table.total_size()) == size
        np.testing.assert_array_equal(table.sparse_read(keys), np.stack([keys, -keys, keys * 0.5], 1))
    assert len(tables[0].slots("Adagrad")[1]) == len(range(world.rank, 60, world.size))


def check_tables_begin_with_rows_that_three_workers_saved(world):
    folder = DATA / "checkpoint_of_3_workers"
    for name, size in (("hashed", 60), ("plain", 50), ("small", 40)):
        for slots in (True, False):
            option = sok.deeprec.CheckpointOption(init_data_source=(folder, name), slots=slots)
            table = sok.deeprec.get_embedding_variable(
                f"{name}_begun_{slots}", DIM, ev_option=sok.deeprec.EmbeddingVariableOption(ckpt=option)
            )
            keys = np.arange(size)
            assert int(table.total_size()) == size and int(table.step) == 0
            np.testing.assert_array_equal(table.sparse_read(keys), np.stack([keys, -keys, keys * 0.5], 1))
            assert len(slot_sets(table)) == slots
            if slots:
                np.testing.assert_array_equal(table.slots("Adagrad")[1], np.abs(table.export()[1]))


def check_a_source_that_one_worker_cannot_read_is_an_error_on_all(world):
    folder, last = DATA / "checkpoint_of_3_workers", world.rank == world.size - 1
    said = []
    for name, arguments, message in (
        ("absent" if last else "hashed", {}, "holds no table 'absent'"),
        ("hashed", {"embedding_dim": 2 if last else DIM}, "dim 2; 'hashed' in .* has 3"),
        ("hashed", {"key_dtype": "int32" if last else "int64"}, "key dtype int32; 'hashed' in .* has int64"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            sok.deeprec.get_embedding_variable(
                "unread", **{"embedding_dim": DIM, **arguments}, init_data_source=(folder, name)
            )
        said.append(str(error.value))
    return said


def check_a_damaged_file_is_an_error_on_all_workers(world, tmp_path_of_rank):
    folder = tmp_path_of_rank.parent / f"damaged_{world.size}"
    tables = make("_f", world)
    if world.rank == 0:
        shutil.copytree(DATA / "checkpoint_of_3_workers", folder)
        file = next(path for path in folder.iterdir() if path.name.endswith("t0000-r0001.shard"))
        file.write_bytes(file.read_bytes()[:-1])
    context.get_transport().barrier("damaged")
    tables[0].assign([1000], np.ones([1, DIM]))
    before = contents(tables)
    with pytest.raises(tf.errors.DataLossError, match=r"t0000-r0001.shard: at offset") as error:
        sok.restore(folder, dict(zip(("hashed", "plain", "small"), tables, strict=True)))
    assert contents(tables) == before
    return str(error.value)


def check_a_worker_that_fails_stops_all(world, tmp_path_of_rank):
    folder = shared_folder(world, tmp_path_of_rank, "cannot")
    tables = make("_g", world)
    sok.save(folder, tables)
    old = read_manifest(folder)
    context.get_transport().barrier("saved")
    arguments = tables if world.rank < world.size - 1 else 3
    with pytest.raises(TypeError, match="embedding variables, .*a model"):
        sok.save(folder, arguments)
    assert read_manifest(folder) == old


def check_a_chain_is_restored_by_any_number(world, tmp_path_of_rank, monkeypatch):
    folder = shared_folder(world, tmp_path_of_rank, "chain")
    tables, optimizer = make("_h", world), sok.optimizers.Adam(0.05)
    for step in range(0, 9, 3):
        train(tables, optimizer, range(step, step + 3))
        tables[0].erase(np.arange(step + 1, step + 3))
        sok.save(folder, tables, optimizer, incremental=True)
    manifest = read_manifest(folder)
    assert len(manifest.links) == 3 and verify(folder) == []
    # Workers of another number go on with the chain, and these here with what those have saved.
    everywhere = context.get_transport().all_gather(tf.constant([[int(t.size()) for t in tables]]), "sizes").numpy()
    with monkeypatch.context() as patch:
        alone = Job(LocalTransport())
        patch.setattr(context, "get_job", lambda: alone)
        fresh = sok.optimizers.Adam(0.5)  # on all ranks, or the names of later ones would differ
        if world.rank == 0:
            named = {t.table_name: sok.EmbeddingVariable(DIM, 400, name=t.table_name, seed=5) for t in tables}
            sok.restore(folder, named, fresh)
            assert [int(o.size()) for o in named.values()] == everywhere.sum(0).tolist()
            sok.compact(folder)
    context.get_transport().barrier("compacted")
    train(tables, optimizer, range(9, 12))
    sok.save(folder, tables, optimizer, incremental=True)
    assert len(read_manifest(folder).links) == 2
    others, fresh = make("_i", world), sok.optimizers.Adam(0.5)
    sok.restore(folder, {t.table_name: o for t, o in zip(tables, others, strict=True)}, fresh)
    for mine, its in zip(contents(others), contents(tables), strict=True):
        assert mine.keys() == its.keys()
        for key, row in its.items():
            np.testing.assert_allclose(mine[key], row, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(train(others, fresh, range(12, 32)), train(tables, optimizer, range(12, 32)), rtol=1e-5)


def check_training_goes_on_while_all_workers_save(world, tmp_path_of_rank):
    folder = shared_folder(world, tmp_path_of_rank, "beside")
    tables, optimizer = make("_j", world), sok.optimizers.Adam(0.05)
    train(tables, optimizer, range(6))
    before = contents(tables)
    saving = sok.save(folder, tables, optimizer, asynchronous=True)
    train(tables, optimizer, range(6, 12))
    saving.result()
    others, fresh = make("_k", world), sok.optimizers.Adam(0.5)
    sok.restore(folder, {t.table_name: o for t, o in zip(tables, others, strict=True)}, fresh)
    assert contents(others) == before and int(fresh.iterations) == 6
    expected = sok.save(folder, tables, optimizer, incremental=True, asynchronous=True)
    assert expected.generation.startswith("g000002-")
    after = contents(tables)
    train(tables, optimizer, range(12, 15))
    sok.restore(folder, tables, optimizer)  # waits
    assert len(read_manifest(folder).links) == 2
    for mine, its in zip(contents(tables), after, strict=True):
        assert mine.keys() == its.keys()
        for key, row in its.items():
            np.testing.assert_allclose(mine[key], row, rtol=1e-5, atol=1e-7)


def save_for_all(folder):
    """What tests/data/checkpoint_of_3_workers was made with, on three workers."""
    sok.Init()
    tables = make()
    for table, size in zip(tables, (60, 50, 40), strict=True):
        keys = np.arange(size)
        rows = np.stack([keys, -keys, keys * 0.5], 1).astype(np.float32)
        table.restore_rows(keys, rows, np.abs(rows), slot_set="Adagrad", rule="adagrad", slot_init=0.1)
    sok.save(folder, tables)


if __name__ == "__main__":
    save_for_all(sys.argv[1])


def check_steps_of_tables_are_equal_and_kept_at_another_size(world, tmp_path_of_rank, monkeypatch):
    folder = shared_folder(world, tmp_path_of_rank, "steps")
    table, other = (sok.EmbeddingVariable(2, 50, name=f"{name}_steps", seed=1) for name in ("uneven", "even"))
    optimizer = sok.optimizers.Adagrad(0.1)

    def step(number):  # in turns all have rows, rank 0 has none, the others have None for a gradient
        keys = tf.range(0 if number % 3 == 1 and world.rank == 0 else 4, dtype=tf.int64)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(lookup_rows(table, keys)) + tf.reduce_sum(lookup_rows(other, keys))
        gradients = tape.gradient(loss, [table, other])
        if number % 3 == 2 and world.rank > 0:
            gradients[0] = None
        optimizer.apply_gradients(zip(gradients, [table, other], strict=True))

    for number in range(6):
        step(number)
    steps = context.get_transport().all_gather(table.step[tf.newaxis], "steps").numpy()
    assert steps.tolist() == [6] * world.size
    sok.save(folder, table, optimizer)
    step(0)
    with monkeypatch.context() as patch:
        alone = Job(LocalTransport())
        patch.setattr(context, "get_job", lambda: alone)
        lone = sok.EmbeddingVariable(2, 50, name="lone_steps", seed=1)
        sok.restore(folder, {"uneven_steps": lone})
        assert int(lone.step) == 6
    context.get_transport().barrier("steps/restored")
    sok.restore(folder, table, optimizer)
    assert int(table.step) == 6
