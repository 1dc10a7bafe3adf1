"""`DynamicVariable`: a table of rows that appear with their keys, as SOK v2 makes it."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import tensorflow as tf

from sok.base.types import DTypeLike, TensorLike
from sok.compat.v2.mode import HasMode, default_name, owner_of
from sok.lookup import lookup
from sok.table.initializers import Initializer, with_rows
from sok.table.keys import check_key_dtype
from sok.table.options import TableOptions, said_once
from sok.table.placement import Placement, row_wise
from sok.table.policies import Admission, Eviction
from sok.table.table import EmbeddingVariable

# All that row numbers can tell apart. Rows take memory once they appear, so this costs nothing.
MAX_CAPACITY = 2**32 - 2

_VAR_TYPES = ("hbm", "hybrid", "dynamic")

# What SOK's two hash tables are told about GPU memory. Nothing here has a meaning for ours.
IGNORED_OPTIONS = (
    *("init_capacity", "max_hbm_for_vectors", "max_bucket_size", "max_load_factor", "block_size", "device_id"),
    *("io_by_cpu", "reserved_key_start_bit", "num_of_buckets_per_alloc"),
)
# What they are told about rows that come and go, and tables here do, too.
POLICY_OPTIONS = ("evict_strategy", "filter_ratio")
_STRATEGIES = ("kLru", "kLfu", "kEpochLru", "kEpochLfu", "kCustomized")  # by HierarchicalKV's numbers


class DynamicVariable(HasMode, EmbeddingVariable):
    """A table that gives a row to each key when it is first looked up.

    The row of `key` is on worker key % R, or all rows on one worker. It is a hashed `EmbeddingVariable`: look it up
    with `sok.lookup_sparse`, `sok.all2all_dense_embedding` or `tf.nn.embedding_lookup`, and train it with
    `sok.OptimizerWrapper(optimizer)`, `sok.optimizers` or `sok.DistributedOptimizer`.

    Args:
        dimension: length D of a row.
        initializer: of a fresh row: None or 'random' (uniform in [-0.05, 0.05]), 'uniform' (in [0, 1]), 'ones',
            'zeros', a number or a number as a string; also a Keras name, a Keras initializer or `f(shape, dtype)`. The
            variance-scaling ones (Glorot, He, Lecun) need `max_capacity`, the number of rows they scale by.
        var_type: None, 'hbm', 'hybrid' or 'dynamic', SOK's kinds of hash tables; it has no effect but that
            `backend_type` gives it.
        name: made unique; the same on all workers. None: SOK's "sok_dynamic_Variable_0", "sok_dynamic_Variable_1", ...
        constraint: must be None.
        trainable: whether a tape watches it by itself.
        key_type: None (int64), int64, int32, uint32 or uint64: the dtype of the keys that `sok.export` gives. Lookups
            take int32 and int64 for all but uint64.
        dtype: None or float32.
        mode: None or 'distributed', or 'localized:#': all rows are on worker #.
        placement: instead of `mode`, as `sok.TableOptions` takes it.
        table: all properties of the table, instead of initializer, trainable, mode and placement. Its keys are as
            `key_type` says, and it is hashed.
        **kwargs: `max_capacity`, the rows that a worker may hold (default 2^32 - 2, so that memory is the limit).
            `evict_strategy`, which takes `max_capacity`: 'kLru' or 'kEpochLru': a table that is full gives up the rows
            used longest ago, `sok.Eviction.least_recent()`; 'kLfu' or 'kEpochLfu': those used least,
            `sok.Eviction.least_frequent()`; rows are then spread by `sok.row_wise(hash=True)` unless `placement` says
            another. Without it, or with 'kCustomized', a table that is full raises and evicts nothing.
            `filter_ratio`: below 1, the share of keys that get rows: `sok.Admission(probability=filter_ratio)`. What
            else SOK takes (`IGNORED_OPTIONS` in this module: init_capacity, max_hbm_for_vectors, ...) is about GPU
            memory, and is accepted without effect.

    Raises:
        TypeError: a dtype that is not float32; an unknown keyword.
        ValueError: another argument is out of range; a variance-scaling initializer without `max_capacity`.

    Collective if `initializer` is none of Keras' random or constant ones.

    Example:
        >>> import sok, tensorflow as tf
        >>> table = sok.DynamicVariable(dimension=3, initializer="13")
        >>> sok.all2all_dense_embedding(table, tf.constant([0, 2**40])).numpy().tolist()
        [[13.0, 13.0, 13.0], [13.0, 13.0, 13.0]]
        >>> table.size.numpy().tolist()
        [2, 3]

    Source: `DynamicVariable` of SOK v2; differences are listed in docs/migrating.md.
    """

    def __init__(
        self,
        dimension: int,
        initializer: Initializer | None = None,
        var_type: str | None = None,
        name: str | None = None,
        constraint: object = None,
        trainable: bool = True,
        key_type: DTypeLike | None = None,
        dtype: DTypeLike | None = None,
        mode: str | None = None,
        placement: Placement | None = None,
        table: TableOptions | None = None,
        **kwargs: Any,
    ) -> None:
        if constraint is not None:
            raise ValueError(f"sok.DynamicVariable: `constraint` must be None. Received: {constraint!r}.")
        if dtype is not None and tf.as_dtype(dtype) != tf.float32:
            raise TypeError(f"sok.DynamicVariable: `dtype` must be float32. Received: {tf.as_dtype(dtype).name}.")
        if var_type not in (None, *_VAR_TYPES):
            raise ValueError(f"`var_type` must be None, 'hbm', 'hybrid' or 'dynamic'. Received: {var_type!r}.")
        _check_options(kwargs)
        self._key_type = check_key_dtype(key_type, "key_type")
        self._var_type, self._mode, self._config = var_type or "hbm", mode, dict(kwargs)
        options = said_once(
            table,
            own=("key_dtype", "hashed", "num_keys"),
            initializer=_keras_initializer(initializer),
            trainable=None if trainable else False,
            owner=owner_of(mode),
            **{"placement": placement, **_policies_of(kwargs, is_placed=not (table is mode is placement is None))},
        )
        if "max_capacity" not in kwargs:
            options = dataclasses.replace(options, initializer=with_rows(options.initializer, None, dimension))
        super().__init__(
            dimension,
            kwargs.get("max_capacity", MAX_CAPACITY),
            name=name or default_name("dynamic"),
            # Lookups take int64 ids whatever the key type is, and no id may be cut off.
            options=dataclasses.replace(options, key_dtype="uint64" if self._key_type == tf.uint64 else "int64"),
        )

    @property
    def size(self) -> tf.Tensor:
        """[rows of this worker, D]: int64. Not collective."""
        return tf.stack([self.num_rows(), tf.constant(self.dim, tf.int64)])

    @property
    def dimension(self) -> int:
        """Length D of a row."""
        return self.dim

    @property
    def key_type(self) -> tf.DType:
        """The dtype of the keys that `sok.export` gives."""
        return self._key_type

    @property
    def handle_dtype(self) -> tf.DType:
        """The dtype of rows, float32."""
        return tf.float32

    @property
    def backend_type(self) -> str:
        """The `var_type` that was given, or 'hbm'."""
        return self._var_type

    @property
    def config_dict(self) -> dict[str, Any]:
        """The keywords given."""
        return self._config

    @property
    def mode(self) -> str | None:
        """The `mode` given."""
        return self._mode

    @property
    def indices(self) -> None:
        """None: SOK's keys of the static buffer, which a table here never has."""
        return None

    def key_map(self, indices: TensorLike) -> Any:
        """Returns `indices`: a key is its own number here."""
        return indices

    def sparse_read(self, keys: TensorLike, name: str | None = None) -> tf.Tensor:
        """The rows of `keys` [...]: [..., D]. Keys without a row get one. Collective; differentiable."""
        return lookup.lookup_rows(self, keys, training=True)

    def is_static(self) -> bool:
        """False: see `to_static`."""
        return False

    def to_static(self, indices: TensorLike | None = None) -> None:
        """Not offered: SOK turns a table into a dense variable so that a stock optimizer can change it."""
        raise NotImplementedError(
            f"The table '{self.table_name}' has no static mode: nothing here has to turn it into a dense variable. "
            "Train it with sok.OptimizerWrapper(optimizer), read rows with sok.all2all_dense_embedding and store them "
            "with sok.assign."
        )

    def to_dynamic(self) -> None:
        """Not offered, as `to_static`."""
        self.to_static()

    def __repr__(self) -> str:
        rows = f", rows {int(self.num_rows()):,}" if tf.executing_eagerly() and not self._in_graph_mode else ""
        return f"<sok.DynamicVariable '{self.table_name}' dimension={self.dim}, {self._key_type.name} keys{rows}>"

    __str__ = __repr__


def _check_options(options: dict[str, Any]) -> None:
    unknown = sorted(set(options) - {"max_capacity", *POLICY_OPTIONS, *IGNORED_OPTIONS})
    if unknown:
        raise TypeError(
            f"sok.DynamicVariable: unknown keyword(s) {', '.join(unknown)}. Known are max_capacity, "
            f"{', '.join(POLICY_OPTIONS)} and, without "
            f"effect, {', '.join(IGNORED_OPTIONS)}."
        )


def _policies_of(options: dict[str, Any], is_placed: bool) -> dict[str, Any]:
    """What SOK's words about rows that come and go say of a table; where it lies, too, if nobody has said that."""
    said: dict[str, Any] = {}
    ratio = options.get("filter_ratio", 1.0)
    if isinstance(ratio, bool) or not isinstance(ratio, numbers.Real) or not 0.0 < float(ratio) <= 1.0:
        raise ValueError(f"sok.DynamicVariable: `filter_ratio` must be in (0, 1]. Received: {ratio!r}.")
    if float(ratio) < 1.0:
        said["admission"] = Admission(probability=float(ratio))
    strategy = options.get("evict_strategy", "kCustomized")
    name = _STRATEGIES[strategy] if strategy in range(len(_STRATEGIES)) else str(strategy).rpartition(".")[2]
    if name not in _STRATEGIES:
        raise ValueError(
            f"sok.DynamicVariable: `evict_strategy` must be one of {', '.join(_STRATEGIES)}. Received: {strategy!r}."
        )
    if name == "kCustomized":
        return said
    if "max_capacity" not in options:
        raise ValueError(
            f"sok.DynamicVariable: `evict_strategy`, {name}, says what leaves a table that is full: give "
            "`max_capacity`, too."
        )
    said["eviction"] = Eviction.least_recent() if name.endswith("Lru") else Eviction.least_frequent()
    if not is_placed:
        said["placement"] = row_wise(hash=True)
    return said


def _keras_initializer(initializer: Any) -> Any:
    """SOK's words for initializers, as what `EmbeddingVariable` takes."""
    if isinstance(initializer, str):
        if initializer.strip().lower() in ("", "random"):
            return None
        if initializer.strip().lower() == "uniform":
            return tf.compat.v1.random_uniform_initializer(0.0, 1.0)
        try:
            initializer = float(initializer)
        except ValueError:
            return initializer
    if isinstance(initializer, numbers.Real) and not isinstance(initializer, bool):
        return tf.compat.v1.constant_initializer(float(initializer))
    return initializer
