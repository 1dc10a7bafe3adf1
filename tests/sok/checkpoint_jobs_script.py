"""FOLDER ROUNDS SECONDS: two jobs that save into one folder and are killed, ROUNDS times; then readers beside a writer.

All are forked: loading TensorFlow each time would take seconds. This process itself runs no op, so that it has no
threads that a fork would lose.
"""

import contextlib
import functools
import os
import signal
import sys
import time
import warnings
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np

import sok
from sok.base import _ops
from sok.checkpoint import compacting, feed, lease, read_manifest, restoring, saving

ROWS = 200


def table():
    return sok.EmbeddingVariable(2, 1000, name="item", seed=1)


def fill(item, value):
    item.assign(np.arange(ROWS), np.full([ROWS, 2], value, np.float32))


def save_for_ever(folder, report):
    item, value = table(), 0
    while True:
        value += 1
        fill(item, value)
        try:
            saving.save(folder, item)
            os.write(report, b"S")
        except lease.LeaseLost:
            os.write(report, b"L")
            time.sleep(0.01)


def write_for_ever(folder, report):
    item, value = table(), 0
    while True:
        value += 1
        fill(item, value)
        saving.save(folder, item, incremental=value % 4 != 0)
        if value % 4 == 3:
            compacting.compact(folder)
        os.write(report, b"S")


def read_for_ever(folder, report):
    item, followed = table(), table()
    follower = feed.Follower(folder, {"item": followed}, slots=False)
    while not Path(folder, "manifest.json").exists():
        time.sleep(0.01)
    while True:
        try:
            restoring.restore(folder, {"item": item})
            assert follower.poll() in (True, False)
            for one in (item, followed):
                values = np.unique(one.export()[1].numpy())
                assert len(values) == 1, values  # of one save
            os.write(report, b"R")
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os.write(report, b"E")


def forked(body, folder, report):
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            body(folder, report)
        os._exit(1)
    return pid


def killed(bodies, folder, seconds, look, until="S"):
    """What they reported until they were killed, so many seconds after the first `until`."""
    reader, writer = os.pipe()
    pids = [forked(body, folder, writer) for body in bodies]
    os.close(writer)
    said = ""
    while until not in said:
        said += os.read(reader, 1).decode()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        look()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), "a job ended by itself"
    with open(reader, "rb") as opened:
        return said + opened.read().decode()


def is_whole(folder):
    """Whether all files of the checkpoint are there; True as well if another one takes its place while we look."""
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return True
    missing = [file.name for link in manifest.links for file in link.files if not Path(folder, file.name).exists()]
    return not missing or read_manifest(folder) != manifest


def main():
    folder, rounds, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    _ops.lib()
    warnings.simplefilter("ignore")
    lost = looks = broken = 0
    pause = functools.partial(time.sleep, 0.01)
    told = ""
    for number in range(rounds):
        together = str(folder / f"two{number}")

        def look(together=together):
            nonlocal looks, broken
            looks += 1
            broken += not is_whole(together)
            time.sleep(0.002)

        told += killed([save_for_ever] * 2, together, seconds, look)
        read_manifest(together)
        lost += not is_whole(together)
    print(f"{rounds} times: {lost} lost, {broken} of {looks} looks broken, told: {bool(told)}")
    said = killed([write_for_ever, read_for_ever], str(folder / "read"), 4 * seconds, pause, until="R")
    print(f"saves: {said.count('S')}, reads: {said.count('R')}, errors: {said.count('E')}")


if __name__ == "__main__":
    main()
