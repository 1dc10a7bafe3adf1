"""scripts/gpu_test.sh, as far as it can be seen without a GPU: which tools it runs, on what, in which order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path):
    """Runs steps of the script with programs that write down how they were called."""
    programs, build, calls = tmp_path / "bin", tmp_path / "build", tmp_path / "calls"
    (build / "tests" / "cuda").mkdir(parents=True)
    programs.mkdir()
    for name in ("nvidia-smi", "compute-sanitizer"):
        program = programs / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >>"{calls}"\n')
        program.chmod(0o755)

    def call(steps):
        env = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            **{
                "GPU_TEST_STEPS": steps,
                "GPU_BUILD": str(build),
                "OUT": str(tmp_path / "out"),
                "PYTHON": sys.executable,
            },
        }
        answer = subprocess.run(["bash", "scripts/gpu_test.sh"], cwd=ROOT, env=env, capture_output=True, text=True)
        return answer, calls.read_text().splitlines()

    return call


def test_the_sanitizer_looks_for_what_these_kernels_can_do_wrong(run):
    answer, calls = run("sanitize")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    asked = [line.split() for line in calls if line.startswith("compute-sanitizer")]
    assert [words[2] for words in asked] == ["synccheck"] * 5 + ["initcheck"] * 5 + ["memcheck"] * 5
    assert all("--track-stream-ordered-races all" in " ".join(words) for words in asked if words[2] == "memcheck")
    stems = [Path(words[-1]).name for words in asked[:4]]
    assert stems == [
        f"test_cuda_{stem}_on_device" for stem in ("hash_table", "table_group", "sparse_update", "sum_rows")
    ]


def test_tests_of_ops_fail_where_tensorflow_sees_no_gpu(run):
    answer, _ = run("tensorflow")
    assert answer.returncode != 0
    assert "SOK_DEVICE_TESTS=GPU asks for tests on /GPU:0, and TensorFlow sees no GPU." in answer.stdout + answer.stderr
