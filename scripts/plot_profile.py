#!/usr/bin/env python3
"""Draws traces of `sok.profile`: plot_profile.py OUT.png FIRST_STEP NUM_STEPS TRACE.json [TRACE.json ...]

One row for each thread, with the spans that ran on it, and one for each collective of each table. Needs matplotlib.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {
    "route": "#8e6bbf",
    "find": "#2a7fb8",
    "find+combine": "#2a7fb8",
    "combine": "#41b6c4",
    "backward": "#e8843c",
    "update": "#c8403a",
    "exchange": "#9a9a9a",
    "collective": "#d0d0d0",
}


def spans_of(path, steps):
    """(row, name, start, duration) of the steps wanted, in milliseconds."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    wanted = [event for event in events if event["ph"] in "Xbe" and event["args"]["step"] in steps]
    begun = {}
    for event in wanted:
        rank = f"rank {event['pid']}  "
        if event["ph"] == "X":
            yield (rank + f"thread {event['tid']}", event["name"], event["ts"] / 1e3, event["dur"] / 1e3)
        elif event["ph"] == "b":
            begun[event["id2"]["local"]] = event
        else:
            begin = begun.pop(event["id2"]["local"])
            what = "/".join(begin["args"]["collective"].split("/")[1:3])
            yield (rank + what, begin["name"], begin["ts"] / 1e3, (event["ts"] - begin["ts"]) / 1e3)


def place(row):
    """Ranks one below the other: first their threads, then each table's keys, rows and gradients."""
    rank, what = row.split("  ")
    table, _, part = what.rpartition("/")
    return (
        rank,
        "thread" not in what,
        table == "dense_gradients",
        table,
        ("keys", "rows", "grads", part).index(part),
        what,
    )


def main():
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    out, first, number, *paths = sys.argv[1:]
    steps = range(int(first), int(first) + int(number))
    spans = [span for path in paths for span in spans_of(path, steps)]
    rows = sorted({row for row, *_ in spans}, key=place, reverse=True)
    start = min(ts for _, _, ts, _ in spans)
    figure, axes = plt.subplots(figsize=(11, 0.6 + 0.32 * len(rows)), layout="constrained")
    for row, name, ts, duration in spans:
        axes.barh(rows.index(row), duration, left=ts - start, height=0.72, color=COLORS[name], label=name)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    names = [name for name in COLORS if name in handles]
    axes.legend(
        [handles[name] for name in names], names, ncols=8, loc="lower left", bbox_to_anchor=(0, 1), frameon=False
    )
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
