"""Many workers through Horovod: the only file that imports it."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from sok import tracing
from sok.transport.base import Transport


class HorovodTransport(Transport):
    """Horovod's processes and collectives, as Horovod was built (Gloo, MPI or NCCL). Starts Horovod if need be."""

    name = "horovod"

    def __init__(self) -> None:
        try:
            import horovod.tensorflow as hvd
        except ImportError as error:
            raise ImportError(
                "This process was launched as one of many workers, but Horovod cannot be imported here "
                f"({error}). Install it (`make setup` does), or start a single process without horovodrun."
            ) from error
        self._hvd = hvd
        try:
            self._is_ours = not hvd.is_initialized()
        except (AttributeError, ValueError):
            self._is_ours = True
        if self._is_ours:
            hvd.init()
        self.rank, self.size, self.local_rank = hvd.rank(), hvd.size(), hvd.local_rank()

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        tensor = tracing.count(tensor, name, "all_to_all")
        received, received_splits = self._hvd.alltoall(tensor, splits=splits, name=name)
        received.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
        received_splits.set_shape([self.size])
        return received, received_splits

    def grouped_all_reduce(self, tensors: Sequence[tf.Tensor], name: str, average: bool) -> list[tf.Tensor]:
        tensors = list(tensors)
        if not tensors:
            return []
        tensors = tracing.count_group(tensors, name, "grouped_all_reduce")
        op = self._hvd.Average if average else self._hvd.Sum
        return self._hvd.grouped_allreduce(tensors, op=op, name=name)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._hvd.allgather(tracing.count(tensor, name, "all_gather"), name=name)

    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str) -> tf.Tensor:
        return self._hvd.broadcast(tracing.count(tensor, name, "broadcast"), root_rank, name=name)

    def barrier(self, name: str) -> None:
        self._hvd.allreduce(tf.zeros([1]), name=name)

    def shutdown(self) -> None:
        if self._is_ours and self._hvd.is_initialized():
            self._hvd.shutdown()
