"""The child side: one contestant of one job in a process of its own, driven over a socket.

    python -m benchmarks.contestant NAME JOB       (JOB: JSON; SOK_BENCH_SOCKET: where the driver listens)

It prepares everything, says "ready" with the names of what it can measure, then answers commands, one JSON line each:

    steps NAME FIRST COUNT     runs steps FIRST.. and says how long each took
    inspect NAME               anything else the contestant has to say about NAME
    quit

The C++ programs speak the same.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

# Contestant -> module of benchmarks.contestants, and what it adds to the parameters of the job.
MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    "sok": ("ours", {}),
    "sok-lazyadam": ("ours", {"optimizer": "lazyadam"}),
    "sok-single": ("ours", {"single": True}),
    "tf": ("stock_tf", {}),
    "tf-hashed": ("stock_tf", {"finds_keys": True}),
    "torch": ("torch_bags", {}),
    "fbgemm": ("fbgemm", {}),
    "tfra": ("tfra", {}),
}


def module_of(name: str) -> tuple[str, dict[str, Any]]:
    """Module and parameters of a contestant. 'sok-2x1' is 'sok' on 2 workers with 1 thread each."""
    return MODULES[re.sub(r"-\d+x\d+$", "", name)]


def shape_of(name: str) -> tuple[int, int] | None:
    """Workers and threads that a name like 'sok-2x1' asks for."""
    found = re.fullmatch(r"sok(?:-single)?-(\d+)x(\d+)", name)
    return (int(found.group(1)), int(found.group(2))) if found else None


class Unsupported(Exception):
    """The contestant has nothing that does this job; the text says what is missing."""


Step = Callable[[int], Any]


class Prepared(dict[str, Step]):
    """What a contestant made ready: for each measurement, a function of the step's number.

    `about` says how the contestant does it; `inspections` answer what is not a time.
    """

    def __init__(self, about: str = "") -> None:
        super().__init__()
        self.about = about
        self.inspections: dict[str, Callable[[], dict[str, Any]]] = {}
        # Steps that cannot be repeated (they bring new keys) get no warm-up.
        self.once: set[str] = set()
        # Measurements whose function runs several steps in one call.
        self.steps_per_call: dict[str, int] = {}


def run_steps(step: Step, first: int, count: int, steps_per_call: int = 1) -> dict[str, Any]:
    """Times `count` calls, in seconds a step; also the processor time that this process used."""
    seconds = []
    before = os.times()
    for number in range(first, first + count):
        start = time.perf_counter()
        step(number)
        seconds.append((time.perf_counter() - start) / steps_per_call)
    after = os.times()
    return {"seconds": seconds, "cpu_s": after.user + after.system - before.user - before.system}


def serve(prepared: Prepared, lines: Any, say: Callable[[dict[str, Any]], None]) -> None:
    """Answers commands until `quit` or the end of input."""
    # A collection among TensorFlow's objects takes a tenth of a second; steps leave no cycles worth one.
    gc.collect()
    gc.disable()
    for line in lines:
        words = line.split()
        if not words or words[0] == "quit":
            return
        try:
            if words[0] == "steps":
                per_call = prepared.steps_per_call.get(words[1], 1)
                say(run_steps(prepared[words[1]], int(words[2]), int(words[3]), per_call))
            elif words[0] == "inspect":
                say(prepared.inspections[words[1]]() if words[1] in prepared.inspections else {})
            else:
                raise ValueError(f"unknown command {words[0]!r}")
        except Exception as error:  # whatever a peer raises is an answer, not the end of the run
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"[:500]})


def main(arguments: list[str]) -> int:
    name, job = arguments[0], json.loads(arguments[1])
    module_name, extra = module_of(name)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ["SOK_BENCH_SOCKET"])
    stream = connection.makefile("rw", encoding="utf-8")

    def say(message: dict[str, Any]) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    say({"rank": int(os.environ.get("HOROVOD_RANK", "0"))})
    try:
        module = importlib.import_module(f"benchmarks.contestants.{module_name}")
        prepared = module.prepare({**job, **extra})
    except Unsupported as reason:
        say({"unsupported": str(reason)})
        return 0
    except Exception as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"[:500]})
        return 1
    say(
        {
            "ready": list(prepared),
            "once": sorted(prepared.once),
            "about": prepared.about,
            "version": module.version(),
        }
    )
    serve(prepared, stream, say)
    return 0


if __name__ == "__main__":
    # Not this module's own copy of Unsupported: contestants raise that of benchmarks.contestant.
    from benchmarks import contestant

    sys.exit(contestant.main(sys.argv[1:]))
