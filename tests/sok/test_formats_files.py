"""The files of old formats, without tables: golden bytes, what is refused, and that they appear whole or not."""

import os
import struct

import numpy as np
import pytest

from sok.compat.formats import columns, npy, v1, v2
from sok.compat.formats.columns import ArrayColumn, FileColumn, FormatError, StoredTable
from sok.compat.formats.destination import Destination, TableFull, check_room, own_keys
from sok.compat.formats.writing import NewColumn, TableWriter
from sok.table.placement import row_wise, table_wise
from tests.messages import saying

KEYS = np.array([5, -3, 2**40], np.int64)
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


def write(new_columns, *arrays):
    writer = TableWriter(new_columns)
    writer.write(*arrays)
    writer.flush()
    writer.commit()


def v2_header(kind, code, slot=""):
    """As SOK writes it: blank table name, kind, slot name to the right, dtype."""
    return b" " * 256 + struct.pack(">I", kind) + slot.rjust(32).encode() + struct.pack(">I", code)


def put(path, content):
    path.write_bytes(content)
    return str(path)


def to(**changes):
    settings = {"name": "t", "dim": 2, "key_dtype": np.dtype(np.int64), "capacity": 10, "num_keys": None}
    return Destination(**{**settings, "rank": 0, "world_size": 1, "placement": row_wise(), **changes})


def stored(keys=KEYS, rows=ROWS, **slots):
    return StoredTable(
        ArrayColumn("keys", np.asarray(keys)),
        ArrayColumn("values", np.asarray(rows)),
        {name: ArrayColumn(name, array) for name, array in slots.items()},
    )


def test_v1_files_are_the_bytes_and_nothing_else(tmp_path):
    write(v1.new_columns(str(tmp_path), "user", np.dtype(np.int64), 2, 3), KEYS, ROWS)
    assert sorted(os.listdir(tmp_path)) == ["user_keys.file", "user_values.file"]
    assert (tmp_path / "user_keys.file").read_bytes() == struct.pack("<3q", 5, -3, 2**40)
    assert (tmp_path / "user_values.file").read_bytes() == struct.pack("<6f", *range(6))


@pytest.mark.parametrize("dtype", ["int64", "uint32"])
def test_the_dtype_of_v1_keys_follows_from_the_sizes(tmp_path, dtype):
    put(tmp_path / "user_keys.file", np.array([1, 2, 4], dtype).tobytes())
    put(tmp_path / "user_values.file", ROWS.tobytes())
    table = v1.open_table(str(tmp_path), "user", 2)
    assert table.keys.dtype == dtype and table.keys.read(1, 3).tolist() == [2, 4]
    np.testing.assert_array_equal(table.rows.read(0, 3), ROWS)


@pytest.mark.parametrize("name", ["../user", "/user", "a/../../user"])
def test_v1_names_cannot_lead_out_of_the_directory(tmp_path, name):
    with pytest.raises(ValueError, match="would not lie in"):
        v1.open_table(str(tmp_path), name, 2)


def test_v1_sizes_that_do_not_fit_are_refused_with_file_and_size(tmp_path):
    keys, values = tmp_path / "user_keys.file", tmp_path / "user_values.file"
    with pytest.raises(FileNotFoundError, match=saying("user_keys.file", "is no such file")):
        v1.open_table(str(tmp_path), "user", 2)
    put(keys, KEYS.tobytes())
    with pytest.raises(FileNotFoundError, match=saying("user_values.file", "is no such file")):
        v1.open_table(str(tmp_path), "user", 2)
    put(values, b"")
    with pytest.raises(FormatError, match=saying("user_values.file", "is empty")):
        v1.open_table(str(tmp_path), "user", 2)
    put(values, ROWS.tobytes()[:-1])
    with pytest.raises(FormatError, match=saying("user_values.file", "23 bytes", "rows of 8 bytes")):
        v1.open_table(str(tmp_path), "user", 2)
    put(values, ROWS.tobytes()[:-8])
    with pytest.raises(FormatError, match=saying("user_keys.file", "24 bytes", "2 rows")):
        v1.open_table(str(tmp_path), "user", 2)
    keys.unlink()
    keys.mkdir()
    with pytest.raises(FormatError, match=saying("user_keys.file", "is not a file")):
        v1.open_table(str(tmp_path), "user", 2)


def test_v2_files_are_a_header_of_296_bytes_and_the_data(tmp_path):
    new = v2.new_columns(str(tmp_path), "user_0", np.dtype(np.int64), 2, 3, "Adam", ["m"])
    write(new, KEYS, ROWS, ROWS + 10)
    assert (tmp_path / "user_0-key").read_bytes() == v2_header(0, 1) + struct.pack("<3q", 5, -3, 2**40)
    assert (tmp_path / "user_0-weight").read_bytes() == v2_header(1, 5) + struct.pack("<6f", *range(6))
    assert (tmp_path / "user_0-Adam-m").read_bytes() == v2_header(2, 5, "m") + struct.pack("<6f", *range(10, 16))
    table = v2.open_table(str(tmp_path), "user_0", "Adam", ["m"])
    np.testing.assert_array_equal(table.slots["m"].read(1, 3), ROWS[1:] + 10)


@pytest.mark.parametrize("code, dtype", [(0, "int32"), (1, "int64"), (2, "uint32"), (3, "uint64")])
def test_v2_keys_have_the_dtype_that_their_header_says(tmp_path, code, dtype):
    put(tmp_path / "t-key", v2_header(0, code) + np.array([1, 2, 3], dtype).tobytes())
    put(tmp_path / "t-weight", v2_header(1, 5) + ROWS.tobytes())
    table = v2.open_table(str(tmp_path), "t")
    assert table.keys.dtype == dtype and table.keys.read(0, 3).tolist() == [1, 2, 3]


@pytest.mark.parametrize("code, dtype", [(4, "float16"), (5, "float32"), (6, "float64")])
def test_v2_rows_have_the_dtype_that_their_header_says(tmp_path, code, dtype):
    put(tmp_path / "t-key", v2_header(0, 1) + KEYS.tobytes())
    # A name in the first field, which SOK leaves blank and does not look at.
    named = b"t".rjust(256) + v2_header(1, code)[256:]
    put(tmp_path / "t-weight", named + ROWS.astype(dtype).tobytes())
    table = v2.open_table(str(tmp_path), "t")
    np.testing.assert_array_equal(table.rows.read(0, 3), ROWS)
    assert table.rows.dtype == dtype


KEY_FILE, WEIGHT_FILE = v2_header(0, 1) + KEYS.tobytes(), v2_header(1, 5) + ROWS.tobytes()


@pytest.mark.parametrize(
    "key_file, weight_file, message",
    [
        (KEY_FILE[:295], WEIGHT_FILE, "t-key: .*295 bytes.*296"),
        (KEY_FILE[:-1], WEIGHT_FILE, "t-key: 319 bytes .*23 of data"),
        (KEY_FILE[:296], WEIGHT_FILE, "t-key: .*no keys .*296"),
        (WEIGHT_FILE, WEIGHT_FILE, r"t-key: byte 256 .*\(keys\).*\(weights\)"),
        (
            v2_header(0, 5) + KEYS.tobytes(),
            WEIGHT_FILE,
            r"t-key: byte 292 .*0 \(int32\).*says 5",
        ),
        (v2_header(0, 7) + KEYS.tobytes(), WEIGHT_FILE, "t-key: byte 292 .*says 7"),
        (
            KEY_FILE,
            WEIGHT_FILE[:-4],
            "t-weight: 20 bytes .*float32 .*3",
        ),
        (KEY_FILE, WEIGHT_FILE[:296], "t-weight: 0 bytes after the header"),
        (KEY_FILE, v2_header(1, 5, "m") + ROWS.tobytes(), "t-weight: byte 260 .*''.*'m'"),
        (KEY_FILE, v2_header(99, 5) + ROWS.tobytes(), "t-weight: byte 256 .*no kind of file"),
    ],
)
def test_v2_files_that_make_no_sense_are_refused(tmp_path, key_file, weight_file, message):
    put(tmp_path / "t-key", key_file)
    put(tmp_path / "t-weight", weight_file)
    with pytest.raises(FormatError, match=message):
        v2.open_table(str(tmp_path), "t")


def test_slots_of_another_width_are_refused(tmp_path):
    put(tmp_path / "t-key", KEY_FILE)
    put(tmp_path / "t-weight", WEIGHT_FILE)
    put(tmp_path / "t-Adam-m", v2_header(2, 5, "m") + np.zeros([3, 5], np.float32).tobytes())
    with pytest.raises(FormatError, match=saying("t-Adam-m", "byte 296", "holds 3 rows of 5", "but", "rows of 2")):
        v2.open_table(str(tmp_path), "t", "Adam", ["m"])
    with pytest.raises(FileNotFoundError, match="t-Adam-v"):
        v2.open_table(str(tmp_path), "t", "Adam", ["v"])


def test_npy_files_are_those_that_numpy_writes(tmp_path):
    paths = [str(tmp_path / name) for name in ("k.npy", "v.npy")]
    write(npy.new_columns(*paths, np.dtype(np.int64), 2, 3), KEYS, ROWS)
    for path, array in zip(paths, (KEYS, ROWS), strict=True):
        np.save(tmp_path / "twin.npy", array)
        with open(path, "rb") as file:
            assert file.read() == (tmp_path / "twin.npy").read_bytes()
    table = npy.open_table(*paths)
    np.testing.assert_array_equal(table.rows.read(1, 3), ROWS[1:])


@pytest.mark.parametrize("array", [KEYS.astype(">i8"), ROWS.astype(">f8"), np.asfortranarray(ROWS[:, :1])])
def test_other_orders_of_bytes_are_read(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    np.testing.assert_array_equal(npy.open_array(str(tmp_path / "a.npy")).read(0, len(array)), array)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: path.write_bytes(b"PK\x03\x04 not numpy"), "no .npy file"),
        (lambda path: path.write_bytes(b""), "no .npy file"),
        (lambda path: np.save(path, np.asfortranarray(ROWS)), "Fortran order"),
        (lambda path: np.save(path, np.zeros([2, 2, 2])), r"must hold numbers.*\[2, 2, 2\]"),
        (lambda path: np.save(path, np.zeros([2, 0])), "rows have no numbers"),
        (lambda path: np.save(path, np.array([{}], object), allow_pickle=True), "must hold numbers.*of object"),
    ],
)
def test_npy_files_that_are_no_table_are_refused(tmp_path, make, message):
    make(tmp_path / "a.npy")
    with pytest.raises(FormatError, match=rf"a.npy: .*{message}"):
        npy.open_array(str(tmp_path / "a.npy"))


@pytest.mark.parametrize("change, message", [(-8, r"header says \[3, 2\] of float32, but 16 bytes"), (8, "32 bytes")])
def test_a_npy_file_that_is_not_as_long_as_it_says_is_refused(tmp_path, change, message):
    np.save(tmp_path / "a.npy", ROWS)
    content = (tmp_path / "a.npy").read_bytes()
    put(tmp_path / "a.npy", content[:change] if change < 0 else content + bytes(change))
    with pytest.raises(FormatError, match=message):
        npy.open_array(str(tmp_path / "a.npy"))


def test_columns_must_go_together():
    with pytest.raises(FormatError, match=saying("values[0]", "holds 2 rows of 2", "but there are 3 keys")):
        stored(rows=ROWS[:2])
    with pytest.raises(FormatError, match=saying("keys[0]", "keys", "[n] of int64", "Found", "[3] of float64")):
        stored(keys=np.zeros(3))
    with pytest.raises(FormatError, match=saying("values[0]", "rows", "[n, D] of float32", "Found", "[3, 2] of int64")):
        stored(rows=np.zeros([3, 2], np.int64))


def test_a_file_cut_after_it_was_opened_is_an_error(tmp_path):
    path = put(tmp_path / "a", bytes(16))
    column = FileColumn(path, 0, np.dtype("<f4"), (4,))
    put(tmp_path / "a", bytes(9))
    with pytest.raises(FormatError, match=saying("ends at byte 8", "was longer when it was opened")):
        column.read(0, 4)


# Whether keys fit.


def test_each_worker_takes_its_own_keys():
    keys = np.array([4, 7, -1, -4, 2**40], np.int64)
    parts = [own_keys(stored(keys, np.zeros([5, 2])), to(rank=rank, world_size=3)) for rank in range(3)]
    for rank, part in enumerate(parts):
        assert (part % 3 == rank).all() and (np.diff(part) > 0).all()
    assert sorted(np.concatenate(parts)) == sorted(keys)
    assert len(own_keys(stored(), to(rank=1, world_size=3, placement=table_wise(1)))) == 3
    assert len(own_keys(stored(), to(rank=2, world_size=3, placement=table_wise(1)))) == 0


@pytest.mark.parametrize(
    "keys, settings, message",
    [
        ([1, 2, 1], {}, r"keys\[0\] and keys\[2\]: .*key 1 "),
        ([1, 2, 2**32], {"key_dtype": np.dtype(np.uint32)}, r"keys\[2\]: holds key 4294967296.*takes uint32 keys"),
        ([1, -2, 3], {"key_dtype": np.dtype(np.uint64)}, r"keys\[1\]: holds key -2.*takes uint64 keys"),
        ([1, 2, 10], {"num_keys": 10}, r"keys\[2\]: .*key 10.*'t' .*row numbers .*below 10"),
        ([-1, 2, 3], {"num_keys": 10}, r"keys\[0\]: holds key -1"),
        ([0, 1, 2], {"num_keys": 4, "complete": True}, "holds 3 keys. Table 't' has 4 rows"),
        ([0, 1, 2], {"dim": 3}, "rows of 2 .*'t' .*rows of 3"),
    ],
)
def test_keys_that_do_not_fit_are_named(keys, settings, message):
    with pytest.raises(FormatError, match=message):
        own_keys(stored(keys), to(**settings))


def test_unsigned_keys_beyond_the_signed_ones_are_refused_by_a_signed_table():
    keys = np.array([1, 2**63, 3], np.uint64)
    with pytest.raises(FormatError, match=saying("keys[1]", "holds key 9223372036854775808", "takes int64 keys")):
        own_keys(stored(keys), to())
    assert own_keys(stored(keys), to(key_dtype=np.dtype(np.uint64))).tolist() == [1, 3, 2**63]


def test_a_full_table_is_named():
    check_room(to(), 7, 3)
    with pytest.raises(TableFull, match=saying("table 't' (rank 0 of 1)", "8 of at most 10 rows", "3 new ones")):
        check_room(to(), 8, 3)


# Files that appear whole or not at all.


def two_columns(tmp_path):
    f4 = np.dtype("<f4")
    return [NewColumn(str(tmp_path / "k"), b"", np.dtype("<i8")), NewColumn(str(tmp_path / "v"), b"head", f4, 2)]


def test_old_files_stay_until_the_new_ones_are_whole(tmp_path):
    for name in ("k", "v"):
        put(tmp_path / name, b"old")
    writer = TableWriter(two_columns(tmp_path))
    writer.write(KEYS, ROWS)
    writer.flush()
    assert (tmp_path / "k").read_bytes() == (tmp_path / "v").read_bytes() == b"old"
    writer.commit()
    assert (tmp_path / "k").read_bytes() == KEYS.tobytes()
    assert (tmp_path / "v").read_bytes() == b"head" + ROWS.tobytes()
    assert sorted(os.listdir(tmp_path)) == ["k", "v"]


def test_a_write_that_fails_leaves_old_files_and_no_others(tmp_path):
    put(tmp_path / "k", b"old")
    writer = TableWriter(two_columns(tmp_path))
    with pytest.raises(ValueError, match="rows of shape"):
        writer.write(KEYS, ROWS[:2])
    assert os.listdir(tmp_path) == ["k"] and (tmp_path / "k").read_bytes() == b"old"


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    writer = TableWriter([NewColumn(str(tmp_path / "k"), b"", np.dtype("<i8"))])
    # What the file system answers when it is full, from the device that always is.
    writer._files[0].close()
    writer._files[0] = open("/dev/full", "wb")  # noqa: SIM115 - the writer closes it
    with pytest.raises(OSError, match=saying("k.", ".tmp", "cannot be written", "No space left on device")):
        writer.write(np.zeros(10**5, np.int64))
        writer.flush()
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_way_of_the_directory_is_an_error(tmp_path):
    put(tmp_path / "taken", b"")
    with pytest.raises(OSError, match=saying("taken/k", "cannot be written")):
        TableWriter([NewColumn(str(tmp_path / "taken" / "k"), b"", np.dtype("<i8"))])


def test_interrupted_renaming_leaves_no_old_keys_beside_new_rows(tmp_path, monkeypatch):
    for name in ("k", "v"):
        put(tmp_path / name, b"old")
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        real(source, target)

    writer = TableWriter(two_columns(tmp_path))
    writer.write(KEYS, ROWS)
    writer.flush()
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="k: cannot be written"):
        writer.commit()
    assert not (tmp_path / "k").exists() and (tmp_path / "v").read_bytes() == b"head" + ROWS.tobytes()


def test_pieces_cover_all_rows_in_order(monkeypatch):
    monkeypatch.setattr(columns, "READ_BYTES", 64)
    table = stored(np.arange(11), np.zeros([11, 3], np.float32))
    found = list(table.pieces())
    assert len(found) > 2 and found[0][0] == 0 and found[-1][1] == 11
    assert all(a[1] == b[0] for a, b in zip(found, found[1:], strict=False))
