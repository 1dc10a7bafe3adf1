"""Where one worker may ask something of all: the others do it where they next meet, wherever they are in the program.

Workers meet where `fit`, its validation and each of its epochs begin or end, in functions that are served here, and at
the end of the program. Only once something is served: until then nobody waits for anybody there.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable
from typing import Any

from sok.base.patching import Here
from sok.job import agreement, context, dead_peers

_NAME, _END = "sok/meeting", "the end of the program"
_served: dict[str, Callable[..., None]] = {}
_doing = Here()


def serve(what: str, do: Callable[..., None]) -> None:
    """Lets one worker ask all for `do(*arguments)`, which is collective. All workers call this, and before that."""
    if not _served:
        atexit.register(_end)
    _served[what] = do


def ask(what: str, *arguments: Any) -> None:
    """Has all workers do what is served, and does it; returns when it is done.

    Others that ask the same meanwhile do it once with this worker; the rest do it where they next meet.

    Args:
        what: that is served.
        arguments: what JSON can hold.

    Raises:
        As that does, on all workers.

    Collective, but others need not call it. A worker that comes to no meeting before the job's deadline
    (`sok.Init(deadline=)`) ends the job, with words.
    """
    if context.size() == 1 or _doing.value:
        _served[what](*arguments)
        return
    mine = [what, list(arguments)]
    while _met({"ask": mine})[0] != mine:
        pass


def together(where: str, part: Callable[[], Any]) -> list[Any]:
    """`sok.job.agreement.together` under the name `where`; does before what others ask.

    Raises:
        RuntimeError: the workers have met in different places.
    """
    if not _served or _doing.value:
        return agreement.together(context.get_transport(), where, part)
    while True:
        asked, said = _met({"where": where, "is": part()})
        if asked is None:
            return said


def _met(mine: dict[str, Any]) -> tuple[list[Any] | None, list[Any]]:
    """What was asked first, and is done now; or, if nobody asks, None and what all have said."""
    said = agreement.together(context.get_transport(), _NAME, lambda: mine)
    asked: list[Any] | None = next((one["ask"] for one in said if "ask" in one), None)
    if asked is not None:
        with _doing.inside(True):
            _served[asked[0]](*asked[1])
        return asked, []
    places = [one["where"] for one in said]
    if len(set(places)) > 1:
        where = ", ".join(f"rank {rank} in {place}" for rank, place in enumerate(places))
        raise RuntimeError(f"The workers are in different calls: {where}. All must run the same program.")
    return None, [one["is"] for one in said]


def _end() -> None:
    """At the end of a program that has not failed: does what others still ask, until all have come to theirs."""
    with contextlib.suppress(Exception):  # a peer has failed, and has said so
        if context.size() > 1 and dead_peers.own_end()[0] == dead_peers.WELL:
            together(_END, lambda: None)
