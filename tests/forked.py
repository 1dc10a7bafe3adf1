"""Programs that each begin as a fresh Python does, and share one start of TensorFlow, which takes seconds.

Run as a script it imports TensorFlow and `sok`, uses neither, and forks for each program that it is asked for. Nothing
has started a thread by then, so what a child finds is what a program finds after its imports. (`sok` loads its modules
when they are asked for.) A child ends as every Python does: threads are joined, what is registered for the end runs.

What is tested of imports, or of what TensorFlow reads while it is imported, needs a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import linecache
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any


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

    def run(
        self,
        program: str | Path,
        folder: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        deadline: float = 240.0,
    ) -> Ended:
        """Runs a program, a text or a file, in `folder`, to which its output goes too."""
        folder.mkdir(parents=True, exist_ok=True)
        request = {
            "text": program if isinstance(program, str) else program.read_text("utf-8"),
            "file": "program.py" if isinstance(program, str) else str(program),
            "arguments": arguments,
            "folder": str(folder),
            "environment": environment or {},
            "deadline": deadline,
        }
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
            sys.exit(_become(request))
        print(_status_of(child, request["deadline"]), file=answers, flush=True)


def _become(request: dict[str, Any]) -> int:
    """Is the program; its exit status."""
    os.setpgid(0, 0)  # a deadline ends what it has started, too
    os.chdir(request["folder"])
    for descriptor, name in enumerate(("/dev/null", "stdout", "stderr")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    os.environ.update(request["environment"])
    file = request["file"]
    sys.argv = [file, *request["arguments"]]
    sys.path.insert(0, os.path.dirname(file))
    # As notebooks do with their cells: tracebacks, and what is compiled from its source, find it.
    linecache.cache[file] = (len(request["text"]), None, request["text"].splitlines(keepends=True), file)
    try:
        exec(compile(request["text"], file, "exec"), {"__name__": "__main__", "__file__": file})
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _status_of(child: int, deadline: float) -> int:
    ends = time.monotonic() + deadline
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > ends:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
