"""python -m benchmarks.own_rule: Adagrad as a rule of one's own, compiled by Numba, beside the built-in one.

For each dim two tables of a million rows, one row in use for each key, and updates of 65,536 distinct rows in random
order, the two rules in turns. Prints a line of a table: nanoseconds a row of each, the median of all updates, and the
median and quartiles of their quotients, turn by turn. docs/own_rules.md has the figures.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import tensorflow as tf

import sok
from benchmarks.machine import describe
from sok.lookup.lookup import lookup_rows
from sok.optimizers import gradients

HYPER = [0.1, 0.1, 1e-7]


@sok.optimizers.rule(slots={"accumulator": "initial"}, hyper=["learning_rate", "initial", "epsilon"])
def by_row(w, g, accumulator, learning_rate=0.1, initial=0.1, epsilon=1e-7):
    accumulator += g * g
    w -= learning_rate * g / np.sqrt(accumulator + epsilon)


@sok.optimizers.rule(slots={"accumulator": "initial"}, hyper=["learning_rate", "initial", "epsilon"], per="element")
def by_element(w, g, accumulator, learning_rate=0.1, initial=0.1, epsilon=1e-7):
    accumulator += g * g
    return w - learning_rate * g / np.sqrt(accumulator + epsilon), accumulator


def measure(dim: int, rows: int, batch: int, rounds: int) -> str:
    rng = np.random.default_rng(0)
    optimizers = {
        "built-in": sok.optimizers.Adagrad(*HYPER),
        "row": by_row(),
        "element": by_element(),
    }
    tables = {
        name: sok.EmbeddingVariable(dim, rows, hashed=False, initializer="ones", name=f"{name}_{dim}")
        for name in optimizers
    }
    values = tf.constant(rng.normal(size=[batch, dim]).astype(np.float32))
    parts = np.array_split(rng.permutation(rows).astype(np.int64), rows // batch)
    parts = [part[:batch] for part in parts if len(part) >= batch]
    ids = {}
    for name, table in tables.items():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(lookup_rows(table, tf.range(rows, dtype=tf.int64)))
        slices = tape.gradient(loss, table)  # makes all rows
        optimizers[name].apply_gradients([(slices, table)])
        every = slices.indices.numpy()
        ids[name] = [tf.constant(every[part]) for part in parts]
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    names = list(optimizers)
    for turn in range(rounds * len(parts)):
        for name in (*names[turn % 3 :], *names[: turn % 3]):
            ready = [gradients.TableGradient(tables[name], ids[name][turn % len(parts)], values, distinct=True)]
            optimizer = optimizers[name]
            begin = time.perf_counter()
            gradients.apply(ready, 1, HYPER, optimizer.rule, optimizer.slot_set, "allow")
            seconds[name].append(time.perf_counter() - begin)
    warm = {name: np.array(taken[len(parts) :]) for name, taken in seconds.items()}
    cells = [str(dim), *(f"{1e9 * np.median(warm[name]) / batch:.1f}" for name in names)]
    for name in names[1:]:
        low, middle, high = np.percentile(warm[name] / warm["built-in"], [25, 50, 75])
        cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=6, help="over all rows; the first one warms up")
    args = parser.parse_args()
    about = describe()
    print(f"{about['cpu']}, {about['usable_cores']} cores, {about['isa']}")
    print("| dim | built-in, ns | of a row, ns | of an element, ns | row / built-in | element / built-in |")
    print("|---|---|---|---|---|---|", flush=True)
    for dim in args.dims:
        print(measure(dim, args.rows, args.batch, args.rounds), flush=True)


if __name__ == "__main__":
    main()
