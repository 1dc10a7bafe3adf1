"""Runs a program over several hosts, namespaces of this machine, or checks a job over them: examples/hosts.sh."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_HERE = Path(__file__).resolve().parent
sys.path[0] = str(_HERE.parents[1])

from examples.hosts.namespaces import INTERFACE, Hosts, why_not  # noqa: E402  of this checkout

_JOB = _HERE / "job.py"
_SECONDS = 300.0  # to which a job is given
LOST_AFTER, ALLOWED = 6.0, 30.0  # seconds: job.py has half its deadline; what we allow until the host is named
_TOLERANCE = 1e-5


def horovodrun(hosts: Hosts, workers: int, command: Sequence[str], discover: bool = True) -> list[str]:
    """What runs `command` on so many workers of each host, from the first. `discover`: Horovod finds the interface."""
    where = ",".join(f"{host.name}:{workers}" for host in hosts.hosts)
    program = str(Path(sys.executable).with_name("horovodrun"))
    interface = [] if discover else ["--network-interface", INTERFACE]
    run = [program, "--gloo", "-np", str(workers * len(hosts.hosts)), *interface, "-H", where, *command]
    return hosts.command(0, run)


def environment() -> dict[str, str]:
    """Several TensorFlows share the cores of one machine."""
    path = os.pathsep.join([str(_HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **threads, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}


def job(folder: Path, command: list[str]) -> list[dict[str, Any]]:
    """Runs job.py and gives what each of its workers found."""
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, env=environment(), cwd=_HERE
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return found(folder)


def found(folder: Path) -> list[dict[str, Any]]:
    """What the workers of job.py have written, by rank."""
    files = sorted(folder.glob("*.pickle"), key=lambda path: int(path.stem))
    return [pickle.loads(path.read_bytes()) for path in files]


def rows_of(workers: list[dict[str, Any]], table: int) -> np.ndarray:
    """All rows of a table, in the order of their keys, with the keys before them."""
    keys = np.concatenate([worker["rows"][table][0] for worker in workers])
    rows = np.concatenate([worker["rows"][table][1] for worker in workers])
    order = np.argsort(keys)
    return np.column_stack([keys[order], rows[order]])


def difference(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """The largest difference of losses, dense weights and rows; infinite if they do not have the same keys."""
    pairs = [(rows_of(some, table), rows_of(others, table)) for table in range(2)]
    pairs += [(np.sum([w["losses"] for w in some], axis=0), np.sum([w["losses"] for w in others], axis=0))]
    pairs += list(zip(some[0]["dense"], others[0]["dense"], strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    return max(float(np.max(np.abs(a - b), initial=0.0)) for a, b in pairs)


def lose_a_host(hosts: Hosts, workers: int, folder: Path, discover: bool) -> tuple[list[dict[str, Any]], float, str]:
    """Runs job.py, cuts the last host off, waits for the end: what was found, seconds until it was named, output."""
    command = horovodrun(hosts, workers, [sys.executable, str(_JOB), str(folder), "--forever"], discover)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment(),
        cwd=_HERE,
    )
    timer = threading.Timer(_SECONDS, process.kill)
    timer.start()
    output, cut, named = [], 0.0, float("nan")
    name = hosts.hosts[-1].name
    try:
        for line in process.stdout or []:
            output.append(line)
            if not cut and line.endswith("checked\n"):
                time.sleep(0.5)  # all are in their steps
                hosts.cut(len(hosts.hosts) - 1)
                cut = time.monotonic()
            if cut and re.search(f"sok: rank .*host '{name}' .* cannot be reached", line) and not named >= 0:
                named = time.monotonic() - cut
        process.wait()
    finally:
        timer.cancel()
        process.kill()
    return found(folder), named, "".join(output)


def check(count: int, workers: int, discover: bool = True) -> dict[str, Any]:
    """Compares a job over hosts with one worker, and loses a host of it."""
    with tempfile.TemporaryDirectory(prefix="sok-hosts-job-") as name:
        folders = [Path(name) / what for what in ("alone", "one", "hosts")]
        for folder in folders:
            folder.mkdir()
        alone = job(folders[0], [sys.executable, str(_JOB), str(folders[0])])
        with Hosts(1) as one:
            command = horovodrun(one, 2, [sys.executable, str(_JOB), str(folders[1])])
            within = job(folders[1], command)
        with Hosts(count) as hosts:
            over, named, output = lose_a_host(hosts, workers, folders[2], discover)
    if len(over) != count * workers:
        raise RuntimeError(f"{len(over)} of {count * workers} workers have written what they found:\n{output}")
    differences = [difference(over, alone), difference(within, alone)]
    sent = {key: max(worker["sent"].get(key, 0) for worker in within) for key in ("lo", INTERFACE)}
    return {
        "hosts": sorted({worker["host"] for worker in over}),
        "workers": len(over),
        "ssh": "OpenSSH" if hosts.openssh else "stand-in",
        "interface": over[0]["interface"],
        "equal": max(differences) < _TOLERANCE,
        "largest_difference": {"hosts": differences[0], "one_host": differences[1]},
        "collectives": all(worker["collectives"] for worker in over + within),
        "shared_memory": {"one_host": within[0]["shares_memory"], "hosts": over[0]["shares_memory"]},
        "handed_over_mb": {"hosts": _mb(over[0]["handed_over"]), "one_host": _mb(within[0]["handed_over"])},
        "sent_mb": {
            f"hosts, {INTERFACE}": _mb(over[0]["sent"][INTERFACE]),
            **{f"one_host, {key}": _mb(value) for key, value in sent.items()},
        },
        "lost_host": hosts.hosts[-1].name,
        "seconds_until_named": round(named, 1),
        "allowed_seconds": ALLOWED,
    }


def is_right(told: dict[str, Any]) -> bool:
    """Whether all was as it has to be: what `check` gave."""
    handed, sent = told["handed_over_mb"], told["sent_mb"]
    return (
        told["equal"]
        and told["collectives"]
        and told["interface"] == INTERFACE
        and told["shared_memory"] == {"one_host": True, "hosts": False}
        and sent[f"hosts, {INTERFACE}"] > 0.4 * handed["hosts"]  # half of it is for the other host
        and sent["one_host, lo"] < 0.1 * handed["one_host"]  # in shared memory, then
        and sent[f"one_host, {INTERFACE}"] < 0.1 * handed["one_host"]
        and told["seconds_until_named"] <= told["allowed_seconds"]
    )


def _mb(size: int) -> float:
    return round(size / 1e6, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2, help="how many")
    parser.add_argument("--workers", type=int, default=1, help="on each")
    parser.add_argument("--rate", help="of each host, as tc has them: 1gbit")
    parser.add_argument("--latency", type=float, metavar="MS", help="one way, in milliseconds")
    parser.add_argument(
        "--check", action="store_true", help="compare a job over the hosts with one worker, lose a host"
    )
    parser.add_argument("--network-interface", action="store_true", help=f"tell Horovod {INTERFACE}; else it searches")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a program and its arguments")
    options = parser.parse_args()
    if reason := why_not():
        print(f"Hosts cannot be made on this machine: {reason}.", file=sys.stderr)
        return 77
    if options.check:
        told = check(options.hosts, options.workers, not options.network_interface)
        print(json.dumps(told))
        return 0 if is_right(told) else 1
    if not options.command:
        parser.error("give a command, or --check")
    latency = None if options.latency is None else options.latency / 1e3
    with Hosts(options.hosts, options.rate, latency) as hosts:
        command = horovodrun(hosts, options.workers, options.command, not options.network_interface)
        return subprocess.run(command, env=environment()).returncode


if __name__ == "__main__":
    sys.exit(main())
