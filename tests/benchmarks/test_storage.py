"""That benchmarks/storage.py measures what it says."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf

import sok
from benchmarks import storage
from benchmarks.stores import disk, tables
from benchmarks.stores.base import Unavailable
from benchmarks.stores.mapped import Mapped
from benchmarks.stores.rocksdb import RocksDB
from benchmarks.stores.tables import Table

ROWS, DIM = 20_000, 3


def rocksdb(folder, memory_bytes=2**24, dim=DIM):
    try:
        return RocksDB(dim, folder / "rocksdb", memory_bytes, False)
    except Unavailable as reason:
        pytest.skip(str(reason))


def stores_of(kind, folder):
    """A store with the rows of `Table(DIM, ROWS)`."""
    if kind == "file":
        return tables._over(DIM, ROWS, 2**23, folder, "over")
    store = rocksdb(folder) if kind == "RocksDB" else Mapped(DIM, folder / "mapped", ROWS)
    like = Table(DIM, ROWS, "like")
    for first in range(0, ROWS, 15_000):
        store.fill(like.rows(first, min(15_000, ROWS - first)), first)
    return store


@pytest.mark.parametrize("kind", ["file", "RocksDB", "mmap"])
def test_all_stores_train_as_a_table_in_memory(kind, tmp_path):
    sok.Init(seed=1)
    memory, store = Table(DIM, ROWS, "memory"), stores_of(kind, tmp_path)
    for keys in storage.batches_of(ROWS, 900, 1.05, 3) + [tf.constant([], tf.int64)]:
        memory.train(keys)
        store.train(keys)
    keys = storage.batches_of(ROWS, 900, 1.05, 1)[0]
    found, expected = store.lookup(keys).numpy(), memory.lookup(keys).numpy()
    if kind == "file":
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    assert abs(expected - Table(DIM, ROWS, "fresh").lookup(keys).numpy()).min() > 1e-4
    assert store.describe() and set(store.counts()) == {"hits", "misses", "reads", "bytes_written"}


def test_rocksdb_reads_blocks_and_names_a_key_that_is_missing(tmp_path):
    store = rocksdb(tmp_path)
    rows = np.arange(DIM * 5000, dtype=np.float32).reshape(-1, DIM)
    store.fill(rows, 100)
    store.settle()
    before = store.counts()
    found = store.read(np.arange(200, 4000))
    np.testing.assert_array_equal(found[:, :DIM], rows[100:3900])
    assert store.counts()["misses"] > before["misses"] and store.counts()["bytes_written"] >= rows.nbytes
    with pytest.raises(RuntimeError, match="key 6000: NotFound"):
        store.read(np.array([200, 6000]))
    store.close()


def test_keys_follow_their_law_and_lie_apart():
    (skewed,) = storage.batches_of(10_000, 50_000, 1.05, 1)
    (uniform,) = storage.batches_of(10_000, 50_000, 0.0, 1)
    counts = np.sort(np.bincount(skewed.numpy(), minlength=10_000))[::-1]
    assert counts[:3].min() > 1000 and counts[5000] < 10
    assert np.bincount(uniform.numpy()).max() < 30
    often = np.argsort(np.bincount(skewed.numpy(), minlength=10_000))[-10:]
    assert np.diff(np.sort(often)).max() > 300


def test_memory_is_found_for_a_share_of_the_rows():
    class Fake:
        def __init__(self, memory_bytes, attempt):
            self.table, self.room = self, (memory_bytes - 5_000_000) // 200

        def stats(self):
            return {"cache_rows": self.room}

    made, memory_bytes = tables.with_cache(Fake, 100_000, 16, 0.2)
    assert abs(made.room - 20_000) <= 1_000 and memory_bytes == pytest.approx(5_000_000 + 200 * made.room, abs=200)


def test_both_readers_of_a_disk_read(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.shutil, "which", lambda name: None)
    reads, who = disk.random_reads(tmp_path, 2**21, depth=2, seconds=0.2)
    assert reads > 100 and who.startswith("2 threads") and not list(tmp_path.iterdir())
    assert disk.file_system(tmp_path) and disk.file_system(tmp_path / "later") == disk.file_system(tmp_path)


def test_it_prints_a_line_of_each_case_and_draws(tmp_path, capsys):
    sizes = ["--rows", "30000", "--dims", "2", "--shares", "20", "--laws", "uniform", "--keys", "500"]
    storage.main(
        [
            *sizes,
            "--windows",
            "2",
            "--steps",
            "1",
            "--warm",
            "1",
            "--path",
            str(tmp_path),
            "--out",
            str(tmp_path / "out"),
        ]
    )
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith(("| lookup", "| train"))]
    assert len(lines) == 4 and lines[0] == lines[2]
    assert len(lines[0].split("|")) == len(storage.HEADER.split("|"))
    assert re.search(r"the disk by itself: [\d,]+ random reads", printed)
    points = json.loads((tmp_path / "out" / "storage.json").read_text())["points"]
    assert [point["what"] for point in points] == ["lookup", "train"] and 0.1 < points[0]["share"] < 0.4
    assert 0 < points[0]["hit_rate"] < 1 and points[0]["reads_per_key"]["file"] == pytest.approx(
        1 - points[0]["hit_rate"], abs=0.02
    )
    assert (tmp_path / "out" / "storage.png").stat().st_size > 10_000
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_reading_ahead_is_measured_beside_the_synchronous_step(tmp_path, capsys):
    sizes = ["--rows", "30000", "--dims", "2", "--shares", "20", "--keys", "500", "--windows", "2", "--steps", "3"]
    storage.main([*sizes, "--ahead", "1", "--warm", "3", "--dense", "0.5", "--wait", "1", "--path", str(tmp_path)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 2 | 500 |")]
    assert len(lines) == 4 and lines[:2] == lines[2:]
    for line in lines:
        cells = [cell.strip() for cell in line.split("|")]
        assert len(cells) == len(storage.storage_ahead.HEADER.split("|"))
        synchronous, ahead = map(float, cells[11].split(", "))
        assert synchronous > 20 > ahead and float(cells[12]) > 20
    assert not list(tmp_path.iterdir())
