"""The main job from end to end, in processes of its own, as a user starts it."""

import json
from pathlib import Path

import pytest
from criteo import generate

SMALL = ("--batch-size", "256", "--curve-points", "3")
JSON_KEYS = {
    *("auc", "logloss", "best_auc", "best_logloss", "samples_per_second", "steps", "workers", "rows", "rows_per_shard"),
    *("train_rows", "test_rows", "skipped_lines", "seconds", "settings", "history"),
}


@pytest.fixture(scope="module")
def log_path(tmp_path_factory):
    return str(generate.cached_log(tmp_path_factory.mktemp("log"), 20_000, 0))


@pytest.fixture
def train(example, tmp_path):
    def run(*arguments, workers=1, **environment):
        target = tmp_path / "result.json"
        flags = (*SMALL, "--json", target, "--report", tmp_path / "report", *arguments)
        status, out, err = example("criteo/train.py", *flags, workers=workers, **environment)
        assert status == 0, out + err
        assert (tmp_path / "report" / "report.html").read_text().startswith("<!doctype html>")
        return json.loads(target.read_text()), out

    return run


def test_generates_trains_and_says_how_well(train, tmp_path):
    result, out = train("--rows", "20000", "--cache", str(tmp_path / "cache"))
    assert set(result) == JSON_KEYS
    assert (result["workers"], result["steps"], result["train_rows"], result["test_rows"]) == (1, 63, 16_000, 4_000)
    assert 0.68 < result["auc"] < result["best_auc"] < 0.9
    assert result["best_logloss"] < result["logloss"] < 0.6
    assert result["rows"] == sum(result["rows_per_shard"]) > 10_000
    assert result["samples_per_second"] > 0
    assert [point["step"] for point in result["history"]] == [21, 42, 63]
    assert f"AUC             {result['auc']:.4f}   (best possible: {result['best_auc']:.4f})" in out
    for word in ("log loss", "samples/s", "rows per shard", "report.html", "result.json"):
        assert word in out


@pytest.mark.parametrize(("model", "optimizer"), [("deepfm", "lazyadam"), ("widedeep", "adagrad")])
def test_other_models_and_optimizers_learn(train, log_path, model, optimizer):
    rate = {"lazyadam": "0.002", "adagrad": "0.1"}[optimizer]
    result, _ = train("--data", log_path, "--model", model, "--optimizer", optimizer, "--learning-rate", rate)
    assert 0.65 < result["auc"] < result["best_auc"]


def test_legacy_keras_learns_the_same(train, log_path):
    new, _ = train("--data", log_path)
    legacy, _ = train("--data", log_path, TF_USE_LEGACY_KERAS="1")
    assert abs(new["auc"] - legacy["auc"]) < 0.003


def agree(train, *arguments):
    """One worker, two workers, and stock TensorFlow: the same model."""
    one, _ = train(*arguments)
    two, _ = train(*arguments, workers=2)
    stock, _ = train(*arguments, "--backend", "stock")
    assert two["workers"] == 2
    assert two["rows"] == one["rows"]
    assert min(two["rows_per_shard"]) > 0.4 * two["rows"]
    assert two["steps"] == one["steps"] == stock["steps"]
    for other in (two, stock):
        assert abs(one["auc"] - other["auc"]) < 0.003
        assert abs(one["logloss"] - other["logloss"]) < 0.003
    return one


@pytest.mark.multiprocess
def test_two_workers_and_stock_tensorflow_reach_the_same_auc(train, log_path):
    # 16,000 rows and batches of 301: the last batch has 47 rows, 23 and 24 for the two workers.
    agree(train, "--data", log_path, "--batch-size", "301")


@pytest.mark.multiprocess
def test_real_criteo_log_gives_one_two_and_stock_the_same_auc(train, criteo_sample):
    one = agree(train, "--data", criteo_sample, "--batch-size", "128")
    assert one["train_rows"] == 6400
    assert one["best_auc"] is None
    assert one["auc"] > 0.6


def test_real_avazu_log_trains(train, avazu_sample):
    result, _ = train("--data", avazu_sample, "--format", "avazu")
    assert result["auc"] > 0.6


def test_bad_line_ends_the_run_with_its_number(example, log_path, tmp_path):
    lines = Path(log_path).read_bytes().split(b"\n")[:1000]
    lines[499] = b"not a row"
    bad = tmp_path / "bad.tsv"
    bad.write_bytes(b"\n".join(lines))
    status, _, err = example("criteo/train.py", "--data", bad, "--report", tmp_path)
    assert status == 1
    assert f"{bad}, line 500: expected 40 fields, found 1" in err
    assert "Traceback" not in err


@pytest.mark.multiprocess
def test_bad_line_of_one_worker_ends_all(example, log_path, tmp_path):
    lines = Path(log_path).read_bytes().split(b"\n")[:1000]
    lines[799] = b"not a row"  # in the second worker's part of the last batch
    bad = tmp_path / "bad.tsv"
    bad.write_bytes(b"\n".join(lines))
    flags = ("--data", bad, "--report", tmp_path, "--batch-size", "100", "--holdout", "0.1")
    status, out, err = example("criteo/train.py", *flags, workers=2)
    assert status != 0
    assert "line 800: expected 40 fields" in out + err


def test_full_table_is_an_error_that_says_what_to_raise(example, log_path, tmp_path):
    status, _, err = example(
        "criteo/train.py", "--data", log_path, "--report", tmp_path, "--max-vocabulary-size-per-gpu", "100"
    )
    assert status == 1
    assert "Give --max-vocabulary-size-per-gpu a higher value." in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "/does/not/exist"), "No such file"),
        (("--holdout", "1.5"), "must be between 0 and 1"),
        (("--batch-size", "0"), "must be at least 1"),
        (("--model", "gpt"), "invalid choice"),
        (("--data", "x", "--generate-only"), "give one of them"),
    ],
)
def test_bad_flags_are_explained(example, arguments, message):
    status, _, err = example("criteo/train.py", *arguments)
    assert status != 0
    assert message in err
    assert "Traceback" not in err
