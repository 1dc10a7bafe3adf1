"""Saves that are killed at every step that they take on the disk: the newest complete checkpoint can be restored."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "how",
    [
        "--kills 4",
        "--workers 2 --steps 8 --kills 2",
        "--versions --steps 8 --kills 2",
        "--versions --workers 2 --steps 8 --kills 2",
        "--versions --policies --steps 8 --kills 2",
    ],
    ids=[
        *("all steps of one worker", "some of two workers", "versions of one worker", "versions of two workers"),
        "versions with policies",
    ],
)
def test_a_save_that_is_killed_at_a_step_leaves_the_newest_complete_checkpoint(how):
    """All steps of two workers, and hundreds at random times: make kill-test."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kills", *how.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    at_steps, of, interrupted = map(int, re.search(r"(\d+) kills at steps, of (\d+): (\d+) ", done.stdout).groups())
    assert of > 15 and at_steps in (8, of) and interrupted == at_steps
    assert int(re.search(r"(\d+) kills at random times", done.stdout)[1]) == int(how[-1])
