"""Which strategy of `tf.distribute` is in force: tables know those that run one replica in each worker of the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_v1 = tf.compat.v1.distribute
_ONE_BY_ONE = (
    *(tf.distribute.OneDeviceStrategy, tf.distribute.MirroredStrategy),
    *(_v1.OneDeviceStrategy, _v1.MirroredStrategy),
)
_OF_WORKERS = tf.distribute.MultiWorkerMirroredStrategy
_NAMES = {"CollectiveAllReduceStrategy": "MultiWorkerMirroredStrategy"}  # what users call it

# How many workers the job has, if it runs on TensorFlow's collectives, as a MultiWorkerMirroredStrategy does: a job
# says so while it lasts.
workers: Callable[[], int] | None = None


def refuse(what: str, of: Any = None) -> None:
    """Raises if `what` is made or used under a strategy that would copy variables or steps behind our back.

    The default strategy is fine, and so is one of one replica, which runs a step once on variables that are there once.
    So is a `MultiWorkerMirroredStrategy` with one replica in each worker of the job, but not for Keras 3.

    Args:
        what: for people.
        of: a layer, a model or an optimizer, whose Keras counts.

    Raises:
        RuntimeError: it is another one.
    """
    if not tf.distribute.has_strategy():
        return
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    if replicas == 1 and isinstance(strategy, (*_ONE_BY_ONE, _OF_WORKERS)):
        return
    name = type(strategy).__name__.removesuffix("V1").removesuffix("V2")
    begin = f"{what} is made or used under a tf.distribute.{_NAMES.get(name, name)} (replicas: {replicas}). "
    if not isinstance(strategy, _OF_WORKERS):
        raise RuntimeError(
            f"{begin}sok shares tables between the workers of its own job; the replicas of a strategy would each train "
            "them once more, with gradients of a part of the batch. Leave the strategy's scope, and start one process "
            "for each worker: sok.Init() and horovodrun -np N python train.py (docs/several_workers.md)."
        )
    if workers is None:
        raise RuntimeError(
            f"{begin}sok has not met the workers of this strategy. Call sok.Init() once on every worker, after the "
            "strategy is made and before anything of sok is (docs/strategies.md). A job that was started by horovodrun "
            "needs no strategy: leave its scope, sok.Init() is all."
        )
    if replicas != workers():
        raise RuntimeError(
            f"{begin}The job has {workers()} workers, and each may have one replica: a worker is one process with one "
            "device. Let each process see one GPU (CUDA_VISIBLE_DEVICES), and start a process for each."
        )
    if of is not None and _is_of_keras_3(of):
        raise RuntimeError(
            f"{begin}Keras 3 does not train under it: its `fit` and its optimizers do not add up the gradients of "
            "several workers. Use tf_keras (TF_USE_LEGACY_KERAS=1, or import tf_keras and sok.layers.for_keras("
            "tf_keras)); or Keras 3 with sok.Init() and horovodrun, outside of the strategy (docs/several_workers.md)."
        )


def add_up() -> bool:
    """Whether the strategy in force, which is not refused, adds up dense gradients of several workers by itself."""
    return tf.distribute.has_strategy() and tf.distribute.get_strategy().num_replicas_in_sync > 1


def refuse_where_they_add_up(what: str, instead: str) -> None:
    """Raises for what reduces gradients in a way of its own, where the strategy's optimizers do so.

    Raises:
        RuntimeError: several workers are under their strategy.
    """
    if add_up():
        raise RuntimeError(
            f"{what} reduces gradients over the workers, and under a tf.distribute.MultiWorkerMirroredStrategy the "
            f"optimizer does so once more. {instead} (docs/strategies.md)."
        )


def _is_of_keras_3(thing: Any) -> bool:
    return any(base.__module__.startswith("keras.") for base in type(thing).__mro__)
