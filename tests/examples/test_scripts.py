"""The small examples run, learn, and give two workers what they give one."""

import json
import re

import pytest


def finish(example, tmp_path, script, *arguments, **kwargs) -> str:
    status, out, err = example(script, *arguments, **kwargs)
    assert status == 0, out + err
    return out


def reached_auc(out: str) -> float:
    return float(re.search(r"AUC (0\.\d+)", out).group(1))


def test_hello_learns(example, tmp_path):
    out = finish(example, tmp_path, "hello.py")
    assert float(re.search(r"worker 0 of 1: loss (\d\.\d+)", out).group(1)) < 0.6


@pytest.fixture(scope="module")
def log_path(tmp_path_factory):
    from criteo import generate

    return str(generate.cached_log(tmp_path_factory.mktemp("log"), 20_000, 0))


@pytest.mark.parametrize("script", ["custom_loop.py", "session_v1.py"])
def test_loop_learns(example, tmp_path, log_path, script):
    out = finish(example, tmp_path, script, "--data", log_path, "--batch-size", "256")
    assert reached_auc(out) > 0.68


@pytest.mark.multiprocess
@pytest.mark.parametrize("script", ["custom_loop.py", "session_v1.py"])
def test_two_workers_reach_the_auc_of_one(example, tmp_path, log_path, script):
    flags = (script, "--data", log_path, "--batch-size", "256")
    one, two = (reached_auc(finish(example, tmp_path, *flags, workers=workers)) for workers in (1, 2))
    assert abs(one - two) < 0.003


@pytest.mark.multiprocess
def test_hello_runs_on_two_workers(example, tmp_path):
    out = finish(example, tmp_path, "hello.py", workers=2)
    assert "worker 0 of 2" in out
    assert "worker 1 of 2" in out


def movielens(example, tmp_path, directory, workers):
    target = tmp_path / "result.json"
    flags = ("--data", directory, "--epochs", "2", "--json", target)
    finish(example, tmp_path, "movielens/train.py", *flags, workers=workers)
    return json.loads(target.read_text())


def test_movielens_learns(example, tmp_path, movielens_dir):
    result = movielens(example, tmp_path, movielens_dir, 1)
    assert result["auc"] > 0.72


@pytest.mark.multiprocess
def test_movielens_on_two_workers_learns_the_same(example, tmp_path, movielens_dir):
    one, two = (movielens(example, tmp_path, movielens_dir, workers) for workers in (1, 2))
    assert abs(one["auc"] - two["auc"]) < 0.003


def test_movielens_without_its_files_says_where_to_get_them(example, tmp_path):
    status, _, err = example("movielens/train.py", "--data", tmp_path)
    assert status == 1
    assert "grouplens.org" in err
