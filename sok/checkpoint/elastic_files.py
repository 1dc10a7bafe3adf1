"""What an elastic job saves beside the rows of its tables: dense variables and values, in one file."""

from __future__ import annotations

import contextlib
import glob
import io
import json
import os
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from sok.base.errors import CheckpointError

_PREFIX = "elastic-"


def path_of(folder: str, generation: str) -> str:
    """The file that belongs to a checkpoint. By its number alone: that is known before the save, whose name is not."""
    return os.path.join(folder, f"{_PREFIX}{generation.partition('-')[0]}.npz")


def write(path: str, dense: Sequence[Any], values: dict[str, Any], commit: int) -> None:
    """Writes the file whole or not at all. `commit`: the number of the commit."""
    content = io.BytesIO()
    arrays: dict[str, Any] = {f"v{i}": np.asarray(v) for i, v in enumerate(dense)}
    np.savez(content, values=np.array(json.dumps(values)), commit=np.int64(commit), **arrays)
    with open(f"{path}.tmp", "wb") as file:
        file.write(content.getvalue())
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def remove_others(folder: str, kept: str) -> None:
    """Removes the files of older checkpoints."""
    for old in set(glob.glob(os.path.join(glob.escape(folder), f"{_PREFIX}*"))) - {kept}:
        with contextlib.suppress(OSError):
            os.unlink(old)


def read(path: str, num_dense: int) -> tuple[list[np.ndarray], dict[str, Any], int]:
    """Dense variables, values, and the number of the commit (0 in files of sok before it had replicas)."""
    try:
        with np.load(path, allow_pickle=False) as content:
            number = int(content["commit"]) if "commit" in content else 0
            return [content[f"v{i}"] for i in range(num_dense)], json.loads(str(content["values"])), number
    except (OSError, KeyError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: the dense weights of this commit cannot be read: {error}") from error


def assign(variables: Sequence[Any], arrays: Sequence[np.ndarray], path: str) -> None:
    for variable, array in zip(variables, arrays, strict=True):
        if tuple(variable.shape) != array.shape:
            raise ValueError(f"A dense variable has shape {tuple(variable.shape)}; in {path} it has {array.shape}.")
        variable.assign(array)
