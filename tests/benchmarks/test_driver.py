"""Contestants as processes: taking turns, absence, failure. With programs of a few lines in the place of TensorFlow."""

import json
import sys
import textwrap

import pytest

from benchmarks import cli, contestant, driver, limits, peers
from benchmarks.contestant import Prepared, run_steps, serve
from benchmarks.job import Case, Check, Job
from benchmarks.limits import external

# A contestant that speaks the protocol: `slow` ms a step; the words after it make it misbehave.
FAKE = """
import json, os, socket, sys, time
ms, what = float(sys.argv[1]), sys.argv[2]
s = socket.socket(socket.AF_UNIX); s.connect(os.environ["SOK_BENCH_SOCKET"]); f = s.makefile("rw")
def say(x): f.write(json.dumps(x) + "\\n"); f.flush()
say({"rank": 0})
if what == "unsupported": say({"unsupported": "has no such table"}); sys.exit()
if what == "dies": print("out of luck"); sys.exit(3)
say({"ready": ["zipf", "insert"], "once": ["insert"], "about": "sleeps", "version": "fake 1"})
for line in f:
    verb, *rest = line.split()
    if verb == "quit": break
    if verb == "inspect": say({"rows": 5}); continue
    if what == "breaks": say({"error": "ValueError: no"}); continue
    name, first, count = rest[0], int(rest[1]), int(rest[2])
    if name == "insert": assert first + count <= 12
    seconds = []
    for i in range(count):
        time.sleep(ms / 1e3); seconds.append(ms / 1e3)  # not what a busy machine makes of it
    say({"seconds": seconds, "cpu_s": 0.0})
"""

PACE = driver.Pace(windows=3, window_s=0.02, case_s=1.0)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a job whose contestants are fakes: run(job, sok=(ms, what), ...)."""
    script = tmp_path / "fake.py"
    script.write_text(textwrap.dedent(FAKE))

    def go(job, **fakes):
        monkeypatch.setattr(driver, "LOGS", tmp_path)
        monkeypatch.setattr(peers, "why_absent", lambda name: "" if name in fakes else "not installed (fake)")
        monkeypatch.setattr(limits, "why_absent", lambda: "g++ is not installed")
        monkeypatch.setattr(
            driver.Contestant,
            "_command",
            lambda self, threads: [sys.executable, str(script), *map(str, fakes[self.name])],
        )
        return driver.run_job(job, 1, PACE, (), lambda text: None)

    return go


def job(*contestants, measure="zipf", gib=0.001):
    case = Case("case", measure, (Check(against="tf", at_least=2),))
    return Job("job", {"kind": "w2"}, contestants, (case,), gib=gib)


def test_contestants_take_turns_and_ratios_come_out(run):
    (result,) = run(job("sok", "tf"), sok=(1, "-"), tf=(8, "-"))
    assert result.figures["sok"].windows == PACE.windows
    assert result.ratio("tf") == pytest.approx(8)
    assert result.verdict == "met"
    assert result.about["tf"] == "fake 1: sleeps"
    assert result.inspected == {"rows": 5}


def test_absent_peers_are_named_with_the_reason(run):
    (result,) = run(job("sok", "ref", "tf", "torch"), sok=(1, "-"), tf=(8, "-"))
    assert result.absent == {"ref": "g++ is not installed", "torch": "not installed (fake)"}


@pytest.mark.parametrize(
    ("what", "reason"),
    [("unsupported", "has no such table"), ("dies", "status 3: out of luck"), ("breaks", "ValueError: no")],
)
def test_peer_that_cannot_is_absent_and_the_others_go_on(run, what, reason):
    (result,) = run(job("sok", "tf"), sok=(1, "-"), tf=(8, what))
    assert reason in result.absent["tf"]
    assert list(result.figures) == ["sok"]
    assert result.verdict == "not judged"


def test_steps_that_cannot_be_repeated_end_with_their_input(run):
    (result,) = run(job("sok", measure="insert"), sok=(1, "-"))
    assert result.figures["sok"].steps <= 12


def test_job_that_does_not_fit_says_what_it_needs(run):
    (result,) = run(job("sok", "tf", gib=10**6), sok=(1, "-"), tf=(1, "-"))
    assert result.figures == {}
    assert "needs 1000000 GiB" in result.absent["sok"]


def test_contestants_that_do_not_fit_side_by_side_run_alone(run, monkeypatch):
    monkeypatch.setattr(driver.machine, "memory_bytes", lambda field: int(7 * 2**30))
    (result,) = run(job("sok", "tf", gib=4), sok=(1, "-"), tf=(8, "-"))
    assert set(result.figures) == {"sok", "tf"}
    assert result.notes == ["not interleaved: memory for one at a time"]


def test_groups_fill_up_in_order():
    sizes = {"tf": 4.0, "torch": 3.0, "fbgemm": 2.0, "tfra": 9.0}
    groups = driver.batches_of(list(sizes), sizes.__getitem__, 7.5)
    assert groups == [["tf", "torch"], ["fbgemm"], ["tfra"]]


def test_steps_are_numbered_and_timed():
    seen = []
    answer = run_steps(seen.append, 5, 3)
    assert seen == [5, 6, 7]
    assert len(answer["seconds"]) == 3 and min(answer["seconds"]) >= 0


def test_contestant_answers_an_error_and_goes_on():
    prepared = Prepared("test")
    prepared["good"] = lambda i: i
    prepared["bad"] = lambda i: 1 // 0
    prepared.inspections["good"] = lambda: {"x": 1}
    said = []
    lines = [
        "steps bad 0 1\n",
        "steps good 0 2\n",
        "inspect good\n",
        "inspect bad\n",
        "sing\n",
        "quit\n",
        "steps good 0 1\n",
    ]
    serve(prepared, lines, said.append)
    assert "ZeroDivisionError" in said[0]["error"]
    assert len(said[1]["seconds"]) == 2
    assert said[2:4] == [{"x": 1}, {}]
    assert "unknown command 'sing'" in said[4]["error"]
    assert len(said) == 5, "nothing after quit"


@pytest.mark.parametrize(("name", "shape"), [("sok-2x1", (2, 1)), ("sok-1x2", (1, 2)), ("sok", None), ("tf", None)])
def test_shape_of(name, shape):
    assert contestant.shape_of(name) == shape


def test_peer_without_environment_is_absent(monkeypatch, tmp_path):
    monkeypatch.setenv("SOK_BENCH_PEERS", str(tmp_path))
    monkeypatch.setattr(peers, "_reasons", {})
    assert peers.why_absent("tfra") == "not installed (run: make bench-peers)"
    assert peers.why_absent("sok") == ""


def test_a_run_writes_lines_table_and_page(run, monkeypatch, tmp_path, capsys):
    one = job("sok", "tf", "torch")
    monkeypatch.setattr(cli.jobs, "all_jobs", lambda: [one])
    monkeypatch.setattr(cli.workloads, "ensure", lambda family: None)
    real = driver.run_job
    run(one, sok=(1, "-"), tf=(4, "-"))  # leaves the fakes in place
    monkeypatch.setattr(driver, "run_job", lambda j, threads, pace, wanted, say: real(j, threads, PACE, wanted, say))
    assert cli.main(["--out", str(tmp_path / "out")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert "machine" in lines[0]["context"]
    assert lines[1]["case"] == "case" and set(lines[1]["figures"]) == {"sok", "tf"}
    assert "absent: PyTorch" in (tmp_path / "out" / "summary.txt").read_text()
    assert "absent: PyTorch" in (tmp_path / "out" / "index.html").read_text()
    assert '"case": "case"' in capsys.readouterr().out


def test_lines_of_another_limit_program_are_found_again():
    text = """noise
{"case": "w1_find", "dim": 16, "dist": "zipf", "ms": 7.5, "n": 3, "ext_cpu": 0.5}
{"case": "w1_find", "dim": 64, "dist": "zipf", "ms": 9.5}
{"case": "w2_train", "dist": "zipf", "optimizer": "adagrad", "ms": 8.0}
"""
    lines = external.parse(text)
    found = external.pick(lines, {"kind": "w1", "dim": 16}, ["find/zipf", "insert/zipf"])
    assert list(found) == ["find/zipf"] and found["find/zipf"].ms == 7.5 and found["find/zipf"].quiet_windows == 0
    assert external.pick(lines, {"kind": "w2", "optimizer": "adagrad", "combiner": "sum"}, ["zipf"])["zipf"].ms == 8.0
    assert external.pick(lines, {"kind": "w2", "combiner": "sum"}, ["zipf"]) == {}


def test_limit_program_that_is_not_named_is_absent(monkeypatch, tmp_path):
    monkeypatch.delenv(external.VARIABLE, raising=False)
    with pytest.raises(external.Absent, match="not named"):
        external.program()
    monkeypatch.setenv(external.VARIABLE, str(tmp_path / "none.cpp"))
    with pytest.raises(external.Absent, match="does not exist"):
        external.program()


def test_limit_program_is_built_of_its_file_alone(monkeypatch, tmp_path):
    for name in ("limits.cpp", "probe.cpp"):  # two mains
        (tmp_path / name).write_text("int main() { return 0; }")
    monkeypatch.setattr(external, "BINARY", tmp_path / "build" / "limits")
    monkeypatch.setenv(external.VARIABLE, str(tmp_path / "limits.cpp"))
    assert external.program().exists()


def test_nothing_is_begun_when_the_time_is_up(run, monkeypatch):
    over = driver.Pace(windows=3, window_s=0.02, case_s=1.0)
    over.deadline = 0.0
    monkeypatch.setitem(globals(), "PACE", over)
    (result,) = run(job("sok", "tf"), sok=(1, "-"), tf=(1, "-"))
    assert result.figures == {}
    assert result.absent == {"sok": driver.TIME_IS_UP, "tf": driver.TIME_IS_UP}
