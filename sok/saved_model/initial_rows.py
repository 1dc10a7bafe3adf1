"""What a key without a row reads as, in stock ops: docs/design/initial_values.md, said once more."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from sok.table.initializers import InitializerSpec

_MASK = 0xFFFFFFFF
_PURPOSE = 0x736F6B31  # the letters "sok1"
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_ERF_OF_SQRT_2 = 0.9544997361036416


def initial_rows(spec: InitializerSpec, seed: tf.Tensor, words: tf.Tensor, dim: int) -> tf.Tensor:
    """The initial row of each key.

    Args:
        spec: of the table.
        seed: of the table, int64 scalar.
        words: [N] int64, the bits of each key as a 64-bit word.
        dim: length D of a row.

    Returns:
        [N, D] float32: bit for bit what the table gives for 'constant', 'uniform' and 'bank'; within 1e-5 standard
        deviations for the normal distributions.
    """
    if spec.kind == "constant":
        return tf.fill([tf.size(words), dim], tf.constant(spec.a, tf.float32))
    if spec.kind == "normal":
        return spec.a + spec.b * _standard_normals(_random_words(seed, words, dim + dim % 2))[:, :dim]
    drawn = _random_words(seed, words, dim)
    if spec.kind == "bank":
        bank = np.array(spec.bank, np.float32).reshape(-1, dim)
        places = tf.bitwise.right_shift(drawn * len(bank), tf.constant(32, tf.int64))
        return tf.gather(tf.constant(bank.ravel()), places * dim + tf.range(dim, dtype=tf.int64))
    uniforms = _upper_24_bits(drawn)
    if spec.kind == "uniform":
        a, b = np.float32(spec.a), np.float32(spec.b)
        return a + uniforms * np.float32(2.0**-24) * (b - a)
    if spec.kind == "truncated_normal":
        uniforms = (tf.cast(uniforms, tf.float64) + 0.5) * 2.0**-24
        z = math.sqrt(2.0) * tf.math.erfinv(_ERF_OF_SQRT_2 * (2.0 * uniforms - 1.0))
        return tf.cast(spec.a + spec.b * tf.clip_by_value(z, -2.0, 2.0), tf.float32)
    raise ValueError(f"unknown initializer {spec.kind!r}")


def _random_words(seed: tf.Tensor, words: tf.Tensor, dim: int) -> tf.Tensor:
    """[N, dim] int64 in [0, 2^32): Philox4x32-10 with the key's word and the number of the block for a counter.

    In int64 throughout, which every TensorFlow multiplies, on any device: the lower 64 bits of a product do not depend
    on what the upper one stands for.
    """
    low, high = _low(words)[:, None], _low(_shifted(words))[:, None]
    blocks = tf.range(-(-dim // 4), dtype=tf.int64)[None, :]
    # [N, 1] and [1, blocks] meet in the first rounds.
    counter = (low, high, blocks, tf.constant(_PURPOSE, tf.int64))
    key = (_low(seed), _low(_shifted(seed)))
    for _ in range(_ROUNDS):
        first, second = counter[0] * _MULTIPLIERS[0], counter[2] * _MULTIPLIERS[1]
        counter = (
            _xor(_low(_shifted(second)), counter[1], key[0]),
            _low(second),
            _xor(_low(_shifted(first)), counter[3], key[1]),
            _low(first),
        )
        key = tuple(_low(k + step) for k, step in zip(key, _KEY_STEPS, strict=True))
    shape = [tf.size(words), -(-dim // 4)]
    stacked = tf.stack([tf.broadcast_to(word, shape) for word in counter], axis=2)
    return tf.reshape(stacked, [-1, 4 * -(-dim // 4)])[:, :dim]


def _low(x: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_and(x, tf.constant(_MASK, tf.int64))


def _shifted(x: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.right_shift(x, tf.constant(32, tf.int64))


def _xor(a: tf.Tensor, b: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(tf.bitwise.bitwise_xor(a, b), key)


def _upper_24_bits(drawn: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.bitwise.right_shift(drawn, tf.constant(8, tf.int64)), tf.float32)


def _standard_normals(drawn: tf.Tensor) -> tf.Tensor:
    """[N, even] words to as many normals, by Box and Muller."""
    upper = _upper_24_bits(drawn)
    radius = tf.sqrt(-2.0 * tf.math.log((upper[:, 0::2] + 1.0) * 2.0**-24))
    angle = upper[:, 1::2] * np.float32(2.0**-24) * np.float32(2.0 * math.pi)
    pairs = tf.stack([radius * tf.cos(angle), radius * tf.sin(angle)], axis=2)
    return tf.reshape(pairs, tf.shape(drawn))
