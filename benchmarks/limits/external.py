"""Another program that measures the machine's limits, if SOK_BENCH_LIMITS names one: its source (C++, one file) or it.

It is run beside, alone and before the contestants, once for each of 'w1', 'w2', 'w3' that is wanted. It reads our files
(SOKBENCH_DATA), prints JSON lines: `case`, `dim`, `dist`, `combiner`, `optimizer`, `ms`, `ms_min`, `n`, `ext_cpu`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.statistics import QUIET, Figure
from benchmarks.workloads import ROOT, data_dir

VARIABLE = "SOK_BENCH_LIMITS"
NAME = "limits"
BINARY = ROOT / "build" / "bench" / "external_limits"
_FLAGS = ["-O3", "-march=native", "-fopenmp", "-std=c++17", "-pthread", "-w"]


class Absent(Exception):
    """It was not named, or does not work; the text says which."""


def program() -> Path:
    """The program, built if a source was named. Raises Absent."""
    named = os.environ.get(VARIABLE)
    if not named:
        raise Absent(f"not named ({VARIABLE}=its source or program)")
    path = Path(named)
    if not path.exists():
        raise Absent(f"{VARIABLE} names {path}, which does not exist")
    if path.suffix not in (".cc", ".cpp"):
        return path
    if not BINARY.exists() or BINARY.stat().st_mtime < path.stat().st_mtime:
        BINARY.parent.mkdir(parents=True, exist_ok=True)
        command = ["g++", *_FLAGS, str(path), "-o", str(BINARY)]
        try:
            subprocess.run(command, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise Absent(f"{path} does not compile: {error}") from error
    return BINARY


_lines: dict[tuple[str, int], list[dict[str, Any]]] = {}


def figures(parameters: dict[str, Any], measures: list[str], seconds: float) -> dict[str, Figure]:
    """What it measures of a job's `measures`. Raises Absent."""
    mode = parameters["kind"]
    if mode not in ("w1", "w2", "w3"):
        raise Absent("measures W1 to W3 only")
    key = (mode, parameters["threads"])
    if key not in _lines:
        _lines[key] = _run(mode, parameters["threads"], seconds)
    return pick(_lines[key], parameters, measures)


def _run(mode: str, threads: int, seconds: float) -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        "SOKBENCH_DATA": str(data_dir()),
        "SOKBENCH_THREADS": str(threads),
        "SOKBENCH_BUDGET": str(seconds),
        "SOKBENCH_WAIT": str(4 * seconds),
    }
    done = subprocess.run([str(program()), mode], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Absent(f"ended with status {done.returncode}: {done.stderr.strip()[-200:]}")
    return parse(done.stdout)


def parse(text: str) -> list[dict[str, Any]]:
    """The JSON objects among the lines."""
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def pick(lines: list[dict[str, Any]], parameters: dict[str, Any], measures: list[str]) -> dict[str, Figure]:
    """The figures that belong to a job's measures."""
    return {
        measure: _figure(line)
        for measure in measures
        for line in lines
        if all(line.get(name) == value for name, value in _wanted(parameters, measure).items())
    }


def _wanted(parameters: dict[str, Any], measure: str) -> dict[str, Any]:
    """What a line must say to be about a measure."""
    if parameters["kind"] == "w1":
        what, distribution = measure.split("/")
        case = {"find": "w1_find", "insert": "w1_find_or_insert"}[what]
        return {"case": case, "dim": parameters["dim"], "dist": distribution}
    if parameters["kind"] == "w3":
        return {"case": {"unique": "w3_unique", "sum": "w3_unique_segsum"}[measure]}
    if "optimizer" in parameters:
        return {"case": "w2_train", "dist": measure, "optimizer": parameters["optimizer"]}
    return {"case": "w2_forward", "dist": measure, "combiner": parameters["combiner"]}


def _figure(line: dict[str, Any]) -> Figure:
    others = float(line.get("ext_cpu", 0.0))
    ms = float(line["ms"])
    quiet = int(others < QUIET)
    return Figure(ms, ms, ms, float(line.get("ms_min", ms)), int(line.get("n", 1)), 1, quiet, others)
