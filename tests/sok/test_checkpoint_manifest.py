"""The manifest: its checksum, and what is refused in it."""

import dataclasses
import errno
import json
import os
import stat
import sys
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sok.checkpoint import CheckpointError, manifest
from sok.checkpoint.crc32c import crc32c
from sok.table.placement import row_wise
from tests.messages import saying

EXAMPLE = manifest.Manifest(
    generation="g000007-5f3a9c1e",
    sok_version="0.1.0",
    world_size=2,
    created="2025-01-31T12:00:00Z",
    tables=(
        manifest.SavedTable(
            name="item/ü",
            dim=16,
            key_dtype="int64",
            hashed=True,
            placement=row_wise(),
            capacity=1000,
            num_keys=None,
            seed=-5,
            initializer={"kind": "uniform", "a": -0.05, "b": 0.05},
            slot_sets=(manifest.SavedSlotSet("Adam", "adam", 2, 100),),
            files=(
                manifest.ShardFile("g000007-5f3a9c1e-t0000-r0000.shard", 0, 4711, 95000, "00c0ffee"),
                manifest.ShardFile("g000007-5f3a9c1e-t0000-r0001.shard", 1, 4712, 95020, "00c0ffee"),
            ),
        ),
    ),
    optimizers=(manifest.OptimizerState("Adam", "adam", 100, 0.1),),
)


def signed(change):
    """The example's file with something changed by somebody who knows how to sum."""
    body = json.loads(manifest.to_bytes(EXAMPLE))
    del body["checksum"]
    body = change(body) or body
    return json.dumps({**body, "checksum": manifest.checksum(body)}).encode()


def read(data):
    return manifest.from_bytes(data, "/a/manifest.json")


@pytest.mark.parametrize(
    "data, crc",
    [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (bytes([255]) * 32, 0x62A8AB43)],
)
def test_known_checksums_are_met(data, crc):
    assert crc32c(data) == crc


def test_what_was_written_is_read(tmp_path):
    assert read(manifest.to_bytes(EXAMPLE)) == EXAMPLE
    manifest.write_manifest(tmp_path, EXAMPLE)
    assert manifest.read_manifest(tmp_path) == EXAMPLE
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert EXAMPLE.tables[0].rows == 9423 and EXAMPLE.table(EXAMPLE.tables[0].name) is EXAMPLE.tables[0]


def test_a_manifest_of_no_tables_is_read_as_written():
    empty = dataclasses.replace(EXAMPLE, tables=(), before=())
    assert read(manifest.to_bytes(empty)) == empty and json.loads(manifest.to_bytes(empty))["version"] == 1


@pytest.mark.parametrize("world_size", [3, 2**31, 2**62, 2**70])
@pytest.mark.parametrize("by_hash", [False, True])
def test_a_manifest_of_more_workers_than_files_is_refused(world_size, by_hash):
    tables = (dataclasses.replace(EXAMPLE.tables[0], placement=row_wise(hash=by_hash)),)
    damaged = dataclasses.replace(EXAMPLE, world_size=world_size, tables=tables, before=())
    with pytest.raises(CheckpointError, match=saying("item/ü") if world_size < 2**63 else None):
        read(manifest.to_bytes(damaged))


def test_layout_does_not_matter():
    assert read(json.dumps(json.loads(manifest.to_bytes(EXAMPLE)), indent=None, sort_keys=True).encode()) == EXAMPLE


def test_any_other_value_is_noticed():
    data = manifest.to_bytes(EXAMPLE)
    for old, new in [(b"4711", b"4712"), (b"-5,", b"5,"), (b"true", b"false"), (b"r0001", b"r0000")]:
        assert old in data
        with pytest.raises(CheckpointError, match="/a/manifest.json: wrong checksum"):
            read(data.replace(old, new, 1))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_cut_and_no_flipped_bit_goes_unnoticed(data):
    whole = manifest.to_bytes(EXAMPLE)
    place = data.draw(st.integers(0, len(whole) - 2))
    changed = bytearray(whole)
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    for wrong in (whole[:place], bytes(changed)):
        try:
            assert read(wrong) == EXAMPLE  # a blank for a blank
        except CheckpointError as error:
            assert str(error).startswith("/a/manifest.json: ")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100000, b"[]", b"{}", b'{"format": "other"}', b"3"])
def test_foreign_files_are_refused(data):
    with pytest.raises(CheckpointError, match="/a/manifest.json: .*(not JSON|not the manifest)"):
        read(data)


def first_table(body):
    return body["tables"][0]


def first_file(body):
    return first_table(body)["files"][0]


@pytest.mark.parametrize(
    "change, parts",
    [
        (lambda b: b.update(version=5), ["version 5", "up to version 4"]),
        (lambda b: first_table(b).update(placement={"buckets": 4096, "hash": "md5"}), ["'item/ü' is placed by {'bu"]),
        (
            lambda b: first_table(b).update(placement={"kind": "by_moon", "phase": 3}),
            ["'item/ü' is placed by {'kind': 'by_moon', 'phase': 3}", "no placement is of kind 'by_moon'", "row_wise"],
        ),
        (lambda b: first_table(b).update(placement={"kind": "row_wise", "phase": 3}), ["placed by", "'phase'"]),
        (lambda b: first_table(b).update(placement={"kind": "row_wise"}), ["placed by", "makes no sense"]),
        (lambda b: first_table(b).update(placement={"kind": "table_wise", "owner": 0}), ["makes no sense"]),
        (lambda b: first_table(b).update(owner=2), ["placed by", "a rank in [0, 2)"]),
        (lambda b: b.update(version=2), ["the manifest has no 'before'"]),
        (lambda b: b.update(before=[]), ["chain of deltas", "version 1"]),
        (lambda b: b.update(same_as="g7"), ["generation 'g7'"]),
        (lambda b: b.update(version="1"), ["version", "'1'"]),
        (lambda b: b.pop("tables"), ["has no 'tables'"]),
        (lambda b: b.update(tables={}), ["'tables' of the manifest is {}"]),
        (lambda b: b.update(tables=[3]), ["a table has no 'name'"]),
        (lambda b: b.update(world_size=True), ["'world_size'", "True"]),
        (lambda b: b.update(generation="7"), ["generation '7'"]),
        (lambda b: b.update(world_size=-1), ["is negative: -1"]),
        (lambda b: b["tables"].append(b["tables"][0]), ["two tables have one name"]),
        (lambda b: b["optimizers"].append({}), ["an optimizer has no 'slot_set'"]),
        (lambda b: first_table(b).update(dim="3"), ["'dim' of table 'item/ü'", "'3'"]),
        (lambda b: first_table(b)["slot_sets"].append([]), ["slot set of table 'item/ü'", "no 'name'"]),
        (lambda b: first_table(b)["files"].append(first_file(b)), ["two files of one rank"]),
        (lambda b: first_table(b)["files"].pop(), ["ranks [0], not of all"]),
        (lambda b: first_table(b).update(owner=1), ["ranks [0, 1], not of all"]),
        (lambda b: b["optimizers"][0].update(iterations=10**30), ["64 bits"]),
        (lambda b: first_file(b).update(rank=2), ["rank 2, of 2 ranks"]),
        (lambda b: first_file(b).update(bytes=1.5), ["'bytes'", "'item/ü'", "1.5"]),
        (lambda b: first_file(b).update(name="../../etc/passwd"), ["'../../etc/passwd', which no save gives"]),
        (lambda b: first_file(b).update(name="/etc/passwd"), ["which no save gives"]),
        (lambda b: first_file(b).update(name="g000007-5f3a9c1e-t0000-r0000.shard/.."), ["which no save gives"]),
        (lambda b: first_file(b).update(name="g000006-5f3a9c1e-t0000-r0000.shard"), ["which no save gives"]),
    ],
)
def test_crafted_manifests_are_refused(change, parts):
    def apply(body):
        change(body)

    with pytest.raises(CheckpointError, match=saying("/a/manifest.json: ", *parts)):
        read(signed(apply))


def test_the_crafting_itself_is_right():
    assert read(signed(lambda body: None)) == EXAMPLE


def chained(body):
    """Makes the example the second link of a chain whose first one a single worker has saved."""
    older = json.loads(json.dumps({k: v for k, v in body.items() if k not in ("format", "version", "optimizers")}))
    older.update(generation="g000006-00000000", world_size=1)
    older["tables"][0]["files"] = [
        {**older["tables"][0]["files"][0], "name": "g000006-00000000-t0000-r0000.shard", "rank": 0}
    ]
    for file in body["tables"][0]["files"]:
        file.update(erased=3, held=5000)
    body.update(version=2, before=[older])
    return older


def test_a_chain_is_read_as_it_was_written():
    def apply(body):
        chained(body)

    read_in = read(signed(apply))
    assert [link.world_size for link in read_in.links] == [1, 2]
    assert [link.tables[0].rows for link in read_in.links] == [4711, 10000]
    assert read(manifest.to_bytes(read_in)) == read_in
    assert read_in.bytes == 95000 + 95000 + 95020


@pytest.mark.parametrize(
    "change, parts",
    [
        (lambda b, older: b["before"].append(older), ["has no 'erased'"]),
        (lambda b, older: b.update(before={}), ["'before' of the manifest is {}"]),
        (lambda b, older: b.update(before=[3]), ["link 0 of the chain", "no 'generation'"]),
        (lambda b, older: older.update(generation="g000007-5f3a9c1e"), ["which no save gives"]),
        (lambda b, older: first_file(b).pop("held"), ["has no 'held'"]),
        (lambda b, older: first_file(b).update(erased=-1), ["is negative: -1"]),
        (lambda b, older: first_table(b).update(dim=4), ["chain", "different tables"]),
        (lambda b, older: first_table(older).update(name="other"), ["chain", "different tables"]),
        (lambda b, older: older.update(tables=[]), ["chain", "different tables"]),
    ],
)
def test_crafted_chains_are_refused(change, parts):
    def apply(body):
        change(body, chained(body))

    with pytest.raises(CheckpointError, match=saying("/a/manifest.json: ", *parts)):
        read(signed(apply))


def test_folders_that_cannot_be_synced_are_not_asked_to(tmp_path, monkeypatch):
    def refuse(number):
        def fsync(descriptor):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, "no")

        return fsync

    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))
    manifest.write_manifest(tmp_path, EXAMPLE)
    assert manifest.read_manifest(tmp_path) == EXAMPLE
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match="no"):
        manifest.write_manifest(tmp_path, EXAMPLE)


def test_a_pipe_is_no_manifest(tmp_path):
    os.mkfifo(tmp_path / manifest.NAME)
    with pytest.raises(CheckpointError, match="manifest.json: not a file"):
        manifest.read_manifest(tmp_path)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="no checkpoint here.*manifest.json"):
            manifest.read_manifest(path)


def test_a_manifest_that_the_disk_does_not_give_is_named(tmp_path):
    (tmp_path / manifest.NAME).symlink_to("/proc/self/mem")  # which opens, and reads as "Input/output error"
    with pytest.raises(OSError, match=r"\[Errno 5\] .*manifest.json"):
        manifest.read_manifest(tmp_path)


def test_a_sum_takes_no_python_for_each_byte():
    lines = 0

    def count(frame, event, argument):
        nonlocal lines
        lines += 1
        return count

    data = os.urandom(1 << 20)
    crc32c(b"")
    sys.settrace(count)
    try:
        crc32c(data)
    finally:
        sys.settrace(None)
    assert lines < 2000


@given(st.binary(max_size=300))
def test_sums_are_those_of_the_definition(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    assert crc32c(data) == crc ^ 0xFFFFFFFF


def test_a_manifest_that_has_not_changed_is_read_once(tmp_path, monkeypatch):
    summed = mock.Mock(side_effect=manifest.checksum)
    monkeypatch.setattr(manifest, "checksum", summed)
    manifest.from_bytes.cache_clear()
    manifest.write_manifest(tmp_path, EXAMPLE)
    stamp = manifest.stamp(tmp_path)
    assert manifest.read_manifest(tmp_path) is manifest.read_manifest(tmp_path) and summed.call_count == 2
    manifest.write_manifest(tmp_path, EXAMPLE)
    assert manifest.stamp(tmp_path) != stamp and manifest.stamp(tmp_path / "none") is None
