"""Our native ops, said in stock ones: what `sok.base._ops.lib()` gives while a model is traced for its export.

The signatures are those of docs/design/native_ops.md. Nothing is inserted, whatever the caller says, and there are no
other workers. Input that the native ops refuse, these refuse in `tf.debugging.Assert`, which ends the request alone.
Ops that are not here are the native ones; the export then finds them in the graph and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sok.base import _ops
from sok.base.types import Condition, Scalar
from sok.saved_model.frozen_table import FrozenTable
from sok.table.table import EmbeddingVariable, table_of

# What stands before the message of a report that `sok_check_input` makes.
_PROBLEMS = {
    "rows_not_whole": "the number of rows must be batch * slot_num. Received:",
    "wrong_slot_num": "every sample must have slot_num features. Received:",
    "uneven": "every feature must have the same number of ids (nnz_per_slot), without gaps. Received:",
    "weights_differ": "`weights` must have one weight for each id, at the same places as the ids. Received:",
    "slot_key_too_large": "id * slot_num + slot must fit into the key dtype (distinct_slots). Received id:",
}


class _Looked(NamedTuple):
    rows: Any
    row_ids: None = None


def as_written(ops: type) -> type:
    """A class whose ops AutoGraph leaves alone."""
    # AutoGraph would look at all that they call, which has no `if` or `for` of TensorFlow's and takes seconds to read.
    for name, op in list(vars(ops).items()):
        if name.startswith("sok_"):
            setattr(ops, name, tf.autograph.experimental.do_not_convert(op))
    return ops


@as_written
class StockOps:
    """What tracing one model needs; `freeze` makes what stands for a table, once for each."""

    def __init__(self, freeze: Callable[[EmbeddingVariable], FrozenTable]) -> None:
        self._freeze = freeze
        self._frozen: dict[EmbeddingVariable, FrozenTable] = {}
        self._native = _ops.lib()

    @property
    def tables(self) -> list[FrozenTable]:
        """Those that were looked up, in order of first use."""
        return list(self._frozen.values())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def _table(self, handle: tf.Tensor) -> FrozenTable:
        table = table_of(handle)
        if table is None:
            raise ValueError(
                "A table came to its lookup as an argument of a tf.function, where nothing tells which it is. Let the "
                "function find the table as an attribute, or in its closure, to export the model."
            )
        if table not in self._frozen:
            with tf.init_scope():
                self._frozen[table] = self._freeze(table)
        return self._frozen[table]

    # Tables.

    def sok_table_lookup(self, handle: tf.Tensor, keys: tf.Tensor, insert: Condition, dim: int) -> _Looked:
        return _Looked(self._table(handle).lookup(keys))

    def sok_group_lookup(
        self,
        handles: Sequence[tf.Tensor],
        keys: Sequence[tf.Tensor],
        row_splits: Sequence[tf.Tensor],
        weights: Sequence[tf.Tensor],
        insert: Condition,
        table_of: Sequence[int],
        dims: Sequence[int],
        combiners: Sequence[str],
        capacities: Sequence[int] = (),
    ) -> tuple[list[tf.Tensor], None]:
        # Not `dims`: GraphCopy does not know them.
        tables = [self._table(handle) for handle in handles]
        return self._pooled(tables, table_of, combiners, keys, row_splits, weights), None

    def _pooled(self, tables: Sequence[Any], table_of: Sequence[int], combiners: Sequence[str], *ids: Any) -> Any:
        """The vectors of each feature; `ids`: the keys, row splits and weights of all."""
        features = zip(table_of, combiners, *ids, strict=True)
        return [_pooled(tables[t].lookup(keys), splits, weights, c) for t, c, keys, splits, weights in features]

    def sok_validate_csr(
        self,
        handle: tf.Tensor,
        keys: tf.Tensor,
        row_splits: tf.Tensor,
        slot_num: int = 1,
        max_nnz: int = 0,
        max_feature_num: int = 0,
    ) -> tf.Tensor:
        name = self._table(handle).table.table_name
        if _is_nothing(row_splits):
            return keys
        return _after(_checks(name, keys, row_splits, slot_num, max_nnz, max_feature_num), keys)

    # Ordinary variables.

    def sok_variable_pool(
        self,
        handles: Sequence[tf.Tensor],
        ids: Sequence[tf.Tensor],
        row_splits: Sequence[tf.Tensor],
        names: Sequence[str],
        num_rows: Sequence[int],
        dims: Sequence[int],
        variable_of: Sequence[int],
        combiners: Sequence[str],
    ) -> list[tf.Tensor]:
        def rows(v: int, of_feature: tf.Tensor) -> tf.Tensor:
            found = tf.raw_ops.ResourceGather(resource=handles[v], indices=of_feature, dtype=tf.float32)
            return tf.ensure_shape(found, [None, dims[v]])

        return _pool(rows, ids, row_splits, names, variable_of, combiners)

    def sok_tensor_pool(
        self,
        params: Sequence[tf.Tensor],
        ids: Sequence[tf.Tensor],
        row_splits: Sequence[tf.Tensor],
        names: Sequence[str],
        num_rows: Sequence[int],
        dims: Sequence[int],
        variable_of: Sequence[int],
        combiners: Sequence[str],
    ) -> list[tf.Tensor]:
        return _pool(
            lambda v, of_feature: tf.gather(params[v], of_feature), ids, row_splits, names, variable_of, combiners
        )

    def sok_combine(
        self, rows: tf.Tensor, index: tf.Tensor, row_splits: tf.Tensor, weights: tf.Tensor, combiner: str
    ) -> tf.Tensor:
        return _pooled(tf.gather(rows, index), row_splits, weights, combiner)

    def sok_check_ids(self, ids: tf.Tensor, row_splits: tf.Tensor, variable: str, num_rows: int) -> tf.Tensor:
        return _after(_checks(variable, ids, row_splits), ids)

    # Inputs.

    def sok_check_input(self, row_splits: tf.Tensor, ok: tf.Tensor, detail: tf.Tensor, problem: str) -> tf.Tensor:
        return _after([tf.debugging.Assert(ok, [_PROBLEMS[problem], detail])], row_splits)

    def sok_slot_keys(
        self, keys: tf.Tensor, row_splits: tf.Tensor, slot_num: int
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        segments = tf.searchsorted(row_splits[1:], tf.range(tf.size(keys, tf.int64)), side="right", out_type=tf.int64)
        # In int64, which stock ops divide on every device; of uint64 the upper half counts as too large.
        ids, limits = tf.cast(keys, tf.int64), keys.dtype
        first, last = max(limits.min, -(2**63)) // slot_num, min(limits.max, 2**63 - 1) // slot_num - 1
        is_good = tf.logical_and(ids >= first, ids <= last)
        bad = tf.argmin(tf.cast(tf.pad(is_good, [[0, 1]]), tf.int32))
        slot_keys = tf.cast(ids * slot_num + segments % slot_num, limits)
        return slot_keys, tf.reduce_all(is_good), tf.gather(tf.pad(ids, [[0, 1]]), bad)

    def sok_sparse_to_csr(
        self,
        row: tf.Tensor,
        keys: tf.Tensor,
        weights: tf.Tensor,
        num_rows: tf.Tensor,
        slot_num: int = 1,
        wants_order: bool = True,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        row = _segments_of(row, slot_num)
        is_inside = tf.reduce_all(tf.logical_and(row >= 0, row < num_rows))
        text = "a row index of a SparseTensor is outside its dense_shape of so many rows:"
        row = _after([tf.debugging.Assert(is_inside, [text, num_rows])], row)
        as_they_came = tf.range(tf.size(row))
        order = tf.cond(tf.reduce_all(row[1:] >= row[:-1]), lambda: as_they_came, lambda: tf.argsort(row, stable=True))
        splits = tf.searchsorted(tf.gather(row, order), tf.range(num_rows + 1), out_type=tf.int64)
        # Without weights there are none to put in order.
        ordered = weights if _is_nothing(weights) else tf.gather(weights, order)
        return splits, tf.gather(keys, order), ordered, tf.cast(order, tf.int64)

    # Drop-ins for TensorFlow's own.

    def sok_unique(self, x: tf.Tensor, out_idx: tf.DType, with_counts: bool = False, name: str | None = None) -> Any:
        return tf.unique_with_counts(x, out_idx=out_idx, name=name)

    def sok_unsorted_segment_sum(
        self, data: tf.Tensor, ids: tf.Tensor, num: Scalar, name: str | None = None
    ) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(data, ids, num, name=name)


def _segments_of(row: tf.Tensor, slot_num: int) -> tf.Tensor:
    """[N], of segments or of indices of a matrix or cube."""
    if row.shape.rank == 1:
        return row
    if row.shape[1] == 2:
        return row[:, 0]
    # A slot beyond slot_num would land in the next sample: no segment is -1.
    sample, slot = row[:, 0], row[:, 1]
    of_cube = tf.where(tf.logical_and(slot >= 0, slot < slot_num), sample * slot_num + slot, tf.constant(-1, tf.int64))
    return of_cube if row.shape[1] == 3 else tf.where(tf.equal(tf.shape(row)[1], 3), of_cube, sample)


def _pool(
    rows: Callable[[int, tf.Tensor], tf.Tensor],
    ids: Sequence[tf.Tensor],
    row_splits: Sequence[tf.Tensor],
    names: Sequence[str],
    variable_of: Sequence[int],
    combiners: Sequence[str],
) -> list[tf.Tensor]:
    outputs = []
    for v, of_feature, splits, combiner in zip(variable_of, ids, row_splits, combiners, strict=True):
        found = rows(v, _after(_checks(names[v], of_feature, splits), of_feature))
        outputs.append(found if combiner == "rows" else _pooled(found, splits, None, combiner))
    return outputs


def _pooled(rows: tf.Tensor, row_splits: tf.Tensor, weights: tf.Tensor | None, combiner: str) -> tf.Tensor:
    """Rows [N, D] of S segments as [S, D]; weights [N], or None or [0] for none."""
    num_segments = tf.size(row_splits) - 1
    # Not tf.repeat, which would make a matrix as wide as the longest segment.
    segment = tf.searchsorted(row_splits[1:], tf.range(tf.shape(rows, tf.int64)[0]), side="right")

    def total(values: tf.Tensor) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(values, segment, num_segments)

    given = None if weights is None or _is_nothing(weights) else weights
    sums = total(rows if given is None else rows * given[:, None])
    sums = tf.ensure_shape(sums, [None, rows.shape[-1]])
    if combiner == "sum":
        return sums
    if given is None:
        counts = tf.cast(row_splits[1:] - row_splits[:-1], tf.float32)
        divisor = counts if combiner == "mean" else tf.sqrt(counts)
    else:
        divisor = total(given) if combiner == "mean" else tf.sqrt(total(given * given))
    return tf.math.divide_no_nan(sums, divisor[:, None])


def _is_nothing(tensor: tf.Tensor) -> bool:
    """Whether it is the empty vector that stands for what was not given."""
    return tensor.shape.is_fully_defined() and tensor.shape.num_elements() == 0


def _checks(
    name: str, keys: tf.Tensor, row_splits: tf.Tensor, slot_num: int = 1, max_nnz: int = 0, max_feature_num: int = 0
) -> list[tf.Operation]:
    """What stops a request whose segments make no sense, or break the limits of the layer (0: none)."""
    lengths = row_splits[1:] - row_splits[:-1]
    is_grouped = tf.size(row_splits) > 0  # empty splits say that nothing is
    num_keys = tf.size(keys, out_type=tf.int64)
    fits = tf.logical_and(
        tf.reduce_all(tf.equal(row_splits[:1], 0)),
        tf.logical_and(tf.reduce_all(lengths >= 0), tf.reduce_all(tf.equal(row_splits[-1:], num_keys))),
    )
    text = f"'{name}': row_splits must start with 0, never fall, and end with the number of keys. Received:"
    made = [tf.debugging.Assert(tf.logical_or(tf.logical_not(is_grouped), fits), [text, row_splits])]
    if max_nnz:
        text = f"'{name}': a feature has more than max_nnz = {max_nnz} keys. Numbers of keys:"
        made.append(tf.debugging.Assert(tf.reduce_all(lengths <= max_nnz), [text, lengths]))
    if max_feature_num and max_feature_num < slot_num * (max_nnz or max_feature_num + 1):
        of_samples = row_splits[slot_num::slot_num] - row_splits[:-1:slot_num]
        text = f"'{name}': a sample has more than max_feature_num = {max_feature_num} keys. Numbers of keys:"
        made.append(tf.debugging.Assert(tf.reduce_all(of_samples <= max_feature_num), [text, of_samples]))
    return made


def _after(checks: list[tf.Operation], tensor: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(tensor)
