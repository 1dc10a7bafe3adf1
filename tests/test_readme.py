"""The examples of README and of docs/checkpoints.md run as they stand, each in a fresh process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = {
    title: code for title, code in re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```", README, re.M | re.S)
}


def test_readme_has_an_example_for_each_of_the_three_modes():
    assert list(EXAMPLES) == ["Keras", "A custom loop", "A v1 Session"]


@pytest.mark.parametrize("title", EXAMPLES)
def test_the_example_runs(title, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[title], encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    if title != "Keras":  # it ends with the loss, which training has brought down
        assert float(done.stdout.split()[-1]) < 0.65


CHECKPOINTS = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4])
def test_the_example_of_checkpoints_runs(number, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(re.findall(r"```python\n(.*?)```", CHECKPOINTS, re.S)[number], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert any(path.name == "manifest.json" for path in tmp_path.rglob("*"))
