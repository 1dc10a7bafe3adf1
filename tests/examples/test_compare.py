"""The model that users get by default, beside logistic regression, on real rows."""

import pytest
from criteo import compare, generate
from movielens.as_clicks import as_clicks

SPLITS = 2


def reaches_logistic_regression(results) -> bool:
    """Whether models are at least as good on average."""
    auc, loss = (compare.differences(results, key).mean() for key in ("auc", "logloss"))
    return auc >= 0.0 and loss <= 0.0 and all(result["baseline_auc"] > 0.65 for result in results)


def test_default_reaches_logistic_regression_on_criteo(criteo_sample):
    assert reaches_logistic_regression(compare.compare(criteo_sample, SPLITS, []))


def test_default_reaches_logistic_regression_on_avazu(avazu_sample):
    assert reaches_logistic_regression(compare.compare(avazu_sample, SPLITS, [], "avazu"))


def test_default_reaches_logistic_regression_on_movielens(movielens_dir, tmp_path):
    (tmp_path / "likes.tsv").write_text(as_clicks(movielens_dir))
    assert reaches_logistic_regression(compare.compare(tmp_path / "likes.tsv", 1, []))


def test_a_model_that_does_not_learn_is_seen(tmp_path, capsys):
    log = generate.generate(tmp_path / "log.tsv", 3000, 0)
    flags = ["--splits", "2", "--epochs", "1", "--model", "dlrm", "--optimizer", "sgd", "--learning-rate", "1e-6"]
    assert compare.main(["--data", str(log), *flags]) == 0
    assert "0 of 2 above 0" in capsys.readouterr().out


@pytest.mark.parametrize("has_header", [False, True])
def test_splits_are_the_rows_in_other_orders(tmp_path, has_header):
    lines = [b"row %d\n" % i for i in range(50)]
    (tmp_path / "log").write_bytes(b"".join(lines)[:-1])  # the last line has no end
    got = [
        compare.shuffled(tmp_path / "log", tmp_path / "out", has_header, seed).read_bytes().splitlines(True)
        for seed in (0, 1, 1, 2)
    ]
    assert got[0] == lines
    assert got[1] == got[2] != got[3]
    for each in got:
        assert sorted(each) == sorted(lines)
        assert not has_header or each[0] == lines[0]


def test_movielens_as_clicks_tells_what_was_known_before(tmp_path):
    write = {
        "u.data": "7\t1\t5\t30\n7\t2\t3\t10\n9\t1\t4\t20\n7\t3\t4\t40\n",
        "u.user": "7|24|M|writer|1\n9|53|F|other|2\n",
        "u.item": "".join(f"{i}|name|date||url|{'|'.join('01'[g in (i, 5)] for g in range(19))}\n" for i in (1, 2, 3)),
    }
    for name, text in write.items():
        (tmp_path / name).write_text(text)
    rows = [line.split("\t") for line in as_clicks(tmp_path).splitlines()]
    assert {len(row) for row in rows} == {40}
    assert [row[0] for row in rows] == ["0", "1", "1", "1"]
    assert [row[1] for row in rows] == ["0", "0", "0", "1"]  # movies that the user liked before
    assert [[int(v, 16) for v in row[14:20]] for row in rows] == [
        *([7, 2, 4, 0, 0, 0b100100], [9, 1, 10, 1, 1, 0b100010], [7, 1, 4, 0, 0, 0b100010], [7, 3, 4, 0, 0, 0b101000]),
    ]
    assert not any(field for row in rows for field in row[2:14] + row[20:])
