"""What examples/hosts.sh --check trains: a model whose rows are spread over the workers of several hosts.

Writes what it found to FOLDER/RANK.pickle, says "checked", and, with --forever, trains on until somebody is lost.
"""

from __future__ import annotations

import argparse
import os
import pickle
import socket
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import sok
from sok.job.context import get_transport

STEPS, BATCH, HOTNESS, DIM, VOCABULARY = 20, 2048, 4, 64, 20_000
DEADLINE = 12.0  # seconds; a host that does not answer is lost after half of it


def make_step(tables: list[sok.EmbeddingVariable], dense: tf.keras.layers.Dense):
    rule, rest = sok.optimizers.Adagrad(0.1), tf.keras.optimizers.SGD(0.1)
    rest.build(dense.trainable_variables)

    @tf.function
    def step(ids: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            vectors = sok.group_embedding_lookup_sparse(tables, [ids, ids + 7], combiners=["sum", "mean"])
            logits = dense(tf.concat(vectors, 1))[:, 0]
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.reduce_sum(losses) / BATCH
        tape = sok.DistributedGradientTape(tape, op=sok.Sum)
        of_rows, of_dense = tape.gradient(loss, [tables, dense.trainable_variables])
        rule.apply_gradients(zip(of_rows, tables, strict=True))
        rest.apply_gradients(zip(of_dense, dense.trainable_variables, strict=True))
        return loss

    return step


def batch(number: int) -> tuple[tf.Tensor, tf.Tensor]:
    """This worker's part of a batch that is the same for any number of workers."""
    rng = np.random.default_rng(number)
    ids = rng.integers(0, VOCABULARY, [BATCH, HOTNESS])
    mine = slice(sok.rank() * BATCH // sok.size(), (sok.rank() + 1) * BATCH // sok.size())
    return tf.constant(ids[mine], tf.int64), tf.constant((ids[mine, 0] % 2).astype(np.float32))


def collectives_are_right() -> bool:
    """Whether each gives what NumPy does."""
    if sok.size() == 1:
        return True
    transport, rank, size = get_transport(), sok.rank(), sok.size()
    each = [np.arange(r, r + 5000, dtype=np.float32) for r in range(size)]
    gathered = transport.all_gather(tf.constant(each[rank]), "hosts/gather")
    from_last = transport.broadcast(tf.constant(each[rank]), size - 1, "hosts/broadcast")
    (added,) = transport.grouped_all_reduce([tf.constant(each[rank])], "hosts/reduce", average=False)
    splits = [1000 * (rank + r) for r in range(size)]  # to rank r; what comes from it has the same length
    sent = np.repeat(np.arange(size, dtype=np.float32) + 10 * rank, splits)
    received, _ = transport.all_to_all(tf.constant(sent), tf.constant(splits), "hosts/all_to_all")
    return all(
        np.array_equal(got, wanted)
        for got, wanted in [
            (gathered, np.concatenate(each)),
            (from_last, each[-1]),
            (added, np.sum(each, axis=0)),
            (received, np.repeat([rank + 10 * r for r in range(size)], splits).astype(np.float32)),
        ]
    )


def sent_bytes() -> dict[str, int]:
    """What each interface of this host has sent."""
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return {name.strip(): int(numbers.split()[8]) for name, numbers in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--forever", action="store_true")
    options = parser.parse_args()
    sok.Init(global_batch_size=BATCH, seed=1, deadline=DEADLINE)
    tables = [sok.EmbeddingVariable(DIM, 4 * VOCABULARY, name=f"table_{i}") for i in range(2)]
    dense = tf.keras.layers.Dense(1, kernel_initializer="ones")
    dense.build([None, 2 * DIM])
    step = make_step(tables, dense)
    are_right = collectives_are_right()
    before = sent_bytes()
    with sok.trace() as trace:
        losses = [float(step(*batch(number))) for number in range(STEPS)]
    after = sent_bytes()
    told = {
        "host": socket.gethostname(),
        "interface": os.environ.get("HOROVOD_GLOO_IFACE", ""),
        "shares_memory": getattr(get_transport(), "shares_memory", False),
        "collectives": are_right,
        "losses": losses,
        "rows": [[tensor.numpy() for tensor in table.export()] for table in tables],
        "dense": [variable.numpy() for variable in dense.trainable_variables],
        "handed_over": sum(count["bytes"] for count in trace.by_name.values()),
        "sent": {name: after[name] - before[name] for name in after},
    }
    sok.barrier()
    (options.folder / f"{sok.rank()}.pickle").write_bytes(pickle.dumps(told))
    sok.barrier()
    print("checked", flush=True)
    number = STEPS
    while options.forever:
        step(*batch(number))
        number += 1


if __name__ == "__main__":
    main()
