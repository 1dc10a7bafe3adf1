"""How far long work has come, on the terminal."""

from __future__ import annotations

import sys

from sok.base.progress import Progress


class Shown:
    """A progress bar that counts rows.

    Args:
        label: what is being done, as 'dump user'.
        total: rows in all.
        show: whether to; None: if standard error is a terminal.
    """

    def __init__(self, label: str, total: int, show: bool | None) -> None:
        enabled = sys.stderr.isatty() if show is None else show
        self._bar, self._total, self._done = Progress(label, enabled=enabled, stream=sys.stderr), total, 0

    def add(self, rows: int) -> None:
        """So many more are done."""
        self._done += rows
        self._bar.update(self._done, self._total)

    def close(self) -> None:
        """All is done: the bar goes."""
        self._bar.close()
