"""`sok convert`: from one format to another, in pieces, without a table and without TensorFlow."""

import os
import struct
import subprocess
import sys

import numpy as np
import pytest

from sok.compat.formats import columns
from sok.tools import cli
from tests.openembedding_files import Saved, adam_states, write

KEYS = np.array([5, 3, 2**31], np.int64)
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


def header(kind, code, slot=""):
    return b" " * 256 + struct.pack(">I", kind) + slot.rjust(32).encode() + struct.pack(">I", code)


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The same table in each format, in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(columns, "READ_BYTES", 32)  # so that there are several pieces
    for folder in ("one", "two"):
        os.mkdir(folder)
    (tmp_path / "one" / "user_keys.file").write_bytes(KEYS.tobytes())
    (tmp_path / "one" / "user_values.file").write_bytes(ROWS.tobytes())
    (tmp_path / "two" / "user_0-key").write_bytes(header(0, 1) + KEYS.tobytes())
    (tmp_path / "two" / "user_0-weight").write_bytes(header(1, 5) + ROWS.tobytes())
    (tmp_path / "two" / "user_0-Adam-m").write_bytes(header(2, 5, "m") + (ROWS + 1).tobytes())
    np.save("k.npy", KEYS)
    np.save("v.npy", ROWS)
    return tmp_path


def tree(folder):
    return {path.name: path.read_bytes() for path in (folder).iterdir()}


SOURCES = ["v1:one/user", "v2:two/user_0", "npy:k.npy,v.npy"]


@pytest.mark.parametrize("source", SOURCES)
def test_every_format_becomes_every_other(files, source, capsys):
    assert cli.main(["convert", source, "v1:new1/user", "--dim", "2", "--quiet"]) == 0
    assert cli.main(["convert", source, "v2:new2/user_0", "--dim", "2"]) == 0
    assert cli.main(["convert", source, "npy:new3/k.npy,new3/v.npy", "--dim", "2"]) == 0
    assert tree(files / "new1") == tree(files / "one")
    expected = tree(files / "two")
    if not source.startswith("v2"):
        del expected["user_0-Adam-m"]
    assert tree(files / "new2") == expected
    assert tree(files / "new3") == {name: (files / name).read_bytes() for name in ("k.npy", "v.npy")}
    told = capsys.readouterr()
    assert "3 rows of 2 written to v1:new1/user" in told.out and told.err == ""
    assert ("Slots m were left out" in told.out) == ("with slots m" in told.out) == source.startswith("v2")


def test_keys_are_written_in_the_dtype_that_is_asked_for(files):
    assert cli.main(["convert", "npy:k.npy,v.npy", "v1:new/user", "--key-dtype", "uint32"]) == 0
    assert (files / "new" / "user_keys.file").read_bytes() == struct.pack("<3I", 5, 3, 2**31)
    assert cli.main(["convert", "v1:new/user", "npy:a.npy,b.npy", "--dim", "2", "--key-dtype", "int64"]) == 0
    np.testing.assert_array_equal(np.load("a.npy"), KEYS)


def test_the_sign_of_v1_keys_is_what_the_dtype_asked_for_says(files):
    assert cli.main(["convert", "npy:k.npy,v.npy", "v1:new/user", "--key-dtype", "uint32"]) == 0
    assert cli.main(["convert", "v1:new/user", "npy:a.npy,b.npy", "--dim", "2", "--key-dtype", "int32"]) == 0
    np.testing.assert_array_equal(np.load("a.npy"), np.int32([5, 3, -(2**31)]))


def test_rows_become_float32(files):
    np.save("v.npy", ROWS.astype(">f8"))
    assert cli.main(["convert", "npy:k.npy,v.npy", "v2:new/user_0"]) == 0
    assert (files / "new" / "user_0-weight").read_bytes() == header(1, 5) + ROWS.tobytes()


@pytest.mark.parametrize(
    "words, message",
    [
        (["one/user", "npy:a,b"], "'one/user' .*FORMAT:PLACE.*v1, v2, npy"),
        (["v3:one/user", "npy:a,b"], "must be FORMAT:PLACE"),
        (["v1:one/user", "npy:a,b"], "v1:one/user: give --dim"),
        (["v1:one/", "npy:a,b", "--dim", "2"], "must be DIRECTORY/NAME"),
        (["v1:one/user", "npy:a", "--dim", "2"], "npy:a: must be npy:KEYS.npy,VALUES.npy"),
        (["v1:one/user", "npy:a,b", "--dim", "5"], "one/user_values.file: 24 bytes"),
        (["v1:one/user", "npy:a,b", "--dim", "0"], "--dim must be at least 1"),
        (["npy:k.npy,v.npy", "npy:a,b", "--key-dtype", "float"], "--key-dtype .*int64"),
        (["v1:one/none", "npy:a,b", "--dim", "2"], "one/none_values.file: there is no such file|none_keys.file"),
        (["v2:two/user_0", "v2:new/user:0"], "give user_0"),
        (["npy:k.npy,v.npy", "v1:a/b", "--key-dtype", "uint64"], "v1:a/b: .*int64 or uint32"),
        (["npy:k.npy,v.npy", "v2:a/b", "--key-dtype", "int32"], "k.npy, byte 144: holds key 2147483648.*int32 keys"),
    ],
)
def test_what_makes_no_sense_is_said_and_nothing_is_written(files, words, message, capsys):
    before = sorted(os.listdir(files))
    assert cli.main(["convert", *words]) == 1
    told = capsys.readouterr().err
    assert told.startswith("sok convert: ") and told.count("\n") == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(told)
    assert sorted(os.listdir(files)) == before


def test_slots_of_two_optimizers_are_refused(files, capsys):
    (files / "two" / "user_0-Adagrad-accumulator").write_bytes(b"")
    assert cli.main(["convert", "v2:two/user_0", "npy:a,b"]) == 1
    told = capsys.readouterr().err
    assert "slots of several optimizers" in told and "user_0: Adagrad, Adam" in told


def test_a_conversion_that_breaks_off_leaves_no_files(files, monkeypatch):
    def full(self, *arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sok.compat.formats.writing.TableWriter.write", full)
    before = sorted(os.listdir(files))
    assert cli.main(["convert", "v1:one/user", "npy:a,b", "--dim", "2"]) == 1
    assert sorted(os.listdir(files)) == before


def test_nothing_to_dump_is_said(files, capsys):
    np.save("k.npy", KEYS[:0])
    np.save("v.npy", ROWS[:0])
    assert cli.main(["convert", "npy:k.npy,v.npy", "v2:new/user_0"]) == 1
    assert "there are no rows" in capsys.readouterr().err


def test_it_needs_no_tensorflow_and_little_memory(files):
    # 40 MB of rows. What the process takes beyond Python and NumPy is a few pieces.
    n, dim = 100_000, 100
    values = np.lib.format.open_memmap("v.npy", "w+", np.float32, (n, dim))
    values[:, 0] = np.arange(n)
    values.flush()
    np.save("k.npy", np.arange(n))
    program = """
import resource, sys
from sok.tools import cli
from tests.openembedding_files import Saved, adam_states, write
from sok.compat.formats import columns
columns.READ_BYTES = 2**20
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert cli.main(["convert", "npy:k.npy,v.npy", "v2:new/user_0", "--quiet"]) == 0
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert after - before < 16 * 1024, after - before
assert "tensorflow" not in sys.modules
"""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": root}, timeout=60)
    written = np.fromfile("new/user_0-weight", "<f4", offset=296).reshape(n, dim)
    np.testing.assert_array_equal(written[:, 0], np.arange(n))


def test_what_openembedding_saved_is_read(files, capsys):
    rows = ROWS.astype("float64")
    write("oe", [Saved(KEYS, rows, optimizer="adagrad", states=rows + 1), Saved(KEYS, ROWS)], 1)
    write("adam", [Saved(KEYS, ROWS, optimizer="adam", states=adam_states(ROWS, ROWS, [1, 2, 3]))], 2)
    for source in ("oe/0", "oe/1"):
        assert cli.main(["convert", f"openembedding:{source}", "npy:a.npy,b.npy"]) == 0
        assert np.load("a.npy").tolist() == KEYS.tolist() and np.load("b.npy").tolist() == ROWS.tolist()
    assert "Slots accumulator were left out" in capsys.readouterr().out
    assert cli.main(["convert", "openembedding:oe/0", "v2:new/user_0"]) == 0
    assert (files / "new" / "user_0-Adagrad-accumulator").read_bytes()[296:] == (ROWS + 1).tobytes()
    assert cli.main(["convert", "openembedding:adam/0", "v2:new/other_0"]) == 0
    assert sorted(path.name for path in (files / "new").glob("other*")) == ["other_0-key", "other_0-weight"]
    assert "Slots m, v, count were left out" in capsys.readouterr().out
    for source, target, words in (
        ("npy:k.npy,v.npy", "openembedding:oe/0", "files of openembedding are read, and not written"),
        ("openembedding:oe/7", "npy:a.npy,b.npy", "has 0 variables in storage '7'. It has: variable 0 (storage 0)"),
        ("openembedding:none/7", "npy:a.npy,b.npy", "none/model_meta: there is no such file"),
    ):
        assert cli.main(["convert", source, target]) == 1
        assert words in capsys.readouterr().err
