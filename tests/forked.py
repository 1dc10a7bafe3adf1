"""Programs that each begin as a fresh Python does, and share one start of TensorFlow, which takes seconds.

Run as a script it imports TensorFlow and `sok`, uses neither, and forks for each program that it is asked for. Nothing
has started a thread by then, so what a child finds is what a program finds after its imports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Ended:
    """A program that has ended."""

    status: int  # 0: well; negative: the signal that ended it
    stdout: str
    stderr: str


class Forked:
    """The process that forks, from outside."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[1],
        )

    def run(self, program: str, folder: Path, deadline: float = 240.0) -> Ended:
        """Runs a program's text in `folder`, to which its output goes too."""
        request = {"program": program, "folder": str(folder), "deadline": deadline}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        return Ended(status, (folder / "stdout").read_text(), (folder / "stderr").read_text())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def main() -> None:
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # what others print must not come between
    import tensorflow  # noqa: F401

    import sok  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(request["program"], request["folder"])
        print(_status_of(child, request["deadline"]), file=answers, flush=True)


def _become(program: str, folder: str) -> None:
    """Is the program, and ends with it."""
    status = 1
    try:
        os.chdir(folder)
        for descriptor, name in enumerate(("/dev/null", "stdout", "stderr")):
            opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(opened, descriptor)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        names = {"__name__": "__main__", "__file__": "program.py"}
        exec(compile(program, "program.py", "exec"), names)
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _status_of(child: int, deadline: float) -> int:
    ends = time.monotonic() + deadline
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > ends:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
