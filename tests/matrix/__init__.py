"""Every kind of table, through every operation, with every rule that trains it.

`kinds.py` lists the kinds, `rules.py` the rules with what NumPy says of them, `operations.py` what can be done,
`refusals.py` what cannot, and why. A new one of any of these joins by its line in the list there. `cells.py` chooses:
CI runs all pairs, and all triples with the placement; `make matrix` the product, or a part of it, alone and on two
workers.
"""
