"""The contract suites once more with the instructions of lesser processors (SOK_ISA), in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("isa", ["generic", "avx2"])
def test_suites_pass_with(isa, tmp_path):
    suites = [
        "tests/sok/test_group.py",
        "tests/ops/test_update.py",
        "tests/ops/test_lookup.py",
        "tests/ops/test_unique.py",
    ]
    # Not the property test, whose examples take as long as all the rest.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not any_group", *suites]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "SOK_ISA": isa}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
