"""A model like Merlin's synthetic ones, only small, trained beside stock TensorFlow; on any number of workers."""

import dataclasses

import numpy as np
import tensorflow as tf

import sok
from benchmarks import merlin, synthetic, towers
from sok.job.context import get_transport

MODEL = synthetic.Model(
    "tiny",
    (synthetic.Table(40, 3, (1, 4)), synthetic.Table(30, 4, (1,)), synthetic.Table(1, 2, (2,))),
    5,
    (8,),
    1.05,
    4,
)
BATCH = 12


def train_beside_stock_tensorflow(strategy, threshold=None):
    """Losses of some steps are those of stock TensorFlow on the whole batch. Returns the placements. Collective."""
    where = merlin.placements(MODEL, strategy, sok.size(), BATCH, "adagrad", threshold)
    training = merlin.Training(merlin.Setup(MODEL, 1, where, BATCH, "adagrad"))
    tables = [tf.Variable(one) for one in training.embed.get_weights()]
    tower = towers.Tower(MODEL)  # each has the same weights
    stock = tf.keras.optimizers.Adagrad(synthetic.LEARNING_RATES["adagrad"])
    for number in range(6):
        numbers, labels, ids = synthetic.make_batch(MODEL, BATCH, number % synthetic.NUM_BATCHES)
        with tf.GradientTape() as tape:
            pooled = [
                tf.reduce_sum(tf.gather(tables[f.table], one), 1) for f, one in zip(MODEL.features(), ids, strict=True)
            ]
            loss = tower.loss(pooled, numbers, labels)
        variables = [*tables, *tower.variables]
        gradients = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, variables)]
        stock.apply_gradients(zip(gradients, variables, strict=True))
        losses = get_transport().all_gather(training.step()[None], "tests/merlin/losses")
        np.testing.assert_allclose(np.mean(losses), loss, rtol=1e-5)
    return where


def train_with_ids_of_the_whole_batch(strategy, threshold=None):
    """Losses and rows of some steps are those of dp input, to the order of sums. Returns the placements. Collective."""
    where = merlin.placements(MODEL, strategy, sok.size(), BATCH, "adagrad", threshold, dp_input=False)
    setup = merlin.Setup(MODEL, 1, where, BATCH, "adagrad")
    own, whole = (merlin.Training(dataclasses.replace(setup, dp_input=one)) for one in (True, False))
    whole.embed.set_weights(own.embed.get_weights())
    for _ in range(6):
        expected, before = own.step(), sok.collective_counts()["collectives"]
        loss, after = whole.step(), sok.collective_counts()["collectives"]
        np.testing.assert_allclose(loss, expected, rtol=1e-6)  # of this worker's samples
        assert after - before == (3 if sok.size() > 1 else 0)  # rows, their gradients, dense gradients
    for matrix, expected in zip(whole.embed.get_weights(), own.embed.get_weights(), strict=True):
        np.testing.assert_allclose(matrix, expected, rtol=1e-5, atol=1e-7)
    return where
