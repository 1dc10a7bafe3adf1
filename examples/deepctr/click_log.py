"""A log in Criteo's format as DeepCTR's models take it: a column for each of 13 numbers and 26 categories."""

from __future__ import annotations

import gzip
import itertools

import numpy as np

NUMBERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))


def read(path: str, rows: int, count: int | None = None) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the columns, each [n, 1], and the labels [n, 1] of the log, or of its first `count` lines.

    A number x becomes log(1 + x), where one that is negative or missing counts as 0. A category, 32 bits in
    hexadecimal, becomes a row number below `rows`; one that is missing becomes 0.
    """
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
        lines = [line.rstrip("\n").split("\t") for line in itertools.islice(file, count)]
    labels, *fields = (np.array(words)[:, None] for words in zip(*lines, strict=True))
    columns = {}
    for name, words in zip(NUMBERS + CATEGORIES, fields, strict=True):
        words = np.where(words == "", "0", words)
        if name in NUMBERS:
            columns[name] = np.log1p(np.maximum(words.astype(np.float32), 0))
        else:
            columns[name] = np.array([[int(word, 16) % rows] for (word,) in words], np.int64)
    return columns, labels.astype(np.float32)
