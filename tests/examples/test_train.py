"""The main job from end to end: as a user starts it, in processes of its own, and (faster) called from here."""

import json
import os
from pathlib import Path

import pytest
from criteo import generate
from criteo.train import main

import sok

SMALL = ("--batch-size", "256", "--epochs", "1", "--curve-points", "3")
JSON_KEYS = {
    *("auc", "logloss", "best_auc", "best_logloss", "samples_per_second", "steps", "workers", "rows", "rows_per_shard"),
    *("train_rows", "test_rows", "skipped_lines", "seconds", "settings", "history", "calibration"),
    *("baseline_auc", "baseline_logloss", "baseline_l2", "baseline_calibration", "passes"),
}


BATCH = 201
"""Leaves a last batch of an odd number of rows, so that two workers' parts of it differ in length."""


@pytest.fixture(scope="module")
def log_path(tmp_path_factory):
    return str(generate.cached_log(tmp_path_factory.mktemp("log"), 20_000, 0))


@pytest.fixture(scope="module")
def some_log(log_path):
    """The real log if it is there, else a generated one."""
    return os.environ.get("SOK_CRITEO_SAMPLE") or log_path


@pytest.fixture
def call():
    """`main` in this process, in a job of its own."""

    def run(*arguments) -> int:
        sok.shutdown()
        try:
            return main([str(argument) for argument in arguments])
        finally:
            sok.shutdown()

    return run


@pytest.fixture
def train(call, example, tmp_path):
    """Train on small data and return the results; in processes of their own if there are workers or an environment."""

    def run(*arguments, workers=1, **environment):
        target = tmp_path / "result.json"
        flags = (*SMALL, "--json", target, "--report", tmp_path / "report", *arguments)
        if workers > 1 or environment:
            status, out, err = example("criteo/train.py", *flags, workers=workers, **environment)
            assert status == 0, out + err
        else:
            assert call(*flags) == 0
        assert (tmp_path / "report" / "report.html").read_text().startswith("<!doctype html>")
        return json.loads(target.read_text())

    return run


@pytest.fixture(scope="module")
def bad_log(log_path, tmp_path_factory):
    """1000 rows, line 800 is not one."""
    lines = Path(log_path).read_bytes().split(b"\n")[:1000]
    lines[799] = b"not a row"
    bad = tmp_path_factory.mktemp("bad") / "bad.tsv"
    bad.write_bytes(b"\n".join(lines))
    return bad


def test_generates_trains_and_says_how_well(example, tmp_path):
    target = tmp_path / "result.json"
    flags = (*SMALL, "--json", target, "--report", tmp_path / "report", "--rows", 20_000, "--cache", tmp_path / "cache")
    status, out, err = example("criteo/train.py", *flags)
    assert status == 0, out + err
    result = json.loads(target.read_text())
    assert set(result) == JSON_KEYS
    assert (result["workers"], result["steps"], result["train_rows"], result["test_rows"]) == (1, 63, 16_000, 4_000)
    assert 0.68 < result["auc"] < result["best_auc"] < 0.9
    assert result["best_logloss"] < result["logloss"] < 0.6
    assert result["rows"] == sum(result["rows_per_shard"]) > 5_000
    assert result["samples_per_second"] > 0
    assert [point["step"] for point in result["history"]] == [21, 42, 63]
    last = result["history"][-1]  # the last point of the training is the headline
    assert (last["test_auc"], last["test_logloss"]) == (result["auc"], result["logloss"])
    assert all(point["samples_per_second"] > 0 for point in result["history"])
    assert sum(group["rows"] for group in result["calibration"]["bins"]) == 4_000
    best, baseline = f"best possible: {result['best_auc']:.4f}", f"logistic regression: {result['baseline_auc']:.4f}"
    assert f"{result['auc']:.4f}   ({baseline}; {best})" in out
    for word in ("log loss", "predicted / clicks", "samples/s", "rows per shard", "report.html", "result.json"):
        assert word in out


@pytest.mark.parametrize(("model", "optimizer"), [("dlrm", "lazyadam"), ("widedeep", "adagrad")])
def test_other_models_and_optimizers_learn(train, log_path, model, optimizer):
    rate = {"lazyadam": 0.003, "adagrad": 0.05}[optimizer]
    result = train("--data", log_path, "--model", model, "--optimizer", optimizer, "--learning-rate", rate)
    assert 0.65 < result["auc"] < result["best_auc"]


def assert_same_model(one, other):
    assert other["steps"] == one["steps"]
    assert abs(one["auc"] - other["auc"]) < 0.003
    assert abs(one["logloss"] - other["logloss"]) < 0.003


@pytest.fixture(scope="module")
def results():
    return {}


@pytest.fixture
def one_worker(train, some_log, results):
    if "one" not in results:
        results["one"] = train("--data", some_log, "--batch-size", BATCH)
    return results["one"]


def test_stock_tensorflow_reaches_the_same_auc(train, one_worker, some_log):
    stock = train("--data", some_log, "--batch-size", BATCH, "--backend", "stock")
    assert_same_model(one_worker, stock)
    assert one_worker["auc"] > 0.65


def test_legacy_keras_reaches_the_same_auc(train, one_worker, some_log):
    assert_same_model(one_worker, train("--data", some_log, "--batch-size", BATCH, TF_USE_LEGACY_KERAS="1"))


@pytest.mark.multiprocess
def test_two_workers_reach_the_same_auc(train, one_worker, some_log):
    two = train("--data", some_log, "--batch-size", BATCH, workers=2)
    assert_same_model(one_worker, two)
    assert two["workers"] == 2
    assert two["rows"] == one_worker["rows"]
    assert min(two["rows_per_shard"]) > 0.4 * two["rows"]


def test_real_avazu_log_trains(train, avazu_sample):
    result = train("--data", avazu_sample, "--format", "avazu", "--batch-size", 128)
    assert result["auc"] > 0.6


def test_bad_line_ends_the_run_with_its_number(call, bad_log, tmp_path, capsys):
    assert call("--data", bad_log, "--report", tmp_path, "--holdout", 0.1) == 1
    assert f"{bad_log}, line 800: expected 40 fields, found 1" in capsys.readouterr().err


def test_bad_line_can_be_left_out(train, bad_log):
    result = train("--data", bad_log, "--skip-bad-lines", "--epochs", 2)
    assert result["skipped_lines"] == 1


@pytest.mark.multiprocess
def test_bad_line_of_one_worker_ends_all(example, bad_log, tmp_path):
    # Line 800 is in the second worker's part of its batch.
    flags = ("--data", bad_log, "--report", tmp_path, "--batch-size", 100, "--holdout", 0.1)
    status, out, err = example("criteo/train.py", *flags, workers=2)
    assert status != 0
    assert "line 800: expected 40 fields" in out + err


def test_full_table_is_an_error_that_says_what_to_raise(call, log_path, tmp_path, capsys):
    assert call("--data", log_path, "--report", tmp_path, "--max-vocabulary-size-per-gpu", 100) == 1
    assert "Give --max-vocabulary-size-per-gpu a higher value." in capsys.readouterr().err


def test_missing_file_is_an_error(call, tmp_path, capsys):
    assert call("--data", "/does/not/exist", "--report", tmp_path) == 1
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--holdout", "1.5"), "must be between 0 and 1"),
        (("--batch-size", "0"), "must be at least 1"),
        (("--seed", "-1"), "must not be negative"),
        (("--model", "gpt"), "invalid choice"),
        (("--data", "x", "--generate-only"), "give one of them"),
    ],
)
def test_bad_flags_are_explained(call, arguments, message, capsys):
    with pytest.raises(SystemExit):
        call(*arguments)
    assert message in capsys.readouterr().err


def test_generate_only_says_where_the_log_is(call, tmp_path, capsys):
    assert call("--generate-only", "--rows", 100, "--cache", tmp_path) == 0
    path = capsys.readouterr().out.splitlines()[0]
    assert len(Path(path).read_bytes().splitlines()) == 100
