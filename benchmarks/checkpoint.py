"""python -m benchmarks.checkpoint: how fast tables are saved and restored, beside the disk itself.

One worker, or with horovodrun as many as it starts. The disk's figures are of one process per worker that writes (or
reads) as many bytes as the shard has, in 4 MiB pieces, past the page cache if the file system can, as `dd` with
oflag=direct does, and with an fsync at the end. "through the cache" is the same without direct access, as most programs
write. Writing is timed just before and just after: the better of the two. "into memory" reads past the cache, too, but
keeps what it reads, in memory that the process has not had before: a restore cannot do with less.

Then what a step costs (256 x 26 keys, 80 % of them among one percent of the rows, LazyAdam) in a table that notes no
changes and in one that does, in turn, and in both while an asynchronous save of the latter is under way; and an
incremental save.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import resource
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PIECE = 4 << 20


def timed(body: Callable[[], object]) -> float:
    start = time.perf_counter()
    body()
    return time.perf_counter() - start


def aligned_piece() -> mmap.mmap:
    """A buffer at the start of a page, which direct access asks for, of bytes that no disk can compress."""
    piece = mmap.mmap(-1, PIECE)
    piece.write(np.random.default_rng(0).bytes(PIECE))
    return piece


def open_plainly(path: Path, flags: int, direct: bool) -> int:
    if direct:
        with contextlib.suppress(OSError):
            return os.open(path, flags | os.O_DIRECT)
    return os.open(path, flags)


def write_plainly(path: Path, num_bytes: int, direct: bool = True) -> None:
    piece = aligned_piece()
    file = open_plainly(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, direct)
    for _ in range(0, num_bytes, PIECE):
        os.write(file, piece)
    os.fsync(file)
    os.close(file)


def read_plainly(path: Path) -> None:
    piece = aligned_piece()
    file = open_plainly(path, os.O_RDONLY, True)
    while os.readv(file, [piece]):
        pass
    os.close(file)


def read_into_memory(path: Path) -> None:
    """Reads all of a file into new memory, in huge pages where the system has them."""
    file = open_plainly(path, os.O_RDONLY, True)
    size = os.fstat(file).st_size // PIECE * PIECE
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:  # as tables have it
        memory.madvise(mmap.MADV_HUGEPAGE)
        with memoryview(memory) as view:
            for at in range(0, size, PIECE):
                with view[at : at + PIECE] as piece:
                    os.readv(file, [piece])
    os.close(file)


def forget(folder: Path) -> None:
    """Asks the system to drop its copies of the files, so that reading means the disk."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def train_beside(sok: Any, folder: Path, plain: Any, saved: Any) -> dict[str, float]:
    """Medians of the seconds of a step: of a table that notes no changes and of one that does, in turn; during a save.

    Also how long the save and the delta after it took, and how many bytes were copied aside.
    """
    import tensorflow as tf

    from sok.checkpoint.native import EagerCalls
    from sok.lookup.lookup import lookup_rows

    rng, held = np.random.default_rng(1), int(saved.size()) * sok.size()

    def step_of(table: Any) -> tuple[Any, Callable[[], float]]:
        optimizer = sok.optimizers.LazyAdam(1e-3)
        optimizer._slot_set = "optimizer"  # what the tables have

        @tf.function
        def step(keys: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(lookup_rows(table, keys)))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])

        def timed_step() -> float:
            common = rng.integers(0, max(1, held // 100), 256 * 26)
            keys = tf.constant(np.where(rng.random(256 * 26) < 0.8, common, rng.integers(0, held, 256 * 26)))
            return timed(lambda: step(keys))

        return optimizer, timed_step

    (_, step_plain), (optimizer, step_saved) = step_of(plain), step_of(saved)
    sok.save(folder, saved, optimizer)
    assert not EagerCalls().changes(plain)["on"] and EagerCalls().changes(saved)["on"]
    for _ in range(10):
        step_plain(), step_saved()
    steps = np.array([(step_plain(), step_saved()) for _ in range(200)])
    found = {"plain": float(np.median(steps[:, 0])), "noted": float(np.median(steps[:, 1]))}
    begun = time.perf_counter()
    saving = sok.save(folder, saved, optimizer, asynchronous=True)
    found["return"] = time.perf_counter() - begun
    seconds, copied = [], 0
    while not saving.done():
        seconds.append((step_plain(), step_saved()))
        copied = max(copied, EagerCalls().changes(saved)["copied_bytes"])
    saving.result()
    during = np.array(seconds)
    found.update(save=time.perf_counter() - begun, copied=copied, worst=float(during[:, 1].max()))
    found.update(plain_during=float(np.median(during[:, 0])), noted_during=float(np.median(during[:, 1])))
    for _ in range(20):
        step_saved()
    found["delta"] = timed(lambda: sok.save(folder, saved, optimizer, incremental=True))
    found["delta bytes"] = float(sum(file.bytes for file in sok.checkpoint.read_manifest(folder).files))
    return found


def print_beside(found: dict[str, float]) -> None:
    def line(what: str, name: str, against: str) -> str:
        return f"{what:44} {1e3 * found[name]:7.2f} ms  {found[name] / found[against]:.2f} x"

    print(f"a step of a table that notes no changes      {1e3 * found['plain']:7.2f} ms")
    print(line("of one that does", "noted", "plain"))
    print(line("during a save: of another table", "plain_during", "plain"))
    print(line("of the table that is saved", "noted_during", "plain") + f", worst {1e3 * found['worst']:.1f} ms")
    print(
        f"the save returned after {1e3 * found['return']:.1f} ms, took {found['save']:.2f} s, and copied "
        f"{found['copied'] / 1e6:.0f} MB aside"
    )
    print(f"what had changed since: {found['delta bytes'] / 1e6:.1f} MB, saved in {found['delta']:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__.split("\n\n")[0])
    parser.add_argument("--gb", type=float, default=1.0, help="size of the table on all workers (default 1)")
    parser.add_argument("--dim", type=int, default=32, help="floats per row (default 32)")
    parser.add_argument("--slots", type=int, choices=(0, 1, 2), default=2, help="slots per row (default 2, Adam)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    options = parser.parse_args()

    import sok

    warnings.filterwarnings("ignore", "sok.save: the step count")
    sok.Init()
    if options.folder is None and sok.size() > 1:
        parser.error("several workers need one --folder, which all of them see")
    rank, workers = sok.rank(), sok.size()
    row_bytes = 8 + 4 * options.dim * (1 + options.slots)
    rows = int(options.gb * 1e9 / row_bytes / workers)
    tables = [sok.EmbeddingVariable(options.dim, rows, name=name, seed=1) for name in ("saved", "restored")]
    rule = ("sgd", "adagrad", "lazy_adam")[options.slots]
    for first in range(0, rows, 1 << 16):
        keys = np.arange(first, min(rows, first + (1 << 16))) * workers + rank
        values = np.ones([len(keys), options.dim * (1 + options.slots)], np.float32)
        kept = {"slot_set": "optimizer", "rule": rule} if options.slots else {}
        slots = values[:, options.dim :] if options.slots else None
        tables[0].restore_rows(keys, values[:, : options.dim], slots, **kept)

    folder = Path(options.folder or tempfile.mkdtemp(prefix="sok_checkpoint_"))
    checkpoint, plain = folder / "checkpoint", folder / f"plain{rank}"
    try:
        folder.mkdir(exist_ok=True)
        num_bytes = rows * row_bytes
        seconds = {"disk write": timed(lambda: write_plainly(plain, num_bytes))}
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds["save"] = timed(lambda: sok.save(checkpoint, tables[0]))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        seconds["disk write"] = min(seconds["disk write"], timed(lambda: write_plainly(plain, num_bytes)))
        seconds["through the cache"] = timed(lambda: write_plainly(folder / f"cached{rank}", num_bytes, direct=False))
        forget(checkpoint)
        seconds["restore"] = timed(lambda: sok.restore(checkpoint, {"saved": tables[1]}))
        os.posix_fadvise((descriptor := os.open(plain, os.O_RDONLY)), 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        seconds["disk read"] = timed(lambda: read_plainly(plain))
        seconds["into memory"] = timed(lambda: read_into_memory(plain))
        if rank == 0:
            total = num_bytes * workers / 1e9
            print(f"{total:.2f} GB, {rows * workers:,} rows of {row_bytes} bytes, {workers} worker(s)")
            for name in ("disk write", "through the cache", "save", "disk read", "into memory", "restore"):
                print(f"{name:17}  {seconds[name]:6.2f} s  {total / seconds[name]:6.2f} GB/s")
            print(f"save took {memory / 1024:.0f} MiB of memory")
            print(f"save is {seconds['disk write'] / seconds['save']:.0%} of the disk's writing, ", end="")
            print(f"restore {seconds['disk read'] / seconds['restore']:.0%} of its reading, ", end="")
            print(f"{seconds['into memory'] / seconds['restore']:.0%} of reading into memory")
        if options.slots == 2:  # a table that was restored under another name has no save to count changes from
            found = train_beside(sok, folder / "beside", tables[1], tables[0])
            if rank == 0:
                print_beside(found)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
