"""Who owns a key, and what ranks send one another: `RouteKeys`, `ServeKeys`, `GatherRows`."""

from __future__ import annotations

import numpy as np

HEADER_WORDS = 2


def owner(key: int, world_size: int) -> int:
    """The rank that stores a key."""
    return int(key) % world_size


def route(keys: np.ndarray, world_size: int) -> tuple[list[list[int]], np.ndarray]:
    """Gives (for each owner its distinct keys in order of first appearance, place of each key's row in the answers).

    The answers are one header row and then the rows, owner after owner.
    """
    to_owner: list[list[int]] = [[] for _ in range(world_size)]
    for key in keys:
        mine = to_owner[owner(key, world_size)]
        if int(key) not in mine:
            mine.append(int(key))
    first_row = [1 + sum(1 + len(mine) for mine in to_owner[:r]) for r in range(world_size)]
    place_of = {key: first_row[r] + i for r, mine in enumerate(to_owner) for i, key in enumerate(mine)}
    return to_owner, np.array([place_of[int(key)] for key in keys], np.int64)


def words(to_owner: list[list[int]], bits: int) -> np.ndarray:
    """The message of a rank whose input is fine: for each owner a header (status 0, detail 0), then its keys."""
    flat = [value for mine in to_owner for value in [0] * HEADER_WORDS + mine]
    half = 2 ** (bits - 1)
    signed = [(value + half) % 2**bits - half for value in flat]
    return np.array(signed, np.int64 if bits == 64 else np.int32)


def all_to_all(messages: list[np.ndarray], splits: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What every rank receives when rank r sends splits[r][p] leading entries of messages[r] to each peer p in turn."""
    world_size = len(messages)
    received: list[list[np.ndarray]] = [[] for _ in range(world_size)]
    for r in range(world_size):
        if sum(splits[r]) != len(messages[r]):
            raise ValueError(f"rank {r} sends {len(messages[r])} entries, but its splits sum to {sum(splits[r])}")
        parts = np.split(messages[r], np.cumsum(splits[r])[:-1])
        for peer in range(world_size):
            received[peer].append(parts[peer])
    received_splits = [np.array([len(part) for part in parts], np.int32) for parts in received]
    return [np.concatenate(parts) for parts in received], received_splits
