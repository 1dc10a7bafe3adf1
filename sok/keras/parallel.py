"""Many tables, each where it belongs, behind one layer: `sok.parallel`."""

from sok.keras.layers import EmbeddingCollection

__all__ = ["EmbeddingCollection"]
