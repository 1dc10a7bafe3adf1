"""Tensors to JSON: the answers of TensorFlow Serving's REST."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from sok.tools.serving.refusal import Refused


def answer_of(outputs: Mapping[str, np.ndarray], rows: bool) -> bytes:
    """The body of an answer: 'predictions' row by row, or 'outputs' in columns; a single output without its name.

    Whole numbers are exact; floats are the shortest that read back as the same; NaN, Infinity and -Infinity are written
    so. Strings are UTF-8; those of outputs whose names end in `_bytes`, and those that are no UTF-8, are base64.

    Raises:
        Refused: 400: the outputs have no rows in common, or a type has no form in JSON.

    Example:
        >>> answer_of({"click": np.array([[0.1], [np.nan]], np.float32)}, rows=True)
        b'{"predictions": [[0.1], [NaN]]}'
        >>> answer_of({"a": np.array([1, 2]), "b": np.array([b"x", b"y"], object)}, rows=True)
        b'{"predictions": [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]}'
    """
    if rows:
        sizes = {name: len(output) if output.ndim else None for name, output in outputs.items()}
        if None in sizes.values() or len(set(sizes.values())) > 1:
            shapes = {name: list(output.shape) for name, output in outputs.items()}
            raise Refused(
                400, f"The outputs have no rows in common: {shapes}. Ask with 'inputs' instead of 'instances'."
            )
    columns = {name: _plain(name, output) for name, output in outputs.items()}
    if len(columns) == 1:
        (told,) = columns.values()
    elif rows:
        told = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    else:
        told = columns
    return json.dumps({"predictions" if rows else "outputs": told}).encode()


def _plain(name: str, output: np.ndarray) -> Any:
    """An output as nested lists of what JSON has."""
    if output.dtype.kind in "biu" or output.dtype == np.float64:
        return output.tolist()
    if output.dtype.kind == "O":
        as_bytes = name.endswith("_bytes")
        leaves: list[Any] = [_text(leaf, as_bytes) for leaf in output.reshape(-1).tolist()]
    elif output.dtype.kind == "c":
        raise Refused(400, f"Output '{name}' is {output.dtype}, which has no form in JSON.")
    else:  # float32 and narrower: by their own digits, 0.1 and not 0.10000000149011612
        leaves = list(map(float, map(str, output.astype(np.float32).reshape(-1))))
    return _nested(leaves, output.shape)


def _nested(leaves: list[Any], shape: tuple[int, ...]) -> Any:
    if not shape:
        return leaves[0]
    array = np.empty(len(leaves), object)
    array[:] = leaves
    return array.reshape(shape).tolist()


def _text(leaf: bytes, as_bytes: bool) -> str | dict[str, str]:
    if not as_bytes:
        try:
            return leaf.decode("utf-8")
        except UnicodeDecodeError:
            pass
    return {"b64": base64.b64encode(leaf).decode()}
