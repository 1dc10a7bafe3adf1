"""A file of records that is mapped into memory: the system keeps in memory what it likes."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np

from benchmarks.stores.base import RecordStore


class Mapped(RecordStore):
    """Records by their keys, which are their places: there is no index, and nothing bounds memory."""

    def __init__(self, dim: int, file: Path, rows: int) -> None:
        super().__init__(dim)
        self._records = np.memmap(file, np.float32, "w+", shape=(rows, 2 * dim))
        self._faults = _faults()

    def read(self, keys: np.ndarray) -> np.ndarray:
        return np.asarray(self._records[keys])

    def write(self, keys: np.ndarray, records: np.ndarray) -> None:
        self._records[keys] = records

    def counts(self) -> dict[str, int]:
        # Which of its reads went to the disk, the system counts of the whole process; what it writes back it does not.
        return {"hits": 0, "misses": 0, "reads": _faults() - self._faults, "bytes_written": 0}

    def describe(self) -> str:
        return "mmap: np.memmap of records, keys are places, no index, no bound of memory"


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
