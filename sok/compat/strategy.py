"""`enable_distributed_strategy`: one line that says how the embeddings of a program are distributed."""

from __future__ import annotations

import threading

import tensorflow as tf

from sok.job import context

_STRATEGIES = ("collective", "localized", "parameter_server")

_lock = threading.Lock()


def enable_distributed_strategy(strategy: str = "localized") -> tf.Tensor | None:
    """Says how the embeddings of this program are distributed. Call it once on every worker, before the first table.

    Args:
        strategy: 'collective': tables are spread over the workers that `horovodrun` started; Horovod and sok are
            initialised (`sok.Init`). 'localized': one worker holds all, and nothing is exchanged. 'parameter_server' is
            not there yet.

    Returns:
        For 'collective' what `sok.Init` gives, 'OK'; in a v1 graph nobody needs to run it. None otherwise.

    Raises:
        ValueError: another strategy is enabled; the strategy is unknown.
        RuntimeError: 'localized', and there are several workers.
        NotImplementedError: 'parameter_server'.

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
        if strategy == "parameter_server":
            raise NotImplementedError(
                "There are no parameter servers here. Enable 'collective': it spreads tables over the workers."
            )
        ok = context.Init() if strategy == "collective" else None
        if strategy == "localized":
            _check_alone()
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
