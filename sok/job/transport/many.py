"""What engines of several workers have in common: collectives are counted, ordered, and refused after the end."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok.base import tracing
from sok.job.transport.base import Transport, check_addable, is_on_gpu
from sok.job.transport.ordering import in_turn
from sok.job.transport.watch import Watch

_CPU = "/CPU:0"


class ManyTransport(Transport):
    """Several workers, however they reach one another."""

    _watch: Watch | None = None
    _was_aborted = False
    # What the engine does not add: wider numbers are added.
    _added_as: dict[tf.DType, tf.DType]

    def grouped_all_reduce(self, tensors: Sequence[tf.Tensor], name: str, average: bool) -> list[tf.Tensor]:
        with tf.device(_CPU):
            tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        groups: dict[tuple[tf.DType, str], list[int]] = {}
        for place, tensor in enumerate(tensors):
            check_addable(tensor.dtype, "grouped_all_reduce", average)
            dtype = self._added_as.get(tensor.dtype, tensor.dtype)
            groups.setdefault((dtype, self._added_on(tensor)), []).append(place)
        results: list[Any] = [None] * len(tensors)
        devices = sorted({device for _, device in groups} - {_CPU})
        for (dtype, device), places in groups.items():
            group_name = name if len({dtype for dtype, _ in groups}) == 1 else f"{name}/{dtype.name}"
            group_name += "" if device == _CPU else f"/gpu{devices.index(device)}"
            with tf.device(device):
                group = [tf.cast(tensors[place], dtype) for place in places]
                for place, result in zip(places, self._reduce_group(group, group_name, average), strict=True):
                    result.set_shape(tensors[place].shape)
                    results[place] = tf.cast(result, tensors[place].dtype)
        return results

    def _added_on(self, tensor: tf.Tensor) -> str:
        """The device on which a tensor is added to others."""
        is_there = self.adds_on_gpu and tensor.dtype.is_floating and is_on_gpu(tensor)
        return tensor.device if is_there else _CPU

    @abc.abstractmethod
    def _reduce_group(self, group: list[tf.Tensor], name: str, average: bool) -> list[tf.Tensor]:
        """`grouped_all_reduce` of tensors of one dtype."""

    def _check_root(self, root_rank: int) -> None:
        if not 0 <= root_rank < self.size:
            raise ValueError(
                f"`root_rank` must be in [0, {self.size}), the ranks of this job. Received: {root_rank!r}."
            )

    def _run(self, kind: str, name: str, tensors: Any, collective: Callable[..., Sequence[tf.Tensor]]) -> Any:
        """What `collective(first of tensors, turns)` gives: counted, and in turn with others of the name."""
        if self._was_aborted:
            raise tf.errors.AbortedError(
                None, None, f"{kind} '{name}': the job has ended, as sok has said on stderr. Start the workers anew."
            )

        def build(turns: list[tf.Tensor]) -> list[tf.Tensor]:
            first, *_ = tracing.count_group(tf.nest.flatten(tensors), name, kind, turns)
            try:
                result, *others = collective(first, turns)
            except tf.errors.OpError as error:
                if self._watch is None or not self._watch.verdict:
                    raise
                raise tf.errors.DeadlineExceededError(None, None, self._watch.verdict) from error
            return [tracing.done(result, name, turns), *others]

        return in_turn(name, build)
