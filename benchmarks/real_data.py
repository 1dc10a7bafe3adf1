"""Public data in a folder, as columns of row numbers: what an embedding layer of Keras takes.

`read(folder)` finds, by name: `criteo*.tsv` and `avazu*.csv` (or .gz), `ml-100k/` (MovieLens 100K) and
`amazon_beauty/` (time-ordered purchases, a line for each user, and attributes of items).
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from examples.deepctr import click_log
from examples.movielens import ratings

# 0 stands where a list has ended, 1 begins each, so that none is empty.
_PADDING, _BEGIN = 0, 1
_HISTORY = 20


@dataclasses.dataclass(frozen=True)
class Data:
    """Samples in the order of their file; n of them."""

    name: str
    columns: dict[str, np.ndarray]  # [n, k] int64 each; of k > 1 a list with 0 where it has ended
    numbers: np.ndarray  # [n, d] float32, d may be 0
    labels: np.ndarray  # [n] float32, 0 or 1
    is_test: np.ndarray  # [n] bool

    @property
    def rows(self) -> dict[str, int]:
        """How many rows the embedding of each column needs."""
        return {name: int(ids.max()) + 1 for name, ids in self.columns.items()}


def read(folder: str | Path) -> Iterator[Data]:
    """Yields the data sets that the folder has.

    Raises:
        FileNotFoundError: it has none.
    """
    folder, found = Path(folder), False
    for pattern, reader in _READERS.items():
        for path in sorted(folder.glob(pattern))[:1]:
            found = True
            yield reader(path)
    if not found:
        raise FileNotFoundError(f"{folder} has none of {', '.join(_READERS)}.")


def _open(path: Path) -> IO[str]:
    return gzip.open(path, "rt") if path.suffix == ".gz" else path.open()


def _numbered(values: np.ndarray) -> np.ndarray:  # [n] of anything -> [n, 1]
    return np.unique(values, return_inverse=True)[1].reshape(-1, 1)


def _last_fifth(n: int) -> np.ndarray:
    return np.arange(n) >= n - n // 5


def _criteo(path: Path) -> Data:
    columns, labels = click_log.read(str(path), rows=1 << 32)  # its categories have 32 bits
    numbers = np.concatenate([columns[name] for name in click_log.NUMBERS], axis=1)
    ids = {name: _numbered(columns[name]) for name in click_log.CATEGORIES}
    return Data("criteo", ids, numbers, labels[:, 0], _last_fifth(labels.size))


def _avazu(path: Path) -> Data:
    with _open(path) as file:
        names, *lines = csv.reader(file)
    words = dict(zip(names, np.array(lines).T, strict=True))
    labels = words.pop("click").astype(np.float32)
    del words["id"]
    ids = {name: _numbered(of) for name, of in words.items()}
    return Data("avazu", ids, np.zeros([labels.size, 0], np.float32), labels, _last_fifth(labels.size))


def _padded(lists: list[list[int]], length: int) -> np.ndarray:
    padded = np.full([len(lists), length + 1], _PADDING)
    padded[:, 0] = _BEGIN
    for row, items in zip(padded, lists, strict=True):
        row[1 : len(items) + 1] = items
    return padded


def _movielens(path: Path) -> Data:
    """Who gave which movie 4 or 5 stars; the last fifth of each user's ratings is the test part."""
    train, test = ratings.load(path, _HISTORY)
    singles = np.concatenate([train.singles, test.singles])
    columns = {name: _numbered(singles[:, i]) for i, name in enumerate(ratings.SINGLE_FEATURES)}
    lists: dict[str, list[list[int]]] = {"genres": [], "history": []}
    for part in train, test:
        for name, values, splits in (
            ("genres", part.genres, part.genre_splits),
            ("history", part.history, part.history_splits),
        ):
            lists[name] += [list(2 + values[a:b]) for a, b in itertools.pairwise(splits)]
    columns |= {name: _padded(of, max(map(len, of))) for name, of in lists.items()}
    labels = np.concatenate([train.labels, test.labels])
    nothing = np.zeros([labels.size, 0], np.float32)
    return Data("movielens", columns, nothing, labels, np.arange(labels.size) >= len(train))


def _amazon(path: Path) -> Data:
    """What a user bought (1), and an item that she never did (0), drawn by chance; her last pair is for the test."""
    with _open(next(path.glob("*_seq.txt*"))) as file:
        bought = [[int(word) for word in line.split()] for line in file]
    with _open(next(path.glob("*_item2attributes.json*"))) as file:
        attributes = {int(item): of for item, of in json.load(file).items()}
    items = np.unique([item for _, *of in bought for item in of])
    rng = np.random.default_rng(0)
    users, targets, histories, is_test = [], [], [], []
    for user, *of in bought:
        own = set(of)
        for i in range(1, len(of)):
            other = int(rng.choice(items))
            while other in own:
                other = int(rng.choice(items))
            users += [user, user]
            targets += [of[i], other]
            histories += [[1 + item for item in of[max(0, i - _HISTORY) : i]]] * 2
            is_test += [i == len(of) - 1] * 2
    lists = [[1 + one for one in attributes.get(item, [])] for item in targets]
    columns = {
        "user": _numbered(np.array(users)),
        "item": _numbered(np.array(targets)),
        "attributes": _padded(lists, max(map(len, lists))),
        "history": _padded(histories, _HISTORY),
    }
    labels = np.tile(np.float32([1, 0]), len(targets) // 2)
    return Data("amazon", columns, np.zeros([labels.size, 0], np.float32), labels, np.array(is_test))


_READERS: dict[str, Callable[[Path], Data]] = {
    "criteo*.tsv*": _criteo,
    "avazu*.csv*": _avazu,
    "ml-100k": _movielens,
    "amazon_beauty": _amazon,
}
