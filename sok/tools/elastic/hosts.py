"""Where the workers of an elastic job may run, and how one is started there."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from sok.job import elastic_launcher

_SECONDS_TO_ASK = 60.0
# A process group. A session would do as well, but Linux shares the processor among sessions: a `nice` launcher would
# get next to nothing beside its workers.
_OF_ITS_OWN: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}


class Hosts:
    """How many workers each host may have: said once, or by a program that is asked again and again.

    Args:
        words: 'HOST:SLOTS,...'; None: ask the program.
        script: the program.
    """

    def __init__(self, words: str | None, script: str | None) -> None:
        self._words, self._script = words, script
        self.slots: dict[str, int] = {}

    def ask(self) -> None:
        """Sets `slots`. Hosts that were there before stay in their order.

        Raises:
            ValueError: what was said makes no sense.
            OSError: the program fails.
        """
        text = self._words.replace(",", "\n") if self._words is not None else self._asked()
        found: dict[str, int] = {}
        for line in filter(None, map(str.strip, text.splitlines())):
            host, _, slots = line.rpartition(":")
            if not host or host.startswith("-") or not slots.isdigit():
                raise ValueError(f"Hosts must be given as HOST:SLOTS, one a line. Received: {line!r}.")
            found[host] = int(slots)
        self.slots = {host: found[host] for host in [*(h for h in self.slots if h in found), *found]}

    def _asked(self) -> str:
        try:
            return subprocess.run(
                [str(self._script)], check=True, capture_output=True, text=True, timeout=_SECONDS_TO_ASK
            ).stdout
        except subprocess.SubprocessError as error:
            raise OSError(f"The host discovery script fails: {error}") from error


def is_here(host: str) -> bool:
    """Whether a host's name is one of this machine's."""
    return host.lower() in ("localhost", "127.0.0.1", "::1", socket.gethostname().lower(), socket.getfqdn().lower())


def start(program: Sequence[str], host: str, more: Mapping[str, str], label: str) -> subprocess.Popen[bytes]:
    """Starts a worker in a process group of its own, the lines of its output with `label` before them.

    Args:
        more: environment variables beside those of this process.
    """
    environment = {**os.environ, **more, "PYTHONUNBUFFERED": "1"}
    if is_here(host):
        process = subprocess.Popen(
            program, env=environment, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, **_OF_ITS_OWN
        )
    else:
        process = _started_by_ssh(program, host, environment)
    for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        assert source is not None
        threading.Thread(target=_copy, args=(source, sink, label), daemon=True).start()
    return process


def _started_by_ssh(program: Sequence[str], host: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    key = elastic_launcher.KEY  # not in the command, which all on that host can read
    told = [
        f"{name}={value}"
        for name, value in environment.items()
        if name.isidentifier() and name not in (key, "PWD", "OLDPWD")
    ]
    script = (
        f"read -r {key} && export {key} && cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *told, *program])}"
    )
    command = ["ssh", "-o", "PasswordAuthentication=no", "-o", "StrictHostKeyChecking=no", host, script]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, **_OF_ITS_OWN)
    assert process.stdin is not None
    process.stdin.write(f"{environment[key]}\n".encode())
    process.stdin.flush()
    return process


def _copy(source: IO[bytes], sink: IO[str], label: str) -> None:
    for line in source:
        sink.write(f"{label}{line.decode(errors='replace')}")
        sink.flush()


def end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """Ends a worker, and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, how)


def was_lost(code: int, host: str) -> bool:
    """Whether an exit status says that a worker was ended (by a signal; its host, or the way there, is gone).

    Example:
        >>> was_lost(-9, "localhost"), was_lost(1, "localhost"), was_lost(255, "far"), was_lost(1, "far")
        (True, False, True, False)
    """
    return code < 0 or (not is_here(host) and code > 128)
