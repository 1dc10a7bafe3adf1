"""The `mode` of SOK v2's variables: where their rows live."""

from __future__ import annotations

import re

from sok.base import names
from sok.job import context


def owner_of(mode: str | None) -> int | None:
    """The worker that holds all rows, or None if each row is on the worker of its key.

    Args:
        mode: None, 'distributed' or 'localized:#', # a worker of this job.

    Raises:
        ValueError: something else.

    Example:
        >>> owner_of("localized:0"), owner_of("distributed")
        (0, None)
    """
    if mode is None or mode == "distributed":
        return None
    found = re.fullmatch(r"localized:(\d+)", mode) if isinstance(mode, str) else None
    if found is None:
        raise ValueError(f"`mode` must be None, 'distributed' or 'localized:#', # a worker. Received: {mode!r}.")
    owner, size = int(found[1]), context.size()
    if owner >= size:
        raise ValueError(
            f"`mode` must name a worker of this job, 'localized:0' to 'localized:{size - 1}'. Received: {mode!r}."
        )
    return owner


class HasMode:
    """For the bases of SOK v2's variables: what it says of where rows are. Rows are where `owner` says."""

    owner: int | None
    world_size: int

    @property
    def target_gpu(self) -> int:
        """The worker that holds all rows; -1 if they are on all workers."""
        return -1 if self.owner is None else self.owner

    @property
    def num_gpus(self) -> int:
        """The number of workers."""
        return self.world_size


def default_name(kind: str) -> str:
    """SOK's name for a variable without one, which its files have: 'sok_static_Variable_0', ...

    The same on all workers if they make their variables in the same order. `sok.shutdown()` begins anew.

    Args:
        kind: 'static' or 'dynamic', counted apart.
    """
    return f"sok_{kind}_Variable_{names.of_job().next_number(kind)}"
