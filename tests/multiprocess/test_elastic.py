"""A job of which a worker is killed and another added, as examples/elastic.py does it."""

import json
import os
import subprocess
import sys

import pytest

from tests.multiprocess.harness import ROOT

pytestmark = pytest.mark.multiprocess


def test_a_job_goes_on_after_a_kill_and_with_one_worker_more():
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
        "HOROVOD_CYCLE_TIME": "5",
    }
    command = [sys.executable, "examples/elastic.py", "--kills", "1", "--pause", "0.05", "--deadline", "200"]
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stdout + said.stderr
    found = json.loads(said.stdout.splitlines()[-1])
    assert found["ok"] and found["kills"] == found["adds"] == 1 and max(found["sizes"]) == 3
    assert found["uses_of_each_sample"] == [4, 4] and set(found["steps"]) == {400}
    assert max(found["steps_done_again"]) <= 10
