"""What a benchmark is made of: jobs (one preparation), their cases (a line of the table each), and targets."""

from __future__ import annotations

import dataclasses
from typing import Any

GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing to reach.

    With `against`: that contestant must take at least `at_least` times as long as the subject; "best peer" is the
    fastest of the peers that took part. With `under_ms`: the subject takes less. With `figure`: an inspected figure of
    the subject is at most `at_most`.
    """

    against: str = ""
    at_least: float = 0.0
    under_ms: float = 0.0
    figure: str = ""
    at_most: float = 0.0

    def text(self) -> str:
        if self.against == "ref":
            return f">= {self.at_least:g} x ref"
        if self.against:
            return f">= {self.at_least:g}x {self.against}" if self.at_least != 1 else f"ahead of {self.against}"
        if self.figure:
            return f"{self.figure} <= {self.at_most:g}"
        return f"< {self.under_ms:g} ms"


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table: what to ask each contestant for, and what the subject has to reach."""

    name: str
    measure: str
    checks: tuple[Check, ...] = ()
    quick: bool = False
    # What stands for `measure` with contestants that call it otherwise.
    measure_of: tuple[tuple[str, str], ...] = ()

    def measure_for(self, contestant: str) -> str:
        return dict(self.measure_of).get(contestant, self.measure)


@dataclasses.dataclass(frozen=True)
class Job:
    """Contestants prepare it once, each in a process of its own, and then take turns in its cases."""

    name: str
    parameters: dict[str, Any]
    contestants: tuple[str, ...]
    cases: tuple[Case, ...]
    subject: str = "sok"
    sizes: str = ""
    # Memory of one contestant, to know how many fit side by side.
    gib: float = 2.0
    gib_of: tuple[tuple[str, float], ...] = ()

    def gib_for(self, contestant: str) -> float:
        return dict(self.gib_of).get(contestant, self.gib)

    @property
    def quick(self) -> bool:
        return any(case.quick for case in self.cases)


def ratios(**limits: float) -> tuple[Check, ...]:
    """The subject is so many times as fast as each of them."""
    return tuple(Check(against=name, at_least=value) for name, value in limits.items())
