"""The judges: each operation stated slowly and obviously in NumPy. Nothing here knows what it is the judge of."""
