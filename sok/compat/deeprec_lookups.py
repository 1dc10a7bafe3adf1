"""DeepRec's lookups that pool: the fused ones, that of `tf.contrib`, and for tables those of `tf.nn`.

All are one: ids that are left out go, then the one lookup pools what is left.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.python.ops import embedding_ops

from sok.base import keras_calls
from sok.base.types import TensorLike, Variable
from sok.compat.deeprec_inputs import (
    input_from_feature_columns,
    refuse_blocknums,
    sequence_input_from_feature_columns,
    sequence_input_layer,
)
from sok.compat.feature_column import grouping
from sok.lookup import group
from sok.lookup.feature import check_combiner
from sok.table.options import whole_number
from sok.table.table import EmbeddingVariable, is_embedding_variable

Params: TypeAlias = "EmbeddingVariable | Variable | TensorLike | Sequence[EmbeddingVariable | Variable | TensorLike]"


def safe_embedding_lookup_sparse(
    embedding_weights: Params,
    sparse_ids: tf.SparseTensor | tf.RaggedTensor,
    sparse_weights: tf.SparseTensor | tf.RaggedTensor | None = None,
    combiner: str | None = None,
    default_id: int | None = None,
    name: str | None = None,
    partition_strategy: str = "div",
    max_norm: float | None = None,
) -> tf.Tensor:
    """Looks up and pools ids, of which those below 0 are left out, as `tf.compat.v1.nn.safe_embedding_lookup_sparse`.

    `install()` puts it into `tf.contrib.layers`.

    Args:
        embedding_weights: a table, alone or in a list; or what `tf.nn.safe_embedding_lookup_sparse` takes: a variable,
            or a list of its partitions.
        sparse_ids: integers [..., n]. Each row along the last dimension is pooled.
        sparse_weights: None, or weights in the form of the ids: sum(w e), sum(w e) / sum(w) and
            sum(w e) / sqrt(sum(w^2)). Unless the combiner is 'sum', ids whose weight is not positive are left out.
        combiner: 'sum', 'mean' or 'sqrtn'. None: 'mean'.
        default_id: whose row a row without ids gets. None: zeros.
        name: of the scope of the ops.
        partition_strategy: 'div' or 'mod': how partitions hold the rows. Of a table its `placement` says that.
        max_norm: None, or the length to which each row is clipped before it is pooled.

    Returns:
        float32 (of a variable: its dtype) [..., D]. Differentiable in tables, variables and weights. Ids without a row
        get one, and so does `default_id` where it is needed.

    Raises:
        ValueError: nothing to look up in; several tables; an unknown combiner or strategy; `default_id` is no whole
            number.
        TypeError: ids or weights are neither sparse nor ragged.
        tf.errors.InvalidArgumentError: an id outside an identity table, on every worker, or outside a variable.

    Collective, of a table.

    Example:
        >>> import sok
        >>> table = sok.EmbeddingVariable(2, 10, name="of_contrib", initializer="ones")
        >>> ids = tf.SparseTensor([[0, 0], [0, 1], [1, 0]], [3, 4, -1], [3, 2])
        >>> safe_embedding_lookup_sparse(table, ids, combiner="sum").numpy().tolist()
        [[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]

    Source: `tf.contrib.layers.safe_embedding_lookup_sparse` of TensorFlow 1.15 and DeepRec.
    """
    pooling = _Pooling(combiner, default_id, partition_strategy, max_norm, name or "embedding_lookup", prunes=True)
    return pooling(embedding_weights, sparse_ids, sparse_weights, "embedding_weights", "sparse_ids", "sparse_weights")


def fused_embedding_lookup_sparse(
    params: Params,
    sp_ids: tf.SparseTensor | tf.RaggedTensor,
    sparse_weights: tf.SparseTensor | tf.RaggedTensor | None = None,
    partition_strategy: str | None = None,
    name: str | None = None,
    combiner: str | None = None,
    max_norm: float | None = None,
    default_id: int | None = None,
    prune_invalid_ids: bool = False,
    fill_empty_row: bool = True,
    blocknums: None = None,
) -> tf.Tensor:
    """Looks up and pools ids, as `safe_embedding_lookup_sparse`, but leaves nothing out unless it is told to.

    `install()` puts it into `tf.nn`. One op looks up and pools in a table, fused or not.

    Args:
        params: as `embedding_weights` of `safe_embedding_lookup_sparse`.
        sp_ids, sparse_weights, name, combiner, max_norm, default_id: as there.
        partition_strategy: None, 'div', 'mod' or 'mod_ev'. None and 'mod_ev' are 'mod'.
        prune_invalid_ids: whether ids below 0 and, unless the combiner is 'sum', weights that are not positive are left
            out. If not, all weights count, and an id below 0 is an error, or in a hashed table an id like any other.
        fill_empty_row: whether a row without ids gets the row of `default_id`. If not, it is zeros.
        blocknums: must be None.

    Returns:
        As `safe_embedding_lookup_sparse`. DeepRec refuses weights; here tf.nn's rule holds.

    Raises:
        ValueError, TypeError, tf.errors.InvalidArgumentError: as there; `blocknums` is not None.

    Collective, of a table.

    Example:
        >>> import sok
        >>> table = sok.EmbeddingVariable(2, 10, name="of_fused", initializer="ones")
        >>> ids = tf.SparseTensor([[0, 0], [0, 1]], [3, 4], [2, 2])
        >>> fused_embedding_lookup_sparse([table], ids, combiner="sum", default_id=5).numpy().tolist()
        [[2.0, 2.0], [1.0, 1.0]]

    Source: `tf.nn.fused_embedding_lookup_sparse` of DeepRec.
    """
    refuse_blocknums(blocknums)
    strategy = "mod" if partition_strategy in (None, "mod_ev") else partition_strategy
    default_id = _checked_default(default_id)
    pooling = _Pooling(
        combiner,
        default_id if fill_empty_row else None,
        strategy,
        max_norm,
        name or "fused_embedding_lookup_sparse",
        prunes=prune_invalid_ids,
    )
    return pooling(params, sp_ids, sparse_weights, "params", "sp_ids", "sparse_weights")


def fused_safe_embedding_lookup_sparse(
    embedding_weights: Params,
    sparse_ids: tf.SparseTensor | tf.RaggedTensor,
    sparse_weights: tf.SparseTensor | tf.RaggedTensor | None = None,
    combiner: str | None = "mean",
    default_id: int | None = None,
    name: str | None = None,
    partition_strategy: str = "div",
    max_norm: float | None = None,
    prune: bool = True,
    blocknums: None = None,
    fusion_version: str | None = None,
) -> tf.Tensor:
    """Looks up and pools ids, as `safe_embedding_lookup_sparse`.

    `install()` puts it into `tf.nn` and `tensorflow.python.ops.embedding_ops`. One op looks up and pools in a table,
    fused or not.

    Args:
        embedding_weights, sparse_ids, sparse_weights, combiner, default_id, name, partition_strategy, max_norm: as of
            `safe_embedding_lookup_sparse`.
        prune: whether ids below 0 and, unless the combiner is 'sum', weights that are not positive are left out.
        blocknums: must be None.
        fusion_version: accepted, without meaning here.

    Returns:
        As `safe_embedding_lookup_sparse`.

    Raises:
        ValueError, TypeError, tf.errors.InvalidArgumentError: as there; `blocknums` is not None.

    Collective, of a table.

    Example:
        >>> import sok
        >>> table = sok.EmbeddingVariable(2, 10, name="of_fused_safe", initializer="ones")
        >>> ids = tf.SparseTensor([[0, 0], [0, 1]], [3, -1], [2, 2])
        >>> fused_safe_embedding_lookup_sparse(table, ids).numpy().tolist()
        [[1.0, 1.0], [0.0, 0.0]]

    Source: `fused_safe_embedding_lookup_sparse` of DeepRec.
    """
    refuse_blocknums(blocknums)
    called = name or "fused_embedding_lookup"
    pooling = _Pooling(combiner, default_id, partition_strategy, max_norm, called, prunes=prune)
    return pooling(embedding_weights, sparse_ids, sparse_weights, "embedding_weights", "sparse_ids", "sparse_weights")


class _Pooling:
    """How ids are pooled: by our lookup in tables, and by TensorFlow's in what else it takes."""

    def __init__(
        self,
        combiner: str | None,
        default_id: int | None,
        partition_strategy: str | None,
        max_norm: float | None,
        name: str,
        prunes: bool,
    ) -> None:
        self._combiner = check_combiner("mean" if combiner is None else combiner)
        self._default_id = _checked_default(default_id)
        if partition_strategy not in ("div", "mod"):
            raise ValueError(f"`partition_strategy` must be 'div' or 'mod'. Received: {partition_strategy!r}.")
        self._strategy = partition_strategy
        self._max_norm, self._name, self._prunes = max_norm, name, prunes

    def __call__(self, params: Any, ids: Any, weights: Any, *called: str) -> tf.Tensor:
        """[..., D] of ids [..., n]. `called`: what the caller calls these three."""
        table = _table_in(params, called[0])
        with tf.name_scope(self._name):
            sparse = _as_sparse(ids, called[1])
            shape = sparse.dense_shape
            if sparse.shape.rank != 2:
                sparse = tf.sparse.reshape(sparse, tf.stack([tf.reduce_prod(shape[:-1]), shape[-1]]))
            if weights is not None:
                weights = grouping.at_places_of(sparse, _as_sparse(weights, called[2]))
            if self._prunes:
                sparse, weights = grouping.pruned(sparse, weights, self._combiner)
            if self._default_id is not None:
                sparse, _ = tf.sparse.fill_empty_rows(sparse, tf.constant(self._default_id, sparse.dtype))
                if weights is not None:
                    weights, _ = tf.sparse.fill_empty_rows(weights, tf.ones([], weights.dtype))
            if table is None or self._max_norm is not None:
                pooled = self._by_tensorflow(params if table is None else table, sparse, weights)
            else:
                training = not keras_calls.is_evaluating()  # as of tf.nn.embedding_lookup
                (pooled,) = group.group_embedding_lookup_sparse(
                    [table], [sparse], [self._combiner], sp_weights=[weights], training=training
                )
            if ids.shape.rank == 2:
                return pooled
            found = tf.reshape(pooled, tf.concat([shape[:-1], tf.shape(pooled, tf.int64)[1:]], 0))
            before = tf.TensorShape(None) if ids.shape.rank is None else tf.TensorShape([None] * (ids.shape.rank - 1))
            found.set_shape(before.concatenate(pooled.shape[1:]))
            return found

    def _by_tensorflow(self, params: Any, ids: tf.SparseTensor, weights: tf.SparseTensor | None) -> tf.Tensor:
        """TensorFlow gives zeros for empty rows between others, and none for those at the end."""
        pooled = _embedding_lookup_sparse(
            list(params) if isinstance(params, tuple) else params,
            ids,
            weights,
            partition_strategy=self._strategy,
            combiner=self._combiner,
            max_norm=self._max_norm,
        )
        missing = ids.dense_shape[0] - tf.shape(pooled, tf.int64)[0]
        return tf.concat([pooled, tf.zeros(tf.stack([missing, tf.shape(pooled, tf.int64)[1]]), pooled.dtype)], 0)


_embedding_lookup_sparse = tf.compat.v1.nn.embedding_lookup_sparse  # whatever `install()` puts there


def _checked_default(default_id: object) -> int | None:
    return None if default_id is None else whole_number("default_id", default_id, low=-(2**63))


def _table_in(params: Any, called: str) -> EmbeddingVariable | None:
    """The table of `params`, alone or in a list; None: there is none."""
    given = list(params) if isinstance(params, (list, tuple)) else [params]
    if not given or given[0] is None:
        raise ValueError(f"`{called}` must be a table, or a variable or its partitions. Received: {params!r}.")
    tables = [param for param in given if is_embedding_variable(param)]
    if tables and len(given) > 1:
        raise ValueError(
            f"`{called}` must have one table, whose rows are spread over the workers as its `placement` says. "
            f"Received: {given!r}."
        )
    return tables[0] if tables else None


def _as_sparse(value: Any, called: str) -> tf.SparseTensor:
    if isinstance(value, tf.RaggedTensor):
        return value.to_sparse()
    if not isinstance(value, tf.SparseTensor):
        raise TypeError(f"`{called}` must be a SparseTensor or a RaggedTensor. Received: {value!r}.")
    return value


def _over_tables(prunes: bool, stock: Callable[..., Any]) -> Callable[..., Any]:
    """`tf.nn.embedding_lookup_sparse`, or its safe one, which of a table would want a matrix; with the arguments that
    `stock` has in this generation of TensorFlow's names."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def lookup(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        (called, params), (ids_called, ids), (weights_called, weights) = list(bound.arguments.items())[:3]
        if not any(map(is_embedding_variable, params if isinstance(params, (list, tuple)) else [params])):
            return stock(*args, **kwargs)
        given = {name: bound.arguments.get(name) for name in ("combiner", "default_id", "max_norm")}
        strategy, name = bound.arguments.get("partition_strategy", "div"), bound.arguments["name"] or stock.__name__
        pooling = _Pooling(**given, partition_strategy=strategy, name=name, prunes=prunes)
        return pooling(params, ids, weights, called, ids_called, weights_called)

    return lookup


def _contrib() -> types.ModuleType:
    contrib = types.ModuleType("tensorflow.contrib", "What `sok.deeprec` has of TensorFlow 1.15's contrib.")
    of_sequences = {name: value for name, value in vars(tf.feature_column).items() if name.startswith("sequence_")}
    names: dict[str, dict[str, Any]] = {
        "feature_column": {**of_sequences, "sequence_input_layer": sequence_input_layer},
        "layers": {
            "safe_embedding_lookup_sparse": safe_embedding_lookup_sparse,
            "input_from_feature_columns": input_from_feature_columns,
            "sequence_input_from_feature_columns": sequence_input_from_feature_columns,
        },
    }
    for name, members in names.items():
        module = types.ModuleType(f"{contrib.__name__}.{name}")
        vars(module).update(members)
        setattr(contrib, name, module)
    return contrib


NAMES: dict[str, Any] = {
    "contrib": _contrib(),
    "nn.fused_embedding_lookup_sparse": fused_embedding_lookup_sparse,
    "nn.fused_safe_embedding_lookup_sparse": fused_safe_embedding_lookup_sparse,
}
"""Names of DeepRec that stock TensorFlow lacks, as `install()` puts them into each of its modules."""

OTHERS = ((embedding_ops, "fused_safe_embedding_lookup_sparse", fused_safe_embedding_lookup_sparse),) + tuple(
    (module.feature_column, "input_layer", tf.compat.v1.feature_column.input_layer) for module in (tf, tf.compat.v2)
)
"""What else it puts somewhere: the module, the name, and what."""

REPLACED: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("embedding_lookup_sparse", functools.partial(_over_tables, False)),
    ("safe_embedding_lookup_sparse", functools.partial(_over_tables, True)),
)
"""What it replaces in `tf.nn`: the name, and what makes of TensorFlow's function the one that takes tables, too."""
