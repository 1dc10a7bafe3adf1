"""Who waits for whom, from what workers tell. Jobs that end by it: tests/multiprocess/test_failures.py."""

import os
import re
import sys
import threading

import pytest
import tensorflow as tf

import sok
from sok.base import _ops, tracing
from sok.job import dead_peers
from sok.job.transport.watch import (
    Collective,
    Report,
    checked_deadline,
    describe,
    describe_ended,
    lonely,
    own_collectives,
    own_place,
)
from tests.messages import saying


def waiting(name, begun, seconds):
    return Collective(name, "all_to_all", begun, True, seconds)


def done(name, begun, seconds):
    return Collective(name, "all_to_all", begun, False, seconds)


def report(*collectives, silent=0.0):
    return Report({one.name: one for one in collectives}, "train.py:7 in step", silent)


@pytest.mark.parametrize(
    "peers, missing",
    [
        ([report(done("a", 2, 1.0))], [1]),  # has not begun the third
        ([report()], [1]),
        ([None], [1]),  # has told nothing
        ([report(waiting("b", 9, 50.0))], [1]),
        ([report(done("a", 3, 50.0))], None),  # it came: its step failed, and nothing is waited for
        ([report(waiting("a", 3, 5.0))], None),  # it came late, and the data are on their way
        ([report(waiting("a", 3, 5.0), silent=49.0)], None),
        ([report(waiting("a", 3, 5.0), silent=50.0)], [1]),  # it came, and stopped
        ([report(done("a", 4, 1.0)), report(done("a", 2, 1.0)), None], [2, 3]),
    ],
)
def test_a_wait_is_lonely_if_a_peer_has_begun_fewer_or_is_silent(peers, missing):
    reports = dict(enumerate([report(waiting("a", 3, 50.0)), *peers]))
    found = lonely(reports, 0, 50.0)
    assert (found and found[1]) == missing
    assert lonely(reports, 0, 51.0) is None  # not yet


def test_the_longest_lonely_wait_is_told():
    mine = report(waiting("a", 3, 70.0), waiting("b", 1, 60.0), waiting("c", 1, 80.0), done("d", 1, 90.0))
    one, missing = lonely({0: mine, 1: report(done("c", 1, 1.0))}, 0, 50.0)
    assert (one.name, missing) == ("a", [1])


def ended(how, *collectives, was_stopped=None):
    return Report({one.name: one for one in collectives}, "its end", ended=how, was_stopped=was_stopped)


@pytest.mark.parametrize(
    "was_stopped, remedies",
    [
        (False, ["fewer batches", "sok.data.batches", "steps_per_epoch"]),
        (True, ["A callback has stopped", "MetricSumCallback before EarlyStopping"]),
        (None, ["fewer batches", "Or: A callback has stopped"]),
    ],
)
def test_a_peer_that_ended_well_is_told_with_its_steps_and_the_remedy(was_stopped, remedies):
    peer = ended(dead_peers.WELL, done("sok/a/grads/0", 3, 1.0), done("sok/a/keys/0", 9, 1.0), was_stopped=was_stopped)
    mine = report(done("sok/dense_gradients/0", 4, 1.0), waiting("sok/a/keys/0", 10, 1.0))
    said = describe_ended({0: mine, 1: peer}, 0)
    assert re.match(saying("rank 1 came to the end of its program after 3 training steps", *remedies), said), said
    assert "This worker has begun 4 training steps, and came to all_to_all 'sok/a/keys/0' (number 10)." in said
    assert ("fewer batches" in said) is (was_stopped is not True)


def test_a_peer_that_raised_is_told_and_one_that_lost_a_peer_is_not():
    reports = {0: report(), 1: ended("ValueError: mine"), 2: ended(dead_peers.BY_A_PEER), 3: None, 4: report()}
    assert describe_ended(reports, 0) == "rank 1 has ended with ValueError: mine (its own output says where)."
    assert describe_ended({0: ended(dead_peers.WELL), 1: report()}, 0) == ""


def test_words_name_the_collective_the_ranks_and_their_places():
    reports = {
        0: report(waiting("sok/a/keys", 3, 61.0)),
        1: report(waiting("sok/b/rows", 5, 60.0), done("sok/a/keys", 2, 62.0)),
        2: report(done("sok/a/keys", 2, 70.0), silent=65.0),
        3: report(),
        4: None,
    }
    lines = describe(reports, reports[0].collectives["sok/a/keys"], [1, 2, 3, 4]).splitlines()
    wanted = [
        ("all_to_all 'sok/a/keys' (number 3)", "61 s", "rank 0 came, ranks 1, 2, 3, 4 did not"),
        ("  rank 0 waits", "all_to_all 'sok/a/keys' (number 3)", "61 s", "train.py:7 in step"),
        ("  rank 1 waits", "all_to_all 'sok/b/rows' (number 5)", "60 s", "train.py:7 in step"),
        ("  rank 2 ", "all_to_all 'sok/a/keys', 70 s ago", "train.py:7 in step", "65 s ago"),
        ("  rank 3 ", "no collective", "train.py:7 in step"),
        ("  rank 4 ", "nothing yet", "sok.Init"),
        ("All workers", "same order"),
    ]
    for line, parts in zip(lines, wanted, strict=True):
        assert re.match(saying(*parts), line), line


def test_many_ranks_are_told_in_a_few_lines():
    mine = report(waiting("a", 1, 61.0))
    text = describe({rank: mine if rank == 0 else None for rank in range(1000)}, mine.oldest_wait, [*range(1, 1000)])
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 991 more did not" in text and len(text.splitlines()) == 11


def test_a_worker_knows_what_it_has_begun_and_waits_for():
    before = own_collectives().get("watch/x")
    assert before is None
    for number in (1, 2):
        x = tracing.count(tf.constant([1.0]), "watch/x", "all_to_all")
        assert own_collectives()["watch/x"].begun == number and own_collectives()["watch/x"].waits
        tracing.done(x, "watch/x")
        assert not own_collectives()["watch/x"].waits
    assert 0 <= own_collectives()["watch/x"].seconds < 60
    # What people reset is not what workers compare.
    assert sok.trace is not None and tracing.collective_counts(reset=True)["by_name"]["watch/x"]["collectives"] == 2
    assert "watch/x" not in tracing.collective_counts()["by_name"]
    assert own_collectives()["watch/x"].begun == 2


def test_a_job_does_not_know_what_one_before_it_has_begun():
    tracing.count(tf.constant([1.0]), "watch/of_a_step_that_failed", "all_to_all")
    assert own_collectives()["watch/of_a_step_that_failed"].waits
    _ops.forget_collectives()
    assert own_collectives() == {}
    tracing.done(tracing.count(tf.constant([1.0]), "watch/y", "all_to_all"), "watch/y")
    assert {name: one.begun for name, one in own_collectives().items()} == {"watch/y": 1}


def test_the_place_is_the_line_of_the_program():
    seen = []
    line = sys._getframe().f_lineno + 1
    thread = threading.Thread(target=lambda: seen.append(own_place())); thread.start(); thread.join()  # fmt: skip # noqa: E702
    (place,) = seen
    assert place.startswith(f"{os.path.abspath(__file__)}:{line} in test_the_place")


@pytest.fixture
def no_job():
    sok.shutdown()
    yield
    sok.shutdown()


@pytest.mark.parametrize("deadline", ["soon", -1, True, float("nan"), float("inf"), [1]])
def test_a_deadline_is_seconds(no_job, deadline):
    for _ in ("the first call", "a repeated call"):
        with pytest.raises(ValueError, match=saying("`deadline`", "seconds", repr(deadline))):
            sok.Init(deadline=deadline)
        sok.Init(deadline=5)


def test_a_repeated_call_may_say_the_deadline_again(no_job):
    sok.Init(deadline=5)
    sok.Init(deadline=5.0)
    with pytest.raises(ValueError, match=saying("deadline=5.0", "deadline=6", "sok.shutdown")):
        sok.Init(deadline=6)


def test_the_environment_tells_the_deadline(monkeypatch):
    monkeypatch.delenv("SOK_DEADLINE", raising=False)
    assert checked_deadline(None) == 1800
    monkeypatch.setenv("SOK_DEADLINE", "12.5")
    assert checked_deadline(None) == 12.5 and checked_deadline(0) == 0
    monkeypatch.setenv("SOK_DEADLINE", "soon")
    with pytest.raises(ValueError, match=saying("SOK_DEADLINE", "'soon'")):
        checked_deadline(None)
