"""What a disk gives by itself, in random reads a second: by fio where it is installed, else by threads."""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import subprocess
import threading
import time
from pathlib import Path


def random_reads(
    folder: Path, file_bytes: int, block: int = 4096, depth: int = 64, seconds: float = 3.0
) -> tuple[float, str]:
    """Random reads of `block` bytes a second of a file of its own in the folder, past the page cache, and who read."""
    file = folder / f"random_reads.{os.getpid()}"
    try:
        if shutil.which("fio"):
            return _by_fio(file, file_bytes, block, depth, seconds), f"fio, {depth} reads of {block} bytes in flight"
        _write(file, file_bytes)
        return _by_threads(file, file_bytes, block, depth, seconds), f"{depth} threads of reads of {block} bytes"
    finally:
        file.unlink(missing_ok=True)


def _by_fio(file: Path, file_bytes: int, block: int, depth: int, seconds: float) -> float:
    for engine in ("io_uring", "libaio"):
        command = ["fio", "--name=reads", f"--filename={file}", "--rw=randread", f"--bs={block}", f"--iodepth={depth}"]
        command += [f"--size={file_bytes}", "--direct=1", f"--ioengine={engine}", "--time_based"]
        command += [f"--runtime={seconds}", "--output-format=json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["iops"])
    raise RuntimeError(f"fio failed: {done.stderr[-300:]}")


def _write(file: Path, file_bytes: int) -> None:
    with open(file, "wb") as out:
        for _ in range(0, file_bytes, 1 << 20):
            out.write(os.urandom(1 << 20))
        out.flush()
        os.fsync(out.fileno())


def _by_threads(file: Path, file_bytes: int, block: int, depth: int, seconds: float) -> float:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system without it
        descriptor = os.open(file, os.O_RDONLY)
    counts = [0] * depth
    end = time.perf_counter() + seconds

    def read(number: int) -> None:
        buffer, draw = mmap.mmap(-1, block), random.Random(number)  # pages of its own: aligned
        while time.perf_counter() < end:
            os.preadv(descriptor, [buffer], draw.randrange(file_bytes // block) * block)
            counts[number] += 1

    threads = [threading.Thread(target=read, args=(number,)) for number in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(descriptor)
    return sum(counts) / seconds


def file_system(folder: Path) -> str:
    """The kind of file system that a folder is on, as /proc/mounts has it; '' where it does not say."""
    found, longest = "", 0
    with open("/proc/mounts", encoding="utf-8") as mounts:
        for line in mounts:
            _, point, kind, *_ = line.split()
            point = point.replace("\\040", " ")
            if folder.resolve().is_relative_to(point) and len(point) >= longest:
                found, longest = kind, len(point)
    return found
