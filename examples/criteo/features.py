"""What a model sees of a click log: rare values folded, counts in buckets too, all as keys of one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from criteo.data import Batch, ClickLog
from criteo.fields import mix64

# The keys of all formats are below these.
_RARE = 1 << 62
_BUCKET = 1 << 61
_COUNTER_BITS = 24
MISSING = -1.0


def bucket_keys(dense: np.ndarray) -> np.ndarray:  # [n, d] log(1 + x), -1 where missing -> [n, d] int64
    """Return a key for each count: of its column and its bucket, two buckets for each doubling of 1 + x."""
    # The addend keeps 1 + x = 2^k, where a bucket begins, in it whatever the last bit of the float32 logarithm is.
    buckets = 1 + np.floor(np.maximum(dense, 0).astype(np.float64) * (2 / np.log(2)) + 5e-6).astype(np.int64)
    return _BUCKET | (np.arange(dense.shape[1]) << 16) | np.where(dense < 0, 0, buckets)


class Features:
    """The batches of a click log as a model takes them.

    A value that has come less than `min_count` times in the training part is *rare*: all rare values of a column
    share one key, and so do values that never came. Where the format has counts, each is also a category: its bucket.

    Times are counted per hash of a key, in 2^24 counters: memory does not grow with the log, and a rare value that
    shares its counter may pass for a frequent one; never the other way round.

    Args:
      log: the log.
      min_count: times that a value of its own has to come; 1 folds only what never came.
      rank, world_size: which part of each batch is this worker's.
    """

    def __init__(self, log: ClickLog, min_count: int, rank: int = 0, world_size: int = 1):
        self.log, self.num_dense = log, log.format.num_dense
        self.num_sparse = log.format.num_sparse + (self.num_dense if log.format.has_counts else 0)
        self._min_count, self._rank, self._world_size = min_count, rank, world_size
        self._is_frequent: np.ndarray | None = None

    def count(
        self,
        add_up: Callable[[np.ndarray], np.ndarray] = lambda counts: counts,
        progress: Callable[[int, int], None] = lambda rows, of: None,
    ) -> None:
        """Read the training part once, and learn which values are frequent.

        Args:
          add_up: gives the sum of an int32 array over all workers, each of which has counted its own part.
          progress: called with (rows read, rows of the training part).
        """
        counts, rows = np.zeros(1 << _COUNTER_BITS, np.int32), 0
        moments = np.zeros([3, self.num_dense])  # how many values that are not missing, their sum, their squares' sum
        clicks = np.zeros(2)  # rows without, and with
        for batch in self.log.batches("train", 32768, self._rank, self._world_size):
            np.add.at(counts, _counters(self._keys(batch)).ravel(), 1)
            known = np.where(batch.dense == MISSING, np.nan, batch.dense.astype(np.float64))
            moments += [np.isfinite(known).sum(axis=0), np.nansum(known, axis=0), np.nansum(known**2, axis=0)]
            clicks += np.bincount(batch.labels.astype(np.int64), minlength=2)
            rows += batch.global_rows
            progress(rows, self.log.train_rows)
        self._is_frequent = add_up(counts) >= self._min_count
        without, clicked = add_up(clicks) + 0.5  # so that there are odds even where all rows are alike
        self.log_odds = float(np.log(clicked / without))
        number, total, squares = add_up(moments)
        self._mean = total / np.maximum(number, 1)
        self._scale = np.sqrt(np.maximum(squares / np.maximum(number, 1) - self._mean**2, 1e-6))

    def batches(self, part: str, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield what `ClickLog.batches` yields, with the keys [b, num_sparse] of folded values and of buckets."""
        for batch in self.log.batches(part, batch_size, self._rank, self._world_size, limit):
            keys = self._fold(self._keys(batch))
            dense = np.where(batch.dense == MISSING, 0.0, (batch.dense - self._mean) / self._scale).astype(np.float32)
            yield dataclasses.replace(batch, dense=dense, keys=keys)

    def _keys(self, batch: Batch) -> np.ndarray:
        if not self.log.format.has_counts:
            return batch.keys
        return np.concatenate([batch.keys, bucket_keys(batch.dense)], axis=1)

    def _fold(self, keys: np.ndarray) -> np.ndarray:
        if self._is_frequent is None:
            raise ValueError("`count` must be called before `batches`: it learns which values are rare.")
        return np.where(self._is_frequent[_counters(keys)], keys, _RARE | np.arange(keys.shape[1]))


def _counters(keys: np.ndarray) -> np.ndarray:
    return (mix64(keys.astype(np.uint64)) >> np.uint64(64 - _COUNTER_BITS)).astype(np.int64)
