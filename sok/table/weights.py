"""The rows of a table where Keras wants an array: `get_weights` and `set_weights`."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np


class TableRows(np.ndarray):
    """What stands for a table among the arrays of `model.get_weights()`: a copy of this worker's rows.

    As an array it has the shape of the variable: empty, [0, D], but that of a `sok.Variable` is the matrix `values`.
    The copy is in `keys` [n] and `values` [n, D], if it `has_rows`. What NumPy makes of an empty one has none.
    """

    keys: np.ndarray
    values: np.ndarray
    has_rows = False

    def __new__(cls, keys: np.ndarray, values: np.ndarray, as_matrix: bool = False) -> TableRows:
        # Not a view: tf_keras makes plain arrays of weights, whose `base` is the array that owns the memory.
        self = super().__new__(cls, values.shape if as_matrix else (0, values.shape[1]), np.float32)
        np.copyto(self, values[: len(self)])
        self.keys, self.values, self.has_rows = keys, values, True
        return self

    def copy(self, order: Literal["C", "F", "A", "K"] | None = "C") -> TableRows:
        return TableRows(*self._parts()) if self.has_rows else self

    def __deepcopy__(self, memo: dict[int, Any] | None) -> TableRows:
        return self.copy()

    def __reduce__(self) -> Any:
        return (TableRows, self._parts()) if self.has_rows else super().__reduce__()

    def _parts(self) -> tuple[np.ndarray, np.ndarray, bool]:
        return self.keys, self.values, len(self) > 0

    def __repr__(self) -> str:
        return f"TableRows({len(self.keys)} rows of {self.shape[1]})" if self.has_rows else "TableRows(without rows)"

    __str__ = __repr__


def rows_behind(array: object) -> TableRows | None:
    """The rows that `array` stands for, itself or as a plain array made of one; None if there are none."""
    for candidate in (array, getattr(array, "base", None)):
        if isinstance(candidate, TableRows) and candidate.has_rows:
            return candidate
    return None
