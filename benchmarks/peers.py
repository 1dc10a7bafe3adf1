"""Which Python runs a contestant, and whether it can."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.contestant import shape_of
from benchmarks.workloads import ROOT

# Contestant -> folder of its environment under build/bench-peers. The others run in ours.
ENVIRONMENTS = {"torch": "torch", "fbgemm": "torch", "tfra": "tfra"}
_MODULES = {
    "torch": "torch",
    "fbgemm": "fbgemm_gpu",
    "tfra": "tensorflow_recommenders_addons",
    "tf": "tensorflow",
    "tf-hashed": "tensorflow",
}
HOW = "run: make bench-peers"


def peers_dir() -> Path:
    return Path(os.environ.get("SOK_BENCH_PEERS") or ROOT / "build" / "bench-peers")


def python_of(contestant: str) -> Path:
    """The Python whose environment has the contestant; it need not exist."""
    folder = ENVIRONMENTS.get(contestant)
    return Path(sys.executable) if folder is None else peers_dir() / folder / "bin" / "python"


_reasons: dict[str, str] = {}


def why_absent(contestant: str) -> str:
    """Why the contestant cannot take part; empty if it can."""
    if contestant not in _reasons:
        _reasons[contestant] = _find_out(contestant)
    return _reasons[contestant]


def _find_out(contestant: str) -> str:
    if (shape_of(contestant) or (1, 1))[0] > 1 and importlib.util.find_spec("horovod") is None:
        return "Horovod is not installed"
    module, python = _MODULES.get(contestant), python_of(contestant)
    if module is None:
        return ""
    if not python.exists():
        return f"not installed ({HOW})"
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode:
        return f"{module} is not in {python.parent.parent} ({HOW})"
    return ""
