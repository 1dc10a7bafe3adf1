"""Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sok.table.rules.rule import Hyper, RowRule, Slot, Stock


def _epsilon_of_legacy(stock: Any) -> str:
    # It adds epsilon to the root where we add it under the root. Without any, we differ by epsilon / sqrt(accumulator),
    # which float32 hardly sees for the usual values.
    start = stock._initial_accumulator_value
    if start > 0 and stock.epsilon <= 1e-6 * start**0.5:
        return ""
    return "its `epsilon` stands outside the root and is too large beside `initial_accumulator_value`."


def divides_by_zero(hyper: Mapping[str, float]) -> str:
    if hyper["initial_accumulator_value"] + hyper["epsilon"] > 0:
        return ""
    return "One of `initial_accumulator_value` and `epsilon` must be above 0: a zero gradient would divide 0 by 0."


_WITHOUT_EPSILON: dict[str, str | float] = {"initial_accumulator_value": "_initial_accumulator_value", "epsilon": 0.0}

ADAGRAD = RowRule(
    "adagrad",
    slots=(Slot("accumulator", start="initial_accumulator_value"),),
    hyper=(Hyper("initial_accumulator_value"), Hyper("epsilon")),
    dumped_as="Adagrad",
    equals=(
        Stock(("keras.optimizers.Adagrad", "tf_keras.optimizers.Adagrad")),
        Stock(("tf_keras.optimizers.legacy.Adagrad",), _WITHOUT_EPSILON, unlike=_epsilon_of_legacy),
        Stock(("tensorflow.compat.v1.train.AdagradOptimizer",), _WITHOUT_EPSILON),
    ),
    error=divides_by_zero,
)
