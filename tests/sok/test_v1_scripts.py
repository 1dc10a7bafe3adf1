"""Scripts of TensorFlow 1, which switch the whole process to graphs: each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "mode, legacy", [("v2 behaviour off", "0"), ("v2 behaviour off", "1"), ("eager execution off", "0")]
)
def test_script_runs(mode, legacy):
    script = Path(__file__).with_name("v1_session_script.py")
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": legacy, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the script ran to its end" in done.stdout
