"""A hashed logistic regression on the rows and features of the model: what a model has to beat."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

L2 = (0.0, 0.01, 0.03, 0.1)
"""Strengths of regularization that are tried: l2 / 2 times the squares of the weights that a row uses."""
LEARNING_RATE = 0.1
"""Of Adagrad, which hashed logistic regressions are commonly trained by."""


FIRST_ROWS = 10.0
"""Squared gradients of rows that Adagrad's sums start at: the higher, the smaller are the first steps of a weight."""


class LogisticRegressions(tf.keras.Model):
    """Two logistic regressions for each strength in `L2`, each a column of one table.

    The first ones learn from all rows. Their twins, the scouts, leave the end of the training part out: on it they show
    which strength is best, so that the test part has no say in it.
    """

    def __init__(self, embed: Callable[..., tf.keras.layers.Layer], log_odds: float):
        super().__init__(name="baseline")
        self.embedding = embed(2 * len(L2), "baseline", zeros=True)
        self._log_odds = log_odds
        self.linear = tf.keras.layers.Dense(2 * len(L2), kernel_initializer="zeros", name="baseline_linear")

    def call(self, inputs, training=False):
        return self.logits_and_penalties(inputs, training)[0]

    def logits_and_penalties(self, inputs, training=False):  # both [B, 2 len(L2)]
        rows = self.embedding(inputs["keys"], training=training)  # [B, F, 2 len(L2)]
        logits = self._log_odds + self.linear(inputs["dense"]) + tf.reduce_sum(rows, axis=1)
        return logits, 0.5 * tf.constant(L2 + L2) * tf.reduce_sum(tf.square(rows), axis=1)

    def losses_of_batch(self, inputs, labels, scouts_learn):
        """Return the sum to minimize, and the summed log loss of each scout [len(L2)].

        Args:
          inputs: "dense" [B, num_dense], "keys" [B, F].
          labels: [B] float32.
          scouts_learn: float32, 1 or 0.
        """
        logits, penalties = self.logits_and_penalties(inputs, training=True)
        labels = tf.broadcast_to(labels[:, None], tf.shape(logits))
        losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
        sums = tf.reduce_sum(losses + penalties, axis=0)
        learns = tf.concat([tf.ones(len(L2)), tf.fill([len(L2)], scouts_learn)], axis=0)
        return tf.reduce_sum(learns * sums), tf.reduce_sum(losses[:, len(L2) :], axis=0)
