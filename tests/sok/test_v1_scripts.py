"""A script of TensorFlow 1, which switches the whole process to graphs: each time in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


SCRIPT = Path(__file__).with_name("v1_session_script.py")


@pytest.mark.parametrize("mode", ["v2 behaviour off", "eager execution off"])
def test_script_runs(forked, tmp_path, mode):
    done = forked.run(SCRIPT, tmp_path, mode)
    assert done.status == 0, done.stderr[-3000:]
    assert "the script ran to its end" in done.stdout


def test_script_runs_with_legacy_keras():
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), "v2 behaviour off"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the script ran to its end" in done.stdout
