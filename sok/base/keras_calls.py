"""Which functions of Keras are running: what Keras knows but does not tell a variable or layer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


def running() -> set[str]:
    """Names of the functions of Keras 3 and tf_keras that have called us, however far away. Takes microseconds."""
    return {frame.f_code.co_name for frame in _frames()}


def loss_scaler() -> Any:
    """The Keras 3 or tf_keras `LossScaleOptimizer` that has called us, or None."""
    scalers = (f.f_locals.get("self") for f in _frames() if _module(f).endswith(".loss_scale_optimizer"))
    return next((scaler for scaler in scalers if scaler is not None), None)


def caller() -> Any:
    """The object of Keras 3 or tf_keras in whose method we were called, the nearest one; or None."""
    return next((f.f_locals["self"] for f in _frames() if "self" in f.f_locals), None)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if _module(frame).startswith(("keras.src.", "tf_keras.src.")):
            yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
