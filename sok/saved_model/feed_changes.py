"""What saves have changed in one table, gathered from their files: the last word on each key."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf

from sok.checkpoint.feed import Delta


@dataclasses.dataclass(frozen=True)
class Changes:
    """Of one table: keys as 64-bit words, rising, each once."""

    words: np.ndarray  # [n] uint64, that have other rows now
    rows: np.ndarray  # [n, D] float32
    erased: np.ndarray  # [m] uint64, that have none any more


def gathered(pieces: Iterable[Delta], dim: int, rows_before: Callable[[np.ndarray], np.ndarray] | None) -> Changes:
    """What all the pieces of a table, in their order, come to.

    Args:
        pieces: as `sok.deltas` gives them.
        dim: D.
        rows_before: of words [k] the rows [k, D] before all this, for keys of which only some columns have changed.
            None: there were none.
    """
    written: list[tuple[int, np.ndarray, np.ndarray, np.ndarray]] = []
    erased: list[tuple[np.ndarray, np.ndarray]] = []
    at = 0  # events in order
    for piece in pieces:
        for keys, rows in (piece.erased, None), (piece.keys, piece.rows):
            words, order = wide(keys), np.arange(at, at + len(keys))
            at += len(keys)
            if not len(keys):
                continue
            if rows is None:
                erased.append((words, order))
            else:
                written.append((piece.first_column, words, order, rows))
    gone, gone_at = _last(erased)
    found: list[tuple[int, np.ndarray, np.ndarray, np.ndarray]] = []
    for first, events in _by_columns(written).items():
        words, when, rows = _last(events)
        found.append((first, words, when, rows))
    words = np.unique(np.concatenate([np.zeros(0, np.uint64), *(one for _, one, _, _ in found)]))
    written_at = np.full(len(words), -1)
    for _, some, when, _ in found:
        places = np.searchsorted(words, some)
        written_at[places] = np.maximum(written_at[places], when)
    is_gone = _times_of(words, gone, gone_at) > written_at
    erased_words = np.union1d(words[is_gone], np.setdiff1d(gone, words))
    words = words[~is_gone]
    table = np.zeros([len(words), dim], np.float32)
    missing = np.zeros(len(words), bool)
    for first, some, when, rows in found:
        # What was written before the key was erased is no part of the row that it has now.
        places = np.searchsorted(some, words)
        places[places == len(some)] = 0
        is_there = (some[places] == words) & (when[places] > _times_of(words, gone, gone_at))
        table[is_there, first : first + rows.shape[1]] = rows[places[is_there]]
        missing |= ~is_there
    covered = sum(rows.shape[1] for _, _, _, rows in found)
    if covered < dim:
        missing[:] = True
    if missing.any() and rows_before is not None:
        before = rows_before(words[missing])
        for first, some, when, rows in found:
            places = np.searchsorted(some, words[missing])
            places[places == len(some)] = 0
            is_there = (some[places] == words[missing]) & (when[places] > _times_of(words[missing], gone, gone_at))
            before[is_there, first : first + rows.shape[1]] = rows[places[is_there]]
        table[missing] = before
    return Changes(words, table, erased_words)


def _by_columns(
    written: Sequence[tuple[int, np.ndarray, np.ndarray, np.ndarray]],
) -> dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """What was written, by the first of the columns that every piece has together or not at all."""
    edges = sorted({edge for first, _, _, rows in written for edge in (first, first + rows.shape[1])})
    found: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for first, words, order, rows in written:
        for begin, end in itertools.pairwise(edges):
            if first <= begin and end <= first + rows.shape[1]:
                found.setdefault(begin, []).append((words, order, rows[:, begin - first : end - first]))
    return found


def wide(keys: np.ndarray) -> np.ndarray:
    """Keys as 64-bit words: signed ones sign-extended, unsigned ones zero-extended."""
    is_unsigned = tf.as_dtype(keys.dtype).is_unsigned
    return keys.astype(np.uint64 if is_unsigned else np.int64).view(np.uint64)


def _last(events: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Of arrays side by side the entries of the last event of each word; words rise."""
    if not events:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    columns = [np.concatenate(column) for column in zip(*events, strict=True)]
    _, places = np.unique(columns[0][::-1], return_index=True)
    places = len(columns[0]) - 1 - places
    return tuple(column[places] for column in columns)


def _times_of(words: np.ndarray, known: np.ndarray, times: np.ndarray) -> np.ndarray:
    """When words [n] were met among the known ones, which rise; -1: they were not."""
    if not len(known):
        return np.full(len(words), -1)
    places = np.minimum(np.searchsorted(known, words), len(known) - 1)
    return np.where(known[places] == words, times[places], -1)
