"""From a Keras initializer to what the native table needs to make a fresh row."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import numbers
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops

from sok.job import context
from sok.job.agreement import done_by_all
from sok.table.own_initializer import OwnInitializer

# Rows drawn once from an initializer that has no formula here; fresh rows pick their elements from them.
BANK_ROWS = 4096

# Keras divides by the deviation of a standard normal cut off at two, so that the rows have the deviation asked for.
_TRUNCATED_STDDEV = 0.87962566103423978


@dataclasses.dataclass(frozen=True)
class InitializerSpec:
    """What the native table makes fresh rows from: see docs/design/initial_values.md."""

    kind: str
    a: float = 0.0
    b: float = 0.0
    bank: tuple[float, ...] = ()
    seed: int | None = None  # the initializer's own

    def to_attributes(self, columns: range | None = None, dim: int = 0) -> dict[str, Any]:
        """The attributes by which native ops know it."""
        bank, first = self.bank, columns.start if columns else 0
        if bank and columns and len(columns) < dim:
            bank = tuple(np.reshape(bank, [-1, dim])[:, columns.start : columns.stop].ravel().tolist())
        return {"initializer": self.kind, "init_a": self.a, "init_b": self.b, "bank": bank, "first_column": first}


Initializer: TypeAlias = str | type | Callable[..., Any] | InitializerSpec
"""A Keras name, a Keras initializer or its class, or f(shape, dtype); or what becomes of them."""

_ALIASES = {
    "zero": "zeros",
    "one": "ones",
    "uniform": "random_uniform",
    "normal": "random_normal",
    "truncatednormal": "truncated_normal",
}

# name: (scale, mode, distribution) of VarianceScaling
_VARIANCE_SCALING = {
    "glorot_uniform": (1.0, "fan_avg", "uniform"),
    "glorot_normal": (1.0, "fan_avg", "truncated_normal"),
    "he_uniform": (2.0, "fan_in", "uniform"),
    "he_normal": (2.0, "fan_in", "truncated_normal"),
    "lecun_uniform": (1.0, "fan_in", "uniform"),
    "lecun_normal": (1.0, "fan_in", "truncated_normal"),
    "variance_scaling": (1.0, "fan_in", "truncated_normal"),
}


def _snake(name: str) -> str:
    out = ""
    for i, c in enumerate(name.strip()):
        if c.isupper() and i and name[i - 1].islower():
            out += "_"
        out += "_" if c in " -" else c.lower()
    return _ALIASES.get(out, out)


def _from_name(name: str, rows: int | None, dim: int) -> InitializerSpec | None:
    snake = _snake(name)
    plain = {
        "zeros": InitializerSpec("constant", 0.0),
        "ones": InitializerSpec("constant", 1.0),
        "constant": InitializerSpec("constant", 0.0),
        "random_uniform": InitializerSpec("uniform", -0.05, 0.05),
        "random_normal": InitializerSpec("normal", 0.0, 0.05),
        "truncated_normal": InitializerSpec("truncated_normal", 0.0, 0.05),
    }
    if snake in plain:
        return plain[snake]
    if snake in _VARIANCE_SCALING:
        return _variance_scaling(*_VARIANCE_SCALING[snake], rows, dim)
    return None


def _variance_scaling(scale: float, mode: str, distribution: str, rows: int | None, dim: int) -> InitializerSpec:
    if rows is None and mode != "fan_out":
        raise ValueError(
            "An initializer of the variance-scaling family (Glorot, He, Lecun) scales rows by their number, but nobody "
            "said how many rows this table will have. Say it (`max_capacity=` of sok.DynamicVariable, `capacity=` of "
            "sok.Embedding), or take an initializer with a scale of its own: 'random_normal' or "
            "tf.keras.initializers.RandomUniform(-a, a)."
        )
    known = rows or 0
    fan = {"fan_in": known, "fan_out": dim, "fan_avg": (known + dim) / 2}[mode]
    variance = scale / max(1.0, fan)
    if distribution == "uniform":
        limit = math.sqrt(3.0 * variance)
        return InitializerSpec("uniform", -limit, limit)
    if distribution == "truncated_normal":
        return InitializerSpec("truncated_normal", 0.0, math.sqrt(variance) / _TRUNCATED_STDDEV)
    return InitializerSpec("normal", 0.0, math.sqrt(variance))


def _own_seed(initializer: Any) -> int | None:
    try:
        seed = initializer.get_config().get("seed")
    except Exception:  # an initializer without a config has no seed that we could know of
        seed = getattr(initializer, "seed", None)
    return int(seed) if isinstance(seed, numbers.Integral) else None


def _from_object(initializer: Any, rows: int | None, dim: int) -> InitializerSpec | None:
    """The spec of an initializer object of Keras 3, tf_keras or tf.compat.v1, by its class name."""
    # A subclass of one's own may do anything under a familiar name.
    if type(initializer).__module__.split(".")[0] not in ("keras", "tf_keras", "tensorflow"):
        return None
    kind = _snake(type(initializer).__name__)
    config = initializer.get_config() if hasattr(initializer, "get_config") else {}
    seed = _own_seed(initializer)
    if kind in ("zeros", "ones"):
        return _from_name(kind, rows, dim)
    if kind == "constant":
        value = config.get("value", 0.0)
        return InitializerSpec("constant", float(value)) if isinstance(value, numbers.Real) else None
    if kind == "random_uniform":
        top = config["maxval"]
        return InitializerSpec("uniform", float(config["minval"]), 1.0 if top is None else float(top), seed=seed)
    if kind in ("random_normal", "truncated_normal"):
        native = "normal" if kind == "random_normal" else kind
        return InitializerSpec(native, float(config["mean"]), float(config["stddev"]), seed=seed)
    if kind in _VARIANCE_SCALING:
        scale, mode, distribution = _VARIANCE_SCALING[kind]
        scale, mode = config.get("scale", scale), config.get("mode", mode)
        distribution = config.get("distribution", distribution)
        if distribution == "normal":
            distribution = "truncated_normal"  # v1's old name for it
        spec = _variance_scaling(scale, mode, distribution, rows, dim)
        return dataclasses.replace(spec, seed=seed)
    return None


def _draw_bank(initializer: Callable[..., Any], rows: int | None, dim: int) -> np.ndarray:
    """`initializer([n, dim])` of rank 0, as every rank's bank. Collective."""
    shape = (BANK_ROWS if rows is None else min(BANK_ROWS, rows), dim)
    # Every rank calls it, so that one that fails does so everywhere; where it fails on some alone, all raise that.
    transport = context.get_transport()
    drawn = done_by_all(transport, f"sok/bank/{dim}/drawn", lambda: _drawn(initializer, shape))
    return transport.broadcast_numpy(drawn, name=f"sok/bank/{dim}")


def _drawn(initializer: Callable[..., Any], shape: tuple[int, int]) -> np.ndarray:
    with ops.init_scope():
        if tf.executing_eagerly():
            value = np.asarray(initializer(shape, tf.float32))
        else:
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                value = initializer(shape, tf.float32)
                value = session.run(value) if tf.is_tensor(value) else np.asarray(value)
    if value.shape != shape or value.dtype.kind not in "fiu":
        raise ValueError(
            f"The initializer must return numbers of the shape it is given, {shape}. "
            f"Received: shape {value.shape}, {value.dtype}."
        )
    value = value.astype(np.float32)
    if not np.isfinite(value).all():
        raise ValueError(
            f"The initializer must return finite float32 numbers. Received: {np.count_nonzero(~np.isfinite(value))} of "
            f"{value.size} that are not."
        )
    return value


def resolve(initializer: Initializer | None, argument: str = "initializer") -> str | Callable[..., Any]:
    """What `initializer` means: the name of one that the native table knows, or a callable `f(shape, dtype)`.

    Args:
        initializer: None (uniform in [-0.05, 0.05]), a Keras name in any spelling, a Keras initializer or its class, or
            a callable.
        argument: what messages call it.

    Raises:
        ValueError: a name that Keras does not know.
        TypeError: neither a name nor callable.
    """
    if initializer is None:
        return "random_uniform"
    if isinstance(initializer, str):
        if _from_name(initializer, 1, 1) is not None:
            return initializer
        try:
            return tf.keras.initializers.get(initializer)
        except ValueError as error:
            raise ValueError(
                f"`{argument}` must be a name that Keras knows, an initializer or a callable f(shape, dtype). "
                f"Received: {initializer!r}."
            ) from error
    if isinstance(initializer, type):
        initializer = initializer()
    if not callable(initializer):
        raise TypeError(
            f"`{argument}` must be a Keras name, a Keras initializer or a callable f(shape, dtype). "
            f"Received: {initializer!r}."
        )
    return initializer


def with_rows(initializer: Initializer | None, rows: int | None, dim: int) -> InitializerSpec | Callable[..., Any]:
    """What makes `initializer` take its table for a matrix [rows, dim], whatever the table's capacity is.

    Args:
        initializer, rows, dim: as `to_spec` takes them.

    Raises:
        As `to_spec`.
    """
    found = resolve(initializer)
    if isinstance(found, str):
        return cast(InitializerSpec, _from_name(found, rows, dim))  # names that make none are none that `resolve` gives
    return _from_object(found, rows, dim) or found


def to_spec(initializer: Initializer | None, rows: int | None, dim: int) -> InitializerSpec:
    """What fresh rows are made from.

    Constants, uniform and (truncated) normal distributions, and Keras' variance-scaling family become a formula. Of
    anything else `initializer([n, dim])` is called once, n = 4096 or fewer; element j of a fresh row is then element j
    of one of these n rows, drawn for each j by itself: the distribution of the elements is kept, what ties the elements
    of a row together (orthogonal rows, for instance) is not.

    Args:
        initializer: as `resolve` takes it, or a spec, which comes back as it is.
        rows, dim: the shape that fans are computed from: a number of rows that does not depend on that of the workers
            (the legal keys of the whole table, or the capacity that the user gave), and the row length. None: nobody
            knows how many rows.

    Raises:
        ValueError, TypeError: as `resolve`, or what a callable returned does not fit; `rows` is None and the values
            depend on it.

    Example:
        >>> to_spec("he_uniform", rows=600, dim=8)
        InitializerSpec(kind='uniform', a=-0.1, b=0.1, bank=(), seed=None)
    """
    if not isinstance(initializer, InitializerSpec):
        initializer = with_rows(initializer, rows, dim)
    if isinstance(initializer, InitializerSpec):
        return initializer
    if isinstance(initializer, OwnInitializer):
        return InitializerSpec(initializer.register(dim))
    bank = _draw_bank(initializer, rows, dim)
    return InitializerSpec("bank", bank=tuple(bank.ravel().tolist()), seed=_own_seed(initializer))


def derived_seed(*parts: Any) -> int:
    """A stable signed 64-bit number made of `parts`; Python's own hash changes from process to process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
