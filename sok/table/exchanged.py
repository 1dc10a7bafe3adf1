"""Which lookups a table takes part in, so that what these exchange is found among what is counted anyway."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sok.base import tracing

if TYPE_CHECKING:
    from sok.table.table import EmbeddingVariable

_lock = threading.Lock()
_names: weakref.WeakKeyDictionary[EmbeddingVariable, set[str]] = weakref.WeakKeyDictionary()


def note(name: str, tables: Iterable[EmbeddingVariable]) -> None:
    """To be called where a lookup is made, or built, whose collectives begin with `name`."""
    with _lock:
        for table in tables:
            _names.setdefault(table, set()).add(name)


def local_bytes(table: EmbeddingVariable) -> int:
    """Bytes that this worker has handed over for lookups with the table and their gradients. Eager.

    Of a call that looks up several tables all bytes count, for each of them. Calls are told apart by their first table
    and their number of tables.
    """
    with _lock:
        names = set(_names.get(table, ()))
    if not names:
        return 0
    counted = tracing.bytes_of_lookups()
    return sum(counted[name] for name in names)
