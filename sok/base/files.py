"""What Python's own functions for files leave to their callers. Knows no TensorFlow."""

from __future__ import annotations

import os
import shutil

from sok.base.types import PathLike


def link_or_copy(old: PathLike, new: PathLike) -> None:
    """Gives a file a second name. Where links cannot be (other file systems, or such that have none), copies it.

    Raises:
        FileExistsError: there is something of the new name. OSError: another thing that the system says.
    """
    try:
        os.link(old, new)
    except FileExistsError:
        raise
    except OSError:
        shutil.copyfile(old, new)
        with open(new, "rb") as copied:
            os.fsync(copied.fileno())
