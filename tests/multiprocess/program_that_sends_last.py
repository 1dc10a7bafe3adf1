"""Worker 0 sends much to worker 1 over TCP, waits for nothing in return, and ends."""

import ctypes
import os

import tensorflow as tf

import sok
from sok.job import context

COUNT = 1 << 25  # floats: more than a socket takes


def main() -> None:
    os.environ["SOK_SHARED_MEMORY"] = "0"
    sok.Init(seed=1)
    counts = [0, COUNT] if sok.rank() == 0 else [0, 0]
    received, _ = context.get_transport().all_to_all(tf.ones([sum(counts)]), tf.constant(counts), "test/last")
    if sok.rank() == 0:
        ctypes.CDLL(None).exit(0)  # Python itself takes some time to end, in which it might arrive anyway
    print("got", int(tf.reduce_sum(received)))


if __name__ == "__main__":
    main()
