"""Gradients of ordinary variables that stay slices: those of all workers, for optimizers that look at each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok.job import context

_NONE, _DENSE = -1, -2  # in place of the number of slices of a gradient


def pack(pairs: Sequence[tuple[Any, Any]]) -> tf.Tensor:
    """What a worker tells the others of its slices: [n] int32.

    Args:
        pairs: (gradient, variable), of all V variables of the step: `tf.IndexedSlices`, a tensor, or None.

    Returns:
        For each variable the number of its slices, or what it has instead; then of each its ids, and its values.
    """
    with tf.device("/CPU:0"):
        numbers = tf.stack([_number(grad) for grad, _ in pairs])
        packed = [part for grad, variable in pairs for part in _packed(grad, variable)]
        return tf.concat([numbers, *packed], 0)


def of_all_workers(words: tf.Tensor, pairs: Sequence[tuple[Any, Any]]) -> tuple[tf.Tensor, dict[int, tf.IndexedSlices]]:
    """Gives the slices of all workers, as one worker has them that has the samples of all.

    Args:
        words: what `pack` gave for `pairs`: [n] int32.

    Returns:
        Whether all workers have a gradient of one kind, for each variable: bool [V]. It is False on all workers or on
        none, and to be asked before the others are used. And the slices of each variable that has some, by its place in
        `pairs`: rank 0's first, in the order of each rank, not scaled.

    Collective: one for all variables.
    """
    transport = context.get_transport()
    with tf.device("/CPU:0"):
        name = context.unique_collective_name("sok/dense_gradients/slices")
        # Not all_gather: this says how much came from whom, and goes through memory that workers share.
        copies, splits = tf.tile(words, [transport.size]), tf.fill([transport.size], tf.size(words))
        received, came = transport.all_to_all(copies, splits, name)
        numbers = tf.gather(received, tf.cumsum(came, exclusive=True)[:, None] + tf.range(len(pairs)))  # [R, V]
        is_same = tf.reduce_all(tf.equal(tf.minimum(numbers, 0), tf.minimum(words[: len(pairs)], 0)), 0)
        numbers = tf.maximum(numbers, 0)
        sizes = numbers * tf.constant([sum(_words_of_slice(variable)) for _, variable in pairs])
        # Else a worker has other variables: nothing is to be made of its words.
        is_whole = tf.reduce_all(tf.equal(came, len(pairs) + tf.reduce_sum(sizes, 1)))
        is_same, numbers = is_same & is_whole, tf.where(is_whole, numbers, 0)
        return is_same, _unpacked(received, came, numbers, pairs)


def _number(grad: Any) -> tf.Tensor:
    if isinstance(grad, tf.IndexedSlices):
        return tf.size(grad.indices)
    return tf.constant(_NONE if grad is None else _DENSE)


def _dtypes(variable: Any) -> tuple[tf.DType, tf.DType]:
    """In which ids and values travel: of 32 or 64 bits."""
    rows, dtype = (tuple(variable.shape) or (1,))[0], tf.as_dtype(variable.dtype)
    return (tf.int32 if rows <= tf.int32.max else tf.int64), (tf.float32 if dtype.size < 4 else dtype)


def _words_of_slice(variable: Any) -> tuple[int, int]:
    """Of an id and of its values."""
    of_id, of_values = _dtypes(variable)
    return of_id.size // 4, of_values.size * math.prod(variable.shape[1:]) // 4


def _packed(grad: Any, variable: Any) -> list[tf.Tensor]:
    if not isinstance(grad, tf.IndexedSlices):
        return []
    parts = zip((grad.indices, grad.values), _dtypes(variable), strict=True)
    return [tf.reshape(tf.bitcast(tf.cast(part, dtype), tf.int32), [-1]) for part, dtype in parts]


def _unpacked(
    words: tf.Tensor, came: tf.Tensor, numbers: tf.Tensor, pairs: Sequence[tuple[Any, Any]]
) -> dict[int, tf.IndexedSlices]:
    """The slices of each variable that has some, by its place.

    Args:
        words: of all workers.
        came: how many of them from each: [R].
        numbers: of slices of each worker and variable: [R, V].
    """
    places = [place for place, (grad, _) in enumerate(pairs) if isinstance(grad, tf.IndexedSlices)]
    sizes = [numbers[:, place] * size for place in places for size in _words_of_slice(pairs[place][1])]
    sizes = tf.stack([came - tf.add_n(sizes), *sizes] if sizes else [came], 1)  # [R, 1 + 2 len(places)]
    pieces = tf.split(words, tf.reshape(sizes, [-1]), num=math.prod(sizes.shape))
    found = {}
    for part, place in enumerate(places):
        grad, variable = pairs[place]
        ids, values = (
            _from_words(tf.concat(pieces[1 + 2 * part + i :: sizes.shape[1]], 0), dtype)
            for i, dtype in enumerate(_dtypes(variable))
        )
        shape = [int(size) for size in variable.shape]
        found[place] = tf.IndexedSlices(
            tf.cast(tf.reshape(values, [tf.size(ids), *shape[1:]]), grad.values.dtype),
            tf.cast(ids, grad.indices.dtype),
            tf.constant(shape, grad.indices.dtype),
        )
    return found


def _from_words(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.bitcast(tf.reshape(words, [-1, 2]) if dtype.size == 8 else words, dtype)
