"""What begins for a batch of a v1 graph's stage, in a session: as `sok.lookup.begun.Plan`, for `ahead.Pipeline`.

A batch is the values of the stage's outputs. Its ticket is what to feed in the step: these, and what came of the first
halves of its lookups.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base.graph_ops import run_now
from sok.job.job import job_of
from sok.lookup import exchange, messages
from sok.lookup.begun import sent_tensors
from sok.lookup.no_samples import without_samples
from sok.lookup.said import LEFT, Said
from sok.lookup.stages import Stage

Feeds = dict[Any, Any]

_GIVEN = 2**31 - 2  # the number of a batch that a run is given
_FIXED = (
    "the data of this worker have ended, and it cannot take part in the steps of others, as its batches have a fixed "
    "number of samples: batch them without drop_remainder, or give all workers as many batches"
)


class SessionPlan:
    """Begins the lookups of a stage's batches.

    Args:
        stage: of the session's graph.
        run: gives the values of tensors, fed with `Feeds`: `run(tensors, feeds)`.
    """

    def __init__(self, stage: Stage, run: Callable[[Sequence[Any], Feeds], list[np.ndarray]]) -> None:
        self.number, self._stage, self._run = stage.number, stage, run
        self._lookups = list(stage.lookups)
        self.job = job_of(stage.tables) if self._lookups else None
        self.is_alone = self.job is None
        self._rank, self._size = (0, 1) if self.job is None else (self.job.rank, self.job.size)
        # Of each lookup all but the number of the batch, which is fed as such.
        self._sent = [tensor for sent in self._lookups for tensor in sent_tensors(sent)[1:]]
        self.begun_tensors = {tensor.ref() for tensor in self._sent}
        self._said = Said()
        self._leaves = tf.nest.flatten(stage.spec)
        self.begun: collections.deque[list[np.ndarray]] = collections.deque()  # batches whose turn has not come

    def send(self, number: int, batch: list[np.ndarray]) -> tuple[Feeds, list[np.ndarray]]:
        """Begins the lookups of a batch."""
        self.begun.append(batch)
        return self._begin(self._fed(number, batch, has_ended=False))

    def ticket(self, sent: tuple[Feeds, list[np.ndarray]]) -> Feeds:
        """Of what `send` gave: what to feed in the step.

        Raises:
            tf.errors.InvalidArgumentError: a worker has begun the batch with words in place of its keys.
        """
        return self._feeds(*sent)[0]

    def send_given(self, batch: Feeds, run: Callable[[Sequence[Any], Feeds], list[np.ndarray]]) -> Feeds:
        """Begins lookups of what a run is given, and not of a batch alone: what to feed besides.

        Between two batches, on all workers between the same. run: as of the plan, with what is given.
        """
        self._said.check_open()
        number = {self._stage.batch_number.ref(): _GIVEN}
        sent = run(self._sent, batch | number)
        self._said.is_batch(*sent[:2])
        return number | dict(zip((tensor.ref() for tensor in self._sent), sent, strict=True))

    def send_none(self, number: int) -> tuple[list[np.ndarray], Feeds] | None:
        """Begins a batch that this worker has not; None: no worker has it."""
        if self.is_alone:
            return None
        if any(
            not isinstance(leaf, tf.SparseTensorSpec) and leaf.shape.rank and leaf.shape[0] for leaf in self._leaves
        ):
            self._end(number)
            return None
        feeds, is_batch = self._feeds(*self._begin(self._fed(number, self._no_samples, has_ended=True)))
        if not is_batch:
            return None
        self.begun.append(self._no_samples)
        return self._no_samples, feeds

    def refuse(self, number: int, text: str) -> None:
        """Begins a batch with nothing but bad news."""
        if not self.is_alone and not self._said.over:
            self._said.hear(*self._tell(number, text))

    def leave(self) -> None:
        """In place of the next batch: tells the others that this worker begins no more, so that none waits for it."""
        self.refuse(0, LEFT)

    @functools.cached_property
    def _no_samples(self) -> list[np.ndarray]:
        spec = self._stage.spec
        return run_now(lambda: tf.nest.flatten(tf.nest.map_structure(without_samples, spec), expand_composites=True))

    def _fed(self, number: int, batch: Sequence[np.ndarray], has_ended: bool) -> Feeds:
        stage = self._stage
        fed = dict(zip((t.ref() for t in stage.outputs), batch, strict=True))
        return fed | {stage.batch_number.ref(): number, stage.has_ended.ref(): has_ended}

    def _begin(self, feeds: Feeds) -> tuple[Feeds, list[np.ndarray]]:
        self._said.check_open()
        sent: list[np.ndarray] = self._run([*self._sent, *self._stage.reads], feeds)
        return feeds, sent[: len(self._sent)]

    def _feeds(self, feeds: Feeds, sent: list[np.ndarray]) -> tuple[Feeds, bool]:
        """What to feed in the step, and whether any worker has the batch."""
        if self.is_alone:
            return feeds, True
        words, splits, *_ = sent  # of the first lookup: who refuses, refuses all
        is_batch = self._said.is_batch(words, splits)
        having = sum(not messages.says_end(one) for one in self._said.hear(words, splits))
        weight = 0.0 if feeds[self._stage.has_ended.ref()] else self._size / max(having, 1)
        sent_by_tensor = zip((tensor.ref() for tensor in self._sent), sent, strict=True)
        return feeds | dict(sent_by_tensor) | {self._stage.weight.ref(): weight}, is_batch

    def _tell(self, number: int, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Says so in place of all keys; what the workers have said to the first lookup."""
        feeds = {self._stage.batch_number.ref(): number}
        received = []
        for sent in self._lookups:
            feeds |= exchange.refusal(sent, number, text)
            received += [sent.words, sent.splits, *([] if sent.rows is None else [sent.rows.home])]
        words, splits, *_ = self._run(received, feeds)
        return words, splits

    def _end(self, number: int) -> None:
        """No batch, of workers that cannot have one without samples: all have ended, or nobody goes on."""
        self._said.check_open()
        words, splits = self._tell(number, _FIXED)
        if any(messages.refused_text(one) != _FIXED for one in self._said.hear(words, splits)):
            raise tf.errors.InvalidArgumentError(None, None, f"rank {self._rank}: {_FIXED}.")
