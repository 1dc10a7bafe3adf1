"""Rows of a table together with what optimizers keep of them, moved as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.python.framework import cpp_shape_inference_pb2
from tensorflow.python.ops import resource_variable_ops

from sok.base import _ops
from sok.base.types import TensorLike
from sok.job import context
from sok.job.job import job_of
from sok.table import exchanged, on_servers, reading
from sok.table.on_servers import over_shards
from sok.table.rules import RULES, find

if TYPE_CHECKING:
    from sok.table.table import EmbeddingVariable


@dataclasses.dataclass(frozen=True)
class SlotSet:
    """What one optimizer keeps in a table."""

    name: str  # the optimizer's `slot_set`
    rule: str  # one of RULES, or that of a stock optimizer: a name that lists its slots
    num_slots: int
    calls: int  # updates so far; of the rule 'adam' only


@over_shards(on_servers.total)
def restore_rows(
    variable: EmbeddingVariable,
    keys: TensorLike,
    values: TensorLike,
    slots: TensorLike | None = None,
    *,
    slot_set: str | None = None,
    rule: str | None = None,
    slot_init: float | Iterable[float] = 0.0,
    _second: tf.Tensor | None = None,
) -> tf.Tensor:
    """Stores rows with the slots of one optimizer, making rows and slot set if they are missing.

    For rows with the slots of several optimizers call it once for each. All or none.

    Args:
        variable: an `EmbeddingVariable`.
        keys: [n] of the table's key dtype. Keys that other workers own are ignored, so all workers may make the same
            call with all keys. Of equal keys the last one counts.
        values: [n, D] float32, as they stand after every step so far.
        slots: [n, K * D + S] float32, slot after slot, K of them vectors and then S of them scalars: Adagrad's
            accumulator (K = 1), Adam's and LazyAdam's m, v (K = 2), RowWiseAdagrad's accumulator (S = 1).
            None: rows only; slots of rows that exist stay.
        slot_set: the name of the optimizer's slots: its `slot_set`. To be given with `slots`.
        rule: one of `sok.table.rules.RULES`, as 'adagrad', or the name of another with its slots, as 'signum(m;count)'.
            To be given with `slots`.
        slot_init: what slots of a fresh row hold (Adagrad's initial accumulator), if the set is made here: a number, or
            one for each slot.

    Returns:
        How many rows of this worker's shard were made: int64 scalar; in a v1 graph to be run. Not collective.

    Raises:
        ValueError: some of `slots`, `slot_set` and `rule` are given and others not; `rule` is none of these.
        tf.errors.ResourceExhaustedError: the shard has no room; nothing was stored.
        tf.errors.InvalidArgumentError: shapes do not fit, a key is outside an identity table, or the slot set belongs
            to another rule.

    Example:
        >>> import sok
        >>> table = sok.EmbeddingVariable(dim=2, capacity=10, name="restored")
        >>> int(table.restore_rows([7], [[1.0, 2.0]], [[0.5, 0.25]], slot_set="Adagrad", rule="adagrad"))
        1
        >>> table.slots("Adagrad")[1].numpy().tolist()
        [[0.5, 0.25]]
    """
    given = [what is not None for what in (slots, slot_set, rule)]
    if any(given) and not all(given):
        raise ValueError(
            "`slots`, `slot_set` and `rule` must be given together, or none of them. "
            f"Received: slot_set={slot_set!r}, rule={rule!r}, slots={'given' if given[0] else None}."
        )
    if rule is not None and rule not in RULES and "(" not in rule:
        raise ValueError(
            f"`rule` must be one of {', '.join(map(repr, RULES))}, or list slots: 'signum(m)'. Received: {rule!r}."
        )
    starts = list(slot_init) if isinstance(slot_init, Iterable) else [slot_init]
    keys, values = variable._as_keys(keys), tf.convert_to_tensor(values, tf.float32)
    slots = tf.zeros([tf.size(keys), 0]) if slots is None else tf.convert_to_tensor(slots, tf.float32)
    if variable.placement.cuts_rows and rule is not None:
        widths = find(rule).slot_widths(variable.dim)
        parts = tf.split(tf.ensure_shape(slots, [None, sum(widths)]), widths, axis=1)
        slots = tf.concat(
            [variable.own_columns(p) if w == variable.dim else p for p, w in zip(parts, widths, strict=True)], 1
        )
    return _ops.lib().sok_table_restore(
        variable.handle if _second is None else _second,
        keys,
        variable.own_columns(values),
        slots,
        slot_set=slot_set or "",
        rule=rule or "",
        slot_inits=starts or [0.0],
    )


@over_shards(on_servers.any_of)
def slot_sets(variable: EmbeddingVariable) -> list[SlotSet]:
    """The slot sets that optimizers have made in this worker's shard, in the order they came. Eager only.

    Example:
        >>> import sok
        >>> slot_sets(sok.EmbeddingVariable(dim=2, capacity=10, name="untrained"))
        []
    """
    return as_slot_sets([column.numpy() for column in _ops.lib().sok_table_slot_sets(variable.handle)])


def as_slot_sets(columns: Iterable[Any]) -> list[SlotSet]:
    """What the op gives, as arrays: names, rules, numbers of slots and of calls."""
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [SlotSet(name.decode(), rule.decode(), num_slots, calls) for name, rule, num_slots, calls in rows]


def second_table(variable: EmbeddingVariable) -> tf.Tensor:
    """The handle of a new, empty table with the same configuration, on the same device; it lives as long as somebody
    holds the handle."""
    with tf.device(variable.handle.device):  # rows do not swap from device to device
        return _ops.lib().sok_table_handle(anonymous=True, **variable._attributes)


def swap(variable: EmbeddingVariable, other: tf.Tensor) -> tf.Operation | None:
    """Exchanges keys, rows and slots with those of a `second_table`, at once.

    Gradients of lookups from before are ignored by both from then on.
    """
    return _ops.lib().sok_table_swap(variable.handle, other)


def by_device(tables: Sequence[EmbeddingVariable]) -> dict[str, list[int]]:
    """The places of the tables that lie on each device: one op takes tables of one device.

    Example:
        >>> import sok
        >>> a, b = (sok.EmbeddingVariable(dim=2, capacity=10, name=f"by_device_{n}") for n in "ab")
        >>> list(by_device([a, b, a]).values())
        [[0, 1, 2]]
    """
    found: dict[str, list[int]] = {}
    for place, table in enumerate(tables):
        device = "" if table.on_servers is not None else table.handle.device
        found.setdefault(device or "", []).append(place)
    return found


def count_step(tables: Iterable[EmbeddingVariable]) -> tf.Operation | None:
    """Adds 1 to the `step` of each table: an update call has been made, and rows leave that have to. Returns the op in
    a graph."""
    tables = list(tables)
    if not tables:
        return None
    if tables[0].on_servers is not None:
        return on_servers.done([_count_on(device, views) for device, views in on_servers.shards(tables)])
    told = [table for table in tables if table.evicted_to is not None]
    with tf.control_dependencies(
        [_take_evicted(table)[0] for table in told if table._in_graph_mode]
    ):  # keeps from here
        of_devices = [
            _ops.lib().sok_tables_count_step([tables[place].handle for place in places])
            for places in by_device(tables).values()
        ]
        counted = of_devices[0] if len(of_devices) == 1 or tf.executing_eagerly() else tf.group(*of_devices)
    if not told:
        return counted
    with tf.control_dependencies([] if counted is None else [counted]):
        handed = [_hand_over(table) for table in told]
    return None if tf.executing_eagerly() else tf.group(counted, *handed)


def _count_on(device: str, tables: list[EmbeddingVariable]) -> tf.Operation | None:
    with on_servers.on(device):
        return _ops.lib().sok_tables_count_step([table.handle for table in tables])


def assign_columns(table: EmbeddingVariable, keys: TensorLike, values: TensorLike, first_column: int) -> None:
    """`assign` of some columns of rows, from `first_column` on. The others of a new row start as ever. Eager.

    Args:
        keys: [n], of which none comes twice.
        values: [n, k] float32.
    """
    keys, values = table._as_keys(keys), tf.convert_to_tensor(values, tf.float32)
    own = range(table._attributes["first_column"], table._attributes["first_column"] + table.local_dim)
    first, stop = max(first_column, own.start), min(first_column + values.shape[1], own.stop)
    if first >= stop:
        return
    values = values[:, first - first_column : stop - first_column]
    if stop - first < len(own):
        # What other workers own comes from a lookup as an error.
        is_mine = table.placement.holds_keys(keys.numpy(), table.rank, table.world_size)
        keys, values = keys[is_mine], values[is_mine]
        rows, _ = _ops.lib().sok_table_lookup(table.handle, keys, False, dim=table.local_dim)
        values = tf.concat([rows[:, : first - own.start], values, rows[:, stop - own.start :]], 1)
    reading.note_written(table)
    _ops.lib().sok_table_assign(table.handle, keys, values)


def _take_evicted(variable: EmbeddingVariable, keeps: bool = True) -> tuple[tf.Tensor, tf.Tensor]:
    return _ops.lib().sok_table_take_evicted(
        variable.handle, key_dtype=variable.key_dtype, dim=variable.local_dim, keeps=keeps
    )


def watch_evicted(variable: EmbeddingVariable, keeps: bool) -> None:
    """From now on what leaves is kept for `_hand_over`, or not any more. In a v1 graph the first step says so."""
    if not variable._in_graph_mode:
        _take_evicted(variable, keeps)


def _hand_over(variable: EmbeddingVariable) -> tf.Operation | None:
    """Tells what has left since the last call."""

    def tell(keys: tf.Tensor, rows: tf.Tensor) -> None:
        if len(keys) and variable.evicted_to is not None:
            variable.evicted_to(keys.numpy(), rows.numpy())

    keys, rows = _take_evicted(variable)
    if tf.executing_eagerly():
        tell(keys, rows)
        return None
    return tf.py_function(tell, [keys, rows], [])


@over_shards(on_servers.done)
def set_step(variable: EmbeddingVariable, step: TensorLike) -> tf.Operation | None:
    """Says how many update calls the rows have seen that a table holds now. Returns the op in a graph."""
    return _ops.lib().sok_table_set_step(variable.handle, tf.cast(step, tf.int64))


def set_handle_data(handle: tf.Tensor, dim: int, graph_mode: bool) -> None:
    """Tells TensorFlow what is behind the handle of a table: [0, dim] float32.

    Without it gradients through control flow are silently None. Zero rows make any dense use small and loud.
    """
    data = cpp_shape_inference_pb2.CppShapeInferenceResult.HandleData(is_set=True)
    data.shape_and_type.append(
        cpp_shape_inference_pb2.CppShapeInferenceResult.HandleShapeAndType(
            shape=tf.TensorShape([0, dim]).as_proto(), dtype=types_pb2.DT_FLOAT
        )
    )
    resource_variable_ops._set_handle_shapes_and_types(handle, data, graph_mode)


_STATS = ("rows", "candidates", "made", "refused", "evicted")
_DETAILS = ("collisions", "bytes_in_memory")  # of which native code knows
_EXCHANGED = "bytes_exchanged"
_STORAGE = (
    *("rows_in_memory", "cache_rows", "hits", "misses", "read_ahead", "bytes_read", "bytes_written"),
    *("bytes_in_file", "bytes_in_memory"),
)
_ON_GPU = ("gpu_rows", "gpu_cache_rows", "gpu_hits", "gpu_misses", "bytes_on_gpu")


@over_shards(on_servers.added)
def local_stats(variable: EmbeddingVariable) -> dict[str, int]:
    """What `stats` sums, of this worker's shard. Eager."""
    return _named(variable, _counts(variable))


@over_shards(on_servers.added)
def local_details(variable: EmbeddingVariable) -> dict[str, int]:
    """What `stats(details=True)` sums beside, of this worker's shard. Eager."""
    return dict(zip((*_DETAILS, _EXCHANGED), _details(variable).numpy().tolist(), strict=True))


@over_shards(on_servers.added)
def stats(variable: EmbeddingVariable, details: bool = False) -> dict[str, int]:
    """See `EmbeddingVariable.stats`."""
    mine = _counts(variable)
    if not variable.counts_for_all:
        mine = tf.zeros_like(mine)
    if details:  # memory is taken by each copy, and by each piece of rows
        mine = tf.concat([mine, _details(variable)], 0)
    name = context.unique_collective_name(f"sok/{variable.table_name}/stats")
    given = [mine]
    summed = job_of([variable]).transport.grouped_all_reduce(given, name, average=False)[0]
    return _named(variable, summed, (*_DETAILS, _EXCHANGED) if details else ())


def _lib_stats(variable: EmbeddingVariable) -> tf.Tensor:
    return _ops.lib().sok_table_stats(variable.handle)


def _details(variable: EmbeddingVariable) -> tf.Tensor:
    return tf.concat([_lib_stats(variable)[len(_STATS) :], [exchanged.local_bytes(variable)]], 0)


def _counts(variable: EmbeddingVariable) -> tf.Tensor:
    counts = _lib_stats(variable)[: len(_STATS)]
    names = _tiers(variable)
    if not names:
        return counts
    of_tiers = _ops.lib().sok_table_storage(variable.handle)
    return tf.concat([counts, tf.gather(of_tiers, [(_STORAGE + _ON_GPU).index(name) for name in names])], 0)


def _tiers(variable: EmbeddingVariable) -> tuple[str, ...]:
    """What is counted of where rows lie."""
    options, device = variable.options, "" if variable.on_servers else variable.handle.device or ""
    is_tier = "GPU" in device and (options.storage is not None or options.keeps_history)
    return (_STORAGE if options.has_file else ()) + (_ON_GPU if is_tier else ())


def _named(variable: EmbeddingVariable, counts: tf.Tensor, more: tuple[str, ...] = ()) -> dict[str, int]:
    return dict(zip(_STATS + _tiers(variable) + more, counts.numpy().tolist(), strict=True))


def history(variable: EmbeddingVariable, keys: TensorLike) -> tuple[tf.Tensor, tf.Tensor]:
    """See `EmbeddingVariable.history`."""
    return _ops.lib().sok_table_history(variable.handle, variable._as_keys(keys))
