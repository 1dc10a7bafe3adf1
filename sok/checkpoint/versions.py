"""Checkpoints whose rows stay in the files of their tables: what `CheckpointManager(mode="versions")` lists, and when."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok.checkpoint import tf_checkpoints
from sok.checkpoint.native import EagerCalls
from sok.table.options import whole_number

MODES = ("files", "versions")


def check(mode: str, max_to_keep: int | None, every_n_hours: float | None) -> None:
    """Refuses what makes no sense.

    Raises:
        ValueError: that says what.
    """
    if mode not in MODES:
        raise ValueError(f"`mode` must be one of {', '.join(map(repr, MODES))}. Received: {mode!r}.")
    if mode == "versions" and every_n_hours is not None:
        raise ValueError(
            "`keep_checkpoint_every_n_hours` keeps checkpoints for ever, and with mode='versions' a file has all that "
            "its rows have held since the oldest one. Copy such a checkpoint with sok.save, or leave it out."
        )
    if max_to_keep is not None:
        whole_number("max_to_keep", max_to_keep)


def prepare(tables: Sequence[Any]) -> None:
    """Has tables over files keep versions, before they have many rows.

    Raises:
        tf.errors.FailedPreconditionError: a table cannot: it has policies, say.
    """
    for table in tables:
        if table.options.storage is not None and not table.keeps_versions:
            EagerCalls().keep_versions(table)


def publish(directory: str, path: str, max_to_keep: int | None) -> None:
    """Lists the checkpoint `path`, and removes the oldest ones above `max_to_keep`. In this order: a crash loses none."""
    state = tf.train.get_checkpoint_state(directory)
    before = [old for old in (state.all_model_checkpoint_paths if state else []) if old != path]
    kept = [*before, path] if max_to_keep is None else [*before, path][-max_to_keep:]
    tf.compat.v1.train.update_checkpoint_state(directory, path, all_model_checkpoint_paths=kept)
    for old in before:
        if old not in kept:
            tf.compat.v1.train.remove_checkpoint(os.path.join(directory, old))
    tf_checkpoints.remove_without_checkpoint(old for old in before if old not in kept)
