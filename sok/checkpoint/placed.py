"""How a manifest says where the rows of a table lie."""

from __future__ import annotations

from typing import Any

from sok.table.placement import HASH_NAME, NUM_BUCKETS, Placement, row_wise, table_wise

_BY_HASH = {"buckets": NUM_BUCKETS, "hash": HASH_NAME}


def members_of(placement: Placement) -> tuple[int, dict[str, Any]]:
    """The table's members that say it, and the version of the format that brought these."""
    if placement == row_wise(hash=True):
        return 3, {"owner": None, "placement": _BY_HASH}
    if placement == row_wise() or placement.owner is not None:
        return 1, {"owner": placement.owner}
    return 4, {"owner": None, "placement": placement.get_config()}


def from_members(owner: int | None, said: object) -> Placement:
    """The placement of which `members_of` gave these. `ValueError` or `TypeError` if it gave them of none."""
    if isinstance(said, dict) and said != _BY_HASH:
        found = Placement.from_config(said)
    else:
        found = row_wise(hash=said == _BY_HASH) if owner is None else table_wise(owner)
    if members_of(found)[1] != {"owner": owner, **({} if said is None else {"placement": said})}:
        raise ValueError("which makes no sense here")
    return found
