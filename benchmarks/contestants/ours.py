"""sok, through its public Python API inside a tf.function."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import sok
from benchmarks import layer, machine, merlin, probes, synthetic, timeline, towers, workloads
from benchmarks.contestant import Prepared
from benchmarks.contestants import tensors
from sok.lookup.feature import Csr, Feature
from sok.lookup.lookup import lookup_group, lookup_rows

_FILL = 500_000  # rows made at a time before timing starts


def version() -> str:
    return machine.sok_version()


def prepare(job: dict[str, Any]) -> Prepared:
    tensors.set_threads(job["threads"])
    sok.Init(seed=1)
    makers = {
        "w1": _w1,
        "w2": _w2,
        "w3": _w3,
        "w4": _w4,
        "synthetic": _synthetic,
        "merlin": _merlin,
        "layer": _layer,
        "memory": _memory,
        "startup": _startup,
    }
    return makers[job["kind"]](job)


def optimizer(name: str, learning_rate: float = tensors.LEARNING_RATE) -> Any:
    makers = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam", "lazyadam": "LazyAdam"}
    return getattr(sok.optimizers, makers[name])(learning_rate)


def fill(table: Any, keys: np.ndarray) -> None:
    """Makes the rows of `keys`; on several workers those that this one owns get here by the exchange."""
    for first in range(0, len(keys), _FILL):
        # The rows themselves are not wanted: a list of nothing but their number keeps the answer small.
        lookup_rows(table, tf.constant(keys[first : first + _FILL]), training=True)


def pooled(
    tables: Sequence[Any], ids: Sequence[tf.RaggedTensor], combiner: str, training: bool, single: bool = False
) -> list[tf.Tensor]:
    """All lookups of a model in one group; single: each by itself."""
    if not single:
        return sok.group_embedding_lookup_sparse(list(tables), list(ids), combiner, training=training)
    return [
        lookup_group([Feature(table, Csr(one.values, one.row_splits), combiner)], training)[0]
        for table, one in zip(tables, ids, strict=True)
    ]


def how(single: bool = False) -> str:
    return "one lookup per table" if single else "one group lookup"


def _w1(job: dict[str, Any]) -> Prepared:
    dim = job["dim"]
    keys = workloads.load("keys")
    room = len(keys) + 2 * workloads.W1_NEW_STEPS * workloads.W1_LOOKUPS // workloads.W1_NEW_SHARE
    table = sok.EmbeddingVariable(dim, room, name="w1")
    table.reserve(room)  # ref and the peers are given room for all keys, too
    fill(table, keys)
    signature = [tf.TensorSpec([workloads.W1_LOOKUPS], tf.int64)]
    find = tf.function(lambda k: lookup_rows(table, k, training=False), input_signature=signature)
    find_or_insert = tf.function(lambda k: lookup_rows(table, k, training=True), input_signature=signature)
    prepared = Prepared("EmbeddingVariable, lookup_rows")
    for distribution in job.get("distributions", workloads.DISTRIBUTIONS):
        batches = [tf.constant(batch) for batch in workloads.load(f"w1_{distribution}")]
        new = [tf.constant(batch) for batch in workloads.load(f"w1_new_{distribution}")]
        prepared[f"find/{distribution}"] = lambda i, b=batches: find(b[i % len(b)])
        prepared[f"insert/{distribution}"] = lambda i, b=new: find_or_insert(b[i])
        prepared.once.add(f"insert/{distribution}")
    return prepared


def _tables(job: dict[str, Any]) -> list[Any]:
    tables = []
    for t in range(job["tables"]):
        # An identity table may be as large as the job's share of its rows; a hashed one must bear an uneven share.
        share = -(-job["rows"] // sok.size())
        room = share if not job["hashed"] else share + share // 4 + 1000
        tables.append(sok.EmbeddingVariable(job["dim"], room, hashed=job["hashed"], name=f"table{t}"))
    return tables


def _fill_all(job: dict[str, Any], tables: Sequence[Any]) -> None:
    ids = np.arange(job["rows"], dtype=np.int64)
    for t, table in enumerate(tables):
        fill(table, workloads.hashed_ids(ids, t) if job["hashed"] else ids)


def _batches(job: dict[str, Any], distribution: str) -> list[list[tf.Tensor]]:
    batches = []
    for number in range(job.get("batches", workloads.W2_BATCHES)):
        bags = workloads.make_bags(
            tables=job["tables"],
            rows=job["rows"],
            batch=job["batch"],
            hotness=job["hotness"],
            distribution=distribution,
            number=number,
        ).part(sok.rank(), sok.size())
        batches.append(tensors.flat(bags, workloads.hashed_ids if job["hashed"] else None))
    return batches


def _w2(job: dict[str, Any]) -> Prepared:
    tables = _tables(job)
    _fill_all(job, tables)
    batch = job["batch"] // sok.size()
    signature = tensors.flat_signature(job["tables"], batch)
    single = job.get("single", False)
    prepared = Prepared(how(single))
    name = job.get("optimizer")
    if name is None:

        @tf.function(input_signature=signature)
        def step(*flat: tf.Tensor) -> list[tf.Tensor]:
            return pooled(tables, tensors.as_ragged(flat), job["combiner"], training=False, single=single)

    else:
        rule = optimizer(name)
        upstream = tensors.gradients_for([[batch, job["dim"]]] * job["tables"])

        @tf.function(input_signature=signature)
        def step(*flat: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                outputs = pooled(tables, tensors.as_ragged(flat), job["combiner"], training=True, single=single)
            gradients = tape.gradient(outputs, tables, output_gradients=upstream)
            rule.apply_gradients(zip(gradients, tables, strict=True))

    start = time.perf_counter()
    step.get_concrete_function()
    tracing_s = time.perf_counter() - start
    for distribution in job.get("distributions", workloads.DISTRIBUTIONS):
        batches = _batches(job, distribution)
        together = tensors.in_one_call(step, batches)
        prepared[distribution] = lambda i, run=together: run()
        prepared.steps_per_call[distribution] = len(batches)
        one = lambda i, b=batches: step(*b[i % len(b)])  # noqa: E731  one per distribution
        prepared.inspections[distribution] = lambda run=one: {"tracing_s": tracing_s, **_traffic(run)}
    return prepared


def _traffic(run: Any, steps: int = 8) -> dict[str, Any]:
    """Collectives, bytes and time of a step, by name; nothing on one worker."""
    if sok.size() == 1:
        return {}
    with sok.trace() as counts:
        for i in range(steps):
            run(i)
    by_name = {
        name: {"kind": one["kind"], "collectives": one["collectives"] / steps, "bytes": one["bytes"] / steps}
        for name, one in counts.by_name.items()
    }
    for name, took in _times_of_collectives(run, steps).items():
        by_name.setdefault(name, {"kind": "-", "collectives": 1.0, "bytes": 0.0}).update(took)
    return {"collectives": counts.collectives / steps, "bytes": counts.bytes / steps, "by_name": by_name}


def _times_of_collectives(run: Any, steps: int) -> dict[str, dict[str, float]]:
    """Milliseconds a step from where this worker hands a collective over to where its answer is there."""
    with tempfile.TemporaryDirectory() as folder:
        with sok.profile(Path(folder) / "profile.json") as profile:
            for i in range(steps):
                run(i)
        return timeline.by_collective(Path(profile.path).read_text(), steps)


def _w3(job: dict[str, Any]) -> Prepared:
    keys = [tf.constant(batch) for batch in workloads.load("w3_keys")]
    rows = tf.constant(workloads.load("w3_grads"))

    @tf.function
    def unique(k: tf.Tensor) -> Any:
        return sok.tf.unique(k)

    @tf.function
    def unique_and_sum(k: tf.Tensor) -> Any:
        y, index = sok.tf.unique(k)
        return y, sok.tf.unsorted_segment_sum(rows, index, tf.size(y))

    prepared = Prepared("sok.tf.unique, sok.tf.unsorted_segment_sum")
    prepared["unique"] = lambda i: unique(keys[i % len(keys)])
    prepared["sum"] = lambda i: unique_and_sum(keys[i % len(keys)])
    return prepared


def _training_step(
    tables: Sequence[Any], lookups: Any, model: Any, name: str, signature: Sequence[Any], rate: float
) -> Any:
    """A whole step: lookups(flat) gives the embeddings; tables by sok's optimizer, the dense part by the stock one."""
    rule, dense_rule = optimizer(name, rate), tensors.stock_optimizer(name, rate)
    variables = model.variables

    @tf.function(input_signature=signature)
    def step(dense: tf.Tensor, labels: tf.Tensor, *flat: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model.loss(lookups(flat), dense, labels)
        if sok.size() > 1:
            tape = sok.DistributedGradientTape(tape)
        rows, others = tape.gradient(loss, [list(tables), variables])
        rule.apply_gradients(zip(rows, tables, strict=True))
        dense_rule.apply_gradients(zip(others, variables, strict=True))
        return loss

    return step


def _w4(job: dict[str, Any]) -> Prepared:
    tables = _tables(job)
    _fill_all(job, tables)
    batch = job["batch"] // sok.size()
    numbers = tf.TensorSpec([batch, workloads.W4_DENSE], tf.float32)
    signature = [numbers, tf.TensorSpec([batch, 1], tf.float32), *tensors.flat_signature(job["tables"], batch)]
    step = _training_step(
        tables,
        lambda flat: pooled(tables, tensors.as_ragged(flat), "sum", training=True),
        towers.Dlrm(job["tables"], job["dim"]),
        job["optimizer"],
        signature,
        tensors.LEARNING_RATE,
    )
    clicks = [workloads.click_batch(i, batch) for i in range(workloads.W2_BATCHES)]
    clicks = [(tf.constant(dense), tf.constant(labels)) for dense, labels in clicks]
    prepared = Prepared(how())
    for distribution in job.get("distributions", workloads.DISTRIBUTIONS):
        batches = _batches(job, distribution)
        run = lambda i, b=batches: step(*clicks[i % len(b)], *b[i % len(b)])  # noqa: E731
        prepared[distribution] = run
        prepared.inspections[distribution] = lambda run=run: _traffic(run)
    return prepared


def _synthetic(job: dict[str, Any]) -> Prepared:
    model = synthetic.load(job["model"])
    batch = job["batch"]
    tables = [
        sok.EmbeddingVariable(t.width, t.rows, hashed=False, name=f"table{i}") for i, t in enumerate(model.tables)
    ]
    for table in tables:
        fill(table, np.arange(table.capacity, dtype=np.int64))
    features = model.features()
    splits = {h: tf.range(0, batch * h + 1, h, tf.int64) for h in {f.hotness for f in features}}

    def lookups(flat: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        ids = [
            tf.RaggedTensor.from_row_splits(tf.reshape(one, [-1]), splits[f.hotness], validate=False)
            for one, f in zip(flat, features, strict=True)
        ]
        return pooled([tables[f.table] for f in features], ids, "sum", training=True)

    signature = synthetic.signature(tf, model, batch)
    step = _training_step(
        tables,
        lookups,
        towers.Tower(model),
        job["optimizer"],
        signature,
        synthetic.LEARNING_RATES[job["optimizer"]],
    )
    batches = synthetic.batches(tf, model, batch)
    prepared = Prepared(how() + ", identity tables")
    prepared["step"] = lambda i: step(*batches[i % len(batches)])
    prepared.inspections["step"] = lambda: {"mlp_alone_ms": _dense_alone_ms(model, job["optimizer"], batches[0])}
    return prepared


def _merlin(job: dict[str, Any]) -> Prepared:
    sizes = (synthetic.load(job["model"]).scaled(job["scale"]), job["scale"], job["batch"], job["optimizer"])
    trainings = {strategy: merlin.Training(merlin.placed(*sizes, strategy)) for strategy in synthetic.STRATEGIES}
    prepared = Prepared("EmbeddingCollection, a model by each strategy, windows of steps in turn")
    prepared.inspections["figures"] = lambda: merlin.beside_each_other(trainings)
    return prepared


def _layer(job: dict[str, Any]) -> Prepared:
    kind, slots, size = job["ids"], layer.SLOTS, layer.BATCH * layer.SLOTS
    embedding = sok.DistributedEmbedding(
        "sum",
        slots * layer.ALL_ROWS,
        layer.DIM,
        slots,
        layer.HOTNESS,
        slots * layer.HOTNESS,
        use_hashtable=job["hashed"],
        distinct_slots=job["hashed"],
    )
    rule = optimizer("adagrad")
    upstream = tensors.gradients_for([[layer.BATCH, slots, layer.DIM]])[0]
    signature = [tf.SparseTensorSpec([size, layer.HOTNESS], tf.int64)]

    @tf.function(input_signature=signature)
    def step(ids: tf.SparseTensor) -> None:
        with tf.GradientTape() as tape:
            outputs = embedding(ids, training=True)
        tables = embedding.trainable_variables
        gradients = tape.gradient(outputs, tables, output_gradients=upstream)
        rule.apply_gradients(zip(gradients, tables, strict=True))

    batches = []
    for bags in layer.batches(kind):
        where, ids = layer.together(bags, apart=not job["hashed"])
        batches.append(tf.SparseTensor(tf.constant(where), tf.constant(ids), [size, layer.HOTNESS]))
    prepared = Prepared("DistributedEmbedding, one SparseTensor")
    prepared[kind] = lambda i: step(batches[i % len(batches)])
    if kind == "new":
        step.get_concrete_function()
        prepared.once.add(kind)
    else:
        for i in range(len(batches)):  # the rows are there
            prepared[kind](i)
    return prepared


def _dense_alone_ms(model: synthetic.Model, name: str, batch: Sequence[tf.Tensor]) -> float:
    """A step's time if embeddings came from nowhere and their gradients went nowhere: TensorFlow's part of it."""
    tower, rule = towers.Tower(model), tensors.stock_optimizer(name, synthetic.LEARNING_RATES[name])
    numbers, labels = batch[:2]
    embeddings = [tf.random.stateless_normal([len(numbers), f.width], [f.width, 1]) for f in model.features()]

    @tf.function
    def step() -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            tape.watch(embeddings)
            loss = tower.loss(embeddings, numbers, labels)
        of_tower, of_embeddings = tape.gradient(loss, [tower.variables, embeddings])
        rule.apply_gradients(zip(of_tower, tower.variables, strict=True))
        return loss, of_embeddings

    times = []
    for _ in range(8):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return float(np.median(times[2:]))


def _memory(job: dict[str, Any]) -> Prepared:
    prepared = Prepared("keys inserted 16,384 at a time")
    prepared.inspections["figures"] = lambda: probes.memory(job["rows"], job["dim"])
    return prepared


def _startup(job: dict[str, Any]) -> Prepared:
    prepared = Prepared("fresh processes")
    prepared.inspections["figures"] = probes.startup
    return prepared
