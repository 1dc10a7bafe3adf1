"""The layers under tf_keras: the questions of keras_checks.py in a process with TF_USE_LEGACY_KERAS=1."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNNER = """
from tests.sok import keras_checks, keras_conversion_checks, keras_embedding_checks
from tests.sok import keras_file_checks, keras_input_checks, keras_prefetch_checks
from tests.short_stacks import with_short_stacks

with_short_stacks()
assert not keras_checks.IS_KERAS_3
modules = keras_checks, keras_conversion_checks, keras_embedding_checks, keras_file_checks, keras_input_checks
modules += (keras_prefetch_checks,)
globals().update(keras_checks.checks_as_tests(*modules))
"""


def test_checks_pass_under_legacy_keras(tmp_path):
    path = tmp_path / "test_under_tf_keras.py"
    path.write_text(RUNNER)
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(path),
    ]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    print(done.stdout[-4000:], done.stderr[-1000:])  # shown if the next lines fail
    assert done.returncode == 0, "a check failed under tf_keras: see its output"
    assert " passed" in done.stdout and " skipped" not in done.stdout
