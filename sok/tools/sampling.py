"""Some of the numbers in a checkpoint's shards, read without TensorFlow and in bounded memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import numpy as np

from sok.base.errors import CheckpointError
from sok.checkpoint import version_keys
from sok.checkpoint.manifest import SavedSlotSet, SavedTable
from sok.checkpoint.shard_blocks import ROWS, blocks_in, rows_in_log
from sok.table import rules
from sok.table.policies import HISTORY_RULE

MAX_VALUES = 1_000_000  # kept of each vector
MAX_BLOCKS = 64  # read of each table, of 4 MiB or less


@dataclasses.dataclass(frozen=True)
class Sample:
    """Numbers of one vector of a table: its weights, or a slot."""

    title: str
    values: np.ndarray  # [n] float32
    of: int  # how many there are in the table


def slots_of_set(slot_set: SavedSlotSet) -> tuple[rules.Slot, ...]:
    return rules.slots_of(slot_set.rule, slot_set.num_slots)


def vectors_of(table: SavedTable) -> list[str]:
    """The vectors and scalars that a record of the table has, in the order of the file."""
    return ["weights", *(f"{one.name}: {slot.name}" for one in table.slot_sets for slot in slots_of_set(one))]


def sample(path: str, table: SavedTable, max_values: int = MAX_VALUES, max_blocks: int = MAX_BLOCKS) -> list[Sample]:
    """Numbers of each vector of a table, evenly over its shards; all of them if there are few.

    Args:
        path: of the checkpoint.
        table: as its manifest describes it.
        max_values: how many to keep of each vector.
        max_blocks: how many blocks to read, each of 4 MiB at most, or of one row if that is longer. The files of a
            version are read whole, twice.

    Raises:
        CheckpointError, OSError: a shard is missing or damaged. (CRCs are not looked at: `sok verify` does.)
    """
    names = vectors_of(table)
    blocks = [
        (name, offset, length, len(table.columns_of(file)))
        for file in table.files
        for name, offset, length in _rows_blocks(os.path.join(path, file.name))
    ]
    chosen = [blocks[i] for i in np.linspace(0, len(blocks) - 1, min(len(blocks), max_blocks)).astype(int)]
    found: list[list[np.ndarray]] = [[] for _ in names]
    room = max(1, max_values // max(1, len(chosen)))
    for name, offset, length, dim in chosen:
        for kept, vector in zip(found, _vectors(name, offset, length, dim, table), strict=True):
            flat = vector.reshape(-1)
            # A copy: a view would keep the whole block. An odd step meets all elements of a row in turn.
            step = -(-flat.size // room)
            kept.append(flat[:: step + (step > 1 and step % 2 == 0)].copy())
    for file in table.files:
        if (in_log := rows_in_log(os.path.join(path, file.name))) is not None:
            for kept, vector in zip(found, _vectors_in_log(*in_log, table, max_values), strict=True):
                kept.append(vector)
    widths = [table.dim, *(slot.floats(table.dim) for one in table.slot_sets for slot in slots_of_set(one))]
    are_words = [False, *(one.rule == HISTORY_RULE for one in table.slot_sets for _ in slots_of_set(one))]
    samples = []
    for name, kept, width, is_word in zip(names, found, widths, are_words, strict=True):
        values = np.concatenate(kept) if kept else np.zeros(0, np.float32)
        samples.append(
            Sample(name, values.view(np.uint32).astype(np.float32) if is_word else values, table.rows * width)
        )
    return samples


def _rows_blocks(name: str) -> Iterator[tuple[str, int, int]]:
    """File, offset and length of each payload of rows."""
    for kind, offset, length in blocks_in(name):
        if kind == ROWS:
            yield name, offset, length


def _vectors_in_log(log: version_keys.Log, bits: np.ndarray, table: SavedTable, max_values: int) -> list[np.ndarray]:
    """The weights and slots of some rows of a version [n], evenly over the log, as they lie there."""
    widths, begins = [table.dim], [0]
    for slot_set, offset in zip(table.slot_sets, log.offsets, strict=True):
        of_slots = [slot.floats(table.dim) for slot in slots_of_set(slot_set)]
        begins += [offset + sum(of_slots[:k]) for k in range(len(of_slots))]
        widths += of_slots
    step, seen = max(1, -(-table.rows * max(widths) // max_values)), 0
    kept = []
    for _, records in version_keys.records_in(log, bits):
        kept.append(records[-seen % step :: step].copy())
        seen += len(records)
    records = np.concatenate(kept) if kept else np.zeros((0, log.floats), np.float32)
    return [records[:, begin : begin + width].ravel() for begin, width in zip(begins, widths, strict=True)]


def _vectors(name: str, offset: int, length: int, dim: int, table: SavedTable) -> Iterator[np.ndarray]:
    """The weights and the slots in one block of rows, each [n, dim], or [n, 1] of a scalar."""
    with open(name, "rb") as file:
        file.seek(offset)
        payload = file.read(length)
    sets = [[slot.floats(dim) for slot in slots_of_set(slot_set)] for slot_set in table.slot_sets]
    n = int.from_bytes(payload[:8], "little") if length >= 8 else 0
    if n < 1 or length != 8 + n * (8 + 4 * (dim + sum(map(sum, sets)))):
        raise CheckpointError(
            f"{name}: at offset {offset}: a block of rows that does not fit the table that the manifest lists."
        )
    at = 8 + 8 * n
    for widths in ((dim,), *sets):
        part = np.frombuffer(payload, "<f4", n * sum(widths), at).reshape(n, sum(widths))
        at += 4 * part.size
        yield from np.split(part, np.cumsum(widths)[:-1], axis=1) if widths else ()
