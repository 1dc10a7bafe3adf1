"""Measures sok beside the machine's own limit and every peer that is installed. docs/performance.md says how and what.

python -m benchmarks            all cases of the table in docs/performance.md
python -m benchmarks --quick    a few of them, within three minutes
python -m benchmarks growth     how cost grows with rows, dim, batch, tables and workers

Knows sok's public API, and nobody in sok knows it. Outside `contestants/` and the charts it needs the standard library
and NumPy only: a peer runs these files with the Python of its own environment.
"""
