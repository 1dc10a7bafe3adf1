"""`sok.Admission(after=n, bloom=...)` beside a filter of dicts, in memory and from files."""

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import read_manifest
from tests.reference.policies import BloomFilter

AFTER, BLOOM = 3, (65_536, 0.5)  # as small as it can be: 24 cells for each bucket


class Both:
    """A table and its twin, which holds the keys with rows alone."""

    def __init__(self, name, key_dtype="int64"):
        self.table = sok.EmbeddingVariable(
            2,
            100_000,
            name=name,
            key_dtype=key_dtype,
            seed=7,
            placement=sok.row_wise(hash=True),
            admission=sok.Admission(after=AFTER, bloom=BLOOM),
        )
        self.optimizer = sok.optimizers.SGD(0.1)
        self.filter, self.rows = BloomFilter(*BLOOM), set()

    def train(self, keys):
        with tf.GradientTape() as tape:
            both = [tf.nn.embedding_lookup(self.table, part) for part in (keys[:50], keys[50:])]
            loss = tf.reduce_sum(tf.concat(both, 0) ** 2)
        self.optimizer.apply_gradients([(tape.gradient(loss, self.table), self.table)])
        new = {int(key) for key in keys} - self.rows
        admitted = {key for key in new if self.filter.count(key) + 1 >= AFTER}
        self.rows |= admitted
        self.filter.end_step(new - admitted)

    def check(self):
        keys = self.table.export()[0].numpy()
        assert {int(key) for key in keys} == self.rows


def batches(steps, seed, key_dtype="int64"):
    rng = np.random.default_rng(seed)
    # All in a few hundred buckets of 4,096, so that cells are shared.
    pool = np.arange(-600, 600).astype(key_dtype)
    return [rng.choice(pool, 150) for _ in range(steps)]


@pytest.mark.parametrize("key_dtype", ["int64", "int32"])
def test_keys_get_rows_when_the_filter_says_so(key_dtype):
    both = Both("filtered", key_dtype)
    for keys in batches(12, 0, key_dtype):
        both.train(keys)
        both.check()
    stats = both.table.stats()
    assert stats["candidates"] == 0 < stats["rows"] == stats["made"] and stats["refused"] > 1000
    admitted = sorted(both.rows)[0]
    assert both.table.history([admitted])[0].numpy() >= 1  # from its admission on


def test_the_filter_goes_on_from_files(tmp_path):
    both = Both("saved")
    early, late = batches(4, 1), batches(6, 2)
    for keys in early[:2]:
        both.train(keys)
    sok.save(tmp_path, both.table)
    for keys in early[2:]:
        both.train(keys)
    sok.save(tmp_path, both.table, incremental=True)
    link = read_manifest(tmp_path).links[-1]
    assert link.names == ["saved", "saved/sok.filter"] and link.table("saved/sok.filter").dim == both.filter.cells // 4
    rows = set(both.rows)
    counts = dict(both.filter.counts)
    for keys in late:
        both.train(keys)
    grown = set(both.rows)
    sok.restore(tmp_path, both.table)
    both.rows, both.filter.counts = set(rows), counts
    both.check()
    for keys in late:
        both.train(keys)
        both.check()
    assert both.rows == grown > rows


def test_a_filter_that_was_not_saved_begins_empty(tmp_path):
    plain = sok.EmbeddingVariable(2, 1000, name="plain", seed=7, placement=sok.row_wise(hash=True))
    plain.assign([5], [[1.0, 2.0]])
    sok.save(tmp_path, plain)
    both = Both("begins")
    both.train(np.arange(150))
    sok.restore(tmp_path, {"plain": both.table})
    both.rows, both.filter.counts = {5}, {}
    for keys in batches(5, 3):
        both.train(keys)
        both.check()
