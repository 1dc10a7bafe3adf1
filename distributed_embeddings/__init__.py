"""Names of NVIDIA Merlin's distributed-embeddings over `sok`: where each of them is.

    from distributed_embeddings import DistEmbeddingStrategy

The package of Merlin itself has this name too: an environment holds one of them.
"""

from __future__ import annotations

import importlib
from typing import Any

NAMES = {
    "DistEmbeddingStrategy": "sok.planning.merlin:DistEmbeddingStrategy",
    "dist_model_parallel": "distributed_embeddings.python.layers.dist_model_parallel",
}

__all__ = sorted(NAMES)


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module 'distributed_embeddings' has no attribute {name!r}")
    module_name, _, attribute = NAMES[name].partition(":")
    module = importlib.import_module(module_name)
    return getattr(module, attribute) if attribute else module


def __dir__() -> list[str]:
    return sorted({*globals(), *NAMES})
