"""Our equivalent of a stock optimizer: same rule, same numbers, same learning rate from then on."""

from __future__ import annotations

import functools
import numbers
import sys
import weakref
from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base.types import Rate, StockOptimizer
from sok.optimizers.adadelta import Adadelta
from sok.optimizers.adagrad import Adagrad
from sok.optimizers.adam import Adam
from sok.optimizers.adamax import Adamax
from sok.optimizers.adamw import AdamW
from sok.optimizers.base import Optimizer
from sok.optimizers.ftrl import Ftrl
from sok.optimizers.group_ftrl import GroupFtrl
from sok.optimizers.lamb import Lamb
from sok.optimizers.lazy_adam import LazyAdam
from sok.optimizers.learning_rate import LearningRate, as_learning_rate
from sok.optimizers.lion import Lion
from sok.optimizers.nadam import Nadam
from sok.optimizers.rmsprop import RMSprop
from sok.optimizers.rowwise import RowWiseAdagrad, RowWiseAdam
from sok.optimizers.sgd import SGD
from sok.table import rules

_CLASSES: tuple[type[Any], ...] = (
    *(SGD, Adagrad, Adam, LazyAdam, RMSprop, Adadelta, Adamax, Nadam, AdamW, Lion, Ftrl),
    *(GroupFtrl, Lamb, RowWiseAdagrad, RowWiseAdam),
)
FUSED: dict[str, type[Any]] = {
    rule: optimizer for optimizer in _CLASSES for rule in optimizer.rules or [optimizer.rule]
}
"""Of the rules that are compiled in, the class that trains by each."""


def matching_optimizer(stock: StockOptimizer, share_iterations: bool = False, lazy: bool = False) -> Optimizer:
    """Returns the optimizer that does to embedding tables what `stock` would do to the equivalent dense tables.

    It uses the stock optimizer's learning rate itself, not its present value: a variable that is assigned later, or a
    schedule, acts on both. `clipnorm` and `clipvalue` are taken over.

    Args:
        stock: a Keras 3 or tf_keras SGD, Adagrad, Adam, AdamW, RMSprop, Adadelta, Adamax, Nadam, Lion or Ftrl, a legacy
            one (`tf_keras.optimizers.legacy`), or a `tf.compat.v1.train` GradientDescentOptimizer, MomentumOptimizer,
            AdagradOptimizer, AdamOptimizer, RMSPropOptimizer, AdadeltaOptimizer or FtrlOptimizer. Exactly these
            classes: a subclass may do anything. A tf_keras LossScaleOptimizer with a fixed scale is looked through. An
            optimizer of ours is returned as it is. Of Ftrl rows outside the batch stay (see `sok.optimizers.Ftrl`).
        share_iterations: False: counts its own steps, starting from what `stock` has counted, so that it does not
            matter which of the two runs first in a step. True: counts in the `iterations` of `stock`
            itself (which v1 optimizers do not have).
        lazy: True: rows outside the batch stay as they are, and Adam and Adamax correct a row's bias by its own
            steps, as OpenEmbedding does.

    Raises:
        ValueError: the optimizer, or an option of it, has no equivalent here; the message says what to pass instead.

    Example:
        >>> import keras, sok
        >>> stock = keras.optimizers.Adam(1e-3)
        >>> ours = sok.optimizers.matching_optimizer(stock)
        >>> stock.learning_rate = 0.5
        >>> float(ours.learning_rate.numpy())
        0.5
    """
    if isinstance(stock, Optimizer):
        return stock
    try:
        return _match(stock, share_iterations, _lazily if lazy else rules.find)
    except _NoMatch as reason:
        raise ValueError(
            f"No optimizer of embedding tables does what {type(stock).__module__}.{type(stock).__name__} would do: "
            f"{reason} Pass one: embedding_optimizer=sok.optimizers.X(...), where X is one of "
            f"{', '.join(optimizer.__name__ for optimizer in _CLASSES)}; it trains the tables, and the stock "
            "optimizer everything else."
        ) from None


class _NoMatch(Exception):
    """Why there is no equivalent; one sentence."""


def _lazily(name: str) -> rules.RowRule:
    """The rule of this formula that leaves rows outside the batch."""
    return rules.find(next(rule for rule in (f"lazy_{name}_by_row", f"lazy_{name}", name) if rule in FUSED))


def _match(stock: Any, share_iterations: bool, form: Callable[[str], rules.RowRule] = rules.find) -> Optimizer:
    stock = _without_loss_scale(stock)
    every = [(name, equal) for name in FUSED for equal in rules.find(name).equals]
    ours = [(n, e) for n, e in every if any(type(stock) is _class_of(*path.split(".", 1)) for path in e.classes)]
    why = _NoMatch(f"known are exactly {', '.join(dict.fromkeys(path for _, e in every for path in e.classes))}.")
    for name, equal in ours:
        if not all(getattr(stock, option, None) for option in equal.requires):
            continue
        try:
            _refuse(stock, *equal.refuses)
            # Where variables are made: legacy ones make theirs on first use, perhaps inside a function.
            with tf.init_scope():
                return _equal(form(name), equal, stock, share_iterations)
        except _NoMatch as reason:
            why = reason
    raise why


def of_rule(rule: str, rate: Rate, hyper: Mapping[str, float], **options: Any) -> Optimizer:
    """The optimizer of the library that trains by this rule."""
    made: Optimizer = FUSED[rule](rate, **hyper, **FUSED[rule]._options_of(rule), **options)
    return made


def _equal(rule: rules.RowRule, equal: rules.Stock, stock: Any, share_iterations: bool) -> Optimizer:
    unlike = equal.unlike(stock)
    if unlike:
        raise _NoMatch(unlike)
    # Numbers first: _legacy_rate turns them into variables, which in a v1 graph have no value yet.
    hyper = {one.name: _number(stock, equal.reads.get(one.name, one.name)) for one in rule.hyper}
    if isinstance(stock, tf.compat.v1.train.Optimizer):
        return of_rule(rule.name, v1_rate(stock), hyper)
    rate = _legacy_rate(stock) if is_legacy(stock) else _keras_rate(stock)
    options = _legacy_options(stock) if is_legacy(stock) else _keras_options(stock, takes=hyper)
    matched = of_rule(rule.name, rate, hyper, **options)
    _follow_iterations(matched, stock, share_iterations)
    return matched


def _class_of(library: str, name: str) -> Any:
    # An optimizer of a library that nobody has imported cannot have come in; importing it would take seconds.
    return functools.reduce(lambda found, part: getattr(found, part, None), name.split("."), sys.modules.get(library))


def _without_loss_scale(stock: Any) -> Any:
    if isinstance(stock, _class_of("keras", "optimizers.LossScaleOptimizer") or ()):
        raise _NoMatch(
            "its gradients are scaled, and a step with one that is not finite must be left out everywhere. Compute in "
            "bfloat16, which needs no scaling, or unscale the gradients of tables yourself (gradient_scale=...)."
        )
    if isinstance(stock, _class_of("tf_keras", "mixed_precision.LossScaleOptimizer") or ()):
        # Its apply_gradients takes gradients that are unscaled already, so a fixed scale changes nothing for us. A
        # moving one makes infinities on purpose, to find its bound, and drops those steps.
        if stock.dynamic:
            raise _NoMatch("a dynamic loss scale drops whole steps, those of dense variables and of tables together.")
        return stock.inner_optimizer
    return stock


def _follow_iterations(matched: Optimizer, stock: Any, share: bool) -> None:
    if share:
        matched._adopt_iterations(stock.iterations)
    elif tf.executing_eagerly() and getattr(stock, "_iterations", None) is not None:
        matched.iterations.assign(int(np.asarray(stock.iterations)))


class _StockRate(LearningRate):
    """The learning rate of a stock optimizer as it is now: a number may be replaced by a schedule at any time."""

    def __init__(self, stock: Any, read: Callable[[Any], Any], decay: float = 0.0) -> None:
        # Weakly: who remembers our optimizer by the stock one must not keep the stock one alive through it.
        self._stock, self._read, self._decay = weakref.ref(stock), read, decay
        self._source = read(stock)
        self._rate = as_learning_rate(self._source)

    def _now(self) -> LearningRate:
        stock = self._stock()
        if stock is not None and self._read(stock) is not self._source:
            self._source = self._read(stock)
            self._rate = as_learning_rate(self._source)
        return self._rate

    @property
    def trackable(self) -> tf.Variable | None:
        return self._now().trackable

    def at(self, iterations: tf.Tensor) -> tf.Tensor:
        rate = self._now().at(iterations)
        # `decay` of legacy optimizers.
        return rate / (1.0 + self._decay * tf.cast(iterations, tf.float64)) if self._decay else rate

    def visible(self, iterations: Any) -> Any:
        return self._now().visible(iterations)

    def assign(self, value: float) -> None:
        self._now().assign(value)

    def describe(self) -> str:
        return self._now().describe()

    def config(self) -> Any:
        return super().config() if self._decay else self._now().config()


# Keras 3, and tf_keras' optimizers that took its shape.


def _keras_rate(stock: Any) -> LearningRate:
    return _StockRate(stock, lambda optimizer: optimizer._learning_rate)


def _keras_options(stock: Any, takes: Container[str]) -> dict[str, Any]:
    refused = ("weight_decay", "use_ema", "loss_scale_factor", "gradient_accumulation_steps")
    _refuse(stock, *(option for option in refused if option not in takes))
    clipnorm, clipvalue = _limit(stock.clipnorm), _limit(stock.clipvalue)
    if _limit(stock.global_clipnorm):
        raise _NoMatch("`global_clipnorm` measures dense gradients and those of tables together.")
    # With both, tf_keras looks at clipnorm only.
    return {"clipnorm": clipnorm, "clipvalue": None if clipnorm else clipvalue}


def is_legacy(stock: StockOptimizer) -> bool:
    return hasattr(stock, "_create_hypers")


# tf_keras.optimizers.legacy: numbers become variables when first used.


def _legacy_rate(stock: Any) -> LearningRate:
    stock._create_hypers()
    # That of Nadam slows its momentum's schedule.
    decay = 0.0 if "Nadam" in type(stock).__name__ else stock._initial_decay
    return _StockRate(stock, lambda optimizer: optimizer._hyper["learning_rate"], decay)


def _legacy_options(stock: Any) -> dict[str, Any]:
    _refuse(stock, "gradient_transformers", "global_clipnorm")
    if getattr(stock.gradient_aggregator, "__name__", "") != "all_reduce_sum_gradients":
        raise _NoMatch("it has a `gradient_aggregator` of its own.")
    if stock.clipnorm is not None and stock.clipvalue is not None:
        raise _NoMatch("it clips twice, by `clipvalue` and by `clipnorm`.")
    return {"clipnorm": stock.clipnorm, "clipvalue": stock.clipvalue}


def v1_rate(stock: StockOptimizer) -> Any:
    return stock._lr if hasattr(stock, "_lr") else stock._learning_rate


def _refuse(stock: Any, *options: str) -> None:
    for option in options:
        value = getattr(stock, option, None)
        if value:
            raise _NoMatch(f"`{option.lstrip('_')}` is {value!r}, which embedding tables do not have.")


def _limit(value: Any) -> Any:
    """Keras takes a limit of 0 as none."""
    return value if value is not None and value > 0 else None


def _number(stock: Any, attribute: str | float | Callable[[Any], float]) -> float:
    if callable(attribute):
        return attribute(stock)
    if isinstance(attribute, float):
        return attribute
    hyper = getattr(stock, "_hyper", {})  # of legacy ones, where numbers become variables
    value = hyper[attribute] if attribute in hyper else getattr(stock, attribute)
    if attribute in hyper and isinstance(value, tf.Variable) and tf.executing_eagerly():
        return float(value.numpy())
    if not isinstance(value, numbers.Real):
        raise _NoMatch(f"`{attribute.lstrip('_')}` must be a number known now, and is {value!r}.")
    return float(value)
