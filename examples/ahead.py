#!/usr/bin/env python3
"""Keys ahead of the step, exactly: the lookups of the next batches begin while this one is trained.

python examples/ahead.py --depth 2                                    one worker
horovodrun -np 2 python examples/ahead.py --depth 2 --steps 200 --check

horovodrun -np 2 python examples/ahead.py --depth 2 --steps 200 --check --rows

With --check the same batches are trained without `sok.ahead` first, and all rows and slots are compared byte by byte.
Prints one line of JSON. step_ms: medians of whole turns of the loop, without `sok.ahead` and with it. hidden_ms: of a
step, the time that exchanges ahead took beside the program, less what the loop has waited for batches. With --rows,
sent_rows and repaired_rows: how many rows rank 0 has sent ahead, and how many of them again in their step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterable, Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import sok
from sok.job.context import get_transport
from sok.table.state import slot_sets

FEATURES, DIM = 8, 16


class Model:
    """Some tables, pooled, and a dense part."""

    def __init__(self, name: str, vocabulary: int) -> None:
        self.tables = [
            # The same seed, so that models of other names have the same fresh rows.
            sok.EmbeddingVariable(DIM, vocabulary, name=f"{name}_{i}", seed=i, initializer="uniform")
            for i in range(FEATURES)
        ]
        self.dense = tf.keras.Sequential(
            [tf.keras.layers.Dense(n, activation, kernel_initializer=tf.keras.initializers.GlorotUniform(seed=n))
             for n, activation in ((64, "relu"), (32, "relu"), (1, None))]
        )  # fmt: skip
        self.dense.build([None, FEATURES * DIM])
        self.of_rows, self.of_rest = sok.optimizers.Adagrad(0.05), tf.keras.optimizers.Adam(0.01)
        self.of_rest.build(self.dense.trainable_variables)
        self.step = tf.function(self._step)

    def look_up(self, batch: dict[str, tf.Tensor]) -> list[tf.Tensor]:
        ids = tf.unstack(batch["ids"], axis=1)  # [B, FEATURES, n]
        return sok.group_embedding_lookup_sparse(self.tables, ids, combiners="mean")

    def _step(self, batch: dict[str, tf.Tensor], ticket: object) -> tf.Tensor:
        rest = self.dense.trainable_variables
        with tf.GradientTape() as tape:
            if ticket is None:
                vectors = self.look_up(batch)
            else:
                with ticket:  # the keys are with their owners already
                    vectors = self.look_up(batch)
            logits = self.dense(tf.concat(vectors, 1))[:, 0]
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=batch["labels"], logits=logits)
            loss = tf.reduce_mean(losses) / sok.size()
        tape = sok.DistributedGradientTape(tape, op=sok.Sum)
        of_rows, of_rest = tape.gradient(loss, [self.tables, rest])
        self.of_rows.apply_gradients(zip(of_rows, self.tables, strict=True))
        self.of_rest.apply_gradients(zip(of_rest, rest, strict=True))
        return loss

    def left(self) -> Iterator[bytes]:
        """All that training has changed on this worker."""
        for table in self.tables:
            yield from (tensor.numpy().tobytes() for tensor in table.export())
            for slot_set in slot_sets(table):
                yield from (tensor.numpy().tobytes() for tensor in table.slots(slot_set.name))
        yield from (v.numpy().tobytes() for v in [*self.dense.trainable_variables, *self.of_rest.variables])


def data(steps: int, batch_size: int, vocabulary: int) -> tf.data.Dataset:
    """This worker's batches: ids as in click logs, few of them often; clicks depend on them."""

    def batches() -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng(sok.rank())
        for _ in range(steps):
            ids = (rng.zipf(1.2, [batch_size, FEATURES, 4]) % vocabulary).astype(np.int64)
            yield {"ids": ids, "labels": (ids[:, 0, 0] % 2).astype(np.float32)}

    spec = {
        "ids": tf.TensorSpec([batch_size, FEATURES, 4], tf.int64),
        "labels": tf.TensorSpec([batch_size], tf.float32),
    }
    return tf.data.Dataset.from_generator(batches, output_signature=spec).prefetch(2)


def train(model: Model, batches: Iterable[tuple[dict[str, tf.Tensor], object]]) -> tuple[float, float, float]:
    """Milliseconds of a turn of the loop, without the first ones; of them hidden; and the last loss."""
    seconds, waited, loss, start = [], 0.0, 0.0, time.perf_counter()
    with sok.trace() as trace:
        for batch, ticket in batches:
            waited += time.perf_counter() - start
            loss = float(model.step(batch, ticket))
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
    beside = sum(count["seconds"] for name, count in trace.by_name.items() if "/ahead" in name)
    hidden = max(0.0, beside - waited) / max(len(seconds), 1)
    median = statistics.median(seconds[len(seconds) // 10 + 1 :])
    return round(1000 * median, 3), round(1000 * hidden, 3), loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, default=2, help="how many batches begin before their turn")
    parser.add_argument("--rows", action="store_true", help="let rows come home ahead, too, not only keys go there")
    parser.add_argument("--stale", type=int, help="let them be as old as so many steps; changes what training gives")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=1024, help="of all workers together")
    parser.add_argument("--vocabulary", type=int, default=100_000, help="ids of each feature")
    parser.add_argument("--check", action="store_true", help="train without sok.ahead, too, and compare")
    options = parser.parse_args()

    sok.Init(global_batch_size=options.batch_size, seed=0)
    sizes = (options.steps, options.batch_size // sok.size(), options.vocabulary)
    model, before = Model("ahead", options.vocabulary), None
    of_before = 0.0
    if options.check:
        before = Model("before", options.vocabulary)
        of_before, _, _ = train(before, ((batch, None) for batch in data(*sizes)))
    schedule = {"depth": options.depth, "rows": options.rows, "stale": options.stale}
    of_ahead, hidden, loss = train(model, sok.ahead(data(*sizes), model.look_up, **schedule))
    counts = [sok.rows_ahead(table) for table in model.tables]
    rows = {f"{name}_rows": sum(count[name] for count in counts) for name in counts[0]}
    if before is None:
        if sok.rank() == 0:
            print(json.dumps({"loss": round(loss, 4), **rows, "hidden_ms": hidden, "step_ms": of_ahead}))
        return
    is_equal = all(a == b for a, b in zip(model.left(), before.left(), strict=True))
    equal = get_transport().all_gather(tf.constant([is_equal]), "ahead/equal").numpy().all()
    if sok.rank() == 0:
        print(json.dumps({"equal": bool(equal), **rows, "hidden_ms": hidden, "step_ms": [of_before, of_ahead]}))
    assert equal or options.stale, "sok.ahead has changed what training gives"


if __name__ == "__main__":
    main()
