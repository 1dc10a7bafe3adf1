"""RocksDB, by batches of keys in C++: see rocksdb.cc. From the system: Debian's librocksdb-dev."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np

from benchmarks.machine import ROOT
from benchmarks.stores.base import RecordStore, Unavailable

SOURCE = Path(__file__).with_suffix(".cc")
_HEADER = Path("/usr/include/rocksdb/db.h")


def library() -> ctypes.CDLL:
    """The compiled source; `Unavailable` where a compiler or RocksDB is missing."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise Unavailable("no C++ compiler was found")
    if not _HEADER.exists():
        raise Unavailable("RocksDB is not installed (apt-get install librocksdb-dev)")
    made = ROOT / "build" / "bench" / f"rocksdb-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.so"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        part = made.with_suffix(f".{os.getpid()}")
        flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-pthread"]
        command = [*compiler.split(), *flags, str(SOURCE), "-lrocksdb", "-o", str(part)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"rocksdb.cc does not compile: {done.stderr[-300:]}")
        part.rename(made)
    loaded = ctypes.CDLL(str(made))
    loaded.Open.restype, loaded.Open.argtypes = ctypes.c_void_p, [ctypes.c_char_p, *[ctypes.c_int64] * 2, *_INTS]
    loaded.Error.restype, loaded.Error.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    loaded.Close.argtypes = loaded.Settle.argtypes = [ctypes.c_void_p]
    loaded.Read.argtypes = loaded.Write.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_void_p]
    loaded.Counts.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return loaded


_INTS = [ctypes.c_int, ctypes.c_int]


class RocksDB(RecordStore):
    """A database in a folder: blocks of 4 KiB, Bloom filters, no compression, no log of writes."""

    def __init__(self, dim: int, folder: Path, memory_bytes: int, is_direct: bool) -> None:
        super().__init__(dim)
        self._library = library()
        threads = len(os.sched_getaffinity(0))
        self._db = self._library.Open(os.fsencode(folder), memory_bytes, 8 * dim, threads, int(is_direct))
        words = self._library.Error(self._db).decode()
        if words:
            self.close()
            raise Unavailable(f"RocksDB cannot open {folder}: {words}")

    def read(self, keys: np.ndarray) -> np.ndarray:
        records = np.empty([len(keys), 2 * self.dim], np.float32)
        self._check(self._library.Read(self._db, _keys(keys), len(keys), records.ctypes.data))
        return records

    def write(self, keys: np.ndarray, records: np.ndarray) -> None:
        records = np.ascontiguousarray(records, np.float32)
        self._check(self._library.Write(self._db, _keys(keys), len(keys), records.ctypes.data))

    def settle(self) -> None:
        """Writes all out and puts the levels in order, as after a long time without writes."""
        self._check(self._library.Settle(self._db))

    def counts(self) -> dict[str, int]:
        found = np.zeros(3, np.uint64)
        self._library.Counts(self._db, found.ctypes.data)
        misses, hits, written = map(int, found)
        return {"hits": hits, "misses": misses, "reads": misses, "bytes_written": written}

    def describe(self) -> str:
        return "RocksDB: blocks of 4 KiB, Bloom filters of 10 bits, no compression, no log, the same memory"

    def close(self) -> None:
        if self._db:
            self._library.Close(self._db)
        self._db = None

    def _check(self, is_done: int) -> None:
        if not is_done:
            raise RuntimeError(f"RocksDB: {self._library.Error(self._db).decode()}")


def _keys(keys: np.ndarray) -> int:
    assert keys.dtype == np.int64 and keys.flags.c_contiguous
    return int(keys.ctypes.data)
