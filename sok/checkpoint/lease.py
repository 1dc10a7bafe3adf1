"""Which job saves into a folder: the one that began last. The one before is told, and saves there no more.

A file says who it is. Nobody has to wait for it, so that a job that died or lost its host stands in nobody's way, and
no clocks are compared. What makes it safe is the order of steps (docs/design/checkpoint.md, "Two jobs in one folder"):
a job takes the lease before it lists files to remove, and looks at it again before it removes any and before each
rename of a manifest.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import json
import os
import secrets
import socket
import time
import warnings
from pathlib import Path
from typing import Any

NAME = "writer.json"
_FORMAT = "sok writer"
_BYTES = 1024  # of the file, always: it is written over in place, which takes no room on a full disk

# The leases that this process has taken, with its name then: a forked process is another one.
_taken: dict[str, str] = {}


class LeaseLost(RuntimeError):
    """Another job, or another save of this one, writes here now."""


class Lease:
    """The right of one save to write somewhere.

    Args:
        path: of the file.
        token: the save that has taken it: `token` of a lease of another worker. None: none yet.
    """

    def __init__(self, path: str, token: str | None = None) -> None:
        self._path = path
        self.token = token or f"{_process_name(os.getpid())}-{secrets.token_hex(4)}"

    def take(self) -> None:
        """Makes this save the one that writes here.

        Raises:
            LeaseLost: an earlier save of this process was, and another job has taken over since.
        """
        here = _process_of(self.token)
        holder = self._holder() or {"token": self.token}
        if here not in (_process_of(holder["token"]), _process_of(holder.get("for"))):
            if _taken.get(self._path) == here:
                raise self._lost(holder)
            if _lives_here(holder):
                warnings.warn(
                    f"{self._path}: {_who(holder)} is still there and has saved here. This job takes over: that one "
                    "can no longer save here, and is told when it tries.",
                    stacklevel=7,
                )
        self._write({})
        _taken[self._path] = here

    def refuse_others(self) -> None:
        """Raises RuntimeError if another job of this machine has it and still runs: it would bring erased rows back."""
        holder = self._holder()
        here = _process_of(self.token)
        if holder is None or here in (_process_of(holder["token"]), _process_of(holder.get("for"))):
            return
        if _lives_here(holder):
            raise RuntimeError(
                f"{self._path}: {_who(holder)}, which still runs, saves here, and its tables may hold the rows. Call "
                "sok.erase in that job, with its tables, or end it. Nothing was erased."
            )

    def borrow(self, generation: str) -> str | None:
        """Takes it to write `generation` beside the save that has it, which may go on, as may the saves after it.

        Returns:
            The generation that a borrower before may have left unfinished.
        """
        holder = self._holder() or {}
        self._write({"for": holder.get("for", holder.get("token")), "generation": generation})
        return holder.get("generation")

    def check(self) -> None:
        """Raises LeaseLost if another save has taken it."""
        holder = self._holder()
        if holder is None or self.token not in (holder["token"], holder.get("for")):
            raise self._lost(holder)

    def _holder(self) -> dict[str, Any] | None:
        """Who has it; None if nobody, or if the file makes no sense."""
        for _ in range(5):
            try:
                with open(self._path, "rb") as file:
                    with contextlib.suppress(OSError):
                        # Not from this host's cache: by time and size two leases look alike, where clocks are coarse.
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    said = json.loads(file.read())
                return said if isinstance(said, dict) and isinstance(said.get("token"), str) else None
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno != errno.ESTALE:  # another host has just made it anew
                    raise
            except ValueError:  # half of it is written
                pass
            time.sleep(0.002)
        return None

    def _write(self, more: dict[str, Any]) -> None:
        said = {
            "format": _FORMAT,
            "token": self.token,
            "since": utc_now(),
            "host": socket.gethostname()[:64],
            "pid": os.getpid(),
            "processes": _processes(),
            "began": _began(os.getpid()),
            **more,
        }
        data = json.dumps(said).encode().ljust(_BYTES - 1) + b"\n"
        try:
            with self._opened() as file:
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise type(error)(error.errno, error.strerror, self._path) from None

    def _opened(self) -> Any:
        def in_place(path: str, _: int) -> int:
            try:
                return os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            except PermissionError:  # another user's file, perhaps in a folder that is ours, too
                os.unlink(path)
                return os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)

        return open(self._path, "wb", buffering=0, opener=in_place)

    def _lost(self, holder: dict[str, Any] | None) -> LeaseLost:
        if holder is not None and _process_of(holder["token"]) == _process_of(self.token):
            return LeaseLost(f"{self._path}: a later save of this job writes here now. Save into one folder in turn.")
        now = "nobody: the file is gone" if holder is None else f"{_who(holder)}, since {holder.get('since')}"
        return LeaseLost(
            f"{self._path}: another job saves here now: {now}. This save (of process {os.getpid()} on "
            f"{socket.gethostname()}) ends, or one would remove the other's files; what lies there is whole. End the "
            "job that should not be running. To go on with this one, restore what lies there, or save into another "
            "folder."
        )


def utc_now() -> str:
    """The time of day, as the files of checkpoints have it."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since(when: str) -> float:
    """How long ago a time of day of `utc_now` was, by this machine's clock."""
    then = datetime.datetime.strptime(when, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.timezone.utc)
    return (datetime.datetime.now(datetime.timezone.utc) - then).total_seconds()


def forget(path: str) -> None:
    """This process may take a lease again that it has lost: it has restored what the other job saved."""
    _taken.pop(path, None)


def in_folder(folder: str) -> str:
    """The lease of a checkpoint's folder."""
    return os.path.join(folder, NAME)


def of_series(prefix: str) -> str:
    """The lease of a row of TensorFlow's checkpoints, PREFIX-1, PREFIX-2, ..."""
    return f"{prefix}.{NAME}"


@functools.cache
def _process_name(pid: int) -> str:
    return secrets.token_hex(8)


def _process_of(token: Any) -> str:
    return token.partition("-")[0] if isinstance(token, str) else ""


def _who(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid')} on {holder.get('host')}"


def _lives_here(holder: dict[str, Any]) -> bool:
    """Whether it is certain that the holder is a process of this machine that has not ended."""
    pid = holder.get("pid")
    return holder.get("processes") == _processes() and isinstance(pid, int) and holder.get("began") == _began(pid)


def _processes() -> str:
    """This start of the machine and this space of process ids: in another container the same id is another process."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)  # like no other


def _began(pid: int) -> str | None:
    """When a process began, in ticks; ids are given out again. None: it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
