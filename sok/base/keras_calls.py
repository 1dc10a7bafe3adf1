"""Which functions of Keras are running: what Keras knows, and has no argument to tell.

No other module looks for Keras on the call stack (`sok/table/custom_gradients.py` looks for TensorFlow's functions),
and this one for nine things:

- whether a batch is trained on, in a layer of a model whose own `call` takes no `training`;
- whether `numpy()` is called by `get_weights`, which wants keys too, or by a writer of HDF5, which must get no rows;
- whether a stock optimizer is about to change a table, to whose handle it would write by row numbers;
- which `LossScaleOptimizer` builds the optimizer inside, and would turn gradients of tables into matrices;
- whose `fit` makes the first step, so that replicas start alike, and which model trains;
- how many samples a step of `fit` has, and how many steps, where workers have different numbers;
- which layer looks a table up that Keras 3 would not find among the layer's variables;
- whether `fit`, or `evaluate` or `predict`, reads a dataset, whose lookups begin before they are made, and how far;
- whether weights are read to be drawn by TensorBoard, or counted for a summary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

_KERAS = ("keras.src.", "tf_keras.src.")


def running() -> set[str]:
    """Names of the functions of Keras 3 and tf_keras that have called us, however far away. Takes microseconds."""
    return {frame.f_code.co_name for frame in _frames()}


def loss_scaler() -> Any:
    """The Keras 3 or tf_keras `LossScaleOptimizer` that has called us, or None."""
    scalers = (f.f_locals.get("self") for f in _frames() if _module(f).endswith(".loss_scale_optimizer"))
    return next((scaler for scaler in scalers if scaler is not None), None)


def is_evaluating() -> bool:
    """Whether Keras' `evaluate` or `predict` has called us."""
    return bool({"test_step", "predict_step"} & running())


def is_counting_parameters() -> bool:
    """Whether our caller is asked by Keras, which counts the numbers in variables. Cheap: it looks at two frames."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(2):  # of a list in between, too
        if frame is not None and frame.f_code.co_name in ("count_params", "weight_memory_size"):
            return _module(frame).startswith(_KERAS)
        frame = None if frame is None else frame.f_back
    return False


def caller() -> Any:
    """The object of Keras 3 or tf_keras in whose method we were called, the nearest one; or None."""
    return next((f.f_locals["self"] for f in _frames() if "self" in f.f_locals), None)


def model_that_trains() -> Any:
    """The model whose `train_step` has called us, if that is Keras 3's or tf_keras' own; None otherwise."""
    return next((f.f_locals.get("self") for f in _frames() if f.f_code.co_name == "train_step"), None)


def entry_point() -> str | None:
    """'fit', 'evaluate' or 'predict' of Keras, whichever has called us, the nearest one; None outside of them."""
    names = (frame.f_code.co_name for frame in _frames())
    return next((name for name in names if name in ("fit", "evaluate", "predict")), None)


def steps_asked() -> int | None:
    """How many steps the nearest caller of `entry_point` was told to make, of an epoch; None if it was not told."""
    names = {"fit": "steps_per_epoch", "evaluate": "steps", "predict": "steps"}
    steps = (f.f_locals.get(names[f.f_code.co_name]) for f in _frames() if f.f_code.co_name in names)
    found = next(steps, None)
    return None if found is None else int(found)


def fit_that_runs() -> tuple[Any, list[Any]] | None:
    """The model whose `fit` has called us, of Keras 3 or tf_keras, and its callbacks; None outside of every `fit`."""
    for frame in _frames():
        callbacks = getattr(frame.f_locals.get("callbacks"), "callbacks", None)
        if frame.f_code.co_name == "fit" and callbacks is not None:
            return frame.f_locals["self"], callbacks
    return None


def batches_of_fit() -> int | None:
    """How many batches an epoch of the `fit` has that has called us; None if Keras does not know."""
    for frame in _frames():
        if frame.f_code.co_name == "fit":
            iterator, handler = frame.f_locals.get("epoch_iterator"), frame.f_locals.get("data_handler")
            known = iterator.num_batches if iterator is not None else getattr(handler, "inferred_steps", None)
            return None if known is None else int(known)
    return None


def batch_of_step() -> Any:
    """The inputs that the `train_step` of Keras 3 or tf_keras trains on that has called us; None outside of one."""
    return next((f.f_locals.get("x") for f in _frames() if f.f_code.co_name == "train_step"), None)


def track(variable: object) -> None:
    """Has the Keras 3 layer that looks `variable` up find it among its variables, if no layer around it does.

    Keras 3 finds variables of its own only: what is an attribute of a layer, or in a list of one, would not be trained.
    """
    layers: list[Any] = [
        layer
        for layer in (frame.f_locals.get("self") for frame in _frames() if frame.f_code.co_name == "__call__")
        if hasattr(layer, "_tracker") and hasattr(layer, "_track_variable")
    ]
    owned = (v for layer in layers for v in (*layer._trainable_variables, *layer._non_trainable_variables))
    if not layers or any(v is variable for v in owned):
        return
    tracker, was_locked = layers[0]._tracker, layers[0]._tracker.locked
    tracker.unlock()  # a layer is built, and locked, before it is called
    layers[0]._track_variable(variable)
    if was_locked:
        tracker.lock()


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if _module(frame).startswith(_KERAS):
            yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
