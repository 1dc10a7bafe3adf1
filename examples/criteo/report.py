"""Write the outcome of a training run as one HTML file that needs nothing else: no script, no font, no image file."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sok.base.progress import human

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #667085; --line: #d9dee7; --page: #ffffff; --card: #f5f7fa;
        --a: #2563eb; --b: #d97706; --c: #16a34a; --d: #9333ea; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #333c4a; --page: #14181f; --card: #1d232d;
          --a: #6ea8ff; --b: #fbbf24; --c: #4ade80; --d: #c084fc; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0; }
main { max-width: 960px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 34px 0 10px; }
.soft { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px; margin-top: 20px; }
.card { background: var(--card); border-radius: 8px; padding: 12px 16px; }
.card b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 20px; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--line); } .bar { fill: var(--a); } .track { fill: var(--card); }
.loss { stroke: var(--a); fill: none; stroke-width: 2; } .test { stroke: var(--c); fill: none; stroke-width: 2; }
.best { stroke: var(--b); fill: none; stroke-width: 2; stroke-dasharray: 6 5; }
.base { stroke: var(--d); fill: none; stroke-width: 2; stroke-dasharray: 2 4; }
table { border-collapse: collapse; width: 100%; } td { border-top: 1px solid var(--line); padding: 5px 8px 5px 0; }
td:first-child { color: var(--soft); width: 240px; } td:last-child { overflow-wrap: anywhere; }
"""

Series = tuple[str, str, Sequence[tuple[float, float]]]
"""CSS class, legend, points (x, y)."""


def write_report(path: Path, result: dict[str, Any], history: Sequence[dict[str, float]]) -> Path:
    """Write the report of one run.

    Args:
      path: the HTML file; its folder is made if missing.
      result: what `train.py --json` writes.
      history: one entry a measurement, with `step`, `train_loss`, `test_auc`, `test_logloss`, `seconds`,
        `samples_per_second`. The last is that of the whole test part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = result["settings"]
    title = f"{settings['model']} on {Path(settings['data']).name}"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<div class="soft">{result["workers"]} worker{"s" * (result["workers"] != 1)}, {result["steps"]} steps, '
        f"{result['train_rows']:,} rows trained on, {result['test_rows']:,} rows tested on</div>",
        _cards(result),
        '<div class="charts">',
        f"<div><h2>Log loss</h2>{_chart(_loss_series(history, result), 'step')}</div>",
        f"<div><h2>Test AUC</h2>{_chart(_auc_series(history, result), 'step')}</div>",
        f"<div><h2>Rows per second</h2>{_chart(_speed_series(history), 'seconds of training', from_zero=True)}</div>",
        f"<div><h2>Calibration: share of clicks among rows of a tenth of the predictions</h2>"
        f"{_chart(_calibration_series(result), 'mean prediction', from_zero=True, dots=True)}</div>",
        "</div>",
        f"<h2>Embedding rows per shard</h2>{_bars(result['rows_per_shard'])}",
        f"<h2>Settings</h2>{_table(settings)}",
    ]
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )
    path.write_text(page, encoding="utf-8")
    return path


def _cards(result: dict[str, Any]) -> str:
    cards = [("test AUC", _number(result["auc"])), ("AUC of logistic regression", _number(result["baseline_auc"]))]
    if result.get("best_auc") is not None:
        cards.append(("best possible AUC", _number(result["best_auc"])))
    cards += [
        ("test log loss", _number(result["logloss"])),
        ("log loss of logistic regression", _number(result["baseline_logloss"])),
        ("predicted over observed clicks", _number(result["calibration"]["ratio"])),
        ("samples per second", human(result["samples_per_second"])),
        ("embedding rows", f"{result['rows']:,}"),
    ]
    return f'<div class="cards">{"".join(f"<div class=card><b>{v}</b>{k}</div>" for k, v in cards)}</div>'


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"


def _points(history: Sequence[dict[str, float]], key: str) -> list[tuple[float, float]]:
    return [(h["step"], h[key]) for h in history if h.get(key) is not None and math.isfinite(h[key])]


def _loss_series(history: Sequence[dict[str, float]], result: dict[str, Any]) -> list[Series]:
    series: list[Series] = [("loss", "training", _points(history, "train_loss"))]
    series.append(("test", "test", _points(history, "test_logloss")))
    return series + _levels(result, "logloss")


def _auc_series(history: Sequence[dict[str, float]], result: dict[str, Any]) -> list[Series]:
    return [("test", "test", _points(history, "test_auc"))] + _levels(result, "auc")


def _levels(result: dict[str, Any], key: str) -> list[Series]:
    levels = (("base", "logistic regression", f"baseline_{key}"), ("best", "best possible", f"best_{key}"))
    ends = [(css, legend, result.get(name)) for css, legend, name in levels]
    return [(css, legend, [(0, y), (result["steps"], y)]) for css, legend, y in ends if y is not None]


def _speed_series(history: Sequence[dict[str, float]]) -> list[Series]:
    points = [(h["seconds"], h["samples_per_second"]) for h in history if h["samples_per_second"]]
    return [("loss", "all workers", points)]


def _calibration_series(result: dict[str, Any]) -> list[Series]:
    model, baseline = (
        [(group["predicted"], group["observed"]) for group in result[key]["bins"]]
        for key in ("calibration", "baseline_calibration")
    )
    end = max(x for x, _ in model + baseline)
    exact = [(0.0, 0.0), (end, end)]
    return [("test", "model", model), ("base", "logistic regression", baseline), ("best", "exact", exact)]


def _chart(series: Sequence[Series], x_label: str, from_zero: bool = False, dots: bool = False) -> str:
    """Return a line chart as SVG, or a sentence when there is nothing to draw."""
    points = [p for _, _, line in series for p in line]
    if not any(line for css, _, line in series if css not in ("base", "best")):
        return '<p class="soft">Nothing was measured.</p>'
    width, height, left, right, top, bottom = 460, 270, 52, 14, 34, 38
    x_high = max(x for x, _ in points) or 1.0
    x_ticks = [tick for tick in _ticks(0, x_high) if tick <= x_high]
    y_ticks = _ticks(0 if from_zero else min(y for _, y in points), max(y for _, y in points))
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (width - left - right) * x / x_high,
            top + (height - top - bottom) * (y_high - y) / (y_high - y_low),
        )

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img">']
    for tick in y_ticks:
        y = at(0, tick)[1]
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{_label(tick, y_ticks)}</text>')
    for tick in x_ticks:
        x, label = at(tick, y_low)[0], _label(tick, x_ticks)
        parts.append(f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{width - right}" y="{height - 4}" text-anchor="end">{html.escape(x_label)}</text>')
    legend_x = 8
    for css, legend, line in series:
        if not line:
            continue
        for x, y in (at(*point) for point in line if len(line) == 1 or (dots and css != "best")):
            parts.append(f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        if len(line) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in line))
            parts.append(f'<polyline class="{css}" points="{path}"/>')
        parts.append(f'<line class="{css}" x1="{legend_x}" x2="{legend_x + 22}" y1="14" y2="14"/>')
        parts.append(f'<text x="{legend_x + 28}" y="18">{html.escape(legend)}</text>')
        legend_x += 36 + 6 * len(legend)
    return "".join(parts) + "</svg>"


def _ticks(low: float, high: float) -> list[float]:
    """Return four to eight round numbers that reach from at most `low` to at least `high`."""
    if high - low < 1e-9:
        low, high = low - 0.05, high + 0.05
    raw = (high - low) / 4
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(m * scale for m in (1, 2, 5, 10) if m * scale >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _label(tick: float, ticks: Sequence[float]) -> str:
    step = ticks[1] - ticks[0] if len(ticks) > 1 else tick
    return human(tick) if step >= 1 else f"{tick:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def _bars(rows: Sequence[int]) -> str:
    """Return one horizontal bar a shard, its length being its number of rows."""
    bar_height, left, width = 26, 70, 900
    high = max([*rows, 1])
    parts = [f'<svg viewBox="0 0 {width} {bar_height * len(rows) + 4}" role="img">']
    for rank, count in enumerate(rows):
        y = rank * bar_height
        length = (width - left - 110) * count / high
        parts.append(f'<text x="0" y="{y + 18}">worker {rank}</text>')
        parts.append(f'<rect class="bar" x="{left}" y="{y + 4}" width="{length:.1f}" height="18" rx="3"/>')
        parts.append(f'<text x="{left + length + 8:.1f}" y="{y + 18}">{count:,}</text>')
    return "".join(parts) + "</svg>"


def _table(settings: dict[str, Any]) -> str:
    rows = (
        f"<tr><td>{html.escape(str(k).replace('_', ' '))}</td><td>{html.escape(str(v))}</td></tr>"
        for k, v in settings.items()
        if v is not None
    )
    return f"<table>{''.join(rows)}</table>"
