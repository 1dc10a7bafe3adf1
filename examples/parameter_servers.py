"""Trains a small click model on parameter servers: two servers and two workers of this host, one of which is killed.

    python examples/parameter_servers.py --check

This program is the chief: it makes the tables, which lie on the servers, and hands steps to the workers, which are not
in step with one another. On a cluster servers and workers are started by `sok parameter-server`; here they are forked.
Ends with one line of JSON, and with --check with status 1 if anything is not as it has to be.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from sok.tools import parameter_server

USERS, ITEMS, BATCH = 500, 200, 128
SECONDS = 120  # for all steps


def cluster_of(servers: int, workers: int) -> dict[str, list[str]]:
    """Addresses of this host that nobody has."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(1 + servers + workers)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in held]
    for one in held:
        one.close()
    return {"chief": addresses[:1], "ps": addresses[1 : 1 + servers], "worker": addresses[1 + servers :]}


def task(cluster: dict[str, list[str]], job: str, number: int, after: Any = None) -> Any:
    """A process that is a task of the cluster, at once or when `after` is set. To be forked before TensorFlow runs."""

    def run() -> None:
        if after is not None:
            after.wait()
        os._exit(parameter_server.run(cluster, job, number))

    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    return process


def batch(seed: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Users, items, and whether they were clicked."""
    rng, taste = np.random.default_rng(seed), np.random.default_rng(0)
    of_users, of_items = taste.normal(size=USERS), taste.normal(size=ITEMS)
    users, items = rng.integers(0, USERS, BATCH), rng.integers(0, ITEMS, BATCH)
    clicked = rng.random(BATCH) < 1 / (1 + np.exp(-2 * (of_users[users] + of_items[items])))
    return tf.constant(users), tf.constant(items), tf.constant(clicked, tf.float32)


def train(steps: int, cluster: dict[str, list[str]], disturb: Any) -> dict[str, Any]:
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    sok.enable_distributed_strategy("parameter_server")

    with strategy.scope():
        users = sok.EmbeddingVariable(dim=8, capacity=USERS, name="users")
        items = sok.EmbeddingVariable(dim=8, capacity=ITEMS, name="items", placement=sok.row_wise(hash=True))
        weights = tf.Variable(np.random.default_rng(1).normal(size=16).astype(np.float32))
        optimizer = sok.optimizers.Adagrad(0.3)
        updates = tf.Variable(0, dtype=tf.int64, trainable=False)

    @tf.function
    def step(user_ids: tf.Tensor, item_ids: tf.Tensor, clicked: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = sok.group_embedding_lookup([users, items], [user_ids, item_ids])  # one request to each server
            logits = tf.linalg.matvec(tf.concat(rows, 1), weights)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(clicked, logits))
        *of_tables, of_weights = tape.gradient(loss, [users, items, weights])
        optimizer.apply_gradients(zip(of_tables, [users, items], strict=True))  # and one more
        weights.assign_sub(0.1 * of_weights)
        updates.assign_add(1)
        return loss

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    begun, results = time.monotonic(), []
    for number in range(steps):
        results.append(coordinator.schedule(step, args=batch(number)))
        disturb(number)
    while not coordinator.done():
        if time.monotonic() - begun > SECONDS:
            raise TimeoutError(f"{steps} steps were not done in {SECONDS} s.")
        time.sleep(0.01)
    coordinator.join()  # all workers are at rest: what is saved now is of one instant
    losses = [float(result.fetch()) for result in results]

    with tempfile.TemporaryDirectory() as folder:
        sok.save(folder, [users, items], [optimizer])
        keys, rows = users.export()
        users.erase(keys)
        sok.restore(folder, [users, items], [optimizer])
    again = users.sparse_read(keys)
    return {
        "steps": steps,
        "updates": int(updates),  # a step whose worker was killed may have been done twice
        "first_loss": round(float(np.mean(losses[:10])), 4),
        "last_loss": round(float(np.mean(losses[-10:])), 4),
        "rows": {table.table_name: int(table.num_rows()) for table in (users, items)},
        "finite": bool(np.isfinite(rows).all()),
        "restored": bool(tf.reduce_all(again == rows)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()

    cluster = cluster_of(servers=2, workers=2)
    tasks = [task(cluster, job, number) for job in ("ps", "worker") for number in range(2)]
    may_begin = multiprocessing.get_context("fork").Event()
    tasks.append(task(cluster, "worker", 1, after=may_begin))

    def disturb(number: int) -> None:
        if number == options.steps // 3:
            tasks[3].kill()
            tasks[3].join()
        if number == options.steps // 2:
            may_begin.set()

    said = None
    try:
        said = train(options.steps, cluster, disturb)
    except Exception:
        traceback.print_exc()
    finally:
        for process in tasks:
            process.kill()
    if said is None:
        os._exit(1)  # without the end of the strategy, which would wait for its servers
    print(json.dumps(said), flush=True)
    fine = said["updates"] >= options.steps and said["finite"] and said["restored"]
    fine = fine and said["last_loss"] < said["first_loss"]
    os._exit(0 if fine or not options.check else 1)


if __name__ == "__main__":
    sys.exit(main())
