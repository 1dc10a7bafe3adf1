"""Checkpoints whose rows stay in the files of their tables: what `CheckpointManager(mode="versions")` lists, when."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from sok.checkpoint import tf_checkpoints
from sok.checkpoint.native import EagerCalls
from sok.table import on_servers
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
        if not table.options.has_file:
            continue
        for (shard,) in on_servers.held([table]):
            if not shard.keeps_versions:
                EagerCalls().keep_versions(shard)


def publish(directory: str, path: str, max_to_keep: int | None) -> None:
    """Lists the checkpoint `path`, then removes the oldest ones above `max_to_keep`, so that a crash loses none."""
    state = tf.train.get_checkpoint_state(directory)
    before = [old for old in (state.all_model_checkpoint_paths if state else []) if old != path]
    kept = [*before, path] if max_to_keep is None else [*before, path][-max_to_keep:]
    _list(Path(directory, "checkpoint"), kept)
    gone = [old for old in before if old not in kept]
    for old in gone:
        for file in Path(old).parent.glob(f"{glob.escape(os.path.basename(old))}.*"):
            if file.name.endswith((".index", ".meta")) or ".data-" in file.name:
                file.unlink(missing_ok=True)
    tf_checkpoints.remove_without_checkpoint(gone)


def _list(file: Path, paths: Sequence[str]) -> None:
    """Writes what `tf.train.get_checkpoint_state` reads: a CheckpointState as text, newest last."""
    names = [json.dumps(os.path.basename(path), ensure_ascii=False) for path in paths]
    lines = [f"model_checkpoint_path: {names[-1]}", *(f"all_model_checkpoint_paths: {name}" for name in names)]
    temporary = file.with_name(file.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as out:
        out.write("\n".join(lines) + "\n")
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(file)
