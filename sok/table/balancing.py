"""Where whole tables go, when each is small enough for one worker."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from sok.job import context


def balance_tables(costs: Sequence[float], world_size: int | None = None) -> list[int]:
    """Gives each table an owner, so that the workers' sums of costs are as equal as whole tables allow.

    The longest-first rule: the costliest table goes to the worker with the least so far. Its largest sum is at most
    4/3 of the best one possible.

    Args:
        costs: of each table, at least 0, in any unit: floats looked up per step (keys per batch x dim) balance time,
            rows x dim balance memory.
        world_size: workers R; None: those of this job.

    Returns:
        For each table a rank in [0, R), for `sok.table_wise`. The same on all workers. Not collective.

    Raises:
        ValueError: a cost is negative or no finite number, or there is no worker.

    Example:
        >>> balance_tables([5.0, 3.0, 3.0, 2.0, 1.0], world_size=2)
        [0, 1, 1, 0, 1]

    Source: Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17 (1969).
    """
    size = context.get_transport().size if world_size is None else world_size
    if size < 1:
        raise ValueError(f"`world_size` must be at least 1. Received: {world_size}.")
    for i, cost in enumerate(costs):
        if not 0 <= cost < float("inf"):
            raise ValueError(f"`costs[{i}]` must be finite and at least 0. Received: {cost!r}.")
    loads = [(0.0, rank) for rank in range(size)]
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = heapq.heappop(loads)
        owners[i] = rank
        heapq.heappush(loads, (load + costs[i], rank))
    return owners
