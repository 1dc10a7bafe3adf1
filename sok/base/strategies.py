"""Which strategy of `tf.distribute` is in force, and what its replicas do together.

Tables know those that run one replica in each worker of the job, those of one process whose replicas use one table, and
those whose servers hold the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
# How many workers the job has, whatever it runs on; None: nobody has asked for a job yet.
job_size: Callable[[], int] | None = None
is_served = False  # Whether tables lie on parameter servers: TensorFlow's strategy for these then has nothing to copy.


def refuse(what: str, of: object = None, may_be_shared: bool = False) -> None:
    """Raises if `what` is made or used under a strategy that would copy variables or steps behind our back.

    The default strategy is fine, and so is one of one replica, which runs a step once on variables that are there once.
    So is a `MultiWorkerMirroredStrategy` with one replica in each worker of the job, and for what its replicas may
    share a `MirroredStrategy` of the only worker; but neither for Keras 3. And a `ParameterServerStrategy`, if its
    servers hold the tables.

    Args:
        what: for people.
        of: a layer, a model or an optimizer, whose Keras counts.
        may_be_shared: whether replicas of one process use it together.

    Raises:
        RuntimeError: it is another one.
    """
    if not tf.distribute.has_strategy():
        return
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    if replicas == 1 and isinstance(strategy, (*_ONE_BY_ONE, _OF_WORKERS)):
        return
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        if is_served:
            return
        raise RuntimeError(
            f"{what} is made or used under a tf.distribute.ParameterServerStrategy, and sok knows of no servers. Call "
            "sok.enable_distributed_strategy('parameter_server') before the first table: tables then lie on the "
            "strategy's servers (docs/parameter_servers.md)."
        )
    name = type(strategy).__name__.removesuffix("V1").removesuffix("V2")
    begin = f"{what} is made or used under a tf.distribute.{_NAMES.get(name, name)} (replicas: {replicas}). "
    if may_be_shared and _replicas_share() and (job_size is None or job_size() == 1):
        pass
    elif not isinstance(strategy, _OF_WORKERS):
        raise RuntimeError(
            f"{begin}sok shares tables between the workers of its own job; the replicas of a strategy would each train "
            "them once more, with gradients of a part of the batch. Leave the strategy's scope, and start one process "
            "for each worker: sok.Init() and horovodrun -np N python train.py (docs/several_workers.md)."
        )
    elif workers is None:
        raise RuntimeError(
            f"{begin}sok has not met the workers of this strategy. Call sok.Init() once on every worker, after the "
            "strategy is made and before anything of sok is (docs/strategies.md). A job that was started by horovodrun "
            "needs no strategy: leave its scope, sok.Init() is all."
        )
    elif replicas != workers():
        raise RuntimeError(
            f"{begin}The job has {workers()} workers, and each may have one replica: a worker is one process with one "
            "device. Let each process see one GPU (CUDA_VISIBLE_DEVICES), and start a process for each."
        )
    if of is not None and _is_of_keras_3(of):
        raise RuntimeError(
            f"{begin}Keras 3 does not train under it: its `fit` and its optimizers do not add up the gradients of "
            "replicas. Use tf_keras (TF_USE_LEGACY_KERAS=1, or import tf_keras and sok.layers.for_keras("
            "tf_keras)); or Keras 3 with sok.Init() and horovodrun, outside of the strategy (docs/several_workers.md)."
        )


def _replicas_share() -> bool:
    """Whether the strategy in force has several replicas, all in this process."""
    strategy = tf.distribute.get_strategy()
    is_v1 = not tf.compat.v1.executing_eagerly_outside_functions()  # whose steps are ops: a merge call gives none
    return strategy.num_replicas_in_sync > 1 and isinstance(strategy, _ONE_BY_ONE) and not is_v1


def once_for_all(do: Callable[[list[Any]], None], slices: Sequence[tf.IndexedSlices]) -> bool:
    """In one of several replicas of this process, calls `do` once with the slices of all, side by side.

    All replicas call this, each with its part of the same. Elsewhere it does nothing, and gives False.
    """
    if not _replicas_share() or tf.distribute.in_cross_replica_context():
        return False

    def joined(strategy: tf.distribute.Strategy, *of_replicas: Any) -> None:
        do([_side_by_side(strategy.experimental_local_results(one)) for one in of_replicas])

    tf.distribute.get_replica_context().merge_call(joined, args=tuple(slices))
    return True


def _side_by_side(parts: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.concat([one.values for one in parts], 0), tf.concat([one.indices for one in parts], 0))


def add_up() -> bool:
    """Whether the strategy in force, which is not refused, adds up dense gradients of several replicas by itself."""
    return tf.distribute.has_strategy() and tf.distribute.get_strategy().num_replicas_in_sync > 1


def refuse_where_they_add_up(what: str, instead: str) -> None:
    """Raises for what reduces gradients in a way of its own, where the strategy's optimizers do so.

    Raises:
        RuntimeError: there are several replicas.
    """
    if add_up():
        raise RuntimeError(
            f"{what} reduces gradients in a way of its own, and under a tf.distribute strategy of several replicas the "
            f"optimizer adds them up. {instead} (docs/strategies.md)."
        )


def _is_of_keras_3(thing: Any) -> bool:
    return any(base.__module__.startswith("keras.") for base in type(thing).__mro__)
