"""Checkpoints of several workers: threads of this process."""

import os
import tempfile
import threading

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import sok
from sok.checkpoint import native, read_manifest, verify
from sok.job.agreement import together
from tests.placements import PLACEMENTS
from tests.reference.placement import owner
from tests.sok import threads_world
from tests.sok.checkpoint_cases import contents, files_of
from tests.sok.threads_world import ThreadTransport, checked, run_world

DIM = 2


def table_for(rank, world, capacity=300, hashed=True, placement=None, name="item"):
    return sok.EmbeddingVariable(DIM, capacity, name=name, seed=5, hashed=hashed, placement=placement)


def fill(table, keys):
    """Rows and slots that say which key they belong to."""
    keys = np.asarray(keys, np.int64)
    rows = np.stack([keys.astype(np.float32), -keys.astype(np.float32)], 1)
    slots = np.stack([keys.astype(np.float32) + i for i in range(2 * DIM)], 1)
    table.restore_rows(keys, rows, slots, slot_set="Adam", rule="adam")


def expected(keys):
    return {
        int(key): (
            np.array([np.float32(key), -np.float32(key)]).tobytes(),  # of key 0: 0 and -0
            (np.float32(key) + np.arange(2 * DIM, dtype=np.float32)).tobytes(),
        )
        for key in keys
    }


def roundtrip(folder, monkeypatch, keys, before, after, **configured):
    """Saves at one world size, restores at another; each rank's shard."""

    def save(transport):
        table = table_for(transport.rank, transport.size, **configured.get("saved", {}))
        fill(table, keys)
        sok.save(folder, [table])

    def restore(transport):
        table = table_for(transport.rank, transport.size, **configured.get("restored", {}))
        fill(table, [299])
        sok.restore(folder, [table])
        return contents(table)

    checked(run_world(before, save, monkeypatch))
    return checked(run_world(after, restore, monkeypatch))


# Adam's step counts are not what this is about.
pytestmark = pytest.mark.filterwarnings("ignore:sok.save. the step count")


@settings(max_examples=15, deadline=None)
@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 40), max_size=60, unique=True),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    kinds=st.tuples(*[st.sampled_from(sorted(PLACEMENTS))] * 2),
)
def test_any_number_of_workers_becomes_any_other(keys, before, after, kinds):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        placed = [{"placement": PLACEMENTS[kind](world)} for world, kind in zip((before, after), kinds, strict=True)]
        shards = roundtrip(folder, patch, keys, before, after, saved=placed[0], restored=placed[1])
        for rank, shard in enumerate(shards):
            assert shard == expected([key for key in keys if owner(key, after, kinds[1]) == rank])
        assert verify(folder) == []
        saved = read_manifest(folder).table("item")
        assert saved.placement == placed[0]["placement"]


@pytest.mark.parametrize("before, after", [(1, 3), (3, 2), (2, 4)])
def test_tables_without_hashing_too(tmp_path, monkeypatch, before, after):
    plain = {"hashed": False}
    shards = roundtrip(tmp_path, monkeypatch, range(100), before, after, saved=plain, restored=plain)
    assert {key: row for shard in shards for key, row in shard.items()} == expected(range(100))
    assert [len(shard) for shard in shards] == [len(range(rank, 100, after)) for rank in range(after)]


def test_files_that_hold_no_key_of_a_worker_are_not_opened(tmp_path, monkeypatch):
    opened, load = [], native.EagerCalls.load

    def noting(self, table, second, path, *more):
        opened.append((table.rank, int(path[-10:-6])))
        return load(self, table, second, path, *more)

    monkeypatch.setattr(native.EagerCalls, "load", noting)
    shards = roundtrip(tmp_path, monkeypatch, range(40), 4, 2)
    assert sorted(opened) == [(0, 0), (0, 2), (1, 1), (1, 3)]
    assert [len(shard) for shard in shards] == [20, 20]


def test_what_json_cannot_hold_is_an_error_on_all_workers(monkeypatch):
    def program(transport):
        with pytest.raises(TypeError, match="rank 1 of 2: .*not JSON serializable"):
            together(transport, "sok/test/json", lambda: object() if transport.rank == 1 else 1)

    checked(run_world(2, program, monkeypatch))


def test_an_error_of_one_worker_is_raised_on_all_and_changes_nothing(tmp_path, monkeypatch):
    def program(transport):
        table = table_for(transport.rank, transport.size)
        fill(table, range(30))
        sok.save(tmp_path, [table])
        if transport.rank == 0:
            file = next(path for path in tmp_path.iterdir() if path.name.endswith("r0001.shard"))
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        fill(table, range(60))
        before = contents(table)
        transport.broadcast_numpy(np.zeros(1), "damaged")
        with pytest.raises(tf.errors.DataLossError, match="rank 1 of 2: /.*r0001.shard: at offset") as error:
            sok.restore(tmp_path, [table])
        assert contents(table) == before
        return str(error.value)

    # Each worker of two reads its own file only: rank 0 has nothing to complain about.
    texts = checked(run_world(2, program, monkeypatch))
    assert texts[0] == texts[1]


def test_a_save_that_fails_on_one_worker_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    is_full, save = threading.Event(), native.EagerCalls.save

    def failing(self, table, path, generation):
        if is_full.is_set() and table.rank == 1:
            raise OSError(28, "No space left on device", path)
        return save(self, table, path, generation)

    monkeypatch.setattr(native.EagerCalls, "save", failing)

    def program(transport):
        table = table_for(transport.rank, transport.size)
        fill(table, range(30))
        sok.save(tmp_path, [table])
        old = transport.rank == 0 and read_manifest(tmp_path)
        transport.broadcast_numpy(np.zeros(1), "saved")
        is_full.set()
        with pytest.raises(OSError, match="rank 1 of 2: .*No space left on device"):
            sok.save(tmp_path, [table])
        transport.broadcast_numpy(np.zeros(1), "failed")
        if transport.rank == 0:
            assert read_manifest(tmp_path) == old
            assert len(files_of(tmp_path)) == 3

    checked(run_world(2, program, monkeypatch))


def test_a_worker_that_loses_a_peer_leaves_the_files_that_others_may_list(tmp_path, monkeypatch):
    """A collective may end well for one worker and not for another, where a third is gone."""

    class Losing(ThreadTransport):
        def all_gather(self, tensor, name):
            gathered = super().all_gather(tensor, name)
            if self.rank == 1 and name == "sok/save/write":
                raise tf.errors.UnknownError(None, None, "a peer is gone")
            return gathered

    monkeypatch.setattr(threads_world, "ThreadTransport", Losing)

    def program(transport):
        table = table_for(transport.rank, transport.size)
        fill(table, range(30))
        sok.save(tmp_path, [table])

    # Rank 0 then waits for the one that has left; what it has listed is there.
    monkeypatch.setattr(threads_world, "_DEADLINE", 2.0)
    results = run_world(2, program, monkeypatch)
    assert isinstance(results[1], tf.errors.UnknownError) and results[0] is not None, results
    assert verify(tmp_path) == [] and read_manifest(tmp_path).table("item").rows == 30


def test_workers_that_mean_different_things_are_told(tmp_path, monkeypatch):
    def program(transport):
        tables = [table_for(transport.rank, transport.size, name=name) for name in ("a", "b")]
        with pytest.raises(ValueError, match="same on all workers.*0 has .*'a', 'b'.*rank 1 "):
            sok.save(tmp_path, tables if transport.rank == 0 else tables[::-1])
        with pytest.raises(TypeError, match="rank 1 of 2: `variables_or_model` must be"):
            sok.save(tmp_path, tables if transport.rank == 0 else 3)

    # ThreadTransport checks the names of collectives: nobody was left behind.
    for result in run_world(2, program, monkeypatch):
        assert result is None, result


def test_a_folder_that_is_not_shared_is_told(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    save = native.EagerCalls.save

    def scattered(self, table, path, generation):
        folder, name = os.path.split(path)
        return save(self, table, os.path.join(folder, "elsewhere" * table.rank, name), generation)

    monkeypatch.setattr(native.EagerCalls, "save", scattered)

    def program(transport):
        table = table_for(transport.rank, transport.size)
        with pytest.raises(RuntimeError, match="rank 0 sees no .*one folder"):
            sok.save(tmp_path, [table])

    checked(run_world(2, program, monkeypatch))
    assert files_of(tmp_path) == ["elsewhere"]
