"""python -m benchmarks growth: how the cost of a training step grows with rows, dim, batch, tables and workers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import driver, machine, peers, report
from benchmarks.job import GIB, Case, Job
from benchmarks.statistics import Figure, summarize
from benchmarks.workloads import ROOT

DEFAULT_OUT = ROOT / "build" / "bench" / "growth"
BASE = {
    "kind": "w2",
    "tables": 8,
    "rows": 1_000_000,
    "dim": 16,
    "batch": 4096,
    "hotness": 10,
    "hashed": True,
    "combiner": "sum",
    "optimizer": "adagrad",
    "distributions": ["zipf"],
}
_MEAN_HOTNESS = 5.5
_INDEX_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Sweep:
    """One size that varies, everything else as in BASE but for `fixed`."""

    name: str
    axis: str
    values: tuple[int, ...]
    quick: tuple[int, ...]
    fixed: dict[str, Any]
    explain: Callable[[Sequence[Point], dict[str, Any]], str]

    def parameters(self, value: int) -> dict[str, Any]:
        more = {} if self.name == "workers" else {self.name: value}
        made = {**BASE, **self.fixed, **more}
        ids = made["tables"] * made["batch"] * _MEAN_HOTNESS
        # Eight batches, but no more than half a gigabyte of ids.
        return {**made, "batches": int(max(1, min(8, 2**29 / (8 * ids))))}


@dataclasses.dataclass(frozen=True)
class Point:
    """One measured place of a sweep."""

    value: int
    figure: Figure
    ids: float  # of one step

    @property
    def ns_per_id(self) -> float:
        return 1e6 * self.figure.ms / self.ids


def gib_of(parameters: dict[str, Any], workers: int = 1) -> float:
    """Memory that a point takes, with everything that is not the tables."""
    floats = parameters["dim"] * {"sgd": 1, "adagrad": 2}.get(parameters["optimizer"], 3)
    rows = parameters["tables"] * parameters["rows"] * (4 * floats + _INDEX_BYTES) * 1.25
    ids = parameters["tables"] * parameters["batch"] * _MEAN_HOTNESS
    step = 8 * ids * parameters["batches"] + 4 * parameters["dim"] * (
        2 * ids + 3 * parameters["tables"] * parameters["batch"]
    )
    return (rows + step) / GIB + 0.8 * workers


def ids_of(parameters: dict[str, Any]) -> float:
    return parameters["tables"] * parameters["batch"] * _MEAN_HOTNESS


def slope(points: Sequence[Point], i: int) -> float:
    """Exponent of growth between points i and i + 1: 0 is flat, 1 in proportion."""
    a, b = points[i], points[i + 1]
    return math.log(b.figure.ms / a.figure.ms) / math.log(b.value / a.value)


def bend(points: Sequence[Point]) -> int | None:
    """The value at which the exponent changes most; None if it nowhere changes by a quarter."""
    changes = [(abs(slope(points, i) - slope(points, i - 1)), points[i].value) for i in range(1, len(points) - 1)]
    change, value = max(changes, default=(0.0, 0))
    return value if change >= 0.25 else None


def _grown(points: Sequence[Point]) -> str:
    first, last = points[0], points[-1]
    times = last.figure.ms / first.figure.ms
    return f"{last.value / first.value:,.0f} times the size takes {times:,.{0 if times >= 10 else 1}f} times as long"


def _at_bend(points: Sequence[Point], why: str) -> str:
    place = bend(points)
    return "; no bend to speak of" if place is None else f"; bends at {place:,}: {why}"


def explain_rows(points: Sequence[Point], context: dict[str, Any]) -> str:
    caches = context["machine"]["caches"]
    sizes = ", ".join(f"{name} at {size // _ROW_BYTES:,} rows" for name, size in caches.items() if name != "L1d")
    return f"{_grown(points)}, since a step touches the rows of its ids only" + _at_bend(
        points, f"rows and index leave a cache ({sizes}), and Zipf ids repeat less in a larger table"
    )


def explain_dim(points: Sequence[Point], context: dict[str, Any]) -> str:
    return _grown(points) + _at_bend(
        points, "below, a key costs more than its row (finding it, summing duplicates); above, the row's cache lines do"
    )


def explain_batch(points: Sequence[Point], context: dict[str, Any]) -> str:
    least = min(point.ns_per_id for point in points)
    enough = next(point.value for point in points if point.ns_per_id <= 1.25 * least)
    return (
        f"{_grown(points)}; from a batch of {enough:,} on an id costs within a quarter of the least ({least:.0f} ns): "
        "below, calling a step dominates; above, only ids count, and repeated ones share their row's update"
    )


def explain_tables(points: Sequence[Point], context: dict[str, Any]) -> str:
    per_table = 1e3 * points[-1].figure.ms / points[-1].value
    return f"{_grown(points)}: {per_table:.0f} us a table at the end" + _at_bend(
        points, "below, what a step costs once dominates; above, what each table adds (its tensors, its ids)"
    )


def explain_workers(points: Sequence[Point], context: dict[str, Any]) -> str:
    cores = context["machine"]["usable_cores"]
    gains = ", ".join(f"{point.value}: {points[0].figure.ms / point.figure.ms:.2f}x" for point in points[1:])
    return (
        f"same global batch, 1 thread each; speed beside 1 worker: {gains}. This machine has {cores} cores: "
        f"up to {cores} workers gain what the exchange leaves, more can only lose to it"
    )


_ROWS = {"tables": 1, "dim": 4, "batch": 32768}
_ROW_BYTES = 4 * 2 * _ROWS["dim"] + _INDEX_BYTES
_THREES = tuple(3**i for i in range(7))

SWEEPS = (
    Sweep("rows", "rows in the table", tuple(10**i for i in range(5, 9)), (10**5, 10**6), _ROWS, explain_rows),
    Sweep(
        "dim", "floats in a row", tuple(2**i for i in range(2, 10)), (4, 64), {"tables": 1, "batch": 16384}, explain_dim
    ),
    Sweep("batch", "samples in a batch", tuple(2**i for i in range(8, 19, 2)), (2**8, 2**12), {}, explain_batch),
    Sweep("tables", "tables", (1, 3, 10, 30, 100, 300, 1000), (1, 30), {"rows": 10_000, "batch": 512}, explain_tables),
    Sweep(
        "workers",
        "workers",
        (1, 2, 3, 4),
        (1, 2),
        {"tables": 26, "rows": 100_000, "batch": 12288},
        explain_workers,
    ),
)


def measure(sweep: Sweep, value: int, threads: int, pace: driver.Pace) -> Point:
    """One point. Raises driver.Failed."""
    workers = value if sweep.name == "workers" else 1
    name = f"sok-{workers}x1" if sweep.name == "workers" else "sok"
    parameters = sweep.parameters(value)
    job = Job(f"growth/{sweep.name}-{value}", parameters, (name,), (Case(sweep.name, "zipf"),), subject=name)
    reason = peers.why_absent(name)
    if reason:
        raise driver.Failed(reason)
    contestant = driver.Contestant(name, job, threads)
    try:
        contestant.wait_ready(600.0)
        warm = contestant.steps("zipf", 3)
        count = max(1, int(pace.window_s / warm.seconds[-1]))
        windows = [contestant.steps("zipf", count) for _ in range(pace.windows)]
    finally:
        contestant.close()
    return Point(value, summarize(windows), ids_of(parameters))


def why_left_out(sweep: Sweep, value: int, available_gib: float) -> str:
    """Why a point cannot be measured on this machine; empty if it can."""
    workers = value if sweep.name == "workers" else 1
    needed = gib_of(sweep.parameters(value), workers)
    return f"needs {needed:.1f} GiB, {available_gib:.1f} are free" if needed > available_gib else ""


def run(sweep: Sweep, value: int, threads: int, pace: driver.Pace) -> dict[str, Any]:
    """One line of the results: the point, or why it is left out."""
    available = machine.memory_bytes("MemAvailable") / GIB - driver.SPARE_GIB
    reason = why_left_out(sweep, value, available)
    if not reason:
        try:
            point = measure(sweep, value, threads, pace)
            return {
                "sweep": sweep.name,
                "value": value,
                "ns_per_id": round(point.ns_per_id, 2),
                **point.figure.as_json(),
            }
        except driver.Failed as failure:
            reason = str(failure)
    return {"sweep": sweep.name, "value": value, "left_out": reason}


def point_of(sweep: Sweep, line: dict[str, Any]) -> Point:
    figure = Figure(**{field.name: line[field.name] for field in dataclasses.fields(Figure)})
    return Point(line["value"], figure, ids_of(sweep.parameters(line["value"])))


def read(path: Path, context: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Lines of an earlier run on the same machine, by sweep: a sweep that was disturbed can be measured again alone."""
    if not path.exists():
        return {}
    first, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    if first["context"]["machine"]["cpu"] != context["machine"]["cpu"]:
        return {}
    by_sweep: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_sweep.setdefault(line["sweep"], []).append(line)
    return by_sweep


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks growth", description=__doc__)
    made.add_argument(
        "--only",
        action="append",
        default=[],
        choices=[sweep.name for sweep in SWEEPS],
        help="repeatable; the others stay as they are in DIR",
    )
    made.add_argument("--quick", action="store_true", help="two points of each, to see that it works")
    made.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR")
    made.add_argument("--threads", type=int, default=2, metavar="N")
    return made


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(list(arguments))
    options.out.mkdir(parents=True, exist_ok=True)
    pace = driver.Pace(3, 0.1, 5.0) if options.quick else driver.Pace(5, 0.4, 20.0)
    started = time.monotonic()
    context: dict[str, Any] = {
        "date": report.now(),
        "threads": options.threads,
        "window_s": pace.window_s,
        "machine": machine.describe(),
        "versions": machine.versions(),
    }
    print(report.header(context), flush=True)
    kept = read(options.out / "growth.jsonl", context) if options.only else {}
    measured: list[tuple[Sweep, list[Point], list[str]]] = []
    with (options.out / "growth.jsonl").open("w", encoding="utf-8") as file:
        file.write(json.dumps({"context": context}) + "\n")
        for sweep in SWEEPS:
            lines = kept.get(sweep.name, [])
            if not options.only or sweep.name in options.only:
                lines = []
                for value in sweep.quick if options.quick else sweep.values:
                    lines.append({"date": report.now(), **run(sweep, value, options.threads, pace)})
                    print(json.dumps(lines[-1]), flush=True)
            file.writelines(json.dumps(line) + "\n" for line in lines)
            if lines:
                left_out = [f"{line['value']:,}: {line['left_out']}" for line in lines if "left_out" in line]
                measured.append((sweep, [point_of(sweep, line) for line in lines if "ms" in line], left_out))
    if kept:
        print(f"kept from the run before: {', '.join(name for name in kept if name not in options.only)}")
    lines = [report.header(context), "", *summary(measured, context)]
    lines.append(f"{(time.monotonic() - started) / 60:.1f} minutes")
    (options.out / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n" + "\n".join(lines[2:]))
    try:
        from benchmarks import charts
    except ImportError as error:
        print(f"no growth.png: {error}")
        return 0
    charts.write_png(charts.draw_growth(context, measured), options.out / "growth.png")
    print(f"plots: {options.out / 'growth.png'}")
    return 0


def explanation(sweep: Sweep, points: Sequence[Point], context: dict[str, Any]) -> str:
    """The line under a plot."""
    return sweep.explain(points, context) if len(points) >= 2 else "too few points to say anything"


def summary(measured: Sequence[tuple[Sweep, list[Point], list[str]]], context: dict[str, Any]) -> list[str]:
    lines = []
    for sweep, points, left_out in measured:
        lines.append(f"{sweep.name}: {explanation(sweep, points, context)}")
        lines += [
            f"    {p.value:>12,}  {report.milliseconds(p.figure.ms):>8} ms  {p.ns_per_id:8.1f} ns an id" for p in points
        ]
        lines += [f"    left out: {one}" for one in left_out]
    return lines
