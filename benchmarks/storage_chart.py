"""The picture of benchmarks/storage.py: hit rate and step time over the size of the cache. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.charts import FAINT, GRID, INK, plt

if TYPE_CHECKING:
    from benchmarks.storage import Point

COLORS = {"memory": INK, "file": "#0b63ce", "RocksDB": "#f2871f", "mmap": "#2aa198"}
TITLES = {"memory": "all in memory", "file": "memory over a file", "RocksDB": "RocksDB", "mmap": "mapped file"}
_DIMS = ("#0b63ce", "#6aa7f0", "#c5cedb")


def draw(about: dict[str, Any], points: Sequence[Point]) -> Any:
    """A column for each law of keys; above hit rates, below the time of a training step for each dim."""
    laws, dims = (list(dict.fromkeys(getattr(point, name) for point in points)) for name in ("law", "dim"))
    trained = [point for point in points if point.what == "train"]
    figure, grid = plt.subplots(
        1 + len(dims), len(laws), figsize=(5.4 * len(laws), 3.1 * (1 + len(dims))), squeeze=False
    )
    for column, law in zip(grid.T, laws, strict=True):
        of_law = [point for point in trained if point.law == law]
        _hit_rates(column[0], of_law, dims)
        column[0].set_title(f"keys: {law}", loc="left", color=INK, fontweight="bold")
        for axes, dim in zip(column[1:], dims, strict=True):
            _times(axes, [point for point in of_law if point.dim == dim])
            axes.set_title(f"training step, dim {dim}: ms", loc="left", color=INK, fontsize=10)
            axes.set_xlabel("rows that have room in the cache, %", color=FAINT)
    for axes in grid.flat:
        shares = sorted({round(100 * point.share) or 100 * point.share for point in trained})
        axes.set_xscale("log")
        axes.set_xticks(shares, [f"{share:g}" for share in shares], color=FAINT)
        axes.minorticks_off()
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, colors=FAINT)
        for side in axes.spines.values():
            side.set_visible(False)
    words = f"{about['rows']:,} rows, {about['keys']:,} keys a step, {about['cpu']}, {about['usable_cores']} cores"
    figure.suptitle(f"{words}, {about['file_system']}", x=0.01, ha="left", color=FAINT, fontsize=9)
    handles, titles = grid[1, 0].get_legend_handles_labels()
    figure.legend(handles, titles, loc="upper left", bbox_to_anchor=(0.005, 0.975), ncols=4, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    return figure


def _hit_rates(axes: Any, points: Sequence[Point], dims: Sequence[int]) -> None:
    for dim, color in zip(dims, _DIMS, strict=False):
        of_dim = [point for point in points if point.dim == dim]
        axes.plot([100 * p.share for p in of_dim], [p.hit_rate for p in of_dim], "o-", color=color, label=f"dim {dim}")
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel("share of rows found in memory", color=FAINT, fontsize=9)
    axes.legend(frameon=False, fontsize=9)


def _times(axes: Any, points: Sequence[Point]) -> None:
    for store, color in COLORS.items():
        has = [point for point in points if store in point.ms]
        low, middle, high = np.array([np.percentile(point.ms[store], [25, 50, 75]) for point in has]).reshape(-1, 3).T
        spread = [middle - low, high - middle]
        axes.errorbar(
            [100 * p.share for p in has], middle, spread, fmt="o-", color=color, capsize=2, label=TITLES[store]
        )
    axes.set_yscale("log")
    axes.tick_params(axis="y", which="minor", length=0)


def write(about: dict[str, Any], points: Sequence[Point], file: Path) -> None:
    """Draws the picture into a file."""
    figure = draw(about, points)
    figure.savefig(file, dpi=110)
    plt.close(figure)
