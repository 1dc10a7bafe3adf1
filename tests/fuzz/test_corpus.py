"""Every input that fuzzers have kept, without a fuzzer; those of shards are tried with the C++ tests."""

from pathlib import Path

import pytest

from tests.fuzz.readers import TARGETS, joined, parts

CORPUS = Path(__file__).with_name("corpus")
INPUTS = [(target, path) for target in TARGETS for path in sorted((CORPUS / target).iterdir())]


@pytest.mark.parametrize("target", TARGETS)
def test_each_reader_has_inputs(target):
    assert any(name == target for name, _ in INPUTS)


@pytest.mark.parametrize("target, path", INPUTS, ids=[f"{target}/{path.name}" for target, path in INPUTS])
def test_inputs_are_read_or_refused_and_so_is_every_cut_of_them(target, path):
    data = path.read_bytes()
    for end in {0, 1, len(data) // 2, len(data) - 1, len(data)}:
        assert TARGETS[target](data[:end]) is None, "a reader raises where it finds a promise broken"


def test_a_reader_that_breaks_a_promise_is_found():
    with pytest.raises(TypeError):
        TARGETS["manifest"](None)


def test_files_are_joined_and_taken_apart():
    files = [b"abc", b"", b"rest"]
    assert parts(joined(files), 3) == files
    assert parts(b"\xff\xff", 2) == [b"", b""]
