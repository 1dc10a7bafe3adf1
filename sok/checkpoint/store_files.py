"""A table inside a file of Keras: `.weights.h5` and `.keras`, as an array of bytes that is a shard file."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from sok.base.patching import Here
from sok.checkpoint import tf_checkpoints
from sok.checkpoint.restoring import is_wanted
from sok.job.job import job_of
from sok.table.table import EmbeddingVariable

_NAME, _STEP = "sok_table", "sok_table_step"
_GENERATION = "keras"  # a file of Keras is one as a whole

# Where our own functions for several workers leave rows to the files beside.
_left_out = Here()


def leaving_rows_out() -> contextlib.AbstractContextManager[None]:
    """Within it Keras' files neither get rows nor give them, and say nothing about it."""
    return _left_out.inside(True)


def leaves_rows_out() -> bool:
    """Whether the caller is within `leaving_rows_out`."""
    return bool(_left_out.value)


def save(table: EmbeddingVariable, store: MutableMapping[str, np.ndarray]) -> None:
    """Puts rows and slots into a layer's store, if this worker has all of them."""
    from sok.checkpoint.native import EagerCalls

    if leaves_rows_out():
        return
    if job_of([table]).size > 1 or table.on_servers is not None or table._in_graph_mode:
        table.warn_not_saved()
        return
    with tempfile.TemporaryDirectory() as folder, tf.init_scope():
        path = Path(folder, "shard")
        EagerCalls().save(table, str(path), _GENERATION)
        store[_NAME] = np.fromfile(path, np.uint8)
        store[_STEP] = np.int64(table.step)


def load(table: EmbeddingVariable, store: MutableMapping[str, np.ndarray]) -> None:
    """Gives the table what `save` has put into the store. Not collective, and refused on several workers."""
    from sok.checkpoint.native import EagerCalls, verify_shard
    from sok.optimizers import claims

    if leaves_rows_out():
        return
    if _NAME not in store.keys():  # noqa: SIM118 (Keras' stores have no `in`)
        tf_checkpoints.warn_not_restored({"": table}, "this file holds none.")
        return
    if job_of([table]).size > 1 or table.on_servers is not None or table._in_graph_mode:
        tf_checkpoints.warn_not_restored({"": table}, "a worker alone cannot restore tables; use sok.load_weights.")
        return
    with tempfile.TemporaryDirectory() as folder, tf.init_scope():
        path = Path(folder, "shard")
        np.asarray(store[_NAME]).astype(np.uint8).tofile(path)
        shard = verify_shard(str(path))
        wanted = [s for s in shard["slot_sets"] if is_wanted(s["rule"], table, slots=True)]
        sets = [claims.SavedSlots(s["name"], s["rule"]) for s in wanted]
        names = claims.names_here(table, sets)
        calls = EagerCalls()
        second = calls.second(table, min(shard["rows"], table.capacity))
        calls.load(table, second, str(path), list(names.items()))
        calls.swap(table, second)
        claims.restored(table, sets, names)
        counted = max((s["calls"] for s in shard["slot_sets"]), default=0)  # a file of before has no step
        calls.set_step(table, int(np.asarray(store[_STEP])) if _STEP in store.keys() else counted)  # noqa: SIM118
