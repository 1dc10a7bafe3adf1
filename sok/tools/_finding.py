"""What one check of `sok doctor` found."""

from __future__ import annotations

import dataclasses
from typing import Any

OK = "ok"
WARN = "warn"
FAIL = "FAIL"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        name: what was looked at.
        status: `OK`, `WARN` (usable, with a loss) or `FAIL` (not usable).
        text: what was found.
        remedy: what to do about it; empty for `OK`.
        details: the same facts for programs (`--json`).
    """

    name: str
    status: str
    text: str
    remedy: str = ""
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    def line(self) -> str:
        """Returns the finding as a person reads it; the remedy stands on a line of its own."""
        text = f"{self.status:<5}{self.name:<16} {self.text}"
        return f"{text}\n{'':<21} -> {self.remedy}" if self.remedy else text

    def as_dict(self) -> dict[str, Any]:
        """Returns the finding as `--json` prints it."""
        return dataclasses.asdict(self)
