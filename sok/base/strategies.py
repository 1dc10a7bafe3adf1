"""Which strategy of `tf.distribute` is in force: tables know none that has replicas of its own."""

from __future__ import annotations

import tensorflow as tf

_v1 = tf.compat.v1.distribute
_ONE_BY_ONE = (
    *(tf.distribute.OneDeviceStrategy, tf.distribute.MirroredStrategy),
    *(_v1.OneDeviceStrategy, _v1.MirroredStrategy),
)
_is_served = False  # tables lie on parameter servers
_NAMES = {"CollectiveAllReduceStrategy": "MultiWorkerMirroredStrategy"}  # what users call it


def note_servers(are_there: bool) -> None:
    """Says whether tables lie on parameter servers: TensorFlow's strategy for these then has nothing to copy."""
    global _is_served
    _is_served = are_there


def refuse(what: str) -> None:
    """Raises if `what` is made or used under a strategy that would copy variables or steps behind our back.

    The default strategy is fine, and so are `OneDeviceStrategy` and a `MirroredStrategy` of one replica, which run a
    step once on variables that are there once. So is TensorFlow's `ParameterServerStrategy` if its servers hold tables.

    Raises:
        RuntimeError: it is another one.
    """
    if not tf.distribute.has_strategy():
        return
    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, _ONE_BY_ONE) and strategy.num_replicas_in_sync == 1:
        return
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        if _is_served:
            return
        raise RuntimeError(
            f"{what} is made or used under a tf.distribute.ParameterServerStrategy, and sok knows of no servers. Call "
            "sok.enable_distributed_strategy('parameter_server') before the first table: tables then lie on the "
            "strategy's servers (docs/parameter_servers.md)."
        )
    name = type(strategy).__name__.removesuffix("V1").removesuffix("V2")
    raise RuntimeError(
        f"{what} is made or used under a tf.distribute.{_NAMES.get(name, name)} (replicas: "
        f"{strategy.num_replicas_in_sync}). sok shares tables between the workers of its own job; the replicas of a "
        "strategy would each train them once more, with gradients of a part of the batch. Leave the strategy's scope, "
        "and start one process for each worker: sok.Init() and horovodrun -np N python train.py "
        "(docs/several_workers.md)."
    )
