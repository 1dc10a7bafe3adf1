"""Stock TensorFlow: its fastest way to do each job that we know of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import layer, synthetic, towers, workloads
from benchmarks.contestant import Prepared, Unsupported
from benchmarks.contestants import tensors


def version() -> str:
    return f"TensorFlow {tf.__version__}"


def prepare(job: dict[str, Any]) -> Prepared:
    tensors.set_threads(job["threads"])
    makers = {"w1": _w1, "w2": _w2, "w3": _w3, "w4": _w4, "synthetic": _synthetic, "layer": _layer}
    return makers[job["kind"]](job)


def rows_variable(rows: int, dim: int, seed: int = 1) -> tf.Variable:
    return tf.Variable(tf.random.stateless_uniform([rows, dim], [seed, 1], -0.05, 0.05))


class NumberedRows:
    """Keys to row numbers in a DenseHashTable, rows in a variable: what stock TensorFlow offers for arbitrary keys."""

    def __init__(self, dim: int, room: int, buckets: int) -> None:
        # Initialised in a graph: an eager assignment would hold these gigabytes twice.
        self._rows = tf.Variable(tf.zeros([0, dim]), shape=[None, dim], trainable=False)

        @tf.function
        def initialize() -> None:
            self._rows.assign(tf.random.stateless_uniform([room, dim], [1, 1], -0.05, 0.05))

        initialize()
        self._used = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._index = tf.lookup.experimental.DenseHashTable(
            tf.int64, tf.int64, default_value=-1, empty_key=-1, deleted_key=-2, initial_num_buckets=buckets
        )

    def fill(self, keys: tf.Tensor) -> None:
        self._index.insert(keys, self._used + tf.range(tf.size(keys, tf.int64)))
        self._used.assign_add(tf.size(keys, tf.int64))

    def find(self, keys: tf.Tensor) -> tf.Tensor:
        return tf.gather(self._rows, self._index.lookup(keys))

    def find_or_insert(self, keys: tf.Tensor) -> tf.Tensor:
        # New rows keep the random values that the variable was made with.
        numbers = self._index.lookup(keys)
        missing = tf.where(numbers < 0)
        fresh = self._used + tf.range(tf.size(missing, tf.int64))
        self._used.assign_add(tf.size(missing, tf.int64))
        self._index.insert(tf.gather_nd(keys, missing), fresh)
        return tf.gather(self._rows, tf.tensor_scatter_nd_update(numbers, missing, fresh))


def _w1(job: dict[str, Any]) -> Prepared:
    keys = workloads.load("keys")
    room = len(keys) + 2 * workloads.W1_NEW_STEPS * workloads.W1_LOOKUPS // workloads.W1_NEW_SHARE
    table = NumberedRows(job["dim"], room, 1 << 24)
    for first in range(0, len(keys), 500_000):
        table.fill(tf.constant(keys[first : first + 500_000]))
    signature = [tf.TensorSpec([workloads.W1_LOOKUPS], tf.int64)]
    find = tf.function(table.find, input_signature=signature)
    find_or_insert = tf.function(table.find_or_insert, input_signature=signature)
    prepared = Prepared("DenseHashTable to row numbers, tf.gather")
    for distribution in job.get("distributions", workloads.DISTRIBUTIONS):
        batches = [tf.constant(batch) for batch in workloads.load(f"w1_{distribution}")]
        new = [tf.constant(batch) for batch in workloads.load(f"w1_new_{distribution}")]
        prepared[f"find/{distribution}"] = lambda i, b=batches: find(b[i % len(b)])
        prepared[f"insert/{distribution}"] = lambda i, b=new: find_or_insert(b[i])
        prepared.once.add(f"insert/{distribution}")
    return prepared


def _pooled(tables: Sequence[tf.Variable], ids: Sequence[tf.RaggedTensor], combiner: str) -> list[tf.Tensor]:
    return [
        tf.nn.embedding_lookup_sparse(table, one, None, combiner=combiner, allow_fast_lookup=True)
        for table, one in zip(tables, ids, strict=True)
    ]


def _batches(job: dict[str, Any], distribution: str, keys: Any = None) -> list[list[tf.Tensor]]:
    return [
        tensors.flat(
            workloads.make_bags(
                tables=job["tables"],
                rows=job["rows"],
                batch=job["batch"],
                hotness=job["hotness"],
                distribution=distribution,
                number=number,
            ),
            keys,
        )
        for number in range(workloads.W2_BATCHES)
    ]


def _finders(job: dict[str, Any]) -> list[tf.lookup.experimental.DenseHashTable]:
    """For each table, the row numbers of its keys."""
    indexes, buckets = [], 1 << (2 * job["rows"] - 1).bit_length()  # it takes powers of two
    for t in range(job["tables"]):
        index = tf.lookup.experimental.DenseHashTable(
            tf.int64, tf.int64, default_value=-1, empty_key=-1, deleted_key=-2, initial_num_buckets=buckets
        )
        rows = np.arange(job["rows"], dtype=np.int64)
        index.insert(tf.constant(workloads.hashed_ids(rows, t)), tf.constant(rows))
        indexes.append(index)
    return indexes


def _w2(job: dict[str, Any]) -> Prepared:
    finders = _finders(job) if job.get("finds_keys") else None

    def as_ragged(flat: Sequence[tf.Tensor]) -> list[tf.RaggedTensor]:
        found = tensors.as_ragged(flat)
        return (
            found
            if finders is None
            else [one.with_values(f[one.values]) for f, one in zip(finders, found, strict=True)]
        )

    tables = [rows_variable(job["rows"], job["dim"], t) for t in range(job["tables"])]
    name = job.get("optimizer")
    if name == "lazyadam":
        raise Unsupported("stock TensorFlow has no lazy Adam; its Adam changes every row")
    signature = tensors.flat_signature(job["tables"], job["batch"])
    if name is None:

        @tf.function(input_signature=signature)
        def step(*flat: tf.Tensor) -> list[tf.Tensor]:
            return _pooled(tables, as_ragged(flat), job["combiner"])

    else:
        rule = tensors.stock_optimizer(name)
        rule._create_all_weights(tables)
        upstream = tensors.gradients_for([[job["batch"], job["dim"]]] * job["tables"])

        @tf.function(input_signature=signature)
        def step(*flat: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                outputs = _pooled(tables, as_ragged(flat), job["combiner"])
            gradients = tape.gradient(outputs, tables, output_gradients=upstream)
            rule.apply_gradients(zip(gradients, tables, strict=True))

    prepared = Prepared(
        ("DenseHashTable to row numbers, " if finders is not None else "")
        + "embedding_lookup_sparse(allow_fast_lookup)"
        + (f" + tf_keras legacy {name}" if name else "")
        + (", rows by number: no keys to find" if job["hashed"] and finders is None else "")
    )
    for distribution in job.get("distributions", workloads.DISTRIBUTIONS):
        batches = _batches(job, distribution, None if finders is None else workloads.hashed_ids)
        together = tensors.in_one_call(step, batches)
        prepared[distribution] = lambda i, run=together: run()
        prepared.steps_per_call[distribution] = len(batches)
    return prepared


def _w3(job: dict[str, Any]) -> Prepared:
    keys = [tf.constant(batch) for batch in workloads.load("w3_keys")]
    rows = tf.constant(workloads.load("w3_grads"))

    @tf.function
    def unique(k: tf.Tensor) -> Any:
        return tf.unique(k)

    @tf.function
    def unique_and_sum(k: tf.Tensor) -> Any:
        y, index = tf.unique(k)
        return y, tf.math.unsorted_segment_sum(rows, index, tf.size(y))

    prepared = Prepared("tf.unique, unsorted_segment_sum")
    prepared["unique"] = lambda i: unique(keys[i % len(keys)])
    prepared["sum"] = lambda i: unique_and_sum(keys[i % len(keys)])
    return prepared


def _training_step(
    tables: Sequence[tf.Variable], lookups: Any, model: Any, name: str, signature: Sequence[Any], rate: float
) -> Any:
    rule = tensors.stock_optimizer(name, rate)
    variables = [*tables, *model.variables]
    rule._create_all_weights(variables)

    @tf.function(input_signature=signature)
    def step(dense: tf.Tensor, labels: tf.Tensor, *flat: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model.loss(lookups(flat), dense, labels)
        rule.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step


def _w4(job: dict[str, Any]) -> Prepared:
    tables = [rows_variable(job["rows"], job["dim"], t) for t in range(job["tables"])]
    batch = job["batch"]
    numbers = tf.TensorSpec([batch, workloads.W4_DENSE], tf.float32)
    signature = [numbers, tf.TensorSpec([batch, 1], tf.float32), *tensors.flat_signature(job["tables"], batch)]

    def lookups(flat: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if job["hotness"] == 1:
            return [
                tf.gather(table, tf.ensure_shape(ids, [batch])) for table, ids in zip(tables, flat[0::2], strict=True)
            ]
        return _pooled(tables, tensors.as_ragged(flat), "sum")

    model = towers.Dlrm(job["tables"], job["dim"])
    step = _training_step(tables, lookups, model, job["optimizer"], signature, tensors.LEARNING_RATE)
    clicks = [workloads.click_batch(i, batch) for i in range(workloads.W2_BATCHES)]
    clicks = [(tf.constant(dense), tf.constant(labels)) for dense, labels in clicks]
    prepared = Prepared(f"stock ops + tf_keras legacy {job['optimizer']}")
    for distribution in job.get("distributions", workloads.DISTRIBUTIONS):
        batches = _batches(job, distribution)
        prepared[distribution] = lambda i, b=batches: step(*clicks[i % len(b)], *b[i % len(b)])
    return prepared


def _synthetic(job: dict[str, Any]) -> Prepared:
    model = synthetic.load(job["model"])
    batch = job["batch"]
    tables = [rows_variable(t.rows, t.width, i) for i, t in enumerate(model.tables)]
    features = model.features()

    def lookups(flat: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        outputs = []
        for ids, f in zip(flat, features, strict=True):
            if f.hotness == 1:
                outputs.append(tf.gather(tables[f.table], tf.reshape(ids, [-1])))
            else:
                outputs.append(tf.reduce_sum(tf.gather(tables[f.table], ids), 1))
        return outputs

    step = _training_step(
        tables,
        lookups,
        towers.Tower(model),
        job["optimizer"],
        synthetic.signature(tf, model, batch),
        synthetic.LEARNING_RATES[job["optimizer"]],
    )
    batches = synthetic.batches(tf, model, batch)
    prepared = Prepared(f"gather, reduce_sum + tf_keras legacy {job['optimizer']}")
    prepared["step"] = lambda i: step(*batches[i % len(batches)])
    return prepared


def _layer(job: dict[str, Any]) -> Prepared:
    kind = job["ids"]
    tables = [rows_variable(layer.ROWS, layer.DIM, slot) for slot in range(layer.SLOTS)]
    rule = tensors.stock_optimizer("adagrad")
    rule._create_all_weights(tables)
    upstream = tensors.gradients_for([[layer.BATCH, layer.DIM]] * layer.SLOTS)
    shape = [layer.BATCH, layer.HOTNESS]

    @tf.function(input_signature=[tf.SparseTensorSpec(shape, tf.int64)] * layer.SLOTS)
    def step(*ids: tf.SparseTensor) -> None:
        with tf.GradientTape() as tape:
            outputs = _pooled(tables, ids, "sum")
        rule.apply_gradients(zip(tape.gradient(outputs, tables, output_gradients=upstream), tables, strict=True))

    batches = []
    for bags in layer.batches(kind):
        batch = []
        for slot in range(layer.SLOTS):
            ids, offsets = bags.table(slot)
            # Ids beyond the table are those that nobody has seen: here any rows, each once.
            where = layer.indices(np.diff(offsets))
            batch.append(tf.SparseTensor(tf.constant(where), tf.constant(ids % layer.ROWS), shape))
        batches.append(batch)
    prepared = Prepared("26 embedding_lookup_sparse(allow_fast_lookup) + tf_keras legacy adagrad, rows by number")
    prepared[kind] = lambda i: step(*batches[i % len(batches)])
    if kind == "new":
        step.get_concrete_function()
        prepared.once.add(kind)
    return prepared
