"""The file of a table of a native export: what is written is found, and what is damaged is said."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from sok.base import _ops
from sok.saved_model.serving_file import (
    CHECKSUM_BYTES,
    HEAD_BYTES,
    DamagedFileError,
    Description,
    ServingFile,
    head_of,
    mixed_keys,
    read_head,
    unmixed_keys,
    verify_file,
)
from sok.table.initializers import InitializerSpec
from tests.messages import saying

UNSEEN = np.array([-1.0, -2.0, -3.0], np.float32)


def described(**changes):
    about = dict(name="t", dim=3, row_dtype=tf.float32, key_dtype=tf.int64, hashed=True, seed=7, unseen=UNSEEN)
    return Description(**{**about, **changes})


def written(path, keys, rows, scales=None, table=None):
    """A file with the rows of keys [n], in any order; its path."""
    mixed = mixed_keys(np.asarray(keys, np.int64).view(np.uint64))
    order = np.argsort(mixed)
    file = ServingFile(str(path), table or described(), mixed[order], len(order))
    file.add(rows[order], None if scales is None else scales[order])
    assert file.finish() == os.path.getsize(path)
    return str(path)


def opened(path):
    lib = _ops.serving_lib()
    handle = lib.sok_serving_table(anonymous=True)
    lib.sok_serving_open(handle, str(path))
    return handle


def looked_up(handle, keys, dim=3, dtype=np.int64):
    return _ops.serving_lib().sok_serving_lookup(handle, np.asarray(keys, dtype), dim=dim).numpy()


def rows_of(keys, dim=3):
    return np.stack([np.asarray(keys, np.float32) % 1000 + j for j in range(dim)], 1)


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=80),
    others=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=10),
)
def test_every_key_is_found_and_no_other(tmp_path_factory, keys, others):
    path = tmp_path_factory.mktemp("file") / "t.sok"
    handle = opened(written(path, keys, rows_of(np.array(keys, np.int64))))
    asked = np.array(keys + others, np.int64)
    expected = np.where(np.isin(asked, keys)[:, None], rows_of(asked), UNSEEN)
    np.testing.assert_array_equal(looked_up(handle, asked), expected)
    verify_file(str(path))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), max_size=20, unique=True))
def test_mixing_can_be_undone(words):
    words = np.array(words, np.uint64)
    mixed = mixed_keys(words)
    np.testing.assert_array_equal(unmixed_keys(mixed), words)
    # The slow way, in Python's own numbers.
    for word, actual in zip(words.tolist(), mixed.tolist(), strict=True):
        for _ in range(2):
            word = ((word ^ (word >> 32)) * 0xD6E8FEB86659FD93) % 2**64
        assert actual == word ^ (word >> 32)


@pytest.mark.parametrize("step", [1, 2**32, -(2**40), 10**12 + 7])
def test_regular_keys_fill_buckets_evenly(tmp_path, step):
    keys = np.arange(100_000) * step
    path = written(tmp_path / "t.sok", keys, rows_of(keys))
    head, _ = read_head(path)
    with open(path, "rb") as file:
        file.seek(head.directory_offset)
        directory = np.frombuffer(file.read(8 * (2**head.directory_bits + 1)), np.uint64)
    assert directory[0] == 0 and directory[-1] == len(keys)
    assert np.diff(directory.astype(np.int64)).min() >= 0 and np.diff(directory).max() < 64
    np.testing.assert_array_equal(looked_up(opened(path), keys[::7]), rows_of(keys[::7]))


def test_keys_chosen_to_share_a_bucket_are_found_by_halves(tmp_path):
    mixed = np.arange(1000, dtype=np.uint64) * np.uint64(3) + np.uint64(5 << 60)  # all in one bucket
    keys = unmixed_keys(mixed).view(np.int64)
    handle = opened(written(tmp_path / "t.sok", keys, rows_of(keys)))
    np.testing.assert_array_equal(looked_up(handle, keys), rows_of(keys))
    absent = unmixed_keys(mixed + np.uint64(1)).view(np.int64)
    assert (looked_up(handle, absent) == UNSEEN).all()


def test_float16_rows_read_as_they_are_subnormal_ones_too(tmp_path):
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = np.append(halves[np.isfinite(halves)], np.float16(np.inf))
    rows = np.resize(halves, [len(halves) // 3 + 1, 3])
    path = written(tmp_path / "t.sok", np.arange(len(rows)), rows, table=described(row_dtype=tf.float16))
    actual = looked_up(opened(path), np.arange(len(rows)))
    np.testing.assert_array_equal(actual, rows.astype(np.float32))
    assert np.abs(actual[actual != 0]).min() == 2.0**-24


def test_int8_rows_are_multiplied_with_their_scales(tmp_path, rng):
    rows, scales = rng.integers(-127, 128, [50, 3]).astype(np.int8), rng.uniform(0.1, 2, 50).astype(np.float32)
    path = written(tmp_path / "t.sok", np.arange(50), rows, scales, described(row_dtype=tf.int8))
    np.testing.assert_array_equal(looked_up(opened(path), np.arange(50)), rows.astype(np.float32) * scales[:, None])


def test_large_lookups_are_split_over_threads(tmp_path, rng):
    keys = rng.permutation(40_000) * 977
    handle = opened(written(tmp_path / "t.sok", keys, rows_of(keys)))
    asked = rng.integers(-10, 40_000 * 977, 300_000)
    expected = np.where(np.isin(asked, keys)[:, None], rows_of(asked), UNSEEN)
    np.testing.assert_array_equal(looked_up(handle, asked), expected)


@pytest.mark.parametrize("num_rows", [2**31 - 1, 2**31, 2**33 + 5, 10**12])
@pytest.mark.parametrize("dtype", [tf.float32, tf.int8])
def test_tables_beyond_32_bits_have_their_place(num_rows, dtype):
    head = head_of(described(row_dtype=dtype, dim=64), num_rows)
    buckets = 2**head.directory_bits
    assert 8 <= num_rows / buckets <= 16
    assert head.keys_offset >= head.directory_offset + 8 * (buckets + 1)
    assert head.rows_offset >= head.keys_offset + 8 * num_rows and head.rows_offset % 4096 == 0
    assert head.checksums_offset == head.rows_offset + head.row_bytes * num_rows
    assert head.file_bytes == head.checksums_offset + 4 * head.num_checksums < 2**63
    assert head.num_checksums * CHECKSUM_BYTES >= head.checksums_offset - HEAD_BYTES


def sparse_file(path, num_rows):
    """An identity table of so many rows whose file is one large hole: it reads as zeros."""
    table = described(hashed=False, dim=1, row_dtype=tf.int8, unseen=np.zeros(1, np.float32))
    head = head_of(table, num_rows)
    small = str(path) + ".small"
    ServingFile(small, table, None, 0).finish()
    page = bytearray(Path(small).read_bytes()[:HEAD_BYTES])
    struct.pack_into("<8s4I7Q2I4QIffIQQ", page, 0, *head)
    struct.pack_into("<I", page, HEAD_BYTES - 4, _ops.crc32c(np.frombuffer(page[:-4], np.uint8)))
    with open(path, "wb") as file:
        file.write(page)
        file.truncate(head.file_bytes)
        # A scale and a number for the last row.
        file.seek(head.rows_offset + head.row_bytes * (num_rows - 1))
        file.write(struct.pack("<fb", 0.5, 6))


def test_rows_beyond_32_bits_are_read(tmp_path):
    num_rows = 2**32 + 5
    sparse_file(tmp_path / "t.sok", num_rows)
    handle = opened(tmp_path / "t.sok")
    assert looked_up(handle, [0, num_rows - 1, 2**31], dim=1).tolist() == [[0.0], [3.0], [0.0]]
    for bad in (num_rows, -1, 2**63 - 1):
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"table 't': key {bad} is not in \[0, {num_rows}\)"):
            looked_up(handle, [bad], dim=1)


@pytest.fixture
def whole(tmp_path):
    return written(tmp_path / "t.sok", np.arange(200_000), rows_of(np.arange(200_000)))


def changed(path, offset, data, crc=True):
    """The file with other bytes, and a head that has the right CRC of them."""
    content = bytearray(Path(path).read_bytes())
    content[offset : offset + len(data)] = data
    if crc:
        struct.pack_into("<I", content, HEAD_BYTES - 4, _ops.crc32c(np.frombuffer(content[: HEAD_BYTES - 4], np.uint8)))
    Path(path).write_bytes(content)


@pytest.mark.parametrize("size", [0, 1, 100, 4095, 4096, 5000, 1_000_000, -5, -1])
def test_a_file_that_was_cut_off_is_refused_with_its_name_and_offset(whole, size):
    full = os.path.getsize(whole)
    size = size if size >= 0 else full + size
    os.truncate(whole, size)
    with pytest.raises(tf.errors.DataLossError, match=rf"{whole}: at offset {size}: the file ends"):
        opened(whole)
    with pytest.raises(DamagedFileError, match=rf"{whole}: at offset {size}: the file"):
        verify_file(whole)


def test_a_file_that_is_cut_off_while_it_is_served_is_an_error_and_no_crash(whole):
    handle = opened(whole)
    assert looked_up(handle, [5]).tolist() == rows_of([5]).tolist()
    os.truncate(whole, 10_000)
    with pytest.raises(tf.errors.DataLossError, match=rf"{whole}: at offset 10000: the file ends here"):
        looked_up(handle, [5])


@pytest.mark.parametrize(
    ("offset", "data", "at"),
    [
        (0, b"X", 0),
        (8, struct.pack("<I", 2), 8),
        (12, struct.pack("<I", 8), 12),
        (16, struct.pack("<I", 2), 12),
        (20, struct.pack("<I", 3), 12),
        (24, struct.pack("<Q", 0), 24),
        (24, struct.pack("<Q", 2**63), 24),
        (32, struct.pack("<Q", 8), 32),
        (40, struct.pack("<Q", 2**62), 88),
        (40, struct.pack("<Q", 2**61 + 1), 88),
        (48, struct.pack("<Q", 2**62), None),
        (56, struct.pack("<Q", 2**64 - 4), 56),
        (64, struct.pack("<Q", 8), 56),
        (72, struct.pack("<Q", 2**64 - 8), 72),
        (80, struct.pack("<I", 40), 72),
        (80, struct.pack("<I", 63), 72),
        (84, struct.pack("<I", 5), 12),
        (84, struct.pack("<I", 4), 56),
        (88, struct.pack("<Q", 4097), 88),
        (96, struct.pack("<Q", 2**63), 96),
        (104, struct.pack("<Q", 12), 104),
        (132, struct.pack("<I", 5000), 24),
        (144, struct.pack("<Q", 2**64 - 1), None),
    ],
)
def test_crafted_heads_are_refused(whole, offset, data, at):
    changed(whole, offset, data)
    if offset == 144:  # of no meaning here, where there is no bank
        assert looked_up(opened(whole), [5]).tolist() == rows_of([5]).tolist()
        return
    place = rf"at offset {at}" if at is not None else "at offset"
    with pytest.raises(tf.errors.DataLossError, match=rf"{whole}: {place}"):
        opened(whole)


def test_one_flipped_bit_of_the_head_is_seen(whole):
    for offset in (30, 60, 145, 152, 2000, 4095):
        original = Path(whole).read_bytes()
        changed(whole, offset, bytes([original[offset] ^ 1]), crc=False)
        with pytest.raises(tf.errors.DataLossError, match="CRC"):
            opened(whole)
        with pytest.raises(DamagedFileError, match="CRC"):
            verify_file(whole)
        changed(whole, offset, original[offset : offset + 1], crc=False)
    verify_file(whole)


@pytest.mark.parametrize("begin", [2**64 - 1, 200_001, 2**63])
def test_a_crafted_directory_is_refused_and_reads_nothing_outside(whole, begin):
    head, _ = read_head(whole)
    changed(whole, head.directory_offset, struct.pack("<Q", begin) * (2**head.directory_bits + 1))
    with pytest.raises(tf.errors.DataLossError, match=rf"{whole}: at offset \d+: .*directory"):
        looked_up(opened(whole), np.arange(1000))
    assert looked_up(opened(whole), []).shape == (0, 3)


def test_verify_names_the_piece_that_was_changed(whole):
    size = os.path.getsize(whole)
    for offset in (HEAD_BYTES, HEAD_BYTES + CHECKSUM_BYTES - 1, HEAD_BYTES + CHECKSUM_BYTES, size - 20, size - 1):
        original = Path(whole).read_bytes()[offset]
        changed(whole, offset, bytes([original ^ 4]), crc=False)
        checksums = read_head(whole)[0].checksums_offset
        piece = HEAD_BYTES + (offset - HEAD_BYTES) // CHECKSUM_BYTES * CHECKSUM_BYTES
        place = piece if offset < checksums else checksums
        with pytest.raises(DamagedFileError, match=rf"{whole}: at offset {place}: "):
            verify_file(whole)
        changed(whole, offset, bytes([original]), crc=False)
    assert verify_file(whole).num_rows == 200_000


def test_wrong_calls_say_what_is_wrong(tmp_path, whole):
    lib = _ops.serving_lib()
    handle = opened(whole)
    with pytest.raises(tf.errors.NotFoundError, match=saying("absent.sok", "cannot open", "No such file")):
        opened(tmp_path / "absent.sok")
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("table 't'", "keys", "int64", "Received: int32")):
        looked_up(handle, [1], dtype=np.int32)
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("keys", "int64", "Received: uint64")):
        looked_up(handle, [1], dtype=np.uint64)
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("rows have dim 3", "where the model wants 4")):
        looked_up(handle, [1], dim=4)
    with pytest.raises(tf.errors.FailedPreconditionError, match="looked up before it is opened"):
        looked_up(lib.sok_serving_table(anonymous=True), [1])
    group = dict(table_of=[0], dims=[3], combiners=["sum"])
    keys, splits, none = [tf.constant([1], tf.int64)], [tf.constant([0, 1], tf.int64)], [tf.zeros([0])]
    for change, text in [
        (dict(table_of=[1]), "`table_of` must lie in"),
        (dict(combiners=["max"]), "combiner must be"),
        (dict(combiners=["sum", "sum"]), "`combiners` .*each feature"),
        (dict(dims=[4]), "rows have dim 3"),
        (dict(dims=[3, 3]), "`table_of` must have a value"),
    ]:
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            lib.sok_serving_group_lookup([handle], keys, splits, none, **{**group, **change})
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=saying("table 't'", "`row_splits`", "with the number of keys")
    ):
        lib.sok_serving_group_lookup([handle], keys, [tf.constant([0, 2], tf.int64)], none, **group)


def test_a_full_disk_is_said_with_the_name_of_the_file(tmp_path):
    with pytest.raises(OSError, match=saying("cannot write", "native export", "No space left", "/dev/full")):
        written("/dev/full", np.arange(10_000), rows_of(np.arange(10_000)))


def test_rows_that_were_promised_must_come(tmp_path):
    table = described(unseen=InitializerSpec("uniform", -1.0, 1.0))
    file = ServingFile(str(tmp_path / "t.sok"), table, mixed_keys(np.arange(3, dtype=np.uint64)), 3)
    file.add(rows_of(np.arange(2)))
    with pytest.raises(ValueError, match="3 rows were promised"):
        file.finish()
    file.close()
