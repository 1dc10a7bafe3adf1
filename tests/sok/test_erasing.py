"""`sok.erase` and `sok find`: where a key lies, and that afterwards it lies nowhere."""

import json
import shutil

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import lease, read_manifest, verify
from sok.tools import cli
from tests.sok.checkpoint_cases import DIM, RULES, contents, new_table, train
from tests.sok.erasing_cases import (
    NOBODY,
    OTHER,
    ROW,
    SECOND,
    USER,
    assert_gone,
    bytes_of,
    bytes_under,
    copies_killed_at_each_step,
    export,
    user_table,
)
from tests.sok.threads_world import checked, run_world


def test_an_erased_row_is_nowhere_and_all_others_are_as_they_were(tmp_path):
    table, optimizer = new_table(), RULES["Adam"]()
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
    other, fresh = new_table(), RULES["Adam"]()
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


def test_killed_at_any_step_a_checkpoint_is_whole_and_a_second_call_completes_the_work(tmp_path):
    table = user_table()
    names, first = [table.table_name], tmp_path / "saved"
    sok.save(first, table, incremental=True)
    table.assign([USER, 9], [2 * ROW, np.ones(DIM)])
    sok.save(first, table, incremental=True)
    old = contents(table)
    new = {key: row for key, row in old.items() if key != USER}
    other, seen = new_table(), []

    def erase(folder):
        return sok.erase(names, [USER], checkpoints=[folder])

    for folder in copies_killed_at_each_step(first, tmp_path, erase):
        assert verify(folder) == []
        sok.restore(folder, {table.table_name: other})
        assert contents(other) in (old, new)
        seen.append(contents(other) == new)
        assert erase(folder).is_complete
        assert_gone(folder, rows=[ROW, 2 * ROW])
        sok.restore(folder, {table.table_name: other})
        assert contents(other) == new
    assert len(seen) > 6 and seen[0] is False and seen[-1] is True and seen == sorted(seen)


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


@pytest.mark.parametrize(
    "placement",
    [sok.row_wise(hash=True), sok.table_wise(1), sok.column_wise([1, 2], [2, 0]), sok.data_parallel()],
    ids=lambda placement: placement.kind,
)
def test_each_of_three_workers_erases_its_part_and_one_rewrites_what_all_have_saved(tmp_path, placement):
    keys = np.array([USER, SECOND, *range(10)])

    def program(transport):
        table = new_table("placed", placement=placement)
        table.assign(keys, np.tile(ROW, [12, 1]) + np.arange(12, dtype=np.float32)[:, None])
        sok.save(tmp_path, table, incremental=True)
        table.assign([USER, 4], np.stack([2 * ROW, np.ones(DIM, np.float32)]))
        table.erase([SECOND])
        sok.save(tmp_path, table, incremental=True)
        report = sok.erase(table, [USER, SECOND, NOBODY], checkpoints=[tmp_path])
        assert (report.nowhere, [place.removed for place in report.places]) == ((NOBODY,), [1, 2])
        held = contents(table)
        sok.restore(tmp_path, table)
        assert contents(table) == held
        return table.table_name, sorted(held)

    with pytest.MonkeyPatch.context() as patch:
        names, held = zip(*checked(run_world(3, program, patch)), strict=True)
    assert {key for of_rank in held for key in of_rank} == set(range(10))
    assert verify(tmp_path) == []
    found = bytes_under(tmp_path)
    assert not any(bytes_of(key) in found for key in (USER, SECOND))
    # Of other workers than those that have saved it, without the tables.
    assert sok.erase(names[0], [4], checkpoints=[tmp_path]).nowhere == ()
    assert sok.erase(names[0], [4], checkpoints=[tmp_path]).nowhere == (4,)
    assert verify(tmp_path) == []


# The command.


def test_find_says_where_a_key_lies(tmp_path, capsys):
    table = user_table()
    sok.save(tmp_path / "saved", table, incremental=True)
    table.assign([USER], [ROW])
    sok.save(tmp_path / "saved", table, incremental=True)
    table.erase([USER])
    sok.save(tmp_path / "saved", table, incremental=True)
    path = export(tmp_path / "model" / "1", table, native=True)
    full, changed, erased = (link.generation for link in read_manifest(tmp_path / "saved").links)
    assert cli.main(["find", str(USER), str(tmp_path)]) == 0
    label = f"{tmp_path}/saved: table '{table.table_name}', key {USER}: "
    assert capsys.readouterr().out.splitlines() == [
        f"{label}a row of full save {full}, step 0",
        f"{label}a row of delta {changed}, step 0",
        f"{label}noted as erased of delta {erased}, step 0",
    ]
    assert cli.main(["find", str(OTHER), str(tmp_path), "--json", "--table", table.table_name]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(one["path"], one["save"], one["is_row"]) for one in said["found"]] == [
        (path, "", True),
        (f"{tmp_path}/saved", full, True),
    ]
    assert cli.main(["find", str(OTHER), str(tmp_path), "--table", "items"]) == 1
    assert cli.main(["find", str(NOBODY), str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith(f"key {NOBODY}: nowhere\n")


def test_find_says_what_it_cannot_say(tmp_path, capsys):
    assert cli.main(["find", "7", str(tmp_path)]) == 2
    assert "no checkpoint, export or dump here" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["find", "seven", str(tmp_path)])
    sok.save(tmp_path, user_table())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text("{}")  # another program's
    assert cli.main(["find", str(USER), str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{tmp_path}: table") and f"{tmp_path}/other/manifest.json" in said.err
    (tmp_path / "manifest.json").unlink()
    assert cli.main(["find", str(USER), str(tmp_path)]) == 2
    assert "never completed" in capsys.readouterr().err
