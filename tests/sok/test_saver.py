"""`sok.Saver` of SOK v1: the bytes that it writes, and what it reads back on how many workers."""

import gc
import os
import struct
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import sok
from sok.compat.formats import columns
from tests.sok.threads_world import checked, run_world

KEYS = np.array([5, -3, 2**40], np.int64)
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


def table(name, dim=2, capacity=20, **options):
    return sok.EmbeddingVariable(dim=dim, capacity=capacity, name=name, **options)


def put(directory, name, keys, rows):
    directory.mkdir(exist_ok=True)
    (directory / f"{name}_keys.file").write_bytes(np.asarray(keys).tobytes())
    (directory / f"{name}_values.file").write_bytes(np.asarray(rows, np.float32).tobytes())


def content(variable):
    keys, rows = (tensor.numpy() for tensor in variable.export())
    return dict(zip(keys.tolist(), rows.tolist(), strict=True))


def test_a_dump_is_two_files_of_these_bytes(tmp_path):
    variable = table("golden_v1")
    variable.assign(KEYS, ROWS)
    status = sok.Saver().dump_to_file(variable, tmp_path / "made")
    assert status.numpy() == b"OK"
    assert sorted(os.listdir(tmp_path / "made")) == ["golden_v1_keys.file", "golden_v1_values.file"]
    assert (tmp_path / "made" / "golden_v1_keys.file").read_bytes() == struct.pack("<3q", 5, -3, 2**40)
    assert (tmp_path / "made" / "golden_v1_values.file").read_bytes() == struct.pack("<6f", *range(6))


def test_without_hashing_all_rows_of_the_capacity_are_dumped(tmp_path):
    def program(transport):
        variable = table("whole", capacity=3, hashed=False, key_dtype="uint32", initializer="ones")
        variable.assign(np.array([4, 1], np.uint32), [[4.0, 4.5], [1.0, 1.5]])
        sok.Saver().dump_to_file(variable, str(tmp_path))

    with pytest.MonkeyPatch.context() as patch:
        checked(run_world(2, program, patch))
    # key = row * workers + worker, worker 0's first.
    assert (tmp_path / "whole_keys.file").read_bytes() == struct.pack("<6I", 0, 2, 4, 1, 3, 5)
    rows = np.ones([6, 2], np.float32)
    rows[2], rows[3] = [4.0, 4.5], [1.0, 1.5]
    assert (tmp_path / "whole_values.file").read_bytes() == rows.tobytes()


@pytest.mark.parametrize("key_dtype", ["int64", "int32", "uint32", "uint64"])
@pytest.mark.parametrize("file_dtype", ["int64", "uint32"])
def test_keys_of_one_dtype_are_restored_into_tables_of_another(tmp_path, key_dtype, file_dtype):
    put(tmp_path, "cast", np.array([1, 2**31 - 1, 3], file_dtype), ROWS)
    variable = table(f"cast_{key_dtype}_{file_dtype}", key_dtype=key_dtype)
    variable._table_name = "cast"
    assert sok.Saver().restore_from_file(variable, tmp_path).numpy() == b"OK"
    assert content(variable) == {1: [0, 1], 2**31 - 1: [2, 3], 3: [4, 5]}


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_what_some_workers_dump_others_restore(data, tmp_path_factory):
    hashed = data.draw(st.booleans(), "hashed")
    dumping, restoring = data.draw(st.integers(1, 4), "dumping"), data.draw(st.integers(1, 4), "restoring")
    key = st.integers(-(2**63), 2**63 - 1) if hashed else st.integers(0, 23)
    keys = np.array(sorted(data.draw(st.sets(key, min_size=1, max_size=20), "keys")), np.int64)
    rows = np.random.default_rng(1).normal(size=[len(keys), 3]).astype(np.float32)
    directory = str(tmp_path_factory.mktemp("moved"))

    def make(transport):
        # 24 keys in all, over however many workers.
        capacity = 30 if hashed else 24 // transport.size
        return table("moved", dim=3, capacity=capacity, hashed=hashed, initializer="zeros")

    def dump(transport):
        variable = make(transport)
        variable.assign(keys, rows)
        sok.Saver().dump_to_file(variable, directory)

    def restore(transport):
        variable = make(transport)
        assert sok.Saver().restore_from_file(variable, directory).numpy() == b"OK"
        return content(variable)

    with pytest.MonkeyPatch.context() as patch:
        piece = data.draw(st.sampled_from([1, 50, 2**20]), "piece")
        patch.setattr(columns, "PIECE_BYTES", piece)
        patch.setattr(columns, "READ_BYTES", piece)
        checked(run_world(dumping, dump, patch))
        parts = checked(run_world(restoring, restore, patch))
    expected = {} if hashed else {key: [0.0] * 3 for key in range(24)}
    expected.update(zip(keys.tolist(), rows.tolist(), strict=True))
    assert {key: row for part in parts for key, row in part.items()} == expected
    for rank, part in enumerate(parts):
        assert all(key % restoring == rank for key in part)


def test_rows_that_are_not_in_the_files_stay(tmp_path):
    put(tmp_path, "stays_v1", [1, 2], [[1, 1], [2, 2]])
    variable = table("stays_v1")
    variable.assign([2, 3], [[9, 9], [3, 3]])
    sok.Saver().restore_from_file(variable, tmp_path)
    assert content(variable) == {1: [1, 1], 2: [2, 2], 3: [3, 3]}


def test_a_table_on_one_worker_is_dumped_by_it(tmp_path):
    def program(transport):
        variable = table("placed", owner=1)
        variable.assign(KEYS, ROWS)
        saver = sok.Saver()
        saver.dump_to_file(variable, tmp_path)
        variable.erase(KEYS)
        saver.restore_from_file(variable, tmp_path)
        return content(variable)

    with pytest.MonkeyPatch.context() as patch:
        assert checked(run_world(2, program, patch)) == [{}, dict(zip(KEYS.tolist(), ROWS.tolist(), strict=True))]
    assert (tmp_path / "placed_keys.file").read_bytes() == KEYS.tobytes()


@pytest.mark.parametrize("form", [list, tuple, lambda parts: np.concatenate(parts)])
def test_values_are_loaded_under_their_numbers(form):
    variable = table(f"values_{form.__name__}".replace("<lambda>", "array"), initializer="zeros")
    variable.assign([1, 50], [[9, 9], [9, 9]])
    assert sok.Saver().load_embedding_values(variable, form([ROWS[:2], ROWS[2:]])).numpy() == b"OK"
    assert content(variable) == {0: [0, 1], 1: [2, 3], 2: [4, 5], 50: [9, 9]}


def test_every_worker_loads_its_values():
    def program(transport):
        variable = table("shared_values", capacity=2, hashed=False)
        sok.Saver().load_embedding_values(variable, [ROWS, ROWS[:1]])
        return content(variable)

    with pytest.MonkeyPatch.context() as patch:
        assert checked(run_world(2, program, patch)) == [{0: [0, 1], 2: [4, 5]}, {1: [2, 3], 3: [0, 1]}]


@pytest.mark.parametrize("tensors", [[], np.zeros([0, 2]), [np.zeros([2, 3])], np.zeros([2])])
def test_values_that_are_no_rows_of_the_table_are_refused(tensors):
    variable = table("refuses")
    with pytest.raises(ValueError, match="`tensors` must have rows|each tensor must be"):
        sok.Saver().load_embedding_values(variable, tensors)


def test_more_values_than_there_is_room_for_are_refused():
    with pytest.raises(ValueError, match="row 4: holds key 4. Table 'small.*below 4"):
        sok.Saver().load_embedding_values(table("small", capacity=4, hashed=False), np.zeros([5, 2]))
    with pytest.raises(tf.errors.ResourceExhaustedError, match="0 of at most 4 rows, and 5 new"):
        sok.Saver().load_embedding_values(table("small_hashed", capacity=4), np.zeros([5, 2]))


def test_what_is_no_table_is_refused(tmp_path):
    for method, argument in (
        ("dump_to_file", tmp_path),
        ("restore_from_file", tmp_path),
        ("load_embedding_values", []),
    ):
        with pytest.raises(TypeError, match="must be an embedding variable"):
            getattr(sok.Saver(), method)(tf.Variable([1.0]), argument)


BAD_FILES = {
    "missing": (lambda d: (d / "bad_values.file").unlink(), FileNotFoundError, "bad_values.file: there is no such"),
    "empty": (lambda d: (d / "bad_keys.file").write_bytes(b""), ValueError, "bad_keys.file: is empty"),
    "cut": (lambda d: os.truncate(d / "bad_keys.file", 20), ValueError, "bad_keys.file: 20 bytes"),
    "twice": (lambda d: put(d, "bad", [1, 7, 1], ROWS), ValueError, "byte 0 and .*byte 16: hold key 1 more than once"),
    "range": (lambda d: put(d, "bad", [1, 2, 40], ROWS), ValueError, "bad_keys.file, byte 16: holds key 40.*below 40"),
    "full": (
        lambda d: put(d, "bad", np.arange(30), np.zeros([30, 2])),
        tf.errors.ResourceExhaustedError,
        r"rank 0 of 2\) .*1 of at most 10 rows, and 14 new",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_on_all_workers_and_nothing_is_stored(tmp_path, case):
    spoil, error, message = BAD_FILES[case]
    put(tmp_path, "bad", [1, 2, 3], ROWS)
    spoil(tmp_path)
    hashed = case != "range"

    def program(transport):
        variable = table("bad", capacity=10 if hashed else 20, hashed=hashed)
        variable.assign([0, 1], [[8, 8], [9, 9]])
        before = content(variable)
        with pytest.raises(error, match=message):
            sok.Saver().restore_from_file(variable, tmp_path)
        return content(variable) == before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "PIECE_BYTES", 32)
        patch.setattr(columns, "READ_BYTES", 32)
        assert checked(run_world(2, program, patch)) == [True, True]


def test_identity_tables_of_more_workers_name_the_room_that_they_need(tmp_path):
    def make(**options):
        return table("identity", **{"capacity": 10, "hashed": False, "initializer": "zeros"} | options)

    def fail(transport):
        with pytest.raises(ValueError, match=r"holds key 21. .* on 2 workers .* a capacity .* of at least 15"):
            sok.Saver().restore_from_file(make(), tmp_path)

    with pytest.MonkeyPatch.context() as patch:
        checked(run_world(3, lambda transport: sok.Saver().dump_to_file(make(), tmp_path), patch))
        checked(run_world(2, fail, patch))
        checked(run_world(2, lambda transport: sok.Saver().restore_from_file(make(capacity=15), tmp_path), patch))


def test_an_error_of_one_worker_is_raised_on_all(tmp_path):
    put(tmp_path, "one", [1, 3, 5], ROWS)

    def program(transport):
        variable = table("one", capacity=2)  # worker 1 has room for two of the three keys, worker 0 gets none
        with pytest.raises(tf.errors.ResourceExhaustedError, match=r"^rank 1 of 2: table .*rank 1 of 2\) has"):
            sok.Saver().restore_from_file(variable, tmp_path)
        return content(variable)

    with pytest.MonkeyPatch.context() as patch:
        assert checked(run_world(2, program, patch)) == [{}, {}]


def test_a_dump_that_cannot_be_written_is_an_error_on_all_workers(tmp_path):
    (tmp_path / "taken").write_bytes(b"")

    def program(transport):
        variable = table("taken")
        variable.assign(KEYS, ROWS)
        with pytest.raises(OSError, match="taken/taken_keys.file.*cannot be written"):
            sok.Saver().dump_to_file(variable, tmp_path / "taken")

    with pytest.MonkeyPatch.context() as patch:
        checked(run_world(2, program, patch))


def test_a_disk_that_fills_up_on_the_way_is_an_error_on_all_workers(tmp_path, monkeypatch):
    put(tmp_path, "filling", KEYS, ROWS)
    before = (tmp_path / "filling_values.file").read_bytes()
    calls = []

    def write(self, *arrays):
        calls.append(arrays)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sok.compat.formats.dump.TableWriter.write", write)
    monkeypatch.setattr(columns, "PIECE_BYTES", 8)
    monkeypatch.setattr(columns, "READ_BYTES", 8)

    def program(transport):
        variable = table("filling")
        variable.assign(np.arange(10), np.ones([10, 2]))
        with pytest.raises(OSError, match="No space left"):
            sok.Saver().dump_to_file(variable, tmp_path)

    with pytest.MonkeyPatch.context() as patch:
        checked(run_world(2, program, patch))
    assert len(calls) == 3, "after the error nothing more is written"
    assert sorted(os.listdir(tmp_path)) == ["filling_keys.file", "filling_values.file"]
    assert (tmp_path / "filling_values.file").read_bytes() == before


def test_a_file_that_breaks_while_it_is_read_is_an_error_that_says_so(tmp_path, monkeypatch):
    put(tmp_path, "breaks", KEYS, ROWS)
    variable = table("breaks")
    monkeypatch.setattr("sok.compat.formats.load.own_keys", lambda stored, to: _cut(tmp_path / "breaks_values.file"))
    with pytest.raises(ValueError, match="was longer .*Some rows were stored.*load again"):
        sok.Saver().restore_from_file(variable, tmp_path)


def test_what_stops_one_worker_from_storing_stops_all(tmp_path, monkeypatch):
    put(tmp_path, "stops", np.arange(4), np.zeros([4, 2]))
    real = sok.compat.formats.load._store

    def store(load):
        if load.to.rank == 1:
            raise MemoryError("no more")
        return real(load)

    monkeypatch.setattr("sok.compat.formats.load._store", store)

    def program(transport):
        with pytest.raises(RuntimeError, match=r"rank 1 of 2: no more .*rows were stored"):
            sok.Saver().restore_from_file(table("stops"), tmp_path)

    with pytest.MonkeyPatch.context() as patch:
        checked(run_world(2, program, patch))


def _cut(path):
    os.truncate(path, 4)
    return np.zeros(0, np.int64)


def test_in_a_session_the_methods_give_what_to_run(tmp_path):
    saver = sok.Saver()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = table("in_session", initializer="zeros")
        matrix = tf.compat.v1.placeholder(tf.float32, [None, 2])
        load, dump = saver.load_embedding_values(variable, [matrix, ROWS[:1]]), saver.dump_to_file(variable, tmp_path)
        restore, export, erase = saver.restore_from_file(variable, tmp_path), variable.export(), variable.erase([0, 1])
        with pytest.raises(tf.errors.InvalidArgumentError, match="in_session_keys.file: there is no such file"):
            session.run(restore)
        assert session.run(load, {matrix: ROWS[1:]}) == b"OK"
        assert session.run(dump) == b"OK"
        rows = np.concatenate([ROWS[1:], ROWS[:1]])
        assert (tmp_path / "in_session_keys.file").read_bytes() == struct.pack("<3q", 0, 1, 2)
        assert (tmp_path / "in_session_values.file").read_bytes() == rows.tobytes()
        session.run(erase)
        assert session.run(restore) == b"OK"
        keys, values = session.run(export)
        np.testing.assert_array_equal(values[np.argsort(keys)], rows)
        with pytest.raises(tf.errors.InvalidArgumentError, match="holds rows of 3 numbers"):
            session.run(saver.load_embedding_values(variable, tf.compat.v1.placeholder_with_default(ROWS.T, None)))


def test_a_dump_that_fails_in_a_session_leaves_nothing(tmp_path, monkeypatch):
    def program():
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variable = table("broken_off", initializer="zeros")
            load, dump = sok.Saver().load_embedding_values(variable, ROWS), sok.Saver().dump_to_file(variable, tmp_path)
            session.run(load)
            # An error that all are told of; then a run that breaks off, whose files go with the graph.
            for kind, left in ((OSError, 0), (SystemExit, 2)):
                with monkeypatch.context() as patch, pytest.raises(tf.errors.OpError, match="full"):
                    patch.setattr("sok.compat.formats.dump.TableWriter.flush", mock.Mock(side_effect=kind("full")))
                    session.run(dump)
                assert len(os.listdir(tmp_path)) == left

    program()
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_in_a_function_it_works_as_well(tmp_path):
    variable = table("in_function")
    variable.assign(KEYS, ROWS)
    saver = sok.Saver()
    assert tf.function(lambda: saver.dump_to_file(variable, tmp_path))().numpy() == b"OK"
    variable.erase(KEYS)
    assert tf.function(lambda: saver.restore_from_file(variable, tmp_path))().numpy() == b"OK"
    assert content(variable) == dict(zip(KEYS.tolist(), ROWS.tolist(), strict=True))


def test_the_name_of_a_layer_is_the_name_of_its_files(tmp_path):
    layer = sok.All2AllDenseEmbedding(10, 2, 1, 1, name="items")
    layer(tf.constant([[[3]]], tf.int64))
    sok.Saver().dump_to_file(layer.embedding_variable, tmp_path)
    assert os.path.getsize(tmp_path / "items_keys.file") == 8


def test_a_name_with_slashes_makes_directories(tmp_path):
    variable = table("tower/items")
    variable.assign([3], [[1.0, 2.0]])
    sok.Saver().dump_to_file(variable, tmp_path)
    assert os.path.getsize(tmp_path / "tower" / "items_keys.file") == 8
