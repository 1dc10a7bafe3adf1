"""python -m benchmarks"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import driver, jobs, machine, report, workloads
from benchmarks.judge import Result
from benchmarks.workloads import ROOT

DEFAULT_OUT = ROOT / "build" / "bench" / "results"
QUICK_S = 165.0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures sok beside the machine's limit and every installed peer. docs/performance.md explains.",
        epilog="python -m benchmarks growth --help: how cost grows",
    )
    made.add_argument("--quick", action="store_true", help="a few cases, within three minutes")
    made.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="cases or jobs that begin like this; repeatable"
    )
    made.add_argument("--list", action="store_true", help="print jobs, cases and targets, run nothing")
    made.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_OUT,
        metavar="DIR",
        help=f"results go here (default {DEFAULT_OUT.relative_to(ROOT)})",
    )
    made.add_argument("--threads", type=int, default=2, metavar="N", help="of every contestant (default 2)")
    made.add_argument(
        "--contestants", default="", metavar="A,B", help="only these beside sok: ref, tf, torch, fbgemm, tfra"
    )
    made.add_argument("--windows", type=int, metavar="N", help="windows per contestant and case")
    made.add_argument("--window", type=float, metavar="S", help="seconds of a window")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["growth"]:
        from benchmarks import growth

        return growth.main(arguments[1:])
    options = parser().parse_args(arguments)
    selected = list(jobs.select(jobs.all_jobs(), options.only, options.quick))
    if not selected:
        print(f"no case begins with {' or '.join(map(repr, options.only))}; --list shows all", file=sys.stderr)
        return 2
    if options.list:
        print(listing(selected))
        return 0
    return run(options, selected)


def listing(selected: Sequence[jobs.Job]) -> str:
    lines = []
    for job in selected:
        lines.append(f"{job.name}: {job.sizes or 'figures'} ({', '.join(job.contestants)})")
        for case in job.cases:
            targets = "; ".join(check.text() for check in case.checks) or "no target"
            lines.append(f"    {'quick ' if case.quick else '      '}{case.name}: {targets}")
    return "\n".join(lines)


def pace_of(options: argparse.Namespace) -> driver.Pace:
    base = driver.QUICK if options.quick else driver.FULL
    return driver.Pace(options.windows or base.windows, options.window or base.window_s, base.case_s)


def context_of(options: argparse.Namespace, pace: driver.Pace) -> dict[str, Any]:
    return {
        "date": report.now(),
        "threads": options.threads,
        "windows": pace.windows,
        "window_s": pace.window_s,
        "quick": options.quick,
        "machine": machine.describe(),
        "versions": machine.versions(),
    }


def run(options: argparse.Namespace, selected: Sequence[jobs.Job]) -> int:
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    pace = pace_of(options)
    if options.quick:
        pace.deadline = started + QUICK_S
    context = context_of(options, pace)
    print(report.header(context), flush=True)
    wanted = [name for name in options.contestants.split(",") if name]
    results: list[Result] = []
    lines = options.out / "results.jsonl"
    with lines.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"context": context}) + "\n")
        for job in selected:
            if pace.left_s <= 0:
                got = driver.left_out(job, driver.TIME_IS_UP)
            else:
                workloads.ensure(job.parameters["kind"])
                got = driver.run_job(job, options.threads, pace, wanted, _progress)
            for result in got:
                results.append(result)
                line = json.dumps(result.as_json())
                print(line, flush=True)
                file.write(line + "\n")
                file.flush()
    _progress("")
    context["seconds"] = round(time.monotonic() - started, 1)
    text = "\n".join([report.header(context), "", report.table(results), report.footer(context, results)])
    print("\n" + text)
    (options.out / "summary.txt").write_text(text + "\n", encoding="utf-8")
    write_charts(options.out, context, results)
    return 0


def write_charts(out: Path, context: dict[str, Any], results: Sequence[Result]) -> None:
    """chart.png and index.html; without matplotlib the page has no chart, and says so."""
    try:
        from benchmarks import charts
    except ImportError as error:
        (out / "index.html").write_text(report.page(context, results, f"<p>No chart: {error}.</p>"), encoding="utf-8")
        print(f"no chart.png: {error}", file=sys.stderr)
        return
    figure = charts.draw(context, results)
    charts.write_png(figure, out / "chart.png")
    (out / "index.html").write_text(report.page(context, results, charts.svg(figure)), encoding="utf-8")
    print(f"\nchart: {out / 'chart.png'}   page: {out / 'index.html'}   lines: {out / 'results.jsonl'}")


_started = time.monotonic()


def _progress(text: str) -> None:
    if text:
        text = f"{time.monotonic() - _started:6.1f} s  {text}"
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:110]}", end="", file=sys.stderr, flush=True)
    elif text:
        print(f"  {text}", file=sys.stderr, flush=True)
