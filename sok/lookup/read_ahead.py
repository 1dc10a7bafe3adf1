"""Rows of tables over files (`sok.Storage`), read into memory while a step before theirs runs.

Where a lookup begins ahead, the owner of the rows reads those of its keys that lie in the file alone. No table changes,
and what goes wrong is left to the step. A lookup of tables in memory has no such op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from sok.base import _ops
from sok.lookup.feature import Feature, Group

if TYPE_CHECKING:
    from sok.lookup.exchange import Ahead, Sent


def of_features(group: Group, features: Sequence[Feature], ahead: Ahead) -> None:
    """On one worker: of the features' keys."""
    handle = dict(zip(group.tables, group.handles, strict=True))
    asked = [f for f in features if f.table.options.has_file]
    if asked:
        keys = [f.ids.for_ops()[0] for f in asked]
        _note(_ops.lib().sok_read_ahead([handle[f.table] for f in asked], keys, batches=ahead.batches), ahead)


def of_words(sent: Sent, ahead: Ahead) -> None:
    """On several: of the keys that this one is asked for."""
    group = sent.group
    if all(not table.options.has_file for table in group.tables):
        return
    with tf.device(group.device) if group.device else tf.name_scope(""):
        op = _ops.lib().sok_exchange_read_ahead(
            group.part_handles, *sent.question, dims=sent.dims, batches=ahead.batches, **sent.attributes
        )
    _note(op, ahead)


def _note(op: tf.Operation | None, ahead: Ahead) -> None:
    if ahead.reads is not None and op is not None:
        ahead.reads.append(op)
