"""Three click models in Keras: DLRM-like, DeepFM, and Wide & Deep.

Each takes `{"dense": [B, num_dense] float32, "keys": [B, F] int64}` and gives logits [B]. Where the embedding rows live
is the caller's choice: `embed(dim, name, zeros=False)` returns a layer from keys [B, F] to rows [B, F, dim]. They run
under Keras 3 and, with TF_USE_LEGACY_KERAS=1, under tf_keras.

Every dense layer has an initializer with its own seed, so that all workers, and both backends, start alike.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

Embed = Callable[..., tf.keras.layers.Layer]


class _Seeds:
    """Numbers the layers of a model, and with them their random initial values."""

    def __init__(self, seed: int):
        self._next = seed * 1000

    def dense(self, units: int, activation: str | None, name: str) -> tf.keras.layers.Dense:
        self._next += 1
        initializer = tf.keras.initializers.GlorotUniform(seed=self._next)
        return tf.keras.layers.Dense(units, activation=activation, kernel_initializer=initializer, name=name)

    def zeros(self, name: str) -> tf.keras.layers.Dense:
        """What is added to a linear part starts at nothing: the model is no worse than that part, to begin with."""
        return tf.keras.layers.Dense(1, kernel_initializer="zeros", name=name)

    def tower(self, widths: tuple[int, ...], name: str) -> tf.keras.Sequential:
        return tf.keras.Sequential([self.dense(w, "relu", f"{name}_{i}") for i, w in enumerate(widths)], name=name)


class _Model(tf.keras.Model):
    """A model that keeps its embedding rows small: `l2` / 2 times the squares of the rows of each sample is a loss.

    So are `linear_l2` / 2 times those of the weights of its linear part.
    """

    l2 = linear_l2 = 0.0

    def linear_variables(self) -> list:
        """Return the variables of a linear part, if there is one."""
        return []

    def rows_of(self, embedding, keys, training, l2):  # [B, F] -> [B, F, D]
        rows = embedding(keys, training=training)
        if training and l2:
            self.add_loss(0.5 * l2 * tf.reduce_sum(tf.square(rows)))
        return rows


class Dlrm(_Model):
    """Dot products of all pairs of feature vectors, the dense features being one of them, then an MLP.

    After Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (2019).
    """

    def __init__(self, embed: Embed, num_features: int, embedding_dim: int, seed: int = 0):
        super().__init__(name="dlrm")
        seeds = _Seeds(seed)
        self.embedding = embed(embedding_dim, "embedding")
        self.bottom = seeds.tower((64, embedding_dim), "bottom")
        self.top = seeds.tower((128, 64), "top")
        self.logit = seeds.dense(1, None, "logit")
        pairs = [(i, j) for i in range(num_features + 1) for j in range(i)]
        self._pair_positions = [i * (num_features + 1) + j for i, j in pairs]

    def call(self, inputs, training=False):
        dense = self.bottom(inputs["dense"])  # [B, D]
        rows = self.rows_of(self.embedding, inputs["keys"], training, self.l2)  # [B, F, D]
        vectors = tf.concat([dense[:, None, :], rows], axis=1)  # [B, 1 + F, D]
        products = tf.matmul(vectors, vectors, transpose_b=True)  # [B, 1 + F, 1 + F]
        flat = tf.reshape(products, [-1, products.shape[1] * products.shape[2]])
        pairs = tf.gather(flat, self._pair_positions, axis=1)  # each pair once
        return self.logit(self.top(tf.concat([dense, pairs], axis=1)))[:, 0]


class DeepFm(_Model):
    """A factorization machine and an MLP over the same embedding rows, added.

    After Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction" (2017).
    """

    def __init__(self, embed: Embed, num_features: int, embedding_dim: int, seed: int = 0):
        super().__init__(name="deepfm")
        seeds = _Seeds(seed)
        self.embedding = embed(embedding_dim, "embedding")
        self.first_order = embed(1, "first_order", zeros=True)
        self.linear = seeds.dense(1, None, "linear")
        self.deep = seeds.tower((128, 64), "deep")
        self.logit = seeds.zeros("logit")
        self._width = num_features * embedding_dim

    def linear_variables(self) -> list:
        return self.first_order.trainable_variables + self.linear.trainable_variables

    def call(self, inputs, training=False):
        rows = self.rows_of(self.embedding, inputs["keys"], training, self.l2)  # [B, F, D]
        weights = self.rows_of(self.first_order, inputs["keys"], training, self.linear_l2)  # [B, F, 1]
        # The sum over all pairs i < j of <v_i, v_j> is half of (the square of the sum - the sum of the squares).
        total = tf.reduce_sum(rows, axis=1)
        second_order = 0.5 * tf.reduce_sum(tf.square(total) - tf.reduce_sum(tf.square(rows), axis=1), axis=1)
        flat = tf.concat([inputs["dense"], tf.reshape(rows, [-1, self._width])], axis=1)
        deep = self.logit(self.deep(flat))[:, 0]
        linear = self.linear(inputs["dense"])[:, 0] + tf.reduce_sum(weights, axis=[1, 2])
        return linear + second_order + deep


class WideDeep(_Model):
    """A linear model over all values and an MLP over their embedding rows, added.

    After Cheng et al., "Wide & Deep Learning for Recommender Systems" (2016), without hand-crossed features.
    """

    def __init__(self, embed: Embed, num_features: int, embedding_dim: int, seed: int = 0):
        super().__init__(name="widedeep")
        seeds = _Seeds(seed)
        self.embedding = embed(embedding_dim, "embedding")
        self.wide = embed(1, "wide", zeros=True)
        self.linear = seeds.dense(1, None, "linear")
        self.deep = seeds.tower((256, 128), "deep")
        self.logit = seeds.zeros("logit")
        self._width = num_features * embedding_dim

    def linear_variables(self) -> list:
        return self.wide.trainable_variables + self.linear.trainable_variables

    def call(self, inputs, training=False):
        rows = self.rows_of(self.embedding, inputs["keys"], training, self.l2)  # [B, F, D]
        weights = self.rows_of(self.wide, inputs["keys"], training, self.linear_l2)  # [B, F, 1]
        flat = tf.concat([inputs["dense"], tf.reshape(rows, [-1, self._width])], axis=1)
        deep = self.logit(self.deep(flat))[:, 0]
        return deep + self.linear(inputs["dense"])[:, 0] + tf.reduce_sum(weights, axis=[1, 2])


MODELS = {"dlrm": Dlrm, "deepfm": DeepFm, "widedeep": WideDeep}
