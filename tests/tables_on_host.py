"""A model of tables on some device and tables that the host keeps, and the same model on the CPU."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import sok

SIZES = [(40, 3), (30, 4), (50, 2), (20, 5)]  # rows and columns
ON_HOST = [False, True, False, True]
OF_INPUT = [0, 1, 2, 1, 3]  # the table of each input
STEPS, SAMPLES = 4, 6  # of each worker


def collection_on(device, placements, dp_input=True):
    """With the same rows wherever it is."""
    with tf.device(device):
        layers = [sok.Embedding(rows, dim, combiner="sum") for rows, dim in SIZES]
        made = sok.parallel.EmbeddingCollection(layers, OF_INPUT, placements, dp_input, on_host=ON_HOST)
        random = np.random.default_rng(3)
        made.set_weights([random.normal(size=size).astype(np.float32) for size in SIZES])
    return made


def devices_of(collection):
    return [layer.embedding_variable.handle.device.rpartition("device:")[2] for layer in collection.embeddings]


def train(device, placements, rank, size, as_function, dp_input=True, optimizer=None):
    """Losses of this rank's samples, all matrices, and collectives of the last step. Collective."""
    collection, optimizer = collection_on(device, placements, dp_input), optimizer or sok.optimizers.Adagrad(0.1)
    expected = [device.strip("/") if not hosted else "CPU:0" for hosted in ON_HOST]
    assert devices_of(collection) == expected, devices_of(collection)
    with tf.device(device):

        def step(ids):
            with tf.GradientTape() as tape:
                found = collection(ids)
                loss = tf.add_n([tf.reduce_sum(tf.square(out)) for out in found])
            tables = collection.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
            return loss

        call, losses = tf.function(step, reduce_retracing=True) if as_function else step, []
        for number in range(STEPS):
            random = np.random.default_rng(number)
            whole = [random.integers(0, SIZES[table][0], [SAMPLES * size, 3]) for table in OF_INPUT]
            mine = slice(rank * SAMPLES, (rank + 1) * SAMPLES)
            if dp_input:
                ids = [tf.constant(one[mine]) for one in whole]
            else:
                ids = [tf.constant(whole[i]) for i in collection.inputs_of_ranks[rank]]
            before = sok.collective_counts()["collectives"]
            losses.append(float(call(ids)))
            made = sok.collective_counts()["collectives"] - before
    steps = [int(layer.embedding_variable.step) for layer in collection.embeddings]
    assert steps == [STEPS] * len(SIZES)
    return losses, collection.get_weights(), made


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for one, wanted in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-6)
