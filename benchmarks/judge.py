"""From the figures of a case to ratios and a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.job import Case, Check, Job
from benchmarks.statistics import Figure


def is_peer(name: str) -> bool:
    """What is compared but is no peer: the machine, and other ways of ours."""
    return name not in ("ref", "limits") and not name.startswith("sok")


@dataclasses.dataclass(frozen=True)
class Finding:
    """What became of one check: is_met is None if there was nothing to judge it by."""

    text: str
    is_met: bool | None
    value: float | None = None


@dataclasses.dataclass
class Result:
    """One case: the figures of who took part, why others did not, and the verdict."""

    job: str
    case: str
    subject: str
    sizes: str
    figures: dict[str, Figure]
    absent: dict[str, str]
    findings: list[Finding]
    about: dict[str, str]
    inspected: dict[str, Any]
    notes: list[str]

    @property
    def verdict(self) -> str:
        return verdict(self.findings)

    def ratio(self, contestant: str) -> float | None:
        """How many times as long as the subject a contestant takes: below 1, it is faster."""
        mine, other = self.figures.get(self.subject), self.figures.get(contestant)
        return None if mine is None or other is None else other.ms / mine.ms

    def as_json(self) -> dict[str, Any]:
        best = best_peer(self.figures)
        ratios = {name: self.ratio(name) for name in self.figures if name != self.subject}
        return {
            "case": self.case,
            "job": self.job,
            "sizes": self.sizes,
            "subject": self.subject,
            "figures": {name: figure.as_json() for name, figure in self.figures.items()},
            "ratios": {name: round(ratio, 3) for name, ratio in ratios.items() if ratio is not None},
            "best_peer": best,
            "absent": self.absent,
            "inspected": self.inspected,
            "checks": [dataclasses.asdict(finding) for finding in self.findings],
            "verdict": self.verdict,
            "about": self.about,
            "notes": self.notes,
        }


def best_peer(figures: Mapping[str, Figure]) -> str | None:
    """The fastest peer that took part."""
    peers = [name for name in figures if is_peer(name)]
    return min(peers, key=lambda name: figures[name].ms, default=None)


def judge(check: Check, subject: str, figures: Mapping[str, Figure], inspected: Mapping[str, Any]) -> Finding:
    """What became of one check."""
    if check.figure:
        value = inspected.get(check.figure)
        return Finding(check.text(), None if value is None else value <= check.at_most, value)
    mine = figures.get(subject)
    if mine is None:
        return Finding(check.text(), None)
    if check.under_ms:
        return Finding(check.text(), mine.ms < check.under_ms, mine.ms)
    against = best_peer(figures) if check.against == "best peer" else check.against
    if against is None or against not in figures:
        return Finding(check.text(), None)
    ratio = figures[against].ms / mine.ms
    return Finding(check.text(), ratio >= check.at_least, ratio)


def verdict(findings: list[Finding]) -> str:
    """One word for a case; a miss counts more than something that could not be judged."""
    if not findings:
        return "no target"
    if any(finding.is_met is False for finding in findings):
        return "not met"
    if all(finding.is_met for finding in findings):
        return "met"
    return "met so far" if any(finding.is_met for finding in findings) else "not judged"


def make_result(
    job: Job,
    case: Case,
    figures: dict[str, Figure],
    absent: dict[str, str],
    about: dict[str, str],
    inspected: dict[str, Any],
    notes: list[str],
) -> Result:
    findings = [judge(check, job.subject, figures, inspected) for check in case.checks]
    return Result(job.name, case.name, job.subject, job.sizes, figures, absent, findings, about, inspected, notes)
