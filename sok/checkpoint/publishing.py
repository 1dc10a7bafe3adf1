"""Saves by changes as a job trains, for those who serve meanwhile: every so many steps or seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from sok.base.types import PathLike
from sok.checkpoint import saving
from sok.checkpoint.arguments import Tables
from sok.job import context
from sok.job.agreement import check_equal, together
from sok.table.options import whole_number

_FIRST_LOOK = 1  # steps, after which the first guess of their time is made; where it is too long, the next is soon
_MOST_STEPS = 1 << 20  # to the next look


class Publisher:
    """Brings what a job has trained to those who follow its folder: rows that have changed, keys that were erased or
    evicted, and dense weights, all of one step.

    Args:
        path: the folder, for this job alone: `sok.save` writes there, with `incremental=True` and `dense`. Others read
            it by `sok.follow`, `sok.deltas` and `sok.follow_export`.
        variables_or_model: as for `sok.save`.
        every_steps, every_seconds: how often `step` publishes. One of them, or neither: `publish` alone does.
        dense: as for `sok.save`.
        max_chain: as for `sok.save`: a follower that begins reads so many saves at most. Each that begins a new chain
            writes all rows.

    Raises:
        TypeError, ValueError: an argument is out of range, or differs between workers.

    Example:
        >>> import sok, tempfile
        >>> table = sok.EmbeddingVariable(2, 10, name="published", seed=1)
        >>> bias = tf.Variable([0.5])
        >>> folder = tempfile.mkdtemp()
        >>> publisher = sok.Publisher(folder, table, every_steps=2, dense={"bias": bias})
        >>> for step in range(4):
        ...     table.assign([step], [[1.0, 1.0]])
        ...     print(publisher.step(), end=" ")
        False True False True
        >>> served, served_bias = sok.EmbeddingVariable(2, 10, name="served", seed=1), tf.Variable([0.0])
        >>> follower = sok.follow(folder, {"published": served}, dense={"bias": served_bias})
        >>> follower.poll(), int(served.size()), served_bias.numpy().tolist()
        (True, 4, [0.5])
    """

    def __init__(
        self,
        path: PathLike,
        variables_or_model: Tables,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        dense: bool | Mapping[str, tf.Variable] = True,
        max_chain: int = 100,
    ) -> None:
        if every_steps is not None and every_seconds is not None:
            raise ValueError("Give `every_steps` or `every_seconds`, not both.")
        if every_steps is not None:
            whole_number("every_steps", every_steps)
        is_number = isinstance(every_seconds, (int, float)) and not isinstance(every_seconds, bool)
        if every_seconds is not None and not (is_number and 0 < every_seconds < 1e9):
            raise ValueError(f"`every_seconds` must be a positive number. Received: {every_seconds!r}.")
        said = together(context.get_transport(), "sok/publisher/make", lambda: [every_steps, every_seconds])
        check_equal(said, "sok.Publisher: [every_steps, every_seconds]")
        self._path, self._what = path, variables_or_model
        self._how: dict[str, Any] = {"dense": dense, "max_chain": max_chain}
        self._every_steps, self._every_seconds = every_steps, every_seconds
        self._steps = 0  # since the last one
        self._look_at = _FIRST_LOOK  # at so many of them workers agree whether it is time
        self._since = time.monotonic()

    def step(self) -> bool:
        """To be called on all workers after each step. Publishes if it is time to, and says whether it did.

        With `every_seconds` worker 0 guesses from time to time in how many steps that is, so that steps in between need
        no collective: what is published may be some steps late, and more where steps take longer than those before.

        Raises:
            as `sok.save`.
        """
        self._steps += 1
        if self._every_steps is not None:
            is_due = self._steps >= self._every_steps
        elif self._every_seconds is not None and self._steps >= self._look_at:
            is_due, steps = together(context.get_transport(), "sok/publisher/look", self._look)[0]
            self._look_at = self._steps + steps
        else:
            is_due = False
        if is_due:
            self.publish()
        return is_due

    def publish(self) -> None:
        """Saves what has changed since the last time. Collective.

        Raises:
            as `sok.save`.
        """
        saving.save(self._path, self._what, incremental=True, progress=False, **self._how)
        if self._every_seconds is not None:
            rate = (time.monotonic() - self._since) / max(1, self._steps)
            steps = self._to_go(self._every_seconds / 2, rate)  # the next may be slower
            self._look_at = together(context.get_transport(), "sok/publisher/next", lambda: steps)[0]
        self._steps, self._since = 0, time.monotonic()

    def _look(self) -> tuple[bool, int]:
        """Whether it is time, and in how many steps it may be."""
        passed = time.monotonic() - self._since
        left = (self._every_seconds or 0.0) - passed
        # No farther than what is known: the first steps are no measure for many.
        return left <= 0, min(self._steps, self._to_go(left, passed / self._steps))

    @staticmethod
    def _to_go(seconds: float, seconds_of_a_step: float) -> int:
        return min(_MOST_STEPS, max(1, math.ceil(seconds / max(seconds_of_a_step, 1e-6))))
