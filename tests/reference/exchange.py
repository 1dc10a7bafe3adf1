"""Who owns a key, and what ranks send one another: `ExchangeRoute`, `ExchangeServe`, `ExchangeCombine`."""

from __future__ import annotations

import itertools

import numpy as np

ANSWER_HEADER = 16  # floats before the rows of an answer
MAGIC = 0x534F4B33


def owner(key: int, world_size: int) -> int:
    """The rank that stores a key."""
    return int(key) % world_size


def route(
    features: list[tuple[int, np.ndarray]], dims: list[int], world_size: int
) -> tuple[list[list[list[int]]], list[np.ndarray], list[np.ndarray]]:
    """What a rank asks for. A feature is (its table, its keys).

    Gives (for each owner and table the distinct keys in order of first appearance, for each key of each feature where
    its row begins in the answers, and whether it is the first to name that row).

    The answers are, owner after owner, a header and then the rows, table by table.
    """
    asked: list[list[list[int]]] = [[[] for _ in dims] for _ in range(world_size)]
    first = []
    for table, keys in features:
        is_first = []
        for key in keys:
            mine = asked[owner(key, world_size)][table]
            is_first.append(int(key) not in mine)
            if is_first[-1]:
                mine.append(int(key))
        first.append(np.array(is_first, bool))
    place_of = {}
    place = 0
    for of_owner in asked:
        place += ANSWER_HEADER
        for table, keys in enumerate(of_owner):
            for key in keys:
                place_of[table, key] = place
                place += dims[table]
    places = [np.array([place_of[table, int(key)] for key in keys], np.int64) for table, keys in features]
    return asked, places, first


def message(
    of_owner: list[list[int]],
    pieces: list[list[list[int]]],
    bits: int,
    program: int = 0,
    call: int = 0,
    insert: bool = True,
) -> np.ndarray:
    """What a rank whose input is fine sends to one owner: header, counts, keys by table, lengths and keys by feature.

    `pieces`: for each feature that comes by sums the keys of each of its segments that this owner has; else nothing.
    """
    flat = [MAGIC, program, call, int(insert), 0, 0, 0] + [len(keys) for keys in of_owner]
    for of_feature in pieces:
        flat += [len(of_feature), sum(map(len, of_feature))]
    flat += [key for keys in of_owner for key in keys]
    for of_feature in pieces:
        flat += [len(piece) for piece in of_feature] + [key for piece in of_feature for key in piece]
    half = 2 ** (bits - 1)
    signed = [(value + half) % 2**bits - half for value in flat]
    return np.array(signed, np.int64 if bits == 64 else np.int32)


def cut(keys: np.ndarray, row_splits: np.ndarray, world_size: int) -> list[list[list[int]]]:
    """For each owner what it has of each segment, as a list of keys; without segments of which it has nothing."""
    pieces: list[list[list[int]]] = [[] for _ in range(world_size)]
    for first, last in itertools.pairwise(row_splits):
        for rank in range(world_size):
            mine = [int(key) for key in keys[first:last] if owner(key, world_size) == rank]
            if mine:
                pieces[rank].append(mine)
    return pieces


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
