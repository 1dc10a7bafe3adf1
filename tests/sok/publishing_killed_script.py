"""FOLDER KILLS SEED: publishers are killed at random moments and others go on, while one process follows.

(Forked, as loading TensorFlow each time would take seconds; this process itself runs no op, so it has no threads that
a fork would lose.)
"""

import os
import random
import signal
import sys
import time
import warnings

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

import sok
from sok.base import _ops
from tests import children

ROWS = 3000


def made():
    return sok.EmbeddingVariable(4, 10_000, name="item", seed=1), tf.Variable(-1.0)


def publish_for_ever(folder, report):
    table, shift = made()
    number = 0
    if os.path.exists(f"{folder}/manifest.json"):
        sok.restore(folder, [table])
        number = int(table.export()[1].numpy()[0, 0])
    publisher = sok.Publisher(folder, table, dense={"shift": shift}, max_chain=4)
    while True:
        number += 1
        table.erase(np.arange(number - 3, number))
        table.assign(np.arange(number, number + ROWS), np.full([ROWS, 4], number, np.float32))
        shift.assign(number)
        publisher.publish()
        os.write(report, b"p")


def look(follower, table, shift):
    """The number of the save that a follower holds, all of it."""
    with follower.reading():
        keys, rows = (t.numpy() for t in table.export())
        number = int(shift)
    np.testing.assert_array_equal(np.sort(keys), np.arange(number, number + ROWS))
    assert (rows == number).all(), (number, np.unique(rows))
    return number


def follow_until(folder, over, report):
    table, shift = made()
    follower, seen = sok.follow(folder, {"item": table}, dense={"shift": shift}), set()
    os.set_blocking(over, False)
    while True:
        if follower.poll():
            seen.add(look(follower, table, shift))
        try:
            if os.read(over, 1) == b"":
                break
        except BlockingIOError:
            pass
    fresh = made()
    sok.follow(folder, {"item": fresh[0]}, dense={"shift": fresh[1]}).poll()
    follower.poll()
    assert look(follower, table, shift) == int(fresh[1]) and (fresh[0].export()[1].numpy() == int(shift)).all()
    os.write(report, f"{len(seen)} saves seen, the last {int(shift)}".encode())


def main(folder, kills, seed):
    rng = random.Random(seed)
    waits, over = os.pipe()
    told, tells = os.pipe()
    os.set_inheritable(over, False)
    pid = os.fork()
    if pid == 0:
        os.close(over)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(children.begun(follow_until, folder, waits, tells), 0)[1]) & 0xFF)
    for _ in range(kills):
        reader, writer = os.pipe()
        publisher = children.begun(publish_for_ever, folder, writer)
        os.close(writer)
        os.read(reader, 1)
        begun = time.monotonic()
        os.read(reader, 1)
        time.sleep(rng.uniform(0, 2 * (time.monotonic() - begun)))
        os.kill(publisher, signal.SIGKILL)
        os.waitpid(publisher, 0)
        os.close(reader)
    os.close(over)
    assert os.waitpid(pid, 0)[1] == 0, "the follower failed"
    print(os.read(told, 1000).decode())


if __name__ == "__main__":
    _ops.lib()
    warnings.simplefilter("ignore")
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
