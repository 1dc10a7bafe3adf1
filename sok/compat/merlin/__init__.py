"""NVIDIA Merlin's distributed-embeddings over `sok`, as `distributed_embeddings` names it."""
