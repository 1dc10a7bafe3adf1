"""What `sok.ahead` begins for a batch: found once, begun by functions of it, finished in its step by a ticket."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import graph_ops, log
from sok.base.types import Training
from sok.job import context
from sok.job.job import job_of
from sok.lookup import exchange, lookup
from sok.lookup.asked import Asked, Scratch, ask, kind_of
from sok.lookup.feature import Csr, Feature, Group
from sok.lookup.inputs import to_csr
from sok.lookup.schedule import Schedule

LEFT = (
    "it has begun no such batch, and has come to the end of its program, to sok.shutdown(), or to where nobody holds "
    "this sok.ahead. All workers take as many batches."
)

_plans: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()  # tickets and their specs keep them
_named: set[str] = set()  # tables of lookups that are not made ahead, as far as that was said


class Plan:
    """What is looked up for a batch, and the functions that begin it."""

    has_batch = True

    def __init__(
        self, spec: object, lookup_fn: Callable[[Any], Any], number: int, schedule: Schedule | None = None
    ) -> None:
        self.number, self.name, self._spec = number, f"ahead{number}", spec
        self._schedule = schedule or Schedule()
        _plans[number] = self
        self._leaves = tf.nest.flatten(spec, expand_composites=True)
        scratch = ask(spec, self._leaves, lookup_fn)
        self.asked, self.nested = scratch.asked, scratch.nested
        if not any(f.is_of_table for one in [*self.asked, *self.nested] for f in one.features):
            raise ValueError("`lookup_fn` of sok.ahead looks up no table, so there is nothing to begin ahead.")
        self._ids = self._make_ids(scratch)
        self.ahead = [one for one in self.asked if not one.why_not]
        self._tell_what_stays()
        self.job = (
            job_of([f.table for one in self.ahead for f in one.features if f.is_of_table]) if self.ahead else None
        )
        self.is_alone = self.job is None or self.job.size == 1
        self.num_ids = len(self._ids.outputs)
        self._begun: list[list[lookup.Ticket | None]] = []  # by call and part, as `_send` is traced
        self._send, self.specs = self._sending(self._ids.outputs)
        self.is_told_unused = False
        self._over = ""  # no more is sent, for a worker has left: which
        if not self.is_alone:
            # Built now, so that they travel as the keys do, and at the end of the program nothing is built.
            self._left = self._refusal(LEFT)
            self._no_ids = [t for one in self.ahead for f in one.features for t in _tensors_of(_emptied(f.ids))]
            self._without_batch = copy.copy(self)
            self._without_batch._become_without_batch()

    def ids(self, batch: object) -> list[tf.Tensor]:
        """What the lookups of a batch need of it."""
        return self._ids(*map(tf.convert_to_tensor, tf.nest.flatten(batch, expand_composites=True)))

    def _become_without_batch(self) -> None:
        """A copy whose tickets have no ids, and so a type of their own."""
        self.has_batch, self.number = False, -1 - self.number
        _plans[self.number] = self
        self._send, self.specs = self._sending(self._no_ids)

    def send(self, number: int, ids: Sequence[tf.Tensor]) -> Ticket:
        """Begins the lookups of a batch.

        Raises:
            tf.errors.InvalidArgumentError: a worker has begun it with words in place of its keys.
        """
        return Ticket(self, [*ids, *self._sent(self._send, number, ids)[0]])

    def send_none(self, number: int) -> tuple[Any, Ticket] | None:
        """Begins a batch that this worker has not: one without samples, and its ticket; None: no worker has it.

        Raises as `send`.
        """
        if self.is_alone:
            return None
        sent, is_batch = self._sent(self._without_batch._send, number, self._no_ids)
        if not is_batch:
            return None
        batch = tf.nest.map_structure(_without_samples, self._spec)
        return batch, Ticket(self._without_batch, [*self._no_ids, *sent])

    def refuse(self, number: int, text: str) -> None:
        """Begins a batch with nothing but bad news."""
        self._tell(self._refusal, number, text)

    def leave(self) -> None:
        """In place of the next batch: tells the others that this worker begins no more, so that none waits for it."""
        self._tell(lambda _: self._left, 0, LEFT)

    def _tell(self, refusal: Callable[[str], Any], number: int, text: str) -> None:
        if not self.is_alone and not self._over:
            self._said(*refusal(text)(tf.constant(number, tf.int64))[:2])

    def _sent(self, send: Any, number: int, ids: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], bool]:
        """What was sent, and whether any worker has the batch."""
        if self._over:
            raise tf.errors.InvalidArgumentError(None, None, self._over)
        sent = send(tf.constant(number, tf.int64), *ids)
        if self.is_alone:
            return sent, True
        said = self._said(*sent[1:3])  # of the first lookup: who refuses, refuses all
        for rank, words in enumerate(said):
            text = exchange.refused_text(words)
            if text is not None:
                raise tf.errors.InvalidArgumentError(None, None, f"rank {rank}: {text}")
        return sent, not all(exchange.says_end(words) for words in said)

    def _said(self, words: tf.Tensor, splits: tf.Tensor) -> list[np.ndarray]:
        """What each worker has sent."""
        by_rank = np.split(words.numpy(), np.cumsum(splits.numpy())[:-1])
        for rank, one in enumerate(by_rank):
            if exchange.refused_text(one) == LEFT:
                self._over = f"rank {rank}: {LEFT}"
        return by_rank

    def begun(self, tensors: Sequence[tf.Tensor]) -> list[tuple[Asked, list[lookup.Ticket | None]]]:
        """The lookups that have begun, of the tensors of a ticket: their features, and a ticket of each part."""
        ids, sent = iter(tensors), iter(tensors[self.num_ids :])
        found = []
        for one, tickets in zip(self.ahead, self._begun, strict=True):
            parts = [[dataclasses.replace(f, ids=_filled(f.ids, ids)) for f in part] for part in one.parts]
            asked = dataclasses.replace(one, parts=parts)
            found.append((asked, [_with_tensors(t, one.insert, p, sent) for t, p in zip(tickets, parts, strict=True)]))
        return found

    def _make_ids(self, scratch: Scratch) -> Any:
        """A function of the tensors of a batch that gives all ids; says which lookups go ahead."""

        def ids(*leaves: tf.Tensor) -> list[tf.Tensor]:
            given = dict(zip((leaf.ref() for leaf in scratch.leaves), leaves, strict=True))
            # What is read of a resource may have changed when the batch has its turn.
            constants = {i.ref(): o for o, i in scratch.graph.captures if o.dtype not in (tf.resource, tf.variant)}
            copy = graph_ops.Copy(given | constants, scratch.graph)
            found: list[tf.Tensor] = []
            for one in self.asked:
                tensors = [tensor for f in one.features for tensor in _tensors_of(f.ids)]
                if not any(f.is_of_table for f in one.features):
                    one.why_not = "it is of ordinary variables"
                elif one.insert is None:
                    one.why_not = "its `training` is a tensor"
                elif not all(copy.is_pure(tensor) for tensor in tensors):
                    one.why_not = "its ids come from other rows, from a variable, or from another op with a state"
                else:
                    found += [tf.identity(copy.tensor(tensor)) for tensor in tensors]
            return found

        return tf.function(ids, autograph=False).get_concrete_function(
            *(tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in self._leaves)
        )

    def lookups(self, tensors: Sequence[tf.Tensor]) -> list[lookup.Ticket]:
        """Those of the tensors of a ticket that are to be finished, in order."""
        return [ticket for _, tickets in self.begun(tensors) for ticket in tickets if ticket is not None]

    def _sending(self, ids: Sequence[tf.Tensor]) -> tuple[Any, list[tf.TensorSpec]]:
        """A function that begins lookups with ids like these, and what a ticket of it has."""
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in ids]
        send = tf.function(self._begin, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int64), *specs)
        return send, [*specs, *(tf.TensorSpec(t.shape, t.dtype) for t in send.outputs)]

    def _begin(self, number: tf.Tensor, *ids: tf.Tensor) -> list[tf.Tensor]:
        given = iter(ids)
        self._begun = []
        for one in self.ahead:
            parts = [[dataclasses.replace(f, ids=_filled(f.ids, given)) for f in part] for part in one.parts]
            as_ahead = self._as_ahead(number)
            tickets = [lookup.begin_part(part, one.insert, as_ahead) for part in lookup.with_report(parts)]
            self._begun.append(tickets)
        return [t for tickets in self._begun for ticket in tickets if ticket is not None for t in _sent_of(ticket)]

    def _as_ahead(self, number: tf.Tensor) -> exchange.Ahead:
        rows, is_stale = self._schedule.sends_rows, self._schedule.stale is not None
        return exchange.Ahead(self.name, number, not self.has_batch, rows, is_stale, self._schedule.depth)

    def _refusal(self, text: str) -> Any:
        def refuse(number: tf.Tensor) -> list[tf.Tensor]:
            as_ahead = self._as_ahead(number)
            sent = [t.sent for tickets in self._begun for t in tickets if t is not None and t.sent is not None]
            return [said for one in sent for said in exchange.refuse_ahead(one, as_ahead, text)]

        return tf.function(refuse, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int64))

    def _tell_what_stays(self) -> None:
        if context.rank() != 0:
            return
        for one in self.nested:
            one.why_not = "it lies in a loop, a branch or a function of its own"
        for one in [*self.asked, *self.nested]:
            tables = [f.name for f in one.features if f.is_of_table]
            if one.why_not and tables and tables[0] not in _named:
                _named.add(tables[0])
                log.logger.warning(
                    "sok.ahead: the lookup of table '%s' is made in its step, not ahead of it: %s.",
                    tables[0],
                    one.why_not,
                )


def _tensors_of(ids: Csr) -> list[tf.Tensor]:
    return [tensor for tensor in (ids.keys, ids.row_splits, ids.weights) if tensor is not None]


def _filled(ids: Csr, tensors: Iterator[tf.Tensor]) -> Csr:
    """The same with the next of the tensors, as `_tensors_of` gives them."""
    names = ("keys", "row_splits", "weights")
    return dataclasses.replace(ids, **{n: next(tensors) for n in names if getattr(ids, n) is not None})


def _emptied(ids: Csr) -> Csr:
    """The same of no samples."""
    sizes = ids.keys.shape.as_list()
    sizes = [size or 0 for size in sizes] if None in sizes else [0, *sizes[1:]]
    return dataclasses.replace(
        ids,
        keys=tf.zeros(sizes, ids.keys.dtype),
        row_splits=None if ids.row_splits is None else tf.zeros([1], ids.row_splits.dtype),
        weights=None if ids.weights is None else tf.zeros(sizes, ids.weights.dtype),
    )


def _without_samples(spec: Any) -> Any:
    """What a batch has there that has no samples."""
    shape = spec.shape
    sizes = [0] if shape.rank is None else [0, *(size or 0 for size in shape[1:])] if shape.rank else []
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(tf.zeros([0, len(sizes)], tf.int64), tf.zeros([0], spec.dtype), sizes)
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros([0, *sizes[spec.ragged_rank + 1 :]], spec.dtype)
        return tf.RaggedTensor.from_nested_row_splits(values, [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank)
    return tf.zeros(sizes, spec.dtype)


_OF_ONE = ("words", "splits", "asked")
_OF_FEATURES = ("index", "row_splits", "scales")
_OF_ROWS = ("answers", "answer_splits", "home", "home_splits")


def _sent_of(ticket: lookup.Ticket) -> list[tf.Tensor]:
    if ticket.sent is None:
        return []
    lists = [tensor for name in _OF_FEATURES for tensor in getattr(ticket.sent, name)]
    lists += [getattr(ticket.sent.rows, name) for name in _OF_ROWS if ticket.sent.rows is not None]
    return [ticket.sent.number, *(getattr(ticket.sent, name) for name in _OF_ONE), *lists]


def _with_tensors(
    ticket: lookup.Ticket | None, insert: Any, part: Sequence[Feature], tensors: Iterator[tf.Tensor]
) -> lookup.Ticket | None:
    """A ticket of the same lookup, of another batch: `part` has its ids, the next of `tensors` what was sent."""
    if ticket is None:
        return None
    sent, is_insert = ticket.sent, tf.constant(insert)
    if sent is not None:
        new: dict[str, Any] = {name: next(tensors) for name in ("number", *_OF_ONE)}
        new |= {name: [next(tensors) for _ in getattr(sent, name)] for name in _OF_FEATURES}
        if sent.rows is not None:
            new["rows"] = dataclasses.replace(sent.rows, **{name: next(tensors) for name in _OF_ROWS})
        sent = dataclasses.replace(sent, insert=is_insert, **new)
    return lookup.Ticket(tuple(f for f in part if f.is_of_table), ticket.group, is_insert, sent)


class TicketSpec(tf.TypeSpec):
    """By which a `tf.function` knows that it need not be traced anew for another batch of one `sok.ahead`."""

    def __init__(self, number: int) -> None:
        self._plan = _plans[number]

    @property
    def value_type(self) -> type:
        return Ticket

    @property
    def _component_specs(self) -> list[tf.TensorSpec]:
        return self._plan.specs

    def _to_components(self, value: Ticket) -> list[tf.Tensor]:
        return value._tensors

    def _from_components(self, components: Sequence[tf.Tensor]) -> Ticket:
        return Ticket(self._plan, components)

    def _serialize(self) -> tuple[int]:
        return (self._plan.number,)


class Ticket(tf.__internal__.CompositeTensor):
    """The lookups of a batch that have begun: inside `with ticket:` they are finished. `sok.ahead` gives it."""

    def __init__(self, plan: Plan, tensors: Sequence[tf.Tensor]) -> None:
        self._plan, self._tensors = plan, list(tensors)
        self._entered: list[tuple[contextlib.AbstractContextManager[None], _Finishing]] = []

    @property
    def has_batch(self) -> bool:
        """False where this worker's data have ended, and others' have not: its batch has no samples."""
        return self._plan.has_batch

    @property
    def weight(self) -> tf.Tensor:
        """What to multiply the mean loss of this batch with, so that an average over all workers is one over batches.

        float32 []: the number of workers over that of those which have a batch here; 0.0 of one that has none.
        """
        if not self.has_batch:
            return tf.constant(0.0)
        workers = 1 if self._plan.job is None or self._plan.is_alone else self._plan.job.size
        return float(workers) / tf.cast(self.num_batches, tf.float32)

    @property
    def num_batches(self) -> tf.Tensor:
        """How many workers have a batch here, int32 []."""
        if self._plan.is_alone:
            return tf.constant(1)
        # Of the first lookup.
        _, words, splits, *_ = self._tensors[self._plan.num_ids :]
        return exchange.having_keys(words, splits)

    @property
    def _type_spec(self) -> TicketSpec:
        return TicketSpec(self._plan.number)

    def __enter__(self) -> Ticket:
        if not tf.executing_eagerly() and any(isinstance(t, tf.__internal__.EagerTensor) for t in self._tensors):
            raise RuntimeError(
                "A ticket of sok.ahead must be an argument of the tf.function in which it is used: what a function "
                "closes over stays as it was when the function was traced."
            )
        finishing = _Finishing(self._plan, self._plan.begun(self._tensors))
        meeting = lookup.met_by(finishing.is_here, finishing.meet)
        meeting.__enter__()
        self._entered.append((meeting, finishing))
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        meeting, finishing = self._entered.pop()
        meeting.__exit__(None, None, None)  # it has no part in errors
        if kind is None:
            finishing.tell_unused()


def finishing(ticket: Ticket, finish: Callable[[list[lookup.Ticket]], Any], eagerly: bool) -> Callable[[Ticket], Any]:
    """A function of tickets of the same `sok.ahead`: `finish` of what has begun; a `tf.function` if not eagerly."""
    plan = ticket._plan

    def call(*tensors: tf.Tensor) -> Any:
        return finish(plan.lookups(tensors))

    of_any_size = [tf.TensorSpec([None] * spec.shape.rank, spec.dtype) for spec in plan.specs]
    do = call if eagerly else tf.function(call, autograph=False, input_signature=of_any_size)
    return lambda ticket: do(*ticket._tensors)


@dataclasses.dataclass
class _Entry:
    """One call of `lookup_parts` that has begun."""

    asked: Asked
    tickets: list[lookup.Ticket | None]
    found: list[tf.Tensor] | None = None  # by feature, once it is finished


_Begun = tuple[_Entry, int]  # and the number of one of its features


class _Finishing:
    """Meets the lookups inside a `with ticket:`."""

    def __init__(self, plan: Plan, begun: Sequence[tuple[Asked, list[lookup.Ticket | None]]]) -> None:
        self._plan, self._at = plan, 0
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        entries = iter([_Entry(*one) for one in begun])
        # In the order of `lookup_fn`: features that have begun; between them, the kinds of a call that has not.
        self._places: list[_Begun | list[Any]] = []
        for one in plan.asked:
            if not one.why_not:
                entry = next(entries)
                self._places += [(entry, i) for i in range(len(one.features))]
            elif self._graph is not None:
                self._places.append(one.kinds)
        # Executing eagerly, what is looked up in loops and branches is met, too, in no order known before.
        self._stay = [one.kinds for one in [*plan.asked, *plan.nested] if one.why_not] if self._graph is None else []

    def is_here(self) -> bool:
        if tf.executing_eagerly():
            return self._graph is None
        return tf.compat.v1.get_default_graph() is self._graph

    def meet(
        self, parts: Sequence[Sequence[Feature]], training: Training, names: Sequence[str] | None
    ) -> list[list[tf.Tensor]]:
        asked = [f for part in parts for f in part]
        kinds = [kind_of(f) for f in asked]
        places = self._places[self._at : self._at + len(kinds)]
        begun = [place for place in places if isinstance(place, tuple)]
        is_begun = [entry.asked.kinds[i] for entry, i in begun] == kinds
        if is_begun and asked and (self._graph is not None or _are_ids_of(begun, asked)):
            self._at += len(begun)
            for part in parts:
                if tables := [f for f in part if f.is_of_table]:
                    exchange.note_finished(Group.of(tables))
            found = iter(_finished(begun, asked, training))
            return [[next(found) for _ in part] for part in parts]
        if places and places[0] == kinds:
            self._at += 1
        elif kinds in self._stay or not asked:
            pass
        else:
            raise RuntimeError(
                "Inside `with ticket:` the lookups of `lookup_fn` are made, in its order and of the ticket's own batch."
                f" Received: one in {' and '.join(f.source for f in asked)}, "
                f"{'with other ids' if is_begun else 'which is not the next'}."
            )
        return lookup.lookup_parts(parts, training, names)

    def tell_unused(self) -> None:
        """Says once that a step makes no use of what has begun."""
        if self._at == 0 and self._plan.ahead and not self._plan.is_told_unused and context.rank() == 0:
            self._plan.is_told_unused = True
            log.logger.warning(
                "sok.ahead: nothing inside `with ticket:` looked up what has begun, so it was sent in vain. Where the "
                "lookups are in a tf.function, give it the ticket, and enter it there."
            )


def _are_ids_of(begun: Sequence[_Begun], asked: Sequence[Feature]) -> bool:
    for (entry, i), f in zip(begun, asked, strict=True):
        known, given = entry.asked.features[i].ids, to_csr(dataclasses.replace(f, seen=None))
        for one, other in ((known.keys, given.keys), (known.row_splits, given.row_splits)):
            if one is not None and (other is None or not np.array_equal(one, other)):
                return False
    return True


def _finished(begun: Sequence[_Begun], asked: Sequence[Feature], training: Any) -> list[tf.Tensor]:
    def in_step(entry: _Entry, i: int, f: Feature) -> Csr | None:
        # A graph that nobody runs had no counts to keep, and weights may want their gradient.
        return to_csr(f) if f.seen is not None or entry.asked.features[i].ids.weights is not None else None

    given = [in_step(*one, f) for one, f in zip(begun, asked, strict=True)]
    insert, found = tf.get_static_value(tf.convert_to_tensor(training, tf.bool)), []
    for place, (entry, i) in enumerate(begun):
        if entry.found is None:
            if insert != entry.asked.insert:
                raise RuntimeError(
                    "Inside `with ticket:` a lookup must have the `training` that it has in `lookup_fn`, "
                    f"{entry.asked.insert}. Received: {training!r}."
                )
            entry.found = _finish(entry, given[place : place + len(entry.asked.features)])
        found.append(entry.found[i])
    return found


def _finish(entry: _Entry, given: Sequence[Csr | None]) -> list[tf.Tensor]:
    weights = iter([None if csr is None else csr.weights for csr in given])

    def with_weights(f: Feature) -> Feature:
        of_step = next(weights, None)
        return f if of_step is None else dataclasses.replace(f, ids=dataclasses.replace(f.ids, weights=of_step))

    parts = [[with_weights(f) for f in part] for part in entry.asked.parts]
    tickets = []
    for part, ticket in zip(parts, entry.tickets, strict=True):
        of_tables = tuple(f for f in part if f.is_of_table)
        tickets.append(None if ticket is None else dataclasses.replace(ticket, features=of_tables))
    return [one for found in lookup.finish_parts(parts, tickets) for one in found]
