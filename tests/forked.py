"""Programs that each begin as a fresh Python does, and share one start of TensorFlow, which takes seconds.

Run as a script it imports TensorFlow, Horovod and `sok`, uses none, and forks for each program that it is asked for, by
`Forked.run` or by a command (forked_client.py) that stands where `python` would. Nothing has started a thread by then,
so what a child finds is what a program finds after its imports. (`sok` loads its modules when they are asked for.) A
child leads a group of processes, has the environment that it was given, and ends as every Python does: uncaught errors
are told, threads are joined, what is registered for the end runs. It ends, with its group, when who asked for it ends.

What is tested of imports, or of what TensorFlow reads while it is imported, needs a process of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import gc
import importlib
import importlib.util
import io
import linecache
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from tests import forked_client
from tests.short_stacks import with_short_stacks

_ROOT = Path(__file__).resolve().parents[1]
MARK = "SOK_TEST_JOB"  # in the environment of all processes of a job: 32 characters, by which they are found


@dataclasses.dataclass(frozen=True)
class Ended:
    """A program that has ended."""

    status: int  # 0: well; negative: the signal that ended it
    stdout: str
    stderr: str


class Forked:
    """The process that forks, from outside."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="forked")
        self._address = os.path.join(self._folder, "socket")
        # One thread, as OpenBLAS would have as many as there are processors. Children write over the mark.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: "0" * 32}
        command = [sys.executable, "-m", "tests.forked", self._address]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT, env=environment
        )
        self.pid = self._process.pid
        assert self._process.stdout.readline() == b"ready\n", "the process that forks did not begin"

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
        what = ["-c", program] if isinstance(program, str) else [str(program)]
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(os.devnull))]
            files += [stack.enter_context((folder / name).open("w")) for name in ("stdout", "stderr")]
            request = {
                "argv": [*what, *arguments],
                "folder": str(folder),
                "environment": {**os.environ, **(environment or {})},
            }
            child = stack.enter_context(forked_client.ask(self._address, request, [file.fileno() for file in files]))
            child.pid()
            readable, _, _ = select.select([child.connection], [], [], deadline)
            if not readable:
                child.connection.shutdown(socket.SHUT_WR)
            status = child.status()
        return Ended(status, (folder / "stdout").read_text(), (folder / "stderr").read_text())

    def command(self, *arguments: str) -> list[str]:
        """The command that does what `python *arguments` does."""
        return [sys.executable, "-I", "-S", forked_client.__file__, self._address, *arguments]

    def close(self) -> None:
        """Ends it, and what it has forked."""
        if self._process.stdin.closed:
            return
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@functools.cache
def shared() -> Forked:
    """The one of this process, which ends with it."""
    process = Forked()
    atexit.register(process.close)
    return process


class _Server:
    """What forks. One thread: a connection for each child that lives, which ends with the child or is its end."""

    def __init__(self, address: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        self._children: dict[int, socket.socket] = {}  # by process
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(sys.stdin, selectors.EVENT_READ, None)

    def serve(self) -> dict[str, Any] | None:
        """Returns None at the end of stdin and, in each child, what it is asked to be."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    self._end_all()
                    return None
                if key.fileobj is self._listener:
                    request = self._fork(self._listener.accept()[0])
                    if request is not None:
                        return request
                elif isinstance(key.fileobj, socket.socket):
                    self._leave(key.fileobj, key.data)
                else:
                    self._reap(int(key.fileobj), key.data)

    def _fork(self, connection: socket.socket) -> dict[str, Any] | None:
        try:
            request, files = forked_client.receive(connection)
        except OSError:  # who asked has ended meanwhile
            connection.close()
            return None
        child = os.fork()
        if child == 0:
            self._forget()
            connection.close()
            for descriptor, file in enumerate(files):
                os.dup2(file, descriptor)
            for file in files:
                os.close(file)
            return request
        for file in files:
            os.close(file)
        self._children[child] = connection
        self._selector.register(connection, selectors.EVENT_READ, child)
        self._selector.register(os.pidfd_open(child), selectors.EVENT_READ, child)
        _tell(connection, child)
        return None

    def _forget(self) -> None:
        """A child has nothing of its siblings."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            elif isinstance(key.fileobj, int):
                os.close(key.fileobj)
        self._selector.close()

    def _leave(self, connection: socket.socket, child: int) -> None:
        """Who asked is gone, or waits no more."""
        if child in self._children:  # the same turn may have told of its end
            self._selector.unregister(connection)
            _end(child)

    def _reap(self, descriptor: int, child: int) -> None:
        _, status = os.waitpid(child, 0)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        connection = self._children.pop(child)
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)
        _tell(connection, os.waitstatus_to_exitcode(status))
        connection.close()

    def _end_all(self) -> None:
        for child in self._children:
            _end(child)
        for child in self._children:
            os.waitpid(child, 0)


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody is there any more
        connection.sendall(f"{number}\n".encode())


def _end(child: int) -> None:
    for kill in os.killpg, os.kill:  # it may not have got to a group of its own
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)


def _becomes(request: dict[str, Any], loaded: dict[str, str], mark: int | None) -> types.CodeType | str:
    """This process is the one that was asked for, but for its program: a module's name, or code."""
    os.setpgid(0, 0)  # so that all of it can be ended
    os.chdir(request["folder"])
    environment = {**loaded, **request["environment"]}
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    if mark and len(environment.get(MARK, "")) == 32:
        ctypes.memmove(mark, environment[MARK].encode(), 32)  # what others see in /proc
    sys.stdin = os.fdopen(0, closefd=False)
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), write_through=unbuffered)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False, errors="backslashreplace")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    return _program(request["argv"], environment.get("PYTHONPATH", ""))


def _program(argv: list[str], path: str) -> types.CodeType | str:
    """Python's own options -c and -m, or a file."""
    sys.path[:0] = [folder for folder in path.split(os.pathsep) if folder and folder not in sys.path]
    what, rest = argv[0], argv[1:]
    if what == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        return rest[0]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    if what == "-c":
        text, file = rest.pop(0), "program.py"
        sys.argv = ["-c", *rest]
        sys.path.insert(0, "")
    else:
        text, file = Path(what).read_text("utf-8"), what
        sys.argv = [what, *rest]
        sys.path.insert(0, os.path.dirname(os.path.abspath(what)))
        main.__file__ = what
    # As notebooks do with their cells: tracebacks, and what is compiled from its source, find it.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return compile(text, file, "exec")


def main() -> None:
    """In a child, what the program raises goes on to the end of this process, where Python tells it."""
    ready, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # what others print must not come between
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    mark, before = libc.getenv(MARK.encode()), dict(os.environ)
    for module in ("tensorflow", "horovod.tensorflow", "sok"):
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            importlib.import_module(module)
    if "tensorflow" in sys.modules:
        with_short_stacks()
    loaded = {name: value for name, value in os.environ.items() if before.get(name) != value}
    server = _Server(sys.argv[1])
    gc.collect()
    gc.freeze()  # children look at none of it, so they share it
    print("ready", file=ready, flush=True)
    ready.close()
    request = server.serve()
    if request is None:
        return
    program = _becomes(request, loaded, mark)
    if isinstance(program, str):
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(program, vars(sys.modules["__main__"]))


if __name__ == "__main__":
    main()
