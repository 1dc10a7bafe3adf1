"""Asks the process of tests/forked.py for a program. Run as a script it is that program to whoever started it.

It hands over its descriptors, environment and folder, passes signals on, and ends as the program ends. It imports
little, as it stands where a start of Python should cost nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Child:
    """A program that was asked for, at the other end of `connection`."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._answers = connection.makefile("r")

    def pid(self) -> int:
        return self._number()

    def status(self) -> int:
        """Waits for its end: its exit status, or the negative number of the signal that ended it."""
        return self._number()

    def _number(self) -> int:
        answer = self._answers.readline()
        if not answer:
            raise RuntimeError("The process of tests/forked.py has ended.")
        return int(answer)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self._answers.close()
        self.connection.close()


def ask(address: str, request: dict[str, object], files: list[int]) -> Child:
    """Has a program begin with `files` as its stdin, stdout and stderr."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    text = json.dumps(request).encode()
    socket.send_fds(connection, [len(text).to_bytes(8, "little")], files)
    connection.sendall(text)
    return Child(connection)


def receive(connection: socket.socket) -> tuple[dict[str, object], list[int]]:
    """What `ask` sends: the request and the files."""
    head, files, _, _ = socket.recv_fds(connection, 8, 3)
    left, parts = int.from_bytes(head, "little"), []
    while left:
        parts.append(connection.recv(min(left, 1 << 16)))
        if not parts[-1]:
            raise ConnectionError("a request ended early")
        left -= len(parts[-1])
    return json.loads(b"".join(parts)), list(files)


def main(address: str, argv: list[str]) -> int:
    request = {"argv": argv, "folder": os.getcwd(), "environment": dict(os.environ)}
    with ask(address, request, [0, 1, 2]) as child:
        pid = child.pid()

        def pass_on(number: int, _: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

        for number in _SIGNALS:
            signal.signal(number, pass_on)
        status = child.status()
    if status < 0:
        if -status in _SIGNALS:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
