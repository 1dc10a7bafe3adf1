"""Read MovieLens 100K into features of a fixed and of a varying number of ids."""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SINGLE_FEATURES = ("user", "movie", "age", "gender", "occupation")
NUM_GENRES = 19
_ID_SPACE = 1 << 20  # each single feature has its own million of ids, so that all share one table


@dataclasses.dataclass(frozen=True)
class Ratings:
    """Rated movies, each with what was known just before the rating."""

    singles: np.ndarray  # [n, 5] int64: one id for each of SINGLE_FEATURES
    genres: np.ndarray  # ids of all rows' genres, row after row
    genre_splits: np.ndarray  # [n + 1]
    history: np.ndarray  # ids of the movies the user liked so far, row after row, at most `max_history` each
    history_splits: np.ndarray  # [n + 1]
    labels: np.ndarray  # [n] float32: 1 for a rating of 4 or 5

    def __len__(self) -> int:
        return self.labels.size

    def take(self, rows: np.ndarray) -> Ratings:
        """Return some rows, in the given order."""
        genres, genre_splits = _take_ragged(self.genres, self.genre_splits, rows)
        history, history_splits = _take_ragged(self.history, self.history_splits, rows)
        return Ratings(self.singles[rows], genres, genre_splits, history, history_splits, self.labels[rows])


def _take_ragged(values: np.ndarray, splits: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.diff(splits)[rows]
    new_splits = np.concatenate([[0], np.cumsum(lengths)])
    # Position within the row, plus where the row starts.
    positions = np.arange(new_splits[-1]) - np.repeat(new_splits[:-1], lengths) + np.repeat(splits[rows], lengths)
    return values[positions], new_splits


def _lines(directory: Path, name: str) -> Iterator[list[str]]:
    for path, opener in ((directory / name, open), (directory / f"{name}.gz", gzip.open)):
        if path.exists():
            with opener(path, "rt", encoding="latin-1") as file:
                for number, line in enumerate(file, 1):
                    fields = line.rstrip("\n").split("\t" if name == "u.data" else "|")
                    expected = {"u.data": 4, "u.item": 24, "u.user": 5}[name]
                    if len(fields) != expected:
                        raise ValueError(f"{path}, line {number}: expected {expected} fields, found {len(fields)}.")
                    yield fields
            return
    raise FileNotFoundError(
        f"{directory / name} (or {name}.gz) does not exist. MovieLens 100K: https://grouplens.org/datasets/movielens/100k/"
    )


def load(directory: str | Path, max_history: int = 20, holdout: float = 0.2) -> tuple[Ratings, Ratings]:
    """Return the training and the test rows; the test rows are the last `holdout` fraction of every user's ratings.

    Both parts are in the order of time. The history of a row has only movies that were rated before it.

    Raises:
      FileNotFoundError: one of u.data, u.item, u.user (plain or .gz) is missing.
      ValueError: a line has the wrong number of fields; the message has file and line.
    """
    directory = Path(directory)
    genres = {int(f[0]): [g for g in range(NUM_GENRES) if f[5 + g] == "1"] for f in _lines(directory, "u.item")}
    occupations: dict[str, int] = {}
    users = {
        int(f[0]): (int(f[1]) // 5, int(f[2] == "F"), occupations.setdefault(f[3], len(occupations)))
        for f in _lines(directory, "u.user")
    }
    data = np.array([[int(v) for v in f] for f in _lines(directory, "u.data")], dtype=np.int64)
    data = data[np.lexsort((data[:, 1], data[:, 0], data[:, 3]))]  # time, then user and movie to settle ties
    liked: dict[int, list[int]] = {user: [] for user in users}
    histories, movie_genres = [], []
    for user, movie, rating, _ in data.tolist():
        histories.append(liked[user][-max_history:])
        movie_genres.append(genres[movie])
        if rating >= 4:
            liked[user].append(movie)
    single_ids = [data[:, 0], data[:, 1], *np.array([users[user] for user in data[:, 0].tolist()]).T]
    ratings = Ratings(
        np.stack([ids + column * _ID_SPACE for column, ids in enumerate(single_ids)], axis=1),
        *_ragged(movie_genres),
        *_ragged(histories),
        (data[:, 2] >= 4).astype(np.float32),
    )
    is_test = _is_last_of_user(data[:, 0], holdout)
    return ratings.take(np.flatnonzero(~is_test)), ratings.take(np.flatnonzero(is_test))


def _ragged(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    values = np.array([value for row in rows for value in row], dtype=np.int64)
    return values, np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)


def _is_last_of_user(users: np.ndarray, holdout: float) -> np.ndarray:
    order = np.argsort(users, kind="stable")
    counts = np.bincount(users)
    starts = np.cumsum(counts) - counts
    place = np.empty(users.size, dtype=np.int64)
    place[order] = np.arange(users.size) - starts[users[order]]  # the user's how-many-th rating
    return place >= np.ceil(counts[users] * (1.0 - holdout))
