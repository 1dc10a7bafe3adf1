"""The small examples run, learn, and give two workers what they give one."""

import json
import re

import pytest
from criteo import generate

LOOPS = ("custom_loop.py", "session_v1.py")


@pytest.fixture(scope="module")
def log_path(tmp_path_factory):
    return str(generate.cached_log(tmp_path_factory.mktemp("log"), 20_000, 0))


@pytest.fixture(scope="module")
def known():
    """AUCs of one worker that a test has measured already."""
    return {}


@pytest.fixture
def finish(example):
    def run(script, *arguments, **kwargs) -> str:
        status, out, err = example(script, *arguments, **kwargs)
        assert status == 0, out + err
        return out

    return run


@pytest.fixture
def loop_auc(finish, log_path, known):
    def run(script, workers):
        if (script, workers) not in known:
            out = finish(script, "--data", log_path, "--batch-size", "256", workers=workers)
            known[script, workers] = float(re.search(r"AUC (0\.\d+)", out).group(1))
        return known[script, workers]

    return run


@pytest.fixture
def movielens_auc(finish, tmp_path, movielens_dir, known):
    def run(workers):
        if ("movielens", workers) not in known:
            target = tmp_path / "result.json"
            finish("movielens/train.py", "--data", movielens_dir, "--epochs", "1", "--json", target, workers=workers)
            known["movielens", workers] = json.loads(target.read_text())["auc"]
        return known["movielens", workers]

    return run


def test_what_follows_a_feed_shows_one_step_whoever_is_killed(finish):
    arguments = ("--kills", "2", "--seconds-between", "1", "--check")
    said = json.loads(finish("feed.py", *arguments, deadline=180).splitlines()[-1])
    assert said["wrong"] == said["steps_back"] == 0 and said["versions"] > 3 and said["answers"] > 0
    assert [next(iter(one)) for one in said["killed_and_back_after_seconds"]] == ["job", "follower"]


def test_parameter_servers_train_while_a_worker_is_killed(finish):
    said = json.loads(finish("parameter_servers.py", "--steps", "90", "--check", deadline=120).splitlines()[-1])
    assert said["updates"] >= said["steps"] == 90 and said["restored"]


@pytest.mark.parametrize(("strategy", "collectives"), [("auto", None), ("memory_balanced", 4)])
def test_tables_placed_by_a_plan_train_as_stock_keras_on_one_worker(finish, log_path, strategy, collectives):
    arguments = ("--data", log_path, "--strategy", strategy, "--steps", "4", "--batch-size", "256", "--check")
    out = finish("dlrm.py", *arguments, workers=2)
    said = json.loads(re.search(r"\{.*\}", out)[0])
    assert said["max_difference_to_one_worker"] < 1e-5 and said["measured_ms"] > 0
    assert 0 < said["collectives_per_step"] <= 4 if collectives is None else said["collectives_per_step"] == collectives
    assert said["predicted_ms"] > 0 if strategy == "auto" else said["predicted_ms"] is None
    assert len(said["plan"]) == (26 if strategy == "auto" else 2)


def test_a_rule_of_ones_own_gives_what_the_built_in_one_gives(finish):
    out = finish("own_rule.py", "--check", "--rows", "500", "--steps", "4", "--batch-size", "256")
    said = json.loads(out.strip().splitlines()[-1])
    assert said["max_difference"] < 1e-6 and said["time_ratio"] > 0


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.multiprocess)])
def test_rows_ahead_change_nothing(finish, workers):
    arguments = ("--depth", "2", "--steps", "8", "--batch-size", "64", "--vocabulary", "500", "--check", "--rows")
    said = json.loads(re.search(r"\{.*\}", finish("ahead.py", *arguments, workers=workers))[0])
    assert said["equal"] is True and all(ms > 0 for ms in said["step_ms"])
    assert said["hidden_ms"] >= 0 and (workers > 1 or said["hidden_ms"] == 0)
    assert 0 <= said["repaired_rows"] <= said["sent_rows"] and (said["sent_rows"] > 0) == (workers > 1)


@pytest.mark.multiprocess
def test_rows_come_and_go_on_two_workers_as_on_one(finish):
    arguments = ("--check", "--steps", "30", "--batch-size", "64", "--vocabulary", "2000", "--older-than", "8")
    said = json.loads(re.search(r"\{.*\}", finish("policies.py", *arguments, workers=2))[0])
    assert said["equal"] is True and said["made"] > said["evicted"] > 0 and said["candidates"] > 0
    assert said["rows"] == said["made"] - said["evicted"]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.multiprocess)])
def test_a_table_larger_than_its_memory_is_the_one_in_memory(finish, workers):
    arguments = ("--check", "--rows", "20000", "--dim", "64", "--memory-bytes", "3500000", "--steps", "6")
    said = json.loads(re.search(r"\{.*\}", finish("larger_than_memory.py", *arguments, workers=workers))[0])
    assert said["equal"] is True and 0 < said["hit_rate"] < 1 and all(ms > 0 for ms in said["step_ms"])
    assert said["memory_bytes"] <= workers * 3_500_000 < 20_000 * 64 * 8 < said["file_bytes"]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.multiprocess)])
def test_export_predicts_the_same_without_sok(finish, workers):
    out = finish("export.py", workers=workers, starts=["fresh"])
    assert float(re.search(r"difference (\S+)", out).group(1)) < 1e-6


def test_hello_learns(finish):
    out = finish("hello.py")
    assert float(re.search(r"worker 0 of 1: loss (\d\.\d+)", out).group(1)) < 0.3


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.multiprocess)])
def test_a_converted_model_is_the_stock_model(finish, workers):
    # Processes of their own may be told which Keras is tf.keras. As users start them: by horovodrun.
    out = finish(
        "convert_keras.py",
        *("--layers", 3, "--steps", 4, "--check"),
        workers=workers,
        starts=["fresh"],
        TF_USE_LEGACY_KERAS=str(workers - 1),
    )
    result = json.loads(re.search(r"{.*}", out).group(0))
    assert (result["changed_lines"], result["workers"]) == (2, workers)


@pytest.mark.parametrize("script", LOOPS)
def test_loop_learns(loop_auc, script):
    assert loop_auc(script, workers=1) > 0.65


@pytest.mark.multiprocess
@pytest.mark.parametrize("script", LOOPS)
def test_loop_on_two_workers_reaches_the_auc_of_one(loop_auc, script):
    assert abs(loop_auc(script, workers=1) - loop_auc(script, workers=2)) < 0.003


def losses_of_monitored_session(finish, *arguments, **kwargs):
    out = finish("monitored_session.py", *arguments, **kwargs)
    return [float(loss) for loss in re.findall(r"worker \d of \d: loss (\d\.\d+) after \d+ steps", out)]


def test_monitored_session_learns_and_goes_on_from_a_checkpoint(finish, tmp_path):
    arguments = ("--checkpoint-dir", tmp_path, "--steps")
    (first,) = losses_of_monitored_session(finish, *arguments, "100")
    assert first < 0.3
    out = finish("monitored_session.py", *arguments, "120")
    assert "after 20 steps" in out


@pytest.mark.multiprocess
def test_monitored_session_on_two_workers_reaches_the_loss_of_one(finish):
    (one,) = losses_of_monitored_session(finish)
    two = losses_of_monitored_session(finish, workers=2)  # each the loss of its half of the samples
    assert len(two) == 2 and abs(sum(two) / 2 - one) < 0.003


def test_movielens_learns(movielens_auc):
    assert movielens_auc(workers=1) > 0.72


@pytest.mark.multiprocess
def test_movielens_on_two_workers_reaches_the_auc_of_one(movielens_auc):
    assert abs(movielens_auc(workers=1) - movielens_auc(workers=2)) < 0.003
