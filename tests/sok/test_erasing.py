"""`sok.erase` and `sok find`: where a key lies, and that afterwards it lies nowhere."""

import os
import shutil
import struct

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import lease, native, read_manifest, verify
from tests.sok.checkpoint_cases import DIM, RULES, contents, new_table, train

# Keys whose bytes are no length or offset in a file.
USER, SECOND, OTHER, NOBODY = 1_234_567_890_123, 987_654_321_987, 7, 999_999
ROW = np.array([1234.5, -9876.25, 3.0e7], np.float32)


def bytes_of(key, dtype="int64"):
    """The record of a key, as the files have it."""
    return struct.pack("<Q", int(np.array(key, dtype).astype(np.int64 if dtype[0] == "i" else np.uint64)) % 2**64)


def bytes_under(folder):
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def user_table(**settings):
    table = new_table("users", **settings)
    table.assign([USER, OTHER], [ROW, np.ones(DIM)])
    return table


def assert_gone(folder, *, rows=(ROW,), keys=(USER,), dtype="int64"):
    assert verify(folder) == []
    found = bytes_under(folder)
    assert not any(np.asarray(row, np.float32).tobytes() in found for row in rows)
    assert not any(bytes_of(key, dtype) in found for key in keys)


@pytest.mark.parametrize("rule", ["Adagrad", "Adam"])
def test_an_erased_row_is_nowhere_and_all_others_are_as_they_were(tmp_path, rule):
    table, optimizer = new_table(), RULES[rule]()
    train(table, optimizer, range(3))
    table.assign([USER], [ROW])
    train(table, optimizer, range(3, 5))
    before = contents(table)
    (row, *_) = before[USER]
    sok.save(tmp_path, table, optimizer)
    assert row in bytes_under(tmp_path) and bytes_of(USER) in bytes_under(tmp_path)

    report = sok.erase(table, [USER, NOBODY], checkpoints=[tmp_path])

    assert [(p.path, p.kind, p.found, p.removed) for p in report.places] == [
        (table.table_name, "table", 1, 1),
        (str(tmp_path), "checkpoint", 1, 1),
    ]
    assert report.nowhere == (NOBODY,) and report.is_complete and report.keys == 2
    assert "1 found, 1 removed" in str(report) and str(report).endswith("complete")
    expected = {key: of_key for key, of_key in before.items() if key != USER}
    assert contents(table) == expected
    assert_gone(tmp_path, rows=[np.frombuffer(row, np.float32)])
    other, fresh = new_table(), RULES[rule]()
    sok.restore(tmp_path, {table.table_name: other}, fresh)
    assert contents(other) == expected
    assert fresh.iterations == optimizer.iterations


def test_a_chain_loses_row_and_note_and_goes_on_without_it(tmp_path):
    table, follower_table = user_table(), new_table("follows")
    follower = sok.follow(tmp_path, {table.table_name: follower_table})
    sok.save(tmp_path, table, incremental=True)
    table.assign([USER, SECOND], [2 * ROW, np.ones(DIM)])
    sok.save(tmp_path, table, incremental=True)
    table.erase([SECOND])
    sok.save(tmp_path, table, incremental=True)
    assert follower.poll() and USER in contents(follower_table)

    report = sok.erase(table, [USER, SECOND], checkpoints=[tmp_path])

    assert [(p.found, p.removed) for p in report.places] == [(1, 1), (2, 2)] and report.nowhere == ()
    assert_gone(tmp_path, rows=[ROW, 2 * ROW], keys=[USER, SECOND])
    assert len(read_manifest(tmp_path).links) == 1
    assert follower.poll() and set(contents(follower_table)) == {OTHER}
    table.assign([9], [np.ones(DIM)])
    with pytest.warns(UserWarning, match="all rows are written"):
        sok.save(tmp_path, table, incremental=True)
    assert_gone(tmp_path, rows=[ROW, 2 * ROW], keys=[USER, SECOND])


def test_an_erasure_of_a_table_is_a_deletion_in_what_follows(tmp_path):
    table, follower_table = user_table(), new_table("follows")
    follower = sok.follow(tmp_path, {table.table_name: follower_table})
    sok.save(tmp_path, table, incremental=True)
    assert follower.poll()
    known = read_manifest(tmp_path).generation
    assert sok.erase(table, [USER]).is_complete
    sok.save(tmp_path, table, incremental=True)
    assert [piece.erased.tolist() for piece in sok.deltas(tmp_path, after=known)] == [[USER]]
    assert follower.poll() and set(contents(follower_table)) == {OTHER}
    # The full save below still has the row: that is what `checkpoints` is for.
    assert ROW.tobytes() in bytes_under(tmp_path)
    report = sok.erase([table.table_name], [USER], checkpoints=[tmp_path])
    assert report.places[0].removed == 1
    assert_gone(tmp_path)
    sok.restore(tmp_path, table)
    assert set(contents(table)) == {OTHER}


@pytest.mark.parametrize("key_dtype", ["int32", "int64", "uint32", "uint64"])
@pytest.mark.parametrize("hashed", [True, False])
def test_keys_of_all_dtypes_and_identity_tables(tmp_path, key_dtype, hashed):
    info = np.iinfo(key_dtype)
    keys = [info.max - 3, info.min + 1_000_000_007 if info.min else info.max - 999] if hashed else [19, 3]
    table = sok.EmbeddingVariable(DIM, 20, name="of_keys", key_dtype=key_dtype, hashed=hashed)
    table.assign(np.array([*keys, 5], key_dtype), [ROW, 2 * ROW, np.ones(DIM)])
    sok.save(tmp_path, table)
    names = [table.table_name]
    assert sok.erase(names, [NOBODY, 2**63 + 7, -(2**62)], checkpoints=[tmp_path]).nowhere == (
        -(2**62),
        NOBODY,
        2**63 + 7,
    )
    report = sok.erase(table, keys, checkpoints=[tmp_path])
    assert [(p.found, p.removed) for p in report.places] == [(2, 2), (2, 2)]
    assert_gone(tmp_path, rows=[ROW, 2 * ROW], keys=keys if hashed else [], dtype=key_dtype)
    sok.restore(tmp_path, table)
    assert set(contents(table)) == {5}


class Killed(BaseException):
    """What nobody handles as an error of the disk."""


class Steps:
    """Counts what changes files; at step `at` the process is gone: nothing that it does later reaches the disk."""

    def __init__(self, monkeypatch, at=None):
        self.count, self._at = 0, at
        for owner, name in ((os, "rename"), (os, "replace"), (os, "unlink"), (native, "compact_shards")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))
        monkeypatch.setattr(native, "save_erasure", self._counted(native.save_erasure))
        monkeypatch.setattr(lease.Lease, "_write", self._counted(lease.Lease._write))

    def _counted(self, function):
        def run(*args, **kwargs):
            self.count += 1
            if self._at is not None and self.count >= self._at:
                raise Killed
            return function(*args, **kwargs)

        return run


def test_killed_at_any_step_a_checkpoint_is_whole_and_a_second_call_completes_the_work(tmp_path):
    table = user_table()
    names, first = [table.table_name], tmp_path / "saved"
    sok.save(first, table, incremental=True)
    table.assign([USER, 9], [2 * ROW, np.ones(DIM)])
    sok.save(first, table, incremental=True)
    old = contents(table)
    new = {key: row for key, row in old.items() if key != USER}
    other, seen = new_table(), []
    with pytest.MonkeyPatch.context() as patch:
        steps = Steps(patch)
        sok.erase(names, [USER], checkpoints=[shutil.copytree(first, tmp_path / "counted")])
    assert steps.count > 6
    for at in range(1, steps.count + 1):
        folder = shutil.copytree(first, tmp_path / str(at))
        with pytest.MonkeyPatch.context() as patch:
            Steps(patch, at)
            with pytest.raises(Killed):
                sok.erase(names, [USER], checkpoints=[folder])
        assert verify(folder) == []
        sok.restore(folder, {table.table_name: other})
        assert contents(other) in (old, new)
        seen.append(contents(other) == new)
        assert sok.erase(names, [USER], checkpoints=[folder]).is_complete
        assert_gone(folder, rows=[ROW, 2 * ROW])
        sok.restore(folder, {table.table_name: other})
        assert contents(other) == new
    assert seen[0] is False and seen[-1] is True and seen == sorted(seen)


def test_what_interrupted_saves_have_left_goes_too(tmp_path):
    table = user_table()
    sok.save(tmp_path / "left", table)
    (shard,) = (tmp_path / "left").glob("*.shard")
    table.erase([USER])
    sok.save(tmp_path / "kept", table)
    shutil.copy(shard, tmp_path / "kept")
    shutil.copy(shard, tmp_path / "kept" / f"{shard.name}.tmp")
    (tmp_path / "left" / "manifest.json").unlink()
    report = sok.erase([table.table_name], [USER], checkpoints=[tmp_path])
    assert [(place.kind, place.found) for place in report.places] == [("checkpoint", 0), ("unfinished save", 0)]
    assert_gone(tmp_path / "kept")
    assert not report.is_complete and "remove its files" in str(report) and "NOT COMPLETE" in str(report)


def test_all_checkpoints_of_a_manager_lose_the_row(tmp_path):
    table = user_table()
    checkpoint = tf.train.Checkpoint(table=table, weight=tf.Variable(1.0))
    manager = sok.CheckpointManager(checkpoint, tmp_path, max_to_keep=3)
    paths = [manager.save() for _ in range(2)]
    report = sok.erase(table, [USER], checkpoints=[paths[1]])
    assert [place.removed for place in report.places] == [1, 1]
    report = sok.erase(table, [USER], checkpoints=[tmp_path])
    assert [(place.path, place.removed) for place in report.places[1:]] == [
        (f"{paths[0]}.sok", 1),
        (f"{paths[1]}.sok", 0),
    ]
    assert ROW.tobytes() not in bytes_under(tmp_path) and bytes_of(USER) not in bytes_under(tmp_path)
    for path in paths:
        manager.restore(path)
        assert set(contents(table)) == {OTHER}


def test_tables_that_are_not_named_keep_their_keys(tmp_path):
    users, items = user_table(), new_table("items")
    items.assign([USER], [ROW])
    sok.save(tmp_path, [users, items])
    report = sok.erase([users, items], {users.table_name: [USER]}, checkpoints=[tmp_path])
    assert [(place.kind, place.found) for place in report.places] == [("table", 0), ("table", 1), ("checkpoint", 1)]
    sok.restore(tmp_path, [users, items])
    assert set(contents(users)) == {OTHER} and set(contents(items)) == {USER}


def test_a_job_that_still_runs_is_not_robbed_of_its_folder(tmp_path, monkeypatch):
    table = user_table()
    sok.save(tmp_path, table)
    before = bytes_under(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(lease, "_process_name", lambda pid: "another")
        patch.setattr(lease, "_taken", {})
        with pytest.raises(RuntimeError, match=r"writer.json: process \d+ .*still runs.*sok.erase in that job"):
            sok.erase(table, [USER], checkpoints=[tmp_path])
        assert bytes_under(tmp_path) == before and USER in contents(table)
        # It has ended, or runs on a host that cannot be seen from here: then its next save is refused.
        patch.setattr(lease, "_lives_here", lambda holder: False)
        assert sok.erase([table.table_name], [USER], checkpoints=[tmp_path]).places[0].removed == 1
    with pytest.raises(lease.LeaseLost, match="restore what lies there"):
        sok.save(tmp_path, table)
    assert_gone(tmp_path)


def test_a_damaged_checkpoint_is_said_and_stays(tmp_path):
    table = user_table()
    sok.save(tmp_path, table)
    (shard,) = tmp_path.glob("*.shard")
    data = bytearray(shard.read_bytes())
    data[-60] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ValueError, match=f"{shard.name}: at offset"):
        sok.erase([table.table_name], [USER], checkpoints=[tmp_path])
    assert shard.read_bytes() == data


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((["users"], ["x"]), "`keys` of table 'users' must be integers. Received: "),
        ((["users"], {"items": [1]}), r"`keys` names tables \['items'\] that are not among"),
        ((["users"], [1], ["gs://bucket/a"]), "only folders of the system"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        sok.erase(*arguments)


def test_a_path_without_anything_is_an_error_before_anything_is_erased(tmp_path):
    table = user_table()
    with pytest.raises(FileNotFoundError, match="no checkpoint, export or dump here"):
        sok.erase(table, [USER], checkpoints=[tmp_path])
    assert USER in contents(table)
    with pytest.raises(RuntimeError, match="must be called outside of functions"):
        tf.function(lambda: sok.erase(table, [USER]))()
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="run table.erase"):
        sok.erase(new_table(), [USER])
