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
from sok.lookup import exchange, lookup, messages
from sok.lookup.asked import Asked, Scratch, ask, kind_of
from sok.lookup.feature import Csr, Feature, Group
from sok.lookup.inputs import to_csr
from sok.lookup.no_samples import emptied, without_samples
from sok.lookup.said import LEFT, Said
from sok.lookup.schedule import Schedule

_plans: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()  # tickets and their specs keep them
_HEADS = 2  # of a ticket's tensors, on several workers: what they have said, words and splits
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
        # Each tensor of a ticket costs the call of a tf.function as much; in a parcel they are one. Not of tables on a
        # GPU: what is inside would have to be on one device.
        devices = [f.table.handle.device or "" for one in self.ahead for f in one.features if f.is_of_table]
        self._is_parcel = bool(devices) and not any("GPU" in device for device in devices)
        self._begun: list[list[lookup.Ticket | None]] = []  # by call and part, as `_send` is traced
        leaves = [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in self._leaves]
        self._send, self.specs, self.inside = self._sending(self._ids, leaves)
        self.is_told_unused = False
        self._said = Said()
        if not self.is_alone:
            # Built now, so that they travel as the keys do, and at the end of the program nothing is built.
            self._left = self._refusal(LEFT)
            self._no_ids = [t for one in self.ahead for f in one.features for t in _tensors_of(emptied(f.ids))]
            self._without_batch = copy.copy(self)
            self._without_batch._become_without_batch()

    def _become_without_batch(self) -> None:
        """A copy whose tickets have no ids, and so a type of their own."""
        self.has_batch, self.number = False, -1 - self.number
        _plans[self.number] = self
        self._send, self.specs, self.inside = self._sending(lambda: self._no_ids, [])

    def send(self, number: int, batch: object) -> list[tf.Tensor]:
        """Calculates the ids of a batch, and begins its lookups."""
        self._said.check_open()
        leaves = tf.nest.flatten(batch, expand_composites=True)
        found: list[tf.Tensor] = self._send(tf.constant(number, tf.int64), *map(tf.convert_to_tensor, leaves))
        return found

    def ticket(self, sent: list[tf.Tensor]) -> Ticket:
        """Of what `send` gave.

        Raises:
            tf.errors.InvalidArgumentError: a worker has begun the batch with words in place of its keys.
        """
        if not self.is_alone:
            self._said.is_batch(*(tensor.numpy() for tensor in sent[:_HEADS]))
        return Ticket(self, sent)

    def send_none(self, number: int) -> tuple[Any, Ticket] | None:
        """Begins a batch that this worker has not: one without samples, and its ticket; None: no worker has it.

        Raises as `ticket`.
        """
        if self.is_alone:
            return None
        self._said.check_open()
        sent = self._without_batch._send(tf.constant(number, tf.int64))
        if not self._said.is_batch(*(tensor.numpy() for tensor in sent[:_HEADS])):
            return None
        return tf.nest.map_structure(without_samples, self._spec), Ticket(self._without_batch, sent)

    def refuse(self, number: int, text: str) -> None:
        """Begins a batch with nothing but bad news."""
        self._tell(self._refusal, number, text)

    def leave(self) -> None:
        """In place of the next batch: tells the others that this worker begins no more, so that none waits for it."""
        self._tell(lambda _: self._left, 0, LEFT)

    def _tell(self, refusal: Callable[[str], Any], number: int, text: str) -> None:
        if not self.is_alone and not self._said.over:
            words, splits, *_ = refusal(text)(tf.constant(number, tf.int64))
            self._said.hear(words.numpy(), splits.numpy())

    def specs_of_all(self) -> tuple[Any, list[tf.TensorSpec], list[tf.TensorSpec]]:
        """Of batches, of tickets, and of what is inside these, be they with samples or without."""
        if self.is_alone:
            return self._spec, self.specs, self.inside
        joined = tf.nest.map_structure(lambda spec: tf.type_spec_from_value(without_samples(spec)), self._spec)
        other = self._without_batch
        both = ((self._spec, joined), (self.specs, other.specs), (self.inside, other.inside))
        return tuple(tf.nest.map_structure(lambda a, b: a.most_specific_common_supertype([b]), *of) for of in both)

    def begun(
        self, tensors: Sequence[tf.Tensor], inside: Sequence[tf.TensorSpec]
    ) -> list[tuple[Asked, list[lookup.Ticket | None]]]:
        """The lookups that have begun, of the tensors of a ticket: their features, and a ticket of each part.

        inside: what the ticket has inside.
        """
        tensors = tensors[0 if self.is_alone else _HEADS :]
        if self._is_parcel:
            kinds = {"output_types": [s.dtype for s in inside], "output_shapes": [s.shape for s in inside]}
            tensors = tf.raw_ops.OptionalGetValue(optional=tensors[0], **kinds)
        ids, sent = iter(tensors), iter(tensors[len(self._ids.outputs) :])
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

    def _sending(
        self, ids_of: Callable[..., Sequence[tf.Tensor]], leaves: Sequence[tf.TensorSpec]
    ) -> tuple[Any, list[tf.TensorSpec], list[tf.TensorSpec]]:
        """A function that begins the lookups of a batch, the specs of its tickets, and of what these have inside."""
        inside: list[tf.TensorSpec] = []

        def send(number: tf.Tensor, *leaves: tf.Tensor) -> list[tf.Tensor]:
            ids = ids_of(*leaves)
            sent = self._begin(number, *ids)
            inside[:] = [tf.TensorSpec(t.shape, t.dtype) for t in [*ids, *sent]]
            # Of the first lookup: who refuses, refuses all.
            heads = [] if self.is_alone else sent[1 : 1 + _HEADS]
            if self._is_parcel:
                return [*heads, tf.raw_ops.OptionalFromValue(components=[*ids, *sent])]
            return [*heads, *ids, *sent]

        made = tf.function(send, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int64), *leaves)
        return made, [tf.TensorSpec(t.shape, t.dtype) for t in made.outputs], inside

    def _begin(self, number: tf.Tensor, *ids: tf.Tensor) -> list[tf.Tensor]:
        given = iter(ids)
        self._begun = []
        for one in self.ahead:
            parts = [[dataclasses.replace(f, ids=_filled(f.ids, given)) for f in part] for part in one.parts]
            as_ahead = self._as_ahead(number)
            tickets = [lookup.begin_part(part, one.insert, as_ahead) for part in lookup.with_report(parts)]
            self._begun.append(tickets)
        begun = [ticket.sent for tickets in self._begun for ticket in tickets if ticket is not None]
        return [tensor for sent in begun if sent is not None for tensor in sent_tensors(sent)]

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


_OF_ONE = ("words", "splits", "asked")
_OF_FEATURES = ("index", "row_splits", "scales")
_OF_ROWS = ("answers", "answer_splits", "home", "home_splits")


def sent_tensors(sent: exchange.Sent) -> list[tf.Tensor]:
    """What comes of the first half of a lookup: the number of its batch, the messages of keys, and so on."""
    lists = [tensor for name in _OF_FEATURES for tensor in getattr(sent, name)]
    lists += [getattr(sent.rows, name) for name in _OF_ROWS if sent.rows is not None]
    return [sent.number, *(getattr(sent, name) for name in _OF_ONE), *lists]


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
        return self._weight_of_batch() if self.has_batch else tf.constant(0.0)

    def _weight_of_batch(self) -> tf.Tensor:
        workers = 1 if self._plan.job is None or self._plan.is_alone else self._plan.job.size
        return float(workers) / tf.cast(self.num_batches, tf.float32)

    @property
    def num_batches(self) -> tf.Tensor:
        """How many workers have a batch here, int32 []."""
        if self._plan.is_alone:
            return tf.constant(1)
        return messages.having_keys(*self._tensors[:_HEADS])

    @property
    def _inside(self) -> list[tf.TensorSpec]:
        return self._plan.inside

    @property
    def _type_spec(self) -> TicketSpec:
        return TicketSpec(self._plan.number)

    def __enter__(self) -> Ticket:
        if not tf.executing_eagerly() and any(isinstance(t, tf.__internal__.EagerTensor) for t in self._tensors):
            raise RuntimeError(
                "A ticket of sok.ahead must be an argument of the tf.function in which it is used: what a function "
                "closes over stays as it was when the function was traced."
            )
        finishing = _Finishing(self._plan, self._plan.begun(self._tensors, self._inside))
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

    def of_any_size(specs: Sequence[tf.TensorSpec]) -> list[tf.TensorSpec]:
        return [tf.TensorSpec([None] * spec.shape.rank, spec.dtype) for spec in specs]

    def call(*tensors: tf.Tensor) -> Any:
        begun = plan.begun(tensors, of_any_size(plan.inside))
        return finish([one for _, tickets in begun for one in tickets if one is not None])

    do = call if eagerly else tf.function(call, autograph=False, input_signature=of_any_size(plan.specs))
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
