"""A plan as people read it: as text, and as a page with pictures of its ranks."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sok.planning.planner import Plan, RankPlan, TablePlan

MOST = 12  # ranks and tables in a text: all of them are in the JSON and on the page
_COLOURS = {
    **{"key exchange": "#4e79a7", "forward": "#59a14f", "backward": "#f28e2b", "update": "#e15759"},
    **{"dense": "#b07aa1", "fixed": "#bab0ac"},
}


def as_text(plan: Plan, most: int = MOST) -> str:
    """The plan in lines: the step, each phase, the ranks that decide, and the largest tables.

    Args:
        most: ranks and tables that are shown, the slowest and the largest ones.
    """
    ranks = sorted(plan.ranks, key=lambda rank: (-rank.ms, rank.rank))[:most]
    tables = sorted(plan.tables, key=lambda table: (-table.memory, table.name))[:most]
    lines = [*_head(plan), ""]
    lines += _columns(
        [
            ["rank", "memory", "ms", *plan.phases, "in", "out", "bound by"],
            *([*_of_rank(rank), rank.bound_by] for rank in ranks),
        ],
        right=len(plan.phases) + 5,
    )
    lines += _more(len(plan.ranks) - len(ranks), "ranks, all of them faster")
    lines += ["", *_columns([["table", "placement", "answers", "memory", "reason", "runner-up"], *_rows(tables)], 0)]
    lines += _more(len(plan.tables) - len(tables), "tables, all of them smaller")
    return "\n".join(lines)


def _head(plan: Plan) -> list[str]:
    job = plan.job
    limit = "faster" if plan.is_exact else f"below {plan.bound_ms:.3g} ms"
    of = f"{job.workers} worker{'s' * (job.workers > 1)} of {job.hosts} host{'s' * (job.hosts > 1)}"
    return [
        f"{plan.model or 'model'}: {len(plan.tables):,} tables on {of}, batch {job.batch:,}, {job.rule}, "
        f"strategy {plan.strategy}",
        f"machine: {plan.machine.name}",
        f"step: {plan.step_ms:.4g} ms (no plan of these kinds is {limit})",
        "slowest rank of each phase, ms: " + ", ".join(f"{name} {ms:.3g}" for name, ms in plan.phases.items()),
    ]


def _of_rank(rank: RankPlan) -> list[str]:
    phases = [f"{ms:.3g}" for ms in rank.phases.values()]
    return [str(rank.rank), size(rank.memory), f"{rank.ms:.3g}", *phases, size(rank.bytes_in), size(rank.bytes_out)]


def _rows(tables: Sequence[TablePlan]) -> list[list[str]]:
    return [
        [
            *(table.name, table.where.words, table.way, size(table.memory), table.reason),
            f"{table.runner_up.words}, {table.runner_up_ms:.4g} ms" if table.runner_up else "",
        ]
        for table in tables
    ]


def _columns(rows: list[list[str]], right: int) -> list[str]:
    """Lines of a table; the first `right` columns are numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            text.rjust(w) if i < right else text.ljust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _more(number: int, what: str) -> list[str]:
    return [f"and {number:,} more {what}"] if number > 0 else []


def size(count: float) -> str:
    """Bytes in the unit that a reader takes in.

    Example:
        >>> size(512), size(2_500_000), size(3_200_000_000)
        ('512 B', '2.5 MB', '3.2 GB')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def as_html(plan: Plan) -> str:
    """The plan as one page without scripts: bars of time and memory for each rank, and all tables."""
    head = "".join(f"<p>{html.escape(line)}</p>" for line in _head(plan))
    names = ["table", "placement", "answers", "memory", "reason", "runner-up"]
    tables = sorted(plan.tables, key=lambda table: (-table.memory, table.name))
    cells = "".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in _rows(tables)
    )
    legend = "".join(
        f'<span style="margin-right:1.2em"><span style="background:{colour}">&emsp;</span> {name}</span>'
        for name, colour in _COLOURS.items()
    )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>sok plan</title><style>'
        "body{font:14px sans-serif;margin:2em;max-width:75em}table{border-collapse:collapse}"
        "td,th{padding:.15em .8em;text-align:left;border-bottom:1px solid #ddd}p{margin:.2em 0}"
        f"</style></head><body><h1>{html.escape(plan.model or 'Plan')}</h1>{head}"
        f"<p>source of the constants: {html.escape(plan.machine.source)}</p>"
        f"<h2>Time of each rank, ms</h2><p>{legend}</p>{_bars_of_time(plan)}"
        f"<h2>Memory of each rank</h2>{_bars_of_memory(plan)}<h2>Tables</h2><table><tr>"
        + "".join(f"<th>{name}</th>" for name in names)
        + f"</tr>{cells}</table></body></html>\n"
    )


def _bars_of_time(plan: Plan) -> str:
    longest = max(rank.ms for rank in plan.ranks)
    bars = []
    for place, rank in enumerate(plan.ranks):
        start = 0.0
        for name, ms in rank.phases.items():
            title = f"rank {rank.rank}, {name}: {ms:.3g} ms"
            bars.append(_bar(place, start / longest, ms / longest, _COLOURS[name], title))
            start += ms
        bars.append(_label(plan, place, start / longest, f"{rank.ms:.3g}"))
    return _picture(plan, bars)


def _bars_of_memory(plan: Plan) -> str:
    fullest = max(rank.memory for rank in plan.ranks)
    bars = []
    for place, rank in enumerate(plan.ranks):
        share = rank.memory / max(fullest, 1)
        bars.append(_bar(place, 0.0, share, "#76b7b2", f"rank {rank.rank}: {rank.memory:,} bytes"))
        bars.append(_label(plan, place, share, size(rank.memory)))
    return _picture(plan, bars)


_LEFT, _TOP, _WIDTH = 60, 8, 700  # pixels


def _height(plan: Plan) -> int:
    return 18 if len(plan.ranks) <= 32 else 6


def _bar(place: int, start: float, share: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{_LEFT + start * _WIDTH:.1f}" y="{place}" width="{share * _WIDTH:.2f}" height="0.8" fill="{colour}">'
        f"<title>{html.escape(title)}</title></rect>"
    )


def _label(plan: Plan, place: int, share: float, text: str) -> str:
    # Beside thin bars there is room for a word at every eighth.
    if _height(plan) < 12 and place % 8:
        return ""
    rank = plan.ranks[place].rank
    right = _LEFT + share * _WIDTH + 6
    return f'<text data-y="{place}" x="0">rank {rank}</text><text data-y="{place}" x="{right:.1f}">{text}</text>'


def _picture(plan: Plan, bars: Sequence[str]) -> str:
    """Bars are placed in units of ranks, words in pixels: letters must not be stretched."""
    height = _height(plan)
    rects = "".join(bar for bar in bars if bar.startswith("<rect"))
    words = "".join(bar for bar in bars if bar.startswith("<text"))
    for place in range(len(plan.ranks)):
        words = words.replace(f'data-y="{place}"', f'y="{_TOP + place * height + min(height, 14) - 2}"')
    total = _TOP + len(plan.ranks) * height + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 90}" height="{total}" font-size="11" '
        f'font-family="sans-serif"><g transform="translate(0,{_TOP}) scale(1,{height})">{rects}</g>{words}</svg>'
    )
