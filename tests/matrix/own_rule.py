"""A rule of one's own: declared here, a C function in damped.cc, registered when it is first asked for."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np

import sok
from sok.table import rules

DAMPED = rules.RowRule(
    "damped(m,total)",
    slots=(rules.Slot("m"), rules.Slot("total", start="initial_total")),
    hyper=(rules.Hyper("beta"), rules.Hyper("initial_total")),
)


@functools.cache
def address() -> int:
    """Of the function, compiled."""
    source = Path(__file__).with_name("damped.cc")
    include = source.parents[2] / "include"
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/damped.so"
        command = [os.environ.get("CXX", "g++"), "-O2", "-shared", "-fPIC", "-I", include, source, "-o", library]
        subprocess.run(command, check=True)
        function = ctypes.CDLL(library).damped
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


class Damped(sok.optimizers.Optimizer):
    rule = DAMPED.name

    def __init__(self, learning_rate=0.1, beta=0.9, initial_total=0.0, name=None, **options):
        rules.register(DAMPED, address())
        hyper = {"beta": beta, "initial_total": initial_total}
        super().__init__(learning_rate, name, hyper=hyper, **options)


def damped(
    rows: np.ndarray, m: np.ndarray, total: np.ndarray, grads: np.ndarray, rate: float, beta: float
) -> tuple[np.ndarray, ...]:
    """Gives (rows, m, total) of rows that are all touched."""
    m, total = beta * m + (1 - beta) * grads, total + np.abs(grads)
    return rows - rate * m / (1 + total), m, total
