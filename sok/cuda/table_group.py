"""Many embedding tables at once, each call by as many launches as one table takes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from sok.cuda import _arrays, _native
from sok.cuda.table import Found, Reading, Table, rule_args
from sok.cuda.updates import Addends, native_addends

_WHOLE_ROWS = 32  # where sums of another table may begin


class TableGrads(NamedTuple):
    """Gradients of distinct rows of one table: row ids `[N]` int64 and grads `[N, D]` float32, of which the first
    num_grads `[1]`, int64 on the device, count; None: all."""

    row_ids: Any
    grads: Any
    num_grads: Any = None


class TableGroup:
    """Tables that are looked up, and trained, together. What `Table` promises of each holds here too.

    Args:
      tables: of any widths, hashed or not, all on the current device; none twice.

    Raises:
      ValueError: no table, or one that comes twice.

    Example (needs a GPU):
      >>> import cupy, sok.cuda                                                   # doctest: +SKIP
      >>> user = sok.cuda.Table("user", dim=2, capacity=1000)                     # doctest: +SKIP
      >>> item = sok.cuda.Table("item", dim=4, capacity=1000)                     # doctest: +SKIP
      >>> group = sok.cuda.TableGroup([user, item])                               # doctest: +SKIP
      >>> group.find_or_insert([cupy.array([7, 3]), cupy.array([5, 5])])          # doctest: +SKIP
      [array([0, 1]), array([0, 0])]
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tuple(tables)
        if not self.tables or len(set(map(id, self.tables))) != len(self.tables):
            raise ValueError("`tables` must be at least one table, and none of them twice.")

    def lookup(self, keys: Sequence[Any], *, insert: bool, table_of: Sequence[int] | None = None) -> list[Found]:
        """Finds the rows of keys, as `Table.lookup` does for each, in stream order.

        Args:
          keys: `[N]` each; several may be of one table, which numbers new rows in the order given.
          insert: missing keys get fresh rows, all of all tables or none.
          table_of: for each of `keys`, the number of its table; None: one for each table.

        Returns:
          Found, for each of `keys`.

        Raises:
          TableFullError, OutOfMemoryError: no key was stored in any table.
          TypeError, ValueError: keys of another dtype or shape; a table that is not there.

        Waits for the device only where inserting may make a table grow or overflow, then once.
        """
        return self._lookup(keys, insert, table_of, with_rows=True)

    def find(self, keys: Sequence[Any], table_of: Sequence[int] | None = None) -> list[Any]:
        """Row ids of keys, -1 where there is none; no row is read. In stream order; raises as `lookup`."""
        return [found.row_ids for found in self._lookup(keys, False, table_of, with_rows=False)]

    def find_or_insert(self, keys: Sequence[Any], table_of: Sequence[int] | None = None) -> list[Any]:
        """Row ids of keys; missing ones get fresh rows. In stream order; raises as `lookup`."""
        return [found.row_ids for found in self._lookup(keys, True, table_of, with_rows=False)]

    @contextmanager
    def reading(self) -> Iterator[list[Reading]]:
        """Meanwhile work on the current stream sees no row of any table move or change; call nothing else of them."""
        n = len(self.tables)
        handles = (ctypes.c_void_p * n)(*(table.handle.value for table in self.tables))
        rows, num_rows, held = (_native.Rows * n)(), (ctypes.c_int64 * n)(), ctypes.c_void_p()
        _native.call("tables_read_begin", handles, n, rows, num_rows, ctypes.byref(held))
        end = _native.library().sok_cuda_table_read_end
        end.restype = None
        try:
            yield [Reading(rows[t], num_rows[t]) for t in range(n)]
        finally:
            end(held)

    def sum_rows(self, addends: Sequence[Addends]) -> list[TableGrads]:
        """Sums gradients per row, for each table: what `apply` takes. In stream order; does not wait; repeats bit
        for bit.

        Args:
          addends: of one lookup each, `table` being the table's number in the group; all gradients of one dtype.

        Returns:
          For each table its distinct rows, padded to all of its addends. Row ids that the table never gave are summed
          as if they were one row, which `apply` reports.

        Raises:
          TypeError, ValueError: arguments of another dtype or shape; a table that is not there.
        """
        for a in addends:
            self._check_number(a.table)
        given = native_addends(addends, lambda a: self.tables[a.table].dim)
        room, first = [0] * len(self.tables), [0] * len(self.tables)
        for a, n in zip(addends, given.lengths, strict=True):
            room[a.table] += n
        rows_of_dim: dict[int, int] = {}
        for t, table in enumerate(self.tables):
            first[t] = rows_of_dim.get(table.dim, 0)
            rows_of_dim[table.dim] = first[t] + -(-room[t] // _WHOLE_ROWS) * _WHOLE_ROWS
        sums = {dim: _arrays.empty((rows, dim), np.float32) for dim, rows in rows_of_dim.items()}
        row_ids = {dim: _arrays.empty(rows, np.int64) for dim, rows in rows_of_dim.items()}
        num_sums = _arrays.empty(len(self.tables), np.int64)
        made, grads = (_native.TableSums * len(self.tables))(), []
        for t, table in enumerate(self.tables):
            mine = slice(first[t], first[t] + room[t])
            grads.append(TableGrads(row_ids[table.dim][mine], sums[table.dim][mine], num_sums[t : t + 1]))
            made[t] = _native.TableSums(table.capacity, table.dim, *map(_arrays.address, grads[-1]))
        _native.call("sum_rows_of_tables", given.made, len(addends), made, len(made), given.kind, None)
        return grads

    def apply(
        self,
        rule: str,
        hyper: Sequence[float],
        grads: Sequence[TableGrads],
        *,
        step: int = 1,
        slot_set: str = "optimizer",
        nonfinite: str = "allow",
        grad_scale: float = 1.0,
    ) -> None:
        """Applies an optimizer's rule to distinct rows of every table, in stream order.

        Args:
          grads: for each table its own.
          nonfinite: "raise": one gradient that holds a NaN or an infinity, or is of a row that its table never gave,
            and no row of any table changes; `Table.check` of the table says so.
          rule, hyper, step, slot_set, grad_scale: as `Table.apply`.

        Raises:
          ValueError: an unknown rule, a slot set of another one, or not one of `grads` for each table.
          OutOfMemoryError: no room for the slots; no row changed.
        """
        if len(grads) != len(self.tables):
            raise ValueError(f"`grads` must be of {len(self.tables)} tables. Received: {len(grads)}.")
        keep, made = [], (_native.TableGradients * len(grads))()
        for t, (table, g) in enumerate(zip(self.tables, grads, strict=True)):
            row_ids = _arrays.ids(f"grads[{t}].row_ids", g.row_ids)
            values = _arrays.matrix(f"grads[{t}].grads", g.grads, ("float32",), (len(row_ids), table.dim))
            num = _arrays.optional(f"grads[{t}].num_grads", g.num_grads, ("int64",), 1)
            keep += [row_ids, values, num]
            addresses = map(_arrays.address, (row_ids, values))
            made[t] = _native.TableGradients(table.handle, *addresses, len(row_ids), _arrays.address(num))
        settings = *rule_args(rule, hyper, step), slot_set, nonfinite, float(grad_scale)
        _native.call("tables_apply", *settings, made, len(made))

    def _lookup(
        self, keys: Sequence[Any], insert: bool, table_of: Sequence[int] | None, *, with_rows: bool
    ) -> list[Found]:
        numbers = list(range(len(self.tables)) if table_of is None else table_of)
        if len(numbers) != len(keys):
            raise ValueError(f"`keys` must be {len(numbers)}, as many as `table_of` or tables. Received: {len(keys)}.")
        keep, found, made = [], [], (_native.Asked * len(keys))()
        for k, number in enumerate(numbers):
            table = self._check_number(number)
            words = _arrays.words(f"keys[{k}]", keys[k])
            rows = _arrays.empty((len(words), table.dim), np.float32) if with_rows else None
            found.append(Found(rows, _arrays.empty(len(words), np.int64)))
            keep.append(words)
            made[k] = _native.Asked(table.handle, _arrays.address(words), len(words), *map(_arrays.address, found[-1]))
        if found:
            _native.call("tables_lookup", made, len(made), int(insert))
        return found

    def _check_number(self, number: int) -> Table:
        if not 0 <= number < len(self.tables):
            raise ValueError(f"a table's number must lie in [0, {len(self.tables)}). Received: {number}.")
        return self.tables[number]
