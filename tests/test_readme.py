"""README's examples run as they stand, each in a fresh process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
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
