"""The rules that go through tests/sok/test_every_rule.py, and how users ask for each. A new rule is one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

import sok

of = sok.optimizers
stock = keras.optimizers


@dataclasses.dataclass(frozen=True)
class RuleCase:
    make: Callable[..., Any]  # (learning_rate) -> ours
    stock: Callable[..., Any] | None = None  # -> the one of Keras 3 that does the same to a dense table
    rate: float = 0.05


FTRL = {"l1_regularization_strength": 0.02, "l2_regularization_strength": 0.1, "beta": 0.1}

# Each exact rule; 'lazy_' in front of its name is the same with lazy=True.
EXACT = {
    "momentum": RuleCase(
        lambda rate, **more: of.SGD(rate, momentum=0.9, nesterov=True, **more),
        lambda rate: stock.SGD(rate, momentum=0.9, nesterov=True),
        0.005,
    ),
    "rmsprop": RuleCase(lambda rate, **more: of.RMSprop(rate, **more), lambda rate: stock.RMSprop(rate)),
    "rmsprop_momentum": RuleCase(
        lambda rate, **more: of.RMSprop(rate, 0.8, 0.9, **more), lambda rate: stock.RMSprop(rate, 0.8, 0.9), 0.005
    ),
    "rmsprop_centered": RuleCase(
        lambda rate, **more: of.RMSprop(rate, epsilon=1e-2, centered=True, **more),
        lambda rate: stock.RMSprop(rate, epsilon=1e-2, centered=True),
    ),
    "rmsprop_centered_momentum": RuleCase(
        lambda rate, **more: of.RMSprop(rate, 0.9, 0.5, 1e-2, centered=True, **more),
        lambda rate: stock.RMSprop(rate, 0.9, 0.5, 1e-2, centered=True),
    ),
    "adadelta": RuleCase(
        lambda rate, **more: of.Adadelta(rate, epsilon=1e-4, **more),
        lambda rate: stock.Adadelta(rate, epsilon=1e-4),
        1.0,
    ),
    "amsgrad": RuleCase(
        lambda rate, **more: of.Adam(rate, 0.8, 0.99, 1e-3, amsgrad=True, **more),
        lambda rate: stock.Adam(rate, 0.8, 0.99, 1e-3, amsgrad=True),
    ),
    "adamw": RuleCase(lambda rate, **more: of.AdamW(rate, 0.3, **more), lambda rate: stock.AdamW(rate, 0.3)),
    "adamax": RuleCase(
        lambda rate, **more: of.Adamax(rate, epsilon=1e-3, **more), lambda rate: stock.Adamax(rate, epsilon=1e-3)
    ),
    "nadam": RuleCase(
        lambda rate, **more: of.Nadam(rate, epsilon=1e-3, **more), lambda rate: stock.Nadam(rate, epsilon=1e-3)
    ),
    "sgdw": RuleCase(
        lambda rate, **more: of.SGD(rate, momentum=0.8, weight_decay=0.3, **more),
        lambda rate: stock.SGD(rate, momentum=0.8, weight_decay=0.3),
    ),
    "lion": RuleCase(lambda rate, **more: of.Lion(rate, **more), lambda rate: stock.Lion(rate), 0.005),
}
LAZY = {
    **{
        f"lazy_{name}": RuleCase(lambda rate, make=case.make: make(rate, lazy=True), rate=case.rate)
        for name, case in EXACT.items()
    },
    "lazy_adam_by_row": RuleCase(lambda rate: of.Adam(rate, 0.8, 0.99, 1e-3, lazy=True, bias_correction="row")),
    "lazy_adamax_by_row": RuleCase(lambda rate: of.Adamax(rate, epsilon=1e-3, lazy=True, bias_correction="row")),
    "rowwise_adagrad": RuleCase(lambda rate: of.RowWiseAdagrad(rate, 0.1)),
    "rowwise_adam": RuleCase(lambda rate: of.RowWiseAdam(rate, 0.8, 0.99, 1e-3)),
    "lamb": RuleCase(lambda rate: of.Lamb(rate, weight_decay=0.1)),
    "group_ftrl": RuleCase(lambda rate: of.GroupFtrl(rate, 0.7, **FTRL), rate=0.5),
    "ftrl": RuleCase(lambda rate: of.Ftrl(rate, l2_shrinkage_regularization_strength=0.01, **FTRL), rate=0.5),
}
CASES = EXACT | LAZY
