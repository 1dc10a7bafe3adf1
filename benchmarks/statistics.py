"""From the times of single steps to one figure with its spread."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

# A window counts as quiet if others kept less than this many processors busy. /proc/stat counts in steps of 10 ms.
QUIET = 0.15
# As many quiet windows make a median; with fewer, all windows count.
ENOUGH_QUIET = 3


@dataclasses.dataclass(frozen=True)
class Window:
    """Some steps in a row."""

    seconds: tuple[float, ...]  # of each step
    others: float  # processors kept busy by others meanwhile


@dataclasses.dataclass(frozen=True)
class Figure:
    """What a contestant took for one step: the median over windows of the median over steps."""

    ms: float
    low_ms: float  # lower and upper quartile over windows
    high_ms: float
    best_ms: float
    steps: int
    windows: int
    quiet_windows: int
    others: float  # mean over the windows that count

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median."""
        return (self.high_ms - self.low_ms) / self.ms if self.ms else 0.0

    def as_json(self) -> dict[str, Any]:
        values = {name: round(value, 4) for name, value in dataclasses.asdict(self).items()}
        return {**values, "spread": round(self.spread, 3)}


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, linear between neighbours, as NumPy's default."""
    if not values:
        raise ValueError("`values` must not be empty.")
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarize(windows: Sequence[Window]) -> Figure:
    """The figure of one contestant from the windows that count."""
    used = [window for window in windows if window.seconds]
    if not used:
        raise ValueError("`windows` must hold at least one step.")
    medians = [1e3 * quantile(window.seconds, 0.5) for window in used]
    return Figure(
        ms=quantile(medians, 0.5),
        low_ms=quantile(medians, 0.25),
        high_ms=quantile(medians, 0.75),
        best_ms=1e3 * min(min(window.seconds) for window in used),
        steps=sum(len(window.seconds) for window in used),
        windows=len(used),
        quiet_windows=sum(window.others < QUIET for window in used),
        others=sum(window.others for window in used) / len(used),
    )


def summarize_together(windows: Mapping[str, Sequence[Window]]) -> dict[str, Figure]:
    """The figures of all contestants of a case.

    Busy windows are left out if every contestant has enough quiet ones. If one has not, all windows of all count:
    a ratio of one's quiet time to another's busy time would say nothing.
    """
    quiet = {name: [window for window in some if window.others < QUIET] for name, some in windows.items()}
    is_enough = all(len(some) >= ENOUGH_QUIET for some in quiet.values())
    return {name: summarize(some) for name, some in (quiet if is_enough else windows).items()}
