"""MovieLens features: what a row may know, and how parts of ragged columns are taken."""

import gzip

import numpy as np
import pytest
from movielens.ratings import load

from tests.messages import saying


@pytest.fixture
def small_movielens(tmp_path):
    """Two users, four movies. User 1 rates movies 1 to 4 in that order; user 2 rates 4 and 3."""
    genres = {1: [0], 2: [1, 5], 3: [2], 4: [0, 1, 18]}
    items = [
        "|".join([str(movie), f"T\xe9st {movie}", "", "", "", *("1" if g in genres[movie] else "0" for g in range(19))])
        for movie in genres
    ]
    (tmp_path / "u.item").write_text("\n".join(items) + "\n", encoding="latin-1")
    (tmp_path / "u.user.gz").write_bytes(gzip.compress(b"1|24|M|writer|85711\n2|53|F|writer|94043\n"))
    ratings = ["1\t1\t5\t100", "1\t3\t4\t300", "2\t3\t1\t400", "1\t2\t3\t200", "2\t4\t5\t350", "1\t4\t2\t500"]
    (tmp_path / "u.data").write_text("\n".join(ratings) + "\n")
    return tmp_path


def rows(values, splits):
    return [values[low:high].tolist() for low, high in zip(splits, splits[1:], strict=False)]


def test_a_row_knows_only_what_was_liked_before_it(small_movielens):
    train, test = load(small_movielens, holdout=0.5)
    assert (train.singles[:, 1] - (1 << 20)).tolist() == [1, 2, 4]  # in the order of time
    assert train.labels.tolist() == [1.0, 0.0, 1.0]
    assert rows(train.history, train.history_splits) == [[], [1], []]
    assert rows(train.genres, train.genre_splits) == [[0], [1, 5], [0, 1, 18]]
    assert test.singles[:, 0].tolist() == [1, 2, 1]  # the last half of each user's ratings
    assert (test.singles[:, 1] - (1 << 20)).tolist() == [3, 3, 4]
    assert rows(test.history, test.history_splits) == [[1], [4], [1, 3]]
    assert train.singles[0, 4] == train.singles[2, 4]  # both are writers
    assert train.singles[0, 3] != train.singles[2, 3]


def test_history_is_the_latest_movies(small_movielens):
    _, test = load(small_movielens, max_history=1, holdout=0.5)
    assert rows(test.history, test.history_splits) == [[1], [4], [3]]


def test_take_gives_rows_in_the_order_asked_for(small_movielens):
    train, _ = load(small_movielens, holdout=0.5)
    taken = train.take(np.array([2, 1, 1]))
    assert rows(taken.genres, taken.genre_splits) == [[0, 1, 18], [1, 5], [1, 5]]
    assert len(train.take(np.empty(0, dtype=np.int64))) == 0


def test_missing_file_and_bad_line_are_named(small_movielens):
    with (small_movielens / "u.data").open("a") as file:
        file.write("1\t2\n")
    with pytest.raises(ValueError, match=saying("u.data", "line 7", "expected 4 fields", "found 2")):
        load(small_movielens)
    (small_movielens / "u.data").unlink()
    with pytest.raises(FileNotFoundError, match=r"u\.data \(or u\.data\.gz\) does not exist"):
        load(small_movielens)


def test_real_movielens_has_its_known_size(movielens_dir):
    train, test = load(movielens_dir)
    assert len(train) + len(test) == 100_000
    assert train.labels.sum() + test.labels.sum() == 34_174 + 21_201
    assert np.unique(np.concatenate([train.singles[:, 0], test.singles[:, 0]])).size == 943
