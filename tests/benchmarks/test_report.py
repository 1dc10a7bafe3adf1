"""What a reader sees: table, page, chart, names of who is absent."""

import re

import pytest

from benchmarks import cli, report
from benchmarks.job import Case, Check, Job
from benchmarks.jobs import all_jobs
from benchmarks.judge import make_result
from benchmarks.statistics import Window, summarize

CONTEXT = {
    "date": "2026-01-02T03:04:05+00:00",
    "threads": 2,
    "window_s": 0.4,
    "seconds": 90.0,
    "machine": {
        "cpu": "A Processor",
        "cores": 4,
        "usable_cores": 2,
        "caches": {"L1d": 48 * 2**10, "L2": 2 * 2**20},
        "memory_gib": 23.5,
        "memory_available_gib": 20.0,
        "huge_pages": "madvise",
        "isa": ["avx2"],
        "sok_isa": "chosen at run time",
        "kernel": "6.1",
        "virtual": True,
    },
    "versions": {"sok": "abc", "tensorflow": "2.21.0"},
}


def figure(ms, others=0.0):
    return summarize([Window((ms / 1e3,), others)])


def result(name="W2 forward", inspected=None, **milliseconds):
    job = Job("w2", {"kind": "w2"}, ("sok", "ref", "tf", "torch"), (), sizes="26 tables")
    case = Case(name, "zipf", (Check(against="ref", at_least=0.8), Check(against="tf", at_least=2)))
    figures = {contestant: figure(ms) for contestant, ms in milliseconds.items()}
    absent = {"torch": "not installed (run: make bench-peers)"}
    return make_result(job, case, figures, absent, {"sok": "abc: <one> lookup"}, inspected or {}, [])


def test_row_has_our_figure_the_reference_the_best_peer_and_the_verdict():
    cells = report.row(result(sok=2.0, ref=1.8, tf=19.0))
    assert cells == [
        "W2 forward",
        "2.00",
        "0%",
        "1.80 (0.90x)",
        "19.0 tf",
        "tf 9.5x",
        ">= 0.8 x ref; >= 2x tf",
        "yes",
    ]


def test_table_names_absent_peers_and_misses():
    text = report.table([result(sok=2.0, ref=1.0, tf=19.0), result("W2 train", sok=2.0, ref=1.9, tf=3.0)])
    assert "absent: PyTorch: not installed (run: make bench-peers) (everywhere)" in text
    assert "W2 forward: >= 0.8 x ref: 0.5 NOT MET" in text
    assert "W2 train: >= 2x tf: 1.5 NOT MET" in text
    assert "Targets: 2 not met." in text


def test_table_says_what_is_absent_in_one_case_only():
    other = result("W3", sok=1.0)
    other.absent["tf"] = "ended with status 1"
    text = report.table([result(sok=1.0), other])
    assert "absent: TensorFlow: ended with status 1 (W3)" in text


def test_figures_that_are_not_times_get_lines_of_their_own():
    one = {"kind": "all_to_all", "collectives": 3.0, "bytes": 1e6, "took_ms": 1.25}
    by_name = {"sok/table1/keys/0": one, "sok/table12/keys/0": one}
    text = report.table([result(inspected={"collectives": 6.0, "by_name": by_name}, sok=1.0)])
    assert "W2 forward: collectives 6" in text
    assert "6 all_to_all, 2,000,000 bytes, took 2.50 ms: sok/table*/keys/*" in text


@pytest.mark.parametrize(
    ("ms", "text"), [(0.5, "0.50"), (7.654, "7.65"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12,346")]
)
def test_milliseconds_have_three_digits(ms, text):
    assert report.milliseconds(ms) == text


@pytest.mark.parametrize(("ratio", "text"), [(0.873, "0.87x"), (1.249, "1.25x"), (6.14, "6.1x"), (139.7, "140x")])
def test_ratios_have_two_digits_or_so(ratio, text):
    assert report.times(ratio) == text


def test_header_and_footer_say_machine_versions_and_load():
    text = report.header(CONTEXT)
    for part in ("A Processor (virtual), 2 of 4 cores", "L2 2 MiB", "tensorflow 2.21.0", "avx2", "2 threads"):
        assert part in text
    busy = result(sok=1.0)
    busy.figures["tf"] = figure(2.0, others=0.6)
    assert "Others kept 0.30 processors busy" in report.footer(CONTEXT, [busy])
    assert "1 of 2 figures had no quiet time" in report.footer(CONTEXT, [busy])


def test_page_is_one_file_and_escapes_what_it_shows():
    text = report.page(CONTEXT, [result(sok=2.0, ref=1.0, tf=19.0)], "<svg></svg>")
    assert "<svg></svg>" in text
    assert "&lt;one&gt; lookup" in text and "<one>" not in text
    assert 'class="miss"' in text and 'class="met"' in text
    assert not re.search(r'(src|href)="', text), "a self-contained page refers to nothing"


def test_chart_shows_every_case_with_a_ratio(tmp_path):
    charts = pytest.importorskip("benchmarks.charts")
    drawn = charts.draw(CONTEXT, [result(sok=2.0, ref=1.8, tf=19.0), result("W3 unique", sok=2.0, tf=3.0)])
    axes = drawn.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["W2 forward", "W3 unique"]
    low, high = axes.get_xlim()
    assert low < 0.9 and high > 9.5, "no point lies outside"
    charts.write_png(drawn, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert charts.svg(drawn).startswith("<svg")


def test_list_names_every_case_and_target(capsys):
    assert cli.main(["--list"]) == 0
    text = capsys.readouterr().out
    for job in all_jobs():
        for case in job.cases:
            assert case.name in text
    assert ">= 0.85 x ref" in text


def test_unknown_case_is_refused(capsys):
    assert cli.main(["--only", "W9"]) == 2
    assert "no case begins with 'W9'" in capsys.readouterr().err


def test_no_flag_passes_unknown(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--fast"])
    assert "--fast" in capsys.readouterr().err
