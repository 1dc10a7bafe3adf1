"""`sok plan --check`: what one worker can check, and what is refused. Several workers: checks_measuring.py."""

import json

import numpy as np
import pytest

from sok.planning.checking import check
from sok.planning.distinct import draw, expected_distinct
from sok.planning.planner import plan
from sok.planning.tables import Table, model_of
from sok.tools import cli

MODEL = model_of([Table(1000, 8, hotness=[1, 3]), Table(50, 4, hashed=True)])


def test_one_worker_moves_nothing():
    found = check(plan(MODEL, 1, batch=256, machine="cpu_2_cores"), MODEL, steps=3)
    assert found.bytes == {kind: (0, 0) for kind in ("keys", "rows", "grads")}
    predicted, measured = found.parts["step"]
    assert predicted > 0 and measured > 0 and f"{predicted:.3f}" in str(found)


def test_the_command_checks_and_says_so(tmp_path, capsys):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"tables": [{"rows": 100, "dim": 4}]}))
    command = ["plan", str(path), "--workers", "1", "--machine", "cpu_2_cores", "--batch", "64", "--check"]
    assert cli.main(command) == 0
    assert "Tables alone, of the slowest worker:" in capsys.readouterr().out
    assert cli.main([*command, "--json", "-"]) == 0
    assert set(json.loads(capsys.readouterr().out)["check"]["ms"]) == {"step", "keys", "rows", "grads", "rest"}
    assert cli.main([*command, "--workers", "2"]) == 1
    assert "the plan is for 2 workers, and this job has 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "arguments", "message"),
    [
        (Table(10, 4), {"workers": 2}, "the plan is for 2 workers, and this job has 1"),
        (Table(10, 4), {"optimizer": "lion"}, "must be one of adagrad, adam, sgd to be checked: 'lion'"),
        (Table(10, 4, pooled=False), {}, "rows are not pooled cannot be checked"),
    ],
)
def test_what_cannot_be_checked_is_refused(table, arguments, message):
    model = model_of([table])
    with pytest.raises(ValueError, match=message):
        check(plan(model, **{"workers": 1, "machine": "cpu_2_cores", **arguments}), model)


@pytest.mark.parametrize("skew", [0.0, 0.7, 1.0, 1.3])
def test_drawn_ids_have_the_distinct_keys_that_are_expected(skew):
    random = np.random.default_rng(1)
    drawn = [len(np.unique(draw(random, 3000, skew, 2000))) for _ in range(50)]
    assert expected_distinct(2000, 3000, skew) == pytest.approx(np.mean(drawn), rel=0.01)
