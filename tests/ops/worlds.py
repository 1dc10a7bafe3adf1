"""R ranks that live in one process and look up together; NumPy moves the messages."""

import numpy as np
import pytest
import tensorflow as tf

from sok.base import _ops
from tests.messages import saying
from tests.ops.tables import NativeTable
from tests.reference.exchange import MAGIC, all_to_all

NOT_GROUPED = np.zeros(0, np.int64)
NO_WEIGHTS, ONE = np.zeros(0, np.float32), np.ones(1, np.float32)
HEADER_WORDS = 7
FINE = [MAGIC, 0, 0, 1, 0, 0, 0]  # the header of a first call
FIRST = np.int32(-(2**31))


def word_type(*key_dtypes):
    return tf.int64 if any(dtype.size == 8 for dtype in key_dtypes) else tf.int32


class World:
    """R shards of each of some tables, and the lookup of sok.lookup.exchange without its collectives.

    A feature is (table, keys, row_splits or None for rows, weights or None, combiner).
    """

    def __init__(self, world_size, key_dtypes=(tf.int64,), dims=(3,), capacity=1 << 20, hashed=True, ways=None):
        self.size, self.dims, self.key_dtypes = world_size, list(dims), key_dtypes
        self.ways = list(ways or ["auto"] * len(dims))
        self.shards = [
            [
                NativeTable(dim=d, capacity=capacity, key_dtype=k, hashed=hashed, world_size=world_size, rank=r, seed=t)
                for t, (d, k) in enumerate(zip(dims, key_dtypes, strict=True))
            ]
            for r in range(world_size)
        ]

    def handles(self, rank):
        return [shard.handle for shard in self.shards[rank]]

    def attributes(self, tables, limits=None):
        limits = {"slot_num": 1, "max_nnz": 0, "max_feature_num": 0} | (limits or {})
        return {"table_of": list(tables)} | {name: [value] * len(tables) for name, value in limits.items()}

    def route(self, rank, features, insert=True, call=0, program=0, rows_alone=False, **limits):
        """By `ExchangeRouteRows`, of keys where ops are placed, if `rows_alone`."""
        op = _ops.lib().sok_exchange_route_rows if rows_alone else _ops.lib().sok_exchange_route
        return op(
            self.handles(rank),
            call,
            insert,
            [tf.identity(self.shards[rank][f[0]].keys(f[1])) for f in features],
            [NOT_GROUPED if f[2] is None else np.asarray(f[2], np.int64) for f in features],
            [NO_WEIGHTS if f[3] is None else np.asarray(f[3], np.float32) for f in features],
            Tword=word_type(*self.key_dtypes),
            combiners=[f[4] for f in features],
            **({} if rows_alone else {"ways": self.ways}),
            program=program,
            **self.attributes([f[0] for f in features], limits),
        )

    def serve(self, rank, words, splits, tables=(0,), insert=True, call=0, program=0, **limits):
        return _ops.lib().sok_exchange_serve(
            self.handles(rank),
            words,
            splits,
            call,
            insert,
            program=program,
            dims=self.dims,
            **self.attributes(tables, limits),
        )

    def combine(self, home, splits, routed, features):
        return _ops.lib().sok_exchange_combine(
            *_ops.lib().sok_exchange_check(home, splits, routed.asked),
            routed.index,
            routed.splits_home,
            [NO_WEIGHTS if f[3] is None else np.asarray(f[3], np.float32) for f in features],
            routed.scales,
            combiners=[f[4] for f in features],
            dims=[self.dims[f[0]] for f in features],
        )

    def serve_all(self, routed, tables=(0,), insert=True, **limits):
        received = all_to_all([t.words.numpy() for t in routed], [t.splits.numpy() for t in routed])
        return [self.serve(r, *m, tables, insert, **limits) for r, m in enumerate(zip(*received, strict=True))]

    def lookup(self, features_of_rank, insert=True, **limits):
        """For each rank the outputs of its features."""
        routed = [self.route(r, features, insert, **limits) for r, features in enumerate(features_of_rank)]
        served = self.serve_all(routed, [f[0] for f in features_of_rank[0]], insert, **limits)
        home = all_to_all([t.answers.numpy() for t in served], [t.answer_splits.numpy() for t in served])
        return [
            [output.numpy() for output in self.combine(*answers, routed[r], features_of_rank[r])]
            for r, answers in enumerate(zip(*home, strict=True))
        ]

    def rows(self, keys_of_rank, insert=True):
        return [outputs[0] for outputs in self.lookup([[rows(keys)] for keys in keys_of_rank], insert)]

    def raises_everywhere(self, routed, error, texts, tables=(0,), **limits):
        received = all_to_all([t.words.numpy() for t in routed], [t.splits.numpy() for t in routed])
        for rank, words in enumerate(zip(*received, strict=True)):
            with pytest.raises(error, match=saying(*texts, f"rank {rank} of {self.size}")):
                self.serve(rank, *words, tables, **limits)
        assert all(shard.size() == 0 for shards in self.shards for shard in shards)


def rows(keys, table=0):
    return (table, keys, None, None, "rows")


def i32(*x):
    return np.array(x, np.int32)
