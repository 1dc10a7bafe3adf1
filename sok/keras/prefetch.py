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
from sok.base.types import KerasModel
from sok.distributed import joining
from sok.job import context, meeting
from sok.keras.conversion import keras_of, named_as, set_class
from sok.lookup.ahead import Pipeline, check_depth, next_number
from sok.lookup.begun import Plan, Ticket, TicketSpec


def prefetch(dataset: tf.data.Dataset, model: KerasModel, depth: int = 1) -> tf.data.Dataset:
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

    Returns:
        A dataset of as many batches. It goes to Keras as it is: what transforms batches comes before. It may be used
        again, in any of the three.

    Raises:
        TypeError: `dataset` is no `tf.data.Dataset`; `model` is none of Keras.
        ValueError: `depth`; the model is not built, or looks up no table; when it is read, on all workers: they have
            other numbers of batches, and know them.
        RuntimeError: it is transformed, or read by something else than Keras' three functions; in a step, the model
            looks up something else than a call of it does.
        tf.errors.InvalidArgumentError: in `fit`, what reading the data raises, or that a worker has no more batches
            where others have, on all workers.

    Collective where lookups are. Workers have as many batches (`sok.data.batches`): those that have fewer do not join
    the others, as they do in `fit` without it. On several workers each reading begins with one small collective.

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
    check_depth(depth)
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
    prefetched = _Prefetched(dataset, model, keras, depth)
    _take_tickets(model)
    return prefetched


class _Prefetched(tf.data.Dataset):
    """What `prefetch` returns."""

    def __init__(self, dataset: tf.data.Dataset, model: KerasModel, keras: ModuleType, depth: int) -> None:
        self._dataset, self._model, self._keras, self._depth = dataset, model, keras, depth
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
        self._check_numbers()
        pipeline = self._pipeline(caller == "fit")
        read = _Reading(pipeline, iter(self._dataset), self._dataset.element_spec)
        if caller == "fit":
            joining.note_ahead(lambda: read.is_over)
        return iter(read.as_dataset(self._dataset.cardinality()))

    def _pipeline(self, training: bool) -> Pipeline:
        if training not in self._pipelines:
            model, base = self._model, self._keras.Model

            def call(batch: Any) -> Any:
                inputs = batch[0] if isinstance(batch, tuple) else batch
                if not training:
                    return base.predict_step(model, (inputs,))
                return model(inputs, training=True) if getattr(model, "_call_has_training_arg", True) else model(inputs)

            plan = Plan(self._dataset.element_spec, call, self._numbers[training])
            self._pipelines[training] = Pipeline(plan, self._depth)
        return self._pipelines[training]

    def _check_numbers(self) -> None:
        if context.size() == 1:
            return
        said = meeting.together("sok/prefetch", lambda: int(self.cardinality()))
        if len(set(said)) > 1:
            numbers = ", ".join(f"{'unknown' if n < 0 else n} on rank {rank}" for rank, n in enumerate(said))
            raise ValueError(
                f"The workers have unequal numbers of batches ({numbers}), and with sok.prefetch those that have fewer "
                "cannot take part in the steps of the others. Give all as many: sok.data.batches. Or leave "
                "sok.prefetch out."
            )


class _Reading:
    """One reading of the data: a dataset that asks for each batch, and takes it from a queue."""

    def __init__(self, pipeline: Pipeline, batches: Iterator[Any], spec: Any) -> None:
        self._plan, self._spec = pipeline.plan, spec
        self.is_over = False  # there was no more batch to give
        self._take: Callable[[], Future[Any]] = pipeline.read(batches)
        self._leaves = tf.nest.flatten(spec, expand_composites=True)
        dtypes = [leaf.dtype for leaf in [*self._leaves, *self._plan.specs]]
        # Beside them, whether there is a batch, and what was raised instead.
        self._queue = tf.queue.FIFOQueue(2, [tf.bool, tf.string, *dtypes])
        self._none = [tf.zeros([0], dtype) if dtype != tf.string else tf.constant([], tf.string) for dtype in dtypes]

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

    def _ask(self) -> int:
        self._take().add_done_callback(self._put)
        return 0

    def _put(self, done: Future[Any]) -> None:
        error = done.exception()
        found = None if error is not None else done.result()
        said = "" if error is None else f"{type(error).__name__}: {error}"
        if found is None:
            self.is_over = True
            self._queue.enqueue([False, said, *self._none])
        else:
            batch, tensors = found
            self._queue.enqueue([True, "", *tf.nest.flatten(batch, expand_composites=True), *tensors])


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
