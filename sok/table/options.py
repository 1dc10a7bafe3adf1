"""`TableOptions`: what a table is made with, but its name and its size. Checked here, and nowhere else."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import tensorflow as tf

from sok.table import policies
from sok.table.initializers import Initializer, InitializerSpec, resolve
from sok.table.keys import check_key_dtype
from sok.table.own_initializer import OwnInitializer
from sok.table.placement import Placement, row_wise, table_wise
from sok.table.policies import Admission, Eviction
from sok.table.storage import Storage, as_storage

_WIRE = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TableOptions:
    """Holds all properties of a table that are not its name, its row length or its capacity.

    `EmbeddingVariable` takes it as `options`; layers, feature columns, `sok.Variable`, `sok.DynamicVariable` and
    `deeprec.get_embedding_variable` as `table`. Two are equal if all properties are, of initializers their classes and
    configurations.

    Args:
        key_dtype: int64 (default), int32, uint32 or uint64. Every value is a legal key.
        initializer: None (uniform in [-0.05, 0.05]), a Keras name, a Keras initializer, or `f(shape, dtype)`. The
            variance-scaling ones (Glorot, He, Lecun) take the table for a matrix [num_keys or capacity, dim].
        hashed: True: any key is legal, and gets a row when it first appears. False: keys are row numbers, legal from 0
            to capacity * world_size - 1 (with `sok.table_wise`: to capacity - 1).
        trainable: False keeps it out of the gradients that a tape watches by itself.
        seed: of the initial values; default from `sok.Init(seed=...)` and the name.
        num_keys: for a table that is not hashed: keys are legal from 0 to num_keys - 1, where that is less than all
            workers have room for. None: as `hashed` says.
        way_home: how the owner of rows answers another worker's lookup. 'rows': it sends the row of each distinct key
            once. 'sums': it sums the rows that it has of each segment; features with weights, and lookups that pool
            nothing, get rows all the same. 'auto' (default): each worker chooses for each call what moves less. Results
            are the same up to the order of sums.
        exchange_dtype: the dtype in which rows and their gradients travel between workers: float32 (default), float16
            or bfloat16. The latter two round them, and halve what is moved. Rows, and sums of gradients, are float32 at
            both ends. One lookup travels in 16 bit if all its tables say the same, else in float32. Workers that
            share memory, those of one host, send float32 all the same: narrowing takes longer than copying. Equal on
            all workers.
        on_host: True: rows lie in the memory of the host, where TensorFlow would place them on a GPU, or a `tf.device`
            around the table says so. For tables that a GPU has no room for. Equal on all workers.
        gpu_memory_bytes: the most memory that this shard may take of a GPU, if it lies there. What needs more raises
            ResourceExhaustedError and changes nothing. None: what the GPU has.
        placement: which worker holds which rows. `sok.row_wise()` (default): the row of a key is on rank
            key % world_size. `sok.row_wise(hash=True)`: on a rank that a hash of the key chooses, for ids that have a
            pattern; hashed tables only. `sok.table_wise(owner)`: all rows are on one rank (small tables, spread over
            workers as whole tables). `sok.column_wise(pieces)`: each of several ranks has some columns of all rows.
            `sok.data_parallel()`: each rank has a copy of all rows. Equal on all workers; results do not depend on it.
        admission: a `sok.Admission`: which keys get rows of their own. None: every key does. Hashed tables.
        eviction: a `sok.Eviction`: when rows leave. None: never. Both equal on all workers.
        storage: a `sok.Storage`: rows lie in a file, and those in use in memory; or in either, and those in use on a
            GPU. None: all in memory, or on the GPU.

    Raises:
        ValueError: a property is out of range, or does not go with another.
        TypeError: `initializer` is neither a name nor callable.

    Example:
        >>> import sok
        >>> options = sok.TableOptions(initializer="ones", placement=sok.row_wise(hash=True), exchange_dtype="float16")
        >>> layer = sok.DistributedEmbedding("sum", 1000, 4, slot_num=1, max_nnz=3, table=options)
        >>> layer.embedding_variable.options == options == TableOptions.from_config(options.get_config())
        True
    """

    key_dtype: str = "int64"
    initializer: Initializer | None = None
    hashed: bool = True
    trainable: bool = True
    seed: int | None = None
    placement: Placement = None  # type: ignore[assignment]  # row_wise()
    num_keys: int | None = None
    way_home: str = "auto"
    exchange_dtype: str = "float32"
    on_host: bool = False
    gpu_memory_bytes: int | None = None
    admission: Admission | None = None
    eviction: Eviction | None = None
    storage: Storage | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "key_dtype": check_key_dtype(self.key_dtype).name,
            "initializer": self.initializer() if isinstance(self.initializer, type) else self.initializer,
            "hashed": bool(self.hashed),
            "trainable": bool(self.trainable),
            "on_host": bool(self.on_host),
            "placement": row_wise() if self.placement is None else self.placement,
            "way_home": _one_of("way_home", self.way_home, "auto", "rows", "sums"),
            "exchange_dtype": _one_of("exchange_dtype", self.exchange_dtype, *_WIRE, of=lambda d: tf.as_dtype(d).name),
            "admission": policies.as_admission(self.admission),
            "eviction": policies.as_eviction(self.eviction),
            "storage": as_storage(self.storage),
        }
        for name, low, top in ("seed", -(2**63), 2**64 - 1), ("num_keys", 1, 2**62), ("gpu_memory_bytes", 1, 2**62):
            value = getattr(self, name)
            checked[name] = None if value is None else whole_number(name, value, top, low)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if not isinstance(self.initializer, InitializerSpec):
            resolve(self.initializer)
        if self.on_host and self.gpu_memory_bytes is not None:
            raise ValueError(f"`gpu_memory_bytes` is for tables on a GPU, not on_host. Received: {self!r}.")
        if self.storage is not None and self.storage.gpu_bytes is not None and self.gpu_memory_bytes is not None:
            raise ValueError(f"Give `gpu_memory_bytes` or the `gpu_bytes` of `storage`. Received: {self!r}.")
        if self.hashed and self.num_keys is not None:
            raise ValueError("`num_keys` is for tables whose keys are row numbers: give hashed=False, too.")
        if not isinstance(self.placement, Placement):
            raise ValueError(
                "`placement` must be sok.row_wise(), sok.row_wise(hash=True), sok.table_wise(owner), "
                f"sok.column_wise(pieces) or sok.data_parallel(). Received: {self.placement!r}."
            )
        self.placement.check(None, self.hashed)
        policies.check(self.admission, self.eviction, self.hashed, self.placement, self.key_dtype)

    @property
    def keeps_history(self) -> bool:
        """Whether rows keep what they have seen."""
        return self.admission is not None or self.eviction is not None

    @property
    def has_file(self) -> bool:
        """Whether rows lie in a file."""
        return self.storage is not None and self.storage.has_file

    def to_attributes(self) -> dict[str, Any]:
        """The attributes by which native ops know it; what the initializer and the placement become have their own."""
        return {
            "key_dtype": tf.as_dtype(self.key_dtype),
            "hashed": self.hashed,
            "num_keys": self.num_keys or 0,
            "memory_bytes": self.gpu_memory_bytes or 0,
            **(self.admission.to_attributes() if self.admission else {}),
            **(self.eviction.to_attributes() if self.eviction else {}),
            **(self.storage.to_attributes() if self.storage else {}),
        }

    def _values(self) -> tuple[Any, ...]:
        made: Any = self.initializer  # Keras' initializers are equal to themselves only
        made = (type(made), repr(made.get_config())) if hasattr(made, "get_config") else made
        return tuple({**vars(self), "initializer": made}.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TableOptions) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def get_config(self, initializers: types.ModuleType | None = None) -> dict[str, Any]:
        """What `from_config` makes it of again, for JSON. `initializers`: the module of a Keras; None: `tf.keras`'s."""
        initializer: Any = self.initializer
        if isinstance(initializer, OwnInitializer):
            initializer = InitializerSpec(initializer.kind)
        if isinstance(initializer, InitializerSpec):
            initializer = dataclasses.asdict(initializer)
        elif initializer is not None and not isinstance(initializer, str):
            keras_initializers = initializers or tf.keras.initializers
            initializer = keras_initializers.serialize(initializer)
            if isinstance(initializer, dict) and str(initializer.get("module")).startswith("tensorflow."):
                # An initializer of tf.compat.v1 comes back as Keras' own of that name, which takes no dtype.
                initializer["config"].pop("dtype", None)
            with contextlib.suppress(ValueError, TypeError):  # that of another Keras is written as it will come back
                initializer = keras_initializers.serialize(keras_initializers.deserialize(initializer))
        values = {name: getattr(self, name) for name in ("placement", "admission", "eviction", "storage")}
        configs = {name: value and value.get_config() for name, value in values.items()}
        return {**vars(self), "initializer": initializer, **configs}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], initializers: types.ModuleType | None = None) -> TableOptions:
        """The options of a `get_config`; of properties that it does not have, the defaults."""
        config = dict(config)
        made = config.get("initializer")
        if isinstance(made, dict) and "kind" in made:
            config["initializer"] = InitializerSpec(**{**made, "bank": tuple(made["bank"])})
        elif isinstance(made, dict):
            config["initializer"] = (initializers or tf.keras.initializers).deserialize(made)
        if isinstance(config.get("placement"), dict):
            config["placement"] = Placement.from_config(config["placement"])
        return cls(**config)


def whole_number(argument: str, value: object, top: int = 2**63 - 1, low: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or not low <= int(value) <= top:
        raise ValueError(f"`{argument}` must be a whole number in [{low}, {top}]. Received: {value!r}.")
    return int(value)


def _one_of(argument: str, value: Any, *accepted: str, of: Callable[[Any], str] = str) -> str:
    with contextlib.suppress(TypeError):
        if of(value) in accepted:
            return of(value)
    raise ValueError(f"`{argument}` must be one of {', '.join(map(repr, accepted))}. Received: {value!r}.")


def said_once(
    options: TableOptions | None, argument: str = "table", own: Sequence[str] = (), **properties: Any
) -> TableOptions:
    """What a table is made with that was given `options`, or `properties`.

    Args:
        options: what `argument` was given.
        own: properties that the caller works out by itself.
        **properties: what was given beside it; None is nothing. `owner` is short for a placement.

    Raises:
        ValueError: `options` is no `TableOptions`, or a property is given twice.
    """
    properties = {name: value for name, value in properties.items() if value is not None}
    if "owner" in properties:
        owner = properties.pop("owner")
        if "placement" in properties:
            raise ValueError(f"Give `placement` or `owner`, not both. Received: {properties!r} and {owner!r}.")
        properties["placement"] = table_wise(owner)
    if options is None:
        return TableOptions(**properties)
    if not isinstance(options, TableOptions):
        raise ValueError(f"`{argument}` must be None or a sok.TableOptions. Received: {options!r}.")
    if properties:
        raise ValueError(f"`{', '.join(properties)}` is given twice: leave it to `{argument}`, {options!r}.")
    for name in own:
        if getattr(options, name) != getattr(TableOptions, name):
            raise ValueError(
                f"`{argument}`: what is made here has a `{name}` of its own. Received: {getattr(options, name)!r}."
            )
    return options
