"""examples/deepctr: on one worker and on two, interrupted, loaded and served, it is one model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from criteo import generate

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "deepctr"
ROWS = 1000
WITHOUT_SOK = "import runpy, sys; sys.modules['sok'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """257 rows: with batches of 64 the last one has one row, and of two workers one has none."""
    return str(generate.cached_log(tmp_path_factory.mktemp("log"), 257, 0))


@pytest.fixture
def start(example, deepctr, log):
    """Runs train.py; returns (exit status, what it printed). DeepCTR wants Keras 2 while TensorFlow is imported."""
    path = os.pathsep.join(filter(None, [str(deepctr), os.environ.get("PYTHONPATH")]))

    def run(*options, workers=1) -> tuple[int, str]:
        arguments = ["--data", log, "--rows", ROWS, "--batch-size", 64, *options]
        if workers > 1:
            starts = ["fresh_workers"]
            status, out, err = example("deepctr/train.py", *arguments, workers=workers, starts=starts, PYTHONPATH=path)
            return status, out + err
        done = in_a_process(FOLDER / "train.py", *arguments, env={**os.environ, "PYTHONPATH": path})
        return done.returncode, done.stdout + done.stderr

    return run


def in_a_process(*command, **kwargs):
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)


@pytest.fixture
def train(start):
    """Runs train.py to its end; returns what it told."""

    def run(*options, workers=1) -> dict:
        status, said = start(*options, workers=workers)
        assert status == 0, said[-4000:]
        return json.loads(re.search(r"{.*}", said)[0])

    return run


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def alone(train, known, tmp_path_factory):
    """What one worker told of two epochs, and the folder where it wrote weights and a SavedModel."""
    if not known:
        folder = tmp_path_factory.mktemp("alone")
        known["told"] = train("--checkpoint", folder / "weights", "--export", folder / "deepctr" / "1")
        known["folder"] = folder
    return known["told"], known["folder"]


@pytest.fixture
def url(alone):
    """Where stock TensorFlow, in a process that cannot import sok, serves what one worker has exported."""
    program = [sys.executable, "-c", WITHOUT_SOK, str(FOLDER / "serve.py")]
    options = ["--model", str(alone[1] / "deepctr" / "1"), "--port", "0"]
    with subprocess.Popen([*program, *options], stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def ask(url, log, *options):
    return in_a_process(FOLDER / "client.py", "--data", log, "--url", url, *options)


def assert_close(found, expected):
    np.testing.assert_allclose(found["first_predictions"], expected["first_predictions"], atol=1e-5)
    for name in ("log_loss", "auc"):
        assert len(found[name]) == len(found["epochs"]) > 0
        np.testing.assert_allclose(found[name], expected[name][-len(found[name]) :], atol=1e-5)


def test_one_worker_learns(alone):
    told, _ = alone
    assert (told["model"], told["workers"], told["epochs"]) == ("DeepFM", 1, [1, 2])
    assert told["log_loss"][1] < told["log_loss"][0] - 0.02 and np.std(told["first_predictions"]) > 0.01


@pytest.mark.multiprocess
def test_two_workers_train_the_model_of_one(alone, train):
    told = train(workers=2)
    assert (told["workers"], told["epochs"]) == (2, [1, 2])
    assert_close(told, alone[0])


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.multiprocess)])
def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(alone, start, train, tmp_path, workers):
    status, said = start("--backup", tmp_path / "backup", "--fail-in-epoch", 2, workers=workers)
    assert status != 0 and "log_loss" not in said
    told = train("--backup", tmp_path / "backup")  # on one worker
    assert told["epochs"] == [2]
    assert_close(told, alone[0])


def test_training_goes_on_from_weights_of_a_checkpoint(alone, train):
    told, folder = alone
    assert_close(train("--load", folder / "weights" / "01.weights.h5", "--epochs", 1), told)


def test_a_client_gets_from_stock_tensorflow_what_the_model_predicts(alone, url, log):
    done = ask(url, log, "--rows", ROWS)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(json.loads(done.stdout)["predictions"], alone[0]["first_predictions"], atol=1e-6)


def test_a_client_is_told_what_is_wrong(url, log):
    refused = ask(url, log, "--rows", 50 * ROWS)
    assert refused.returncode == 1 and "said 400" in refused.stderr and f"is not in [0, {ROWS})" in refused.stderr
    refused = ask(url.replace("deepctr", "another"), log, "--rows", ROWS)
    assert refused.returncode == 1 and "said 404" in refused.stderr and "/v1/models/deepctr:predict" in refused.stderr
