"""`sok.save_npy` and `sok.load_npy`: what NumPy reads and writes, in pieces, on any number of workers."""

import os

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import sok
from sok.compat.formats import columns
from tests.messages import saying
from tests.sok.threads_world import checked, run_world

KEYS = np.array([5, -3, 2**40], np.int64)
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


def table(name, dim=2, capacity=20, **options):
    return sok.EmbeddingVariable(dim=dim, capacity=capacity, name=name, **options)


def content(variable):
    keys, rows = (tensor.numpy() for tensor in variable.export())
    return dict(zip(keys.tolist(), rows.tolist(), strict=True))


@pytest.fixture
def paths(tmp_path):
    return tmp_path / "keys.npy", tmp_path / "values.npy"


@pytest.mark.parametrize("key_dtype", ["int64", "int32", "uint32", "uint64"])
def test_numpy_reads_what_was_saved(paths, key_dtype):
    variable = table(f"saved_{key_dtype}", key_dtype=key_dtype)
    keys = np.array([7, 0, 2**31 - 1], key_dtype)
    variable.assign(keys, ROWS)
    assert sok.save_npy(variable, *paths) is None
    found, rows = (np.load(path) for path in paths)
    assert found.dtype == key_dtype and rows.dtype == np.float32
    np.testing.assert_array_equal(found, keys)
    np.testing.assert_array_equal(rows, ROWS)


def test_an_empty_table_goes_out_and_in(paths):
    variable = table("nothing")
    sok.save_npy(variable, *paths)
    assert np.load(paths[0]).shape == (0,) and np.load(paths[1]).shape == (0, 2)
    sok.load_npy(variable, *paths)
    assert content(variable) == {}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("form", ["paths", "arrays", "mapped", "big-endian"])
def test_what_numpy_saved_is_loaded(paths, dtype, form):
    keys, rows = KEYS, ROWS.astype(dtype)
    if form == "big-endian":
        keys, rows = keys.astype(">i8"), rows.astype(rows.dtype.newbyteorder(">"))
    for path, array in zip(paths, (keys, rows), strict=True):
        np.save(path, array)
    given = {"arrays": (keys, rows), "mapped": tuple(np.load(path, mmap_mode="r") for path in paths)}
    variable = table(f"loaded_{dtype}_{form}")
    assert sok.load_npy(variable, *given.get(form, paths)) is None
    assert content(variable) == dict(zip(KEYS.tolist(), ROWS.tolist(), strict=True))


def test_without_keys_rows_are_numbered(paths):
    np.save(paths[1], ROWS)
    variable = table("numbered", capacity=3, hashed=False)
    sok.load_npy(variable, None, str(paths[1]))
    assert content(variable) == dict(enumerate(ROWS.tolist()))


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_what_some_workers_save_others_load(data, tmp_path_factory):
    saving, loading = data.draw(st.integers(1, 4), "saving"), data.draw(st.integers(1, 4), "loading")
    keys = np.array(sorted(data.draw(st.sets(st.integers(-(2**63), 2**63 - 1), max_size=20))), np.int64)
    rows = np.random.default_rng(1).normal(size=[len(keys), 3]).astype(np.float32)
    folder = tmp_path_factory.mktemp("moved")
    paths = folder / "k.npy", folder / "v.npy"

    def save(transport):
        variable = table("moved", dim=3)
        variable.assign(keys, rows)
        sok.save_npy(variable, *paths)

    def load(transport):
        variable = table("moved", dim=3)
        sok.load_npy(variable, *paths)
        return content(variable)

    with pytest.MonkeyPatch.context() as patch:
        piece = data.draw(st.sampled_from([1, 50, 2**20]), "piece")
        patch.setattr(columns, "PIECE_BYTES", piece)
        patch.setattr(columns, "READ_BYTES", piece)
        checked(run_world(saving, save, patch))
        assert sorted(np.load(paths[0])) == sorted(keys)
        parts = checked(run_world(loading, load, patch))
    assert {key: row for part in parts for key, row in part.items()} == dict(
        zip(keys.tolist(), rows.tolist(), strict=True)
    )


def test_a_file_is_read_in_pieces_however_large_it_is(paths, monkeypatch):
    n, dim = 5000, 8
    np.save(paths[0], np.arange(n))
    np.save(paths[1], np.ones([n, dim], np.float32))
    sizes, fromfile = [], np.fromfile

    def read(*args, **kwargs):
        array = fromfile(*args, **kwargs)
        sizes.append(array.nbytes)
        return array

    monkeypatch.setattr(np, "fromfile", read)
    monkeypatch.setattr(columns, "PIECE_BYTES", 4096)
    monkeypatch.setattr(columns, "READ_BYTES", 4096)
    variable = table("pieces", dim=dim, capacity=n)
    sok.load_npy(variable, *paths)
    assert int(variable.size()) == n
    assert max(sizes) <= 4096 and sum(sizes) == n * (8 + 8 + 4 * dim)  # keys are read twice


@pytest.mark.parametrize(
    "keys, values, error, message",
    [
        (KEYS[:2], ROWS, ValueError, r"values\[0\]: .*3 rows .*2 keys"),
        (KEYS, np.ones([3, 5], np.float32), ValueError, "holds rows of 5 numbers. Table 'refused.*' has rows of 2"),
        (KEYS, np.ones([3, 2], int), ValueError, r"values\[0\]: rows must be \[n, D\]"),
        (KEYS.astype(float), ROWS, ValueError, r"keys\[0\]: keys must be \[n\]"),
        (np.array([1, 2, 1]), ROWS, ValueError, r"keys\[0\] and keys\[2\]: .*key 1 "),
        ("none.npy", ROWS, FileNotFoundError, "none.npy: there is no such file"),
        (np.arange(30), np.ones([30, 2], np.float32), tf.errors.ResourceExhaustedError, "at most 20 rows, and 30 new"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_stored(keys, values, error, message):
    variable = table("refused")
    with pytest.raises(error, match=message):
        sok.load_npy(variable, keys, values)
    assert content(variable) == {}


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "taken").write_bytes(b"")
    with pytest.raises(OSError, match=saying("taken/k.npy", "cannot be written")):
        sok.save_npy(table("nowhere"), tmp_path / "taken" / "k.npy", tmp_path / "v.npy")
    assert os.listdir(tmp_path) == ["taken"]


def test_what_is_no_table_is_refused(paths):
    for function in (sok.save_npy, sok.load_npy):
        with pytest.raises(TypeError, match="must be an embedding variable"):
            function(tf.Variable([1.0]), *paths)


def test_in_a_session_there_is_an_op_to_run(paths):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = table("npy_in_session")
        save, load, export = sok.save_npy(variable, *paths), sok.load_npy(variable, KEYS, ROWS), variable.export()
        session.run(load)
        session.run(save)
        keys, rows = session.run(export)
    np.testing.assert_array_equal(np.load(paths[0]), keys)
    np.testing.assert_array_equal(np.load(paths[1]), rows)
    assert dict(zip(keys.tolist(), rows.tolist(), strict=True)) == dict(zip(KEYS.tolist(), ROWS.tolist(), strict=True))


def test_progress_is_shown_when_asked_for(paths, capsys, monkeypatch):
    monkeypatch.setattr("sok.base.progress.time.monotonic", iter(range(0, 10**6, 60)).__next__)  # a minute at each look
    variable = table("shown")
    variable.assign(KEYS, ROWS)
    sok.save_npy(variable, *paths, progress=True)
    sok.load_npy(variable, *paths, progress=True)
    assert capsys.readouterr().err == "dump shown 100%\nload shown 100%\n"
    sok.save_npy(variable, *paths)
    sok.load_npy(variable, *paths)
    assert capsys.readouterr().err == ""
