"""What happens to gradients before a rule runs: scaling, summing duplicates, clipping, finding what is not finite.

A gradient is that of the equivalent dense table, so duplicates are summed before anything is measured or cut, and the
norm of a table is the norm over all its shards.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import tensorflow as tf

from sok.base import _ops, masks
from sok.base.types import Gradient, Scalar
from sok.job import context
from sok.job.job import job_of
from sok.lookup import exchange, servers
from sok.lookup.gradients import are_distinct
from sok.table import on_servers
from sok.table import state as table_state
from sok.table.table import EmbeddingVariable

NONFINITE_POLICIES = ("allow", "skip", "raise")


@dataclasses.dataclass(frozen=True)
class TableGradient:
    """Gradient rows of the shard of one table."""

    variable: Any
    row_ids: tf.Tensor  # [N] int64
    values: tf.Tensor  # [N, D] float32
    distinct: bool = False  # it is known that no row id comes twice


@dataclasses.dataclass(frozen=True)
class Clipping:
    """At most one limit is set, as in Keras."""

    clipnorm: float | None = None
    clipvalue: float | None = None
    global_clipnorm: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        if len(given) > 1:
            raise ValueError(
                f"Only one of `clipnorm`, `clipvalue` and `global_clipnorm` may be given. Received: {given}."
            )
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"`{name}` must be a number above 0, or None. Received: {value!r}.")

    @property
    def needs_norms(self) -> bool:
        return self.clipnorm is not None or self.global_clipnorm is not None

    @property
    def is_active(self) -> bool:
        return self.needs_norms or self.clipvalue is not None


def from_slices(grad: Gradient, variable: EmbeddingVariable, scale: Scalar | None = None) -> TableGradient:
    """Checks and converts one gradient that a tape gave.

    Args:
        grad: `tf.IndexedSlices` with local row ids: values `[..., D]` of any float dtype, as many rows as ids.
        scale: a factor for the values, or None.

    Raises:
        TypeError: not IndexedSlices.
    """
    if not isinstance(grad, tf.IndexedSlices):
        raise TypeError(
            f"The gradient of embedding table '{variable.table_name}' must be tf.IndexedSlices with the row ids that "
            f"a lookup gave, as tape.gradient returns. Received: {grad!r}."
        )
    # float16 and bfloat16 come from layers that compute in them; the table and its optimizer are float32.
    values = tf.cast(grad.values, tf.float32)
    if values.shape.rank != 2 or values.shape[-1] != variable.local_dim:
        values = tf.reshape(values, [-1, variable.local_dim])
    if scale is not None:
        values = values * tf.cast(scale, tf.float32)
    row_ids = tf.cast(grad.indices, tf.int64)
    row_ids = row_ids if row_ids.shape.rank == 1 else tf.reshape(row_ids, [-1])
    return TableGradient(variable, row_ids, values, are_distinct(grad))


def with_penalty(g: TableGradient) -> TableGradient:
    """The gradient with that of the table's penalty, which each row of the step gets once, from its owner."""
    terms = g.variable.row_terms
    if terms is not None:
        on_servers.refuse(g.variable, "A regularizer or constraint", "Make the table without.")
    if terms is None or terms.regularizer is None or terms.is_exact:
        return g
    g = _only_rows(_sum_duplicates(g))
    return dataclasses.replace(g, values=g.values + terms.gradient(g.variable, g.row_ids))


def constrain(ready: list[TableGradient]) -> list[tf.Operation | None]:
    """Applies the constraints of tables to the rows that a step has changed. Returns the ops in a graph."""
    constrained = [
        _only_rows(_sum_duplicates(g)) for g in ready if g.variable.row_terms and g.variable.row_terms.constraint
    ]
    return [g.variable.row_terms.constrain(g.variable, g.row_ids) for g in constrained]


def _columns(ready: list[TableGradient]) -> tuple[list[tf.Tensor], ...]:
    """Handles, row ids and gradients, as ops of groups take them."""
    return [g.variable.handle for g in ready], [g.row_ids for g in ready], [g.values for g in ready]


def apply(
    ready: list[TableGradient], step: tf.Tensor, hyper: tf.Tensor, rule: str, slot_set: str, nonfinite: str
) -> tf.Operation | None:
    """Updates all tables in one op, or one for each device that has some. Returns it in a graph."""
    settings = {"rule": rule, "slot_set": slot_set, "nonfinite": nonfinite}
    if ready[0].variable.on_servers is not None:
        return _apply_on_servers(ready, step, hyper, settings)
    done = [
        _ops.lib().sok_group_apply(*_columns(some), step, hyper, distinct=[g.distinct for g in some], **settings)
        for some in _by_device(ready)
    ]
    return done[0] if len(done) == 1 or tf.executing_eagerly() else tf.group(*done)


def _by_device(ready: list[TableGradient]) -> list[list[TableGradient]]:
    return [[ready[i] for i in places] for places in table_state.by_device([g.variable for g in ready]).values()]


def _apply_on_servers(
    ready: list[TableGradient], step: tf.Tensor, hyper: tf.Tensor, settings: dict[str, str]
) -> tf.Operation | None:
    def on_one(handles: list[tf.Tensor], row_ids: list[tf.Tensor], sums: list[tf.Tensor]) -> Any:
        distinct = [True] * len(handles)
        return _ops.lib().sok_group_apply(handles, row_ids, sums, step, hyper, distinct=distinct, **settings)

    tables, (_, indices, values) = [g.variable for g in ready], _columns(ready)
    return servers.update(tables, indices, values, on_one, exchange.send_keys)


def tried(ready: list[TableGradient], step: tf.Tensor, hyper: tf.Tensor, rule: str, slot_set: str) -> tf.Tensor:
    """Why a rule of one's own must not be applied: it makes NaN or infinity of what is finite. As `agree` takes it."""
    said = [
        _ops.lib().sok_group_try(
            *_columns(some), step, hyper, rule=rule, slot_set=slot_set, distinct=[g.distinct for g in some]
        )
        for some in _by_device(ready)
    ]
    why = functools.reduce(lambda first, second: tf.where(tf.equal(first, ""), second, first), said)
    return tf.where(tf.equal(why, ""), why, tf.strings.join(["InvalidArgumentError: ", why]))


def prepare(
    gradients: list[TableGradient], clipping: Clipping, nonfinite: str, label: str
) -> tuple[list[TableGradient], list[Any]]:
    """Clips the gradients of one step. Collective if there are several ranks and a norm or 'raise' is asked for.

    Args:
        label: makes the collective's name; the same on all ranks.

    Returns:
        The gradients, and what must have run before the first of them is applied: with 'raise', ops that fail if any
        row of any table on any rank is not finite.
    """
    transport = _transport_of_several(gradients, clipping, nonfinite)
    # One table on one rank, or one server: the op that applies checks it all before it changes anything.
    is_apart = transport is not None or any(g.variable.on_servers and g.variable.world_size > 1 for g in gradients)
    needs_check = nonfinite == "raise" and (len(gradients) > 1 or is_apart)
    if not gradients or not (clipping.is_active or needs_check):
        return gradients, []
    summed = [_sum_duplicates(g) for g in gradients]
    finite = [tf.reduce_all(tf.math.is_finite(g.values), axis=1) for g in summed]

    squares, bad_ranks = None, None
    if clipping.needs_norms:
        # Rows that will be skipped or reported take no part: one NaN would otherwise spoil every row of the table.
        counted = summed if nonfinite == "allow" else [_only(g, rows) for g, rows in zip(summed, finite, strict=True)]
        # Each worker that has a copy of the rows has this sum.
        squares = tf.stack([tf.reduce_sum(tf.square(g.values)) / g.variable.num_copies for g in counted])
    if transport is not None:
        squares, bad_ranks = _exchange(transport, squares, finite, nonfinite, label)

    guards = []
    if needs_check:
        # After the exchange: a rank that fails before it would leave the others waiting.
        with tf.control_dependencies([] if bad_ranks is None else [bad_ranks]):
            guards = [_check_rows(g, rows) for g, rows in zip(summed, finite, strict=True)]
            if bad_ranks is not None:
                guards.append(_check_peers(summed, finite, bad_ranks))
    return _clip(summed, clipping, squares, nonfinite), guards


def _transport_of_several(gradients: list[TableGradient], clipping: Clipping, nonfinite: str) -> Any:
    """The transport if this step has something to tell other ranks, else None."""
    if not gradients or not (clipping.needs_norms or nonfinite == "raise"):
        return None
    job = job_of([g.variable for g in gradients])
    return job.transport if job.size > 1 else None


def _sum_duplicates(g: TableGradient) -> TableGradient:
    if g.distinct:
        return g
    if g.variable.on_servers is not None:  # keys, of which any number is one
        keys, place = tf.unique(g.row_ids)
        sums = tf.math.unsorted_segment_sum(g.values, place, tf.size(keys))
        return dataclasses.replace(g, row_ids=keys, values=sums, distinct=True)
    row_ids, sums = _ops.lib().sok_sum_duplicates(g.row_ids, g.values)
    return dataclasses.replace(g, row_ids=row_ids, values=sums, distinct=True)


def _only_rows(g: TableGradient) -> TableGradient:
    """Without what is of no row: behind the sums of a GPU's lookup there are zeros of row id -1."""
    return _where(g, g.row_ids >= 0)


def _where(g: TableGradient, is_kept: tf.Tensor) -> TableGradient:
    row_ids, values = masks.kept(is_kept, g.row_ids, g.values)
    return dataclasses.replace(g, row_ids=row_ids, values=values)


def _only(g: TableGradient, rows: tf.Tensor) -> TableGradient:
    return dataclasses.replace(g, values=tf.where(rows[:, None], g.values, tf.zeros_like(g.values)))


def _exchange(
    transport: Any, squares: tf.Tensor | None, finite: list[tf.Tensor], nonfinite: str, label: str
) -> tuple[tf.Tensor | None, tf.Tensor | None]:
    """Adds up squares over ranks, and tells who has bad rows of which table [R, T]; both in one collective."""
    told = [] if squares is None else [squares]
    if nonfinite == "raise":
        told.append(tf.stack([tf.cast(tf.reduce_any(~rows), tf.float32) for rows in finite]))
    name = context.unique_collective_name(f"sok/{label}/gradients")
    # A gather, not a sum: it says which rank is bad, and every rank adds in the same order.
    answers = transport.all_gather(tf.concat(told, 0)[None, :], name)
    num_tables = len(finite)
    if squares is not None:
        squares = tf.reduce_sum(answers[:, :num_tables], axis=0)
    return squares, answers[:, -num_tables:] > 0 if nonfinite == "raise" else None


def _check_rows(g: TableGradient, finite: tf.Tensor) -> Any:
    """Fails, naming table and key, if a row is not finite. Changes nothing: the op is given those rows only."""
    return apply([_where(g, ~finite)], 1, [0.0], "sgd", "", "raise")


def _check_peers(gradients: list[TableGradient], finite: list[tf.Tensor], bad_ranks: tf.Tensor) -> Any:
    """Fails if another rank has a bad row and this one does not, so that `_check_rows` has nothing to say here."""
    is_good_here = tf.reduce_all(tf.stack([tf.reduce_all(rows) for rows in finite]))
    names = [g.variable.table_name for g in gradients]
    return tf.debugging.Assert(
        tf.logical_not(tf.logical_and(is_good_here, tf.reduce_any(bad_ranks))),
        [
            "nonfinite_gradients='raise': another rank has a gradient that is not finite; its own message names the "
            f"key. Tables: {names}. Bad (rank, table number):",
            tf.where(bad_ranks),
        ],
        summarize=16,
    )


def _clip(
    gradients: list[TableGradient], clipping: Clipping, squares: tf.Tensor | None, nonfinite: str
) -> list[TableGradient]:
    if clipping.clipvalue is not None:
        return [dataclasses.replace(g, values=_clip_values(g.values, clipping.clipvalue, nonfinite)) for g in gradients]
    if clipping.clipnorm is not None:
        limit, norms = clipping.clipnorm, tf.unstack(tf.sqrt(squares))
    elif clipping.global_clipnorm is not None:
        limit, norms = clipping.global_clipnorm, [tf.sqrt(tf.reduce_sum(squares))] * len(gradients)
    else:
        return gradients
    return [
        dataclasses.replace(g, values=g.values * (limit / tf.maximum(norm, limit)))
        for g, norm in zip(gradients, norms, strict=True)
    ]


def _clip_values(values: tf.Tensor, limit: float, nonfinite: str) -> tf.Tensor:
    clipped = tf.clip_by_value(values, -limit, limit)
    # An infinity must still be one when the native op looks for it.
    return clipped if nonfinite == "allow" else tf.where(tf.math.is_finite(values), clipped, values)
