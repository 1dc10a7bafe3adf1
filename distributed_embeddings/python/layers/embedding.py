"""Merlin's module of its layers: names of the package, under the path that programs import."""

from distributed_embeddings import __getattr__

__all__ = ["__getattr__"]
