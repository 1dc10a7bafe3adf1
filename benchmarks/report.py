"""What a run says: JSON lines, a table for the terminal, a page with the chart."""

from __future__ import annotations

import datetime
import html
import re
from collections.abc import Sequence
from typing import Any

from benchmarks.judge import Finding, Result, best_peer

# How contestants are called in tables and charts.
TITLES = {
    "sok": "sok",
    "ref": "machine's limit (ref)",
    "limits": "another limit program",
    "tf": "TensorFlow",
    "tf-hashed": "TensorFlow, finding keys",
    "torch": "PyTorch",
    "fbgemm": "FBGEMM CPU",
    "tfra": "TFRA",
    "sok-lazyadam": "sok LazyAdam",
    "sok-1x2": "sok, 1 worker x 2 threads",
    "sok-2x1": "sok, 2 workers x 1 thread",
    "sok-single": "sok, one lookup per table",
    "sok-single-2x1": "the same, 2 workers x 1 thread",
}
MARKS = {"met": "yes", "met so far": "yes, as far as judged", "not met": "NO", "no target": "-", "not judged": "?"}


def milliseconds(ms: float) -> str:
    """Three digits."""
    if ms >= 100:
        return f"{ms:,.0f}"
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def times(ratio: float) -> str:
    """A ratio to two digits, '0.87x', '6.1x', '140x'."""
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x" if ratio >= 2 else f"{ratio:.2f}x"


def finding_text(finding: Finding) -> str:
    """A check with what came out, '>= 0.85 x ref: 0.91'."""
    if finding.is_met is None:
        return f"{finding.text}: not judged"
    value = "" if finding.value is None else f" {finding.value:.3g}"
    return f"{finding.text}:{value} {'met' if finding.is_met else 'NOT MET'}"


def inspected_lines(result: Result) -> list[str]:
    """Figures that are not times of steps: one line, and one for each collective of a step."""
    pairs = {key: value for key, value in result.inspected.items() if isinstance(value, (int, float)) and value}
    lines = [", ".join(f"{key} {value:,.6g}" for key, value in pairs.items())] if pairs else []
    # Collectives of many tables under one name: 'sok/table7/keys/0' and 'sok/table8/keys/0' are 'sok/table*/keys/*'.
    kinds: dict[str, dict[str, Any]] = {}
    for name, one in sorted(result.inspected.get("by_name", {}).items()):
        total = kinds.setdefault(re.sub(r"\d+", "*", name), {"kind": one["kind"]})
        for key in ("collectives", "bytes", "took_ms"):
            total[key] = total.get(key, 0) + one.get(key, 0)
    for name, one in kinds.items():
        took = f"took {one['took_ms']:.2f} ms"
        lines.append(f"{one['collectives']:g} {one['kind']}, {one['bytes']:,.0f} bytes, {took}: {name}")
    return lines


def row(result: Result) -> list[str]:
    """One line of the table: case, ours, spread, ref, best peer, others, target, met."""
    mine = result.figures.get(result.subject)
    ref = result.ratio("ref")
    best = best_peer(result.figures)
    others = []
    for name in result.figures:
        ratio = result.ratio(name)
        if name not in (result.subject, "ref") and ratio is not None:
            others.append(f"{name} {times(ratio)}")
    return [
        result.case,
        milliseconds(mine.ms) if mine else "-",
        f"{mine.spread:.0%}" if mine else "-",
        f"{milliseconds(result.figures['ref'].ms)} ({times(ref)})" if ref is not None else "-",
        f"{milliseconds(result.figures[best].ms)} {best}" if best else "-",
        " ".join(others) or "-",
        "; ".join(finding.text for finding in result.findings) or "-",
        MARKS[result.verdict],
    ]


HEAD = ["case", "sok ms", "spread", "ref ms (ratio)", "best peer ms", "others, times sok's", "to reach", "met"]


def table(results: Sequence[Result]) -> str:
    """The summary, aligned; absent contestants are named under it."""
    lines = [HEAD, *(row(result) for result in results)]
    # What is to be reached is long: it stands in a line of its own, after the misses.
    widths = [max(len(line[i]) for line in lines) for i in range(6)]
    text = []
    for number, line in enumerate(lines):
        cells = [
            cell.ljust(width) if i in (0, 5) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=False))
        ]
        text.append("  ".join([*cells, line[7]]).rstrip())
        if number == 0:
            text.append("-" * len(text[0]))
    missed = [(result, finding) for result in results for finding in result.findings if finding.is_met is False]
    if missed:
        text += ["", "Not met:"]
        text += [f"  {result.case}: {finding_text(finding)}" for result, finding in missed]
    beside = [(result.case, inspected_lines(result)) for result in results]
    if any(lines for _, lines in beside):
        text += ["", "Beside times:"]
        text += [f"  {case}: {line}" for case, lines in beside for line in lines]
    notes = sorted({note for result in results for note in result.notes})
    text += ["", *(f"note: {note}" for note in notes), *absent_lines(results)]
    counts = {word: sum(result.verdict == word for result in results) for word in MARKS}
    text.append("Targets: " + ", ".join(f"{count} {word}" for word, count in counts.items() if count) + ".")
    return "\n".join(text)


def absent_lines(results: Sequence[Result]) -> list[str]:
    """Who did not take part, why, and in which cases."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for name, reason in result.absent.items():
            reasons.setdefault((name, reason), []).append(result.case)
    lines = []
    for (name, reason), cases in sorted(reasons.items()):
        where = "everywhere" if len(cases) == len(results) else f"in {len(cases)} of {len(results)} cases"
        where = cases[0] if len(cases) == 1 and len(results) > 1 else where
        lines.append(f"absent: {TITLES.get(name, name)}: {reason} ({where})")
    return lines


def header(context: dict[str, Any]) -> str:
    """What was run, where, with what."""
    m, versions = context["machine"], context["versions"]
    caches = ", ".join(f"{name} {_bytes(size)}" for name, size in m["caches"].items())
    return "\n".join(
        [
            f"{context['date']}, {context['threads']} threads each, windows of {context['window_s']} s",
            f"machine: {m['cpu']}{' (virtual)' if m['virtual'] else ''}, {m['usable_cores']} of {m['cores']} cores, "
            f"{caches}, "
            f"{m['memory_gib']} GiB ({m['memory_available_gib']} free), huge pages {m['huge_pages']}",
            f"ISA: {' '.join(m['isa'])}; sok's kernels: {m['sok_isa']}; Linux {m['kernel']}",
            "versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()),
        ]
    )


def footer(context: dict[str, Any], results: Sequence[Result]) -> str:
    """How busy others kept the machine meanwhile."""
    figures = [figure for result in results for figure in result.figures.values()]
    if not figures:
        return ""
    mean = sum(figure.others for figure in figures) / len(figures)
    noisy = sum(figure.others >= 0.15 for figure in figures)
    seconds = context.get("seconds", 0)
    return (
        f"{seconds / 60:.1f} minutes. Others kept {mean:.2f} processors busy while this ran "
        f"(up to {max(figure.others for figure in figures):.2f}); {noisy} of {len(figures)} figures had no quiet time."
    )


def _bytes(size: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"


def now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
pre { color: #5b6675; font-size: 12px; white-space: pre-wrap; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #e4e8ee; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.met { color: #1a7f4b; } .miss { color: #b42318; font-weight: 600; } .open { color: #8a6d1a; }
"""


def page(context: dict[str, Any], results: Sequence[Result], chart_svg: str) -> str:
    """One HTML file with everything in it: chart, table, who was absent, machine."""
    body = []
    for result in results:
        checks = "<br>".join(
            f'<span class="{_css(finding.is_met)}">{html.escape(finding_text(finding))}</span>'
            for finding in result.findings
        )
        case, mine, spread, ref, best, others, _, _ = (html.escape(cell) for cell in row(result))
        numbers = "".join(f'<td class="n">{cell}</td>' for cell in (mine, spread, ref, best))
        name = f'<td title="{html.escape(result.sizes)}">{case}</td>'
        body.append(f"<tr>{name}{numbers}<td>{others}</td><td>{checks or '-'}</td></tr>")
    heads = "".join(f"<th>{html.escape(head)}</th>" for head in [*HEAD[:6], "to reach, and what came out"])
    abouts = sorted({(name, how) for result in results for name, how in result.about.items()})
    ways = "".join(
        f"<tr><td>{html.escape(TITLES.get(name, name))}</td><td>{html.escape(how)}</td></tr>" for name, how in abouts
    )
    absent = "".join(f"<li>{html.escape(line)}</li>" for line in absent_lines(results))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>sok: benchmarks</title>'
        f"<style>{_STYLE}</style><h1>sok: benchmarks</h1>"
        f"<pre>{html.escape(header(context))}\n{html.escape(footer(context, results))}</pre>"
        f"{chart_svg}<h2>Figures</h2><table><tr>{heads}</tr>{''.join(body)}</table>"
        f"<h2>Absent</h2><ul>{absent or '<li>nobody</li>'}</ul>"
        f"<h2>How each does it</h2><table>{ways}</table></html>\n"
    )


def _css(is_met: bool | None) -> str:
    return "open" if is_met is None else "met" if is_met else "miss"
