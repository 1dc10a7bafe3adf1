"""What workers say of their batches in the messages of keys that travel ahead."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from sok.lookup import messages

LEFT = (
    "it has begun no such batch, and has come to the end of its program, to sok.shutdown(), or to where nobody holds "
    "what begins its lookups. All workers take as many batches."
)


class Said:
    """What has been said in one pipeline, of which no more is sent once a worker has left it."""

    def __init__(self) -> None:
        self.over = ""  # which worker has left

    def check_open(self) -> None:
        """`InvalidArgumentError` once a worker has left."""
        if self.over:
            raise tf.errors.InvalidArgumentError(None, None, self.over)

    def hear(self, words: np.ndarray, splits: np.ndarray) -> list[np.ndarray]:
        """The message of each worker, of what one lookup has received."""
        by_rank = np.split(words, np.cumsum(splits)[:-1])
        for rank, one in enumerate(by_rank):
            if messages.refused_text(one) == LEFT:
                self.over = f"rank {rank}: {LEFT}"
        return by_rank

    def is_batch(self, words: np.ndarray, splits: np.ndarray) -> bool:
        """Whether any worker has the batch of these messages.

        Raises:
            tf.errors.InvalidArgumentError: a worker has begun it with words in place of its keys.
        """
        by_rank = self.hear(words, splits)
        for rank, one in enumerate(by_rank):
            text = messages.refused_text(one)
            if text is not None:
                raise tf.errors.InvalidArgumentError(None, None, f"rank {rank}: {text}")
        return not all(messages.says_end(one) for one in by_rank)
