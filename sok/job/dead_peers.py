"""Says in one line, after the traceback, that an exception came from a worker that is gone."""

from __future__ import annotations

import sys
import types

# What Horovod and Gloo write when a peer leaves: closed connections, or a shutdown that another rank asked for.
_SIGNS = ("horovod has been shut down", "connection closed by peer", "connection reset by peer", "gloo", "broken pipe")

_is_installed = False


def explain_on_exit(rank: int) -> None:
    """Adds the line to what `sys.excepthook` writes. The hook that was there is called first. Once per process."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        previous(kind, error, traceback)
        if is_from_dead_peer(error):
            sys.stderr.write(
                f"sok: rank {rank}: a peer stopped, or the job was ended (see above); "
                "this worker cannot go on without it.\n"
            )
            sys.stderr.flush()

    sys.excepthook = hook


def is_from_dead_peer(error: BaseException) -> bool:
    """Returns whether `error`, or what caused it, is Horovod's report that another worker is gone."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        text = str(cause).lower()
        if type(cause).__name__ == "HorovodInternalError" or any(sign in text for sign in _SIGNS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
