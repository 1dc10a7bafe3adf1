"""Ratios, targets and verdicts."""

import pytest

from benchmarks.job import Case, Check, Job
from benchmarks.jobs import all_jobs, select
from benchmarks.judge import best_peer, judge, make_result, verdict
from benchmarks.statistics import Window, summarize


def figure(ms):
    return summarize([Window((ms / 1e3,), 0.0)])


FIGURES = {"sok": figure(10.0), "ref": figure(9.0), "tf": figure(50.0), "torch": figure(12.0)}


@pytest.mark.parametrize(
    ("check", "is_met", "value"),
    [
        (Check(against="ref", at_least=0.85), True, 0.9),
        (Check(against="ref", at_least=0.95), False, 0.9),
        (Check(against="tf", at_least=5), True, 5.0),
        (Check(against="tf", at_least=5.1), False, 5.0),
        (Check(against="best peer", at_least=1), True, 1.2),
        (Check(against="fbgemm", at_least=6), None, None),
        (Check(under_ms=10.5), True, 10.0),
        (Check(under_ms=10), False, 10.0),
        (Check(figure="import_s", at_most=0.3), True, 0.3),
        (Check(figure="import_s", at_most=0.2), False, 0.3),
        (Check(figure="tracing_s", at_most=3), None, None),
    ],
)
def test_check(check, is_met, value):
    finding = judge(check, "sok", FIGURES, {"import_s": 0.3})
    assert finding.is_met is is_met
    assert finding.value == (None if value is None else pytest.approx(value))


def test_nothing_is_judged_without_the_subject():
    others = {name: one for name, one in FIGURES.items() if name != "sok"}
    assert judge(Check(against="tf", at_least=1), "sok", others, {}).is_met is None
    assert judge(Check(under_ms=1), "sok", others, {}).is_met is None


def test_best_peer_is_no_reference_and_none_of_ours():
    figures = {**FIGURES, "limits": figure(1.0), "sok-1x2": figure(2.0), "sok-lazyadam": figure(3.0)}
    assert best_peer(figures) == "torch"
    assert best_peer({"sok": figure(1.0), "ref": figure(1.0)}) is None


@pytest.mark.parametrize(
    ("outcomes", "word"),
    [
        ([], "no target"),
        ([True, True], "met"),
        ([True, None], "met so far"),
        ([None], "not judged"),
        ([True, None, False], "not met"),
    ],
)
def test_verdict(outcomes, word):
    checks = {True: Check(under_ms=11), False: Check(under_ms=1), None: Check(against="nobody", at_least=1)}
    assert verdict([judge(checks[one], "sok", FIGURES, {}) for one in outcomes]) == word


def test_ratio_says_how_many_times_as_long_as_the_subject_another_takes():
    job = Job("job", {"kind": "w2"}, ("sok", "tf"), ())
    result = make_result(job, Case("case", "zipf"), FIGURES, {"fbgemm": "not installed"}, {}, {}, [])
    assert result.ratio("tf") == pytest.approx(5.0)
    assert result.ratio("fbgemm") is None
    line = result.as_json()
    assert line["ratios"] == {"ref": 0.9, "tf": 5.0, "torch": 1.2}
    assert line["absent"] == {"fbgemm": "not installed"}
    assert line["best_peer"] == "torch"


def test_every_contestant_of_a_check_takes_part_in_its_job():
    for job in all_jobs():
        for case in job.cases:
            for check in case.checks:
                assert check.against in ("", "best peer", *job.contestants), f"{case.name}: {check.text()}"


def test_names_of_cases_are_unique():
    names = [case.name for job in all_jobs() for case in job.cases]
    assert len(names) == len(set(names))


def test_only_selects_by_the_beginning_of_job_or_case():
    assert {job.name for job in select(all_jobs(), ["w3"], False)} == {"w3"}
    (job,) = select(all_jobs(), ["W1 find, 64 floats, uni"], False)
    assert [case.name for case in job.cases] == ["W1 find, 64 floats, uniform"]
    assert list(select(all_jobs(), ["W9"], False)) == []


def test_quick_selects_marked_cases_and_only_overrules_it():
    quick = [case for job in select(all_jobs(), [], True) for case in job.cases]
    assert quick and all(case.quick for case in quick)
    assert [job.name for job in select(all_jobs(), ["w2-train/identity-adam"], True)] == ["w2-train/identity-adam"]


def test_only_wanted_distributions_are_prepared():
    (job,) = select(all_jobs(), ["W2 train, identity, adagrad, uni"], False)
    assert job.parameters["distributions"] == ["uniform"]
    (job,) = select(all_jobs(), ["w1/16"], False)
    assert job.parameters["distributions"] == ["zipf", "uniform"]
    (job,) = select(all_jobs(), ["w3"], False)
    assert "distributions" not in job.parameters
