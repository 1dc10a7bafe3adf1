"""Names of NVIDIA Merlin's distributed-embeddings over `sok`: where each of them is.

    import distributed_embeddings.python.layers.dist_model_parallel as dmp

    layer = dmp.DistributedEmbedding(embeddings, strategy="memory_balanced")

The package of Merlin itself has this name too: an environment holds one of them. docs/migrating.md says what differs.
"""

from __future__ import annotations

import importlib
from typing import Any

_LAYERS, _TRAINING = "sok.compat.merlin.layers", "sok.compat.merlin.training"
NAMES = {
    "embedding_lookup": "sok.compat.merlin.lookup:embedding_lookup",
    "Embedding": f"{_LAYERS}:Embedding",
    "ConcatOneHotEmbedding": f"{_LAYERS}:ConcatOneHotEmbedding",
    "IntegerLookup": f"{_LAYERS}:IntegerLookup",
    "DistributedEmbedding": f"{_LAYERS}:DistributedEmbedding",
    "for_keras": f"{_LAYERS}:for_keras",
    "DistEmbeddingStrategy": "sok.planning.merlin:DistEmbeddingStrategy",
    "DistributedGradientTape": f"{_TRAINING}:DistributedGradientTape",
    "DistributedOptimizer": f"{_TRAINING}:DistributedOptimizer",
    "broadcast_variables": f"{_TRAINING}:broadcast_variables",
    "BroadcastGlobalVariablesCallback": f"{_TRAINING}:BroadcastGlobalVariablesCallback",
    "dist_model_parallel": "distributed_embeddings.python.layers.dist_model_parallel",
    "__version__": "sok:__version__",
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
