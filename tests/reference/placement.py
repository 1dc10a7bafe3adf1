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
