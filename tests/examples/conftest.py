import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


def _real_data(variable: str) -> str:
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"set {variable} to the path of the data")
    return path


@pytest.fixture
def criteo_sample() -> str:
    return _real_data("SOK_CRITEO_SAMPLE")


@pytest.fixture
def avazu_sample() -> str:
    return _real_data("SOK_AVAZU_SAMPLE")


@pytest.fixture
def movielens_dir() -> str:
    return _real_data("SOK_MOVIELENS_DIR")


def run_example(script: str, *arguments: str, workers: int = 1, deadline: float = 120, **environment: str):
    """Run an example in processes of its own; return (exit status, stdout, stderr). Nothing is left running."""
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    if workers > 1:
        horovodrun = Path(sys.executable).with_name("horovodrun")
        if not horovodrun.exists():
            pytest.skip("Horovod is not installed")
        command = [str(horovodrun), "-np", str(workers), *command]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1", **environment},
    )
    try:
        out, err = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{script} on {workers} workers did not end within {deadline} s:\n{out[-2000:]}\n{err[-2000:]}")
    return process.returncode, out, err


@pytest.fixture
def example():
    return run_example
