"""`sok.prefetch`: lookups of a Keras model that begin before their step, in `fit`, `evaluate` and `predict`.

What Keras gets is a dataset whose batches have a ticket beside their inputs. It is taken off where Keras makes a step
of a batch, so that nothing else of a model sees it. A batch begins in a thread of `sok.lookup.ahead`, when Keras asks
for one some batches earlier, and comes through a queue, so that none of TensorFlow's threads waits for it in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import ModuleType
from typing import Any

import tensorflow as tf

from sok.base import keras_calls
from sok.base.patching import Here
from sok.base.types import KerasModel
from sok.distributed import joining
from sok.job import context
from sok.keras.conversion import keras_of, named_as, set_class
from sok.lookup import lookup
from sok.lookup.ahead import Pipeline
from sok.lookup.begun import Plan, Ticket, TicketSpec, finishing
from sok.lookup.schedule import Schedule, next_number


def prefetch(
    dataset: tf.data.Dataset, model: KerasModel, depth: int = 1, *, rows: bool = False, stale: int | None = None
) -> tf.data.Dataset:
    """Returns `dataset` for `fit`, `evaluate` or `predict` of `model`: its lookups begin `depth` batches ahead.

    While a batch is trained, a thread calculates the ids of the next ones and, on several workers, sends their keys to
    the workers that own the rows: see `sok.ahead`. Results are those without it, to the bit.

        model.fit(sok.prefetch(dataset, model), epochs=3, validation_data=sok.prefetch(validation, model))

    Args:
        dataset: batches as `fit` takes them: inputs, or tuples of inputs, labels and weights of samples.
        model: a model of Keras 3 or tf_keras over tables: converted by `sok.distributed_model`, or made of
            `sok.Embedding` and other layers of sok. Functional, Sequential or a subclass, which has been built, or
            called. Its class becomes a subclass of what it was, of the same name, whose steps take tickets off batches.
        depth: how many batches at the most have begun before their turn, at least 1.
        rows, stale: as in `sok.ahead`. In `evaluate` and `predict` no row changes, so `stale` has no effect there.

    Returns:
        A dataset of as many batches. It goes to Keras as it is: what transforms batches comes before. It may be used
        again, in any of the three.

    Raises:
        TypeError: `dataset` is no `tf.data.Dataset`; `model` is none of Keras.
        ValueError: `depth` or `stale`; the model is not built, or looks up no table; in `fit`, on all workers: they
            have other `steps_per_epoch`.
        RuntimeError: it is transformed, or read by something else than Keras' three functions; in a step, the model
            looks up something else than a call of it does.
        tf.errors.InvalidArgumentError: what reading the data raises, on all workers; on all, too, that one has no more
            batches and cannot join the others, since the model looks up in a `tf.function`, a loop or a branch of its
            own.

    Collective where lookups are. Workers that have fewer batches than others join these until all have ended, in
    `fit` as without it; in `evaluate` and `predict` they serve their rows, and have the results of their own batches.

    Example:
        >>> import sok
        >>> ids = tf.keras.Input([1], dtype="int64")
        >>> rows = sok.Embedding(1000, 4, name="prefetched")(ids)
        >>> model = tf.keras.Model(ids, tf.keras.layers.Dense(1)(tf.keras.layers.Flatten()(rows)))
        >>> model.compile(sok.DistributedOptimizer("adagrad"), "mse")
        >>> data = tf.data.Dataset.from_tensor_slices((tf.range(8, dtype=tf.int64)[:, None], tf.ones([8, 1]))).batch(2)
        >>> _ = model.fit(sok.prefetch(data, model, depth=2), verbose=0)
        >>> int(model.get_layer("prefetched").embedding_variable.num_rows())
        8

    Source: the role of OpenEmbedding's `pulling`.
    """
    schedule = Schedule(depth, rows, stale)
    keras = keras_of(model)
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "`dataset` must be a tf.data.Dataset of batches; of arrays: "
            f"tf.data.Dataset.from_tensor_slices((x, y)).batch(n). Received: {type(dataset).__name__}."
        )
    if not model.built:
        raise ValueError(
            f"Model '{model.name}' is not built, so its tables are not there yet. Call it with a batch first: "
            "model(next(iter(dataset))[0])."
        )
    prefetched = _Prefetched(dataset, model, keras, schedule)
    _take_tickets(model)
    return prefetched


class _Prefetched(tf.data.Dataset):
    """What `prefetch` returns."""

    def __init__(self, dataset: tf.data.Dataset, model: KerasModel, keras: ModuleType, schedule: Schedule) -> None:
        self._dataset, self._model, self._keras, self._schedule = dataset, model, keras, schedule
        self._numbers = {True: next_number(), False: next_number()}
        self._pipelines: dict[bool, Pipeline] = {}  # of steps that train, and of others
        ticket = TicketSpec(self._pipeline(True).plan.number)
        self._spec = _with_ticket(dataset.element_spec, ticket)
        super().__init__(dataset._variant_tensor)

    @property
    def element_spec(self) -> Any:
        return self._spec

    def _inputs(self) -> list[Any]:
        return []

    @property
    def _variant_tensor(self) -> Any:
        raise RuntimeError(
            "What sok.prefetch returns goes to fit, evaluate or predict as it is. Transform the dataset before: "
            "sok.prefetch(dataset.map(...), model). `class_weight` of fit transforms it, too: put weights of samples "
            "into the batches."
        )

    @_variant_tensor.setter
    def _variant_tensor(self, _: Any) -> None:
        pass

    def cardinality(self) -> tf.Tensor:
        """That of the dataset."""
        return self._dataset.cardinality()

    def __iter__(self) -> Any:
        caller = keras_calls.entry_point()
        if caller is None:
            raise RuntimeError(
                "What sok.prefetch returns is for fit, evaluate and predict of Keras. In loops of your own take "
                "sok.ahead."
            )
        pipeline = self._pipeline(caller == "fit")
        read = _Reading(pipeline, iter(self._dataset), self._dataset.element_spec)
        if pipeline.plan.is_alone:
            pass
        elif caller == "fit":
            joining.note_ahead(read)
        elif _readings.value is not None:
            _readings.value.append((read, keras_calls.steps_asked()))
        return iter(read.as_dataset(self._dataset.cardinality()))

    def _pipeline(self, training: bool) -> Pipeline:
        if training not in self._pipelines:
            model, base = self._model, self._keras.Model

            def call(batch: Any) -> Any:
                inputs = batch[0] if isinstance(batch, tuple) else batch
                if not training:
                    return base.predict_step(model, (inputs,))
                return model(inputs, training=True) if getattr(model, "_call_has_training_arg", True) else model(inputs)

            plan = Plan(self._dataset.element_spec, call, self._numbers[training], self._schedule)
            self._pipelines[training] = Pipeline(plan, self._schedule.depth)
            self._pipelines[training].why_not_joined = _why_not_joined(plan, training)
        return self._pipelines[training]


_readings = Here()  # of an `evaluate` or `predict`: each with its number of steps, if that is given


def _why_not_joined(plan: Plan, training: bool) -> str:
    """Why a worker without a batch cannot take part in steps that no call of the model tells it of."""
    if any(f.is_of_table for one in plan.nested for f in one.features):
        return "a lookup of the step lies in a tf.function, a loop or a branch of its own"
    stays = any(one.why_not and f.is_of_table for one in plan.asked for f in one.features)
    return "" if training or not stays else "a lookup of the step cannot begin before it"


class _Reading:
    """One reading of the data: a dataset that asks for each batch, and takes it from a queue."""

    def __init__(self, pipeline: Pipeline, batches: Iterator[Any], spec: Any) -> None:
        self._pipeline, self._plan, self._spec = pipeline, pipeline.plan, spec
        self.has_begun, self.taken = False, 0  # whether Keras has asked for a batch; how many steps there were
        self._take, self.stop = pipeline.read(batches)
        self._end: Future[Any] | None = None  # what came where Keras was told that there is no batch
        self._leaves = tf.nest.flatten(spec, expand_composites=True)
        dtypes = [leaf.dtype for leaf in [*self._leaves, *self._plan.specs]]
        # Beside them, whether there is a batch, and what was raised instead.
        self._queue = tf.queue.FIFOQueue(2, [tf.bool, tf.string, *dtypes])
        self._none = [_nothing(dtype) for dtype in dtypes]

    def as_dataset(self, cardinality: tf.Tensor) -> tf.data.Dataset:
        def get(_: tf.Tensor) -> tuple[tf.Tensor, tuple[Any, ...]]:
            with tf.control_dependencies([tf.numpy_function(self._ask, [], tf.int64)]):
                is_batch, error, *tensors = self._queue.dequeue()
            with tf.control_dependencies([tf.debugging.Assert(tf.equal(error, ""), [error])]):
                is_batch = tf.identity(is_batch)
            for tensor, spec in zip(tensors, [*self._leaves, *self._plan.specs], strict=True):
                tensor.set_shape(spec.shape)
            return is_batch, tuple(tensors)

        def packed(_: tf.Tensor, tensors: tuple[tf.Tensor, ...]) -> Any:
            leaves = list(tensors[: len(self._leaves)])
            batch = tf.nest.pack_sequence_as(self._spec, leaves, expand_composites=True)
            return _with_ticket(batch, Ticket(self._plan, tensors[len(leaves) :]))

        data = tf.data.Dataset.range(tf.int64.max).map(get).take_while(lambda is_batch, _: is_batch).map(packed)
        options = tf.data.Options()  # none that asks for batches before their turn, as a parallel map does
        options.autotune.enabled = False
        options.experimental_optimization.apply_default_optimizations = False
        data = data.with_options(options)
        is_known = int(cardinality) != tf.data.UNKNOWN_CARDINALITY
        return data.apply(tf.data.experimental.assert_cardinality(cardinality)) if is_known else data

    def next(self) -> Ticket | None:
        """Instead of Keras: the ticket of the next batch; None: no worker has one."""
        end, self._end = self._end, None
        found = (end or self._take()).result()
        self._check_joined(found)
        return None if found is None else found[1]

    def refuse_to_join(self, why: str) -> None:
        """From the next batch on that not all workers have, all raise."""
        self._pipeline.why_not_joined = why

    def _check_joined(self, found: tuple[Any, Ticket] | None) -> None:
        why_not = self._pipeline.why_not_joined
        if found is not None and why_not and found[1].num_batches < context.size():
            raise ValueError(
                "A worker's data have ended before those of others, and it cannot take part in their steps: "
                f"{why_not}. Give all workers as many batches (sok.data.batches)."
            )

    def join(self, steps: int | None, eagerly: bool) -> None:
        """Answers the other workers in their steps, of which there may be that many, and which train nothing."""
        self.stop()
        answer = None
        while (steps is None or self.taken < steps) and (ticket := self.next()) is not None:
            if answer is None:
                answer = finishing(ticket, _finish_all, eagerly)
            answer(ticket)
            self.taken += 1

    def _ask(self) -> int:
        self.has_begun = True
        self._take().add_done_callback(self._put)
        return 0

    def _put(self, done: Future[Any]) -> None:
        error: BaseException | None = None
        try:
            found = done.result()
            self._check_joined(found)
        except Exception as raised:
            error, found = raised, None
        said = "" if error is None else f"{type(error).__name__}: {error}"
        if found is None or not found[1].has_batch:
            self._end = None if error else done
            self._queue.enqueue([False, said, *self._none])
        else:
            self.taken += 1
            self._queue.enqueue([True, "", *tf.nest.flatten(found, expand_composites=True)])


def _nothing(dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.variant:
        return tf.raw_ops.OptionalNone()
    return tf.constant([], tf.string) if dtype == tf.string else tf.zeros([0], dtype)


def _finish_all(tickets: list[lookup.Ticket]) -> tf.Tensor:
    # Of a graph what leads to no number is left out; a size does not lead there.
    found = [tf.reduce_sum(tf.cast(one, tf.float32)) for ticket in tickets for one in lookup.finish(ticket)]
    return tf.add_n(found)


def _with_ticket(batch: Any, ticket: Any) -> tuple[Any, ...]:
    """A batch, or its spec, with the ticket beside its inputs."""
    inputs, *others = batch if isinstance(batch, tuple) else (batch,)
    return ((inputs, ticket), *others)


class _TakesTickets:
    """Stands before the class of a model, whose steps then finish what has begun."""

    def train_step(self, data: Any) -> Any:
        return _in_step(super().train_step, data)  # type: ignore[misc]

    def test_step(self, data: Any) -> Any:
        return _in_step(super().test_step, data)  # type: ignore[misc]

    def predict_step(self, data: Any) -> Any:
        return _in_step(super().predict_step, data)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return _joining_others(self, super().evaluate, *args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return _joining_others(self, super().predict, *args, **kwargs)  # type: ignore[misc]


def _joining_others(model: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _readings.inside([]):
        result = function(*args, **kwargs)
        for read, steps in _readings.value:
            if read.has_begun:  # Keras 3 makes an iterator more
                read.join(steps, model.run_eagerly)
    return result


def _in_step(step: Callable[[Any], Any], data: Any) -> Any:
    given, *others = data if isinstance(data, tuple) and data else (data,)
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Ticket)):
        return step(data)
    inputs, ticket = given
    with ticket:
        return step((inputs, *others) if others else inputs)


def _take_tickets(model: Any) -> None:
    of = type(model)
    if issubclass(of, _TakesTickets):
        return
    set_class(model, named_as(of, _TakesTickets, {}))
    for function in ("train_function", "test_function", "predict_function"):
        setattr(model, function, None)  # of the class before
