"""What several saves have changed in one table, gathered: as a dict says it that takes one change after the other."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from sok.checkpoint.feed import Delta
from sok.saved_model.feed_changes import gathered, wide
from tests.reference.keys import KEY_DTYPES, extreme_keys

DIM = 4
KEYS = np.arange(-3, 5)
COLUMNS = [(0, 4), (0, 2), (2, 4), (0, 1), (1, 4), (1, 3)]


def piece(keys=(), rows=None, erased=(), first=0, dtype=np.int64):
    rows = np.zeros([0, DIM], "f") if rows is None else np.asarray(rows, "f")
    return Delta("g", "t", np.asarray(keys, dtype), rows, np.asarray(erased, dtype), first_column=first)


def stated(pieces, before):
    """Rows by key, and the keys that have none any more, of those that a piece names."""
    rows, named = {key: row.copy() for key, row in before.items()}, set()
    for one in pieces:
        for key in one.erased.tolist():
            named.add(key)
            rows.pop(key, None)
        for key, row in zip(one.keys.tolist(), one.rows, strict=True):
            named.add(key)
            rows.setdefault(key, np.zeros(DIM, "f"))[one.first_column : one.first_column + len(row)] = row
    return {key: rows[key] for key in named & rows.keys()}, named - rows.keys()


def as_dict(changes, dtype=np.int64):
    assert (np.diff(changes.words.astype(object)) > 0).all() and (np.diff(changes.erased.astype(object)) > 0).all()
    keys = changes.words.view(np.int64).astype(dtype).tolist()
    return dict(zip(keys, changes.rows, strict=True)), set(changes.erased.view(np.int64).astype(dtype).tolist())


@st.composite
def programs(draw):
    """Pieces with whole rows or some columns, each key at most once in a piece; and rows of some keys before."""
    some = st.lists(st.sampled_from(KEYS.tolist()), unique=True, max_size=5)
    number, pieces = 0, []
    for _ in range(draw(st.integers(0, 8))):
        first, stop = draw(st.sampled_from(COLUMNS))
        keys, erased = draw(some), draw(some)
        rows = number + np.arange(len(keys) * (stop - first)).reshape(len(keys), stop - first)
        number += 100
        pieces.append(piece(keys, rows, erased, first))
    return pieces, draw(some)


@settings(max_examples=300, deadline=None)
@given(programs())
def test_the_last_word_on_each_key_is_that_of_a_dict(program):
    pieces, known = program
    before = {key: np.full(DIM, -1.0 - key, "f") for key in known}
    # A column that a new key never got reads as whatever is before; here as zeros.
    asked = []

    def rows_before(words):
        asked.extend(words.view(np.int64).tolist())
        return np.array([before.get(key, np.zeros(DIM)) for key in words.view(np.int64).tolist()], "f").reshape(-1, DIM)

    expected, gone = stated(pieces, before)
    found, erased = as_dict(gathered(pieces, DIM, rows_before))
    assert erased == gone and found.keys() == expected.keys()
    was_erased = {key for one in pieces for key in one.erased.tolist()}
    for key, row in expected.items():
        # Of a key that was erased and has some columns again, the others are nobody's: in a job they come, too.
        columns = slice(None) if key not in was_erased else written_since(pieces, key)
        np.testing.assert_array_equal(found[key][columns], row[columns], err_msg=str(key))
    assert len(asked) == len(set(asked)) and set(asked) <= set(expected)


def written_since(pieces, key):
    """The columns that a key got after it was erased the last time."""
    columns = set()
    for one in pieces:
        if key in one.erased.tolist():
            columns = set()
        if key in one.keys.tolist():
            columns |= set(range(one.first_column, one.first_column + one.rows.shape[1]))
    return sorted(columns)


@settings(max_examples=100, deadline=None)
@given(programs())
def test_without_rows_before_it_starts_from_nothing(program):
    pieces, _ = program
    expected, gone = stated(pieces, {})
    found, erased = as_dict(gathered(pieces, DIM, None))
    assert erased == gone and found.keys() == expected.keys()
    for key, row in expected.items():
        columns = written_since(pieces, key)
        np.testing.assert_array_equal(found[key][columns], row[columns])


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_keys_of_all_dtypes_are_words_as_files_have_them(dtype):
    keys = np.unique(extreme_keys(dtype))
    words = wide(keys)
    assert words.dtype == np.uint64 and words.view(np.int64).astype(dtype).tolist() == keys.tolist()
    if tf.as_dtype(dtype).is_unsigned:
        assert words.tolist() == keys.tolist()
    rows = np.arange(len(keys) * DIM).reshape(-1, DIM)
    found, erased = as_dict(
        gathered([piece(keys, rows, dtype=dtype), piece(erased=keys[:1], dtype=dtype)], DIM, None), dtype
    )
    assert erased == {keys[0].item()} and found.keys() == set(keys[1:].tolist())


def test_nothing_comes_of_nothing():
    for pieces in ([], [piece()], [piece(), piece()]):
        changes = gathered(pieces, DIM, None)
        assert (len(changes.words), changes.rows.shape, len(changes.erased)) == (0, (0, DIM), 0)
