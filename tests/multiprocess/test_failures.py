"""What ends a job: a worker that is killed, that raises, that never comes. And the harness that watches them."""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from sok.checkpoint.manifest import read_manifest
from tests.messages import saying
from tests.multiprocess.harness import Job, Outcome, World, processes_of, run, run_checks
from tests.multiprocess.worker import run_check

pytestmark = pytest.mark.multiprocess

PROGRAM = Path(__file__).with_name("program_that_loses_a_worker.py")
LEAVES_AHEAD = Path(__file__).with_name("program_that_leaves_ahead.py")
SAVES = Path(__file__).with_name("program_that_saves_alone.py")


@pytest.mark.parametrize(
    "way, told",
    [
        ("kill", r"exit with status code 137"),
        ("raise", r"\[1\]<stderr>:ValueError: the worker's own mistake"),
        ("trace", r"sok: rank 1: This worker could not build .*: ValueError: [^$]*int64"),
        ("build", r"sok: rank 1: This worker could not build .*: ValueError: [^$]*int64"),
    ],
)
def test_a_lost_worker_ends_the_job_with_a_clear_message(way, told, monkeypatch):
    monkeypatch.setenv("SOK_REFUSAL_SECONDS", "2")
    job = run([sys.executable, str(PROGRAM), way], ranks=2, deadline=120)
    assert not job.timed_out and job.returncode != 0
    assert re.search(told, job.output), job.output
    # The survivor says why it ends, unless horovodrun was quicker, which then says so.
    survivor = (
        r"sok: rank 0: (a peer stopped .*cannot go on without it|rank 1 has ended with ValueError: )"
        r"|Terminating remaining workers after failure"
    )
    assert re.search(survivor, job.output), job.output
    assert "trained to the end" not in job.output
    seconds = float(re.search(r"lost at ([\d.]+)", job.output).group(1))
    assert time.time() - seconds < 60


@pytest.mark.parametrize(
    "way, where",
    [
        ("leave", r"rank 1 is in no collective; its last .*; its program .*loses_a_worker.*evaluate_alone"),
        ("stop", r"rank 1 (has told nothing yet|.*last heard of)"),
    ],
)
def test_a_worker_that_does_not_come_ends_the_job_with_words(way, where):
    job = run([sys.executable, str(PROGRAM), way], ranks=2, deadline=120)
    assert not job.timed_out and job.returncode != 0, job.output
    assert re.search(
        r"sok: rank 0: \w+ 'sok/lost/\w+/0' .* \d+ s: rank 0 came, rank 1 did not",
        job.output,
    ), job.output
    assert re.search(where, job.output), job.output
    assert "ends after 12 s" in job.output and "The job ends here: sok.Init(deadline=12)" in job.output


def test_a_worker_that_ends_before_the_others_is_told_with_its_steps():
    job = run([sys.executable, str(PROGRAM), "end"], ranks=2, deadline=120)
    assert not job.timed_out and job.returncode != 0, job.output
    assert "sok: rank 0: rank 1 came to the end of its program after 11 training steps" in job.output
    words = r"sok: rank 0:   This worker has begun 11 training steps, and came to \w+ 'sok/lost/keys/0' \(number 12\)"
    assert re.search(words, job.output), job.output
    assert "sok.data.batches" in job.output and "MetricSumCallback before EarlyStopping" in job.output


@pytest.mark.parametrize("way", ["apart", "stuck"])
def test_a_program_ends_whose_peer_never_begins_what_it_has_begun_ahead(way):
    job = run([sys.executable, str(LEAVES_AHEAD), way], ranks=2, deadline=120)
    assert not job.timed_out and job.returncode == 0, job.output
    assert job.output.count("left the loops") == 2, job.output
    is_said = "has begun a batch of sok.ahead that others have not. It is dropped." in job.output
    assert is_said == (way == "stuck"), job.output  # the threads told each other, or could not


def test_a_worker_that_has_ended_takes_part_in_what_worker_0_saves_alone(tmp_path):
    job = run([sys.executable, str(SAVES), "end", str(tmp_path / "model")], ranks=2, deadline=120)
    assert not job.timed_out and job.returncode == 0, job.output
    assert "[0]<stdout>:saved" in job.output
    assert read_manifest(str(tmp_path / "model.weights.h5.sok")).world_size == 2


def test_a_worker_that_does_not_come_to_what_worker_0_saves_ends_the_job_with_words(tmp_path):
    job = run([sys.executable, str(SAVES), "never", str(tmp_path / "model")], ranks=2, deadline=120)
    assert not job.timed_out and job.returncode != 0, job.output
    words = r"'sok/meeting' .* s: rank 0 came, rank 1 did not.\n.*\n.*rank 1 .*program_that_saves_alone.py"
    assert re.search(words, job.output), job.output
    assert "The job ends here: sok.Init(deadline=12)" in job.output and "saved" not in job.output


def test_what_a_worker_has_sent_when_it_ends_arrives():
    job = run([sys.executable, "-m", "tests.multiprocess.program_that_sends_last"], 2, deadline=120, fresh_workers=True)
    assert job.returncode == 0 and "[1]<stdout>:got 33554432" in job.output, job.output


def test_the_deadline_ends_a_job_and_all_its_processes():
    # A launcher that waits for ever, with a child of its own session. (It takes seconds to start one.)
    job = run(["/bin/bash", "-c", "echo mark=$SOK_TEST_JOB; setsid sleep 1000 & sleep 1000"], ranks=2, deadline=20)
    assert job.timed_out
    mark = re.search(r"mark=(\w+)", job.output)
    assert mark, job.output
    assert processes_of(mark.group(1)) == []


@pytest.mark.parametrize("fresh", [False, True])
def test_a_job_reports_what_each_rank_said(tmp_path, fresh):
    job = run_checks(["tests.multiprocess.checks_of_the_harness"], 2, tmp_path, deadline=120, fresh=fresh)
    assert job.values("check_returns_its_rank") == [0, 1]
    with pytest.raises(AssertionError, match=saying("on 2 ranks", "rank 1", "Traceback", "only on rank 1")) as failure:
        job.values("check_fails_on_rank_1")
    assert "rank 0:" not in str(failure.value)
    with pytest.raises(AssertionError, match=saying("rank 0", "did not finish the check")):
        job.values("check_that_does_not_exist")


def test_values_complain_about_jobs_without_reports():
    job = Job(ranks=2, returncode=1, output="horovodrun: no such host", seconds=1.0, timed_out=False)
    with pytest.raises(
        AssertionError, match=saying("ended with status 1", "no rank has reported anything", "no such host")
    ):
        job.values("check_x")


def test_a_check_that_leaves_the_process_is_a_failure(tmp_path):
    outcome = run_check("check_x", lambda world: sys.exit(0), World(0, 1), tmp_path)
    assert isinstance(outcome, Outcome) and "SystemExit" in outcome.error


def test_workers_are_found_by_their_environment():
    assert os.getpid() not in processes_of("no such mark")
