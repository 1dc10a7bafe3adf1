"""The runs of a session whose graph has stages: each takes batches that were read, and may have begun, before.

Of each stage that a run needs it feeds one batch. Threads read batches into a buffer; where lookups go ahead, a thread
begins those of the batches next in turn, as `sok.ahead` does.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import session as tf_session

from sok.base import log
from sok.job import context
from sok.lookup import stages
from sok.lookup.ahead import Pipeline
from sok.lookup.session_plan import Feeds, SessionPlan
from sok.lookup.stages import Source, Stage

_Batch = list[np.ndarray]

_SECONDS_TO_LEAVE = 5.0  # for peers to answer that no more begins, and for threads to end what they read
_LOST = (tf.errors.AbortedError, tf.errors.UnavailableError)  # after which TensorFlow makes a session anew

_named: set[str] = set()  # tables of lookups that are not made ahead, as far as that was said


class SessionRuns:
    """Stands for `run` and `close` of a session, until `leave`.

    Args:
        session: a `tf.compat.v1.Session`. What it is given as `fetches` decides which stages a run takes batches of.
        depth: how many batches have begun before their turn; 0: lookups are made in their step.
        options: of the runs in which lookups begin; None: the usual ones.
    """

    def __init__(
        self, session: tf.compat.v1.Session, depth: int = 0, options: config_pb2.RunOptions | None = None
    ) -> None:
        self._session, self._depth, self._options = session, depth, options
        self._run, self._close = session.run, session.close
        self._begins_with: dict[Stage, list[_Batch]] = {}
        self._lock = threading.Lock()
        self._taps: dict[Stage, _Tap] = {}
        self._needs: dict[tuple[str, ...], list[_Need]] = {}
        self._has_left = False
        session.run, session.close = self.run, self.close

    def run(
        self,
        fetches: object,
        feed_dict: Mapping[Any, Any] | None = None,
        options: config_pb2.RunOptions | None = None,
        run_metadata: config_pb2.RunMetadata | None = None,
    ) -> Any:
        """As the session's, with a batch of each stage that `fetches` need, and that `feed_dict` does not give.

        Raises:
            tf.errors.OutOfRangeError: a stage has no more batches on any worker.
        """
        needed = self._needed(fetches, feed_dict)
        taps = [self._tap(need.stage) for need in needed if need.takes]
        feeds: Feeds = {}
        for tap in taps:
            feeds |= tap.take()
        for need in needed:
            if need.is_given and self._depth:
                feeds = self._tap(need.stage).with_given(
                    feeds, lambda tensors, feeds: self._run_fed(tensors, feeds, feed_dict, self._options)
                )
        try:
            found = self._run_fed(fetches, feeds, feed_dict, options, run_metadata)
        except _LOST:
            raise  # the batches are for the session to come
        except BaseException:
            for tap in taps:
                tap.used()
            raise
        for tap in taps:
            tap.used()
        return found

    def close(self) -> None:
        """Leaves, and closes the session."""
        self.leave()
        self._close()

    def leave(self) -> None:
        """Reads and begins no more, which peers are told."""
        if self._has_left:
            return
        self._has_left = True
        taps, until = list(self._taps.values()), time.monotonic() + _SECONDS_TO_LEAVE
        left = [future for tap in taps if (future := tap.leave()) is not None]
        concurrent.futures.wait(left, _SECONDS_TO_LEAVE)
        for tap in taps:  # what is being read is kept: the session is still there
            tap.wait(max(until - time.monotonic(), 0.0))
        self._session.run, self._session.close = self._run, self._close

    def begin_with(self, batches: dict[Stage, list[_Batch]]) -> None:
        """Takes what another session has read and not used before it reads."""
        self._begins_with = batches

    def unused(self) -> dict[Stage, list[_Batch]]:
        """Of each stage the batches that were read and have had no step, in their order."""
        return {stage: tap.unused() for stage, tap in self._taps.items()}

    def _run_fed(self, fetches: Any, feeds: Feeds, feed_dict: Any, options: Any, run_metadata: Any = None) -> Any:
        if not feeds:
            return self._run(fetches, feed_dict, options, run_metadata)
        with self._session.graph.as_default():  # where tensors are keys
            fed = {ref.deref(): value for ref, value in feeds.items()} | dict(feed_dict or {})
            return self._run(fetches, fed, options, run_metadata)

    def _tap(self, stage: Stage) -> _Tap:
        with self._lock:
            if stage not in self._taps:
                self._taps[stage] = self._new_tap(stage)
            return self._taps[stage]

    def _new_tap(self, stage: Stage) -> _Tap:
        def read(source: Source) -> _Batch:
            with stage.turn:
                fed = next(source.generator) if source.generator is not None else {}
            if source.given:
                keys, tensors = zip(*source.given, strict=True)
                fed |= dict(zip(keys, self.run(tensors), strict=True))
            found: _Batch = self.run(source.tensors, fed or None, source.options)
            return found

        buffer = _Buffer(stage.source, read, self._begins_with.pop(stage, []))
        self._tell_what_stays(stage)
        if not self._depth or not (stage.lookups or stage.reads):
            return _Tap(stage, buffer)
        stage.check_depth(self._depth)
        user = stage.user and stage.user()
        if user is not None and not user._has_left and stage.lookups:
            raise RuntimeError(
                f"Another session of this graph begins the lookups of stage '{stage.name}' ahead, and workers tell the "
                "two apart by the graph. Close that session first, or make a graph for each."
            )
        stage.user = weakref.ref(self)
        plan = SessionPlan(stage, lambda tensors, feeds: self._run_fed(tensors, feeds, None, self._options))
        return _Tap(stage, buffer, plan, Pipeline(plan, self._depth, stage.readings))

    def _tell_what_stays(self, stage: Stage) -> None:
        if not self._depth or context.rank() != 0:
            return
        for table, why in stage.stay.items():
            if table not in _named:
                _named.add(table)
                log.logger.warning("The lookup of table '%s' is made in its step, not ahead of it: %s.", table, why)

    def _needed(self, fetches: Any, feed_dict: Any) -> list[_Need]:
        graph = self._session.graph
        found = stages.of_graph(graph)
        if not found:
            return []
        handler = tf_session._FetchHandler(graph, fetches, {})
        keys = [one for key in feed_dict or {} for one in tf.nest.flatten(key, expand_composites=True)]
        given = [key if isinstance(key, str) else getattr(key, "name", "") for key in keys]
        wanted = [*handler.fetches(), *handler.targets()]
        key = (*(one.name for one in wanted), "fed:", *given)
        if key not in self._needs:
            self._needs[key] = _needs_of(wanted, found, set(given))
        return self._needs[key]


@dataclasses.dataclass(frozen=True)
class _Need:
    """What a run needs of a stage."""

    stage: Stage
    takes: bool  # a batch
    is_given: bool  # lookups of it have ids, or what they come from, of `feed_dict`


def _needs_of(wanted: list[Any], found: list[Stage], given: set[str]) -> list[_Need]:
    """Of the stages what the wanted tensors and operations need."""
    by_name = {output.name: stage for stage in found for output in stage.outputs}
    by_answer = {sent.words.name: stage for stage in found for sent in stage.lookups}
    takes: set[Stage] = set()
    looks_up: set[Stage] = set()
    seen, waiting = set(), list(wanted)
    while waiting:
        one = waiting.pop()
        if one.name in seen or one.name in given:
            continue
        seen.add(one.name)
        if one.name in by_answer:
            looks_up.add(by_answer[one.name])
        if one.name in by_name:
            takes.add(by_name[one.name])
        elif isinstance(one, tf.Operation):
            waiting += [*one.inputs, *one.control_inputs]
        else:
            waiting.append(one.op)
    return [
        _Need(stage, stage in takes, stage in looks_up and not given.isdisjoint(stage.leads_to_lookups()))
        for stage in found
        if stage in takes or stage in looks_up
    ]


class _Tap:
    """Of which a run takes the batches of a stage."""

    def __init__(
        self, stage: Stage, buffer: _Buffer, plan: SessionPlan | None = None, pipeline: Pipeline | None = None
    ) -> None:
        self._stage, self._buffer, self._plan, self._pipeline = stage, buffer, plan, pipeline
        self._current: list[_Batch] = []  # of the run that is on
        self._take_begun: Callable[[], Any] | None = None
        if pipeline is not None:
            self._take_begun, _ = pipeline.read(buffer)

    def take(self) -> Feeds:
        """What to feed of the next batch."""
        if self._take_begun is None or self._plan is None:
            batch = next(self._buffer, None)
            feeds = None if batch is None else dict(zip((t.ref() for t in self._stage.outputs), batch, strict=True))
        else:
            found = self._take_begun().result()
            batch, feeds = (None, None) if found is None else found
            if batch is not None:
                self._plan.begun.popleft()
        if batch is None or feeds is None:
            raise tf.errors.OutOfRangeError(None, None, f"Stage '{self._stage.name}' has no more batches.")
        self._current.append(batch)
        return feeds

    def with_given(self, feeds: Feeds, run: Callable[[Sequence[Any], Feeds], list[np.ndarray]]) -> Feeds:
        """What to feed where `feed_dict`, which `run` knows, gives something of which lookups are made."""
        if self._plan is None or self._plan.is_alone or self._pipeline is None:
            return feeds
        batch = {t.ref() for t in self._stage.outputs}
        left = {ref: value for ref, value in feeds.items() if ref in batch or ref not in self._plan.begun_tensors}
        return left | self._pipeline.between(self._plan.send_given, left, run)

    def used(self) -> None:
        """The run is over."""
        self._current.clear()

    def leave(self) -> concurrent.futures.Future[None] | None:
        self._buffer.stop()
        return None if self._pipeline is None else self._pipeline.leave()

    def wait(self, seconds: float) -> None:
        """Until no thread reads any more."""
        self._buffer.wait(seconds)

    def unused(self) -> list[_Batch]:
        begun = [] if self._plan is None else list(self._plan.begun)
        return [*self._current, *begun, *self._buffer.unused()]


class _Buffer(Iterator[_Batch]):
    """Batches that threads have read, at most `capacity` and one of each thread."""

    def __init__(self, source: Source, read: Callable[[Source], _Batch], begins_with: list[_Batch]) -> None:
        self._source, self._read = source, read
        self._items: collections.deque[_Batch | BaseException] = collections.deque(begins_with)
        self._changed = threading.Condition()
        self._working, self._has_begun, self._has_stopped = source.threads, False, False

    def __next__(self) -> _Batch:
        with self._changed:
            if not self._has_begun:
                self._has_begun = True
                for i in range(self._source.threads):
                    threading.Thread(target=self._work, name=f"sok-stage-{i}", daemon=True).start()
            self._changed.wait_for(lambda: self._items or not self._working or self._has_stopped)
            if not self._items or self._has_stopped:
                raise StopIteration
            item = self._items.popleft()
            self._changed.notify_all()
        if isinstance(item, BaseException):
            raise item
        return item

    def stop(self) -> None:
        """Gives no more."""
        with self._changed:
            self._has_stopped = True
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Once it was stopped: until its threads have ended."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._has_begun and self._working), seconds)

    def unused(self) -> list[_Batch]:
        with self._changed:
            return [item for item in self._items if not isinstance(item, BaseException)]

    def _work(self) -> None:
        is_going_on = True
        while is_going_on and not self._has_stopped:
            try:
                item: _Batch | BaseException = self._read(self._source)
            except self._source.ignored:
                continue
            except self._source.closing:
                break
            except BaseException as error:  # whatever it is, it is for who takes the batch
                item, is_going_on = error, False
            with self._changed:
                self._changed.wait_for(lambda: len(self._items) < self._source.capacity or self._has_stopped)
                self._items.append(item)
                self._changed.notify_all()
                if self._has_stopped:
                    break
        with self._changed:
            self._working -= 1
            self._changed.notify_all()
