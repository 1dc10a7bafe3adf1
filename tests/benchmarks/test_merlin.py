"""That benchmarks/merlin.py trains what it says, and scales as it says."""

import json
import types

import numpy as np
import pytest

import sok
from benchmarks import merlin, small_tables, synthetic, towers
from benchmarks.jobs import all_jobs, select
from tests.benchmarks.merlin_model import (
    MODEL,
    train_beside_stock_tensorflow,
    train_with_ids_of_the_whole_batch,
)


def test_the_averaged_row_is_that_of_numpy():
    tower, rng = towers.Tower(MODEL), np.random.default_rng(0)
    embeddings = [rng.normal(size=[8, f.width]).astype("float32") for f in MODEL.features()]
    numbers, labels = rng.normal(size=[8, 5]).astype("float32"), rng.integers(0, 2, [8, 1]).astype("float32")
    row = np.concatenate(embeddings, 1)  # 12 of them, 4 at a time
    x = np.concatenate([row.reshape(8, 3, 4).mean(2), numbers], 1)
    (w0, w1), (b0, b1) = tower.variables[:2], tower.variables[2:]
    logits = np.maximum(x @ w0.numpy() + b0.numpy(), 0) @ w1.numpy() + b1.numpy()
    expected = np.mean(np.log1p(np.exp(logits)) - labels * logits)
    assert float(tower.loss(embeddings, numbers, labels)) == pytest.approx(expected, rel=1e-5)


def test_a_step_is_that_of_stock_tensorflow():
    sok.Init(seed=1)
    train_beside_stock_tensorflow("memory_balanced")


@pytest.mark.parametrize("strategy", synthetic.STRATEGIES[1:])
def test_ids_of_the_whole_batch_give_the_losses_of_those_of_a_worker(strategy):
    sok.Init(seed=1)
    train_with_ids_of_the_whole_batch(strategy, 100)


@pytest.mark.parametrize(
    ("options", "dp_input"),
    [
        ([], True),
        (["--dp_input"], True),
        (["--dp_input=false"], False),
        (["--nodp_input"], False),
        (["--mp_input"], False),
        (["--mp-input"], False),
    ],
)
def test_flags_say_whose_ids_a_worker_brings(options, dp_input):
    assert merlin.parser().parse_args(options).dp_input is dp_input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--strategy", "row_wise"], "does not go with --strategy row_wise: choose another, or --dp_input"),
        (["--hashed"], "does not go with --hashed tables"),
    ],
)
def test_what_has_no_owner_is_refused_with_ids_of_the_whole_batch(options, words):
    with pytest.raises(SystemExit, match=words):
        merlin.main(["--mp_input", "--device", "CPU", *options])


def test_other_words_than_true_and_false_are_refused(capsys):
    with pytest.raises(SystemExit):
        merlin.parser().parse_args(["--dp_input=maybe"])
    assert "must be true or false. Received: maybe." in capsys.readouterr().err


@pytest.mark.parametrize("strategy", synthetic.STRATEGIES)
def test_the_plan_of_each_strategy(strategy):
    model = synthetic.load("tiny").scaled(100)
    where = merlin.placements(model, strategy, 2, 4096, "adagrad", 2_000_000)
    held = merlin.bytes_of_ranks(model, where, "adagrad", 2)
    assert sum(held) >= 2 * model.bytes and len(where) == 55
    kinds = {placement.kind for placement in where}
    if strategy == "row_wise":
        assert kinds == {"row_wise"} and held[0] == held[1]
    elif strategy != "auto":
        assert kinds == {"table_wise", "column_wise"}  # the two of 25M x 16 are cut in two
        assert [i for i, placement in enumerate(where) if placement.kind == "column_wise"] == [2, 3]
    if strategy == "memory_balanced":
        assert max(held) < 1.1 * min(held)


def test_rows_are_divided_until_they_fit_and_the_threshold_with_them():
    asked = []

    def place(model, threshold):
        asked.append(threshold)
        if len(asked) == 1:
            raise merlin.planner.DoesNotFit("1 byte is missing", 1)
        return merlin.placements(model, "row_wise", 1, 8, "adagrad")

    model, factor, where = merlin.scaled(MODEL, None, 100, place, lambda model, where: model.tables[0].rows <= 10)
    assert (factor, asked) == (4, [100, 50, 25])
    assert [t.rows for t in model.tables] == [10, 7, 1] and len(where) == 3
    assert merlin.scaled(MODEL, 3, None, place, lambda *_: False)[:2] == (MODEL.scaled(3), 3)
    with pytest.raises(merlin.planner.DoesNotFit, match="bytes are missing"):
        budget = lambda model, threshold: merlin.placements(model, "auto", 1, 8, "adagrad", threshold, 10)  # noqa: E731
        merlin.scaled(MODEL, None, None, budget, lambda *_: True)


def test_the_command_says_scale_and_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(synthetic, "load", lambda name: MODEL)
    options = ["--batch_size", "8", "--steps", "2", "--device", "CPU", "--hashed", "--strategy", "row_wise"]
    merlin.main([*options, "--memory", "2e-6", "--json", str(tmp_path / "found.json")])
    said, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    factor, held = found["scale"], sum(found["bytes_of_ranks"])
    assert f"scale: rows of every table divided by {factor}\n" in said and "published" not in said
    assert held <= merlin.SHARE * 2e-6 * 2**30 < 2.2 * held and found["rows"] == 40 // factor + 30 // factor + 1
    assert 0 < found["quartiles_ms"][0] <= found["ms"] <= found["quartiles_ms"][1]
    assert found["published"] == [] and found["loss"] > 0


def test_the_command_trains_with_ids_of_the_whole_batch(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(synthetic, "load", lambda name: MODEL)
    options = ["--batch_size", "8", "--num_steps", "2", "--device", "CPU", "--mp_input", "--json"]
    merlin.main([*options, str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert "each worker brings the ids of its tables" in capsys.readouterr().out
    assert (found["dp_input"], found["steps"], found["scale"]) == (False, 2, 1) and found["loss"] > 0
    assert 0 < found["made_s"] < found["first_step_s"]


def test_strategies_take_turns_and_are_compared_window_by_window(monkeypatch):
    sok.Init(seed=1)
    turns, now = [], [0.0]
    monkeypatch.setattr(small_tables, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    slow = {"row_wise": [2, 3], "basic": [4, 9], "auto": [8, 9]}  # ms of a step, window by window

    def stepper(name):
        def step():
            done = turns.count(name) - synthetic.NUM_BATCHES  # below 0 before the windows
            turns.append(name)
            now[0] += 1e-3 * slow[name][done] if done >= 0 else 60

        return step

    trainings = {name: types.SimpleNamespace(step=stepper(name)) for name in slow}
    figures = merlin.beside_each_other(trainings, windows=2, steps=1)
    assert turns[-6:] == ["row_wise", "basic", "auto", "auto", "basic", "row_wise"]
    assert figures == pytest.approx(
        {
            "row_wise_ms": 2.5,
            "basic_ms": 6.5,
            "auto_ms": 8.5,
            "basic_to_row_wise_low": 2.25,
            "basic_to_row_wise": 2.5,
            "basic_to_row_wise_high": 2.75,
            "auto_to_row_wise_low": 3.25,
            "auto_to_row_wise": 3.5,
            "auto_to_row_wise_high": 3.75,
            "auto_to_best": 3.5,
        }
    )


def test_jobs_of_one_and_two_workers():
    found = {job.name: job for job in select(all_jobs(), ["merlin/"], False)}
    assert list(found) == ["merlin/tiny-1", "merlin/tiny-2", "merlin/small-1", "merlin/small-2"]
    assert [job.contestants for job in found.values()] == [("sok-1x2",), ("sok-2x1",)] * 2


def test_published_figures_are_those_of_the_batch_they_were_published_for():
    whole = merlin.Setup(synthetic.load("tiny"), 1, (), 65536, "adagrad")
    assert {(one["gpus"], one["ms"]) for one in merlin.published(whole)} >= {(1, 24.433), (8, 5.537), (1, 17.6)}
