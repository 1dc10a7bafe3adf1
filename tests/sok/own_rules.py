"""Rules that tests alone have, and functions that are none."""

import numpy as np

import sok

LIMIT = 0.5


@sok.optimizers.rule(slots=["m"], scalars=["count"], hyper=["learning_rate", "beta"])
def signum(w, g, m, count, learning_rate, beta):
    count[0] += 1
    m[:] = beta * m + (1 - beta) * g
    w[:] -= learning_rate * np.sign(m)


@sok.optimizers.rule(
    slots={"accumulator": "initial_accumulator_value"},
    hyper=["learning_rate", "initial_accumulator_value", "epsilon"],
)
def adagrad(w, g, accumulator, learning_rate=0.1, initial_accumulator_value=0.1, epsilon=1e-7):
    """Adagrad, as Keras has it."""
    accumulator += g * g
    w -= learning_rate * g / np.sqrt(accumulator + epsilon)


@sok.optimizers.rule(slots={"accumulator": 0.1}, hyper=["learning_rate", "epsilon"], per="element")
def by_element(w, g, accumulator, learning_rate=0.1, epsilon=1e-7):
    accumulator += g * g
    return w - learning_rate * g / np.sqrt(accumulator + epsilon), accumulator


@sok.optimizers.rule(slots=["m", "v"], scalars={"power": 1.0}, hyper=["learning_rate", "beta"])
def with_everything(w, g, m, v, power, touches, step, learning_rate=0.1, beta=0.5):
    power[0] *= beta
    m[:] = beta * m + (1 - beta) * g
    v[:] = np.maximum(v, np.abs(m))
    norm = 0.0
    for j in range(len(g)):
        norm += g[j] * g[j]
    if norm > LIMIT:
        u = np.clip(m, -0.5, LIMIT) / (1 - power[0])
    else:
        u = np.where(m > 0, m, 2 * m)
    rate = learning_rate / np.sqrt(1 + touches + step % 3)
    w[:] -= rate * u / (np.sqrt(np.mean(np.square(u))) + 1e-3)


@sok.optimizers.rule(slots=["m"], version=3, per="element")
def versioned(w, g, m, step, learning_rate=0.1):
    m = m + g if abs(g) > 0.1 else m / 2
    return w - learning_rate * m / step, m


@sok.optimizers.rule(slots=["seen"], hyper=["learning_rate"])
def by_key(w, g, seen, key, learning_rate=0.1):
    seen[:] = key
    w -= (1 + key % 3) * learning_rate * g


@sok.optimizers.rule(slots=["total"])
def divides(w, g, total, learning_rate=0.1):
    total += g
    w -= learning_rate * g / total


ALL = [by_key, lambda: signum(0.1, beta=0.9), adagrad, by_element, with_everything, versioned]


def plain(w, g, learning_rate):
    w -= learning_rate * g


def with_m(w, g, m, learning_rate):
    w -= learning_rate * g


def no_name(w, g, learning_rate):
    w[:] -= g
    w[:] -= undefined * g  # noqa: F821


def no_type(w, g, learning_rate):
    w[:] -= g
    w.nobody()


def returns_two(w, g, learning_rate):
    return w, g


def plain_too(w, g, learning_rate):
    w -= 2 * learning_rate * g


def ramp(key, column):
    return key + column


def other_ramp(key, column, random):
    return key + random


def endless(key, column):
    return 1 / key


def unfinished(key, column):
    return undefined  # noqa: F821


def _changed(w, g, accumulator, learning_rate=0.1, epsilon=1e-7):
    accumulator += 2 * g * g
    return w - learning_rate * g / np.sqrt(accumulator + epsilon), accumulator


_changed.__name__, _changed.__qualname__ = "by_element", "changed"
changed = sok.optimizers.rule(slots={"accumulator": 0.1}, hyper=["learning_rate", "epsilon"], per="element")(_changed)


def half(key, column, random):
    """An initializer."""
    return 0.5
