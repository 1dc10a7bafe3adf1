"""Lookups whose keys travel ahead of their step: `sok.ahead`.

What a function of the user's looks up for a batch is found once, by building it in a graph that nobody runs, as
`sok.lookup.cutting` does. For each batch a thread then calculates the ids and begins the lookups (`lookup.begin`), some
batches before their turn; in the step, inside `with ticket:`, they are finished (`lookup.finish`). So nothing but the
time of `begin` differs from the synchronous lookup, and `begin` changes no table.

On several workers all begin the same batches, be they used or not: batch i + depth when the program takes batch i,
however fast the thread is. So a loop that all workers leave after the same batch leaves nobody waiting. A worker that
has no such batch begins one without ids, and says so; one that cannot begin it, or begins no more, says so in place of
its keys.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import _ops
from sok.job.beside import Beside
from sok.lookup.ahead_in_functions import stage_loops_over
from sok.lookup.begun import Plan, Ticket
from sok.lookup.schedule import Schedule, next_number
from sok.lookup.session_plan import SessionPlan
from sok.table.table import EmbeddingVariable, checked_table

_MOST = 2**31 - 1  # a message's numbers are below it
_BATCHES = 2**20  # of one iteration have numbers of their own


def ahead(
    dataset: Iterable[Any],
    lookup_fn: Callable[[Any], Any],
    depth: int = 1,
    *,
    rows: bool = False,
    stale: int | None = None,
) -> Ahead:
    """Gives the batches of `dataset`, each with a ticket: its lookups have begun up to `depth` batches before its turn.

    While the program is in the step of a batch, a thread calculates the ids of the next ones and, on several workers,
    sends their keys to the workers that own the rows. Owners read those into memory that lie in the file of a
    `sok.Storage`. Rows are found, made, and sent home in the step itself; with
    `rows=True` they come home ahead, too, and the step sends again those that have changed since. So every result is
    that of the loop without `ahead`: outputs, tables, and what optimizers keep.

        for batch, ticket in sok.ahead(dataset, lookup_fn, depth=2):
            step(batch, ticket)  # inside: `with ticket: vectors = lookup_fn(batch)`

    Inside `with ticket:` the lookups of `lookup_fn` are finished, in the order in which it makes them; what comes of
    them is differentiable as ever. A ticket may be an argument of a `tf.function`, which is not traced anew for each.
    The `for` itself may be in a `tf.function`, too, over an `ahead` made outside: AutoGraph makes one loop of it.

    A worker whose data have ended before those of others gets batches without samples, until all have ended: it runs
    the step as they do. There `ticket.has_batch` is False, and `ticket.weight`, by which to multiply the mean loss of a
    batch where an average over all workers is taken, 0.0; of others the number of workers over that of those that have
    a batch. Where the loop is in a `tf.function`, `has_batch` is a tensor, as `weight` is everywhere.

    Args:
        dataset: a `tf.data.Dataset`, or another iterable of batches: tensors or arrays, or tuples and dicts of them.
            It is read in a thread of its own. Each `iter()` of what `ahead` returns begins it anew.
        lookup_fn: takes a batch, looks up, and returns anything: a model will do. It is built once in a graph that is
            not run. A lookup whose ids depend on other rows, on variables or on other ops with a state, one whose
            `training` is a tensor, and one in a loop, a branch or a function of its own is made in the step, as without
            `ahead`; the logger `sok` names it once.
        depth: how many batches at the most have begun before their turn, at least 1. Besides, one is in its step.
        rows: whether rows come home ahead as well as keys go there. On one worker, and of tables on a GPU, it has no
            effect; of tables that exact Adam or another rule trains which moves rows without a gradient, rows stay in
            the step.
        stale: None, or a number of steps, at least `depth`: rows come home ahead and are not sent again, so lookups
            have rows as they were at most so many steps before. Then results are not those of the loop without `ahead`.

    Returns:
        An iterable of pairs (batch, ticket). Make it once, not once an epoch, and iterate over it as often as you like.

    Raises:
        TypeError, ValueError: of an argument; when the first batch is taken, of what `lookup_fn` refuses, or if it
            looks up no table.
        RuntimeError: it is made in a `tf.function` or a v1 graph, or iterated over there by something else than a
            `for` of a `tf.function`; inside `with ticket:`, for another lookup than those of `lookup_fn`.
        What reading the data raises, at the turn of the batch; there the other workers raise
            `tf.errors.InvalidArgumentError`, with its text, as all do where the loop is in a `tf.function`. What is
            wrong with ids is raised in the step of their batch, as without `ahead`.

    Collective where lookups are: all workers take batches in step with each other, and leave a loop after the same; at
    the end of the data that is the last of the worker that has most. Memory: ids and keys of `depth` + 1 batches; with
    rows those, too, twice: as this worker has sent them, and as it has got them.

    Example:
        >>> import sok
        >>> table = sok.EmbeddingVariable(2, 100, name="ahead", initializer="ones")
        >>> data = tf.data.Dataset.from_tensor_slices(tf.constant([[1, 2], [2, 3]], tf.int64))
        >>> def embed(ids):
        ...     return sok.group_embedding_lookup([table], [ids])[0]
        >>> for ids, ticket in sok.ahead(data, embed, depth=2):
        ...     with ticket:
        ...         print(tf.reduce_sum(embed(ids)).numpy(), table.size().numpy())
        4.0 2
        4.0 3
        >>> pipeline = sok.ahead(data, embed)
        >>> @tf.function
        ... def epoch():
        ...     total = 0.0
        ...     for ids, ticket in pipeline:
        ...         with ticket:
        ...             total += tf.reduce_sum(embed(ids))
        ...     return total
        >>> print(epoch().numpy())
        8.0
    """
    schedule = Schedule(depth, rows, stale)
    if not isinstance(dataset, Iterable):
        raise TypeError(f"`dataset` must be a tf.data.Dataset or another iterable of batches. Received: {dataset!r}.")
    if not callable(lookup_fn):
        raise TypeError(f"`lookup_fn` must be a function of a batch. Received: {lookup_fn!r}.")
    if not tf.executing_eagerly():
        raise RuntimeError(
            "sok.ahead is made where TensorFlow executes eagerly, and once: not in a tf.function, which would make one "
            "each time it is traced, nor in a v1 graph. A `for` over it may be in a tf.function."
        )
    return Ahead(dataset, lookup_fn, schedule)


def rows_ahead(table: EmbeddingVariable) -> dict[str, int]:
    """How many rows of a table this worker has sent ahead of their step, with `sok.ahead(..., rows=True)` or `stale`.

    Args:
        table: of which this worker's own rows, or parts of rows, are counted, since it was made; in no checkpoint.

    Returns:
        `sent`, to all workers, this one included: rows, or partial sums where those travel (`way_home`); `repaired`:
        those of them that had changed by the turn of their step, and so were sent again in it. How many these are
        depends on when the rows were read, and so on time.

    Not collective; eager only.

    Example:
        >>> import sok
        >>> rows_ahead(sok.EmbeddingVariable(2, 100, name="rows_ahead"))
        {'sent': 0, 'repaired': 0}
    """
    checked_table(table, "table")
    counts = [_ops.lib().sok_table_rows_ahead(handle).numpy() for handle in table.part_handles]
    sent, repaired = (int(sum(one[i] for one in counts)) for i in range(2))
    return {"sent": sent, "repaired": repaired}


class Ahead:
    """What `ahead` returns: iterate over it."""

    def __init__(self, dataset: Iterable[Any], lookup_fn: Callable[[Any], Any], schedule: Schedule) -> None:
        self._dataset, self._lookup_fn, self._schedule = dataset, lookup_fn, schedule
        self._number = next_number()
        self._pipeline: Pipeline | None = None
        self._peeked: Iterator[Any] | None = None  # the batches, if the first was needed before they are read

    def __iter__(self) -> Iterator[tuple[Any, Ticket]]:
        if not tf.executing_eagerly():
            raise RuntimeError(
                "Inside a tf.function sok.ahead is iterated over by `for batch, ticket in ...:`, which AutoGraph makes "
                "a loop of the graph; by nothing else, such as next() or enumerate(). In v1 graphs it is not."
            )
        if self._made() is None:
            return
        take = self.read()
        while (found := take().result()) is not None:
            batch, ticket = found
            del found
            yield batch, ticket
            del batch, ticket

    def plan(self) -> Plan:
        """What is looked up for each batch."""
        pipeline = self._made()
        if pipeline is None:
            raise ValueError("`dataset` of sok.ahead has no batch, so nobody knows for what to trace a loop.")
        return pipeline.plan

    def read(self) -> Callable[[], Future[tuple[Any, Ticket] | None]]:
        """Begins the data anew: see `Pipeline.read`."""
        pipeline, (batches, self._peeked) = self._made(), (self._peeked, None)
        assert pipeline is not None
        return pipeline.read(iter(self._dataset) if batches is None else batches)[0]

    def _made(self) -> Pipeline | None:
        """The pipeline; None: that takes a batch, and there is none."""
        if self._pipeline is None:
            spec = getattr(self._dataset, "element_spec", None)
            if spec is None:
                batches = iter(self._dataset)
                first = next(batches, None)
                if first is None:
                    return None
                spec, self._peeked = tf.nest.map_structure(_spec_of, first), itertools.chain([first], batches)
            plan = Plan(spec, self._lookup_fn, self._number, self._schedule)
            self._pipeline = Pipeline(plan, self._schedule.depth)
        return self._pipeline


stage_loops_over(Ahead)


class Pipeline:
    """A plan, and the thread in which its lookups begin: one, so that they have an order, the same on all workers.

    readings: numbers its readings, if an earlier pipeline has sent messages of the same names.
    """

    def __init__(self, plan: Plan | SessionPlan, depth: int, readings: Iterator[int] | None = None) -> None:
        self.plan: Any = plan
        self.why_not_joined = ""  # by workers that have no batch where others have; empty: they take part
        self._depth, self._readings = depth, readings or itertools.count(1)
        self._thread = Beside(f"sok-ahead-{plan.number}")
        self._thread.last = plan.leave
        if plan.job is not None:
            plan.job.at_leave(self._thread)
        weakref.finalize(self, self._thread.leave).atexit = False

    def between(self, do: Callable[..., Any], *arguments: Any) -> Any:
        """What `do` gives, done in the thread after all that was asked for before: on all workers at the same place."""
        return self._thread.submit(do, *arguments).result()

    def leave(self) -> Future[None]:
        """Begins no more, once what was begun is done, and tells the others so."""
        return self._thread.leave()

    def read(
        self, batches: Iterator[Any]
    ) -> tuple[Callable[[], Future[tuple[Any, Ticket] | None]], Callable[[], None]]:
        """A function that begins as many batches as may have, and gives the next one when it has begun.

        That is the batch with its ticket; where this worker has no more, but others have, one without samples; None: no
        worker has one. And a function by which this worker has no more.
        """
        source, numbers = _Source(batches), None
        begun: collections.deque[Future[Any]] = collections.deque()

        def take() -> Future[Any]:
            nonlocal numbers
            if numbers is None:  # not before: Keras makes iterators that it does not read, on some workers
                numbers = itertools.count(next(self._readings) * _BATCHES)
            while len(begun) <= self._depth:
                begun.append(self._thread.submit(source.begin, self.plan, next(numbers) % _MOST))
            return begun.popleft()

        return take, source.stop


def _spec_of(value: Any) -> tf.TypeSpec:
    """Of the batches of which `value` is one: they may have other numbers of samples."""
    if isinstance(value, tf.RaggedTensor):
        spec = tf.type_spec_from_value(value)
        shape = [None] * spec.shape.rank
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec([None] * value.shape.rank, value.dtype)
    if isinstance(value, (tf.Tensor, np.ndarray, np.generic)):
        return tf.TensorSpec([None, *value.shape[1:]] if len(value.shape) else [], value.dtype)
    raise TypeError(
        "The batches of `dataset` must be tensors or arrays, or tuples, lists and dicts of them. "
        f"Received: one with {type(value).__name__} {value!r}."
    )


class _Source:
    """The batches of one iteration, in the thread that begins them."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._has_ended = self._is_over = False  # on this worker; on all

    def stop(self) -> None:
        """What has not begun is left out."""
        self._has_ended = True

    def begin(self, plan: Any, number: int) -> tuple[Any, Any] | None:
        """The next batch and its ticket, without samples if others have one; None: no worker has one."""
        if self._is_over:
            return None
        try:
            batch = self if self._has_ended else next(self._batches, self)
            sent = None if batch is self else plan.send(number, batch)
        except Exception as error:  # whatever it is, peers have begun this batch
            plan.refuse(number, f"{type(error).__name__}: {error}")
            raise
        if sent is not None:
            return batch, plan.ticket(sent)
        self._has_ended = True
        found: tuple[Any, Any] | None = plan.send_none(number)
        self._is_over = found is None
        return found
