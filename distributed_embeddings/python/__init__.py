"""Where Merlin has its Python modules."""
