"""JSON to tensors: the requests of TensorFlow Serving's REST, checked against a signature."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from sok.tools.serving.refusal import Refused

ROWS, COLUMNS = "instances", "inputs"


@dataclasses.dataclass(frozen=True)
class Asked:
    """The body of a :predict request. `rows`: whether inputs come row by row ('instances')."""

    signature: str
    rows: bool
    value: Any  # as JSON has it


def asked_in(body: bytes) -> Asked:
    """What the body of a request asks for.

    Raises:
        Refused: 400, it is not a JSON object with 'instances' or 'inputs'.

    Example:
        >>> asked_in(b'{"instances": [[1], [2]]}')
        Asked(signature='serving_default', rows=True, value=[[1], [2]])
    """
    try:
        told = json.loads(body)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise Refused(400, f"JSON Parse error: {error}") from None
    if not isinstance(told, dict):
        raise Refused(400, f"The request must be a JSON object with 'instances' or 'inputs'. Received: {_kind(told)}.")
    ways = [way for way in (ROWS, COLUMNS) if way in told]
    if len(ways) != 1:
        raise Refused(400, f"The request must have either 'instances' or 'inputs'. Received: {sorted(told)}.")
    signature = told.get("signature_name", "") or "serving_default"
    if not isinstance(signature, str):
        raise Refused(400, f"'signature_name' must be a string. Received: {_kind(signature)}.")
    return Asked(signature, ways[0] == ROWS, told[ways[0]])


def tensors_of(asked: Asked, specs: Mapping[str, tf.TensorSpec]) -> dict[str, np.ndarray]:
    """The inputs of a signature, by name.

    Raises:
        Refused: 400: one is missing, unknown, ragged, of another type or shape, or out of range.

    Example:
        >>> spec = {"ids": tf.TensorSpec([None, 2], tf.int64, "ids")}
        >>> tensors_of(Asked("", False, {"ids": [[1, 2], [3, 9007199254740993]]}), spec)["ids"].tolist()
        [[1, 2], [3, 9007199254740993]]
        >>> tensors_of(Asked("", True, [[1, 2], [3]]), spec)
        Traceback (most recent call last):
        sok.tools.serving.refusal.Refused: Input 'ids' is ragged: lists of one level must have one length. \
Received lengths: 1, 2.
    """
    values = _columns_of_rows(asked.value, specs) if asked.rows else _named(asked.value, specs)
    missing, unknown = sorted(set(specs) - set(values)), sorted(set(values) - set(specs))
    if missing or unknown:
        said = "; ".join(
            f"{what} inputs {names}" for what, names in (("missing", missing), ("unknown", unknown)) if names
        )
        raise Refused(400, f"The signature takes the inputs {sorted(specs)}. The request has {said}.")
    return {name: _tensor(name, value, specs[name]) for name, value in values.items()}


def _named(value: Any, specs: Mapping[str, tf.TensorSpec]) -> dict[str, Any]:
    """Inputs in columns: an object of them or, if there is one, that alone."""
    if isinstance(value, dict) and not _is_base64(value):
        return value
    return {_only(specs, COLUMNS): value}


def _columns_of_rows(rows: Any, specs: Mapping[str, tf.TensorSpec]) -> dict[str, Any]:
    if not isinstance(rows, list) or not rows:
        raise Refused(400, f"'instances' must be a list of at least one row. Received: {_kind(rows)}.")
    if not isinstance(rows[0], dict) or _is_base64(rows[0]):
        return {_only(specs, ROWS): rows}
    names = set(rows[0])
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or set(row) != names:
            has = sorted(row) if isinstance(row, dict) else _kind(row)
            raise Refused(
                400, f"Row {number} of 'instances' must have the inputs {sorted(names)}, as row 0. It has {has}."
            )
    return {name: [row[name] for row in rows] for name in names}


def _only(specs: Mapping[str, tf.TensorSpec], way: str) -> str:
    if len(specs) != 1:
        raise Refused(400, f"'{way}' must name the inputs, as the signature takes several: {sorted(specs)}.")
    return next(iter(specs))


def _tensor(name: str, value: Any, spec: tf.TensorSpec) -> np.ndarray:
    shape, leaves = _flat(name, value)
    if not spec.shape.is_compatible_with(shape):
        accepted = [None if size is None else int(size) for size in spec.shape]
        raise Refused(400, f"Input '{name}' must have the shape {accepted}. Received: {shape}.")
    return _array(name, leaves, spec.dtype).reshape(shape)


def _flat(name: str, value: Any) -> tuple[list[int], list[Any]]:
    """The shape of nested lists, and what is in them."""
    shape: list[int] = []
    level = [value]
    while level and isinstance(level[0], list):
        if set(map(type, level)) != {list}:
            raise Refused(400, f"Input '{name}' has lists beside values at depth {len(shape)}.")
        lengths = set(map(len, level))
        if len(lengths) != 1:
            said = ", ".join(map(str, sorted(lengths)[:5]))
            raise Refused(
                400, f"Input '{name}' is ragged: lists of one level must have one length. Received lengths: {said}."
            )
        shape += lengths
        level = list(itertools.chain.from_iterable(level))
    return shape, level


def _array(name: str, leaves: list[Any], dtype: tf.DType) -> np.ndarray:
    if dtype == tf.string:
        texts = [_bytes(name, leaf) for leaf in leaves]
        array = np.empty(len(texts), object)
        array[:] = texts
        return array
    if dtype.is_bool:
        accepted: set[type] = {bool}
    elif dtype.is_integer:
        accepted = {int}
    elif dtype.is_floating:
        accepted = {int, float}
    else:
        raise Refused(501, f"Input '{name}' is {dtype.name}, which has no form in JSON.")
    others = set(map(type, leaves)) - accepted
    if others:
        wrong = next(leaf for leaf in leaves if type(leaf) in others)
        raise Refused(400, f"Input '{name}' must be {dtype.name}. Received: {_kind(wrong)}.")
    try:
        return _floats(name, leaves, dtype) if dtype.is_floating else np.array(leaves, dtype.as_numpy_dtype)
    except OverflowError:
        wrong = next(leaf for leaf in leaves if dtype.is_floating or not dtype.min <= leaf <= dtype.max)
        raise Refused(400, f"Input '{name}' must be {dtype.name}. Received: {wrong}, which is out of range.") from None


def _floats(name: str, leaves: list[Any], dtype: tf.DType) -> np.ndarray:
    """As TensorFlow Serving has it: whole numbers must be exact, others are rounded, none becomes infinite."""
    wide = np.array(leaves, np.float64)
    with np.errstate(over="ignore"):
        array = wide.astype(dtype.as_numpy_dtype)
    most = 2.0 ** (np.finfo(np.float64).nmant + 1) if dtype == tf.float64 else 2.0 ** _digits(dtype)
    lost = np.isfinite(wide) & ~np.isfinite(array.astype(np.float64))
    for place in np.flatnonzero(lost | (np.abs(wide) >= most)):
        if lost[place] or (type(leaves[place]) is int and int(array[place]) != leaves[place]):
            raise Refused(
                400, f"Input '{name}' must be {dtype.name}. Received: {leaves[place]}, which would not be exact."
            )
    return array


def _digits(dtype: tf.DType) -> int:
    return {tf.float16: 11, tf.bfloat16: 8}.get(dtype, 24)


def _bytes(name: str, leaf: Any) -> bytes:
    if isinstance(leaf, str):
        return leaf.encode("utf-8", "surrogatepass")
    if not _is_base64(leaf):
        raise Refused(400, f"Input '{name}' must be strings, or {{\"b64\": ...}}. Received: {_kind(leaf)}.")
    try:
        return base64.b64decode(leaf["b64"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(400, f"Input '{name}': not base64: {error}.") from None


def _is_base64(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"b64"} and isinstance(value["b64"], str)


def _kind(value: Any) -> str:
    """A value of JSON for an error: short ones as they are."""
    if isinstance(value, (dict, list)):
        return f"{'an empty ' if not value else 'a '}{'list' if isinstance(value, list) else 'object'}".replace(
            "a o", "an o"
        )
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
