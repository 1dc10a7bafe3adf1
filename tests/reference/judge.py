"""Comparisons that say where two results differ."""

from __future__ import annotations

import numpy as np

# Results that differ only in the order of summation (docs/conventions.md); a 16-bit result is rounded once on top.
RELATIVE = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def assert_same(actual: object, expected: object) -> None:
    """Bit for bit (zeros may differ in sign), shape and kind of number included."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.dtype.kind != expected.dtype.kind:
        raise AssertionError(f"numbers of kind {actual.dtype}, expected {expected.dtype}")
    np.testing.assert_array_equal(actual, expected, strict=False)
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {actual.shape}, expected {expected.shape}")


def assert_close(actual: object, expected: object, scale: float = 1.0, factor: float = 1.0) -> None:
    """Within the summation tolerance of actual's dtype, relative to the larger of |expected| and `scale`.

    scale: the size of the addends, where they may cancel. factor: loosens the tolerance; say why where you use it.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {actual.shape}, expected {expected.shape}")
    relative = RELATIVE[actual.dtype.name] * factor
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    error = np.abs(actual[finite] - expected[finite])
    allowed = relative * np.maximum(np.abs(expected[finite]), scale)
    bad = ~(error <= allowed)  # a NaN is bad
    if bad.any():
        worst = int(np.argmax(np.where(np.isnan(error), np.inf, error - allowed)))
        where = tuple(int(i[worst]) for i in np.nonzero(finite)) if finite.ndim else ()
        raise AssertionError(
            f"{bad.sum()} of {bad.size} values differ by more than {relative:g}; worst at {where}: "
            f"{actual[where]!r}, expected {expected[where]!r}"
        )


def assert_same_table(
    keys: np.ndarray, rows: np.ndarray, expected: dict[int, np.ndarray], tolerance: float = 0.0
) -> None:
    """The exported (keys, rows) are this dict, whatever their order."""
    found = [int(k) for k in keys]
    if len(set(found)) != len(found):
        raise AssertionError("a key was exported twice")
    missing, extra = set(expected) - set(found), set(found) - set(expected)
    if missing or extra:
        raise AssertionError(f"missing keys {sorted(missing)[:5]}, unexpected keys {sorted(extra)[:5]}")
    for key, row in zip(found, rows, strict=True):
        np.testing.assert_allclose(row, expected[key], rtol=tolerance, atol=tolerance, err_msg=f"row of key {key}")
