"""The jobs of benchmarks/group_lookup.py, and that everything that draws them knows their contestants."""

from benchmarks import charts, contestant, group_lookup, report


def test_every_contestant_has_a_module_a_title_and_a_mark():
    for job in group_lookup.jobs():
        for name in job.contestants:
            assert contestant.module_of(name)[0] in {"ours", "stock_tf"}
            assert name in report.TITLES
            assert name in charts.STYLES or name == job.subject


def test_single_lookups_are_asked_for_on_any_number_of_workers():
    assert contestant.module_of("sok-single-2x1") == ("ours", {"single": True})
    assert contestant.shape_of("sok-single-2x1") == (2, 1)
    assert contestant.shape_of("sok-single") is None


def test_every_number_of_tables_is_timed_forward_and_back_on_one_worker_and_two():
    names = {job.name for job in group_lookup.jobs()}
    for tables in group_lookup.TABLES:
        for what in ("forward", "train"):
            assert {f"group/{tables}-{what}", f"group/{tables}-{what}-2-workers"} <= names
