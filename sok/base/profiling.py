"""`sok.profile`: where the time of each step goes, as a trace for Perfetto or Chrome.

The spans are made by the native ops (include/sok/profile.h); this file starts and stops them.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import types
import warnings
from typing import Any

import tensorflow as tf

from sok.base import _ops, tracing

_MAX_SPANS = 65536


class profile:
    """Writes a trace of what runs inside a `with`: one span for each part of each table's work in each step.

        with sok.profile("step.json"):
            model.fit(...)

    Open the file in https://ui.perfetto.dev or chrome://tracing. Spans are `route` (keys are checked and sorted by
    their owners), `exchange` (keys, rows or gradients travel), `narrow` and `widen` (before and after, if in 16 bit),
    `find` (rows are looked up or made), `combine` (rows are pooled), `find+combine` (both at once, on one worker),
    `backward` (gradients are brought to rows), `update` (the optimizer), and `collective` (what workers exchange for
    anything else). docs/profiling.md reads one.

    Args:
        path: the file, made or overwritten. With several workers each writes its own: 'step.json' becomes
            'step.rank0.json' and so on; Perfetto opens them together.
        max_spans: spans kept of each thread, at least 1; 128 bytes each. Of more the newest are kept, and a warning
            (and `dropped_spans` in the file) says how many are missing.

    After the `with`: `path`, the file's real name; `spans` in it; and `dropped`.

    Raises:
        ValueError: on entry, the file cannot be written, or `max_spans` makes no sense.
        RuntimeError: on entry, a profile runs already in this process; on leaving, the disk is full.

    Not collective: a single worker may do it. Also sees functions that were traced before. While no profile runs, a
    span costs a nanosecond. SOK_TRACE=FILE in the environment profiles a whole program.

    Example:
        >>> import os, sok, tempfile, tensorflow as tf
        >>> table = sok.EmbeddingVariable(4, 100, name="profiled")
        >>> with sok.profile(os.path.join(tempfile.mkdtemp(), "step.json")) as p:
        ...     rows = table.sparse_read(tf.constant([1, 2, 3], tf.int64))
        >>> p.spans, p.dropped
        (1, 0)
    """

    def __init__(self, path: str | os.PathLike[str], max_spans: int = _MAX_SPANS) -> None:
        self._asked = os.fspath(path)
        self._max_spans = max_spans
        self.path = ""
        self.spans = self.dropped = 0

    def __enter__(self) -> profile:
        from sok.job import context  # context starts the profile that the environment asks for

        transport = context.get_transport()
        self._start(transport.rank, transport.size)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        self._stop()

    def _start(self, rank: int, size: int) -> None:
        if isinstance(self._max_spans, bool) or not isinstance(self._max_spans, int):
            raise ValueError(f"`max_spans` must be a whole number of at least 1. Received: {self._max_spans!r}.")
        # Absolute: the working directory may be another one when the file is written or spoken of.
        path = os.path.abspath(_path_of_rank(self._asked, rank, size))
        try:
            _run("start", path, self._max_spans, rank)
        except tf.errors.InvalidArgumentError as error:
            raise ValueError(_text_of(error)) from None
        except tf.errors.FailedPreconditionError as error:
            raise RuntimeError(_text_of(error)) from None
        self.path = path

    def _stop(self) -> None:
        try:
            said = _run("stop")
        except tf.errors.FailedPreconditionError as error:
            raise RuntimeError(_text_of(error)) from None
        self.spans, self.dropped = said["spans"], said["dropped"]
        if self.dropped:
            warnings.warn(
                f"sok.profile: the oldest {self.dropped} spans are not in {self.path}: a thread had more than "
                f"max_spans = {self._max_spans}.",
                stacklevel=3,
            )


def follow_environment(rank: int, size: int) -> None:
    """With SOK_TRACE=FILE in the environment, profiles from now to the end of the process. Does so once."""
    global _followed
    path = os.environ.get("SOK_TRACE", "0")
    if _followed or path in ("", "0", "1"):
        return
    started = profile(path)
    started._start(rank, size)
    _followed = True

    def finish() -> None:
        started._stop()
        sys.stderr.write(f"sok: rank {rank}: {started.spans} spans, in {started.path}\n")

    atexit.register(finish)


_followed = False


def _run(action: str, path: str = "", max_spans: int = 0, rank: int = 0) -> dict[str, Any]:
    return json.loads(tracing.run_now(lambda: _ops.lib().sok_profile(path, max_spans, action=action, rank=rank)))


def _path_of_rank(path: str, rank: int, size: int) -> str:
    if size == 1:
        return path
    stem, extension = os.path.splitext(path)
    return f"{stem}.rank{rank}{extension}"


def _text_of(error: tf.errors.OpError) -> str:
    # TensorFlow puts the op's name around it.
    return error.message.partition("}} ")[2].partition(" [Op:")[0] or error.message
