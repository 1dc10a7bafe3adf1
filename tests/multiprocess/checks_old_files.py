"""What commit 3b85c57 has written, read by several workers."""

from __future__ import annotations

from collections.abc import Callable

from tests.old_files import reading


def _check_of(size: int, read: Callable[[reading.Files], None]) -> Callable[..., None]:
    def check(world, tmp_path_of_rank) -> None:
        folder = tmp_path_of_rank.parent / f"{read.__name__}_of_{size}"
        read(reading.unpack(size, folder))

    return check


globals().update(
    {
        f"check_old_files_{read.__name__}_of_{size}": _check_of(size, read)
        for size in reading.WRITERS
        for read in reading.READERS
    }
)
