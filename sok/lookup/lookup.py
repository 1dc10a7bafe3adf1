"""The one lookup: ids of some features to rows or pooled vectors, whoever owns them.

`begin` asks, `finish` gets: the ids of one part of a call, on one worker by a native op, on several by an exchange.
Between the two, tables may change. What everybody calls does one after the other, and tells the other workers of what
is refused before.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from sok.base import _ops, strategies
from sok.base.patching import Here
from sok.base.types import TensorLike, Training
from sok.lookup import exchange, host_ids, plain_variables, read_ahead, stages
from sok.lookup.feature import PADDED, ROWS, Csr, Feature, Group, by_device
from sok.lookup.inputs import to_csr
from sok.table import reading
from sok.table.table import EmbeddingVariable, look_up_with


@dataclasses.dataclass(frozen=True)
class Ticket:
    """A lookup that has begun: no table has changed, and on several workers its keys are with their owners.

    Example:
        >>> from sok.table.table import EmbeddingVariable
        >>> v = EmbeddingVariable(2, 10, initializer="ones", name="ticket")
        >>> ticket = begin([Feature(v, Csr(tf.constant([5, 6, 5], tf.int64)))], training=True)
        >>> int(v.size())
        0
        >>> finish(ticket)[0].shape, int(v.size())
        (TensorShape([3, 2]), 2)
    """

    features: tuple[Feature, ...]  # of tables; their ids are Csr
    group: Group
    insert: tf.Tensor  # bool: whether keys without a row get one
    sent: exchange.Sent | None  # None: this worker asks no other


_watching: list[Callable[[Sequence[Feature]], None]] = []


@contextlib.contextmanager
def shown_to(see: Callable[[Sequence[Feature]], None]) -> Iterator[None]:
    """Inside, `see` is called with the features of each lookup that begins, or is built."""
    _watching.append(see)
    try:
        yield
    finally:
        _watching.remove(see)


def begin(features: Sequence[Feature], training: Training, ahead: exchange.Ahead | None = None) -> Ticket:
    """Begins the lookup of features of tables whose ids are Csr, and changes no table.

    Collective: one, on several workers. What is wrong with ids is raised by `finish`. `ahead`: as what it travels, if
    other lookups are finished between the two.
    """
    for see in _watching:
        see(features)
    group, insert = Group.of(features), _as_bool(training)
    sent = None if group.is_alone else exchange.send_keys(group, features, insert, ahead)
    if sent is None and ahead is not None:
        read_ahead.of_features(group, features, ahead)
    return Ticket(tuple(features), group, insert, sent)


def _as_bool(training: Training) -> tf.Tensor:
    with tf.device("/CPU:0"):  # where kernels take it: from a GPU it would be waited for
        return tf.convert_to_tensor(training, tf.bool)


_note: Callable[[Sequence[Feature], tf.Tensor, exchange.Sent], None] | None = None


def note_with(
    note: Callable[[Sequence[Feature], tf.Tensor, exchange.Sent], None], note_gradient: Callable[[exchange.Sent], None]
) -> None:
    """Has both called where lookups of several workers are finished, and where their gradients are taken, or built."""
    global _note
    _note = note
    exchange.note_gradient = note_gradient


def finish(ticket: Ticket) -> list[tf.Tensor]:
    """For each feature of a ticket its vectors or rows, of the tables as they are now; makes rows of unseen keys.

    Collective: one, on several workers, and one for the gradient. Raises as `lookup_parts`.
    """
    for table in ticket.group.tables:
        reading.note(table, ticket.insert)
    if _note is not None and ticket.sent is not None and not ticket.group.is_on_servers:
        _note(ticket.features, ticket.insert, ticket.sent)
    found = _look_up_here(ticket) if ticket.sent is None else exchange.fetch_rows(ticket.sent, ticket.features)
    return [_shaped(f, output) for f, output in zip(ticket.features, found, strict=True)]


_meeting = Here()


def met_by(
    is_here: Callable[[], bool], meet: Callable[..., list[list[tf.Tensor]]]
) -> contextlib.AbstractContextManager[None]:
    """Inside, `lookup_parts` is `meet(parts, training, names)` wherever `is_here()`: see `sok.lookup.cutting`.

    What `meet` looks up itself is met by those around it.
    """
    return _meeting.inside((is_here, meet))


def lookup_parts(
    parts: Sequence[Sequence[Feature]], training: Training = True, names: Sequence[str] | None = None
) -> list[list[tf.Tensor]]:
    """Looks up the features of each part: those of tables by one op, or exchange, those of variables by another.

    Args:
        parts: any features, of tables and ordinary variables; several may share one.
        training: whether keys without a row get one; bool or bool scalar tensor, equal on all workers. Without, they
            read as their initial value.
        names: of the name scope of each part.

    Returns:
        For each feature what its combiner says: [S, D] pooled, where an empty segment gives zeros, [S, T, D] with
        `PADDED`, [..., D] with `ROWS`. In float32, of a variable in its dtype, or what the feature says.

    Raises:
        ValueError, TypeError: of what Python refuses; on the other workers as `told_to_peers` says.
        tf.errors.InvalidArgumentError: the input of a worker is not what it should be; on all workers.
        tf.errors.ResourceExhaustedError: a shard is full; on all workers.
        tf.errors.FailedPreconditionError: the workers are in different calls, or `training` differs; on all workers.

    Collective for each part with a table: 2 collectives, and 1 for the gradient. Differentiable in tables, variables
    and weights. If an output of a part contributes to the loss on one worker, one must on every worker: the gradient is
    a collective too.
    """
    for around, (is_here, meet) in reversed(list(enumerate(_meeting.values))):
        if is_here():
            with _meeting.back_to(around):
                found: list[list[tf.Tensor]] = meet(parts, training, names)
                return found
    scopes = [""] * len(parts)
    for i, name in enumerate(names or ()):
        with tf.name_scope(name) as scopes[i]:
            pass
    # What is wrong in any part is told where peers wait: at the first exchange.
    waiting = next(filter(None, ([f.table for f in part if f.is_of_table] for part in parts)), ())
    with exchange.told_to_peers(*waiting):
        if waiting:
            strategies.refuse(f"A lookup in table '{waiting[0].table_name}'", may_be_shared=True)
        asked = _each(lambda part: [_with_csr(f) for f in part], parts, scopes)
        return _found(with_report(asked), lambda part: begin_part(part, training), scopes)


def _with_csr(f: Feature) -> Feature:
    if f.is_of_table and f.table.on_servers is not None:
        f = dataclasses.replace(f, seen=None)  # it would be told on the chief, of what a worker looks up
    with host_ids.beside(f):
        return dataclasses.replace(f, ids=to_csr(f))


def begin_part(part: Sequence[Feature], training: Training, ahead: exchange.Ahead | None = None) -> Ticket | None:
    """`begin`, of those features of a part that are of tables; None: there are none."""
    of_tables = [f for f in part if f.is_of_table]
    if not of_tables:
        return None
    stage = stages.stage_of(of_tables, training) if ahead is None else None
    ticket = begin(of_tables, training, ahead if stage is None else stage.as_ahead)
    if stage is not None:
        stage.note(of_tables, ticket.sent)
    return ticket


def finish_parts(parts: Sequence[Sequence[Feature]], tickets: Sequence[Ticket | None]) -> list[list[tf.Tensor]]:
    """What `lookup_parts` gives for parts that `begin_part` has begun: their ids are Csr."""
    strategies.refuse("A lookup that was begun ahead")
    waiting = iter(tickets)
    return _found(parts, lambda _: next(waiting), [""] * len(parts))


def _found(
    parts: Sequence[Sequence[Feature]], ticket_of: Callable[[Sequence[Feature]], Ticket | None], scopes: Sequence[str]
) -> list[list[tf.Tensor]]:
    """Of each part what its tables give, one ticket after the other, and then its variables."""

    def of_part(part: Sequence[Feature]) -> list[tf.Tensor]:
        ticket = ticket_of(part)
        return [] if ticket is None else finish(ticket)

    of_tables = _each(of_part, parts, scopes)
    # Their gradients need ids alone. Where the lookup of a table raises, they are not to be updated either.
    done = [outputs[0] for outputs in of_tables if outputs]
    of_variables = _each(lambda part: _of_variables(part, done), parts, scopes)
    both = zip(parts, map(iter, of_tables), map(iter, of_variables), strict=True)
    return [[next(tables if f.is_of_table else variables) for f in part] for part, tables, variables in both]


def _each(
    body: Callable[[Sequence[Feature]], Any], parts: Sequence[Sequence[Feature]], scopes: Sequence[str]
) -> list[Any]:
    found = []
    for part, scope in zip(parts, scopes, strict=True):
        with tf.name_scope(scope) if scope else contextlib.nullcontext():
            found.append(body(part))
    return found


def look_up_apart(
    parts: Sequence[Sequence[Feature]], training: Training
) -> tuple[list[list[Feature]], list[list[tf.Tensor]]]:
    """The features with their ids as Csr, and what `lookup_parts` would return, in a graph that nobody runs.

    Not collective: it has the ops of one worker, and nothing counts it.
    """
    insert = _as_bool(training)
    asked = [[dataclasses.replace(f, ids=to_csr(dataclasses.replace(f, seen=None))) for f in part] for part in parts]
    found = []
    for part in asked:
        of_tables = [f for f in part if f.is_of_table]
        outputs = _look_up_here(Ticket(tuple(of_tables), Group.of(of_tables), insert, None)) if of_tables else []
        tables = iter([_shaped(f, output) for f, output in zip(of_tables, outputs, strict=True)])
        variables = iter(_of_variables(part, []))
        found.append([next(tables if f.is_of_table else variables) for f in part])
    return asked, found


def lookup_group(features: Sequence[Feature], training: Training = True) -> list[tf.Tensor]:
    """`lookup_parts` of one part."""
    return lookup_parts([features], training)[0]


def lookup_by_device(features: Sequence[Feature], training: Training = True) -> list[tf.Tensor]:
    """`lookup_group` of tables that may lie on several devices: a part, and so an exchange, for each of these."""
    places = by_device(features)
    parts = lookup_parts([[features[place] for place in of_part] for of_part in places], training)
    in_turn = [place for of_part in places for place in of_part]
    found = dict(zip(in_turn, [output for of_part in parts for output in of_part], strict=True))
    return [found[place] for place in range(len(features))]


def lookup_rows(
    variable: EmbeddingVariable,
    keys: TensorLike,
    training: Training = True,
    report: tf.Tensor | None = None,
    exact: bool = False,
) -> tf.Tensor:
    """The row of each key.

    Args:
        variable: the table.
        keys: [...] integers of the table's key dtype.
        training: as in `lookup_parts`.
        report: empty, or what `sok.lookup.inputs` found wrong with the input, to be raised on every rank.
        exact: whether rows travel as they are, whatever `variable.exchange_dtype` says.

    Returns:
        [..., D] float32. Collective; differentiable with respect to the variable.

    Raises:
        As `lookup_parts`.

    Example:
        >>> from sok.table.table import EmbeddingVariable, look_up_with
        >>> v = EmbeddingVariable(2, 10, initializer="ones", name="rows")
        >>> lookup_rows(v, tf.constant([[5], [6]], tf.int64)).shape
        TensorShape([2, 1, 2])
    """
    ids = keys if report is None else Csr(keys, report)
    return lookup_group([Feature(variable, ids, exact=exact)], training)[0]


def with_report(parts: list[list[Feature]]) -> list[list[Feature]]:
    """The features; on several workers, the first of a table says, too, what is wrong with ids of variables."""
    flat = [f for part in parts for f in part]
    variables = [f for f in flat if not f.is_of_table]
    first = next((f for f in flat if f.is_of_table), None)
    if not variables or first is None or Group.of([first]).is_alone:
        return parts
    splits = plain_variables.reported(first.ids.for_ops()[1], variables)
    told = dataclasses.replace(first, ids=dataclasses.replace(first.ids, row_splits=splits))
    return [[told if f is first else f for f in part] for part in parts]


def _of_variables(part: Sequence[Feature], after: list[tf.Tensor]) -> list[tf.Tensor]:
    features = [f for f in part if not f.is_of_table]
    if features and after:
        with tf.control_dependencies(after):
            features = [_with_keys(f, tf.identity(f.ids.keys)) for f in features]
    return [_shaped(f, found) for f, found in zip(features, plain_variables.lookup(features), strict=True)]


def _with_keys(f: Feature, keys: tf.Tensor) -> Feature:
    return dataclasses.replace(f, ids=dataclasses.replace(f.ids, keys=keys))


def _look_up_here(ticket: Ticket) -> list[tf.Tensor]:
    """What this worker finds in its own tables, which are whole: the one place where one worker judges its ids."""
    features = [_checked(f) for f in ticket.features]
    first = features[0]
    if len(features) == 1 and first.combiner == ROWS:
        dim = first.table.local_dim
        return [_ops.lib().sok_table_lookup(ticket.group.handles[0], first.ids.keys, ticket.insert, dim=dim)[0]]
    keys, row_splits, weights = map(list, zip(*(f.ids.for_ops() for f in features), strict=True))
    combiners = [f.pooling for f in features]
    for i, combiner in enumerate(combiners):
        if combiner == ROWS:  # from the same op: each key is a segment of its own
            combiners[i], row_splits[i] = "sum", tf.range(tf.size(keys[i], out_type=tf.int64) + 1)
    keys, row_splits, weights = host_ids.together(ticket.group.device, keys, row_splits, weights)
    with host_ids.at(ticket.group):
        return _ops.lib().sok_group_lookup(
            ticket.group.handles,
            keys,
            row_splits,
            weights,
            ticket.insert,
            table_of=ticket.group.table_of(features),
            dims=[table.local_dim for table in ticket.group.tables],
            combiners=combiners,
            capacities=[table.capacity for table in ticket.group.tables],
        )[0]


def _checked(f: Feature) -> Feature:
    """The feature, once this worker has found nothing wrong with it that the op for all of them would not see."""
    if f.ids.row_splits is None or not (f.ids.needs_check or f.max_nnz or f.max_feature_num):
        return f
    keys, row_splits, _ = f.ids.for_ops()
    checked = _ops.lib().sok_validate_csr(Group((f.table,)).handles[0], keys, row_splits, **f.limits)
    return _with_keys(f, checked if f.ids.keys.shape.rank == 1 else tf.reshape(checked, tf.shape(f.ids.keys)))


def _shaped(f: Feature, found: tf.Tensor) -> tf.Tensor:
    """What a feature gives, of its pooled vectors [S, D], or of one row for each of its keys."""
    dim = found.shape[-1]
    if f.combiner == PADDED:
        found = tf.RaggedTensor.from_row_splits(found, f.ids.row_splits, validate=False).to_tensor()
        found.set_shape([None, None, dim])
    elif f.combiner == ROWS and found.shape.rank == 2 and f.ids.keys.shape.rank != 1:
        found = tf.reshape(found, tf.concat([tf.shape(f.ids.keys), [dim]], 0))
        found.set_shape(f.ids.keys.shape.concatenate([dim]))
    return found if f.dtype is None else tf.cast(found, f.dtype)


look_up_with(lookup_rows)
