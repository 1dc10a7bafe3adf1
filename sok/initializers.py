"""From a Keras initializer to what the native table needs to make a fresh row."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops

from sok import context

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


_ALIASES = {
    "zero": "zeros",
    "one": "ones",
    "uniform": "random_uniform",
    "normal": "random_normal",
    "truncatednormal": "truncated_normal",
    "truncated_normal": "truncated_normal",
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


def _from_name(name: str, rows: int, dim: int) -> InitializerSpec | None:
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


def _variance_scaling(scale: float, mode: str, distribution: str, rows: int, dim: int) -> InitializerSpec:
    fan = {"fan_in": rows, "fan_out": dim, "fan_avg": (rows + dim) / 2}[mode]
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


def _from_object(initializer: Any, rows: int, dim: int) -> InitializerSpec | None:
    """The spec of an initializer object of Keras 3, tf_keras or tf.compat.v1, by its class name."""
    if not type(initializer).__module__.split(".")[0] in ("keras", "tf_keras", "tensorflow"):
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
        return InitializerSpec("uniform", float(config["minval"]), float(config["maxval"]), seed=seed)
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


def _draw_bank(initializer: Callable[..., Any], rows: int, dim: int) -> np.ndarray:
    """`initializer([n, dim])` of rank 0, as every rank's bank. Collective."""
    shape = (min(BANK_ROWS, rows), dim)
    with ops.init_scope():
        if tf.executing_eagerly():
            value = np.asarray(initializer(shape, dtype=tf.float32))
        else:
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                value = initializer(shape, dtype=tf.float32)
                value = session.run(value) if tf.is_tensor(value) else np.asarray(value)
    if value.shape != shape or not np.issubdtype(value.dtype, np.floating) or not np.isfinite(value).all():
        raise ValueError(
            f"`initializer` must return finite float32 values of the shape it is given, {shape}. "
            f"Received: shape {value.shape}, {value.dtype}."
        )
    return context.get_transport().broadcast_numpy(value.astype(np.float32), name=f"sok/bank/{dim}")


def to_spec(initializer: Any, rows: int, dim: int) -> InitializerSpec:
    """What fresh rows are made from.

    Args:
        initializer: None, a Keras name in any spelling, a Keras initializer or a callable `f(shape, dtype)`.
        rows, dim: the shape that fans are computed from: the shard's capacity and the row length.

    Raises:
        ValueError: an unknown name, or a callable whose values do not fit.
        TypeError: neither a name nor callable.
    """
    if initializer is None:
        return InitializerSpec("uniform", -0.05, 0.05)
    if isinstance(initializer, str):
        spec = _from_name(initializer, rows, dim)
        if spec is not None:
            return spec
        try:
            initializer = tf.keras.initializers.get(initializer)
        except ValueError as error:
            raise ValueError(f"`initializer` is not a name that Keras knows. Received: {initializer!r}.") from error
    if isinstance(initializer, type):
        initializer = initializer()
    if not callable(initializer):
        raise TypeError(
            "`initializer` must be a Keras name, a Keras initializer or a callable f(shape, dtype). "
            f"Received: {type(initializer).__name__}."
        )
    spec = _from_object(initializer, rows, dim)
    if spec is not None:
        return spec
    bank = _draw_bank(initializer, rows, dim)
    return InitializerSpec("bank", bank=tuple(bank.ravel().tolist()), seed=_own_seed(initializer))
