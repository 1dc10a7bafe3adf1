"""What a commit hands to a neighbour, in pieces of a few MiB: rows with all slots, and keys that are gone."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import _ops
from sok.table.resharding import stats_of
from sok.table.table import EmbeddingVariable

PIECE_BYTES = 1 << 22
"""Of rows, slots included, or of keys: at most so many in a piece, but at least one."""

_ARRAYS = ("keys", "values", "changed", "erased")


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Some of what a worker's shard of a table holds, or of what has changed there.

    Args:
        table: its place among the tables of a commit.
        is_whole: it is of all rows, for a table that has none yet; else of what has changed since the commit before.
        sets: the slot sets, as this library writes them, with what rows without changes have missed. None: as in the
            piece of this table before.
        base: the save that changes are counted from.
        step: of the table.
        rows: that the shard has.
        stats: what policies have made, refused and evicted.
        keys: [n] of the key dtype.
        values: [n, floats] float32: rows, each with its slots.
        changed: [n] bool: since `base`.
        erased: [m] of the key dtype: keys that have lost their rows since `base`.
    """

    table: int
    is_whole: bool
    sets: bytes | None
    base: str
    step: int
    rows: int
    stats: tuple[int, int, int]
    keys: np.ndarray
    values: np.ndarray
    changed: np.ndarray
    erased: np.ndarray

    @property
    def num_bytes(self) -> int:
        """Of its arrays."""
        return sum(getattr(self, name).nbytes for name in _ARRAYS)

    def to_bytes(self) -> np.ndarray:
        """[n] uint8, for another worker of the same library.

        Example:
            >>> none = np.zeros([0], np.int64)
            >>> piece = Piece(1, False, b"", "a save", 7, 9, (0, 0, 0), none, none, none, np.array([3, 5]))
            >>> again = Piece.from_bytes(piece.to_bytes())
            >>> again.table, again.base, again.erased.tolist()
            (1, 'a save', [3, 5])
        """
        arrays = [np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS]
        head: dict[str, Any] = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _ARRAYS
        }
        head["sets"] = None if self.sets is None else base64.b64encode(self.sets).decode()
        head["arrays"] = [[array.dtype.str, array.shape] for array in arrays]
        text = json.dumps(head).encode()
        parts = [len(text).to_bytes(8, "little"), text, *(array.reshape(-1).view(np.uint8) for array in arrays)]
        return np.concatenate([np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part for part in parts])

    @classmethod
    def from_bytes(cls, data: np.ndarray) -> Piece:
        """What `to_bytes` made these of."""
        at = 8 + int.from_bytes(data[:8].tobytes(), "little")
        head = json.loads(data[8:at].tobytes())
        arrays = []
        for kind, shape in head.pop("arrays"):
            dtype = np.dtype(kind)
            end = at + int(np.prod(shape)) * dtype.itemsize
            arrays.append(np.frombuffer(data[at:end].tobytes(), dtype).reshape(shape))
            at = end
        sets, stats = head.pop("sets"), tuple(head.pop("stats"))
        return cls(
            **head,
            sets=None if sets is None else base64.b64decode(sets),
            stats=stats,
            **dict(zip(_ARRAYS, arrays, strict=True)),
        )


@dataclasses.dataclass(eq=False)
class Reading:
    """What this worker's shard of a table has for a commit, whose save has begun: what has changed is in memory."""

    table: EmbeddingVariable
    head: Piece  # of the first piece, without rows
    floats: int  # of a row with its slots
    num_rows: int
    keys: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, place: int, table: EmbeddingVariable, is_whole: bool) -> Reading:
        lib, handle = _ops.lib(), table.handle
        changes = json.loads(lib.sok_table_changes(handle).numpy())
        sets, floats = (tensor.numpy() for tensor in lib.sok_table_sets(handle))
        no_keys = np.zeros([0], table.key_dtype.as_numpy_dtype)
        erased, keys, values, num_rows = no_keys, no_keys, np.zeros([0, int(floats)], np.float32), 0
        rows = 0
        if table.rank in table.placement.writers(table.world_size):  # of copies one
            erased = lib.sok_table_erased_keys(handle, key_dtype=table.key_dtype).numpy()
            rows = num_rows = int(lib.sok_table_size(handle))
            if not is_whole:
                keys, values = (t.numpy() for t in lib.sok_table_read_changes(handle, key_dtype=table.key_dtype))
                num_rows = len(keys)
        no_flags, base = np.zeros([0], bool), changes["base"] if changes["on"] and changes["fits"] else ""
        step, stats = int(lib.sok_table_step(handle)), stats_of(handle)
        head = Piece(place, is_whole, sets, base, step, rows, stats, no_keys, values[:0], no_flags, erased)
        return cls(table, head, int(floats), num_rows, keys, values)

    @property
    def num_pieces(self) -> int:
        """At least one: it says what slot sets there are, and the step."""
        return max(1, -(-len(self.head.erased) // _keys_of_piece()) + -(-self.num_rows // self._rows_of_piece()))

    def pieces(self) -> Iterator[Piece]:
        """Keys that are gone first, then rows."""
        head, erased = self.head, self.head.erased
        dropped = [erased[at : at + _keys_of_piece()] for at in range(0, len(erased), _keys_of_piece())]
        if not dropped and not self.num_rows:
            dropped = [erased]
        for gone in dropped:
            yield dataclasses.replace(head, erased=gone)
            head = dataclasses.replace(head, sets=None)
        head, keys = dataclasses.replace(head, erased=erased[:0]), self.keys
        if head.is_whole and self.num_rows:
            keys = _ops.lib().sok_table_keys(self.table.handle, key_dtype=self.table.key_dtype).numpy()
        for at in range(0, self.num_rows, self._rows_of_piece()):
            part = slice(at, at + self._rows_of_piece())
            if head.is_whole:
                key_tensor = tf.constant(keys[part], self.table.key_dtype)
                values, changed = (t.numpy() for t in _ops.lib().sok_table_read_keys(self.table.handle, key_tensor))
            else:
                values, changed = self.values[part], np.ones([len(keys[part])], bool)
            yield dataclasses.replace(head, keys=keys[part], values=values, changed=changed)
            head = dataclasses.replace(head, sets=None)

    def _rows_of_piece(self) -> int:
        return max(1, PIECE_BYTES // (4 * max(1, self.floats)))


def _keys_of_piece() -> int:
    return max(1, PIECE_BYTES // 8)
