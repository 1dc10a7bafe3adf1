"""A world of one worker: every collective is the identity, and none is counted."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from sok.job.transport.base import Transport


class LocalTransport(Transport):
    """One process without peers."""

    name = "local"
    rank = 0
    size = 1
    local_rank = 0

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.convert_to_tensor(tensor), tf.convert_to_tensor(splits, tf.int32)

    def grouped_all_reduce(self, tensors: Sequence[tf.Tensor], name: str, average: bool) -> list[tf.Tensor]:
        return [tf.convert_to_tensor(tensor) for tensor in tensors]

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return tf.convert_to_tensor(tensor)

    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str) -> tf.Tensor:
        if root_rank != 0:
            raise ValueError(f"`root_rank` must be 0 in a world of one worker. Received: {root_rank!r}.")
        return tf.convert_to_tensor(tensor)

    def barrier(self, name: str) -> tf.Tensor:
        return tf.constant(1)

    def shutdown(self) -> None:
        return None
