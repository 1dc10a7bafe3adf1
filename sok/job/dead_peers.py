"""Says, after the traceback, that an exception came from a worker that is gone, and how that one ended."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

from sok.base.types import KerasModel

# What Horovod and Gloo write when a peer leaves: closed connections, or a shutdown that another rank asked for. Below,
# what TensorFlow's collectives do, and say that it is of them: gRPC writes the same of any other service.
_SIGNS = (
    *("horovod has been shut down", "horovod has not been initialized", "gloo"),
    *("connection closed by peer", "connection reset by peer", "broken pipe"),
)
_SIGNS_OF_COLLECTIVES = ("collective ops is aborted", "socket closed", "failed to connect to all addresses")

# How a program has ended: without an exception, or by one that another worker's end caused. Else: the exception's
# words.
WELL, BY_A_PEER = "well", "by a peer"

_is_installed = False
_tell: Callable[[], str] = str
_ended = WELL
_fits: weakref.WeakSet[Any] = weakref.WeakSet()


def explain_on_exit(rank: int, tell: Callable[[], str] = str) -> None:
    """Adds lines to what `sys.excepthook` writes. The hook that was there is called first.

    Args:
        rank: of this worker.
        tell: gives what is known of peers that have ended; empty if nothing is.
    """
    global _is_installed, _tell
    _tell = tell
    if _is_installed:
        return
    _is_installed = True
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        global _ended
        previous(kind, error, traceback)
        _ended = f"{kind.__name__}: {error}".splitlines()[0]
        if is_from_dead_peer(error):
            _ended = BY_A_PEER
            text = _tell() or ("a peer stopped, or the job was ended (see above); this worker cannot go on without it.")
            sys.stderr.write("".join(f"sok: rank {rank}: {line}\n" for line in text.splitlines()))
            sys.stderr.flush()

    sys.excepthook = hook


def note_fit(model: KerasModel) -> None:
    """Remembers, as long as it lives, a model that Keras' `fit` trains."""
    _fits.add(model)


def own_end() -> tuple[str, bool | None]:
    """How this program ends, and whether a callback has stopped a `fit`; None: not known. When it ends."""
    stopped = [bool(getattr(model, "stop_training", False)) for model in _fits]
    return _ended, any(stopped) if stopped else None


def is_from_dead_peer(error: BaseException) -> bool:
    """Returns whether `error`, or what caused it, is Horovod's report that another worker is gone."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        text = str(cause).lower()
        signs = (*_SIGNS, *(_SIGNS_OF_COLLECTIVES if "collective" in text else ()))
        if type(cause).__name__ == "HorovodInternalError" or any(sign in text for sign in signs):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
