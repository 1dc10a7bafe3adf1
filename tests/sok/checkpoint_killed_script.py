"""FOLDER KILLS SEED [MODE]: kills saves at random points, and after each restores and looks.

MODE: full, incremental, asynchronous (training goes on meanwhile), or both.

A process that saves without end is forked, killed, and followed by one that restores. (Forked, as loading TensorFlow
each time would take seconds; this process itself runs no op, so it has no threads that a fork would lose.)
"""

import os
import random
import signal
import struct
import sys
import time
import warnings

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np

import sok
from sok.base import _ops
from sok.checkpoint import read_manifest, restoring, saving
from tests import children

ROWS = 20_000
RECORD = struct.Struct("<cq")


def tables():
    return [sok.EmbeddingVariable(8, 30_000, name="item"), sok.EmbeddingVariable(2, 1000, name="other")]


def save_for_ever(folder, number, mode, report):
    item, other = tables()
    if mode != "full" and number > 0:
        restoring.restore(folder, [item, other])
    settings = {"incremental": mode in ("incremental", "both"), "asynchronous": mode in ("asynchronous", "both")}
    while True:
        number += 1
        for table, rows in ((item, ROWS), (other, 500)):
            # Every save has other keys, too.
            table.erase(np.arange(number - 3, number))
            table.assign(np.arange(number, number + rows), np.full([rows, table.dim], number, np.float32))
        os.write(report, RECORD.pack(b"B", number))
        save = saving.save(folder, [item, other], **settings)
        if save is not None:
            while not save.done():  # what these rows become is not of this save
                item.assign(np.arange(number, number + 500), np.full([500, item.dim], -1.0, np.float32))
                item.erase(np.arange(number + 300, number + 310))
            save.result()
        os.write(report, RECORD.pack(b"D", number))


def restore_once(folder, report):
    made = tables()
    restoring.restore(folder, made)
    (number,) = np.unique(made[0].export()[1].numpy()).astype(int).tolist()
    for table, rows in zip(made, (ROWS, 500), strict=True):
        keys, values = (t.numpy() for t in table.export())
        np.testing.assert_array_equal(np.sort(keys), np.arange(number, number + rows))
        assert (values == number).all()
    os.write(report, RECORD.pack(b"R", int(number)))


def forked(body, *arguments):
    """The process id of one that runs body(*arguments, report), and the end of its reports that can be read."""
    reader, writer = os.pipe()
    pid = children.begun(body, *arguments, writer)
    os.close(writer)
    return pid, reader


def records(reader):
    data = b""
    while piece := os.read(reader, 65536):
        data += piece
    os.close(reader)
    return [RECORD.unpack_from(data, at) for at in range(0, len(data), RECORD.size)]


def main(folder, kills, seed, mode):
    rng = random.Random(seed)
    number, interrupted, seconds = 0, 0, 0.05
    for _ in range(kills):
        pid, reader = forked(save_for_ever, folder, number, mode)
        # Somewhere in the first, second or third save; they take longer on a busy machine.
        said, times = [], []
        for _ in range(rng.choice((1, 3, 5))):
            said.append(RECORD.unpack(os.read(reader, RECORD.size)))
            times.append(time.monotonic())
        seconds = times[1] - times[0] if len(times) > 1 else seconds
        time.sleep(rng.uniform(0, seconds))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        said += records(reader)
        begun = max(n for what, n in said if what == b"B")
        done = max([number, *(n for what, n in said if what == b"D")])
        interrupted += begun > done
        if done == 0 and not os.path.exists(os.path.join(folder, "manifest.json")):
            continue
        pid, reader = forked(restore_once, folder)
        restored = records(reader)
        assert os.waitpid(pid, 0)[1] == 0, f"cannot restore after save {begun} was killed"
        ((_, number),) = restored
        assert done <= number <= begun, f"restored save {number}, but {done} was complete"
    print(f"{kills} kills, {interrupted} during a save, {number} saves, {read_manifest(folder).generation}")


if __name__ == "__main__":
    _ops.lib()
    warnings.simplefilter("ignore")
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *(sys.argv[4:] or ["full"]))
