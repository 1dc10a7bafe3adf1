"""Merlin's module of its lookup: names of the package, under the path that programs import."""

from distributed_embeddings import __getattr__

__all__ = ["__getattr__"]
