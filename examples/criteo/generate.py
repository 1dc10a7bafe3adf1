"""Write a click log in Criteo's format from a known click model.

The model is logistic in per-value effects of 13 counts and 26 categories and in a few pairwise interactions of
categories. Because each row's true click probability is known, so is the best AUC that any model can reach on the rows:
the one of the true probabilities, which are written beside the log. Everything is a function of (rows, seed).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from criteo.fields import mix64

FORMAT_VERSION = 1
"""Part of the file name, so that a log of an earlier version of the model below is never reused."""

_CHUNK_ROWS = 50_000
_LOG_ROWS = 45_840_617  # rows of Criteo's Kaggle log
# Distinct values of each categorical column of that log, and how often each column is missing in its first hours.
_CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
_CATEGORY_MISSING = (
    *(0, 0, 0.03, 0.03, 0, 0.13, 0, 0, 0, 0, 0, 0.03, 0),
    *(0, 0, 0.03, 0, 0, 0.45, 0.45, 0.03, 0.8, 0, 0.03, 0.45, 0.45),
)
_COUNT_MISSING = (0.45, 0, 0.2, 0.2, 0.05, 0.25, 0.05, 0, 0.05, 0.45, 0.05, 0.78, 0.2)
_COUNT_LOG_MEAN = (0.7, 2.0, 1.8, 1.5, 7.0, 3.2, 1.5, 1.9, 3.6, 0.3, 0.7, 0.2, 1.7)
_INTERACTIONS = ((5, 8), (13, 16), (19, 22), (16, 8), (21, 19), (22, 5))
_CLICK_RATE = 0.25


def _uniform(words: np.ndarray) -> np.ndarray:
    """Return numbers in (0, 1) that depend on nothing but the words [...] uint64."""
    return ((mix64(words) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _word(*parts: int | np.ndarray) -> np.ndarray:
    word = np.uint64(0x9E3779B97F4A7C15)
    for part in parts:
        with np.errstate(over="ignore"):
            word = mix64(np.asarray(part, dtype=np.uint64) + word)
    return word


def _effect(std: float, *parts: int | np.ndarray) -> np.ndarray:
    """Return effects of the given standard deviation, uniformly distributed, one for each value of `parts`."""
    return (2.0 * _uniform(_word(*parts)) - 1.0) * (std * 3.0**0.5)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows before they are written: -1 stands for a missing category, -1000 for a missing count."""

    labels: np.ndarray  # [n] int64
    counts: np.ndarray  # [n, 13] int64
    categories: np.ndarray  # [n, 26] int64, the rank of the value: 0 is the most frequent
    probabilities: np.ndarray  # [n] float64


MISSING_COUNT = -1000


class ClickModel:
    """The known truth behind a generated log of `rows` rows.

    Raises:
      ValueError: fewer than 10 rows, or a negative seed.
    """

    def __init__(self, rows: int, seed: int):
        if rows < 10:
            raise ValueError(f"`rows` must be at least 10. Received: {rows}.")
        if seed < 0:
            raise ValueError(f"`seed` must not be negative. Received: {seed}.")
        self.rows, self.seed = rows, seed
        # The long tails shrink with the log, so that a value is as rare in it as it is in the real one.
        self.cardinalities = np.array([max(min(c, 1500), c * rows // _LOG_ROWS) for c in _CARDINALITIES])
        self._bias = 0.0
        logits = self.sample(0, min(rows, _CHUNK_ROWS))[1]
        low, high = -20.0, 20.0
        for _ in range(60):  # the click rate grows with the bias
            middle = (low + high) / 2
            low, high = (middle, high) if np.mean(_sigmoid(logits + middle)) < _CLICK_RATE else (low, middle)
        self._bias = low

    def sample(self, first: int, count: int) -> tuple[Rows, np.ndarray]:
        """Return rows [first, first + count) and their logits [count]; the same however the log is cut into pieces."""
        row = np.arange(first, first + count, dtype=np.uint64)[:, None]
        categories = self._categories(row)
        counts, hidden = self._counts(row)
        logits = self._bias + self._category_effects(categories) + self._count_effects(counts, hidden)
        probabilities = _sigmoid(logits)
        labels = (_uniform(_word(self.seed, 5, row[:, 0])) < probabilities).astype(np.int64)
        return Rows(labels, counts, categories, probabilities), logits

    def _categories(self, row: np.ndarray) -> np.ndarray:
        column = np.arange(26)[None, :]
        u = _uniform(_word(self.seed, 1, column, row))  # [n, 26]
        # Zipf's law with exponent 1.1, by inverting its continuous distribution function.
        power = -0.1
        largest = (self.cardinalities[None, :] + 1.0) ** power
        ranks = np.floor((1.0 - u * (1.0 - largest)) ** (1.0 / power)).astype(np.int64) - 1
        ranks = np.clip(ranks, 0, self.cardinalities[None, :] - 1)
        missing = _uniform(_word(self.seed, 2, column, row)) < np.array(_CATEGORY_MISSING)[None, :]
        return np.where(missing, -1, ranks)

    def _counts(self, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        column = np.arange(13)[None, :]
        u = _uniform(_word(self.seed, 3, column, row))  # [n, 13]
        spread = np.log(u / (1.0 - u))  # logistic, so that the counts have a heavy tail
        counts = np.floor(np.exp(np.array(_COUNT_LOG_MEAN)[None, :] + spread * 0.7) - 0.5).astype(np.int64)
        counts = np.clip(counts, 0, 9_999_999)
        missing = _uniform(_word(self.seed, 4, column, row)) < np.array(_COUNT_MISSING)[None, :]
        return np.where(missing, MISSING_COUNT, counts), missing

    def _category_effects(self, categories: np.ndarray) -> np.ndarray:
        column = np.arange(26)[None, :]
        # The missing value (-1) is one more value.
        value = (categories + 1).astype(np.uint64)
        # Rare values matter less: nobody could learn what they do, and the best AUC would say little about a model.
        weight = 1.0 / (1.0 + np.maximum(categories, 0) / 10.0)
        logits = (weight * _effect(0.45, self.seed, 6, column, value)).sum(axis=1)
        for number, (a, b) in enumerate(_INTERACTIONS):
            for factor in range(2):
                left = _effect(1.0, self.seed, 7, number, factor, 0, value[:, a])
                logits += 0.15 * left * _effect(1.0, self.seed, 7, number, factor, 1, value[:, b])
        return logits

    def _count_effects(self, counts: np.ndarray, missing: np.ndarray) -> np.ndarray:
        column = np.arange(13)[None, :]
        slope = _effect(0.2, self.seed, 8, column)
        level = np.log1p(np.maximum(counts, 0)) - np.array(_COUNT_LOG_MEAN)[None, :]
        logits = np.where(missing, _effect(0.2, self.seed, 9, column), slope * level).sum(axis=1)
        # One count works best in the middle, which no linear model finds.
        return logits - np.where(missing[:, 2], 0.0, 0.15 * (level[:, 2] ** 2 - 1.0))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def format_rows(rows: Rows, seed: int) -> bytes:
    """Return the rows as text in Criteo's format."""
    n = rows.labels.size
    numbers = np.concatenate([rows.labels[:, None], np.where(rows.counts == MISSING_COUNT, 0, rows.counts)], axis=1)
    digits = 1 + (numbers[:, :, None] >= 10 ** np.arange(1, 8)).sum(axis=2)
    digits[:, 1:][rows.counts == MISSING_COUNT] = 0
    present = rows.categories >= 0
    lengths = np.concatenate([digits, np.where(present, 8, 0)], axis=1)  # [n, 40]
    ends = np.cumsum(lengths.ravel() + 1).reshape(n, 40) - 1  # where each field's separator goes
    text = np.full(int(ends[-1, -1]) + 1, ord("\t"), dtype=np.uint8)
    text[ends[:, -1]] = ord("\n")
    for place in range(8):
        written = digits > place
        text[ends[:, :14][written] - 1 - place] = ord("0") + numbers[written] // 10**place % 10
    column = np.broadcast_to(np.arange(26)[None, :], (n, 26))[present]
    # As in the real log, a category is shown as a 32-bit hash that says nothing about its rank.
    hashes = _word(seed, 10, column, rows.categories[present])
    last = ends[:, 14:][present] - 1
    hexadecimal = np.frombuffer(b"0123456789abcdef", np.uint8)
    for place in range(8):
        text[last - place] = hexadecimal[((hashes >> np.uint64(4 * place)) & np.uint64(15)).astype(np.int64)]
    return text.tobytes()


def generate(path: str | Path, rows: int, seed: int, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write the log to `path` and its true click probabilities to `truth_path(path)`, each complete or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    model = ClickModel(rows, seed)
    truth = np.empty(rows, dtype=np.float64)
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    truth_part = part.with_name(part.name + ".npy")
    try:
        with open(part, "wb") as file:
            for first in range(0, rows, _CHUNK_ROWS):
                count = min(_CHUNK_ROWS, rows - first)
                chunk = model.sample(first, count)[0]
                truth[first : first + count] = chunk.probabilities
                file.write(format_rows(chunk, seed))
                if progress:
                    progress(first + count, rows)
        np.save(truth_part, truth)
        os.replace(truth_part, truth_path(path))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
        truth_part.unlink(missing_ok=True)
    return path


def truth_path(path: str | Path) -> Path:
    """Return where the true click probabilities (float64, one a row) of a generated log are kept."""
    return Path(f"{path}.truth.npy")


def cached_log(directory: str | Path, rows: int, seed: int, progress: Callable[[int, int], None] | None = None) -> Path:
    """Return the path of the generated log of (rows, seed) below `directory`, writing it if it is not there yet."""
    path = cached_path(directory, rows, seed)
    if not (path.exists() and truth_path(path).exists()):
        generate(path, rows, seed, progress)
    return path


def cached_path(directory: str | Path, rows: int, seed: int) -> Path:
    """Return where `cached_log` keeps the log of (rows, seed)."""
    return Path(directory) / f"clicks-v{FORMAT_VERSION}-{rows}-rows-seed-{seed}.tsv"
