"""`sok profile plot`: traces of `sok.profile` as a picture. Needs matplotlib, and no TensorFlow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sok.base.types import PathLike

_COLORS = {
    "route": "#8e6bbf",
    "find": "#2a7fb8",
    "find+combine": "#2a7fb8",
    "combine": "#41b6c4",
    "backward": "#e8843c",
    "update": "#c8403a",
    "exchange": "#9a9a9a",
    "collective": "#d0d0d0",
}
_OTHER = "#c9b458"


class _Span(NamedTuple):
    row: str
    name: str
    start: float  # milliseconds
    duration: float


def plot(traces: Sequence[PathLike], target: PathLike, first: int = 0, steps: int = 2) -> str:
    """Draws some steps of the traces that `sok.profile` has written, and returns the name of the picture.

    One row for each thread, with the spans that ran on it, and one for each collective of each table.

    Args:
        traces: the files, of one rank or of several.
        target: the picture, PNG or another format of matplotlib's by its ending.
        first: the first step to draw, from 0, as the profile counts them.
        steps: how many.

    Raises:
        ImportError: there is no matplotlib: `pip install 'sok[plot]'`.
        OSError, ValueError: a file is missing or no trace, or has nothing of these steps.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "sok profile plot needs matplotlib, which is not installed: pip install 'sok[plot]'"
        ) from None
    wanted = range(first, first + steps)
    spans = [span for path in traces for span in _spans_of(Path(path), wanted)]
    if not spans:
        raise ValueError(f"{', '.join(map(str, traces))}: no spans of steps {first} to {first + steps - 1}.")
    rows = sorted({span.row for span in spans}, key=_place, reverse=True)
    start = min(span.start for span in spans)
    figure = Figure(figsize=(11, 0.6 + 0.32 * len(rows)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, name, begin, duration in spans:
        color = _COLORS.get(name, _OTHER)
        axes.barh(rows.index(row), duration, left=begin - start, height=0.72, color=color, label=name)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    names = sorted(handles, key=lambda name: [*_COLORS, name].index(name))
    axes.legend(
        [handles[name] for name in names], names, ncols=8, loc="lower left", bbox_to_anchor=(0, 1), frameon=False
    )
    canvas.figure.savefig(target, dpi=110)
    return str(target)


def _spans_of(path: Path, steps: range) -> Iterator[_Span]:
    try:
        events: list[Any] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no trace of sok.profile: {error}.") from None
    begun = {}
    for event in events:
        if event["ph"] not in "Xbe" or event["args"].get("step") not in steps:
            continue
        rank = f"rank {event['pid']}  "
        if event["ph"] == "X":
            yield _Span(rank + f"thread {event['tid']}", event["name"], event["ts"] / 1e3, event["dur"] / 1e3)
        elif event["ph"] == "b":
            begun[event["id2"]["local"]] = event
        elif (begin := begun.pop(event["id2"]["local"], None)) is not None:
            what = "/".join(begin["args"]["collective"].split("/")[1:3])
            yield _Span(rank + what, begin["name"], begin["ts"] / 1e3, (event["ts"] - begin["ts"]) / 1e3)


def _place(row: str) -> tuple[Any, ...]:
    """Ranks one below the other: first their threads, then each table's keys, rows and gradients."""
    rank, what = row.split("  ")
    table, _, part = what.rpartition("/")
    order = ("keys", "rows", "grads", part).index(part)
    return rank, "thread" not in what, table == "dense_gradients", table, order, what
