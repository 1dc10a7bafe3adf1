"""A regularizer and a constraint of Keras on the rows of a table: what a step adds to them, and lets them be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from sok.base import _ops
from sok.base.graph_ops import run_now

if TYPE_CHECKING:
    from sok.table.table import EmbeddingVariable

REGULARIZE = ("batch", "exact")
_CUT = (
    "needs whole rows, which sok.column_wise cuts. Use one that acts on each number by itself, as L1, L2 or NonNeg() "
    "do, or another placement"
)


@dataclasses.dataclass(frozen=True, eq=False)
class RowTerms:
    """The terms of one table. Both act on a matrix of any rows [n, D], each row by itself.

    Args:
        dim: length D of a row.
        regularizer: the penalty of such rows, a scalar; None: there is none. Optimizers add its gradient to that of the
            rows of a step, each once.
        regularize: "batch": rows outside the batch stay as they are. "exact": they shrink as those of a dense matrix
            do; of the L2 penalty and plain SGD alone.
        constraint: rows [n, D] to rows [n, D]; None: there is none. Applied to the rows that a step has changed.

    Raises:
        ValueError: one of the two does not act row by row, or "exact" cannot be.
    """

    dim: int
    regularizer: Callable[[Any], Any] | None = None
    regularize: str = "batch"
    constraint: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.regularize not in REGULARIZE:
            raise ValueError(f"`regularize` must be 'batch' or 'exact'. Received: {self.regularize!r}.")
        if self.regularizer is not None and not _adds_up(self.regularizer, self.dim):
            raise ValueError(
                f"`embeddings_regularizer` {_name(self.regularizer)} is no sum over rows, and a table has no matrix to "
                "give it: use L1, L2, L1L2, or one of your own that is such a sum"
            )
        if self.constraint is not None and not _acts_row_by_row(self.constraint, self.dim):
            raise ValueError(
                f"`embeddings_constraint` {_name(self.constraint)} does not act on each row by itself, and a table has "
                "no matrix to give it: use NonNeg(), or UnitNorm(axis=1), MaxNorm(axis=1), MinMaxNorm(axis=1), whose "
                "axis is else 0, over all rows"
            )
        if self.regularize == "exact":
            if self.regularizer is not None and self.l2 is None:
                raise ValueError(
                    "regularize='exact' is for the L2 penalty alone, by which a row shrinks in each step by one "
                    f"factor. Received: {_name(self.regularizer)}. Use regularize='batch'"
                )
            if self.constraint is not None:
                raise ValueError(
                    "regularize='exact' does not go with `embeddings_constraint`, which sees the rows of the batch "
                    "only. Use regularize='batch'"
                )

    @property
    def is_exact(self) -> bool:
        return self.regularize == "exact" and self.regularizer is not None

    @property
    def l2(self) -> float | None:
        """The factor of the squares, if the penalty is that and nothing else."""
        config = _config(self.regularizer)
        is_l2 = type(self.regularizer).__name__ in ("L2", "L1L2") and not config.get("l1")
        return float(config["l2"]) if is_l2 else None

    def check_cut(self) -> None:
        """`ValueError` unless both do to some columns of rows what they do to these as parts of the rows."""
        if self.regularizer is not None and not _adds_up(self.regularizer, self.dim, by_columns=True):
            raise ValueError(f"`embeddings_regularizer` {_name(self.regularizer)} {_CUT}")
        if self.constraint is not None and not _acts_row_by_row(self.constraint, self.dim, by_columns=True):
            raise ValueError(f"`embeddings_constraint` {_name(self.constraint)} {_CUT}")

    def penalty(self, rows: tf.Tensor) -> tf.Tensor:
        """The penalty of rows [n, D]: float32 []. Not differentiable: optimizers know it without."""
        assert self.regularizer is not None
        return tf.cast(tf.stop_gradient(self.regularizer(tf.cast(rows, tf.float32))), tf.float32)

    def gradient(self, table: EmbeddingVariable, row_ids: tf.Tensor) -> tf.Tensor:
        """What the penalty adds to the gradient of the rows [n, D] of these ids, of which none comes twice."""
        assert self.regularizer is not None
        rows = _read(table, row_ids)
        with tf.GradientTape() as tape:
            tape.watch(rows)
            penalty = self.regularizer(rows)
        return tape.gradient(penalty, rows, unconnected_gradients="zero")

    def constrain(self, table: EmbeddingVariable, row_ids: tf.Tensor) -> tf.Operation | None:
        """Lets the rows of these ids, none of which comes twice, be what the constraint makes of them."""
        assert self.constraint is not None
        rows = tf.ensure_shape(self.constraint(_read(table, row_ids)), [None, table.local_dim])
        return _ops.lib().sok_table_scatter(table.handle, row_ids, rows, dim=table.local_dim)


def _read(table: Any, row_ids: tf.Tensor) -> tf.Tensor:
    return _ops.lib().sok_table_gather(table.handle, row_ids, dim=table.local_dim)


def _name(term: Any) -> str:
    return f"{type(term).__name__}({', '.join(f'{key}={value}' for key, value in _config(term).items())})"


def _config(term: Any) -> dict[str, Any]:
    return term.get_config() if hasattr(term, "get_config") else {}


def _samples(dim: int) -> list[np.ndarray]:
    """Short and long rows [5, D]: what one leaves alone the other may not."""
    rows = np.random.default_rng(7).normal(size=[5, dim]).astype("float32")
    return [rows * 0.01, rows, rows * 100]


def _halves(rows: np.ndarray, by_columns: bool) -> list[np.ndarray]:
    return np.split(rows, [rows.shape[1] // 2], axis=1) if by_columns else np.split(rows, [2])


def _adds_up(penalty: Callable[[Any], Any], dim: int, by_columns: bool = False) -> bool:
    def apart(rows: np.ndarray) -> Any:
        whole, *parts = (_evaluated(penalty, part) for part in (rows, *_halves(rows, by_columns)))
        return whole.shape == () and np.allclose(whole, sum(parts), rtol=1e-4)

    return all(apart(rows) for rows in _samples(dim))


def _acts_row_by_row(constraint: Callable[[Any], Any], dim: int, by_columns: bool = False) -> bool:
    def apart(rows: np.ndarray) -> Any:
        whole, *parts = (_evaluated(constraint, part) for part in (rows, *_halves(rows, by_columns)))
        return whole.shape == rows.shape and np.allclose(whole, np.concatenate(parts, int(by_columns)), rtol=1e-4)

    return all(apart(rows) for rows in _samples(dim))


def _evaluated(function: Callable[[Any], Any], rows: np.ndarray) -> np.ndarray:
    return np.asarray(run_now(lambda: tf.convert_to_tensor(function(tf.constant(rows)))))
