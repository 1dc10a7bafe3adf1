"""The interface that everything above knows. Collectives work eagerly, in `tf.function` and in v1 graphs."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import tensorflow as tf


class Transport(abc.ABC):
    """A group of workers. Every method but the properties is collective: all ranks call it, with equal names.

    None is differentiable; `sok.lookup` knows how gradients travel.
    """

    name: str
    rank: int
    size: int
    local_rank: int

    @abc.abstractmethod
    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends splits[r] rows of tensor [n, ...] to each rank r; gives the rows received and how many from each."""

    @abc.abstractmethod
    def grouped_all_reduce(self, tensors: Sequence[tf.Tensor], name: str, average: bool) -> list[tf.Tensor]:
        """Sums (or averages) each tensor over all ranks, all in one collective."""

    @abc.abstractmethod
    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """All ranks' rows, rank 0's first; numbers of rows may differ."""

    @abc.abstractmethod
    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str) -> tf.Tensor:
        """Rank `root_rank`'s tensor."""

    @abc.abstractmethod
    def barrier(self, name: str) -> None:
        """Waits until all ranks have come here."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Leaves the group."""

    def broadcast_numpy(self, array: np.ndarray, name: str, root_rank: int = 0) -> np.ndarray:
        """Rank `root_rank`'s array, at once, also while a v1 graph is being built."""
        if self.size == 1:
            return array
        with tf.init_scope():
            if tf.executing_eagerly():
                return self.broadcast(tf.constant(array), root_rank, name).numpy()
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                return session.run(self.broadcast(tf.constant(array), root_rank, name))
