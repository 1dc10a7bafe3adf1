"""How cost grows, the instruction guard, and times of collectives: their arithmetic."""

import json
import types

import pytest

from benchmarks import growth, guard, timeline
from benchmarks.statistics import Window, summarize

CONTEXT = {
    "machine": {"usable_cores": 2, "cpu": "A", "caches": {"L2": 2 * 2**20}},
    "date": "2026-01-02",
    "versions": {"sok": "a"},
}


def points(*pairs):
    return [growth.Point(value, summarize([Window((ms / 1e3,), 0.0)]), ids=1000.0) for value, ms in pairs]


def test_slope_is_the_exponent():
    assert growth.slope(points((10, 1.0), (100, 10.0)), 0) == pytest.approx(1.0)
    assert growth.slope(points((10, 5.0), (1000, 5.0)), 0) == pytest.approx(0.0)


def test_bend_is_where_the_exponent_changes_most():
    assert growth.bend(points((1, 1.0), (10, 1.1), (100, 1.2), (1000, 12.0))) == 100
    assert growth.bend(points((1, 1.0), (10, 10.0), (100, 100.0))) is None
    assert growth.bend(points((1, 1.0))) is None


@pytest.mark.parametrize("sweep", growth.SWEEPS, ids=lambda sweep: sweep.name)
def test_every_sweep_explains_itself_in_a_line(sweep):
    text = growth.explanation(sweep, points(*((v, 1.0 + i * i) for i, v in enumerate(sweep.values))), CONTEXT)
    assert len(text) > 40 and "\n" not in text
    assert growth.explanation(sweep, points((1, 1.0)), CONTEXT) == "too few points to say anything"


def test_points_that_do_not_fit_are_left_out_with_their_need():
    rows = next(sweep for sweep in growth.SWEEPS if sweep.name == "rows")
    assert growth.why_left_out(rows, 10**5, available_gib=8.0) == ""
    assert growth.why_left_out(rows, 10**8, available_gib=2.0).startswith("needs ")


def test_memory_estimate_covers_the_table():
    rows = next(sweep for sweep in growth.SWEEPS if sweep.name == "rows")
    parameters = rows.parameters(10**8)
    table = 10**8 * (parameters["dim"] * 2 * 4 + 8)
    assert growth.gib_of(parameters) * growth.GIB > table


def test_a_sweep_is_measured_again_and_the_others_stay(tmp_path, monkeypatch, capsys):
    pytest.importorskip("benchmarks.charts")
    taken = []

    def measure(sweep, value, threads, pace):
        taken.append(sweep.name)
        return points((value, float(len(taken))))[0]

    monkeypatch.setattr(growth, "measure", measure)
    out = ["--quick", "--out", str(tmp_path)]
    assert growth.main(out) == 0
    before = growth.read(tmp_path / "growth.jsonl", {"machine": growth.machine.describe()})
    taken.clear()
    assert growth.main([*out, "--only", "dim"]) == 0
    after = growth.read(tmp_path / "growth.jsonl", {"machine": growth.machine.describe()})
    assert set(taken) == {"dim"} and list(after) == list(before) == [sweep.name for sweep in growth.SWEEPS]
    assert after["rows"] == before["rows"] and after["dim"] != before["dim"]
    assert "kept from the run before: rows, batch, tables, workers" in capsys.readouterr().out
    assert growth.read(tmp_path / "growth.jsonl", {"machine": {"cpu": "another"}}) == {}


def test_growth_is_drawn(tmp_path):
    charts = pytest.importorskip("benchmarks.charts")
    measured = [(growth.SWEEPS[0], points((10, 1.0), (100, 2.0)), ["1,000: needs 9 GiB"]), (growth.SWEEPS[1], [], [])]
    charts.write_png(charts.draw_growth(CONTEXT, measured), tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("now", "status", "word"),
    [(100, 0, "ok"), (110, 0, "ok"), (111, 1, "WORSE"), (80, 0, "better: record it")],
)
def test_guard_allows_a_tenth(capsys, now, status, word):
    assert guard.judge("me", {"generic": {"find": now}}, {"me": {"generic": {"find": 100}}}) == status
    assert word in capsys.readouterr().out


def test_guard_without_baseline_for_this_compiler_skips_loudly(capsys):
    assert guard.judge("me", {"generic": {"find": 1}}, {"you": {}}) == 0
    out = capsys.readouterr().out
    assert "SKIPPED: no baseline for me (there are: you)" in out


def test_guard_fails_for_a_kernel_without_baseline(capsys):
    assert guard.judge("me", {"avx2": {"find": 1}}, {"me": {"generic": {"find": 1}}}) == 1
    assert "find, avx2 has no baseline" in capsys.readouterr().out


def test_guard_without_valgrind_skips_loudly(monkeypatch, capsys):
    monkeypatch.setattr(guard.shutil, "which", lambda name: None)
    assert guard.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("SKIPPED: instructions were NOT compared") and "apt-get install valgrind" in out


def test_guard_reads_what_callgrind_says():
    assert guard.collected("==1== Events    : Ir\n==1== Collected : 2297445\n") == 2297445
    for text in ("", "==1== Collected : 0"):
        with pytest.raises(RuntimeError, match="counted nothing"):
            guard.collected(text)


def test_guard_fails_where_initial_values_are_scalar_code(monkeypatch, tmp_path):
    said = ["vpmuludq %ymm0,%ymm1,%ymm2"]
    monkeypatch.setattr(guard.shutil, "which", lambda name: name)
    monkeypatch.setattr(guard.subprocess, "run", lambda *_, **__: types.SimpleNamespace(stdout=said[0]))
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "row_kernels_avx2.cc.o").touch()
    guard.check_vectors(tmp_path)
    said[0] = "imul %eax,%ebx"
    with pytest.raises(RuntimeError, match="FillUniform is scalar code"):
        guard.check_vectors(tmp_path)


def test_guard_updates_one_compiler_and_keeps_the_others(tmp_path):
    path = tmp_path / "baseline.json"
    guard.write_baseline(path, "a", {"generic": {"find": 1}})
    guard.write_baseline(path, "b", {"generic": {"find": 2}})
    guard.write_baseline(path, "a", {"generic": {"find": 3}})
    assert guard.read_baseline(path) == {"a": {"generic": {"find": 3}}, "b": {"generic": {"find": 2}}}


def test_recorded_baseline_has_all_kernels():
    recorded = guard.read_baseline(guard.BASELINE)
    assert recorded
    for counts in recorded.values():
        for kernels in counts.values():
            assert set(kernels) == set(guard.KERNELS)


def test_profile_gives_the_time_of_each_collective():
    pair = lambda n, begin, end: [  # noqa: E731
        {"ph": "b", "ts": begin, "id2": {"local": n}, "args": {"collective": "sok/keys"}},
        {"ph": "e", "ts": end, "id2": {"local": n}},
    ]
    others = [{"ph": "X", "ts": 5.0, "dur": 1.0}, {"ph": "M"}, {"ph": "b", "ts": 9e6, "id2": {"local": "open"}}]
    text = json.dumps({"traceEvents": pair("2", 2e6, 2e6 + 3000) + others + pair("1", 0.0, 1000.0)})
    assert timeline.by_collective(text, 2) == {"sok/keys": {"took_ms": 2.0}}
