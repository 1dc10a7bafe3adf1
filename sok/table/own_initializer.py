"""Initializers of one's own: a Python function of key, column and a random number, compiled by Numba."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from sok.base import _ops, arithmetic, compiled
from sok.job import context
from sok.job.agreement import check_equal, together

KIND = "own:"
"""What the kinds of such initializers begin with in ops, graphs and files; the name follows."""

_PARAMETERS = ("key", "column", "random")
_LOOP = """
rows = _sok_carray(_sok_words(fields[5]), (fields[1],))
keys = _sok_carray(_sok_words(fields[3]), (fields[1],))
for i in range(fields[1]):
    row = _sok_carray(_sok_floats(rows[i]), (fields[2],))
    for j in range(fields[2]):
        row[j] = _sok_rule({arguments})
"""


def initializer(function: Callable[..., float] | None = None, *, version: int | str | None = None) -> Any:
    """Makes an initializer of tables of a function that gives one number of a fresh row.

    The function is compiled by Numba (`pip install sok[rules]`) when the first table is made with it. What it
    calculates is in float32, as in NumPy. It must depend on its arguments alone: then a key starts with the same row on
    any number of workers.

    Args:
        function: takes any of `key` (int, as int64: uint64 keys from 2^63 on are negative), `column` (int, from 0) and
            `random` (float32 in [0, 1), of 24 bits: a pure function of the table's seed, key and column), and returns a
            finite number.
        version: of the function, a number or word. It is part of the name in graphs and files.

    Returns:
        What `initializer=` of tables and layers takes; without `function`, a decorator that makes it. Tables on GPUs
        refuse it. An export cannot hold it: say what unseen keys read as, `export_saved_model(default="zeros")` or a
        number.

    Raises:
        ValueError: another parameter, or a function without source.
        TypeError: not a function.

    Example:
        >>> import sok
        >>> @sok.initializer
        ... def ramp(key, column, random):
        ...     return 0.5 * column if key < 10 else 0.1 * random
        >>> table = sok.EmbeddingVariable(3, 16, initializer=ramp, name="ramps")
        >>> table.sparse_read([7]).numpy().tolist()
        [[0.0, 0.5, 1.0]]
    """
    if function is None:
        return lambda one: OwnInitializer(one, version)
    return OwnInitializer(function, version)


class OwnInitializer:
    """What `initializer` makes of a function.

    Attributes:
        function: the function, of Python.
        kind: its name in ops, graphs and files.
    """

    def __init__(self, function: Callable[..., float], version: int | str | None = None) -> None:
        self._source = compiled.source_of(function, "Initializer")
        self.function, self.__name__, self.__doc__ = function, function.__name__, function.__doc__
        word = function.__name__ if version is None else f"{function.__name__}.{version}"
        if not re.fullmatch(r"[A-Za-z0-9_.]+", word):
            raise ValueError(f"`version` must be a number or a word of letters, digits and '_'. Received: {version!r}.")
        strange = [name for name in self._source.parameters if name not in _PARAMETERS]
        if strange:
            raise ValueError(
                f"Initializer '{function.__name__}' ({self._source.place}) may have the parameters "
                f"{', '.join(_PARAMETERS)}. Received: {list(self._source.parameters)}."
            )
        self.kind = f"{KIND}{word}"
        self._made: Any = None  # the compiled function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"Initializer '{self.__name__}' makes rows of sok's tables from their keys, not tensors of a shape: a "
            f"small sok.Embedding has a table with sparse_as_dense_size=0. Its function is {self.__name__}.function."
        )

    def register(self, dim: int) -> str:
        """Compiles it for this process and tries it for rows of `dim`. Returns its kind. Collective.

        Raises:
            ValueError: it does not compile, gives what is not finite, or is another one on another worker.
        """
        said = together(context.get_transport(), f"sok/initializer/{self.kind}", lambda: self._register(dim))
        check_equal(said, f"The source of initializer '{self.__name__}'")
        return self.kind

    def _register(self, dim: int) -> str:
        if self._made is None:
            arguments = {"key": "keys[i]", "column": "j", "random": "row[j]"}
            kinds = {"key": arithmetic.INT, "column": arithmetic.INT, "random": arithmetic.FLOAT}
            parameters = self._source.parameters
            loop = _LOOP.format(arguments=", ".join(arguments[name] for name in parameters)).strip()
            kinds = {name: kinds[name] for name in parameters}
            address, made = compiled.compiled(self._source, kinds, loop, 6, "Initializer")
            _ops.register_initializer(self.kind.removeprefix(KIND), address)
            self._made = made
        self._try(dim)
        return self._source.digest

    def _try(self, dim: int) -> None:
        keys = np.array([0, 1, 2**40, 2**64 - 1], np.uint64)
        rows = np.linspace(0, 1, 4 * dim, endpoint=False, dtype=np.float32).reshape(4, dim)
        places = rows.ctypes.data + rows.strides[0] * np.arange(4)
        block = np.array([48, 4, dim, keys.ctypes.data, 0, places.ctypes.data], np.int64)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._made.address)(block.ctypes.data)
        if not np.isfinite(rows).all():
            key, column = (int(place) for place in np.argwhere(~np.isfinite(rows))[0])
            raise ValueError(
                f"Initializer '{self.__name__}' ({self._source.place}) must give finite numbers. It gives "
                f"{rows[key, column]} for key {int(keys[key].astype(np.int64))} and column {column}."
            )
