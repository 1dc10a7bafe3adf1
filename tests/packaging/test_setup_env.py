"""`make setup`: names what the machine lacks, does not repeat what is done, explains a failure."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import setup_env

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def python_step(tmp_path):
    """Makes steps that run Python, with stamps and logs in a folder of the test."""

    def make(code: str, **options):
        places = {"stamps": tmp_path / "stamps", "logs": tmp_path / "logs"}
        return setup_env.Step("example", "an example", [sys.executable, "-c", code], **places, **options)

    return make


def test_missing_tools_are_named_with_their_apt_packages():
    problems = setup_env.missing_prerequisites(which={}.get, find_module={"venv": "there"}.get)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert setup_env.apt_packages(problems) == [f"python{version}-venv", "g++", "make"]


def test_this_machine_lacks_nothing():
    assert setup_env.missing_prerequisites() == []


def test_full_disk_is_a_problem_that_apt_does_not_solve(tmp_path):
    problems = setup_env.missing_prerequisites(venv_python=tmp_path / "none", disk_bytes=1e18)
    assert len(problems) == 1 and "disk space" in problems[0]
    assert setup_env.apt_packages(problems) == []


def test_step_that_is_done_is_not_repeated_until_its_inputs_change(python_step):
    step = python_step("print('hello')", inputs=["a"])
    assert step.needs_running()
    setup_env.run_step(step, "[1/1] example")
    assert not step.needs_running()
    assert python_step("print('hello')", inputs=["b"]).needs_running()
    assert python_step("print('bye')", inputs=["a"]).needs_running()


def test_failed_step_runs_again_and_says_why_and_what_to_do(python_step, capsys):
    done = python_step("print('fine')")
    setup_env.run_step(done, "[1/2] example")
    code = "import sys; print('cc1plus: internal compiler error: Killed'); sys.exit(3)"
    step = python_step(code, advice="Do without it.")
    with pytest.raises(setup_env.StepFailed) as caught:
        setup_env.run_step(step, "[2/2] example")
    assert step.needs_running() and done.needs_running(), "an old stamp must not outlive a failure"
    setup_env.explain(caught.value, 2, 2, step)
    text = capsys.readouterr().err
    assert "Step 2 of 2 failed: an example (exit status 3" in text
    assert "| cc1plus: internal compiler error: Killed" in text
    assert str(step.log) in text
    assert "SOK_BUILD_JOBS=1" in text
    assert "Do without it." in text
    assert "what is done is not repeated" in text


def test_incremental_step_that_had_nothing_to_do_is_silent(python_step, capsys):
    assert setup_env.run_step(python_step("", always=True), "[1/1] example") is False
    assert capsys.readouterr().out == ""


def test_news_of_a_build_are_its_progress_and_not_its_warnings(tmp_path):
    log = tmp_path / "log"
    log.write_text("[ 41%] Building CXX object a/b/c.cc.o\n/usr/bin/c++ -DX -c c.cc\nwarning: something\n")
    assert setup_env.latest_news(log) == "[ 41%] c.cc.o"
    log.write_text("Collecting numpy\nDownloading numpy (16 MB)\n\n")
    assert setup_env.latest_news(log) == "Downloading numpy (16 MB)"
    log.write_text("")
    assert setup_env.latest_news(log) == ""


def test_the_file_that_make_setup_runs_first_rejects_an_unsupported_python(tmp_path):
    fake = tmp_path / "python3.9"
    fake.write_text('#!/bin/sh\n[ "$1" = "--version" ] && echo "Python 3.9.2"\nexit 1\n')
    fake.chmod(0o755)
    answer = subprocess.run(
        ["bash", str(ROOT / "scripts" / "setup.sh")],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(fake)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 1
    assert "is Python 3.9.2" in answer.stderr
    assert "apt-get install python3" in answer.stderr


@pytest.mark.parametrize(("setting", "expected"), [("0", False), ("1", True), (None, True)])
def test_horovod_is_built_unless_it_is_declined(setting, expected):
    names = [step.name for step in setup_env.all_steps({"SOK_WITH_HOROVOD": setting} if setting else {})]
    assert ("horovod" in names) is expected
    assert names.index("packages") < names.index("native") < names.index("sok") < names.index("doctor")
