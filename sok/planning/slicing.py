"""How a table is cut into columns or rows, as Merlin cuts it. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence


def even_parts(total: int, parts: int) -> list[int]:
    """Sizes that add up to `total` and differ by one at most, larger ones first.

    Example:
        >>> even_parts(10, 4)
        [3, 3, 2, 2]
    """
    size, rest = divmod(total, parts)
    return [size + (i < rest) for i in range(parts)]


def threshold_for_all_ranks(sizes: Sequence[int], world_size: int) -> int | None:
    """The column threshold at which there are about as many slices as ranks; None if there are enough tables.

    The largest size is halved, again and again, until there are as many as ranks. The last one halved would have been
    too large.

    Example:
        >>> threshold_for_all_ranks([100, 60], world_size=4)
        59
    """
    left, threshold = sorted(sizes), None
    while left and world_size > len(left):
        largest = max(left)
        threshold = largest - 1
        left.remove(largest)
        left += [largest // 2, largest // 2]
    return threshold


def column_widths(rows: int, width: int, threshold: float | None, world_size: int) -> list[int]:
    """The widths of the slices of one table: a power of two of them, as few as bring each below the threshold.

    At most one slice for each rank, and one for each column.

    Example:
        >>> column_widths(rows=100, width=10, threshold=250, world_size=8)
        [3, 3, 2, 2]
    """
    most = min(world_size, width)
    slices, size = 1, float(rows * width)
    while threshold is not None and size > threshold and slices < most:
        slices, size = slices * 2, size / 2
    return even_parts(width, min(slices, most)) if slices > 1 else [width]


def spread(sizes: Sequence[int], tables: Sequence[int], strategy: str, world_size: int) -> list[list[int]]:
    """Which slices each rank gets, as the tables that they are of, in the order in which it gets them.

    Args:
        sizes: elements of each slice.
        tables: the table of each slice, beside `sizes`.
        strategy: 'basic': one after the other, round and round. 'memory_balanced': by size, to and fro, so that
            numbers of slices are even, too. 'memory_optimized': the largest first, each to the rank with the least.

    Example:
        >>> spread([9, 5, 4, 3], [0, 1, 2, 3], "memory_balanced", 2)
        [[0, 3], [1, 2]]
        >>> spread([9, 5, 4, 3], [0, 1, 2, 3], "memory_optimized", 2)
        [[1, 2], [0, 3]]
    """
    if strategy == "basic":
        return [list(tables[rank::world_size]) for rank in range(world_size)]
    ascending = sorted(zip(sizes, tables, strict=True))
    if strategy == "memory_balanced":
        order = [table for _, table in reversed(ascending)]
        turn = 2 * world_size
        return [order[rank::turn] + order[turn - 1 - rank :: turn] for rank in range(world_size)]
    # memory_optimized. Lists tell equal sums apart, and sums number the ranks in the end.
    ranks: list[tuple[int, list[int]]] = [(0, []) for _ in range(world_size)]
    for size, table in reversed(ascending):
        total, held = ranks[0]
        ranks = sorted([(total + size, [*held, table]), *ranks[1:]])
    return [held for _, held in ranks]
