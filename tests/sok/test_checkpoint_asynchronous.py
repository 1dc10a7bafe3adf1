"""Saves that go on beside training."""

import contextlib
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import sok
from sok.checkpoint import background, heartbeat, manifest, native, read_manifest, verify
from tests.sok.checkpoint_cases import DIM, RULES, assert_same_training, contents, files_of, new_table, train
from tests.sok.test_checkpoint_crash import files_of_at_most
from tests.sok.threads_world import checked, run_world

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def held(monkeypatch):
    """Background writing waits for this event: what the test does until then is done during the save."""
    goes_on, save_snapshot = threading.Event(), native.EagerCalls.save_snapshot

    def waiting(self, *args):
        assert goes_on.wait(60)
        return save_snapshot(self, *args)

    monkeypatch.setattr(native.EagerCalls, "save_snapshot", waiting)
    yield goes_on
    goes_on.set()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("hashed", [True, False])
def test_a_save_holds_what_the_tables_held_when_it_began(tmp_path, held, rule, hashed):
    tables = [new_table(hashed=hashed), new_table()]
    others = [new_table(hashed=hashed), new_table()]
    optimizer, fresh = RULES[rule](), RULES[rule]()
    for table in tables:
        table.assign(np.arange(100), np.ones([100, DIM]))
        train(table, optimizer, range(10))
    before, steps = [contents(table) for table in tables], int(optimizer.iterations)
    save = sok.save(tmp_path, tables, optimizer, asynchronous=True)
    for table in tables:
        train(table, optimizer, range(20, 25))
        table.erase(np.arange(5, 15))
        table.assign([7, 150], np.zeros([2, DIM]))
    assert not save.done() and 0 <= save.progress() < 1
    with pytest.raises(TimeoutError, match="g000001-.* is still being written after 0 s"):
        save.result(timeout=0)
    held.set()
    assert save.result() is None and save.done() and save.progress() == 1.0
    assert [contents(table) for table in tables] != before
    sok.restore(tmp_path, {t.table_name: o for t, o in zip(tables, others, strict=True)}, fresh)
    assert [contents(other) for other in others] == before and int(fresh.iterations) == steps
    assert verify(tmp_path) == [] and len(files_of(tmp_path)) == 3
    # Training goes on from there as a job does that was never saved.
    sok.restore(tmp_path, tables, optimizer)
    assert_same_training(tables[0], optimizer, others[0], fresh, range(25, 45))


def test_deltas_can_be_written_in_the_background(tmp_path, held):
    held.set()
    table, other, optimizer = new_table(), new_table(), RULES["Adam"]()
    table.assign(np.arange(100), np.ones([100, DIM]))
    saves = []
    for step in range(4):
        train(table, optimizer, range(5 * step, 5 * step + 5))
        held.clear()
        before = contents(table)
        saves.append(sok.save(tmp_path, table, optimizer, incremental=True, asynchronous=True))
        train(table, optimizer, range(100 + step, 102 + step))  # of the next delta
        table.erase([step])
        held.set()
    saves[-1].result()
    rows = [link.files[0].rows for link in read_manifest(tmp_path).links]
    assert len(rows) == 4 and max(rows[1:]) < 60 <= rows[0]
    sok.restore(tmp_path, {table.table_name: other}, slots=True)
    found = contents(other)
    assert found.keys() == before.keys()
    for key, row in before.items():
        for mine, its in zip(found[key], row, strict=True):
            np.testing.assert_allclose(np.frombuffer(mine, "f4"), np.frombuffer(its, "f4"), rtol=1e-5, atol=1e-7)


def failing(monkeypatch, error):
    def fail(self, *args):
        raise error

    patch = pytest.MonkeyPatch()
    patch.setattr(native.EagerCalls, "save_snapshot", fail)
    return patch


def test_an_error_is_raised_by_result_and_nothing_is_forgotten(tmp_path, monkeypatch):
    table, other = new_table(), new_table()
    table.assign([1, 2], np.ones([2, DIM]))
    sok.save(tmp_path, table)
    old = sorted(tmp_path.iterdir())
    table.assign([2], np.zeros([1, DIM]))
    patch = failing(monkeypatch, OSError(28, "No space left on device"))
    save = sok.save(tmp_path, table, incremental=True, asynchronous=True)
    table.assign([3], np.zeros([1, DIM]))
    with pytest.raises(OSError, match="No space left"):
        save.result()
    patch.undo()
    assert sorted(tmp_path.iterdir()) == old
    sok.save(tmp_path, table, incremental=True)  # the error was told
    assert [link.files[0].rows for link in read_manifest(tmp_path).links] == [2, 2]
    sok.restore(tmp_path, {table.table_name: other})
    assert contents(other) == contents(table)


def test_an_error_that_nobody_has_seen_is_raised_by_the_next_save(tmp_path, monkeypatch):
    table = new_table()
    sok.save(tmp_path, table)
    patch = failing(monkeypatch, OSError(28, "No space left on device"))
    sok.save(tmp_path, table, asynchronous=True)
    sok.restore(tmp_path, table)  # waits, and leaves it to the save
    patch.undo()
    with pytest.raises(OSError, match="No space left"):
        sok.save(tmp_path, table)
    sok.save(tmp_path, table)
    assert read_manifest(tmp_path).generation.startswith("g000002-")


def test_the_next_save_and_restore_wait(tmp_path, held):
    table = new_table()
    table.assign([1], np.ones([1, DIM]))
    first = sok.save(tmp_path, table, asynchronous=True)
    table.assign([1], np.zeros([1, DIM]))
    threading.Timer(0.2, held.set).start()
    second = sok.save(tmp_path, table, asynchronous=True)
    assert first.done()
    held.clear()
    threading.Timer(0.2, held.set).start()
    sok.restore(tmp_path, table)
    assert second.done() and table.sparse_read([1]).numpy().tolist() == [[0.0] * DIM]


def test_a_program_that_ends_completes_its_save(forked, tmp_path):
    saved = tmp_path / "saves"
    script = f"""
import numpy as np, sok
table = sok.EmbeddingVariable(8, 50_000, name="item")
table.assign(np.arange(50_000), np.ones([50_000, 8]))
sok.save({str(saved)!r}, table, asynchronous=True)
"""
    done = forked.run(script, tmp_path)
    assert done.status == 0, done.stderr[-2000:]
    assert read_manifest(saved).tables[0].rows == 50_000 and verify(saved) == []


# Several workers.


def fill(table, value):
    keys = np.arange(table.rank, 60, table.world_size)
    table.assign(keys, np.full([len(keys), DIM], value))


def world_table(transport):
    return sok.EmbeddingVariable(DIM, 200, name="item", seed=5)


@pytest.mark.parametrize("size", [2, 3])
def test_workers_meet_without_collectives(tmp_path, monkeypatch, size):
    def program(transport):
        table = world_table(transport)
        fill(table, 1.0)
        save = sok.save(tmp_path, table, asynchronous=True)
        collectives = len(transport.collectives)
        if transport.rank == 1:
            time.sleep(0.2)  # workers are not at the same step
        fill(table, 2.0)
        save.result()
        assert len(transport.collectives) == collectives
        fill(table, 3.0)
        sok.save(tmp_path, table, incremental=True, asynchronous=True)
        fill(table, 4.0)
        sok.restore(tmp_path, table)
        return contents(table)

    shards = checked(run_world(size, program, monkeypatch))
    assert sum(map(len, shards)) == 60
    assert {row for shard in shards for row in shard.values()} == {(np.full(DIM, 3.0, "f4").tobytes(),)}
    assert len(files_of(tmp_path)) == 1 + 2 * size and len(read_manifest(tmp_path).links) == 2


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_of_one_worker_is_raised_on_all(tmp_path, monkeypatch, bad):
    save_snapshot = native.EagerCalls.save_snapshot

    def failing(self, table, *args):
        if table.rank == bad:
            raise OSError(28, "No space left on device")
        return save_snapshot(self, table, *args)

    def program(transport):
        table = world_table(transport)
        fill(table, 1.0)
        sok.save(tmp_path, table)
        fill(table, 2.0)
        save = sok.save(tmp_path, table, incremental=True, asynchronous=True)
        if transport.rank == 0:
            with pytest.raises(OSError, match=f"rank {bad} of 2: .*No space left on device"):
                save.result()
        with pytest.raises(OSError, match="No space left on device"):  # rank 1 has not seen it
            sok.save(tmp_path, table, incremental=True)
        transport.broadcast_numpy(np.zeros(1), "failed")
        assert len(read_manifest(tmp_path).links) == 1
        transport.broadcast_numpy(np.zeros(1), "seen")
        sok.save(tmp_path, table, incremental=True)
        return [file.rows for file in read_manifest(tmp_path).files]

    monkeypatch.setattr(native.EagerCalls, "save_snapshot", failing)
    assert checked(run_world(2, program, monkeypatch)) == [[30, 30], [30, 30]]
    assert len(files_of(tmp_path)) == 5 and verify(tmp_path) == []


def test_a_snapshot_that_cannot_be_made_on_one_worker_is_an_error_on_all(tmp_path, monkeypatch):
    begin = native.EagerCalls.begin

    def failing(self, table, snapshot=""):
        if snapshot and table.rank == 1:
            raise tf.errors.ResourceExhaustedError(None, None, "no memory for an asynchronous save")
        begin(self, table, snapshot)

    def program(transport):
        table = world_table(transport)
        with pytest.raises(tf.errors.ResourceExhaustedError, match="rank 1 of 2: no memory"):
            sok.save(tmp_path, table, asynchronous=True)
        sok.save(tmp_path, table)

    monkeypatch.setattr(native.EagerCalls, "begin", failing)
    checked(run_world(2, program, monkeypatch))


KEYS = st.lists(st.integers(0, 40), min_size=1, max_size=10, unique=True)
CHANGES = st.lists(st.tuples(st.sampled_from(["assign", "erase", "train", "read"]), KEYS), max_size=8)


@settings(max_examples=20, deadline=None)
@given(first=CHANGES, during=CHANGES, rule=st.sampled_from(["Adagrad", "Adam"]), incremental=st.booleans())
def test_whatever_is_done_during_a_save_is_not_in_it(first, during, rule, incremental):
    table, other, optimizer = new_table(), new_table(), RULES[rule]()

    def do(changes):
        for number, (what, keys) in enumerate(changes):
            if what == "assign":
                table.assign(keys, np.full([len(keys), DIM], number))
            elif what == "erase":
                table.erase(keys)
            else:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.square(table.sparse_read(keys) - 1.0))
                if what == "train":
                    optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    goes_on, save_snapshot = threading.Event(), native.EagerCalls.save_snapshot
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        table.assign(np.arange(20), np.ones([20, DIM]))
        sok.save(folder, table)
        do(first)
        before = contents(table)
        patch.setattr(native.EagerCalls, "save_snapshot", lambda *args: goes_on.wait(60) and save_snapshot(*args))
        save = sok.save(folder, table, optimizer, incremental=incremental, asynchronous=True)
        do(during)
        goes_on.set()
        save.result()
        sok.restore(folder, {table.table_name: other})
        found = contents(other)
        assert found.keys() == before.keys()
        for key, row in before.items():
            for mine, its in zip(found[key], row, strict=False):  # a set that came later has no slots there
                np.testing.assert_allclose(np.frombuffer(mine, "f4"), np.frombuffer(its, "f4"), rtol=1e-5, atol=1e-7)


def test_a_disk_that_is_full_takes_no_error_away(tmp_path, monkeypatch):
    """Nothing new has room any more, not even a note of some bytes: what is told has had its room before."""
    monkeypatch.setattr(heartbeat, "PATIENCE_SECONDS", 5.0)
    is_full, real_open = threading.Event(), os.open

    def opened(path, flags, *args, **kwargs):
        if is_full.is_set() and flags & os.O_CREAT and not os.path.exists(path):
            raise OSError(28, "No space left on device", path)
        return real_open(path, flags, *args, **kwargs)

    def written(path, text):
        raise OSError(28, "No space left on device", path)

    def full(self, table, path, *args):
        if table.rank == 1:
            raise OSError(28, "No space left on device", path)
        return save_snapshot(self, table, path, *args)

    save_snapshot = native.EagerCalls.save_snapshot
    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(Path, "write_text", written)
    monkeypatch.setattr(native.EagerCalls, "save_snapshot", full)

    def program(transport):
        table = world_table(transport)
        save = sok.save(tmp_path, table, asynchronous=True)
        is_full.set()
        with pytest.raises(OSError, match="No space left on device.*r0001.shard"):
            save.result()

    checked(run_world(2, program, monkeypatch))


def test_notes_that_have_no_room_are_an_error_at_once_on_all_workers(tmp_path, monkeypatch):
    def program(transport):
        table = world_table(transport)
        sok.save(tmp_path, table)
        transport.broadcast_numpy(np.zeros(1), "saved")
        with files_of_at_most(2000) if transport.rank == 0 else contextlib.nullcontext():
            transport.broadcast_numpy(np.zeros(1), "full")
            with pytest.raises(OSError, match=r"(No space|too large).*\.written"):
                sok.save(tmp_path, table, asynchronous=True)
            transport.broadcast_numpy(np.zeros(1), "failed")

    before = signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", lambda *args: None)  # which is for the main thread alone
            checked(run_world(2, program, patch))
    finally:
        signal.signal(signal.SIGXFSZ, before)
    assert len(files_of(tmp_path)) == 3


def test_a_wait_for_the_others_reads_a_manifest_once(tmp_path, monkeypatch):
    def program(transport):
        table = world_table(transport)
        sok.save(tmp_path, table)
        transport.broadcast_numpy(np.zeros(1), "saved")
        read = mock.Mock(side_effect=manifest.read_bytes)
        monkeypatch.setattr(manifest, "read_bytes", read)
        if transport.rank == 1:
            save = background.AsyncSave(mock.Mock(path=str(tmp_path), generation="g000002-00000000"))
            assert not any(save._is_decided() for _ in range(20))
            assert read.call_count == 1

    checked(run_world(2, program, monkeypatch))


def test_a_save_of_the_job_before_is_waited_for(tmp_path, held):
    table = new_table()
    table.assign([1], np.ones([1, DIM]))
    first = sok.save(tmp_path, table, asynchronous=True)
    sok.shutdown()
    sok.Init()
    table = new_table()
    threading.Timer(0.3, held.set).start()
    sok.save(tmp_path, table)
    assert first.done() and first.result() is None
    assert read_manifest(tmp_path).generation.startswith("g000002-") and verify(tmp_path) == []


def test_a_rank_that_has_died_ends_the_save_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "PATIENCE_SECONDS", 0.5)
    write_and_meet = background.AsyncSave._write_and_meet

    def dying(self):
        if self._work.rank == 0:
            write_and_meet(self)
        # Rank 1 writes nothing, says nothing, and its heart stops.

    def program(transport):
        table = world_table(transport)
        fill(table, 1.0)
        sok.save(tmp_path, table)
        transport.broadcast_numpy(np.zeros(1), "saved")
        monkeypatch.setattr(background.AsyncSave, "_write_and_meet", dying)
        save = sok.save(tmp_path, table, asynchronous=True)
        if transport.rank == 0:
            with pytest.raises(ConnectionError, match=r"rank 1 of 2 .* has probably died"):
                save.result(timeout=30)
            assert verify(tmp_path) == []
        return read_manifest(tmp_path).generation

    first, second = checked(run_world(2, program, monkeypatch))
    assert first == second and first.startswith("g000001")
