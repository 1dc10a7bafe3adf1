"""`sok doctor --measure`: what it writes is what `sok plan` then counts in."""

import dataclasses
import json

import numpy as np
import pytest

from sok.planning import fitting, measuring
from sok.planning import machine as machines
from sok.planning.fitting import Shape
from sok.planning.machine import Link
from sok.planning.planner import plan
from sok.tools import cli, doctor

SMALL = (Shape(1, 500, 8, 1, 64), Shape(3, 50, 4, 5, 64, hashed=True), Shape(1, 50, 4, 1, 64, kind="table_wise"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The file of one worker."""
    path = tmp_path_factory.mktemp("measured") / "machine.json"
    machines.save(measuring.measure(10**10, table_bytes=1 << 22, shapes=SMALL), path)
    return path


def test_one_worker_measures_all_but_links(measured):
    machine, base = machines.load(measured), machines.load(machines.DEFAULT)
    assert sorted(machine.gather) == [16, 64, 256, 1024] and sorted(machine.update) == [32, 128, 512, 2048]
    assert machine.within == base.within and machine.between == base.between
    assert "Not measured: all links" in machine.source and machine.name == "this machine, 1 worker on 1 host"
    # A machine that reads a tenth of a gigabyte a second, or a million of them, is none.
    assert all(1e8 < rate < 1e13 for rate in (*machine.gather.values(), machine.stream))
    assert 1e6 < machine.unique < 1e10 and 1e6 < machine.probe < 1e11 and 1e9 < machine.flops < 1e14
    assert 0 <= machine.per_table < 1e-2 and 0 <= machine.per_step < 1
    assert len(machine.measured["steps"]) == 2  # one worker has no use for the third
    assert machine.memory == 10**10


def test_plans_take_what_was_measured(measured, monkeypatch):
    monkeypatch.setenv("SOK_MACHINE", str(measured))
    assert plan([dict(rows=10, dim=4)], 2).machine.name == "this machine, 1 worker on 1 host"


def test_constants_are_fitted_to_steps(monkeypatch):
    # A machine whose steps are those of other constants than it seems to have: predictions become right.
    seems = machines.load("cpu_2_cores")
    true = dataclasses.replace(
        seems,
        stream=seems.stream / 3,
        unique=seems.unique * 2,
        per_table=2e-4,
        per_piece=1e-4,
        per_step=1e-4,
        memory=10**15,
    )

    def trained(made, model, steps):
        return plan(model, 1, batch=made.job.batch, machine=true, strategy=made.strategy).step_ms / 1e3

    monkeypatch.setattr(fitting.checking, "trained", trained)
    found = fitting.fitted(seems)
    before, taken, now = np.array(found.measured["steps"]).T
    assert np.abs(before / taken - 1).max() > 0.3 and np.abs(now / taken - 1).max() < 0.03
    assert found.per_table == pytest.approx(3e-4, rel=0.1) and found.per_piece == 0 and found.stream < seems.stream
    # And so do those of a model that was not trained.
    model = [dict(rows=90_000, dim=24, hotness=[1, 7])] * 12
    predicted = [plan(model, 1, batch=3000, machine=m, memory=10**15).step_ms for m in (found, true)]
    assert predicted[0] == pytest.approx(predicted[1], rel=0.05)


def test_links_go_through_their_points():
    assert measuring.link_through([[8, 2.0], [10, 3.0], [18, 4.0]]) == Link(2.0, 5.0)


def test_what_a_lone_process_says_is_told(monkeypatch):
    monkeypatch.setattr(measuring.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="sok.planning.measuring .* failed"):
        measuring._measured_alone(1)


def test_a_file_that_cannot_be_written_is_said(monkeypatch, capsys):
    monkeypatch.setattr(measuring, "measure", lambda memory: machines.load("a100"))
    monkeypatch.setattr("sok.Init", lambda: None)
    assert cli.main(["doctor", "--measure", "/proc/none/machine.json"]) == 1
    assert "/proc/none/machine.json cannot be written" in capsys.readouterr().err


def test_where_plans_look_is_where_it_is_written(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(measuring, "measure", lambda memory: machines.load("a100"))
    monkeypatch.setattr("sok.Init", lambda: None)
    monkeypatch.setenv("SOK_MACHINE", str(tmp_path / "new" / "machine.json"))
    assert doctor.measure(None) == 0
    assert json.loads((tmp_path / "new" / "machine.json").read_text())["memory"] == 80 * 10**9
    printed = capsys.readouterr().out
    assert "NVLink" in printed and "gather               32: 7.9e+10" in printed
