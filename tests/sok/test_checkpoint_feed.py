"""Deltas as a feed for programs that serve."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import CheckpointError, manifest, native, read_manifest, restoring
from tests.messages import saying
from tests.sok.checkpoint_cases import DIM, RULES, contents, new_table, train
from tests.sok.threads_world import checked, run_world


def step(folder, table, value):
    table.assign([value, value + 1], np.full([2, DIM], value))
    table.erase([value - 1])
    sok.save(folder, table, incremental=True)
    return read_manifest(folder).generation


def rows(table):
    keys, values = (t.numpy() for t in table.export())
    return dict(zip(keys.tolist(), values.tolist(), strict=True))


def test_pieces_say_what_each_save_has_changed(tmp_path):
    table, other = new_table(), new_table()
    generations = [step(tmp_path, table, value) for value in (1, 5, 6)]
    pieces = list(sok.deltas(tmp_path, after=generations[0]))
    assert [(p.generation, sorted(p.keys.tolist()), p.erased.tolist()) for p in pieces] == [
        (generations[1], [5, 6], []),
        (generations[2], [], [5]),
        (generations[2], [6, 7], []),
    ]
    for piece in sok.deltas(tmp_path):
        piece.apply({table.table_name: other})
    assert rows(other) == rows(table)
    assert list(sok.deltas(tmp_path, after=generations[2])) == []


def test_a_save_without_changes_is_one_empty_piece(tmp_path):
    table = new_table(key_dtype=tf.int32)
    step(tmp_path, table, 1)
    known = read_manifest(tmp_path).generation
    sok.save(tmp_path, table, incremental=True)
    (piece,) = sok.deltas(tmp_path, after=known)
    assert piece.generation == read_manifest(tmp_path).generation
    assert (len(piece.keys), piece.rows.shape, len(piece.erased)) == (0, (0, DIM), 0)
    assert piece.keys.dtype == np.int32


@pytest.mark.parametrize("dtype", [tf.int64, tf.int32, tf.uint32, tf.uint64])
def test_keys_of_all_dtypes_come_through(tmp_path, dtype):
    table, other = new_table(key_dtype=dtype), new_table(key_dtype=dtype)
    keys = np.array([dtype.min, dtype.max, 5], dtype.as_numpy_dtype)
    table.assign(keys, np.arange(9.0).reshape(3, 3))
    sok.save(tmp_path, table)
    for piece in sok.deltas(tmp_path):
        assert piece.keys.dtype == dtype.as_numpy_dtype
        piece.apply({table.table_name: other})
    assert contents(other) == contents(table)


def test_pieces_are_small_however_large_a_save(tmp_path):
    table = sok.EmbeddingVariable(256, 20_000, name="large")
    table.assign(np.arange(10_000), np.ones([10_000, 256]))
    table.assign([17], np.full([1, 256], 2.0))
    sok.save(tmp_path, table)
    pieces = list(sok.deltas(tmp_path))
    assert len(pieces) >= 3 and max(piece.rows.nbytes for piece in pieces) <= 4 << 20
    assert sum(len(piece.keys) for piece in pieces) == 10_000
    assert sum(float(piece.rows.sum()) for piece in pieces) == 256 * 10_001


def test_a_generation_that_is_not_in_the_chain_is_told(tmp_path):
    table = new_table()
    known = step(tmp_path, table, 1)
    sok.save(tmp_path, table)
    with pytest.raises(ValueError, match=f"{known} .*chain .*g000002-"):
        next(sok.deltas(tmp_path, after=known))
    with pytest.raises(FileNotFoundError, match="no checkpoint here"):
        next(sok.deltas(tmp_path / "none"))


def test_a_damaged_file_gives_no_piece(tmp_path):
    table = new_table()
    step(tmp_path, table, 1)
    path = tmp_path / read_manifest(tmp_path).files[0].name
    data = bytearray(path.read_bytes())
    data[-60] ^= 1
    path.write_bytes(data)
    with pytest.raises(tf.errors.DataLossError, match=f"{path.name}: at offset"):
        next(sok.deltas(tmp_path))


def test_compacting_loses_no_follower(tmp_path):
    table, other = new_table(), new_table()
    follower = sok.follow(tmp_path, {table.table_name: other})
    for value in (1, 5):
        known = step(tmp_path, table, value)
    assert follower.poll() and follower.generation == known
    sok.compact(tmp_path)
    assert not follower.poll() and list(sok.deltas(tmp_path, after=known)) == []
    newest = step(tmp_path, table, 7)
    assert [p.generation for p in sok.deltas(tmp_path, after=known)] == [newest] * 2
    assert follower.poll() and rows(other) == rows(table)


@pytest.mark.parametrize("slots", [False, True])
def test_a_table_follows_one_that_is_trained(tmp_path, slots):
    table, other, optimizer = new_table(), new_table(), RULES["Adam"]()
    follower = sok.follow(tmp_path, {table.table_name: other}, slots=slots)
    assert not follower.poll() and follower.generation is None
    table.assign(np.arange(50), np.ones([50, DIM]))
    for number in range(4):
        train(table, optimizer, range(3 * number, 3 * number + 3))
        table.erase([number])
        sok.save(tmp_path, table, optimizer, incremental=number != 2)  # a full one in between
        assert follower.poll() and not follower.poll()
        mine, its = rows(other), rows(table)
        assert mine.keys() == its.keys()
        # Without slots, rows that no step has touched stay as they were.
        for key in mine if slots or number in (0, 2) else ():
            np.testing.assert_allclose(mine[key], its[key], rtol=1e-5, atol=1e-7)
        for piece in sok.deltas(tmp_path):
            last = piece
        for key, row in zip(last.keys.tolist(), last.rows.tolist(), strict=True):
            np.testing.assert_allclose(mine[key], row, rtol=1e-5, atol=1e-7)
    assert len(contents(other)[10]) == (2 if slots else 1)


def test_a_poll_that_finds_nothing_new_reads_nothing(tmp_path, monkeypatch):
    table, other = new_table(), new_table()
    follower = sok.follow(tmp_path, {table.table_name: other})
    for value in (1, 5):
        step(tmp_path, table, value)
        assert follower.poll() and not follower.poll()
        with monkeypatch.context() as patch:
            for name in ("read_bytes", "from_bytes", "to_bytes"):
                patch.setattr(manifest, name, mock.Mock(side_effect=AssertionError(name)))
            assert not any(follower.poll() for _ in range(5))


def test_what_another_checkpoint_replaces_while_it_is_read_is_read_from_that(tmp_path, monkeypatch):
    table, other = new_table(), new_table()
    follower = sok.follow(tmp_path, {table.table_name: other})
    load, replaced = native.EagerCalls.load, []

    def replacing(self, *args):
        if len(replaced) < 2:  # twice in a row
            replaced.append(table.assign([77], np.full([1, DIM], len(replaced))))
            sok.save(tmp_path, table)
        return load(self, *args)

    monkeypatch.setattr(native.EagerCalls, "load", replacing)
    step(tmp_path, table, 1)
    sok.restore(tmp_path, {table.table_name: other})
    assert len(replaced) == 2 and rows(other) == rows(table)
    replaced.clear()
    assert follower.poll() and len(replaced) == 2 and rows(other) == rows(table)
    step(tmp_path, table, 5)
    replaced.clear()
    assert follower.poll() and len(replaced) == 2 and rows(other) == rows(table)
    monkeypatch.setattr(restoring, "TRIES", 2)
    replaced.clear()
    with pytest.raises(tf.errors.NotFoundError, match="shard"):
        sok.restore(tmp_path, {table.table_name: other})


def test_damage_is_noticed_before_a_row_changes_and_the_follower_stays_where_it_was(tmp_path):
    table, other = new_table(), new_table()
    follower = sok.follow(tmp_path, {table.table_name: other})
    step(tmp_path, table, 1)
    follower.poll()
    before, generation = contents(other), follower.generation
    step(tmp_path, table, 5)
    path = tmp_path / read_manifest(tmp_path).files[0].name
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(tf.errors.DataLossError, match=f"{path.name}: at offset"):
        follower.poll()
    assert contents(other) == before and follower.generation == generation
    path.write_bytes(data)
    assert follower.poll() and rows(other) == rows(table)


def test_a_delta_of_another_save_is_noticed(tmp_path):
    table, other = new_table(), new_table()
    follower = sok.follow(tmp_path, {table.table_name: other})
    step(tmp_path, table, 1)
    follower.poll()
    step(tmp_path, table, 5)
    old, new = (link.files[0].name for link in read_manifest(tmp_path).links)
    (tmp_path / new).write_bytes((tmp_path / old).read_bytes())
    with pytest.raises(CheckpointError, match=saying("not the file", "manifest", "generation")):
        follower.poll()


def test_several_workers_follow_together(tmp_path, monkeypatch):
    def program(transport):
        trained, served = (sok.EmbeddingVariable(DIM, 200, name=n, seed=5) for n in ("trained", "served"))
        follower = sok.follow(tmp_path, {"trained": served})
        assert not follower.poll()
        for value in (1, 5):
            for key in (value, value + 1):
                if key % 2 == transport.rank:
                    trained.assign([key], np.full([1, DIM], value))
            trained.erase([value - 4])
            sok.save(tmp_path, trained, incremental=True)
            assert follower.poll() and not follower.poll()
            assert rows(served) == rows(trained)
        return sorted(rows(served))

    assert checked(run_world(2, program, monkeypatch)) == [[2, 6], [5]]


def test_tables_of_a_v1_graph_are_told(tmp_path):
    with tf.Graph().as_default(), tf.compat.v1.Session():
        table = sok.EmbeddingVariable(DIM, 10, name="v1")
        with pytest.raises(ValueError, match="sok.follow is for eager tables"):
            sok.follow(tmp_path, table)


def test_manifests_of_rank_0_are_what_all_follow(tmp_path):
    step(tmp_path, new_table(), 1)
    whole = read_manifest(tmp_path)
    assert manifest.from_bytes(manifest.to_bytes(whole), "sent") == whole
