"""The names of SOK v2 (2.1): `sok.Variable`, `sok.DynamicVariable`, `sok.lookup_sparse` and the rest, on our tables.

What they do differently from SOK, on purpose, is in docs/migrating.md.
"""
