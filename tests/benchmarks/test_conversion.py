"""The readers of benchmarks/real_data.py, and that benchmarks/conversion.py compares like with like."""

import argparse
import gzip
import json

import numpy as np
import pytest

import sok
from benchmarks import conversion
from benchmarks.real_data import Data, read
from tests.messages import saying


@pytest.fixture
def folder(tmp_path):
    """Ten lines of each click log, two users of MovieLens, and 30 of purchases."""
    clicks = ["\t".join([str(i % 2), *["3"] * 12, "", *[f"{i % 3:08x}"] * 25, ""]) for i in range(10)]
    (tmp_path / "criteo_head.tsv.gz").write_bytes(gzip.compress("\n".join(clicks).encode()))
    (tmp_path / "avazu.csv").write_text(
        "id,click,hour,site\n" + "".join(f"{i},{i % 2},14,s{i % 4}\n" for i in range(10))
    )
    movies = tmp_path / "ml-100k"
    movies.mkdir()
    genres = {1: [0], 2: [1, 5], 3: [2], 4: [4], 5: [18]}
    items = ["|".join([str(m), *[""] * 4, *("1" if g in genres[m] else "0" for g in range(19))]) for m in genres]
    (movies / "u.item").write_text("\n".join(items))
    (movies / "u.user").write_text("1|24|M|writer|85711\n2|53|F|writer|94043\n")
    rated = [(1, 1, 5, 100), (1, 2, 3, 200), (1, 3, 4, 300), (1, 4, 1, 310), (1, 5, 4, 320), (2, 2, 5, 350)]
    (movies / "u.data").write_text("\n".join("\t".join(map(str, one)) for one in rated))
    amazon = tmp_path / "amazon_beauty"
    amazon.mkdir()
    rng = np.random.default_rng(0)
    bought = [[user, *(rng.permutation(70)[:5] + 1).tolist()] for user in range(1, 31)]
    (amazon / "amazon_beauty_seq.txt").write_text("\n".join(" ".join(map(str, one)) for one in bought))
    attributes = {str(item): [1 + item % 3] for item in range(1, 71) if item != bought[0][2]}
    (amazon / "amazon_beauty_item2attributes.json").write_text(json.dumps(attributes))
    return tmp_path, bought


def test_data_are_read_as_row_numbers_and_lists(folder):
    criteo, avazu, movies, amazon = read(folder[0])
    assert criteo.rows == {f"C{i}": 3 if i < 26 else 1 for i in range(1, 27)}
    assert criteo.columns["C1"][:4, 0].tolist() == [0, 1, 2, 0] and criteo.labels[:3].tolist() == [0, 1, 0]
    np.testing.assert_allclose(criteo.numbers[0], [np.log1p(3)] * 12 + [0], rtol=1e-6)
    assert criteo.is_test.tolist() == [False] * 8 + [True] * 2
    assert avazu.rows == {"hour": 1, "site": 4} and avazu.numbers.shape == (10, 0)
    assert movies.rows["movie"] == 5 and movies.is_test.tolist() == [False] * 5 + [True]  # user 1's last
    # What she liked before, and the movie's genre: 0 ends a list, 1 begins it, 2 is added to ids.
    assert movies.columns["history"][-1].tolist() == [1, 3, 5] and movies.columns["history"][0].tolist() == [1, 0, 0]
    assert movies.columns["genres"][-1].tolist() == [1, 20, 0] and movies.columns["genres"][1].tolist() == [1, 3, 7]
    assert movies.labels.tolist() == [1, 0, 1, 0, 1, 1]


def test_purchases_are_pairs_of_an_item_and_one_that_the_user_has_not(folder):
    amazon, bought = list(read(folder[0]))[-1], folder[1]
    assert amazon.labels.tolist() == [1, 0] * (30 * 4) and amazon.is_test.sum() == 30 * 2
    items = np.unique([one[1:] for one in bought])
    assert amazon.rows["item"] == items.size  # each came, if only as one that somebody has not
    targets, own = items[amazon.columns["item"][:, 0]], [set(one[1:]) for one in bought for _ in range(8)]
    assert [item in of for item, of in zip(targets, own, strict=True)] == [True, False] * (30 * 4)
    assert amazon.columns["history"][2].tolist() == [1, 1 + bought[0][1], 1 + bought[0][2], *[0] * 18]
    assert amazon.columns["attributes"][0].tolist() == [1, 0]  # the one item that has none


def test_a_folder_without_data_is_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=saying("has none of criteo*.tsv*, avazu*.csv*, ml-100k, amazon_beauty")
    ):
        list(read(tmp_path))


@pytest.mark.parametrize("lists", [False, True])
def test_a_converted_model_has_the_auc_of_stock_with_equal_ids_summed(lists):
    sok.Init(seed=1)
    rng = np.random.default_rng(0)
    columns = {"a": rng.integers(0, 80, [400, 1]), "b": rng.integers(0, 7, [400, 1])}
    if lists:
        columns["several"] = np.concatenate([np.ones([400, 1], int), rng.integers(0, 90, [400, 2])], axis=1)
    labels = ((columns["a"][:, 0] + (rng.random(400) < 0.2)) % 2).astype(np.float32)
    data = Data("made", columns, rng.normal(size=[400, 2 - 2 * lists]), labels, np.arange(400) >= 300)
    args = argparse.Namespace(dim=4, batch=50, epochs=4, optimizer="adam", rate=0.05, dense_size=10)
    summed, converted = (conversion.train(data, 0, way, args) for way in (conversion.SUMMED, "converted"))
    # 100 samples to test with have some 2,500 pairs, of which rounding may turn one or two.
    assert summed == pytest.approx(converted, abs=1e-3) and 0.6 < converted < 1
    if not lists:  # what else would differ: Keras 3's own rule, whose ids of a batch are often equal, and another seed
        for seed, way in (0, "stock"), (1, "converted"):
            assert abs(conversion.train(data, seed, way, args) - converted) > 2e-3


def test_the_command_prints_a_line_for_each_way(folder, capsys):
    options = ["--only", "amazon", "--seeds", "1", "--batch", "30", "--epochs", "1", "--optimizer", "sgd"]
    conversion.main(["--data", str(folder[0]), *options])
    said = capsys.readouterr().out
    assert "amazon: 180 samples to train with, 60 to test, 4 columns" in said
    lines = [line.split(" | ") for line in said.splitlines() if line.startswith("| amazon")]
    assert [line[1] for line in lines] == ["converted", "stock"]
    assert abs(float(lines[1][-1].rstrip(" |"))) < 2e-3  # SGD knows no difference
