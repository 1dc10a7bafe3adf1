"""`init`: SOK v2's first call."""

from __future__ import annotations

import re

import tensorflow as tf

from sok.job import communication

tf_version = [int(number) for number in re.findall(r"\d+", tf.__version__)[:3]]
"""Major, minor and patch number of TensorFlow."""


def init(comm_tool: str = "horovod", use_legacy_optimizer: bool = True) -> None:
    """Starts the job: `sok.Init()` under SOK v2's name and with its arguments. A second call does nothing.

    Args:
        comm_tool: 'horovod', or 'single' for a process that is alone.
        use_legacy_optimizer: has no meaning here. SOK replaces `tf.keras.optimizers` by its legacy module; we change
            nothing in TensorFlow, and `sok.OptimizerWrapper` takes optimizers of every Keras.

    Raises:
        ValueError: another tool; 'single', and there are several workers.
        ImportError: several workers were launched and Horovod is not installed.
        RuntimeError: a launcher started several processes that Horovod does not see as one job.

    Collective. `hvd.init()` may have been called before, but need not.

    Example:
        >>> import sok
        >>> sok.init()
        >>> sok.communication.num_ranks()
        1

    Source: `init` of SOK v2, where a second call is an error.
    """
    communication.set_comm_tool(comm_tool)
