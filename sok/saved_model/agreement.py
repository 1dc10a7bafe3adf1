"""Steps of a collective call that all workers finish, or none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from sok.job import context
from sok.job.transport.base import run_now


class Step:
    """What a worker says about a step: a text that must be the same on all workers."""

    text = ""


@contextlib.contextmanager
def all_or_none(name: str) -> Iterator[Step]:
    """Around a step that each worker does: if one fails, all raise. Collective, in the end and whatever happens inside.

    Raises:
        RuntimeError: a peer failed, or says another text than rank 0. (Here is raised what was raised here.)
    """
    step, failure = Step(), None
    try:
        yield step
    except Exception as error:
        failure = error
    transport = context.get_transport()
    if transport.size > 1:
        told = f"+{step.text}" if failure is None else f"-{type(failure).__name__}: {failure}"
        heard = _gather(told, name)
    if failure is not None:
        raise failure
    if transport.size > 1:
        _check(heard)


def _check(heard: list[str]) -> None:
    for rank, text in enumerate(heard):
        if text.startswith("-"):
            raise RuntimeError(f"sok.export_saved_model failed on rank {rank}: {text[1:]}")
    for rank, text in enumerate(heard):
        if text != heard[0]:
            raise RuntimeError(
                "sok.export_saved_model: all workers must export the same model. Its tables are, in order of use, "
                f"{heard[0][1:]} on rank 0, and {text[1:]} on rank {rank}."
            )


def _gather(text: str, name: str) -> list[str]:
    transport = context.get_transport()
    given = np.frombuffer(text.encode(errors="backslashreplace"), np.uint8)
    sizes = run_now(lambda: transport.all_gather(tf.constant([len(given)], tf.int64), f"{name}/sizes"))
    everyone = run_now(lambda: transport.all_gather(tf.constant(given), f"{name}/texts"))
    return [part.tobytes().decode() for part in np.split(everyone, np.cumsum(sizes)[:-1])]
