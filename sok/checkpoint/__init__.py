"""Checkpoints of tables: `save`, `restore`, `compact`, a feed of changes, and looking into one.

docs/design/checkpoint.md has format and protocol.
"""

from __future__ import annotations

import importlib
from typing import Any

# Loaded on first use: a manifest can be read without TensorFlow.
_PUBLIC = {
    "CheckpointManager": "manager",
    "CheckpointError": "manifest",
    "Manifest": "manifest",
    "read_manifest": "manifest",
    "save": "saving",
    "restore": "restoring",
    "compact": "compacting",
    "deltas": "feed",
    "follow": "feed",
    "Publisher": "publishing",
    "Delta": "feed",
    "Follower": "feed",
    "AsyncSave": "background",
    "verify": "verifying",
    "prepare": "native",
    "save_weights": "keras_files",
    "load_weights": "keras_files",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'sok.checkpoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sok.checkpoint.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value
