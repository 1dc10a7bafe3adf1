"""The matrix of tests/matrix on several workers: one check for each operation, with all the cells that are chosen."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.matrix.cells import chosen_for_workers
from tests.matrix.operations import OPERATIONS, Operation
from tests.multiprocess.harness import World

_CELLS = chosen_for_workers()


def _check_of(operation: Operation) -> Callable[..., Any]:
    def check(world: World, tmp_path_of_rank: Path) -> int:
        cells, failures = [cell for cell in _CELLS if cell.operation is operation], []
        for cell in cells:
            folder = tmp_path_of_rank.parent / f"matrix_of_{world.size}" / str(cell)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                cell.run(folder)
            except Exception:  # the other cells are worth knowing, too
                failures.append(f"{cell}\n{traceback.format_exc()}")
        assert not failures, f"{len(failures)} of {len(cells)} cells failed:\n" + "\n".join(failures)
        return len(cells)

    return check


globals().update({f"check_matrix_{operation.name}": _check_of(operation) for operation in OPERATIONS})
