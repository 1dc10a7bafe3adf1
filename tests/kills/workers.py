"""What the workers do that get killed: they restore the newest checkpoint, look at it, and save without end."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

import sok
from sok.checkpoint import heartbeat, restoring, saving
from sok.job import context
from sok.job.job import Job
from tests.kills import coming
from tests.kills.pipes import PipeTransport, pairs

_RECORD = struct.Struct("<cq")
TABLES = {"item": (8, 20_000), "other": (2, 500)}  # name: dim and rows, of all workers together


@dataclass(frozen=True)
class Kill:
    """When worker `rank` is to die: at a step of its second save (tests/kills/steps.cc), or when somebody else says so.

    The second: the first has removed what killed saves had left, so that all second saves take the same steps.
    """

    rank: int = 0
    step: int = 0
    torn: bool = False


class Workers:
    """Forked workers, of which each says what it does: (b"R", n) restored save n, (b"B", n) begins one, (b"D", n) has
    done it, (b"S", steps) took so many steps for its second save, (b"W", step) of which this was a write.

    Args:
        size: how many.
        folder: of the checkpoint.
        first: number of the first save; 1: there may be no checkpoint.
        kill: which of them dies, and when.
        how: arguments of `sok.save`.
        saves: how many; None: until killed.
        policies: whether keys of the table "item" wait for rows, and leave (tests/kills/coming.py).
    """

    def __init__(
        self,
        size: int,
        folder: str,
        first: int,
        kill: Kill,
        how: dict[str, Any],
        saves: int | None = None,
        policies: bool = False,
    ) -> None:
        lines = pairs(size)
        self.pids, self._readers = [], []
        told = (lines, folder, first, kill, how, saves, policies)
        for rank in range(size):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                _run(lambda rank=rank, writer=writer: _work(rank, writer, *told))
            os.close(writer)
            self.pids.append(pid)
            self._readers.append(reader)
        for line in lines:
            for end in line:
                end.close()

    def next_record(self, rank: int) -> tuple[bytes, int] | None:
        """What a worker says next; None: it is gone."""
        data = os.read(self._readers[rank], _RECORD.size)
        return _RECORD.unpack(data) if data else None

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)

    def finish(self) -> tuple[list[list[tuple[bytes, int]]], list[int]]:
        """Waits for all; what each has still said, and how it ended."""
        said = []
        for rank, reader in enumerate(self._readers):
            said.append(list(iter(lambda rank=rank: self.next_record(rank), None)))
            os.close(reader)
        return said, [os.waitpid(pid, 0)[1] for pid in self.pids]


def _run(body: Any) -> None:
    status = 1
    try:
        body()
        status = 0
    except ConnectionError:
        status = 2  # a peer was killed, and this worker noticed: as it should
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def _work(rank, writer, lines, folder, first, kill, how, saves, policies) -> None:
    job = Job(PipeTransport(rank, lines))
    heartbeat.BEAT_SECONDS, heartbeat.PATIENCE_SECONDS = 0.1, 2.0  # for workers that are killed, not slow
    context.get_job = lambda: job

    def say(what: bytes, number: int) -> None:
        os.write(writer, _RECORD.pack(what, number))

    tables = _tables(folder, how, policies)
    number = first - 1
    if first > 1 or os.path.exists(os.path.join(folder, "manifest.json")):
        restoring.restore(folder, tables)
        number = _look(tables, rank, job.size)
        say(b"R", number)
    steps = ctypes.CDLL(None)
    done = 0
    while saves is None or done < saves:
        number += 1
        _change(tables, number)
        say(b"B", number)
        if done == 1:
            at = kill.step if kill.rank == rank else 0
            steps.sok_kill_at(os.fsencode(folder), ctypes.c_long(at), int(kill.torn))
        handle = saving.save(folder, tables, **how)
        if handle is not None:  # an asynchronous one
            handle.result()
        if done == 1:
            say(b"S", steps.sok_steps())
            for step in filter(steps.sok_is_write, range(1, steps.sok_steps() + 1)):
                say(b"W", step)
            steps.sok_kill_at(b"", ctypes.c_long(0), 0)
        say(b"D", number)
        done += 1


def _tables(folder: str, how: dict[str, Any], policies: bool) -> list[Any]:
    # Beside the checkpoint, where the steps that a save takes in their files are counted, too.
    storage = sok.Storage(memory_bytes=2**23, path=f"{folder}.rows") if "versions" in how else None
    of_item = coming.POLICIES if policies else {}
    return [
        sok.EmbeddingVariable(
            dim,
            rows + 9,
            name=name,
            seed=1,
            storage=storage,
            initializer="zeros",
            **(of_item if name == "item" else {}),
        )
        for name, (dim, rows) in TABLES.items()
    ]


def _keys(number: int, table: Any) -> np.ndarray:
    """Save n has the keys n, n + 1, ...: one goes and one comes with every save."""
    return np.arange(number, number + TABLES[table.table_name][1])


def _values(number: int, table: Any) -> np.ndarray:
    """What save n has for each of its keys: the save that wrote the row last. Each writes a quarter of them."""
    keys = _keys(number, table)
    if table.table_name == "other":
        return np.full(len(keys), number)
    came = np.maximum(1, keys - TABLES["item"][1] + 1)
    return np.maximum(came, number - (number - keys) % 4)


def _change(tables: list[Any], number: int) -> None:
    for table in tables:
        if table.options.admission:
            coming.step(table, number, TABLES["item"][1])
            continue
        keys, values = _keys(number, table), _values(number, table)
        table.erase(np.array([number - 1]))
        written = slice(None) if number == 1 else values == number
        rows = np.repeat(values[written].astype(np.float32)[:, np.newaxis], table.dim, 1)
        table.assign(keys[written], rows)


def _look(tables: list[Any], rank: int, size: int) -> int:
    """The number of the save that the tables hold, every row of it."""
    (number,) = np.unique(tables[1].export()[1].numpy()).astype(int).tolist()
    for table in tables:
        if table.options.admission:
            coming.look(table, number, TABLES["item"][1], rank, size)
            continue
        keys, rows = (tensor.numpy() for tensor in table.export())
        order = np.argsort(keys)
        expected = _keys(number, table)
        mine = expected % size == rank
        np.testing.assert_array_equal(keys[order], expected[mine])
        np.testing.assert_array_equal(rows[order], np.repeat(_values(number, table)[mine, np.newaxis], table.dim, 1))
    return number
