"""A script for OpenEmbedding whose rows are on two servers: `python -m openembedding.server`, twice, forked here."""

import multiprocessing
import os
import sys

import numpy as np
import tensorflow as tf
import tf_keras

import openembedding
import openembedding.tensorflow as embed
import sok
from openembedding import server, servers

tf.get_logger().setLevel("ERROR")


def serve(ready, *arguments):
    ready.set()
    os._exit(server.main(arguments))


def fitted():
    """Losses of a model, and its rows."""
    tf_keras.utils.set_random_seed(1)
    ids = tf_keras.Input([2], dtype="int64", name="ids")
    rows = tf_keras.layers.Embedding(100, 4, embeddings_initializer=tf_keras.initializers.Constant(0.1), name="rows")
    model = tf_keras.Model(ids, tf_keras.layers.Dense(1, name="dense")(tf_keras.layers.Flatten()(rows(ids))))
    model = embed.distributed_model(model, sparse_as_dense_size=0)
    model.compile(embed.distributed_optimizer(tf_keras.optimizers.Adagrad(0.1)), "mse")
    data = np.random.default_rng(0).integers(0, 50, [64, 2])
    found = model.fit(data, data.sum(1) / 50, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"]
    table = model.get_layer("rows").embedding_variable
    keys, values = (one.numpy() for one in table.export())
    order = np.argsort(keys)
    return table, [np.array(found), keys[order], values[order]]


def main():
    folder = sys.argv[1]
    fork = multiprocessing.get_context("fork")
    master = f"127.0.0.1:{servers._free_port('127.0.0.1')}"
    commands = [
        ("--bind_ip", master, "--pmem", os.path.join(folder, "pmem")),
        ("--bind_ip", "127.0.0.1", "--master_endpoint", master),
    ]
    processes = []
    for command in commands:
        processes.append(fork.Process(target=serve, args=(fork.Event(), *command), daemon=True))
        processes[-1].start()
    openembedding.flags.master_endpoint = master
    openembedding.flags.wait_num_servers = 2
    try:
        table, found = fitted()
        assert "on 2 servers" in repr(table), table
        views = [int(view.num_rows()) for view in table._views]
        assert all(views) and sum(views) == len(found[1]), views
        assert os.path.isdir(os.path.join(folder, "pmem"))
        sok.shutdown()
        openembedding.flags.master_endpoint, openembedding.flags.wait_num_servers = "", -1
        for one, other in zip(fitted()[1], found, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
        servers._end(servers._asked(master))  # what happens when the worker ends
        for process in processes:
            process.join(20)
            assert process.exitcode == 0, process.exitcode
    finally:
        for process in processes:
            process.kill()
    print("the script ran to its end", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
