"""Where one table is, described plainly: what becomes `sok.Placement` when a table is made."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from sok.table.placement import Placement, column_wise, data_parallel, row_wise, table_row_wise, table_wise

KINDS = ("row_wise", "table_wise", "column_wise", "data_parallel", "table_row_wise")


@dataclasses.dataclass(frozen=True)
class Where:
    """One placement of one table.

    Attributes:
        kind: 'row_wise', rows over all ranks; 'table_wise', all on one; 'column_wise', pieces of each row on some;
            'data_parallel', a copy on each; 'table_row_wise', rows over all ranks of one host.
        owners: of 'table_wise' and 'column_wise' the rank of each piece, of 'table_row_wise' those of the host.
        hosts: of 'table_row_wise', how many there are.
        widths: of 'column_wise' the columns of each piece, from the left.
        hash: of 'row_wise' and 'table_row_wise', whether rows are spread by a hash of their keys.

    Example:
        >>> print(Where("table_wise", owners=(3,)), Where("column_wise", owners=(0, 2), widths=(8, 8)))
        table_wise(3) column_wise((8, 8), owners=(0, 2))
    """

    kind: str
    owners: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    hash: bool = False
    hosts: int = 0

    @property
    def host(self) -> int:
        """Of 'table_row_wise'."""
        return self.owners[0] // len(self.owners)

    def share_of(self, rank: int, workers: int) -> float:
        """How much of the table a rank holds, 0.0 to 1.0; of copies 1.0.

        Example:
            >>> Where("column_wise", owners=(0, 2), widths=(4, 12)).share_of(2, workers=4)
            0.75
        """
        if self.kind == "column_wise":
            own = [width for width, owner in zip(self.widths, self.owners, strict=True) if owner == rank]
            return sum(own) / sum(self.widths)
        if self.kind in ("table_wise", "table_row_wise"):
            return self.owners.count(rank) / len(self.owners)
        return 1.0 if self.kind == "data_parallel" else 1 / workers

    def __str__(self) -> str:
        if self.kind == "table_wise":
            return f"table_wise({self.owners[0]})"
        if self.kind == "column_wise":
            return f"column_wise({self.widths}, owners={self.owners})"
        arguments = [str(self.host), f"hosts={self.hosts}"] if self.kind == "table_row_wise" else []
        return f"{self.kind}({', '.join([*arguments, *(['hash=True'] if self.hash else [])])})"

    @property
    def words(self) -> str:
        """The same, short enough for a column of a table."""
        if self.kind != "column_wise":
            return str(self)
        shown = ",".join(map(str, self.owners[:4])) + (",.." if len(self.owners) > 4 else "")
        return f"column_wise({len(self.owners)} on {shown})"

    def as_dict(self) -> dict[str, Any]:
        """What is not empty, for JSON."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(self).items() if v}

    def placement(self) -> Placement:
        """The `sok.Placement` of the table that this describes."""
        if self.kind == "row_wise":
            return row_wise(self.hash)
        if self.kind == "table_wise":
            return table_wise(self.owners[0])
        if self.kind == "table_row_wise":
            return table_row_wise(self.host, self.hosts, self.hash)
        return column_wise(self.widths, self.owners) if self.kind == "column_wise" else data_parallel()


def pinned(text: str | Where) -> tuple[str, int | None]:
    """The kind that a pin names, and the owner, the host or the number of pieces, if it names one.

    Args:
        text: 'row_wise', 'data_parallel', 'table_wise', 'table_wise(3)', 'table_row_wise', 'table_row_wise(1)',
            'column_wise' or 'column_wise(4)', of 4 pieces.

    Raises:
        ValueError: it is none of these.
    """
    match = re.fullmatch(r"(\w+?)(?:\((\d*)\))?", str(text).replace(" ", ""))
    if not match or match[1] not in KINDS or (match[2] and match[1] in ("row_wise", "data_parallel")):
        raise ValueError(
            "a pin must be row_wise, data_parallel, table_wise, table_wise(OWNER), table_row_wise, "
            f"table_row_wise(HOST), column_wise or column_wise(PIECES). Received: {text}."
        )
    return match[1], int(match[2]) if match[2] else None
