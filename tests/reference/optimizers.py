"""The optimizer rules on a dense table: `TableApply`, `sok.optimizers`.

Weights, slots and gradients are [rows, D]; a row without a gradient has zeros. Computed in float64, except what Keras
rounds to float32 before the first row is touched: alpha.
"""

from __future__ import annotations

import numpy as np


def dense_gradient(row_ids: np.ndarray, values: np.ndarray, rows: int) -> np.ndarray:
    """Gives the [rows, D] gradient that sparse rows stand for: duplicates added, negative row ids left out."""
    total = np.zeros((rows, values.shape[1]), np.float64)
    for row_id, value in zip(row_ids, values, strict=True):
        if row_id >= 0:
            total[row_id] += value.astype(np.float64)
    return total


def sgd(weights: np.ndarray, grads: np.ndarray, lr: float) -> np.ndarray:
    return weights - lr * grads


def adagrad(
    weights: np.ndarray, accumulator: np.ndarray, grads: np.ndarray, lr: float, epsilon: float
) -> tuple[np.ndarray, np.ndarray]:
    """Gives (weights, accumulator). The accumulator starts at initial_accumulator_value."""
    accumulator = accumulator + grads**2
    return weights - lr * grads / np.sqrt(accumulator + epsilon), accumulator


def adam_alpha(lr: float, beta_1: float, beta_2: float, step: int) -> float:
    """The learning rate with both bias corrections; `step` counts from 1."""
    one, t = np.float32(1), np.float32(step)
    return float(
        np.float32(lr) * np.sqrt(one - np.power(np.float32(beta_2), t)) / (one - np.power(np.float32(beta_1), t))
    )


def adam(
    weights: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    grads: np.ndarray,
    lr: float,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    step: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gives (weights, m, v) of every row, touched or not. m and v start at zero."""
    m = m + (grads - m) * (1 - beta_1)
    v = v + (grads**2 - v) * (1 - beta_2)
    return weights - adam_alpha(lr, beta_1, beta_2, step) * m / (np.sqrt(v) + epsilon), m, v


def lazy_adam(
    weights: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    grads: np.ndarray,
    touched: np.ndarray,  # [rows] bool
    lr: float,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    step: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same, with rows that are not touched left as they were."""
    stepped = adam(weights, m, v, grads, lr, beta_1, beta_2, epsilon, step)
    return tuple(np.where(touched[:, None], new, old) for new, old in zip(stepped, (weights, m, v), strict=True))


def clip_by_value(grads: np.ndarray, limit: float) -> np.ndarray:
    return np.clip(grads, -limit, limit)


def clip_by_norm(grads: np.ndarray, limit: float) -> np.ndarray:
    return clip_by_global_norm([grads], limit)[0]


def clip_by_global_norm(grads: list[np.ndarray], limit: float) -> list[np.ndarray]:
    """Scales all gradients of a step so that together they are no longer than `limit`."""
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in grads))
    return [g * (limit / max(norm, limit)) for g in grads]
