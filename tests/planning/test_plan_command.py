"""`sok plan` on the command line."""

import json
import re

import pytest

from sok.tools import cli

MODEL = ["plan", "benchmarks/synthetic_models.json", "--model", "tiny", "--workers", "4", "--machine", "a100"]


def test_a_plan_is_printed_written_and_drawn(tmp_path, capsys):
    page, file = tmp_path / "plan.html", tmp_path / "plan.json"
    arguments = [
        "--html",
        str(page),
        "--json",
        str(file),
        "--pin",
        "table_0=table_wise(2)",
        "--forbid",
        "data_parallel",
    ]
    assert cli.main([*MODEL, *arguments]) == 0
    assert "tiny: 55 tables on 4 workers" in capsys.readouterr().out
    assert page.read_text().startswith("<!DOCTYPE html>")
    content = json.loads(file.read_text())
    assert content["tables"][0]["placement"] == {"kind": "table_wise", "owners": [2]}
    assert content["workers"] == 4 and len(content["ranks"]) == 4
    assert cli.main([*MODEL, "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 60


def test_json_is_printed_alone(capsys):
    arguments = ["--json", "-", "--strategy", "memory_balanced", "--mp-input", "--column-slice-threshold", "1000000"]
    assert cli.main([*MODEL, *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["strategy"] == "memory_balanced"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "1MB"], r"sok plan: no plan fits: .* bytes are missing, of 1,000,000 a worker"),
        (["--pin", "table_0"], "--pin must be TABLE=KIND. Received: 'table_0'"),
        (["--html", "/none/plan.html"], "No such file"),
    ],
)
def test_what_cannot_be_planned_is_said_with_exit_status_1(capsys, arguments, message):
    assert cli.main([*MODEL, *arguments]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error), error


@pytest.mark.parametrize(("text", "status"), [("2GiB", 0), ("80 GB", 0), ("9000000000", 0), ("80 cows", 2)])
def test_memory_has_units(capsys, text, status):
    if status:
        with pytest.raises(SystemExit, match="2"):
            cli.main([*MODEL, "--memory", text])
        assert "is no number of bytes, such as 80GB or 12GiB" in capsys.readouterr().err
    else:
        assert cli.main([*MODEL, "--memory", "900GB" if text == "2GiB" else text]) == 0
