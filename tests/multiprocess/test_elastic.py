"""A job of which a worker is killed and another added, as examples/elastic.py does it."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.multiprocess.harness import ROOT

pytestmark = pytest.mark.multiprocess


def run_example(*arguments: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
        "HOROVOD_CYCLE_TIME": "5",
    }
    command = [
        sys.executable,
        "examples/elastic.py",
        "--kills",
        "1",
        "--pause",
        "0.05",
        "--deadline",
        "400",
        *arguments,
    ]
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert said.returncode == 0, said.stdout + said.stderr
    found: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    assert found["ok"] and found["kills"] == found["adds"] == 1
    return found


def test_a_job_goes_on_after_a_kill_and_with_one_worker_more():
    found = run_example("--epochs", "8")  # so that it is not over before the third worker has started, however slowly
    assert max(found["sizes"]) == 3
    assert found["uses_of_each_sample"] == [8, 8] and set(found["steps"]) == {800}
    assert max(found["steps_done_again"]) <= 10 and "replicas" not in found["from"]


@pytest.mark.parametrize("neighbours", [1, 2])
def test_with_replicas_a_job_goes_on_in_memory_unless_two_neighbours_are_killed_at_once(neighbours):
    found = run_example("--replicas", "1", "--neighbours", str(neighbours), "--epochs", "8")
    assert found["uses_of_each_sample"] == [8, 8] and set(found["steps"]) == {800}
    where = "replicas" if neighbours == 1 else "files"
    assert found["from"].count(where) == 1 and set(found["from"]) == {"as made", "in memory", where}
    # To the last commit, of every tenth step; or to the last save, of every third commit.
    assert max(found["steps_done_again"]) <= (10 if neighbours == 1 else 30)
