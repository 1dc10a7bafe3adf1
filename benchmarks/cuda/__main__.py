"""Prints the table: `python -m benchmarks.cuda`, where there is a GPU and CuPy; `--emulate` only shows that it runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cuda.measure import Case, Device, line, measure


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__)
    parser.add_argument("--emulate", action="store_true", help="tiny sizes in the emulator: figures mean nothing")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args(arguments)
    if args.emulate and not os.environ.get("SOK_CUDA_LIBRARY"):
        parser.error("--emulate needs SOK_CUDA_LIBRARY, the path of libsok_cuda_emulated.so")

    device = Device(args.emulate)
    bandwidth = device.copy_bandwidth()
    print(f"{device.name}\ncopy inside the device's memory: {bandwidth / 1e12:.3f} TB/s\n")
    if args.emulate:
        print("Emulated on the host: these figures say nothing about any GPU.\n")
    results = []
    for case in all_cases(device):
        if args.only in case.name:
            device.release()
            results.append(measure(device, case, bandwidth))
            print(line(results[-1]), flush=True)
        del case  # and with it what it holds, before the next is made
    print("\nFewest bytes a call must move:")
    for result in results:
        print(f"  {result.case.name}: {result.case.floor_bytes / 1e6:,.3f} MB ({result.case.floor})")
    if args.json:
        rows = [
            {
                "name": r.case.name,
                "ms": r.time.ms,
                "low_ms": r.time.low_ms,
                "high_ms": r.time.high_ms,
                "host_ms": r.time.host_ms,
                "floor_bytes": r.case.floor_bytes,
                "fraction_of_copy": r.fraction,
                "rivals_ms": {name: t.ms for name, t in r.rivals.items()},
            }
            for r in results
        ]
        figures = {"device": device.name, "emulated": args.emulate, "copy_bytes_per_s": bandwidth, "cases": rows}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if results else 1


def all_cases(device: Device) -> Iterator[Case]:
    from benchmarks.cuda import merlin, rows, tables

    yield from rows.cases(device)
    yield from tables.cases(device)
    yield from merlin.cases(device)


if __name__ == "__main__":
    sys.exit(main())
