"""What `sok inspect` says of folders that hold more than tables: those of a checkpoint manager, and exports."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sok.checkpoint.manifest import Manifest, read_manifest

# Of TensorFlow's checkpoints: which there are.
STATE = "checkpoint"
_PATH = re.compile(r'^(model_checkpoint_path|all_model_checkpoint_paths): (".*")$', re.MULTILINE)


def is_export(path: str) -> bool:
    """Whether a SavedModel lies there."""
    return os.path.exists(os.path.join(path, "saved_model.pb"))


def is_managed(path: str) -> bool:
    """Whether it is a folder of a `sok.CheckpointManager` (or TensorFlow's), or one checkpoint there."""
    return os.path.isfile(os.path.join(path, STATE)) or os.path.isfile(f"{path}.index")


def listed(path: str) -> tuple[list[str], str]:
    """The prefixes of a manager's checkpoints, oldest first, and the newest; or the one with that prefix."""
    state = Path(path, STATE)
    if not state.is_file():
        return [path], path
    said = [(which, os.path.join(path, json.loads(name))) for which, name in _PATH.findall(state.read_text("utf-8"))]
    newest = dict(said).get("model_checkpoint_path", "")
    return [prefix for which, prefix in said if which == "all_model_checkpoint_paths"], newest


def managed(path: str) -> list[dict[str, Any]]:
    """The checkpoints of a manager's folder, oldest first, or the one with that prefix.

    Each with `path`, `newest`, `bytes` of its dense variables (None: its files are gone) and `tables`, a Manifest or
    None.
    """
    prefixes, newest = listed(path)
    return [
        {
            "path": prefix,
            "newest": prefix == newest,
            "bytes": _dense_bytes(Path(prefix)),
            "tables": read_manifest(f"{prefix}.sok") if os.path.isdir(f"{prefix}.sok") else None,
        }
        for prefix in prefixes
    ]


def _dense_bytes(prefix: Path) -> int | None:
    if not prefix.with_name(f"{prefix.name}.index").is_file():
        return None
    return sum(file.stat().st_size for file in prefix.parent.glob(f"{prefix.name}.data-*"))


def managed_lines(
    path: str, found: list[dict[str, Any]], described: Callable[[str, Manifest], str], size: Callable[[int], str]
) -> str:
    """The lines of `sok inspect` for what `managed` has found."""
    lines = [f"{path}: checkpoints of dense variables with their tables (tf.train.Checkpoint): {len(found)} kept"]
    for one in found:
        dense = "its files are gone" if one["bytes"] is None else f"dense variables {size(one['bytes'])}"
        newest = ", the newest" if one["newest"] and len(found) > 1 else ""
        lines.append(f"{os.path.basename(one['path'])}{newest}: {dense}{'' if one['tables'] else ', no tables'}")
        if one["tables"]:
            lines += [f"    {line}" for line in described(f"{one['path']}.sok", one["tables"]).splitlines()]
    return "\n".join(lines)


def export(path: str) -> dict[str, Any]:
    """What a SavedModel offers, and what `sok.export_saved_model` has told of its tables (None: nothing).

    Raises:
        ValueError: it is damaged.
    """
    from sok.saved_model.verifying import read_saved_model

    model = read_saved_model(path)
    signatures = {
        name: {
            way: {key: _spec(info) for key, info in sorted(getattr(signature, way).items())}
            for way in ("inputs", "outputs")
        }
        for meta in model.meta_graphs
        for name, signature in sorted(meta.signature_def.items())
        if not name.startswith("__")
    }
    try:
        told = json.loads(Path(path, "assets.extra", "sok.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        told = None
    files = [file for folder, _, names in os.walk(path) for file in (os.path.join(folder, name) for name in names)]
    return {"signatures": signatures, "export": told, "bytes": sum(map(os.path.getsize, files))}


def _spec(info: Any) -> str:
    from tensorflow import dtypes

    sizes = [str(dim.size) if dim.size >= 0 else "None" for dim in info.tensor_shape.dim]
    shape = "of unknown rank" if info.tensor_shape.unknown_rank else f"[{', '.join(sizes)}]"
    return f"{dtypes.as_dtype(info.dtype).name} {shape}"


def export_lines(path: str, found: dict[str, Any], size: Callable[[int], str]) -> str:
    """The lines of `sok inspect` for what `export` has found."""
    told = found["export"]
    if told is None:
        kind = "SavedModel that says nothing of tables (written by another program, or an earlier sok)"
    else:
        kind = "native export" if told["native"] else "export to stock TensorFlow"
        kind += f" by sok {told['sok_version']}"
    lines = [f"{path}: {kind}, {size(found['bytes'])}"]
    for name, ways in found["signatures"].items():
        said = (", ".join(f"{key} {spec}" for key, spec in ways[way].items()) for way in ("inputs", "outputs"))
        lines.append(f"signature '{name}': {' -> '.join(said)}")
    for table in told["tables"] if told else ():
        lines.append(
            f"table '{table['name']}': {table['num_rows']:,} rows of dim {table['dim']} as {table['row_dtype']}, "
            f"{size(table['num_bytes'])}"
        )
    return "\n".join(lines)
