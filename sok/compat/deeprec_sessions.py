"""DeepRec's stages and asynchronous embeddings: `staged`, `make_prefetch_hook`, and its options of a session.

    config = tf.ConfigProto()
    options = config.graph_options.optimizer_options
    options.do_async_embedding = True
    options.async_embedding_options.threads_num = 4
    options.async_embedding_options.capacity = 4

after `sok.deeprec.install()`. Stock messages have no such fields, so what `tf.ConfigProto()` then gives stands for one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from sok.base import log
from sok.base.types import Session
from sok.lookup import stages
from sok.lookup.schedule import Schedule
from sok.lookup.session_runs import SessionRuns
from sok.lookup.stages import Source, Stage

_Errors = type[BaseException] | int  # a class, or a code, as DeepRec's versions take them


def staged(
    features: object,
    feed_dict: Mapping[Any, Any] | None = None,
    capacity: int = 1,
    num_threads: int = 1,
    *,
    items: Sequence[Any] | None = None,
    feed_generator: Iterator[Sequence[Any]] | None = None,
    num_clients: int = 1,
    timeout_millis: int = 300000,
    closed_exception_types: Sequence[_Errors] = (tf.errors.OutOfRangeError, tf.errors.CancelledError),
    ignored_exception_types: Sequence[_Errors] = (),
    use_stage_subgraph_thread_pool: bool = False,
    stage_subgraph_thread_pool_id: int = 0,
    stage_subgraph_stream_id: int = 0,
    name: str | None = None,
    rows: bool = False,
    stale: int | None = None,
) -> Any:
    """Reads batches in threads beside the session, and gives what stands for one batch in the graph.

    A session whose hooks have that of `make_prefetch_hook` reads them, up to `capacity` before their turn. With
    `do_async_embedding` in the options of the session, lookups whose ids come from a batch, by ops without a state,
    begin ahead of their step.

    Args:
        features: tensors, SparseTensors or RaggedTensors in any structure, of a v1 graph; None stays None.
        feed_dict: what to feed when they are read: placeholders, each with the tensor that gives its value.
        capacity: how many batches are kept, at least 1.
        num_threads: how many threads read; with more than one, in no certain order.
        items: placeholders that `feed_generator` gives the values of.
        feed_generator: gives a list of values for `items` for each batch; its end is the end of the data.
        closed_exception_types: errors by which the data end: classes, or codes.
        ignored_exception_types: errors after which the next batch is read.
        use_stage_subgraph_thread_pool: whether they are read in a pool of `session_stage_subgraph_thread_pool`.
        stage_subgraph_thread_pool_id: which one.
        num_clients, timeout_millis, stage_subgraph_stream_id: accepted, without meaning here.
        name: of the stage.
        rows: whether rows travel ahead as well as keys, as in `sok.ahead`. Results are the same.
        stale: None, or by how many steps rows may be older than their step, as in `sok.ahead`; at least the `capacity`
            of the session's `async_embedding_options`.

    Returns:
        The batch, in the structure of `features`: placeholders. Where nothing feeds them TensorFlow says so, with their
        name, which ends in 'needs_make_prefetch_hook'.

    Raises:
        RuntimeError: executing eagerly, or in a `tf.function`: there is `sok.ahead`.
        ValueError: a number is out of range; `items` without `feed_generator`, or the reverse.
        TypeError: a feature is no tensor.

    Example:
        >>> import sok
        >>> v1 = tf.compat.v1
        >>> with tf.Graph().as_default():
        ...     data = v1.data.make_one_shot_iterator(tf.data.Dataset.range(3))
        ...     batch = sok.deeprec.staged({"ids": data.get_next()}, capacity=2)
        ...     with v1.train.MonitoredTrainingSession(hooks=[sok.deeprec.make_prefetch_hook()]) as session:
        ...         while not session.should_stop():
        ...             print(session.run(batch["ids"]))
        0
        1
        2

    Source: `tf.staged` of DeepRec.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.compat.v1.executing_eagerly_outside_functions() or graph.building_function:
        raise RuntimeError("sok.deeprec.staged is for v1 graphs. In TensorFlow 2 use sok.ahead, or sok.prefetch.")
    for argument, value in ("capacity", capacity), ("num_threads", num_threads):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`{argument}` must be a whole number, at least 1. Received: {value!r}.")
    if (items is None) != (feed_generator is None):
        raise ValueError(
            "Give `items` and `feed_generator` together: the one says what the other has the values of. Received: "
            f"{items!r} and {feed_generator!r}."
        )
    leaves = tf.nest.flatten(features)
    present = [_tensor(leaf) for leaf in leaves if leaf is not None]
    source = Source(
        tf.nest.flatten(present, expand_composites=True),
        capacity,
        num_threads,
        tuple((feed_dict or {}).items()) or None,
        None if feed_generator is None or items is None else _fed(list(items), feed_generator),
        (*_classes(closed_exception_types), StopIteration),
        _classes(ignored_exception_types),
        _in_pool(use_stage_subgraph_thread_pool, stage_subgraph_thread_pool_id),
    )
    stage = Stage(
        [tf.type_spec_from_value(one) for one in present],
        source,
        Schedule(1, rows, stale),  # the session says the depth
        name or graph.unique_name("prefetch", mark_as_used=False),
    )
    batch = iter(stage.batch)
    return tf.nest.pack_sequence_as(features, [None if leaf is None else next(batch) for leaf in leaves])


def make_prefetch_hook() -> tf.compat.v1.train.SessionRunHook:
    """Makes the hook by which a session reads the batches of its graph's stages, and begins their lookups.

    Give it to `tf.compat.v1.train.MonitoredTrainingSession`. With `do_async_embedding` in the session's options (see
    `install`), keys of the next `capacity` batches travel to their owners while the session is in the steps before;
    results are those of a session without. One thread begins lookups, whatever `threads_num` says, since all workers
    begin them in one order. With one worker nothing is sent: batches are read ahead alone.

    Collective where lookups are. Workers may have unequal numbers of batches: one whose data have ended takes part with
    batches without samples until all have, and all stop together.

    Source: `tf.make_prefetch_hook` of DeepRec.
    """
    return _PrefetchHook()


def batch_weight() -> tf.Tensor:
    """What to multiply the mean loss of a batch with, so that an average over all workers is one over batches.

    float32 []: the number of workers over that of those which have a batch in this step; 0.0 on one that has none; 1.0
    where lookups are made in their step. Of the first stage of the default graph.

    Raises:
        ValueError: the graph has no stage.

    Example:
        >>> with tf.Graph().as_default():
        ...     batch = staged(tf.constant([1.0]))
        ...     loss = tf.reduce_mean(batch) * batch_weight()
        >>> loss.shape
        TensorShape([])

    Source: `sok.ahead`, whose tickets have it as `weight`.
    """
    found = stages.of_graph(tf.compat.v1.get_default_graph())
    if not found:
        raise ValueError("The graph has no stage: call sok.deeprec.staged first.")
    return found[0].weight


def mark_target_node(targets: Sequence[Any]) -> None:
    """Accepted, without meaning here: the seed of DeepRec's SmartStage, which is off.

    Example:
        >>> mark_target_node([])
    """


class _PrefetchHook(tf.compat.v1.train.SessionRunHook):
    def __init__(self) -> None:
        self._runs: SessionRuns | None = None

    def after_create_session(self, session: Session, coord: tf.train.Coordinator) -> None:
        lost, self._runs = self._runs, _attach(session)
        if lost is not None:
            self._runs.begin_with(lost.unused())

    def end(self, session: Session) -> None:
        if self._runs is not None:
            self._runs.leave()


@dataclasses.dataclass(frozen=True)
class _Asynchronous:
    """What a session was asked for."""

    capacity: int
    options: Any


def _attach(session: Any, asked: _Asynchronous | None = None) -> SessionRuns:
    there = getattr(session.run, "__self__", None)
    if isinstance(there, SessionRuns):
        return there
    return SessionRuns(session) if asked is None else SessionRuns(session, asked.capacity, asked.options)


def _tensor(leaf: Any) -> Any:
    if tf.is_tensor(leaf):
        return leaf
    raise TypeError(
        f"`features` must be tensors, SparseTensors or RaggedTensors, or structures of them. Received: {leaf!r}."
    )


def _fed(items: list[Any], generator: Iterator[Sequence[Any]]) -> Iterator[dict[Any, Any]]:
    for values in generator:
        yield dict(zip(items, values, strict=True))


def _classes(errors: Sequence[_Errors]) -> tuple[type[BaseException], ...]:
    return tuple(tf.compat.v1.errors.exception_type_from_error_code(e) if isinstance(e, int) else e for e in errors)


def _in_pool(is_asked: bool, number: int) -> Any:
    if not is_asked:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"`stage_subgraph_thread_pool_id` must be a whole number, at least 0. Received: {number!r}.")
    return config_pb2.RunOptions(inter_op_thread_pool=number + 1)  # 0 is the pool of everything else


class _Fields:
    """Fields of our own, with their defaults; others are those of `message`, if there is one."""

    def __init__(self, message: Any = None, **own: Any) -> None:
        object.__setattr__(self, "_message", message)
        object.__setattr__(self, "_own", own)

    def __getattr__(self, name: str) -> Any:
        own = object.__getattribute__(self, "_own")
        return own[name] if name in own else getattr(object.__getattribute__(self, "_message"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._own:
            if self._message is None:
                raise AttributeError(f"There is no field {name!r}. There are: {', '.join(self._own)}.")
            setattr(self._message, name, value)
            return
        kind = type(self._own[name])
        if kind not in (bool, int, str):
            raise AttributeError(f"{name!r} cannot be assigned: set its fields.")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise TypeError(f"{name!r} must be {kind.__name__}. Received: {value!r}.")
        self._own[name] = value


class _Pools(list[_Fields]):
    """Thread pools of a session, for stages."""

    def add(self) -> _Fields:
        self.append(_Fields(inter_op_threads_num=0, intra_op_threads_num=0, global_name=""))
        return self[-1]


class ConfigProto(_Fields):
    """Stands for `tf.compat.v1.ConfigProto`, with DeepRec's fields.

    All fields of the message, and `graph_options.optimizer_options` with `do_async_embedding`,
    `async_embedding_options` (`threads_num`, `capacity`: both must be set; `use_stage_subgraph_thread_pool`,
    `stage_subgraph_thread_pool_id`), `do_smart_stage` and `stage_multi_stream`, which are accepted and off; and
    `session_stage_subgraph_thread_pool`, whose `add()` gives `inter_op_threads_num`, `intra_op_threads_num` (without
    meaning here) and `global_name`. Sessions take it once `sok.deeprec.install()` was called.

    Example:
        >>> config = ConfigProto(allow_soft_placement=True)
        >>> config.graph_options.optimizer_options.do_async_embedding = True
        >>> config.graph_options.optimizer_options.async_embedding_options.capacity = 2
        >>> config.allow_soft_placement, config.graph_options.optimizer_options.async_embedding_options.capacity
        (True, 2)
    """

    def __init__(self, *args: Any, **fields: Any) -> None:
        message = config_pb2.ConfigProto(*args, **fields)
        of_stages = {"use_stage_subgraph_thread_pool": False, "stage_subgraph_thread_pool_id": 0}
        optimizer = _Fields(
            message.graph_options.optimizer_options,
            do_async_embedding=False,
            async_embedding_options=_Fields(threads_num=0, capacity=0, **of_stages),
            do_smart_stage=False,
            do_smart_stage_gpu=False,
            stage_multi_stream=False,
        )
        graph = _Fields(message.graph_options, optimizer_options=optimizer)
        super().__init__(message, graph_options=graph, session_stage_subgraph_thread_pool=_Pools())

    def __deepcopy__(self, _: dict[int, Any]) -> ConfigProto:
        made, mine = ConfigProto(**{f.name: value for f, value in self._message.ListFields()}), self._own
        optimizer, other = (one.graph_options.optimizer_options._own for one in (self, made))
        other["async_embedding_options"]._own.update(optimizer["async_embedding_options"]._own)
        other.update({name: value for name, value in optimizer.items() if isinstance(value, bool)})
        for pool in mine["session_stage_subgraph_thread_pool"]:
            made.session_stage_subgraph_thread_pool.add()._own.update(pool._own)
        return made

    def to_message(self) -> config_pb2.ConfigProto:
        """What TensorFlow takes: with the thread pools, the first of which is for all that is not a stage."""
        message = config_pb2.ConfigProto()
        message.CopyFrom(self._message)
        pools = self.session_stage_subgraph_thread_pool
        if pools and not message.session_inter_op_thread_pool:
            message.session_inter_op_thread_pool.add()
            for pool in pools:
                message.session_inter_op_thread_pool.add(
                    num_threads=pool.inter_op_threads_num, global_name=pool.global_name
                )
        return message

    def to_asynchronous(self) -> _Asynchronous | None:
        """What lookups are to do; None: they are made in their step.

        Raises:
            ValueError: an option is missing or out of range.
        """
        options = self.graph_options.optimizer_options
        if options.do_smart_stage or options.do_smart_stage_gpu or options.stage_multi_stream:
            log.logger.warning(
                "`do_smart_stage` and `stage_multi_stream` are accepted, and off: stages stay as they are."
            )
        if not options.do_async_embedding:
            return None
        of_embedding = options.async_embedding_options
        for name in ("threads_num", "capacity"):
            if getattr(of_embedding, name) < 1:
                raise ValueError(
                    f"`async_embedding_options.{name}` must be set where `do_async_embedding` is True: it has no "
                    f"default, and is at least 1. Received: {getattr(of_embedding, name)}."
                )
        number, pools = of_embedding.stage_subgraph_thread_pool_id, self.session_stage_subgraph_thread_pool
        is_asked = of_embedding.use_stage_subgraph_thread_pool
        if is_asked and not 0 <= number < len(pools):
            raise ValueError(
                "`async_embedding_options.stage_subgraph_thread_pool_id` must be the number of a pool that was made by "
                f"`config.session_stage_subgraph_thread_pool.add()`: there are {len(pools)}. Received: {number}."
            )
        return _Asynchronous(of_embedding.capacity, _in_pool(is_asked, number))


def with_own_config(original: Callable[..., None]) -> Callable[..., None]:
    """What stands for `BaseSession.__init__`: it takes a `ConfigProto` of ours as well."""

    @functools.wraps(original)
    def init(self: Any, target: str = "", graph: tf.Graph | None = None, config: Any = None) -> None:
        is_ours = isinstance(config, ConfigProto)
        original(self, target, graph, config.to_message() if is_ours else config)
        try:
            asked = config.to_asynchronous() if is_ours else None
        except ValueError:
            self.close()
            raise
        if asked is not None:
            _attach(self, asked)

    return init
