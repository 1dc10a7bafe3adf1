"""`enable_distributed_strategy`: one line that says how the embeddings of a program are distributed."""

from __future__ import annotations

import threading

import tensorflow as tf

from sok.job import context
from sok.job.servers import Servers

_STRATEGIES = ("collective", "localized", "parameter_server")

_lock = threading.Lock()


def enable_distributed_strategy(strategy: str = "localized", *, servers: int | None = None) -> tf.Tensor | None:
    """Says how the embeddings of this program are distributed. Call it once on every worker, before the first table.

    Args:
        strategy: 'collective': tables are spread over the workers that `horovodrun` started; Horovod and sok are
            initialised (`sok.Init`). 'localized': one worker holds all, and nothing is exchanged. 'parameter_server':
            tables lie on the tasks of the job 'ps' of TensorFlow's own runtime, and workers are not in step
            (docs/parameter_servers.md).
        servers: of 'parameter_server': how many tasks that job has. None: those of TF_CONFIG.

    Returns:
        For 'collective' what `sok.Init` gives, 'OK'; in a v1 graph nobody needs to run it. None otherwise.

    Raises:
        ValueError: another strategy is enabled; the strategy is unknown; no servers are known, or they are given for
            another strategy.
        RuntimeError: 'localized' or 'parameter_server', and there are several workers of a job; 'parameter_server', and
            there are tables already.

    Collective if `strategy` is. A second call with the same strategy does nothing. `sok.shutdown` ends it.

    Example:
        >>> import sok
        >>> sok.shutdown()
        >>> sok.enable_distributed_strategy("localized")
        >>> sok.enable_distributed_strategy("collective")
        Traceback (most recent call last):
        ...
        ValueError: The strategy 'localized' is enabled, and a program has one. Received: 'collective'.
        >>> sok.shutdown()

    Source: `tf.config.experimental.enable_distributed_strategy` of DeepRec, which changes optimizers and learning rate;
    this changes nothing that is not said here.
    """
    if strategy not in _STRATEGIES:
        raise ValueError(f"`strategy` must be 'collective', 'localized' or 'parameter_server'. Received: {strategy!r}.")
    with _lock:
        enabled = context.enabled_strategy
        if enabled is not None and enabled != strategy:
            raise ValueError(f"The strategy '{enabled}' is enabled, and a program has one. Received: '{strategy}'.")
        if servers is not None and strategy != "parameter_server":
            raise ValueError(f"`servers` is for the strategy 'parameter_server'. Received: {servers!r}, '{strategy}'.")
        ok = context.Init() if strategy == "collective" else None
        if strategy == "localized":
            _check_alone()
        if strategy == "parameter_server":
            context.use_servers(Servers.from_environment() if servers is None else Servers(servers))
        context.enabled_strategy = strategy
        return ok


def _check_alone() -> None:
    try:
        if context.size() == 1:
            return
        why = f"sok.Init has joined {context.size()} workers"
    except RuntimeError as error:  # it was launched as one of several, and sok.Init has not been called
        why = str(error).partition(", and sok.Init")[0]
    raise RuntimeError(
        f"The strategy 'localized' is for one worker. {why}. Use 'collective', or start one process alone."
    )
