"""The arguments of `sok elastic`."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds them."""
    add = parser.add_argument
    add("-np", "--np", type=int, required=True, metavar="N", help="workers to begin with")
    add("--min-np", type=int, metavar="N", help="fewer do not go on, but wait for others (default: 1)", default=1)
    add("--max-np", type=int, metavar="N", help="the most workers (default: no limit)")
    hosts = parser.add_mutually_exclusive_group(required=True)
    hosts.add_argument("--hosts", metavar="HOST:SLOTS,...", help="where workers run, at most so many each")
    hosts.add_argument(
        "--host-discovery-script",
        metavar="FILE",
        help="a program that prints HOST:SLOTS, one a line; asked every second",
    )
    add("--network-interface", metavar="NAME", help="of all hosts (default: lo if all workers are on this one)")
    add("--address", metavar="HOST", help="where workers reach this launcher (default: the name of this host)")
    add(
        "--deadline",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="a worker that has not left its job so long after others have is ended; so is the job where so long too "
        "few workers wait (default: 600)",
    )
    add(
        "--meeting-deadline",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="workers that take longer to connect with one another are ended and started anew (default: 120)",
    )
    add(
        "--max-losses",
        type=int,
        default=10,
        metavar="N",
        help="the job ends if more workers are lost without a commit between (default: 10)",
    )
    add("program", nargs=argparse.REMAINDER, metavar="PROGRAM ...", help="what each worker runs")


def main(options: argparse.Namespace) -> int:
    """Runs the job; the exit status: 0 if it came to its end."""
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    try:
        if not program:
            raise ValueError(
                "sok elastic needs a program to run, as in: sok elastic -np 2 --hosts localhost:2 python train.py"
            )
        if not 1 <= options.min_np <= options.np <= (options.max_np or options.np):
            raise ValueError(
                "`--min-np`, `-np` and `--max-np` must be at least 1 and in this order. Received: "
                f"{options.min_np}, {options.np}, {options.max_np}."
            )
        from sok.tools.elastic import hosts, launcher

        found = hosts.Hosts(options.hosts, options.host_discovery_script)
        found.ask()
    except (OSError, ValueError, ImportError) as error:
        print(f"sok elastic: {error}", file=sys.stderr)
        return 1
    return launcher.Launcher(options, program, found).run()
