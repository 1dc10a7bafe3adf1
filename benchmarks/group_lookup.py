"""Many tables by one lookup, by one lookup each, and in stock TensorFlow: python -m benchmarks.group_lookup."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.job import GIB, Case, Job, ratios

TABLES = (1, 10, 100, 1000)
_ROWS, _DIM, _BATCH, _HOTNESS = 10_000, 16, 1024, 5
_BATCHES_IN_A_CALL = 8


def _parameters(tables: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "w2",
        "tables": tables,
        "rows": _ROWS,
        "dim": _DIM,
        "batch": _BATCH,
        "hotness": _HOTNESS,
        "hashed": False,
        "combiner": "sum",
        "distributions": ["zipf"],
        # Each batch is traced anew: few of them where there are many tables.
        "batches": max(1, min(_BATCHES_IN_A_CALL, 80 // tables)),
        **more,
    }


def _job(tables: int, what: str, contestants: tuple[str, ...], subject: str, **more: Any) -> Job:
    workers = ", 2 workers x 1 thread" if subject != "sok" else ""
    # One table alone is the same lookup, and TensorFlow runs a few small ops side by side at no cost.
    checks = ratios(**{contestants[1]: 1.0}) if tables >= (10 if workers else 100) else ()
    return Job(
        f"group/{tables}-{what}{'-2-workers' if workers else ''}",
        _parameters(tables, **more),
        contestants,
        (Case(f"{tables:,} tables, {what}{workers}", "zipf", checks),),
        subject=subject,
        sizes=f"identity tables of {_ROWS:,} rows x {_DIM} floats, batch {_BATCH:,}, 1..{_HOTNESS} ids a feature, Zipf",
        gib=1.0 + tables * _ROWS * _DIM * 8 / GIB + 0.002 * tables,
    )


def jobs() -> list[Job]:
    """Forward, and forward with backward and Adagrad; on one worker with two threads and on two workers with one."""
    made = []
    for tables in TABLES:
        alone, together = ("sok", "sok-single", "tf"), ("sok-2x1", "sok-single-2x1", "sok-1x2")
        made += [
            _job(tables, "forward", alone, "sok"),
            _job(tables, "train", alone, "sok", optimizer="adagrad"),
            _job(tables, "forward", together, "sok-2x1"),
            _job(tables, "train", together, "sok-2x1", optimizer="adagrad"),
        ]
    return made


if __name__ == "__main__":
    from benchmarks import cli

    sys.exit(cli.main([*([] if "--only" in sys.argv else ["--only", "group/"]), *sys.argv[1:]]))
