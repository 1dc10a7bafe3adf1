"""What the readers of files in Python promise of any bytes at all.

Each function takes one input, and raises if it finds a promise broken: an error of another class than the reader's own,
or an answer that does not go together.

They need no TensorFlow.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import numpy as np

from sok.checkpoint import manifest as manifests
from sok.compat.formats import npy, openembedding, v1, v2
from sok.compat.formats.columns import FormatError, StoredTable
from sok.compat.formats.destination import Destination, TableFull, check_room, own_keys
from sok.table.placement import row_wise

MAX_DIM = 4


def check_manifest(data: bytes) -> None:
    """A manifest is read or refused, and one that was read can be written and read again."""
    try:
        manifest = manifests.from_bytes(data, "manifest.json")
    except manifests.CheckpointError as error:
        assert str(error).startswith("manifest.json: ")
        return
    for table in manifest.tables:
        assert all(os.path.basename(file.name) == file.name and ".." not in file.name for file in table.files)
        assert table.rows >= 0 and table.bytes >= 0
    written = manifests.to_bytes(manifest)
    again = manifests.from_bytes(written, "again")
    assert manifests.to_bytes(again) == written


def parts(data: bytes, count: int) -> list[bytes]:
    """`count` files from one input: two bytes of length before each but the last."""
    found = []
    for _ in range(count - 1):
        size = int.from_bytes(data[:2], "little")
        found.append(data[2 : 2 + size])
        data = data[2 + size :]
    return [*found, data]


def joined(files: list[bytes]) -> bytes:
    """The input that `parts` takes apart."""
    *first, last = files
    return b"".join(len(file).to_bytes(2, "little") + file for file in first) + last


def check_v1(data: bytes) -> None:
    """Files of SOK v1: keys and values. The first byte says how long rows are, and what keys are meant to be."""
    how, (keys, values) = data[:1] or b"\0", parts(data[1:], 2)
    dim, dtype = 1 + how[0] % MAX_DIM, (None, np.dtype("i4"), np.dtype("u8"))[how[0] // MAX_DIM % 3]
    _check({"t_keys.file": keys, "t_values.file": values}, lambda folder: v1.open_table(folder, "t", dim, dtype), dim)


def check_v2(data: bytes) -> None:
    """Files of SOK v2: keys, weights and one slot."""
    names = ("t-key", "t-weight", "t-Adagrad-accumulator")
    _check(
        dict(zip(names, parts(data, 3), strict=True)),
        lambda folder: v2.open_table(folder, "t", *v2.find_slots(folder, "t")),
    )


def check_npy(data: bytes) -> None:
    """Two `.npy` files."""
    files = dict(zip(("keys.npy", "values.npy"), parts(data, 2), strict=True))
    _check(files, lambda folder: npy.open_table(*(os.path.join(folder, name) for name in files)))


def check_openembedding(data: bytes) -> None:
    """A checkpoint of OpenEmbedding: two files of a storage, and what lies beside them."""
    files = dict(zip(("0/model_0_0", "0/model_1_0", "model_meta"), parts(data, 3), strict=True))
    _check(files, lambda folder: openembedding.open_storage(folder, "0")[0])


TARGETS: dict[str, Callable[[bytes], None]] = {
    "manifest": check_manifest,
    "v1": check_v1,
    "v2": check_v2,
    "npy": check_npy,
    "openembedding": check_openembedding,
}

_in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None


def _check(files: dict[str, bytes], open_table: Callable[[str], StoredTable], dim: int | None = None) -> None:
    with tempfile.TemporaryDirectory(prefix="sok_fuzz_", dir=_in_memory) as folder:
        for name, data in files.items():
            os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
            with open(os.path.join(folder, name), "wb") as file:
                file.write(data)
        try:
            stored = open_table(folder)
        except FormatError as error:
            assert folder in str(error), f"an error names the file: {error}"
            return
        assert stored.num_rows * stored.keys.dtype.itemsize <= sum(map(len, files.values()))
        assert dim is None or stored.dim == dim
        if stored.dim <= 1000:
            _check_table(stored, folder)


def _check_table(stored: StoredTable, folder: str) -> None:
    """The table goes into tables of ours, or not: each key to the worker that owns it, and to no other."""
    for key_dtype, num_keys in (("int64", None), ("uint64", None), ("int32", None), ("int64", 50)):
        dtype, found = np.dtype(key_dtype), []
        for rank in range(3):
            to = Destination("t", stored.dim, dtype, 40, num_keys, rank, 3, row_wise())
            try:
                mine = own_keys(stored, to)
                check_room(to, 0, len(mine))
            except FormatError as error:
                assert folder in str(error), f"an error names the file: {error}"
                break
            except TableFull:
                pass
            found.append(mine)
        else:
            everything = np.concatenate(found)
            assert len(everything) == stored.num_rows == len(np.unique(everything))
            assert set(everything.tolist()) == set(stored.keys.read(0, stored.num_rows).tolist())
    for start, stop in stored.pieces():
        for name, column in (("", stored.rows), *stored.slots.items()):
            try:
                found = column.read(start, stop)
            except FormatError as error:
                assert folder in str(error), f"an error names the file: {error}"
                continue
            assert found.shape == (stop - start, 1 if name in stored.scalars else stored.dim)
