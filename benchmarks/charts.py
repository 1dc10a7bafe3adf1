"""The chart: one line per case, how many times as long as sok everybody takes. Needs matplotlib."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from benchmarks import report
from benchmarks.judge import Result

INK, FAINT, GRID = "#1c2430", "#5b6675", "#e4e8ee"
GOOD, BAD, OPEN = "#1a7f4b", "#b42318", "#8a6d1a"
STYLES: dict[str, tuple[str, str]] = {
    "sok": ("#0b63ce", "o"),
    "ref": (INK, "|"),
    "limits": (FAINT, "|"),
    "tf": ("#f2871f", "o"),
    "tf-hashed": ("#f2871f", "s"),
    "torch": ("#d6336c", "s"),
    "fbgemm": ("#7b4fd6", "D"),
    "tfra": ("#2aa198", "^"),
    "sok-lazyadam": ("#6aa7f0", "o"),
    "sok-1x2": ("#6aa7f0", "o"),
    "sok-single": ("#6aa7f0", "s"),
    "sok-single-2x1": ("#6aa7f0", "s"),
}
VERDICTS = {
    "met": ("met", GOOD),
    "met so far": ("met so far", OPEN),
    "not met": ("not met", BAD),
    "not judged": ("not judged", OPEN),
    "no target": ("", FAINT),
}


def draw(context: dict[str, Any], results: Sequence[Result]) -> Any:
    """The figure. Left of the blue line is faster than sok, right of it slower."""
    shown = [result for result in results if result.subject in result.figures and len(result.figures) > 1]
    height = 1.9 + 0.34 * max(1, len(shown))
    figure, axes = plt.subplots(figsize=(13.5, height))
    figure.patch.set_facecolor("white")
    low, high = 0.5, 2.0
    seen: list[str] = []
    for y, result in enumerate(shown):
        axes.axhline(y, color=GRID, linewidth=1, zorder=0)
        points = {name: result.ratio(name) or 1.0 for name in result.figures if name != result.subject}
        low, high = min(low, *points.values()), max(high, *points.values())
        axes.plot(
            [min(1.0, *points.values()), max(1.0, *points.values())], [y, y], color="#c5cedb", linewidth=2, zorder=1
        )
        for name, ratio in points.items():
            color, marker = STYLES.get(name, (FAINT, "o"))
            is_tick = marker == "|"
            axes.plot(
                ratio,
                y,
                marker,
                color=color,
                markersize=15 if is_tick else 8,
                markeredgewidth=3 if is_tick else 0,
                zorder=4 if is_tick else 3,
            )
            if name not in seen:
                seen.append(name)
        axes.plot(1.0, y, "o", color=STYLES["sok"][0], markersize=10, zorder=5)
    axes.axvline(1.0, color=STYLES["sok"][0], linewidth=1.2, alpha=0.5, zorder=0)
    axes.set_xscale("log")
    axes.set_xlim(low / 1.25, high * 1.3)
    ticks = [t for t in (0.25, 0.5, 0.75, 1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000) if low / 1.25 <= t <= high * 1.3]
    axes.set_xticks(ticks, [f"{t:g}x" for t in ticks], color=FAINT)
    axes.minorticks_off()
    axes.set_yticks(range(len(shown)), [result.case for result in shown], color=INK)
    axes.set_ylim(len(shown) - 0.4, -0.8)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.xaxis.tick_top()
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for y, result in enumerate(shown):
        word, color = VERDICTS[result.verdict]
        mine = result.figures[result.subject]
        right = axes.get_yaxis_transform()
        axes.text(1.075, y, f"{report.milliseconds(mine.ms)} ms", transform=right, ha="right", va="center", color=INK)
        axes.text(1.09, y, word, transform=right, ha="left", va="center", color=color, fontweight="bold")
    right = axes.get_yaxis_transform()
    axes.text(1.075, -0.87, "sok takes", transform=right, ha="right", va="bottom", color=FAINT)
    axes.text(1.09, -0.87, "target", transform=right, ha="left", va="bottom", color=FAINT)
    order = [name for name in STYLES if name in seen]
    handles = [Line2D([], [], color=STYLES["sok"][0], marker="o", linestyle="", markersize=9, label="sok = 1")]
    for name in order:
        color, marker = STYLES[name]
        handles.append(
            Line2D(
                [],
                [],
                color=color,
                marker=marker,
                linestyle="",
                markersize=12 if marker == "|" else 8,
                markeredgewidth=3 if marker == "|" else 0,
                label=report.TITLES[name],
            )
        )
    top = 1.0 - 0.28 / height
    figure.text(
        0.012, top, "Time of one step, as a multiple of sok's", fontsize=15, fontweight="bold", color=INK, va="top"
    )
    m = context["machine"]
    subtitle = (
        f"right of 1x: slower than sok; left: faster.  {m['cpu']}, {context['threads']} threads, {context['date'][:10]}"
    )
    figure.text(0.012, top - 0.34 / height, subtitle, fontsize=10, color=FAINT, va="top")
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.005, top - 0.58 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=10,
        handletextpad=0.3,
        columnspacing=1.4,
    )
    figure.subplots_adjust(left=0.27, right=0.85, top=1.0 - 1.5 / height, bottom=0.12 / height)
    return figure


def write_png(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130)


def svg(figure: Any) -> str:
    """The figure as an element for a page; letters are kept as text."""
    with plt.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "sok"}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", text[text.index("<svg") :], count=1)


def draw_growth(context: dict[str, Any], measured: Sequence[Any]) -> Any:
    """One plot for each sweep: milliseconds a step, and beside it in grey what growth in proportion would be."""
    from benchmarks import growth

    count = max(1, len(measured))
    figure, grid = plt.subplots(count, 1, figsize=(10, 3.5 * count), squeeze=False)
    for axes, (sweep, points, left_out) in zip(grid[:, 0], measured, strict=True):
        axes.set_title(f"{sweep.name}: time of a training step", loc="left", fontweight="bold", color=INK, fontsize=12)
        if points:
            _draw_sweep(axes, sweep, points)
        text = growth.explanation(sweep, points, context)
        text += "".join(f"  Left out: {one}." for one in left_out)
        lines = textwrap.wrap(text, 118)
        axes.set_xlabel(sweep.axis + "\n" + "\n".join(lines), color=FAINT, fontsize=9, loc="left")
    m = context["machine"]
    what = f"{m['usable_cores']} cores, {context['date'][:10]}, sok {context['versions']['sok']}"
    title = f"How cost grows: {m['cpu']}, {what}"
    figure.suptitle(title, x=0.01, ha="left", color=FAINT, fontsize=10)
    figure.tight_layout(rect=(0, 0, 1, 0.99), h_pad=2.0)
    return figure


def _draw_sweep(axes: Any, sweep: Any, points: Sequence[Any]) -> None:
    values = [point.value for point in points]
    times = [point.figure.ms for point in points]
    low = [point.figure.ms - point.figure.low_ms for point in points]
    high = [point.figure.high_ms - point.figure.ms for point in points]
    axes.set_xscale("log", base=10 if values[-1] > 4 else 2)
    axes.set_yscale("log")
    grows = -1 if sweep.name == "workers" else 1
    proportional = [times[0] * (value / values[0]) ** grows for value in values]
    axes.plot(values, proportional, color="#c5cedb", linestyle="--", linewidth=1.2, zorder=1)
    axes.errorbar(values, times, yerr=[low, high], color=STYLES["sok"][0], marker="o", linewidth=2, capsize=3, zorder=3)
    for value, ms in zip(values, times, strict=True):
        label = report.milliseconds(ms)
        axes.annotate(label, (value, ms), textcoords="offset points", xytext=(0, 8), ha="center", fontsize=9, color=INK)
    axes.set_xticks(values, [f"{value:,}" for value in values], color=FAINT, fontsize=9)
    axes.minorticks_off()
    axes.set_ylabel("ms (grey: in proportion)", color=FAINT, fontsize=9)
    axes.set_yticks([])  # each point says its figure
    # Room for the labels; a grey line far above must not flatten the blue one.
    bottom, top = min([*times, *(proportional if grows < 0 else [])]), max(times)
    axes.set_ylim(bottom / 1.6, max(top * 2.0, bottom * 4))
    axes.tick_params(length=0, colors=FAINT)
    axes.grid(axis="x", color=GRID)
    for side in axes.spines.values():
        side.set_visible(False)
