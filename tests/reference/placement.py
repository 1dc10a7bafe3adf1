"""Which rank holds the row of a key."""


def bucket(key: int) -> int:
    """Of 4,096, by a hash that never changes."""
    word = key % 2**64
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        word = (word ^ (word >> 33)) * factor % 2**64
    return (word ^ (word >> 33)) >> 52


def owner(key: int, world_size: int, placement: str, rank: int = 0) -> int:
    """placement: 'by key', 'by hash', or 'one': all on `rank`."""
    if placement == "one":
        return rank
    return key % world_size if placement == "by key" else bucket(key) * world_size // 4096
