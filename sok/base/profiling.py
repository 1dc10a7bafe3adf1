"""A trace of where the time of each step goes, for Perfetto or Chrome.

The spans are made by the native ops (include/sok/profile.h); this file starts and stops them.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import warnings
from typing import Any

import tensorflow as tf

from sok.base import _ops, tracing
from sok.base.types import PathLike

_MAX_SPANS = 65536


class Recording:
    """A trace that is started and stopped. Arguments and results: `sok.profile`."""

    def __init__(self, path: PathLike, max_spans: int = _MAX_SPANS) -> None:
        self._asked = os.fspath(path)
        self._max_spans = max_spans
        self.path = ""
        self.spans = self.dropped = 0

    def start(self, rank: int, size: int) -> None:
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

    def stop(self) -> None:
        try:
            said = _run("stop")
        except tf.errors.FailedPreconditionError as error:
            raise RuntimeError(_text_of(error)) from None
        self.spans, self.dropped = said["spans"], said["dropped"]
        if self.dropped:
            warnings.warn(
                f"sok.profile: the oldest {self.dropped} spans are not in {self.path}: a thread had more than "
                f"max_spans = {self._max_spans}.",
                stacklevel=4,
            )


def follow_environment(rank: int, size: int) -> None:
    """With SOK_TRACE=FILE in the environment, profiles from now to the end of the process. Does so once."""
    global _followed
    path = os.environ.get("SOK_TRACE", "0")
    if _followed or path in ("", "0", "1"):
        return
    started = Recording(path)
    started.start(rank, size)
    _followed = True

    def finish() -> None:
        started.stop()
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
