"""RMSprop: with or without momentum, with or without the mean gradient taken off. Each has the slots that it needs."""

from __future__ import annotations

from typing import Any

from sok.table.rules.rule import Hyper, RowRule, Slot, Stock, decay_rate, flag

_HYPER = (
    Hyper("momentum", decay_rate),
    Hyper("rho", decay_rate),
    Hyper("epsilon"),
    Hyper("epsilon_in_root", flag),
    Hyper("initial_velocity"),
)
_KERAS = {"epsilon_in_root": 1.0, "initial_velocity": 0.0}
_LEGACY = {"epsilon_in_root": lambda stock: float(stock._momentum), "initial_velocity": 0.0}
_V1: dict[str, Any] = {
    **{"rho": "_decay", "momentum": "_momentum", "epsilon": "_epsilon"},
    **{"epsilon_in_root": 1.0, "initial_velocity": 1.0},
}


def _rule(name: str, slots: tuple[Slot, ...], formerly: tuple[str, ...]) -> RowRule:
    options = {word: word in name for word in ("momentum", "centered")}

    def stock(classes: tuple[str, ...], reads: dict[str, Any], **attributes: str) -> Stock:
        on = tuple(attributes[option] for option, is_on in options.items() if is_on)
        return Stock(classes, reads, requires=on, refuses=tuple(a for a in attributes.values() if a not in on))

    return RowRule(
        name,
        slots=slots,
        hyper=_HYPER,
        decays=True,
        lazy=f"lazy_{name}",
        equals=(
            stock(
                ("keras.optimizers.RMSprop", "tf_keras.optimizers.RMSprop"),
                _KERAS,
                momentum="momentum",
                centered="centered",
            ),
            stock(("tf_keras.optimizers.legacy.RMSprop",), _LEGACY, momentum="_momentum", centered="centered"),
            stock(("tensorflow.compat.v1.train.RMSPropOptimizer",), _V1, momentum="_momentum", centered="_centered"),
        ),
        formerly=formerly,
    )


_VELOCITY, _MOMENTUM, _AVERAGE = Slot("velocity", start="initial_velocity"), Slot("momentum"), Slot("average_gradient")

RMSPROP = _rule("rmsprop", (_VELOCITY,), ("RMSprop(velocity)", "RMSprop(rms)"))
RMSPROP_MOMENTUM = _rule(
    "rmsprop_momentum",
    (_VELOCITY, _MOMENTUM),
    ("RMSprop(velocity,momentum)", "RMSprop(rms,momentum)", "RMSPropOptimizer(rms,momentum)"),
)
RMSPROP_CENTERED = _rule(
    "rmsprop_centered", (_VELOCITY, _AVERAGE), ("RMSprop(velocity,average_gradient)", "RMSprop(rms,mg)")
)
RMSPROP_CENTERED_MOMENTUM = _rule(
    "rmsprop_centered_momentum",
    (_VELOCITY, _MOMENTUM, _AVERAGE),
    ("RMSprop(velocity,momentum,average_gradient)", "RMSprop(rms,momentum,mg)"),
)
LAZY_RMSPROP, LAZY_RMSPROP_MOMENTUM = RMSPROP.lazily(), RMSPROP_MOMENTUM.lazily()
LAZY_RMSPROP_CENTERED = RMSPROP_CENTERED.lazily()
LAZY_RMSPROP_CENTERED_MOMENTUM = RMSPROP_CENTERED_MOMENTUM.lazily()
