"""Builds and starts the reference program, limits.cc: the machine's own limit for each workload."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from benchmarks.workloads import ROOT

SOURCE = ROOT / "benchmarks" / "limits" / "limits.cc"
BINARY = ROOT / "build" / "bench" / "limits"
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-w"]

_reason: str | None = None


def why_absent() -> str:
    """Builds the program if need be. Why it cannot take part; empty if it can."""
    global _reason
    if _reason is None:
        _reason = _build()
    return _reason


def _build() -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        return "g++ is not installed"
    parts = [SOURCE, *SOURCE.parent.glob("*.h")]
    if BINARY.exists() and BINARY.stat().st_mtime > max(part.stat().st_mtime for part in parts):
        return ""
    BINARY.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [compiler, *FLAGS, str(SOURCE), "-o", str(BINARY)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return "limits.cc does not compile here: " + (done.stderr.strip().splitlines() or ["no message"])[0]
    return ""


def command(parameters: dict[str, Any]) -> list[str]:
    """How to start it for a job."""
    state = {"adagrad": 1, "lazyadam": 2}.get(parameters.get("optimizer", ""), 0)
    return [str(BINARY), parameters["kind"], str(parameters.get("dim", 0)), str(parameters["threads"]), str(state)]
