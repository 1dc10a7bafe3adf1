"""What sok says of its work: a logger named "sok", with the rank in each record. Warnings go through `warnings`.

As libraries are, it is quiet: without a level of its own it passes on what is at least a WARNING, which here is what
holds a job up or ends it. That reaches standard error even where a program has set up no logging.
"""

from __future__ import annotations

import logging
import sys


class _WithRank(logging.Filter):
    rank = 0

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self.rank
        return True


class _LastResort(logging.Handler):
    """Standard error, where nobody else takes the records."""

    def emit(self, record: logging.LogRecord) -> None:
        if logger.handlers != [self] or (logger.propagate and logging.getLogger().handlers):
            return
        lines = self.format(record).splitlines()
        sys.stderr.write("".join(f"sok: rank {getattr(record, 'rank', 0)}: {line}\n" for line in lines))
        sys.stderr.flush()


logger = logging.getLogger("sok")
_with_rank = _WithRank()
logger.addFilter(_with_rank)
logger.addHandler(_LastResort())


def set_rank(rank: int) -> None:
    """Says who this worker is, for the records from now on."""
    _with_rank.rank = rank
