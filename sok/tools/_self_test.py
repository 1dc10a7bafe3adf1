"""The self-test of `sok doctor`: a small table trained for a few steps, compared with NumPy.

`horovodrun -np 2 python -m sok.tools._self_test` runs it on two workers.
"""

from __future__ import annotations

import sys

import numpy as np

TOLERANCE = 1e-5  # float32; sums are made in another order
NUM_STEPS = 5
DIM = 8
LEARNING_RATE = 0.1
INITIAL_ACCUMULATOR = 0.1
EPSILON = 1e-7

# Duplicates within a step, a key that comes back later, the extreme values, and a negative one.
STEP_KEYS = np.array(
    [[3, 5, 3, -7], [5, 2**63 - 1, 5, 5], [0, -(2**63), 3, 0], [11, 12, 13, 14], [-7, -7, 3, 0]], np.int64
)


def train_and_compare(learning_rate: float = LEARNING_RATE) -> float:
    """Trains a table with Adagrad for a few steps and returns its greatest difference from NumPy at LEARNING_RATE.

    Collective when there are several workers: each gives all keys of a step, and the table sums over workers.
    """
    import tensorflow as tf

    from sok.job import context
    from sok.lookup import lookup
    from sok.optimizers import Adagrad
    from sok.table.table import EmbeddingVariable

    table = EmbeddingVariable(dim=DIM, capacity=64, name="sok_doctor_self_test", initializer="uniform")
    optimizer = Adagrad(learning_rate, initial_accumulator_value=INITIAL_ACCUMULATOR, epsilon=EPSILON)
    keys = np.unique(STEP_KEYS)
    before = lookup.lookup_rows(table, tf.constant(keys), training=False).numpy()
    slopes = np.random.default_rng(seed=1).normal(size=(*STEP_KEYS.shape, DIM)).astype(np.float32)

    for step_keys, slope in zip(STEP_KEYS, slopes, strict=True):
        with tf.GradientTape() as tape:
            # The gradient of a row is the sum of its slopes, plus the row: not a constant, so an order error shows.
            rows = lookup.lookup_rows(table, tf.constant(step_keys), training=True)
            loss = tf.reduce_sum(rows * slope) + 0.5 * tf.reduce_sum(rows * rows)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    after = lookup.lookup_rows(table, tf.constant(keys), training=False).numpy()
    expected = _train_in_numpy(keys, before, slopes, context.size())
    return float(np.max(np.abs(after - expected)))


def _train_in_numpy(keys: np.ndarray, rows: np.ndarray, slopes: np.ndarray, num_workers: int) -> np.ndarray:
    rows = rows.astype(np.float64)
    accumulators = np.full_like(rows, INITIAL_ACCUMULATOR)
    for step_keys, slope in zip(STEP_KEYS, slopes, strict=True):
        gradients = np.zeros_like(rows)
        positions = np.searchsorted(keys, step_keys)
        np.add.at(gradients, positions, (slope + rows[positions]) * num_workers)
        accumulators += gradients**2
        rows = rows - LEARNING_RATE * gradients / np.sqrt(accumulators + EPSILON)
    return rows


def main() -> int:
    """Runs the self-test as one of several Horovod workers; 0 if this worker's rows are right."""
    from sok.job import context

    context.Init()
    worst = train_and_compare()
    context.shutdown()
    sys.stdout.write(f"worker difference {worst:.2e}, tolerance {TOLERANCE:.0e}\n")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
