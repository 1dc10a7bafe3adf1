"""Trains for ever on two workers, until rank 1 leaves in the way told. Run by test_failures.py and test_clusters.py."""

import os
import signal
import sys
import time

import horovod.tensorflow as hvd
import tensorflow as tf

import sok


def evaluate_alone() -> None:
    time.sleep(float(os.environ.get("SOK_TEST_ALONE", "1000")))


def main(way: str) -> None:
    if way == "leave" and "HOROVOD_SIZE" in os.environ:  # as under mpirun, where no launcher keeps a store: rank 0 does
        hvd.init()
        del os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    sok.Init(deadline=float(os.environ.get("SOK_TEST_DEADLINE", "12")) if way in ("leave", "stop") else None)
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

    def refused():
        return layer(tf.constant([[[1]]], tf.uint64))

    for number in range(10**9):
        step(tf.constant([[[number % 50, 3]]], tf.int64))
        if sok.rank() == 1 and number == 10:
            print(f"lost at {time.time()}", flush=True)
            if way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if way == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if way == "leave":
                evaluate_alone()
            if way == "end":
                return
            if way == "trace":
                tf.function(refused)()
            if way == "build":
                with tf.Graph().as_default():
                    refused()
            raise ValueError("the worker's own mistake")
    print("trained to the end")


# Guarded: pytest imports every module below tests/ to look for doctests.
if __name__ == "__main__":
    main(sys.argv[1])
