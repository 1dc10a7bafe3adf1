"""Which rank holds the row of a key."""


def bucket(key: int) -> int:
    """Of 4,096, by a hash that never changes."""
    word = key % 2**64
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        word = (word ^ (word >> 33)) * factor % 2**64
    return (word ^ (word >> 33)) >> 52


def owner(key: int, world_size: int, placement: str) -> int:
    """placement: as in tests/placements.py."""
    if placement == "one worker":
        return world_size - 1
    first = world_size // 2 if placement.startswith("upper workers") else 0
    count = world_size - first
    return first + (bucket(key) * count // 4096 if placement.endswith("by hash") else key % count)


def columns(key: int, world_size: int, placement: str) -> dict[int, list[int]]:
    """Of each rank that holds some of the row [3] of a key: which columns."""
    if placement == "columns":
        return {world_size - 1: [0, 1], 0: [2]} if world_size > 1 else {0: [0, 1, 2]}
    if placement == "copies":
        return dict.fromkeys(range(world_size), [0, 1, 2])
    return {owner(key, world_size, placement): [0, 1, 2]}
