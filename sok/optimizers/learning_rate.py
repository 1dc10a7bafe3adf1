"""Where an optimizer's learning rate comes from: a number, a variable, a tensor, a schedule or a function."""

from __future__ import annotations

import inspect
import math
import numbers
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base.types import Rate, Variable
from sok.job import context


class LearningRate:
    """One learning rate: its value at a step, what a user sees of it, and how it is set and saved."""

    @property
    def trackable(self) -> tf.Variable | None:
        """The tf.Variable that a checkpoint keeps, if any."""
        return None

    def at(self, iterations: tf.Tensor) -> tf.Tensor:
        """Returns the rate of the step after `iterations` steps (int64 []), as float64 []."""
        return tf.cast(self.visible(iterations), tf.float64)

    def visible(self, iterations: tf.Tensor | tf.Variable) -> Any:
        """What the optimizer's `learning_rate` property gives."""
        raise NotImplementedError

    def assign(self, value: float) -> None:
        raise TypeError(
            f"`learning_rate` cannot be set to a number: this optimizer was made with {self.describe()}. "
            "Make it with a number to have it settable."
        )

    def describe(self) -> str:
        raise NotImplementedError

    def config(self) -> Any:
        raise TypeError(
            f"get_config() cannot write down a learning rate that is {self.describe()}. "
            "Use a number or a Keras LearningRateSchedule."
        )


class VariableRate(LearningRate):
    """A tf.Variable or a Keras variable: assignments act inside compiled functions too."""

    def __init__(self, variable: Variable) -> None:
        self.variable = variable

    @property
    def trackable(self) -> tf.Variable | None:
        return self.variable if isinstance(self.variable, tf.Variable) else getattr(self.variable, "value", None)

    def at(self, iterations: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.convert_to_tensor(self.variable), tf.float64)

    def visible(self, iterations: tf.Tensor | tf.Variable) -> Any:
        return self.variable

    def assign(self, value: float) -> None:
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise RuntimeError(
                "`learning_rate` is a variable of a graph: setting it here would only make an op that nobody runs. "
                "Run variable.assign(...) or variable.load(...) in the session."
            )
        self.variable.assign(value)

    def describe(self) -> str:
        return f"the variable {self.variable.name!r}"

    def config(self) -> Any:
        try:
            return float(np.asarray(self.variable))
        except (TypeError, ValueError, NotImplementedError):  # a variable of a v1 graph has no value outside a session
            return super().config()


class GraphConstantRate(LearningRate):
    """A number in a v1 graph, where it becomes a constant of the ops that use it."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.is_used = False

    def at(self, iterations: tf.Tensor) -> tf.Tensor:
        self.is_used = True
        return tf.constant(np.float32(self.value), tf.float64)

    def visible(self, iterations: tf.Tensor | tf.Variable) -> Any:
        return self.value

    def assign(self, value: float) -> None:
        if self.is_used:
            raise RuntimeError(
                "`learning_rate` is a constant of ops that are already in the graph. To change it between steps, pass "
                "a tf.compat.v1.Variable, a placeholder or a tensor as `learning_rate`."
            )
        self.value = value

    def describe(self) -> str:
        return "a number"

    def config(self) -> Any:
        return self.value


class TensorRate(LearningRate):
    """A tensor or placeholder of a v1 graph."""

    def __init__(self, tensor: tf.Tensor) -> None:
        self.tensor = tensor

    def visible(self, iterations: tf.Tensor | tf.Variable) -> Any:
        return self.tensor

    def describe(self) -> str:
        return f"the tensor {self.tensor.name!r}"


class ScheduleRate(LearningRate):
    """A function of the number of steps done: a Keras schedule or any callable with one argument."""

    def __init__(self, schedule: Callable[[Any], Any]) -> None:
        self.schedule = schedule

    def visible(self, iterations: tf.Tensor | tf.Variable) -> Any:
        return tf.convert_to_tensor(self.schedule(tf.convert_to_tensor(iterations)))

    def describe(self) -> str:
        return f"the schedule {type(self.schedule).__name__}"

    def config(self) -> Any:
        for library in ("keras", "tf_keras"):
            schedules = _schedules_of(library)
            if schedules is not None and isinstance(self.schedule, schedules.LearningRateSchedule):
                # Both libraries write the same module name, so the dictionary alone would not say whose it is.
                return {"library": library, "schedule": schedules.serialize(self.schedule)}
        return super().config()


class CallableRate(LearningRate):
    """A function without arguments, called when the step is run or, inside a compiled function, traced."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def visible(self, iterations: tf.Tensor | tf.Variable) -> Any:
        return tf.convert_to_tensor(self.function())

    def describe(self) -> str:
        return "a function"


def as_learning_rate(value: Rate) -> LearningRate:
    """Makes a LearningRate of whatever a user may pass as `learning_rate`.

    Raises:
        TypeError: not a number, variable, tensor, schedule or function of at most one argument.
        ValueError: a number that is negative or not finite.
    """
    if isinstance(value, LearningRate):
        return value
    if isinstance(value, dict):
        return as_learning_rate(_deserialize_schedule(value))
    if isinstance(value, tf.Variable) or _is_keras_variable(value):
        return VariableRate(value)
    if tf.is_tensor(value):
        if hasattr(value, "numpy"):
            return as_learning_rate(np.asarray(value))
        if tf.compat.v1.executing_eagerly_outside_functions():
            raise TypeError(
                "`learning_rate` must not be a tensor of a function that is being traced: it would not outlive it. "
                f"Pass a tf.Variable. Received: {value}."
            )
        return TensorRate(value)
    if callable(value):
        return ScheduleRate(value) if _takes_step(value) else CallableRate(value)
    number = checked_number(value)
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return GraphConstantRate(number)
    with tf.init_scope(), tf.device(context.variables_device()):
        return VariableRate(tf.Variable(number, dtype=tf.float32, trainable=False, name="learning_rate"))


def checked_number(value: object) -> float:
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "fiu":
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            "`learning_rate` must be a number, a tf or Keras variable, a LearningRateSchedule, or a function of the "
            f"step or of nothing. Received: {value!r}."
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    # Rows are float32, so that is what it has to be finite in.
    if not 0 <= number <= float(tf.float32.max):
        raise ValueError(f"`learning_rate` must be finite in float32 and not negative. Received: {number}.")
    return number


def _is_keras_variable(value: Any) -> bool:
    # Asking only a Keras that is already there: importing it takes seconds.
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(value, getattr(keras, "Variable", ()))


def _schedules_of(library: str) -> Any:
    module = sys.modules.get(library)
    return None if module is None else module.optimizers.schedules


def _deserialize_schedule(config: dict[str, Any]) -> Any:
    if config.get("library") == "tf_keras":
        import tf_keras as library
    else:
        import keras as library
    return library.optimizers.schedules.deserialize(config.get("schedule", config))


def _takes_step(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have no signature
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    if len(required) > 1:
        raise TypeError(
            "`learning_rate` as a function must take the step or nothing. Received: a function that needs "
            f"{len(required)} arguments: {function!r}."
        )
    if required or any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return True
    # Keras schedules name their argument `step`; `lambda rate=0.1: rate` wants nothing.
    return bool(positional) and positional[0].name == "step"
