"""`sok plan`: plans a model from the command line."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import sok
from sok.planning import machine as machines
from sok.planning import showing
from sok.planning.planner import Plan, plan
from sok.planning.tables import model_of
from sok.planning.where import KINDS

if TYPE_CHECKING:
    from sok.planning.checking import Checked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `sok plan` takes."""
    parser.add_argument(
        "tables", metavar="FILE.json", help="`tables`, or `models` of them; docs/planning.md has the format"
    )
    parser.add_argument("--model", help="which of the models of the file")
    parser.add_argument("--workers", type=int, required=True, help="ranks of the job")
    parser.add_argument("--hosts", type=int, default=1, help="hosts that they are on (default: 1)")
    parser.add_argument("--batch", type=int, default=65536, help="samples of all workers in a step (default: 65536)")
    parser.add_argument("--optimizer", default="adagrad", help="the update rule of the tables (default: adagrad)")
    parser.add_argument("--memory", type=_bytes, help="of a worker, such as 80GB or 12GiB (default: the machine's)")
    parser.add_argument(
        "--machine",
        help=f"a file, or one of {', '.join(machines.shipped())} (default: what `sok doctor --measure` has measured, "
        f"else {machines.DEFAULT})",
    )
    parser.add_argument(
        "--strategy",
        default="auto",
        help="auto (default), a kind for all tables, or Merlin's basic, memory_balanced or memory_optimized",
    )
    parser.add_argument("--column-slice-threshold", type=int, help="elements of a slice, for Merlin's strategies")
    parser.add_argument(
        "--pin", action="append", default=[], metavar="TABLE=KIND", help="such as user=table_wise(0); again for others"
    )
    parser.add_argument(
        "--forbid", action="append", default=[], choices=KINDS, help="a kind that no table may have; again for others"
    )
    parser.add_argument(
        "--mp-input", action="store_true", help="each rank brings the ids of its own tables (dp_input=False)"
    )
    parser.add_argument("--all", action="store_true", help="show all ranks and tables, not the slowest and largest")
    parser.add_argument(
        "--check",
        action="store_true",
        help="also train some steps of the plan's tables, under horovodrun with as many workers, and print predicted "
        "beside measured",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the plan as JSON; - prints that alone")
    parser.add_argument("--html", metavar="FILE", help="also write a page with a picture of the ranks")


def main(options: argparse.Namespace) -> int:
    """Prints the plan. Returns 1, and says why, if there is none."""
    try:
        pins = dict(_pin(text) for text in options.pin)
        found = plan(
            options.tables,
            options.workers,
            hosts=options.hosts,
            batch=options.batch,
            optimizer=options.optimizer,
            memory=options.memory,
            machine=options.machine,
            model=options.model,
            strategy=options.strategy,
            pin=pins,
            forbid=options.forbid,
            dp_input=not options.mp_input,
            column_slice_threshold=options.column_slice_threshold,
        )
        checked = _checked(options, found) if options.check else None
        if checked and sok.rank():
            return 0
        if options.html:
            Path(options.html).write_text(showing.as_html(found), encoding="utf-8")
        content = found.as_dict() | (
            {"check": {"ms": checked.parts, "bytes": checked.bytes, "memory": checked.memory}} if checked else {}
        )
        text = json.dumps(content, indent=2)
        if options.json == "-":
            print(text)
            return 0
        if options.json:
            Path(options.json).write_text(f"{text}\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"sok plan: {error}", file=sys.stderr)
        return 1
    print(showing.as_text(found, 10**9 if options.all else showing.MOST))
    if checked:
        print(f"\nTables alone, of the slowest worker:\n{checked}")
    return 0


def _checked(options: argparse.Namespace, found: Plan) -> Checked:
    from sok.planning.checking import check

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sok.Init()
    return check(found, model_of(options.tables, options.model))


def _pin(text: str) -> tuple[str, str]:
    name, equals, kind = text.rpartition("=")
    if not equals:
        raise ValueError(f"--pin must be TABLE=KIND. Received: {text!r}.")
    return name, kind


def _bytes(text: str) -> int:
    units = {"B": 1}
    for power, prefix in enumerate("KMGT", start=1):
        units |= {f"{prefix}B": 1000**power, f"{prefix}IB": 1024**power}
    match = re.fullmatch(r"([\d.]+) ?(\w*)", text.strip())
    if not match or (match[2].upper() or "B") not in units:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, such as 80GB or 12GiB")
    return int(float(match[1]) * units[match[2].upper() or "B"])
