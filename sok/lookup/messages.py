"""Words of the messages between workers that Python reads or writes itself (all: docs/design/exchange.md)."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

# Of a message of keys (ops/exchange_op.h): where its status is, and which says that text follows the header. Where that
# is fine nobody else looks at the detail: there a worker says that it has no such batch.
HEADER_WORDS, _STATUS, _DETAIL, _FINE, _REFUSED, _ENDED = 7, 4, 6, 0, 10, 1
ANSWER_HEADER, NOT_SERVED = 16, 4.0  # of an answer: its floats before the rows, and a status that says there are none


def saying_end(words: tf.Tensor, splits: tf.Tensor, has_ended: bool | tf.Tensor) -> tf.Tensor:
    """Messages of keys; without a key if `has_ended`."""
    places = (tf.cumsum(splits, exclusive=True) + _DETAIL)[:, tf.newaxis]
    details = tf.where(has_ended, tf.constant(_ENDED, words.dtype), tf.gather_nd(words, places))
    return tf.tensor_scatter_nd_update(words, places, details)


def having_keys(words: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
    """How many ranks have the batch whose messages of keys these are, int32 []."""
    begins = tf.cumsum(splits, exclusive=True)
    status, detail = (tf.gather(words, begins + word) for word in (_STATUS, _DETAIL))
    return tf.reduce_sum(tf.cast((status != _FINE) | (detail != _ENDED), tf.int32))


def says_end(words: np.ndarray) -> bool:
    """Whether who sent a message of keys has no such batch."""
    return bool(words.size >= HEADER_WORDS and words[_STATUS] == _FINE and words[_DETAIL] == _ENDED)


def refused_text(words: np.ndarray) -> str | None:
    """The text of a message of keys that is a refusal; None of any other."""
    is_refusal = words.size >= HEADER_WORDS and words[_STATUS] == _REFUSED
    return bytes(words[HEADER_WORDS:].astype(np.uint8)).decode(errors="replace") if is_refusal else None
