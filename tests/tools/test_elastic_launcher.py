"""`sok elastic`: who is brought together with whom, and how a job ends in which somebody does not do its part.

The workers here are small programs that say what real ones say, without TensorFlow; tests/multiprocess/test_elastic.py
has real ones.
"""

import re
import sys
import textwrap

import pytest

from sok.job import elastic_launcher
from sok.tools import cli
from sok.tools.elastic import hosts, launcher, server

BEGIN = """
import os, signal, sys, time
from sok.job import elastic_launcher as job
number = int(os.environ["SOK_ELASTIC_WORKER"])
def place():
    job.take_place()
    return int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(tmp_path, capfd, program, *options, np=1, slots=2):
    """The exit status of a job of such programs, and what it said."""
    path = tmp_path / "program.py"
    path.write_text(BEGIN + textwrap.dedent(program))
    if "--host-discovery-script" not in options:
        options = (*options, "--hosts", f"localhost:{slots}")
    for name in ("--deadline", "--meeting-deadline"):  # a test that waits shall fail, and soon
        if name not in options:
            options = (*options, name, "60")
    status = cli.main(["elastic", "-np", str(np), *options, "--", sys.executable, str(path), str(tmp_path)])
    said = capfd.readouterr()
    return status, said.out + said.err


def test_a_worker_that_is_lost_while_others_meet_it_takes_them_along(tmp_path, capfd):
    program = """
    rank, size = place()
    if number < 2:
        die() if rank else time.sleep(600)  # as in Horovod, which waits for the other one
    job.tell_begun()
    """
    status, said = run(tmp_path, capfd, program, np=2)
    assert status == 0, said
    assert "rank 1) is lost (status -9)" in said
    assert "rank 0) is ended: one of those that met is lost; it is started anew" in said


def test_those_that_do_not_meet_in_time_are_started_anew(tmp_path, capfd):
    program = """
    place()
    if number < 2:
        time.sleep(600)
    job.tell_begun()
    """
    status, said = run(tmp_path, capfd, program, "--meeting-deadline", "0.5", np=2)
    assert status == 0, said
    assert said.count("it did not connect with the others in 0.5 s") == 2


def test_one_that_does_not_leave_its_job_is_ended_and_the_others_go_on(tmp_path, capfd):
    program = """
    rank, size = place()
    job.tell_begun()
    if size == 2 and rank == 1:
        time.sleep(600)
    if size == 2:
        print("then", place())
    """
    status, said = run(tmp_path, capfd, program, "--deadline", "6", np=2)
    assert status == 0, said
    assert "it did not leave its job, as others did, in 6 s" in said and "[0] then (0, " in said


def test_workers_join_and_leave_as_the_hosts_say(tmp_path, capfd):
    script, slots = tmp_path / "discover", tmp_path / "slots"
    script.write_text(f"#!/bin/sh\ncat {slots}\n")
    script.chmod(0o755)
    slots.write_text("localhost:1\n")
    program = """
    def say(slots):  # at once: who reads half of it would see no host
        with open(sys.argv[1] + "/slots.tmp", "w") as file:
            file.write(f"localhost:{slots}")
        os.replace(sys.argv[1] + "/slots.tmp", sys.argv[1] + "/slots")
    rank, size = place()
    job.tell_begun()
    if number == 0:
        print("first", rank, size)
        say(2)
    while not job.has_changes():
        time.sleep(0.05)
    rank, size = place() if number == 0 else (rank, size)
    job.tell_begun()
    if number == 0:
        print("then", rank, size)
        say(1)
        while not job.has_changes():
            time.sleep(0.05)
    rank, size = place()
    print("last", number, rank, size)
    """
    options = ("--host-discovery-script", str(script), "--network-interface", "lo", "--max-np", "2")
    status, said = run(tmp_path, capfd, program, *options)
    assert status == 0, said
    assert all(line in said for line in ("[0] first 0 1", "[0] then 0 2", "[0] last 0 0 1")), said
    assert "last 1" not in said


def test_all_hear_of_a_change_of_which_one_has_heard(tmp_path, capfd):
    """Also when the one that is to leave has left, and those that are there are as many as there shall be."""
    script, slots = tmp_path / "discover", tmp_path / "slots"
    script.write_text(f"#!/bin/sh\ncat {slots}\n")
    script.chmod(0o755)
    slots.write_text("localhost:2\n")
    program = """
    rank, size = place()
    job.tell_begun()
    if number == 1:
        with open(sys.argv[1] + "/file", "w") as file:
            file.write("localhost:1")
        os.replace(sys.argv[1] + "/file", sys.argv[1] + "/slots")
        while not job.has_changes():
            time.sleep(0.05)
        open(sys.argv[1] + "/heard", "w").close()
    else:
        while not os.path.exists(sys.argv[1] + "/heard"):
            time.sleep(0.05)
        time.sleep(1)  # it has asked for its place
        while not job.has_changes():
            time.sleep(0.05)
    print("last", place())
    """
    options = ("--host-discovery-script", str(script), "--network-interface", "lo")
    status, said = run(tmp_path, capfd, program, *options, "--deadline", "20", np=2)
    assert status == 0 and "[0] last (0, 1)" in said and "is ended" not in said, said


@pytest.mark.parametrize(
    "program, options, np, words",
    [
        ("raise SystemExit(3)", (), 1, r"has ended with status 3; its output says why"),
        ("time.sleep(600)", ("--deadline", "0.5"), 2, r"only 0 workers have waited, where 2 are needed"),
        ("die()", ("--max-losses", "2"), 1, r"[34] workers were lost, and no commit was made between"),
        (
            "rank, _ = place(); job.tell_begun(); (time.sleep(1), die()) if rank else None",
            (),
            2,
            r"rank 1\) was lost while others had come to the end",
        ),
        (
            "rank, _ = place(); job.tell_begun(); (time.sleep(1), place()) if rank else None",
            (),
            2,
            r"rank 1\) goes on from the last commit, but others have come to their end",
        ),
    ],
    ids=["an error", "nobody comes", "all are lost", "lost at the end", "left behind"],
)
def test_a_job_that_cannot_go_on_ends_with_words(tmp_path, capfd, program, options, np, words):
    status, said = run(tmp_path, capfd, program, *options, np=np)
    assert status == 1
    assert re.search(words, said), said


def test_losses_are_counted_since_the_last_commit(tmp_path, capfd):
    program = """
    place()
    job.tell_begun()
    job.has_changes()
    if number < 4:
        die()
    """
    status, said = run(tmp_path, capfd, program, "--max-losses", "1", slots=1)
    assert status == 0 and said.count("is lost") == 4, said


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["-np", "3", "--max-np", "2", "--hosts", "a:1", "x"], r"in this order. Received: 1, 3, 2"),
        (["-np", "2", "--hosts", "a:1"], "needs a program to run"),
        (["-np", "2", "--hosts", "a", "x"], "given as HOST:SLOTS, one a line. Received: 'a'"),
        (["-np", "2", "--host-discovery-script", "/bin/false", "x"], "The host discovery script fails"),
    ],
)
def test_what_makes_no_sense_is_refused(capfd, arguments, words):
    assert cli.main(["elastic", *arguments]) == 1
    assert re.search(words, capfd.readouterr().err)


def test_a_worker_says_when_its_launcher_refuses_it_or_is_gone(monkeypatch):
    answers = server.Answers("127.0.0.1", "key", lambda what, worker, generation: {"changes": what == "changes"})
    monkeypatch.setenv(elastic_launcher.ADDRESS, f"127.0.0.1:{answers.port}")
    monkeypatch.setenv(elastic_launcher.WORKER, "0")
    monkeypatch.setenv(elastic_launcher.KEY, "key")
    assert elastic_launcher.has_changes()
    monkeypatch.setenv(elastic_launcher.KEY, "another")
    with pytest.raises(RuntimeError, match="refuses 'changes': the key is another one"):
        elastic_launcher.has_changes()
    answers.close()
    with pytest.raises(RuntimeError, match=r"does not answer \(ConnectionRefusedError\)\. Start it anew"):
        elastic_launcher.has_changes()


def test_ranks_stay_in_order_and_those_of_a_host_stand_together():
    workers = [launcher.Worker(n, host, None, rank=rank, generation=int(rank >= 0)) for n, host, rank in (
        (0, "a", 2), (3, "b", -1), (2, "b", 0), (1, "a", -1), (4, "a", 1),
    )]  # fmt: skip
    ranked = launcher._ranked(workers)
    assert [w.number for w in ranked] == [2, 3, 4, 0, 1]
    told = launcher._environments(ranked)
    numbers = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert [[int(one[f"HOROVOD_{n}"]) for n in numbers] for one in told] == [
        [0, 5, 0, 2, 0, 2], [1, 5, 1, 2, 0, 2], [2, 5, 0, 3, 1, 2], [3, 5, 1, 3, 1, 2], [4, 5, 2, 3, 0, 1],
    ]  # fmt: skip


def test_a_host_keeps_its_place_while_others_come():
    found = hosts.Hosts("b:2,a:1", None)
    found.ask()
    found._words = "a:3,c:1,b:2"
    found.ask()
    assert list(found.slots.items()) == [("b", 2), ("a", 3), ("c", 1)]
