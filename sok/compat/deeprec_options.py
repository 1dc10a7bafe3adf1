"""DeepRec's options of a table: when an id gets a row, when a row leaves, and where rows lie."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
import os
from typing import Any, TypeAlias

import tensorflow as tf

from sok.base.types import DTypeLike
from sok.table.initializers import Initializer
from sok.table.options import whole_number
from sok.table.policies import Admission, Eviction
from sok.table.storage import Storage

L2_EVERY = 1000
"""Steps between the passes of `L2WeightEvict`, where nobody says: DeepRec has them when it saves."""

DataSource: TypeAlias = "str | os.PathLike[str] | tuple[str | os.PathLike[str], str | None]"

_FOR_NONE = "Leave the option out for none."


@dataclasses.dataclass(frozen=True)
class CounterFilter:
    """Gives an id a row with the `filter_freq`-th batch that holds it: `sok.Admission(after=filter_freq)`.

    Until then the id reads its initial row (DeepRec: zeros), and its gradients are dropped. An id counts once in a step
    (DeepRec counts the repeats of a batch where its optimizer is told of them).

    Args:
        filter_freq: 0 is no filter.

    Raises:
        ValueError: `filter_freq` is no whole number, or below 0.

    Example:
        >>> CounterFilter(filter_freq=3).admission
        Admission(after=3)

    Source: `CounterFilter` of DeepRec.
    """

    filter_freq: int = 0

    def __post_init__(self) -> None:
        whole_number("filter_freq", self.filter_freq, 2**32 - 1, 0)

    @property
    def admission(self) -> Admission | None:
        """What a table takes; None: all are admitted."""
        return Admission(after=int(self.filter_freq)) if self.filter_freq else None


@dataclasses.dataclass(frozen=True)
class CBFFilter:
    """Does what `CounterFilter` does: ids that wait are counted exactly, not by a counting Bloom filter.

    So no id gets its row early, as a Bloom filter lets some; and the memory of ids that wait grows with them (a key and
    two numbers each) beyond what `max_element_size` would bound. `sok.Eviction(older_than=...)` forgets those that did
    not come again.

    Args:
        filter_freq: 0 is no filter.
        max_element_size, false_positive_probability: of the Bloom filter, checked as DeepRec does: both, or none.
        counter_type: without effect; counts stop at 2^32 - 1.

    Raises:
        ValueError: an argument is out of range, or one of the two is given alone.

    Example:
        >>> CBFFilter(filter_freq=3, max_element_size=2**20, false_positive_probability=0.01).admission
        Admission(after=3)

    Source: `CBFFilter` of DeepRec.
    """

    filter_freq: int = 0
    max_element_size: int = 0
    false_positive_probability: float = -1.0
    counter_type: DTypeLike = tf.uint64

    def __post_init__(self) -> None:
        whole_number("filter_freq", self.filter_freq, 2**32 - 1, 0)
        whole_number("max_element_size", self.max_element_size, low=0)
        probability = self.false_positive_probability
        is_given = isinstance(probability, numbers.Real) and 0.0 < float(probability) < 1.0
        if not is_given and probability != -1.0:
            raise ValueError(
                f"`false_positive_probability` must be in (0, 1), or -1 for none. Received: {probability!r}."
            )
        if is_given != (self.max_element_size > 0):
            raise ValueError(
                "`max_element_size` and `false_positive_probability` must be given together, or none of them. "
                f"Received: {self.max_element_size!r} and {probability!r}."
            )

    @property
    def admission(self) -> Admission | None:
        """What a table takes; None: all are admitted."""
        return CounterFilter(self.filter_freq).admission


@dataclasses.dataclass(frozen=True)
class GlobalStepEvict:
    """Has rows leave that no batch of so many steps has held: `sok.Eviction(older_than=steps_to_live)`.

    What a pass removes is what DeepRec removes in a save after the same step. Here it comes every few steps, whether
    anything is saved or not.

    Args:
        steps_to_live: None or 0: no row leaves.
        every: steps between two passes. None: `steps_to_live // 8`, at least 1.

    Raises:
        ValueError: an argument is no whole number, or out of range.

    Example:
        >>> GlobalStepEvict(steps_to_live=4000).eviction
        Eviction(older_than=4000, every=500)

    Source: `GlobalStepEvict` of DeepRec.
    """

    steps_to_live: int | None = None
    _: dataclasses.KW_ONLY
    every: int | None = None

    def __post_init__(self) -> None:
        if self.steps_to_live is not None:
            whole_number("steps_to_live", self.steps_to_live, 2**32 - 1, 0)
        if self.every is not None:
            whole_number("every", self.every)

    @property
    def eviction(self) -> Eviction | None:
        """What a table takes; None: no row leaves."""
        return Eviction(older_than=int(self.steps_to_live), every=self.every) if self.steps_to_live else None


@dataclasses.dataclass(frozen=True)
class L2WeightEvict:
    """Has rows leave of which half the squared length is below a threshold.

    It is `sok.Eviction(norm_below=(2 * l2_weight_threshold) ** 0.5)`: DeepRec compares half the sum of squares. Rows
    within rounding of the threshold may differ.

    Args:
        l2_weight_threshold: -1: no row leaves.
        every: steps between two passes. DeepRec has one in each save, whose steps nobody knows here.

    Raises:
        ValueError: an argument is out of range. (DeepRec takes a threshold that is not positive for none.)

    Example:
        >>> L2WeightEvict(l2_weight_threshold=0.5).eviction
        Eviction(norm_below=1.0, every=1000)

    Source: `L2WeightEvict` of DeepRec.
    """

    l2_weight_threshold: float = -1.0
    _: dataclasses.KW_ONLY
    every: int = L2_EVERY

    def __post_init__(self) -> None:
        threshold = self.l2_weight_threshold
        is_number = isinstance(threshold, numbers.Real) and not isinstance(threshold, bool)
        if not is_number or threshold != -1.0 and not 0.0 < float(threshold) < math.inf:
            raise ValueError(
                f"`l2_weight_threshold` must be above 0, or -1 for none. {_FOR_NONE} Received: {threshold!r}."
            )
        whole_number("every", self.every)

    @property
    def eviction(self) -> Eviction | None:
        """What a table takes; None: no row leaves."""
        if self.l2_weight_threshold == -1.0:
            return None
        return Eviction(norm_below=math.sqrt(2.0 * self.l2_weight_threshold), every=self.every)


class StorageType(enum.IntEnum):
    """Where a table's rows lie, with the numbers of DeepRec's `config_pb2.StorageType`."""

    INVALID = 0
    DRAM = 1
    PMEM_MEMKIND = 2
    PMEM_LIBPMEM = 3
    SSDHASH = 4
    LEVELDB = 5
    DRAM_PMEM = 11
    DRAM_SSDHASH = 12
    HBM_DRAM = 13
    DRAM_LEVELDB = 14
    DRAM_PMEM_SSDHASH = 101
    HBM_DRAM_SSDHASH = 102


_WITHOUT_FILE = (StorageType.INVALID, StorageType.DRAM, StorageType.HBM_DRAM)


class CacheStrategy(enum.IntEnum):
    """Which rows stay in memory, with the numbers of DeepRec's `config_pb2.CacheStrategy`."""

    LRU = 0
    LFU = 1


@dataclasses.dataclass(frozen=True)
class StorageOption:
    """Says where rows lie, as `sok.Storage` does: in a file, and those in use in memory; or in either, and those in use
    on a GPU.

    Args:
        storage_type: a `StorageType`, its number or its name. None, INVALID and DRAM: all rows are in memory. HBM_DRAM
            and HBM_DRAM_SSDHASH: those in use are on the GPU as well. The table lies where TensorFlow puts it; on the
            CPU these two are DRAM and DRAM_SSDHASH.
        storage_path: the folder of the file, made if it is missing; for kinds that have one.
        storage_size: bytes of each level, 1 GiB where they are not said. Those of HBM are `gpu_bytes`, those of memory
            bound it, the index included, where a file lies below; the others are without effect: a file takes what its
            rows take.
        cache_strategy: without effect: a row leaves memory by one rule, which weighs recency and uses
            (docs/storage.md).
        layout: without effect.

    Raises:
        ValueError: `storage_type` is none of DeepRec's; `storage_path` is missing, or given without a type that has a
            file; `storage_size` is no list of sizes.

    Example:
        >>> StorageOption(StorageType.DRAM_SSDHASH, "/ssd/rows", [2**28]).storage
        Storage(memory_bytes=268435456, path='/ssd/rows')

    Source: `StorageOption` of DeepRec.
    """

    storage_type: StorageType | int | str | None = None
    storage_path: str | os.PathLike[str] | None = None
    storage_size: list[int] | tuple[int, ...] = (2**30,)
    cache_strategy: CacheStrategy | int = CacheStrategy.LFU
    layout: object = None

    def __post_init__(self) -> None:
        kind = self._kind
        if not isinstance(self.storage_size, (list, tuple)) or not self.storage_size:
            raise ValueError(f"`storage_size` must be a list of bytes. Received: {self.storage_size!r}.")
        for size in self.storage_size:
            whole_number("storage_size", size)
        object.__setattr__(self, "storage_size", tuple(map(int, self.storage_size)))
        if kind not in _WITHOUT_FILE and self.storage_path is None:
            raise ValueError(f"`storage_path` must be the folder of the rows of {kind.name}. Received: None.")
        if self.storage_type is None and self.storage_path is not None:
            raise ValueError(f"`storage_type` must be given with `storage_path`. Received: {self.storage_path!r}.")

    @property
    def _kind(self) -> StorageType:
        said = self.storage_type
        try:
            if isinstance(said, str):
                return StorageType[said]
            return StorageType(0 if said is None else said)
        except (KeyError, ValueError):
            names = ", ".join(StorageType.__members__)
            raise ValueError(f"`storage_type` must be None or one of {names}. Received: {said!r}.") from None

    @property
    def storage(self) -> Storage | None:
        """What a table takes; None: all rows are in memory."""
        kind = self._kind
        sizes = [*self.storage_size, 2**30, 2**30]
        of_gpu = {"gpu_bytes": sizes.pop(0)} if kind.name.startswith("HBM_") else {}
        if kind in _WITHOUT_FILE or self.storage_path is None:
            return Storage(**of_gpu) if of_gpu else None
        return Storage(memory_bytes=sizes[0], path=self.storage_path, **of_gpu)


@dataclasses.dataclass(frozen=True)
class InitializerOption:
    """Says what fresh rows hold, and what ids read that wait for a row.

    Args:
        initializer: of the table, in place of its `initializer`. None: that, or a truncated normal distribution.
        default_value_dim: how many rows the matrix has that variance-scaling initializers (Glorot, He, Lecun) take the
            table for. (DeepRec draws such a matrix once, and gives an id its row id % default_value_dim, so that ids
            share initial rows. Here each id has one of its own.)
        default_value_no_permission: what each element is that an id reads which waits for a row by a `filter_option`:
            `sok.Admission(unadmitted=...)`.

    Raises:
        ValueError: `default_value_dim` is no whole number, or below 1; `default_value_no_permission` is no number.

    Example:
        >>> option = EmbeddingVariableOption(filter_option=CounterFilter(3), init_option=InitializerOption())
        >>> option.policies["admission"]
        Admission(after=3, unadmitted=0.0)

    Source: `InitializerOption` of DeepRec.
    """

    initializer: Initializer | None = None
    default_value_dim: int = 4096
    default_value_no_permission: float = 0.0

    def __post_init__(self) -> None:
        whole_number("default_value_dim", self.default_value_dim)
        value = self.default_value_no_permission
        if not isinstance(value, numbers.Real) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(f"`default_value_no_permission` must be a number. Received: {value!r}.")


@dataclasses.dataclass(frozen=True)
class CheckpointOption:
    """Has a table begin with the rows of another checkpoint: a warm start.

    The table reads them when it is made, on all workers at once; what is restored later takes their place. A table of a
    v1 graph reads them once its session is there: by `sok.deeprec.WarmStartHook()` in a MonitoredTrainingSession, or
    `sok.deeprec.warm_start(session)`.

    Args:
        ckpt_to_load_from: the folder of a checkpoint by `sok.save`, which the table goes on from: rows come with what
            policies have counted, and the table's step is the one that they were saved at. None: see
            `init_data_source`.
        tensor_name_in_ckpt: what the table is called there. None: as here.
        always_load_from_specific_ckpt: for tables of a v1 graph: True reads the rows although the session has restored
            a checkpoint of its own, as far as that was before. False: only a table that no step has trained reads them.
        init_data_source: in place of `ckpt_to_load_from`: a folder as that, or a pair of it and the table's name there.
            The table begins anew, with rows as if `assign` had given them: at step 0, and policies have counted
            nothing. (DeepRec reads them from a feature store of its platform.)
        slots: False leaves the state of optimizers out: rows begin with fresh slots.

    Raises:
        ValueError: both folders; the table's name twice; an argument without a folder.
        TypeError: `init_data_source` is neither a folder nor such a pair.

    Example:
        >>> CheckpointOption("/models/old", "item").source
        ('/models/old', 'item')
        >>> CheckpointOption(init_data_source=("/models/old", "item"), slots=False).source
        ('/models/old', 'item')

    Source: `CheckpointOption` of DeepRec.
    """

    ckpt_to_load_from: str | os.PathLike[str] | None = None
    tensor_name_in_ckpt: str | None = None
    always_load_from_specific_ckpt: bool = False
    init_data_source: DataSource | None = None
    _: dataclasses.KW_ONLY
    slots: bool = True

    def __post_init__(self) -> None:
        if self.init_data_source is not None:
            _, name = _folder_and_name(self.init_data_source)
            if self.ckpt_to_load_from is not None:
                raise ValueError(f"Give `ckpt_to_load_from` or `init_data_source`, not both. Received: {self!r}.")
            if name is not None and self.tensor_name_in_ckpt is not None:
                raise ValueError(
                    f"Give the table's name by `tensor_name_in_ckpt` or in `init_data_source`, not twice. "
                    f"Received: {self!r}."
                )
        elif self.ckpt_to_load_from is None and (self.tensor_name_in_ckpt or self.always_load_from_specific_ckpt):
            raise ValueError(f"`ckpt_to_load_from` must say from which checkpoint. Received: None in {self!r}.")

    @property
    def source(self) -> tuple[str, str | None] | None:
        """The folder, and the table's name there, None: its own. None: there is no warm start."""
        if self.init_data_source is not None:
            folder, name = _folder_and_name(self.init_data_source)
            return folder, self.tensor_name_in_ckpt or name
        return None if self.ckpt_to_load_from is None else (os.fspath(self.ckpt_to_load_from), self.tensor_name_in_ckpt)


def _folder_and_name(source: object) -> tuple[str, str | None]:
    folder, name = source if isinstance(source, (tuple, list)) and len(source) == 2 else (source, None)
    if not isinstance(folder, (str, os.PathLike)) or not (name is None or isinstance(name, str)):
        raise TypeError(
            "`init_data_source` must be the folder of a checkpoint by sok.save, or a pair of it and the table's name "
            f"there. Received: {source!r}."
        )
    return os.fspath(folder), name


class EmbeddingVariableOption:
    """DeepRec's options of a table, in DeepRec's order.

    Args:
        ht_type, ht_partition_num: without effect.
        evict_option: None, a `GlobalStepEvict` or an `L2WeightEvict`.
        ckpt: None, or a `CheckpointOption`: the table begins with the rows of another checkpoint.
        filter_option: None, a `CounterFilter` or a `CBFFilter`.
        storage_option: None, or a `StorageOption`.
        init_option: None, or an `InitializerOption`.

    Raises:
        TypeError: an option is none of these; an unknown keyword.

    Example:
        >>> option = EmbeddingVariableOption(filter_option=CounterFilter(3), evict_option=GlobalStepEvict(80))
        >>> option.policies
        {'admission': Admission(after=3), 'eviction': Eviction(older_than=80, every=10), 'storage': None}

    Source: `EmbeddingVariableOption` of DeepRec.
    """

    def __init__(
        self,
        ht_type: str = "",
        ht_partition_num: int = 1000,
        evict_option: GlobalStepEvict | L2WeightEvict | None = None,
        ckpt: CheckpointOption | None = None,
        filter_option: CounterFilter | CBFFilter | None = None,
        storage_option: StorageOption | None = None,
        init_option: InitializerOption | None = None,
    ) -> None:
        kinds: tuple[tuple[str, Any, tuple[type, ...]], ...] = (
            ("evict_option", evict_option, (GlobalStepEvict, L2WeightEvict)),
            ("filter_option", filter_option, (CounterFilter, CBFFilter)),
            ("storage_option", storage_option, (StorageOption,)),
            ("ckpt", ckpt, (CheckpointOption,)),
            ("init_option", init_option, (InitializerOption,)),
        )
        for name, value, accepted in kinds:
            if value is not None and not isinstance(value, accepted):
                words = " or ".join(kind.__name__ for kind in accepted)
                raise TypeError(f"`{name}` must be None or a {words} of sok.deeprec. Received: {value!r}.")
        self.evict_option, self.filter_option, self.storage_option = evict_option, filter_option, storage_option
        self.ckpt, self.init_option = ckpt, init_option

    @property
    def policies(self) -> dict[str, Any]:
        """`admission`, `eviction` and `storage` as `sok.TableOptions` takes them."""
        admission = self.filter_option.admission if self.filter_option is not None else None
        if admission is not None and self.init_option is not None:
            unadmitted = float(self.init_option.default_value_no_permission)
            admission = dataclasses.replace(admission, unadmitted=unadmitted)
        return {
            "admission": admission,
            "eviction": self.evict_option and self.evict_option.eviction,
            "storage": self.storage_option and self.storage_option.storage,
        }
