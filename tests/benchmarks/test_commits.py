"""That benchmarks/commits.py measures what it says."""

import numpy as np

import sok
from benchmarks import commits


def test_both_ways_commit_the_same_and_leave_no_file(tmp_path, capsys):
    commits.main(["--rows", "300", "--dim", "2", "--changed", "20", "40", "--rounds", "2"] + ["--path", str(tmp_path)])
    said = capsys.readouterr().out
    assert "300 rows of dim 2" in said and "| 20 | " in said and "| 40 | " in said
    assert not list(tmp_path.iterdir())


def test_a_way_trains_all_rows_and_commits_those_that_changed(tmp_path):
    sok.Init(seed=1)
    for name in commits.WAYS:
        way = commits.Way(name, tmp_path, 30, 2)
        assert way.table.total_size() == 30
        assert way.commit() > 0
        before = way.table.sparse_read(np.arange(30)).numpy()
        way.train(np.arange(5))
        assert way.commit() > 0
        changed = (way.table.sparse_read(np.arange(30)).numpy() != before).any(1)
        np.testing.assert_array_equal(changed, np.arange(30) < 5)
        other = sok.EmbeddingVariable(2, 1000, name=f"read_{name}", seed=1)
        sok.restore(tmp_path / name, {way.table.table_name: other}, slots=False)
        np.testing.assert_array_equal(other.sparse_read(np.arange(5)), way.table.sparse_read(np.arange(5)))
