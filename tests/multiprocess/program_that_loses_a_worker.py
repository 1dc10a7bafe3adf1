"""Trains for ever on two workers, until rank 1 is killed or raises. Run by test_failures.py under horovodrun."""

import os
import signal
import sys
import time

import tensorflow as tf

import sok


def main(way: str) -> None:
    sok.Init()
    layer = sok.DistributedEmbedding("sum", 100, 4, slot_num=1, max_nnz=2, name="lost")
    weight = tf.Variable(1.0)
    optimizer = sok.optimizers.Adam(0.1)

    @tf.function
    def step(ids):
        with sok.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(layer(ids)) * weight
        table = layer.embedding_variable
        of_table, of_weight = tape.gradient(loss, [table, weight])
        optimizer.apply_gradients([(of_table, table)])
        weight.assign_sub(0.1 * of_weight)
        return loss

    for number in range(10**9):
        step(tf.constant([[[number % 50, 3]]], tf.int64))
        if sok.rank() == 1 and number == 10:
            print(f"lost at {time.time()}", flush=True)
            if way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the worker's own mistake")
    print("trained to the end")


# Guarded: pytest imports every module below tests/ to look for doctests.
if __name__ == "__main__":
    main(sys.argv[1])
