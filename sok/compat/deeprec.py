"""Scripts that were written for DeepRec: its names, where they look for them.

    import tensorflow.compat.v1 as tf
    import sok

    sok.deeprec.install()
    tf.config.experimental.enable_distributed_strategy(strategy="collective")

Nothing in `tensorflow` is touched before `install()`, and nothing is left of it after `uninstall()`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import tensorflow as tf
from tensorflow.python.client import session as tf_session
from tensorflow.python.feature_column import feature_column_v2 as fc_v2

from sok.base.patching import Patch
from sok.base.types import DTypeLike, TensorLike
from sok.compat import deeprec_lookups, feature_column, strategy
from sok.compat.deeprec_inputs import input_from_feature_columns as input_from_feature_columns  # users find these here
from sok.compat.deeprec_inputs import sequence_input_from_feature_columns as sequence_input_from_feature_columns
from sok.compat.deeprec_inputs import sequence_input_layer as sequence_input_layer
from sok.compat.deeprec_lookups import fused_embedding_lookup_sparse as fused_embedding_lookup_sparse
from sok.compat.deeprec_lookups import fused_safe_embedding_lookup_sparse as fused_safe_embedding_lookup_sparse
from sok.compat.deeprec_lookups import safe_embedding_lookup_sparse as safe_embedding_lookup_sparse
from sok.compat.deeprec_options import CacheStrategy as CacheStrategy  # users find it here
from sok.compat.deeprec_options import (
    CBFFilter,
    CheckpointOption,
    CounterFilter,
    DataSource,
    EmbeddingVariableOption,
    GlobalStepEvict,
    InitializerOption,
    L2WeightEvict,
    StorageOption,
)
from sok.compat.deeprec_options import StorageType as StorageType
from sok.compat.deeprec_sessions import ConfigProto as ConfigProto
from sok.compat.deeprec_sessions import batch_weight as batch_weight
from sok.compat.deeprec_sessions import make_prefetch_hook, mark_target_node, staged, with_own_config
from sok.compat.feature_column import group_embedding_column_scope
from sok.compat.feature_column.id_column import AnyIdColumn, capacity_of
from sok.compat.scoped_tables import scoped_table
from sok.compat.warm_start import WarmStartHook as WarmStartHook  # users find these here
from sok.compat.warm_start import begin_from
from sok.compat.warm_start import warm_start as warm_start
from sok.lookup import group
from sok.lookup.lookup import lookup_rows
from sok.table.initializers import BANK_ROWS, Initializer, with_rows
from sok.table.options import TableOptions, said_once, whole_number
from sok.table.placement import Placement
from sok.table.table import EmbeddingVariable

DEFAULT_CAPACITY = 1 << 30
"""Rows that each worker's part of a table may hold, where nobody says. Memory is taken as rows appear."""


def group_embedding_lookup_sparse(
    params: Sequence[Any],
    sp_ids: Sequence[Any],
    combiners: str | Sequence[str] | None = None,
    partition_strategy: str | Sequence[Any] | None = "mod",
    sp_weights: Sequence[Any] | str | None = None,
    name: str | None = None,
    is_sequence: bool = False,
    params_num_per_group: int | None = None,
) -> list[tf.Tensor]:
    """Looks up and pools the ids of many features, as `sok.group_embedding_lookup_sparse`, with DeepRec's positions.

    Its documents put `partition_strategy` before `sp_weights`, its newest code after it; both are understood.

    Example:
        >>> table = EmbeddingVariable(2, 10, name="of_deeprec", initializer="ones")
        >>> ids = tf.SparseTensor([[0, 0], [0, 1]], [3, 4], [1, 2])
        >>> group_embedding_lookup_sparse([table], [ids], ["sum"], "mod", None, "name")[0].numpy().tolist()
        [[2.0, 2.0]]
    """
    if isinstance(partition_strategy, (list, tuple)) or isinstance(sp_weights, str):
        partition_strategy, sp_weights = sp_weights, partition_strategy
    return group.group_embedding_lookup_sparse(
        params,
        sp_ids,
        combiners,
        partition_strategy=cast("str", partition_strategy or "mod"),
        sp_weights=cast("Sequence[Any] | None", sp_weights),
        is_sequence=is_sequence,
        params_num_per_group=params_num_per_group,
        name=name,
    )


def get_embedding_variable(
    name: str,
    embedding_dim: int,
    key_dtype: DTypeLike | None = None,
    value_dtype: DTypeLike | None = None,
    initializer: Initializer | None = None,
    regularizer: None = None,
    trainable: bool = True,
    collections: Sequence[str] | None = None,
    caching_device: object = None,
    partitioner: object = None,
    validate_shape: bool = True,
    custom_getter: None = None,
    constraint: None = None,
    init_data_source: DataSource | None = None,
    ev_option: EmbeddingVariableOption | None = None,
    *,
    steps_to_live: int | None = None,
    capacity: int | None = None,
    exchange_dtype: DTypeLike | None = None,
    placement: Placement | None = None,
    table: TableOptions | None = None,
) -> EmbeddingVariable:
    """Gives the table `name` of the current variable scope: a new one, or, where the scope reuses, the one there.

    The arguments have DeepRec's order, so that calls by position work.

    Args:
        name: within the scope.
        embedding_dim: length of a row.
        key_dtype: of the ids. None: int64.
        value_dtype: only None or float32.
        initializer: as `sok.EmbeddingVariable` takes it. None: that of the variable scope, or else a truncated
            normal distribution with deviation 1, as DeepRec's. Without `capacity` the variance-scaling ones (Glorot,
            He, Lecun) take the table for a matrix [4096, embedding_dim], as DeepRec draws it.
        trainable: whether it is trained.
        collections: of the graph, to which the table is added besides the usual ones.
        caching_device, validate_shape: accepted, without meaning here.
        partitioner: ignored: rows are spread over the workers of the job.
        regularizer, custom_getter, constraint: must be None.
        init_data_source: None, or the rows that the table begins with: as of a `CheckpointOption`. Collective.
        ev_option: None, or an `EmbeddingVariableOption`: when an id gets a row, when a row leaves, where rows lie, and
            what the table begins with. Collective with a `CheckpointOption`.
        steps_to_live: DeepRec's older word for `GlobalStepEvict(steps_to_live)`.
        capacity: rows that each worker's part may hold; memory is taken as they appear. None: 2^30.
        exchange_dtype, placement: as `sok.TableOptions` takes them.
        table: all properties of the table, instead of key_dtype, initializer, trainable and these two.

    Returns:
        The table, which `tf.nn.embedding_lookup` trains. When executing eagerly always a new one.

    Raises:
        ValueError: as `sok.EmbeddingVariable`; the scope reuses and has no such table, or does not reuse and has one;
            the table has another dim; another `value_dtype`; an argument that must be None; `steps_to_live` and
            an `evict_option`; `init_data_source` and a `CheckpointOption`.
        TypeError: `ev_option` is no EmbeddingVariableOption, which refuses by itself what tables do not do;
            `init_data_source` is none.
        As `sok.restore`, on all workers, where rows are read.

    Example:
        >>> with tf.Graph().as_default():
        ...     for reuse in (False, True):
        ...         with tf.compat.v1.variable_scope("model", reuse=reuse):
        ...             table = get_embedding_variable("user", 8, capacity=1000)
        ...     table.table_name
        'model/user'

    Source: `tf.get_embedding_variable` of DeepRec; docs/migrating.md has the differences.
    """
    refused = {"regularizer": regularizer, "custom_getter": custom_getter, "constraint": constraint}
    for argument, value in refused.items():
        if value is not None:
            raise ValueError(f"`{argument}` must be None: a table knows nothing of it. Received: {value!r}.")
    warm = ev_option.ckpt if isinstance(ev_option, EmbeddingVariableOption) else None
    if init_data_source is not None:
        if warm is not None:
            raise ValueError(
                f"Give `init_data_source` or a `ckpt`, not both. Received: {init_data_source!r} and {warm!r}."
            )
        warm = CheckpointOption(init_data_source=init_data_source)
    policies = _policies_of(ev_option)
    init = ev_option.init_option if ev_option is not None else None
    if init is not None and init.initializer is not None:
        if initializer is not None:
            raise ValueError(
                f"Give `initializer` or that of an `init_option`, not both. Received: {initializer!r} and {init!r}."
            )
        initializer = init.initializer
    if steps_to_live is not None:
        if policies["eviction"] is not None:
            raise ValueError(
                f"Give `steps_to_live` or an `evict_option`, not both. Received: {steps_to_live!r} and {ev_option!r}."
            )
        policies["eviction"] = GlobalStepEvict(steps_to_live).eviction
    if tf.as_dtype(value_dtype or tf.float32) != tf.float32:
        raise ValueError(f"`value_dtype` must be float32. Received: {value_dtype!r}.")
    options = said_once(
        table,
        key_dtype=key_dtype,
        initializer=initializer,
        trainable=None if trainable else False,
        exchange_dtype=exchange_dtype,
        placement=placement,
        **policies,
    )
    initializer = options.initializer or tf.compat.v1.get_variable_scope().initializer
    if initializer is None:
        initializer = tf.compat.v1.truncated_normal_initializer()
    if capacity is None:
        rows = BANK_ROWS if init is None else init.default_value_dim
        capacity, initializer = DEFAULT_CAPACITY, with_rows(initializer, rows, embedding_dim)
    options = dataclasses.replace(options, initializer=initializer)
    found = scoped_table(name, embedding_dim, capacity, kind=_EmbeddingVariable, options=options)
    begin_from(found, warm)
    _add_to_collections(found, collections or ())
    return found


class _EmbeddingVariable(EmbeddingVariable):
    """A table that `tf.nn.embedding_lookup`, which calls `sparse_read`, trains: DeepRec's scripts know no other."""

    def sparse_read(self, keys: TensorLike, name: str | None = None) -> tf.Tensor:
        """The rows of `keys` [...]: [..., D]. Keys without a row get one. Collective; differentiable."""
        return lookup_rows(self, keys, training=True)

    def total_count(self) -> tf.Tensor:
        """Rows in use in this worker's shard, and their length: int64 [2]."""
        return tf.stack([self.num_rows(), self.dim])


def _policies_of(ev_option: EmbeddingVariableOption | None) -> dict[str, Any]:
    """`admission`, `eviction` and `storage` of a table; None: nothing was said."""
    if ev_option is not None and not isinstance(ev_option, EmbeddingVariableOption):
        raise TypeError(f"`ev_option` must be None or an EmbeddingVariableOption. Received: {ev_option!r}.")
    return (ev_option or EmbeddingVariableOption()).policies


def categorical_column_with_embedding(
    key: str,
    dtype: DTypeLike = tf.int64,
    partition_num: int | None = None,
    ev_option: EmbeddingVariableOption | None = None,
    *,
    capacity: int = DEFAULT_CAPACITY,
) -> AnyIdColumn:
    """Makes a categorical column of any integer ids, whose embeddings are in a table of ours.

    For `sok.feature_column.embedding_column`, also through `tf.feature_column.weighted_categorical_column`. Once
    `install()` was called, `tf.feature_column.embedding_column` takes it, too.

    Args:
        key: of the feature.
        dtype: of the ids: any integers. (DeepRec's default is string.)
        partition_num: ignored: rows are spread over the workers of the job.
        ev_option: as of `get_embedding_variable`.
        capacity: rows that each worker's part of the table may hold; memory is taken as they appear.

    Raises:
        ValueError: ids that are no integers.
        TypeError: `ev_option` is no EmbeddingVariableOption.

    Example:
        >>> import sok
        >>> item = categorical_column_with_embedding("item")
        >>> column = sok.feature_column.embedding_column(item, 2, initializer="ones")
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...     net = tf.compat.v1.feature_column.input_layer({"item": [[2**40], [7]]}, [column])
        ...     session.run(net).tolist()
        [[1.0, 1.0], [1.0, 1.0]]

    Source: `categorical_column_with_embedding` of DeepRec.
    """
    policies = _policies_of(ev_option)
    if ev_option is not None and ev_option.ckpt is not None:
        raise ValueError(
            "`ckpt` is for sok.deeprec.get_embedding_variable: give the table of a column its rows by sok.restore. "
            f"Received: {ev_option.ckpt!r}."
        )
    if ev_option is not None and ev_option.init_option is not None and ev_option.init_option.initializer is not None:
        raise ValueError(
            "The `initializer` of an `init_option` is for sok.deeprec.get_embedding_variable: give it to "
            f"sok.feature_column.embedding_column. Received: {ev_option.init_option!r}."
        )
    if not tf.as_dtype(dtype).is_integer:
        raise ValueError(
            f"`dtype` must be of integers: hash others first, by tf.strings.to_hash_bucket_fast. Received: {dtype!r}."
        )
    return AnyIdColumn(key, whole_number("capacity", capacity), **policies)


def sequence_categorical_column_with_embedding(
    key: str,
    dtype: DTypeLike = tf.int64,
    partition_num: int | None = None,
    ev_option: EmbeddingVariableOption | None = None,
    *,
    capacity: int = DEFAULT_CAPACITY,
) -> fc_v2.SequenceCategoricalColumn:
    """Makes a categorical column of sequences of any integer ids, whose embeddings are in a table of ours.

    For `sequence_input_layer`, in an embedding column as `categorical_column_with_embedding` says, whose arguments and
    errors these are.

    Example:
        >>> import sok
        >>> item = sequence_categorical_column_with_embedding("item")
        >>> column = sok.feature_column.embedding_column(item, 2, initializer="ones")
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...     net, lengths = sequence_input_layer({"item": [[2**40, 7], [7, -1]]}, [column])
        ...     session.run([net[:, :, 0], lengths])
        [array([[1., 1.],
               [1., 0.]], dtype=float32), array([2, 1])]

    Source: `sequence_categorical_column_with_embedding` of DeepRec.
    """
    ids = categorical_column_with_embedding(key, dtype, partition_num, ev_option, capacity=capacity)
    return fc_v2.SequenceCategoricalColumn(ids)


def _embedding_column(categorical_column: Any, *args: Any, **kwargs: Any) -> Any:
    """`tf.feature_column.embedding_column`, in whose place `install()` puts it."""
    ours = capacity_of(categorical_column) is not None
    return (feature_column.embedding_column if ours else _stock_embedding_column)(categorical_column, *args, **kwargs)


_stock_embedding_column = tf.feature_column.embedding_column


def _add_to_collections(table: EmbeddingVariable, collections: Sequence[str]) -> None:
    if isinstance(collections, str):
        raise ValueError(f"`collections` must be a list of names. Received: {collections!r}.")
    with tf.init_scope():
        if tf.executing_eagerly():
            return
        for name in collections:
            # Tables are in these as they should be, or on purpose not: what saves global variables reads matrices.
            is_usual = name in (tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES)
            if not is_usual and not any(table is there for there in tf.compat.v1.get_collection(name)):
                tf.compat.v1.add_to_collection(name, table)


_NAMES: dict[str, Any] = {
    "nn.group_embedding_lookup_sparse": group_embedding_lookup_sparse,
    "nn.group_embedding_lookup": group.group_embedding_lookup,
    "feature_column.group_embedding_column_scope": group_embedding_column_scope,
    "config.experimental.enable_distributed_strategy": strategy.enable_distributed_strategy,
    "feature_column.categorical_column_with_embedding": categorical_column_with_embedding,
    "feature_column.sequence_categorical_column_with_embedding": sequence_categorical_column_with_embedding,
    **deeprec_lookups.NAMES,
    "get_embedding_variable": get_embedding_variable,
    "EmbeddingVariableOption": EmbeddingVariableOption,
    "CounterFilter": CounterFilter,
    "CBFFilter": CBFFilter,
    "GlobalStepEvict": GlobalStepEvict,
    "L2WeightEvict": L2WeightEvict,
    "StorageOption": StorageOption,
    "CheckpointOption": CheckpointOption,
    "InitializerOption": InitializerOption,
    "staged": staged,
    "make_prefetch_hook": make_prefetch_hook,
    "train.mark_target_node": mark_target_node,
}


def install() -> None:
    """Puts DeepRec's names into `tensorflow` and `tensorflow.compat.v1` (and `v2`), until `uninstall()`.

    `tf.nn.group_embedding_lookup_sparse`, `tf.nn.group_embedding_lookup`, `tf.get_embedding_variable`,
    `tf.feature_column.group_embedding_column_scope`, `tf.config.experimental.enable_distributed_strategy`,
    `tf.feature_column.categorical_column_with_embedding`, `tf.EmbeddingVariableOption` and its options
    `tf.CounterFilter`, `tf.CBFFilter`, `tf.GlobalStepEvict`, `tf.L2WeightEvict`, `tf.CheckpointOption`,
    `tf.InitializerOption` and `tf.StorageOption` (whose `StorageType` and `CacheStrategy` are in `sok.deeprec`);
    `tf.nn.fused_embedding_lookup_sparse`, `tf.nn.fused_safe_embedding_lookup_sparse` (in
    `tensorflow.python.ops.embedding_ops`, too), `tf.feature_column.sequence_categorical_column_with_embedding`, v1's
    `tf.feature_column.input_layer`, and of `tf.contrib` what `sok.deeprec` has: `feature_column.sequence_input_layer`,
    `layers.safe_embedding_lookup_sparse`, `layers.input_from_feature_columns` and
    `layers.sequence_input_from_feature_columns`; `tf.staged`, `tf.make_prefetch_hook` and `tf.train.mark_target_node`.
    It changes nothing that is there already, except that `tf.feature_column.embedding_column` then makes tables for
    columns of any ids, that `tf.nn.embedding_lookup_sparse` and `tf.nn.safe_embedding_lookup_sparse` take tables, too,
    and that v1's `tf.ConfigProto`, and sessions, know `do_async_embedding`. A second call does nothing.

    Raises:
        RuntimeError: a name is taken: this TensorFlow has one of its own. Nothing was installed.

    Example:
        >>> install()
        >>> tf.nn.group_embedding_lookup_sparse is group_embedding_lookup_sparse
        True
        >>> uninstall()
        >>> hasattr(tf.nn, "group_embedding_lookup_sparse")
        False
    """
    _patch.install()


def uninstall() -> None:
    """Takes away what `install()` put there. Does nothing where nothing is installed."""
    _patch.uninstall()


def _wanted() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    wanted: list[tuple[Any, str, Callable[[Any], Any]]] = []
    named = list(deeprec_lookups.OTHERS)
    for module in _modules():
        for path, value in _NAMES.items():
            *parents, name = path.split(".")
            named.append((functools.reduce(getattr, parents, module), name, value))
        wanted.append((module.feature_column, "embedding_column", functools.partial(_instead, _embedding_column)))
        wanted += [(module.nn, name, replace) for name, replace in deeprec_lookups.REPLACED]
        if hasattr(module, "ConfigProto"):
            wanted.append((module, "ConfigProto", functools.partial(_instead, ConfigProto)))
    wanted.append((tf_session.BaseSession, "__init__", with_own_config))
    for parent, name, value in named:
        if hasattr(parent, name):
            raise RuntimeError(f"`{parent.__name__}` has a {name!r} of its own. sok.deeprec puts nothing over it.")
        wanted.append((parent, name, functools.partial(_instead, value)))
    return wanted


def _modules() -> list[Any]:
    """`tf`, v1 and v2: these two as `tf.compat` has them and, another module, as `import tensorflow.compat.v1` does."""
    names = [f"tensorflow{api}.compat.{version}" for api in ("._api.v2", "") for version in ("v1", "v2")]
    return [tf, *map(importlib.import_module, names)]


def _instead(value: Any, _: Any) -> Any:
    return value


_patch = Patch(_wanted)
