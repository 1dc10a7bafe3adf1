"""The interface through which everything above reaches other workers. It knows no tables and no layers."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from sok.base.graph_ops import run_now

MOVABLE = (
    *(tf.uint8, tf.int8, tf.uint16, tf.int16, tf.uint32, tf.int32, tf.uint64, tf.int64, tf.bool),
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64),
)
ADDABLE = (tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64)


def check_movable(dtype: tf.DType, what: str) -> None:
    """`TypeError` for a dtype that collectives do not move."""
    if dtype not in MOVABLE:
        accepted = ", ".join(d.name for d in MOVABLE)
        raise TypeError(f"{what}: the dtype must be one of {accepted}. Received: {dtype.name}.")


def check_addable(dtype: tf.DType, what: str, average: bool) -> None:
    """`TypeError` for a dtype that is not summed, or averaged, over workers."""
    accepted = [d for d in ADDABLE if d.is_floating or not average]
    if dtype not in accepted:
        names = ", ".join(d.name for d in accepted)
        how = "to average" if average else "to sum"
        raise TypeError(f"{what}: a dtype {how} must be one of {names}. Received: {dtype.name}.")


def is_on_gpu(tensor: tf.Tensor) -> bool:
    """Whether it is said that a tensor lies on a GPU. In a graph that is said of some alone."""
    return "GPU" in tensor.device.rpartition("device:")[2]


def check_has_rows(tensor: tf.Tensor, what: str) -> None:
    """`ValueError` for a scalar."""
    if tensor.shape.rank == 0:
        raise ValueError(f"{what}: the tensor must have rows, that is rank >= 1. Received: a scalar.")


class Transport(abc.ABC):
    """A group of `size` workers, of which this process is number `rank`.

    Its methods are collective: every rank calls them with equal `name`, dtype and trailing dimensions, as often as the
    others do. They work eagerly, in `tf.function` and in v1 graphs, and are not differentiable: who needs gradients
    says how they travel (sok/lookup/exchange.py does).

    `name` tells collectives apart that may run at the same time. Inside a graph take it from
    `sok.job.context.unique_collective_name`, so that it is equal on all ranks and unique in the graph.

    A call may block until all ranks have made theirs. When a rank is gone, the others get a `tf.errors.OpError`.
    """

    name: str
    rank: int
    size: int
    local_rank: int
    # Whether `grouped_all_reduce` adds floats where they are said to lie on a GPU. Equal on all ranks.
    adds_on_gpu = False

    @abc.abstractmethod
    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends to each rank its rows and gives the rows that all ranks sent here.

        Args:
            tensor: [n, ...], any number or bool dtype. The first splits[0] rows go to rank 0, then splits[1] to 1, ...
            splits: [R] int32, not negative, with sum n. All may be 0.
            name: see the class.

        Returns:
            received [m, ...], rank 0's rows first, and received_splits [R] int32: how many came from each rank.
        """

    @abc.abstractmethod
    def grouped_all_reduce(self, tensors: Sequence[tf.Tensor], name: str, average: bool) -> list[tf.Tensor]:
        """Sums or averages each tensor over all ranks, in one collective for all (one for each dtype among them).

        Args:
            tensors: any number of dense number tensors, of shapes equal on all ranks. None at all: no collective.
            name: see the class.
            average: whether to divide the sums by R; floating point only.

        Returns:
            Tensors of the same shapes and dtypes, bit for bit equal on all ranks.
        """

    @abc.abstractmethod
    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Gives all ranks' rows [m, ...], rank 0's first. `tensor` is [n, ...] with n as each rank likes, also 0."""

    @abc.abstractmethod
    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str) -> tf.Tensor:
        """Gives rank `root_rank`'s tensor to all; the others pass one of the same shape and dtype."""

    @abc.abstractmethod
    def barrier(self, name: str) -> tf.Tensor:
        """Waits until all ranks are here. Eagerly on return; in a graph when the returned scalar is there."""

    def narrowing_pays(self) -> bool:
        """Whether rows in 16 bit get to other workers sooner. The same on all ranks."""
        return True

    def gpu_tensors(self) -> str:
        """How tensors of a GPU travel, in words for people: see `sok doctor`."""
        return "on the device (one worker: nothing is sent)"

    def describe_ended(self) -> str:
        """What is known of workers whose programs have ended, in words for people; or nothing."""
        return ""

    def abort(self) -> None:  # noqa: B027 (one worker has none)
        """Ends all collectives, on every rank, with an error: those under way and those to come."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Says that this object will not be used any more."""

    def broadcast_numpy(self, array: np.ndarray, name: str, root_rank: int = 0) -> np.ndarray:
        """Gives rank `root_rank`'s array to all at once, also while a graph is being built."""
        if self.size == 1:
            return array
        return run_now(lambda: self.broadcast(tf.constant(array), root_rank, name))
