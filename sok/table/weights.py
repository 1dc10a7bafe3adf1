"""The rows of a table where Keras wants an array: `get_weights` and `set_weights`."""

from __future__ import annotations

from typing import Any

import numpy as np


class TableRows(np.ndarray):
    """What stands for a table among the arrays of `model.get_weights()`: a copy of this worker's rows.

    As an array it has the shape of the variable: empty, [0, D], but that of a `sok.Variable` is the matrix `values`.
    The copy is in `keys` [n] and `values` [n, D]. What NumPy makes of an empty one has no rows.
    """

    keys: np.ndarray | None
    values: np.ndarray | None

    def __new__(cls, keys: np.ndarray, values: np.ndarray, as_matrix: bool = False) -> TableRows:
        # Not a view: tf_keras makes plain arrays of weights, whose `base` is the array that owns the memory.
        self = super().__new__(cls, values.shape if as_matrix else (0, values.shape[1]), np.float32)
        np.copyto(self, values[: len(self)])
        self.keys, self.values = keys, values
        return self

    def __array_finalize__(self, source: Any) -> None:
        self.keys = self.values = None

    def copy(self, order: Any = "C") -> TableRows:
        return self if self.keys is None else TableRows(*self._parts())

    def __deepcopy__(self, memo: Any) -> TableRows:
        return self.copy()

    def __reduce__(self) -> Any:
        return super().__reduce__() if self.keys is None else (TableRows, self._parts())

    def _parts(self) -> tuple[np.ndarray, np.ndarray, bool]:
        return self.keys, self.values, len(self) > 0

    def __repr__(self) -> str:
        return (
            "TableRows(without rows)" if self.keys is None else f"TableRows({len(self.keys)} rows of {self.shape[1]})"
        )

    __str__ = __repr__


def rows_behind(array: Any) -> TableRows | None:
    """The rows that `array` stands for, itself or as a plain array made of one; None if there are none."""
    for candidate in (array, getattr(array, "base", None)):
        if isinstance(candidate, TableRows) and candidate.keys is not None:
            return candidate
    return None
