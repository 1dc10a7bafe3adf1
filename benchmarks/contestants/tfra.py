"""TensorFlow Recommenders Addons: dynamic embedding over a cuckoo hash table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_recommenders_addons
from tensorflow_recommenders_addons import dynamic_embedding

from benchmarks import towers, workloads
from benchmarks.contestant import Prepared, Unsupported
from benchmarks.contestants import tensors

_FILL = 500_000


def version() -> str:
    return f"TFRA {tensorflow_recommenders_addons.__version__} (TensorFlow {tf.__version__})"


def prepare(job: dict[str, Any]) -> Prepared:
    tensors.set_threads(job["threads"])
    if job["kind"] in ("w2", "w4") and not job["hashed"]:
        raise Unsupported("all tables of TFRA are hashed")
    makers = {"w1": _w1, "w2": _w2, "w4": _w4}
    if job["kind"] not in makers:
        raise Unsupported("TFRA has no such operation of its own")
    return makers[job["kind"]](job)


def _table(name: str, dim: int, rows: int) -> Any:
    return dynamic_embedding.get_variable(
        name,
        key_dtype=tf.int64,
        value_dtype=tf.float32,
        dim=dim,
        init_size=rows,
        devices=["/CPU:0"],
        initializer=tf.random_uniform_initializer(-0.05, 0.05),
    )


def _fill(table: Any, keys: np.ndarray, dim: int) -> None:
    rows = tf.random.stateless_uniform([min(_FILL, len(keys)), dim], [3, 4], -0.05, 0.05)
    for first in range(0, len(keys), _FILL):
        part = tf.constant(keys[first : first + _FILL])
        table.upsert(part, rows[: len(part)])


def _w1(job: dict[str, Any]) -> Prepared:
    keys = workloads.load("keys")
    table = _table("w1", job["dim"], len(keys) + 3_000_000)
    _fill(table, keys, job["dim"])
    signature = [tf.TensorSpec([workloads.W1_LOOKUPS], tf.int64)]
    find = tf.function(lambda k: table.lookup(k), input_signature=signature)

    @tf.function(input_signature=signature)
    def find_or_insert(batch: tf.Tensor) -> tf.Tensor:
        rows, exists = table.lookup(batch, return_exists=True)
        missing = tf.where(tf.logical_not(exists))
        stored = table.upsert(tf.gather_nd(batch, missing), tf.gather_nd(rows, missing))
        with tf.control_dependencies([] if stored is None else [stored]):
            return tf.identity(rows)

    prepared = Prepared("cuckoo hash table, lookup + upsert")
    for distribution in job.get("distributions", workloads.DISTRIBUTIONS):
        batches = [tf.constant(batch) for batch in workloads.load(f"w1_{distribution}")]
        new = [tf.constant(batch) for batch in workloads.load(f"w1_new_{distribution}")]
        prepared[f"find/{distribution}"] = lambda i, b=batches: find(b[i % len(b)])
        prepared[f"insert/{distribution}"] = lambda i, b=new: find_or_insert(b[i])
        prepared.once.add(f"insert/{distribution}")
    return prepared


def _stacked(job: dict[str, Any]) -> Any:
    """All tables in one: keys of different tables differ, and one lookup is TFRA's fastest."""
    table = _table("stacked", job["dim"], job["rows"] * job["tables"])
    ids = np.arange(job["rows"], dtype=np.int64)
    for t in range(job["tables"]):
        _fill(table, workloads.hashed_ids(ids, t), job["dim"])
    return table


def _batches(job: dict[str, Any], distribution: str) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Keys of all tables, and the segment (sample * T + table) of each, ascending."""
    batches = []
    for number in range(workloads.W2_BATCHES):
        bags = workloads.make_bags(
            tables=job["tables"],
            rows=job["rows"],
            batch=job["batch"],
            hotness=job["hotness"],
            distribution=distribution,
            number=number,
        )
        keys, segments = [], []
        for t in range(bags.num_tables):
            ids, splits = bags.table(t)
            keys.append(workloads.hashed_ids(ids, t))
            segments.append(np.repeat(np.arange(job["batch"]) * job["tables"] + t, np.diff(splits)))
        keys, segments = np.concatenate(keys), np.concatenate(segments)
        order = np.argsort(segments, kind="stable")
        batches.append((tf.constant(keys[order]), tf.constant(segments[order].astype(np.int32))))
    return batches


def _pooled(look_up: Any, keys: tf.Tensor, segments: tf.Tensor, count: int, combiner: str) -> tf.Tensor:
    distinct, index = tf.unique(keys)
    pool = tf.sparse.segment_sum if combiner == "sum" else tf.sparse.segment_mean
    return pool(look_up(distinct), index, segments, num_segments=count)


def _optimizer(name: str) -> Any:
    from tf_keras.optimizers import legacy

    makers = {"adagrad": legacy.Adagrad, "lazyadam": legacy.Adam}
    if name not in makers:
        raise Unsupported(f"TFRA's {name} is lazy: it changes the rows of the batch only")
    return dynamic_embedding.DynamicEmbeddingOptimizer(makers[name](tensors.LEARNING_RATE))


_SIGNATURE = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.int32)]


def _w2(job: dict[str, Any]) -> Prepared:
    name = job.get("optimizer")
    rule = _optimizer(name) if name else None
    table = _stacked(job)
    count = job["batch"] * job["tables"]
    prepared = Prepared(
        "one table, unique + lookup + segment_sum" + (f" + DynamicEmbeddingOptimizer {name}" if name else "")
    )
    if rule is None:

        @tf.function(input_signature=_SIGNATURE)
        def step(keys: tf.Tensor, segments: tf.Tensor) -> tf.Tensor:
            return _pooled(table.lookup, keys, segments, count, job["combiner"])

    else:
        shadow = dynamic_embedding.shadow_ops.ShadowVariable(table, name="shadow")
        upstream = tf.random.stateless_normal([count, job["dim"]], [5, 6], stddev=1e-3)

        @tf.function(input_signature=_SIGNATURE)
        def step(keys: tf.Tensor, segments: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                outputs = _pooled(
                    lambda k: dynamic_embedding.shadow_ops.embedding_lookup(shadow, k),
                    keys,
                    segments,
                    count,
                    job["combiner"],
                )
                loss = tf.reduce_sum(outputs * upstream)
            rule.apply_gradients([(tape.gradient(loss, shadow), shadow)])

    _measure(prepared, job, lambda i, batch: step(*batch), warm=rule is not None)
    return prepared


def _measure(prepared: Prepared, job: dict[str, Any], step: Any, warm: bool) -> None:
    for distribution in job.get("distributions", workloads.DISTRIBUTIONS):
        batches = _batches(job, distribution)
        # Tables of slots start empty: every batch once, so that inserting slots is not measured.
        for i, batch in enumerate(batches if warm else []):
            step(i, batch)
        prepared[distribution] = lambda i, b=batches: step(i, b[i % len(b)])


def _w4(job: dict[str, Any]) -> Prepared:
    rule = _optimizer(job["optimizer"])
    table = _stacked(job)
    shadow = dynamic_embedding.shadow_ops.ShadowVariable(table, name="shadow")
    model = towers.Dlrm(job["tables"], job["dim"])
    variables: Sequence[Any] = [shadow, *model.variables]
    count = job["batch"] * job["tables"]
    clicks = [workloads.click_batch(i, job["batch"]) for i in range(workloads.W2_BATCHES)]
    clicks = [(tf.constant(dense), tf.constant(labels)) for dense, labels in clicks]

    @tf.function(reduce_retracing=True)
    def step(keys: tf.Tensor, segments: tf.Tensor, dense: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = _pooled(
                lambda k: dynamic_embedding.shadow_ops.embedding_lookup(shadow, k), keys, segments, count, "sum"
            )
            rows = tf.reshape(rows, [job["batch"], job["tables"], job["dim"]])
            loss = model.loss(tf.unstack(rows, axis=1), dense, labels)
        rule.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    prepared = Prepared(f"one table + DynamicEmbeddingOptimizer {job['optimizer']}")
    _measure(prepared, job, lambda i, batch: step(*batch, *clicks[i % len(clicks)]), warm=True)
    return prepared
