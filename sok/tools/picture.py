"""`sok inspect --plot`: what numbers a checkpoint holds, as histograms. Needs matplotlib, and no TensorFlow."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from sok.checkpoint.manifest import read_manifest
from sok.tools.sampling import Sample, sample, vectors_of

MAX_TABLES = 20
BINS = 80
_INK, _FAINT, _WEIGHTS, _SLOTS = "#1c2430", "#5b6675", "#0b63ce", "#7b4fd6"


def plot(path: str, target: str | None = None) -> str:
    """Draws a histogram of the values of each table and slot, and returns the name of the picture.

    Args:
        path: the folder given to `sok.save`.
        target: the picture, PNG or another format of matplotlib's by its ending. None: the folder's name and '.png',
            in the current folder.

    Raises:
        ImportError: there is no matplotlib: `pip install 'sok[plot]'`.
        OSError, ValueError: the checkpoint is missing or damaged, or the picture cannot be written.

    Reads at most 64 blocks of 4 MiB of each of the 20 largest tables, one at a time, and keeps a million numbers of
    each vector. Of a version it reads the table's files whole, twice, and takes 8 bytes for each of their row numbers.
    """
    manifest = read_manifest(path)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("--plot needs matplotlib, which is not installed: pip install 'sok[plot]'") from None

    target = target or f"{os.path.basename(os.path.abspath(path))}.png"
    tables = sorted(manifest.tables, key=lambda table: -table.bytes)[:MAX_TABLES]
    columns = max((len(vectors_of(table)) for table in tables), default=1)
    height = 1.0 + 2.1 * max(1, len(tables))
    figure = Figure(figsize=(1.0 + 3.6 * max(columns, 2), height), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    left_out = len(manifest.tables) - len(tables)
    more = f", the {len(tables)} largest of {len(manifest.tables)} tables" if left_out else ""
    figure.suptitle(
        f"{os.path.basename(os.path.abspath(path))}, saved {manifest.created}{more}", color=_INK, fontsize=11
    )
    grid = figure.subplots(max(1, len(tables)), columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for row, table in zip(grid, tables, strict=False):
        for axes, found in zip(row, sample(path, table), strict=False):
            axes.set_axis_on()
            _draw(axes, table.name if found.title == "weights" else None, found)
    canvas.figure.savefig(target, dpi=110)
    return target


def _draw(axes: Any, name: str | None, found: Sample) -> None:
    values = found.values[np.isfinite(found.values)]
    color = _WEIGHTS if found.title == "weights" else _SLOTS
    title = f"{found.title}" if name is None else f"'{name}' {found.title}"
    axes.set_title(title, fontsize=9, color=_INK, loc="left")
    axes.tick_params(labelsize=7, colors=_FAINT)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_yticks([])
    if not len(values):
        axes.text(0.5, 0.5, "no rows" if not len(found.values) else "nothing finite", ha="center", color=_FAINT)
        return
    edges, is_log = bins_of(values)
    counts, _ = np.histogram(values, edges)
    axes.stairs(counts, edges, fill=True, color=color, alpha=0.85)
    if is_log:
        axes.set_xscale("log")
    else:
        axes.locator_params(axis="x", nbins=5)
        axes.ticklabel_format(axis="x", scilimits=(-2, 4))
        axes.xaxis.get_offset_text().set_fontsize(7)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xlabel(described(found, edges), fontsize=7, color=_FAINT)


def bins_of(values: np.ndarray) -> tuple[np.ndarray, bool]:
    """Edges of bins for finite values, and whether they are those of a logarithmic axis.

    The axis leaves out a thousandth at either end, where there are outliers; it is logarithmic for positive numbers
    that reach over more than two orders of magnitude, as squared gradients do.
    """
    low, high = (float(x) for x in np.quantile(values, [0.001, 0.999]))
    if low == high:
        low, high = float(values.min()), float(values.max())
    if low == high:
        width = abs(low) or 1.0
        return np.linspace(low - width / 2, high + width / 2, BINS + 1), False
    positive = values[values > 0]
    if low >= 0 and len(positive) > len(values) / 2:
        least = float(np.quantile(positive, 0.001))
        if high / least > 100:
            return np.geomspace(least, high, BINS + 1), True
    return np.linspace(low, high, BINS + 1), False


def described(found: Sample, edges: np.ndarray) -> str:
    """What the histogram cannot say."""
    finite = found.values[np.isfinite(found.values)]
    of_all = f"all {found.of:,}" if len(found.values) == found.of else f"{len(found.values):,} of {found.of:,}"
    lines = [f"{of_all}; mean {_short(finite.mean(dtype=np.float64))}, std {_short(finite.std(dtype=np.float64))}"]
    lines.append(f"from {_short(finite.min())} to {_short(finite.max())}")
    outside = np.mean((finite < edges[0]) | (finite > edges[-1]))
    zeros = np.mean(finite == 0)
    lost = len(found.values) - len(finite)
    notes = [f"{zeros:.1%} zeros"] if zeros else []
    notes += [f"{outside:.1%} not shown"] if outside else []
    notes += [f"{lost:,} NaN or infinite"] if lost else []
    return "\n".join([lines[0], "; ".join([lines[1], *notes])])


def _short(value: float) -> str:
    return f"{value:.3g}"
