"""Pooling by the rules of tf.nn.embedding_lookup_sparse: `Combine`, `GroupLookup`, and their gradients.

sum: sum(w e); mean: sum(w e) / sum(w); sqrtn: sum(w e) / sqrt(sum(w^2)). An empty segment, or a divisor of zero: zeros.
"""

from __future__ import annotations

import numpy as np

COMBINERS = ("sum", "mean", "sqrtn")


def divisor(weights: np.ndarray, combiner: str) -> float:
    """What the weighted sum of one segment is divided by."""
    if combiner == "sum":
        return 1.0
    if combiner == "mean":
        return float(np.sum(weights))
    if combiner == "sqrtn":
        return float(np.sqrt(np.sum(weights**2)))
    raise ValueError(f"combiner must be one of {COMBINERS}. Received: {combiner!r}.")


def segments(row_splits: np.ndarray) -> list[slice]:
    return [slice(int(a), int(b)) for a, b in zip(row_splits[:-1], row_splits[1:], strict=True)]


def _weights(weights: np.ndarray | None, n: int) -> np.ndarray:
    return np.ones(n) if weights is None or len(weights) == 0 else np.asarray(weights, np.float64)


def combine(
    rows: np.ndarray, index: np.ndarray, row_splits: np.ndarray, weights: np.ndarray | None, combiner: str
) -> np.ndarray:
    """Gives [S, D] in float64."""
    w = _weights(weights, len(index))
    out = np.zeros((len(row_splits) - 1, rows.shape[1]))
    for s, part in enumerate(segments(row_splits)):
        d = divisor(w[part], combiner)
        if d != 0:
            out[s] = sum((w[i] * rows[index[i]].astype(np.float64) for i in range(part.start, part.stop)), out[s]) / d
    return out


def combine_grad_rows(
    grad: np.ndarray,
    index: np.ndarray,
    row_splits: np.ndarray,
    weights: np.ndarray | None,
    num_rows: int,
    combiner: str,
) -> np.ndarray:
    """Gradient in rows: [num_rows, D]; every use of a row adds w_i / divisor times its segment's gradient."""
    w = _weights(weights, len(index))
    out = np.zeros((num_rows, grad.shape[1]))
    for s, part in enumerate(segments(row_splits)):
        d = divisor(w[part], combiner)
        if d != 0:
            for i in range(part.start, part.stop):
                out[index[i]] += w[i] / d * grad[s]
    return out


def combine_grad_weights(
    grad: np.ndarray, rows: np.ndarray, index: np.ndarray, row_splits: np.ndarray, weights: np.ndarray, combiner: str
) -> np.ndarray:
    """Gradient in weights: [N], by the quotient rule."""
    w = _weights(weights, len(index))
    out = np.zeros(len(index))
    for s, part in enumerate(segments(row_splits)):
        d = divisor(w[part], combiner)
        if d == 0:
            continue
        dots = rows[index[part]].astype(np.float64) @ grad[s]
        d_divisor = {"sum": 0.0 * w[part], "mean": 1.0 + 0.0 * w[part], "sqrtn": w[part] / d}[combiner]
        out[part] = dots / d - np.sum(w[part] * dots) / d**2 * d_divisor
    return out
