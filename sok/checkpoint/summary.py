"""What a shard says of itself, held against the manifest that lists it. Knows no TensorFlow."""

from __future__ import annotations

from typing import Any

from sok.base.errors import CheckpointError
from sok.checkpoint.manifest import Link, SavedTable, ShardFile


def check_summary(path: str, link: Link, table: SavedTable, file: ShardFile, summary: dict[str, Any]) -> None:
    """Raises CheckpointError if a shard is not the one that the manifest lists."""
    expected = {
        "generation": link.generation,
        "table": table.name,
        "dim": len(table.columns_of(file)),
        "key_dtype": table.key_dtype,
        "world_size": link.world_size,
        "rank": file.rank,
        **table.placement.attributes_of(file.rank, link.world_size),
        "delta": file.held is not None,
        "rows": file.rows,
        "erased": file.erased,
        "bytes": file.bytes,
        "digest": file.digest,
    }
    for what, value in expected.items():
        if summary[what] != value:
            raise CheckpointError(
                f"{path}: at offset 0: not the file that the manifest lists: {what} is {summary[what]!r} instead of "
                f"{value!r}."
            )
    listed = {(s.name, s.rule, s.num_slots) for s in table.slot_sets}
    for slot_set in summary["slot_sets"]:
        if (slot_set["name"], slot_set["rule"], slot_set["num_slots"]) not in listed:
            raise CheckpointError(
                f"{path}: at offset 0: not the file that the manifest lists: it has a slot set {slot_set['name']!r} of "
                f"rule {slot_set['rule']!r}, which the manifest does not know."
            )
