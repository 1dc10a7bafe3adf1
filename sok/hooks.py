"""Session hooks for `tf.compat.v1.train.MonitoredTrainingSession`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok.distributed.broadcast import broadcast_variables


class BroadcastVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives all workers the global variables of worker `root_rank` once their session is made (or restored).

    Horovod's `BroadcastGlobalVariablesHook` does not exist with this TensorFlow. Give `checkpoint_dir` to worker
    `root_rank` alone: the others get what it restored. Embedding tables keep their rows.

    Args:
        root_rank: whose values, in [0, R).

    Collective. Use it on all workers with the same graph.

    Example:
        >>> import sok, tensorflow as tf
        >>> with tf.Graph().as_default():
        ...     weight = tf.compat.v1.get_variable("weight", initializer=2.0)
        ...     hooks = [sok.hooks.BroadcastVariablesHook(root_rank=0)]
        ...     with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
        ...         print(session.run(weight))
        2.0
    """

    def __init__(self, root_rank: int = 0) -> None:
        self.root_rank = root_rank
        self._broadcast: Any = None

    def begin(self) -> None:
        # Here, since the graph is finalized afterwards.
        self._broadcast = broadcast_variables(tf.compat.v1.global_variables(), self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self._broadcast)
