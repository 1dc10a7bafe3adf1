"""A repeat after a failure is counted and named, and too many are a failure."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Tests that fail once: each leaves a file behind the first time.
UNSTEADY = """
import pathlib, pytest

@pytest.mark.parametrize("number", range({count}))
@pytest.mark.xdist_group("one")
def test_unsteady(number):
    seen = pathlib.Path(__file__).with_name(f"seen{{number}}")
    is_first, _ = not seen.exists(), seen.touch()
    assert not (is_first or {always})

def test_steady():
    pass
"""


@pytest.mark.parametrize(
    "count, always, status, repeated",
    [(0, False, 0, 0), (2, False, 0, 2), (3, False, 1, 3), (1, True, 1, 1)],
    ids=["all pass", "two are repeated", "three are too many", "what fails twice has failed"],
)
def test_repeats_are_counted(tmp_path, count, always, status, repeated):
    (tmp_path / "test_unsteady.py").write_text(UNSTEADY.format(count=count, always=always))
    log = tmp_path / "repeats.log"
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "repeat_failed.sh", "2", "2", log, "-p", "no:hypothesispytest", tmp_path],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stdout + done.stderr
    named = log.read_text().splitlines()
    assert len(named) == repeated and all("test_unsteady" in line and "@" not in line for line in named)
    if status == 0 and repeated:  # and nothing else ran again
        assert re.search(rf"= {repeated} passed(, \d+ deselected)? in", done.stdout), done.stdout
    assert (f"{repeated} test(s) passed when they were repeated" in done.stdout) is (status == 0 and repeated > 0)
