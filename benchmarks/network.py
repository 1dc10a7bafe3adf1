"""python -m benchmarks.network: what `sok.ahead` hides of a network, two workers on two hosts.

The hosts are namespaces of this machine (examples/hosts); the network between them has a rate, by `tbf`, and a latency,
by a forwarder between TUN devices. The model is that of examples/ahead.py: in turns synchronous steps, and steps whose
keys went ahead by 1 and by 2, or keys and rows by 1. Prints what the network does beside what was asked for, then a
line of a table for each setting, of rank 0: the median of all steps in ms, with their quartiles; what each exchange
takes of a synchronous step; what is hidden of a step: the time that exchanges took beside the program, less what the
loop has waited for batches; and of rows ahead what the repair takes of a step, and how many in 100 rows are repaired.
docs/pipelines.md has the figures. Needs root. With --profile FILE it draws two steps
whose keys went ahead by 1, at the last setting.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import ROOT, CpuClock, describe, load_of_others
from benchmarks.statistics import quantile

if TYPE_CHECKING:
    from examples.hosts.namespaces import Hosts

KINDS = ("step", "keys", "rows", "grads", "dense_gradients")
# 0: synchronous; a depth of keys ahead; or keys and rows ahead, by 1.
VARIANTS = (0, 1, 2, "rows")
WARM = 4
_SECONDS = 1800.0


def settings_of(options: argparse.Namespace) -> list[tuple[str, float]]:
    return [(rate, latency) for rate in options.rates for latency in options.latencies]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latencies", type=float, nargs="+", default=[0, 0.1, 1, 5], help="milliseconds one way")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"], help="as tc has them")
    parser.add_argument("--steps", type=int, default=24, help="of each kind in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=4096, help="of both workers together")
    parser.add_argument("--vocabulary", type=int, default=100_000, help="ids of each feature")
    parser.add_argument("--profile", metavar="FILE.png", help="a picture of two steps at the last setting")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    return work(options) if options.worker else measure(options)


def measure(options: argparse.Namespace) -> int:
    from examples.hosts.namespaces import Hosts, why_not

    if reason := why_not():
        print(f"Two hosts cannot be made on this machine: {reason}.", file=sys.stderr)
        return 77
    about = describe()
    print(f"{about['cpu']}, {about['usable_cores']} cores, Linux {about['kernel']}; two hosts of one worker each")
    print(f"{options.batch_size} samples of both workers, 8 tables of dim 16, 4 ids each of {options.vocabulary:,}")
    rate, latency = settings_of(options)[0]
    with Hosts(2, rate, latency / 1e3) as hosts, tempfile.TemporaryDirectory(prefix="sok-network-") as folder:
        for rate, latency in settings_of(options):
            hosts.change(rate, latency / 1e3)
            print(about_the_wire(hosts, rate, latency), flush=True)
        return run(options, hosts, Path(folder))


def about_the_wire(hosts: Hosts, rate: str, latency: float) -> str:
    from examples.hosts.wire import measure as measure_wire

    round_trip, bits = measure_wire(hosts, seconds=1.0)
    told = f"round trip {1e3 * round_trip:.3f} ms, {bits / 1e9:.2f} Gbit/s, with nothing else on it"
    return f"network of {rate} and {latency:g} ms one way: {told}"


def run(options: argparse.Namespace, hosts: Hosts, folder: Path) -> int:
    """Lets the workers measure, setting by setting; rank 0 waits for each until the network is so."""
    from examples.hosts.main import environment, horovodrun

    worker = [sys.executable, "-m", "benchmarks.network", *sys.argv[1:], "--worker", str(folder)]
    command = horovodrun(hosts, 1, worker, discover=False)
    log = (folder / "log").open("w+")
    process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment())
    timer = threading.Timer(_SECONDS, process.kill)
    timer.start()
    print(
        "| Gbit/s | ms one way | synchronous ms | of it keys | rows | gradients | dense | ahead by 1, ms | hidden | "
        "ahead by 2, ms | hidden | rows ahead by 1, ms | hidden | repair | repaired % | others' cores |\n"
        + "|---" * 16
        + "|"
    )
    try:
        for number, (rate, latency) in enumerate(settings_of(options)):
            hosts.change(rate, latency / 1e3)
            (folder / f"go.{number}").touch()
            done = folder / f"done.{number}"
            while not done.exists() and process.poll() is None:
                time.sleep(0.05)
            if not done.exists():
                log.seek(0)
                print(f"The job ended with status {process.poll()}:\n{log.read()[-3000:]}", file=sys.stderr)
                return 1
            print(line_of(rate, latency, json.loads(done.read_text())), flush=True)
        if process.wait():
            log.seek(0)
            print(f"The job ended with status {process.returncode}:\n{log.read()[-3000:]}", file=sys.stderr)
            return 1
        if options.profile:
            draw(options.profile, folder)
        return 0
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        log.close()


def line_of(rate: str, latency: float, told: dict[str, Any]) -> str:
    """A line of the table from what rank 0 has told of a setting."""

    def spread(name: str) -> str:
        low, middle, high = (1e3 * quantile(told[name]["seconds"], q) for q in (0.25, 0.5, 0.75))
        return f"{middle:.1f} ({low:.1f} to {high:.1f})"

    cells = [rate.removesuffix("gbit"), f"{latency:g}", spread("0")]
    cells += [f"{told['0'][kind]:.1f}" for kind in KINDS[1:]]
    for depth in VARIANTS[1:]:
        cells += [spread(str(depth)), f"{told[str(depth)]['hidden']:.1f}"]
    cells += [f"{told['rows']['rows']:.1f}", f"{told['rows']['repaired']:.0f}"]
    return f"| {' | '.join([*cells, format(told['others'], '.1f')])} |"


def draw(path: str, folder: Path) -> None:
    files = [str(folder / f"profile.rank{rank}.json") for rank in range(2)]
    command = [sys.executable, "-m", "sok", "profile", "plot", *files, "--first", "2", "--output", path]
    subprocess.run(command, check=True, cwd=ROOT)


def work(options: argparse.Namespace) -> int:
    """What each of the two workers does."""
    import sok
    from examples.ahead import Model, data

    sok.Init(global_batch_size=options.batch_size, seed=0)
    batches = data(options.steps, options.batch_size // sok.size(), options.vocabulary).cache()
    models = {depth: Model(f"by_{depth}", options.vocabulary) for depth in VARIANTS}
    loops = {depth: loop_of(depth, batches, models[depth]) for depth in VARIANTS}
    for depth in VARIANTS:
        turn(models[depth], loops[depth])  # traces, makes rows, fills the cache
    for number in range(len(settings_of(options))):
        while sok.rank() == 0 and not (options.worker / f"go.{number}").exists():
            time.sleep(0.02)
        sok.barrier()
        told = at_a_setting(options.turns, models, loops)
        if sok.rank() == 0:
            partial = options.worker / f"partial.{number}"
            partial.write_text(json.dumps(told))
            partial.rename(options.worker / f"done.{number}")
    if options.profile:
        with sok.profile(str(options.worker / "profile.json")):  # each rank adds its name
            turn(models[1], loops[1], steps=6)
    return 0


def loop_of(variant: int | str, batches: Any, model: Any) -> Any:
    """An iterable of batches with their tickets, or None."""
    import sok

    if variant == 0:
        return _Synchronous(batches)
    schedule = {"depth": 1, "rows": True} if variant == "rows" else {"depth": variant}
    return sok.ahead(batches, model.look_up, **schedule)


class _Synchronous:
    """Batches without tickets."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return ((batch, None) for batch in self._batches)


def repaired_of(model: Any) -> tuple[int, int]:
    """How many rows this worker has sent ahead, and again."""
    import sok

    counts = [sok.rows_ahead(table) for table in model.tables]
    return sum(count["sent"] for count in counts), sum(count["repaired"] for count in counts)


def at_a_setting(turns: int, models: dict[Any, Any], loops: dict[Any, Any]) -> dict[str, Any]:
    """All kinds of steps in turns: seconds of each step, and milliseconds of a step of each exchange and hidden."""
    told: dict[str, Any] = {str(depth): {"seconds": []} for depth in VARIANTS}
    sums: dict[str, dict[str, float]] = {str(depth): {} for depth in VARIANTS}
    before, own, rows = CpuClock.read(), time.process_time(), repaired_of(models["rows"])
    for number in range(turns):
        for depth in (*VARIANTS[number % len(VARIANTS) :], *VARIANTS[: number % len(VARIANTS)]):
            seconds, took = turn(models[depth], loops[depth])
            told[str(depth)]["seconds"] += seconds[WARM:]
            for kind, value in took.items():
                sums[str(depth)][kind] = sums[str(depth)].get(kind, 0.0) + value / turns
    for depth, took in sums.items():
        told[depth] |= took
    sent, repaired = (now - then for now, then in zip(repaired_of(models["rows"]), rows, strict=True))
    told["rows"]["repaired"] = 100 * repaired / max(sent, 1)
    # The other worker takes about as much; the rest is the forwarder's, and other people's.
    told["others"] = load_of_others(before, CpuClock.read(), 2 * (time.process_time() - own))
    return told


def turn(model: Any, loop: Any, steps: int | None = None) -> tuple[list[float], dict[str, float]]:
    """One pass over the batches: seconds of each step, and of a step what each exchange took and was hidden, in ms."""
    import sok

    seconds: list[float] = []
    waited = 0.0
    with sok.trace() as trace:
        start = time.perf_counter()
        for batch, ticket in loop:
            waited += time.perf_counter() - start
            float(model.step(batch, ticket))
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
            if len(seconds) == steps:
                break
    took = dict.fromkeys([*KINDS[1:], "hidden"], 0.0)
    beside = 0.0
    for name, count in trace.by_name.items():
        if "/ahead" in name:
            beside += count["seconds"]
            continue
        for kind in KINDS[1:]:
            if kind in name.split("/"):
                took[kind] += 1e3 * count["seconds"] / len(seconds)
    took["hidden"] = 1e3 * max(0.0, beside - waited) / len(seconds)
    return seconds, took


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main())
