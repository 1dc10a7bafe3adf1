"""The loop over `sok.ahead` inside a `tf.function`: AutoGraph asks here how to stage a `for` over one.

Nothing but the loop is in the graph. Batches begin in the thread of `sok.lookup.ahead`, as for a loop in Python: before
each step the graph asks for one, and takes batch and ticket from a queue, so that none of TensorFlow's threads waits
for them in Python. One body serves batches with and without samples; its tickets say by a tensor which it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.operators import control_flow

from sok.lookup.begun import Plan, Ticket, TicketSpec

_CPU = "/CPU:0"  # where queues are, and Python

Take = Callable[[], "Future[tuple[Any, Ticket] | None]"]


class Iterated(Protocol):
    """What a `for` is staged over."""

    def plan(self) -> Plan:
        """Of its batches."""

    def read(self) -> Take:
        """Begins to read them anew."""


def stage_loops_over(kind: type[Iterated]) -> None:
    """Has AutoGraph stage each `for` over a `kind` in a `tf.function`; elsewhere it is Python's."""
    control_flow.for_loop_registry.register(kind, _for)


def _for(
    iterated: Iterated,
    extra_test: Callable[[], Any] | None,  # False once the loop was left, by `break` or `return`
    body: Callable[[Any], None],
    get_state: Any,
    set_state: Any,
    symbol_names: tuple[str, ...],
    opts: dict[str, Any],
) -> None:
    of_loop = (get_state, set_state, symbol_names, opts)
    if tf.executing_eagerly() or not tf.compat.v1.executing_eagerly_outside_functions():
        control_flow.for_stmt(iter(iterated), extra_test, body, *of_loop)  # type: ignore[call-overload]
        return
    loop = _Loop(iterated)
    run = loop.start()

    def test() -> tf.Tensor:
        if extra_test is None:
            return loop.take(run)
        # Who leaves takes no batch more.
        return tf.cond(tf.convert_to_tensor(extra_test()), lambda: loop.take(run), lambda: tf.constant(False))

    control_flow.while_stmt(test, lambda: body(loop.taken(run)), *of_loop)
    loop.end(run)


class LoopTicket(Ticket):
    """That of a loop inside a `tf.function`, where nobody knows before whether there is a batch."""

    @property
    def has_batch(self) -> tf.Tensor:
        """bool []: False where this worker's data have ended, and others' have not: its batch has no samples."""
        return self._tensors[-1]

    @property
    def weight(self) -> tf.Tensor:
        """As of others: float32 []."""
        return tf.where(self.has_batch, self._weight_of_batch(), 0.0)

    @property
    def _inside(self) -> list[tf.TensorSpec]:
        return self._plan.specs_of_all()[2]

    @property
    def _type_spec(self) -> LoopTicketSpec:
        return LoopTicketSpec(self._plan.number)


class LoopTicketSpec(TicketSpec):
    """By which functions that the loop calls know its tickets."""

    @property
    def value_type(self) -> type:
        return LoopTicket

    @property
    def _component_specs(self) -> list[tf.TensorSpec]:
        return [*self._plan.specs_of_all()[1], tf.TensorSpec([], tf.bool)]

    def _from_components(self, components: Sequence[tf.Tensor]) -> LoopTicket:
        return LoopTicket(self._plan, components)


_Queues = tuple[tf.queue.FIFOQueue, tf.queue.FIFOQueue]


class _Run:
    """One reading of the data, by one run of the loop."""

    def __init__(self, number: int, take: Take, queues: _Queues) -> None:
        self.number, self._take, self.queues = number, take, queues
        self.handles = [tf.constant(number, tf.int64), *(queue.queue_ref for queue in queues)]
        self._there, self._over = ([tf.constant(is_there), tf.constant("")] for is_there in (True, False))

    def ask(self) -> None:
        try:
            self._take().add_done_callback(self._put)
        except Exception as error:  # whatever it is, the graph waits for an answer
            self._tell(error)

    def _put(self, done: Future[tuple[Any, Ticket] | None]) -> None:
        _, signals, values = self.handles
        try:
            found = done.result()
            if found is not None:
                tensors = [*tf.nest.flatten(found, expand_composites=True), found[1].has_batch]
                _enqueue(values, [tf.convert_to_tensor(tensor) for tensor in tensors])
            _enqueue(signals, self._over if found is None else self._there)
        except Exception as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        _enqueue(self.handles[1], [tf.constant(False), tf.constant(f"{type(error).__name__}: {error}")])


def _enqueue(queue: tf.Tensor, tensors: list[tf.Tensor]) -> None:
    # Half as long as tf.queue.FIFOQueue.enqueue takes: 40 us on a Xeon.
    tf.raw_ops.QueueEnqueueV2(handle=queue, components=tensors)


class _Loop:
    """A `for`, as it was traced: the ops that it is made of, and what they do in Python."""

    def __init__(self, iterated: Iterated) -> None:
        with tf.init_scope():
            self._plan = iterated.plan()
        self._read, self._numbers = iterated.read, itertools.count()
        self._spec, *_ = self._plan.specs_of_all()
        self._leaves = [
            *tf.nest.flatten(self._spec, expand_composites=True),
            *LoopTicketSpec(self._plan.number)._component_specs,
        ]
        self._run: _Run | None = None
        self._queues: _Queues | None = None  # of a run that has ended well: TensorFlow keeps some 30 KB of each new one
        # What TensorFlow calls it does not hold.
        self._calls = (self._start, self._ask, self._end)

    def start(self) -> list[tf.Tensor]:
        """Begins a run; gives its number, and the queues of which it takes."""
        with tf.device(_CPU):
            run = tf.py_function(self._calls[0], [], [tf.int64, tf.resource, tf.resource])
        for tensor in run:
            tensor.set_shape([])
        return list(run)

    def take(self, run: Sequence[tf.Tensor]) -> tf.Tensor:
        """Asks for the next batch, and waits until it has begun; False: no worker has one."""
        number, signals, _ = run
        with tf.device(_CPU):
            with tf.control_dependencies([tf.numpy_function(self._calls[1], [number], tf.int64)]):
                is_there, said = tf.raw_ops.QueueDequeueV2(handle=signals, component_types=[tf.bool, tf.string])
            with tf.control_dependencies([tf.raw_ops.Assert(condition=tf.equal(said, ""), data=[said])]):
                is_there = tf.identity(is_there)
        is_there.set_shape([])
        return is_there

    def taken(self, run: Sequence[tf.Tensor]) -> tuple[Any, LoopTicket]:
        """The batch that `take` has waited for, and its ticket."""
        dtypes = [leaf.dtype for leaf in self._leaves]
        with tf.device(_CPU):
            tensors = tf.raw_ops.QueueDequeueV2(handle=run[2], component_types=dtypes)
        for tensor, leaf in zip(tensors, self._leaves, strict=True):
            tensor.set_shape(leaf.shape)
        num_leaves = len(tf.nest.flatten(self._spec, expand_composites=True))
        batch = tf.nest.pack_sequence_as(self._spec, tensors[:num_leaves], expand_composites=True)
        return batch, LoopTicket(self._plan, tensors[num_leaves:])

    def end(self, run: Sequence[tf.Tensor]) -> None:
        """Drops what has begun and was not taken."""
        number, signals, _ = run
        # The loop holds this queue, so what looks at it comes after the loop.
        with tf.device(_CPU), tf.control_dependencies([tf.raw_ops.QueueSizeV2(handle=signals)]):
            tf.numpy_function(self._calls[2], [number], tf.int64)

    def _start(self) -> list[tf.Tensor]:
        queues, self._queues = self._queues or self._new_queues(), None
        self._run = _Run(next(self._numbers), self._read(), queues)
        return self._run.handles

    def _new_queues(self) -> _Queues:
        """Of each batch that was asked for: whether it is there, or what was raised; and then what it is."""
        dtypes = [leaf.dtype for leaf in self._leaves]
        return tf.queue.FIFOQueue(1, [tf.bool, tf.string]), tf.queue.FIFOQueue(1, dtypes)

    def _ask(self, number: np.int64) -> np.int64:
        run = self._run
        if run is None or run.number != number:
            raise RuntimeError("A loop over sok.ahead in a tf.function was begun anew before it had ended.")
        run.ask()
        return np.int64(0)

    def _end(self, number: np.int64) -> np.int64:
        if self._run is not None and self._run.number == number:
            self._queues, self._run = self._run.queues, None
        return np.int64(0)
