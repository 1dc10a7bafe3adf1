import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.harness import launching

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


def run_workers(workers, script, arguments, deadline, environment, **starts):
    """Runs an example on several workers; returns (exit status, stdout, stderr). Nothing is left running."""
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed")
    process = subprocess.Popen(
        launching([sys.executable, str(EXAMPLES / script), *arguments], workers, **starts),
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
def example(forked, tmp_path_factory):
    """Runs an example in processes of its own; returns (exit status, stdout, stderr).

    `starts` are those of tests/multiprocess/harness.py's `launching`, where there are several workers.
    """

    def run(script, *arguments, workers: int = 1, deadline: float = 600, starts: tuple[str, ...] = (), **environment):
        arguments = [str(argument) for argument in arguments]
        if workers > 1:
            return run_workers(workers, script, arguments, deadline, environment, **dict.fromkeys(starts, True))
        folder = tmp_path_factory.mktemp("example")
        ended = forked.run(EXAMPLES / script, folder, *arguments, environment=environment, deadline=deadline)
        return ended.status, ended.stdout, ended.stderr

    return run
