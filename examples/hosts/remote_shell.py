#!/usr/bin/env python3
"""Stands in for OpenSSH between the hosts of namespaces.py: commands and their output, over one TCP connection.

python remote_shell.py serve     in a host, as its first process; ends, and with it all of the host, with stdin
ssh [options] HOST COMMAND...    (a link to this file) as `horovodrun` and `mpirun` call it

There are no users, keys or encryption. A command gets the environment that a login would give it, no more. Whose
connection ends is killed, with what it has started.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading

PORT = 22
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
_WITH_VALUE = "bcDEeFIiJLlmOopQRSWw"  # ssh's options that another word follows
_HEADER = struct.Struct("!BI")  # 1: output, 2: errors, 3: the exit status; and how many bytes


def _serve_one(connection: socket.socket) -> None:
    with connection:
        size = struct.unpack("!I", _exactly(connection, 4))[0]
        command = _exactly(connection, size).decode()
        process = subprocess.Popen(
            ["/bin/bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_ENVIRONMENT,
            cwd="/root",
            start_new_session=True,
        )
        pipes = {process.stdout: 1, process.stderr: 2}
        try:
            while pipes:
                ready, _, _ = select.select([connection, *pipes], [], [])
                if connection in ready and not connection.recv(1):
                    break
                for pipe in [one for one in ready if one in pipes]:
                    data = os.read(pipe.fileno(), 1 << 16)
                    connection.sendall(_HEADER.pack(pipes[pipe], len(data)) + data)
                    if not data:
                        del pipes[pipe]
            else:
                connection.sendall(_HEADER.pack(3, 1) + bytes([process.wait() & 0xFF]))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError("the connection has ended")
        data += more
    return data


def serve() -> int:
    listener = socket.create_server(("", PORT))
    print("ready", flush=True)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_guarded, args=[connection], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.buffer.read()  # until whoever made the host ends, however it ends
    return 0


def _guarded(connection: socket.socket) -> None:
    with contextlib.suppress(OSError, EOFError):
        _serve_one(connection)


def _without_options(words: list[str]) -> list[str]:
    """What follows ssh's options, which stand before the host and after it."""
    while words and words[0].startswith("-"):
        words = words[2 if len(words[0]) == 2 and words[0][1] in _WITH_VALUE else 1 :]
    return words


def ask(words: list[str]) -> int:
    """What `ssh` does: the host's exit status of the command, 255 if there is no connection."""
    rest = _without_options(words)
    host, command = rest[0], _without_options(rest[1:])
    try:
        connection = socket.create_connection((host.rpartition("@")[2], PORT), timeout=10)
    except OSError as error:
        print(f"ssh: connect to host {host} port {PORT}: {error}", file=sys.stderr)
        return 255
    with connection:
        connection.settimeout(None)
        text = " ".join(command).encode()
        connection.sendall(struct.pack("!I", len(text)) + text)
        outputs = {1: sys.stdout.buffer, 2: sys.stderr.buffer}
        try:
            while True:
                kind, size = _HEADER.unpack(_exactly(connection, _HEADER.size))
                data = _exactly(connection, size)
                if kind == 3:
                    return data[0]
                outputs[kind].write(data)
                outputs[kind].flush()
        except (OSError, EOFError) as error:
            print(f"ssh: connection to host {host} lost: {error}", file=sys.stderr)
            return 255


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:2] == ["serve"] else ask(sys.argv[1:]))
