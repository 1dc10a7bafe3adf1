"""Merlin's module of the wrapper and its plans: names of the package, under the path that programs import."""

from distributed_embeddings import __getattr__

__all__ = ["__getattr__"]
