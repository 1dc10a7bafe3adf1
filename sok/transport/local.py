"""A world of one worker: every collective is the identity."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from sok.transport.base import Transport


class LocalTransport(Transport):
    """One process, no peers."""

    name = "local"
    rank = 0
    size = 1
    local_rank = 0

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        return tensor, splits

    def grouped_all_reduce(self, tensors: Sequence[tf.Tensor], name: str, average: bool) -> list[tf.Tensor]:
        return list(tensors)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return tensor

    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str) -> tf.Tensor:
        return tensor

    def barrier(self, name: str) -> None:
        return None

    def shutdown(self) -> None:
        return None
