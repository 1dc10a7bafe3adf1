"""What a step of each update rule does to the rows of a batch, or of an exact rule to all rows, in float64.

`STEPS[rule](weights, slots, grads, hyper, step)` gives (weights, slots): [rows, D] each, or [rows, 1] of scalars;
`hyper` has the learning rate and what the rule takes besides, by name; `step` counts from 1.
Names are those without 'lazy_'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Slots = tuple[np.ndarray, ...]
Step = Callable[[np.ndarray, Slots, np.ndarray, Mapping[str, float], int], tuple[np.ndarray, Slots]]


def _momentum(w, slots, g, h, step):
    (m,), rate = slots, h["learning_rate"]
    if h["rate_in_velocity"]:
        m = h["momentum"] * m - rate * g
        return (w + h["momentum"] * m - rate * g if h["nesterov"] else w + m), (m,)
    m = h["momentum"] * m + g
    return w - rate * (g + h["momentum"] * m if h["nesterov"] else m), (m,)


def _sgdw(w, slots, g, h, step):
    return _momentum(w - h["learning_rate"] * h["weight_decay"] * w, slots, g, {**h, "rate_in_velocity": 1}, step)


def _rmsprop(has_momentum: bool, centered: bool) -> Step:
    def step(w, slots, g, h, step):
        v, *others = slots
        rho = h["rho"]
        v = rho * v + (1 - rho) * g**2
        variance, after = v, [v]
        if centered:
            mean = rho * others[-1] + (1 - rho) * g
            variance = v - mean**2
        root = np.sqrt(variance + h["epsilon"]) if h["epsilon_in_root"] else np.sqrt(variance) + h["epsilon"]
        moved = h["learning_rate"] * g / root
        if has_momentum:
            moved = h["momentum"] * others[0] + moved
            after.append(moved)
        if centered:
            after.append(mean)
        return w - moved, tuple(after)

    return step


def _adadelta(w, slots, g, h, step):
    a, b = slots
    a = h["rho"] * a + (1 - h["rho"]) * g**2
    moved = g * np.sqrt(b + h["epsilon"]) / np.sqrt(a + h["epsilon"])
    b = h["rho"] * b + (1 - h["rho"]) * moved**2
    return w - h["learning_rate"] * moved, (a, b)


def _moments(m, v, g, h):
    return m + (g - m) * (1 - h["beta_1"]), v + (g**2 - v) * (1 - h["beta_2"])


def _alpha(h, step):
    return h["learning_rate"] * np.sqrt(1 - h["beta_2"] ** step) / (1 - h["beta_1"] ** step)


def _amsgrad(w, slots, g, h, step):
    m, v = _moments(*slots[:2], g, h)
    vhat = np.maximum(slots[2], v)
    return w - _alpha(h, step) * m / (np.sqrt(vhat) + h["epsilon"]), (m, v, vhat)


def _adamw(w, slots, g, h, step):
    m, v = _moments(*slots, g, h)
    w = w - h["learning_rate"] * h["weight_decay"] * w
    return w - _alpha(h, step) * m / (np.sqrt(v) + h["epsilon"]), (m, v)


def _adamax(w, slots, g, h, step):
    m, v = slots
    m, v = m + (g - m) * (1 - h["beta_1"]), np.maximum(h["beta_2"] * v, np.abs(g))
    return w - h["learning_rate"] / (1 - h["beta_1"] ** step) * m / (v + h["epsilon"]), (m, v)


def _nadam(w, slots, g, h, step):
    m, v = _moments(*slots, g, h)

    def u(t):
        return h["beta_1"] * (1 - 0.5 * 0.96 ** (h["schedule_decay"] * t))

    product = np.prod([u(t) for t in range(1, step + 1)])
    hat = u(step + 1) * m / (1 - product * u(step + 1)) + (1 - u(step)) * g / (1 - product)
    return w - h["learning_rate"] * hat / (np.sqrt(v / (1 - h["beta_2"] ** step)) + h["epsilon"]), (m, v)


def _ftrl(w, slots, g, h, step):
    n, z = slots
    power, lr, l1 = -h["learning_rate_power"], h["learning_rate"], h["l1_regularization_strength"]
    l2 = h["l2_regularization_strength"] + h["beta"] / (2 * lr)
    grown = n + g**2
    z = z + g + 2 * h["l2_shrinkage_regularization_strength"] * w - (grown**power - n**power) / lr * w
    return (np.clip(z, -l1, l1) - z) / (grown**power / lr + 2 * l2), (grown, z)


def _lion(w, slots, g, h, step):
    (m,) = slots
    w = w - h["learning_rate"] * np.sign(h["beta_1"] * m + (1 - h["beta_1"]) * g)
    return w, (h["beta_2"] * m + (1 - h["beta_2"]) * g,)


def _rowwise_adagrad(w, slots, g, h, step):
    a = slots[0] + np.mean(g**2, axis=1, keepdims=True)
    return w - h["learning_rate"] * g / (np.sqrt(a) + h["epsilon"]), (a,)


def _corrected(m, v, h, step):
    return m / (1 - h["beta_1"] ** step) / (np.sqrt(v / (1 - h["beta_2"] ** step)) + h["epsilon"])


def _rowwise_adam(w, slots, g, h, step):
    m, v = slots
    m = m + (g - m) * (1 - h["beta_1"])
    v = v + (np.mean(g**2, axis=1, keepdims=True) - v) * (1 - h["beta_2"])
    return w - h["learning_rate"] * _corrected(m, v, h, step), (m, v)


def _lamb(w, slots, g, h, step):
    m, v = _moments(*slots, g, h)
    moved = _corrected(m, v, h, step) + h["weight_decay"] * w
    of_rows, of_steps = (np.linalg.norm(x, axis=1, keepdims=True) for x in (w, moved))
    ratio = np.where((of_rows > 0) & (of_steps > 0), of_rows / np.where(of_steps > 0, of_steps, 1), 1)
    return w - h["learning_rate"] * ratio * moved, (m, v)


def _group_ftrl(w, slots, g, h, step):
    _, (n, z) = _ftrl(w, slots, g, h, step)
    s = np.clip(z, -h["l1_regularization_strength"], h["l1_regularization_strength"]) - z
    norms = np.linalg.norm(s, axis=1, keepdims=True)
    left = np.maximum(0, 1 - h["l21_regularization_strength"] * np.sqrt(w.shape[1]) / np.maximum(norms, 1e-30))
    lr, l2 = h["learning_rate"], h["l2_regularization_strength"] + h["beta"] / (2 * h["learning_rate"])
    return left * s / (n ** -h["learning_rate_power"] / lr + 2 * l2), (n, z)


def _adam(w, slots, g, h, step):
    m, v = _moments(*slots, g, h)
    return w - _alpha(h, step) * m / (np.sqrt(v) + h["epsilon"]), (m, v)


def _by_row(of: Step) -> Step:
    def step(w, slots, g, h, step):
        *slots, count = slots
        w, slots = of(w, tuple(slots), g, h, count + 1)
        return w, (*slots, count + 1)

    return step


STEPS: dict[str, Step] = {
    "momentum": _momentum,
    "rmsprop": _rmsprop(False, False),
    "rmsprop_momentum": _rmsprop(True, False),
    "rmsprop_centered": _rmsprop(False, True),
    "rmsprop_centered_momentum": _rmsprop(True, True),
    "adadelta": _adadelta,
    "amsgrad": _amsgrad,
    "adamw": _adamw,
    "adamax": _adamax,
    "nadam": _nadam,
    "ftrl": _ftrl,
    "lion": _lion,
    "sgdw": _sgdw,
    "rowwise_adagrad": _rowwise_adagrad,
    "rowwise_adam": _rowwise_adam,
    "lamb": _lamb,
    "group_ftrl": _group_ftrl,
    "adam_by_row": _by_row(_adam),
    "adamax_by_row": _by_row(_adamax),
}
