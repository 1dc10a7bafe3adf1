"""One lookup: ids to rows or pooled vectors, whoever owns them.

On one worker a lookup is one native op; on many, `sok.lookup.exchange`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok.base import _ops
from sok.lookup import exchange
from sok.table import reading
from sok.table.keys import as_keys
from sok.table.table import EmbeddingVariable, look_up_with


@dataclasses.dataclass(frozen=True)
class Csr:
    """Ids of S segments, back to back: segment s holds keys[row_splits[s]:row_splits[s + 1]]."""

    keys: tf.Tensor  # [N]
    row_splits: tf.Tensor  # [S + 1] int64
    weights: tf.Tensor | None = None  # [N] float32; for ordinary variables of float64, that


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the input of a layer may be; 0 means no limit."""

    slot_num: int = 1
    max_nnz: int = 0
    max_feature_num: int = 0

    def attributes(self) -> dict[str, int]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Feature:
    """One of the lookups of a group: ids of one table, pooled per segment."""

    table: EmbeddingVariable
    csr: Csr
    combiner: str  # 'sum', 'mean' or 'sqrtn'
    limits: Limits = Limits()
    checked: bool = False  # row splits make sense and no limit is set: nothing to validate
    exact: bool = False  # rows travel as they are, whatever `table.exchange_dtype` says


def is_alone(variable: EmbeddingVariable) -> bool:
    """Whether a lookup asks no other worker: there is none, or a model is being traced for its export."""
    return variable.world_size == 1 or _ops.is_substituted()


def lookup_rows(
    variable: EmbeddingVariable,
    keys: Any,
    training: Any = True,
    report: tf.Tensor | None = None,
    exact: bool = False,
) -> tf.Tensor:
    """The row of each key.

    Args:
        variable: the table.
        keys: [...] integers of the table's key dtype.
        training: whether keys without a row get one; bool or bool scalar tensor. Without, they read as their initial
            value.
        report: empty, or what `sok.lookup.inputs` found wrong with the input, to be raised on every rank.
        exact: whether rows travel as they are, whatever `variable.exchange_dtype` says.

    Returns:
        [..., D] float32. Collective; differentiable with respect to the variable.

    Raises:
        tf.errors.InvalidArgumentError: a key is outside an identity table, on every rank.
        tf.errors.ResourceExhaustedError: an owner's shard is full, on every rank.

    Example:
        >>> from sok.table.table import EmbeddingVariable, look_up_with
        >>> v = EmbeddingVariable(2, 10, initializer="ones", name="rows")
        >>> lookup_rows(v, tf.constant([[5], [6]], tf.int64)).shape
        TensorShape([2, 1, 2])
    """
    reading.note(variable)
    with exchange.told_to_peers(variable):
        keys = as_keys(keys, variable.key_dtype, variable.table_name)
    flat = tf.reshape(keys, [-1])
    if is_alone(variable):
        if report is not None:
            with tf.control_dependencies([_ops.lib().sok_validate_csr(variable.handle, flat, report)]):
                keys = tf.identity(keys)
        return _ops.lib().sok_table_lookup(variable.handle, keys, training, dim=variable.dim)[0]
    splits = tf.zeros([0], tf.int64) if report is None else report
    feature = Feature(variable, Csr(flat, splits), exchange.ROWS, exact=exact)
    (rows,) = exchange.lookup_group([feature], training)
    rows = tf.reshape(rows, tf.concat([tf.shape(keys), [variable.dim]], 0))
    rows.set_shape(keys.shape.concatenate([variable.dim]))
    return rows


def lookup_pooled(
    variable: EmbeddingVariable,
    csr: Csr,
    combiner: str,
    training: Any = True,
    slot_num: int = 1,
    max_nnz: int = 0,
    max_feature_num: int = 0,
) -> tf.Tensor:
    """One vector per segment: its keys' rows combined by tf.nn.embedding_lookup_sparse's rules.

    Args:
        variable: the table.
        csr: keys, segments and optional weights.
        combiner: 'sum', 'mean' or 'sqrtn'.
        training: as in `lookup_rows`.
        slot_num: segments per sample, for `max_feature_num` and messages.
        max_nnz: keys a segment may have; 0: any number.
        max_feature_num: keys a sample may have; 0: any number.

    Returns:
        [S, D] float32; an empty segment gives zeros. Collective; differentiable in the variable and the weights.

    Raises:
        tf.errors.InvalidArgumentError: the input breaks a limit, or a key is outside an identity table, on every rank.
        tf.errors.ResourceExhaustedError: an owner's shard is full, on every rank.
    """
    limits = Limits(slot_num, max_nnz, max_feature_num)
    return lookup_group([Feature(variable, csr, combiner, limits)], training)[0]


def lookup_group(features: Sequence[Feature], training: Any = True) -> list[tf.Tensor]:
    """`lookup_pooled` of many features and tables, all in one op.

    Args:
        features: what to look up; several may share a table. Rows travel in 16 bit if all their tables say the same.
        training: as in `lookup_rows`.

    Returns:
        For each feature [S, D] float32. Collective; differentiable in the variables and the weights.

    Raises:
        As `lookup_pooled`. On one worker, features are validated one after the other, before any is looked up.
    """
    if features and not is_alone(features[0].table):
        return exchange.lookup_group(features, training)
    features = [_with_keys(f, as_keys(f.csr.keys, f.table.key_dtype, f.table.table_name)) for f in features]
    for table in {id(f.table): f.table for f in features}.values():
        reading.note(table)
    features = [f if f.checked else _validated(f) for f in features]
    return _lookup_fused(features, training) if features else []


def _with_keys(f: Feature, keys: tf.Tensor) -> Feature:
    return dataclasses.replace(f, csr=dataclasses.replace(f.csr, keys=keys))


def _validated(f: Feature) -> Feature:
    checked = _ops.lib().sok_validate_csr(f.table.handle, f.csr.keys, f.csr.row_splits, **f.limits.attributes())
    return _with_keys(f, checked)


def _lookup_fused(features: Sequence[Feature], training: Any) -> list[tf.Tensor]:
    tables = list({id(f.table): f.table for f in features}.values())
    number = {id(table): i for i, table in enumerate(tables)}
    outputs, _ = _ops.lib().sok_group_lookup(
        [table.handle for table in tables],
        [f.csr.keys for f in features],
        [f.csr.row_splits for f in features],
        [_weights(f) for f in features],
        training,
        table_of=[number[id(f.table)] for f in features],
        dims=[table.dim for table in tables],
        combiners=[f.combiner for f in features],
        capacities=[table.capacity for table in tables],
    )
    return outputs


def _weights(f: Feature) -> tf.Tensor:
    return tf.zeros([0]) if f.csr.weights is None else tf.convert_to_tensor(f.csr.weights, tf.float32)


look_up_with(lookup_rows)
