"""Several workers whose tables are on a device: training, and what bad input on one of them does.

`train` is also what the judge runs, on one worker and the CPU, over the batches of all.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.job import context
from sok.job.transport import horovod
from sok.lookup.feature import Csr, Feature
from sok.lookup.lookup import lookup_group
from sok.optimizers.loss_scaling import all_finite
from tests import tables_on_host as on_host

from .conftest import GPU

STEPS, SEGMENTS, NUM_KEYS = 3, 5, 24
TABLES = {
    "wide": [(3, tf.int64, True), (16, tf.uint32, True), (1, tf.int32, False), (8, tf.uint64, False)],
    "narrow": [(4, tf.int32, True), (7, tf.uint32, False)],
}
# Table, combiner, weighted.
FEATURES = {
    "wide": [(0, "sum", False), (1, "mean", True), (0, "sqrtn", True), (2, "mean", False), (3, "rows", False),
             (1, "sum", False), (3, "sum", False), (0, "sqrtn", False)],
    "narrow": [(0, "mean", False), (1, "sqrtn", True), (0, "rows", False)],
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    tables: str
    optimizer: str
    way_home: str
    as_function: bool

    @property
    def name(self) -> str:
        return f"{self.tables}_{self.optimizer}_{self.way_home}"


CASES = [
    Case("wide", "SGD", "rows", False),
    Case("wide", "Adagrad", "sums", True),
    Case("wide", "Adam", "auto", True),
    Case("narrow", "LazyAdam", "sums", False),
]


def batch_of(case, step, ranks):
    """Keys, splits, weights and upstream gradients of each feature, of several ranks one after the other.

    In each step another rank has no keys at all.
    """
    batch = []
    for f, (table, combiner, weighted) in enumerate(FEATURES[case.tables]):
        dim, dtype, _ = TABLES[case.tables][table]
        lengths, keys, weights, upstream = [], [], [], []
        for rank in ranks:
            rng = np.random.default_rng([rank, step, f])
            of_rank = rng.integers(0, 5, SEGMENTS + rank) * (rank % 4 != step)
            lengths.append(of_rank)
            keys.append(rng.integers(0, NUM_KEYS, of_rank.sum()))
            weights.append(rng.uniform(0.5, 2, of_rank.sum()))
            upstream.append(rng.normal(size=(of_rank.sum() if combiner == "rows" else len(of_rank), dim)))
        batch.append((
            tf.constant(np.concatenate(keys), dtype),
            tf.constant(np.concatenate([[0], np.cumsum(np.concatenate(lengths))]), tf.int64),
            tf.constant(np.concatenate(weights) if weighted else [], tf.float32),
            tf.constant(np.concatenate(upstream), tf.float32),
        ))  # fmt: skip
    return batch


def make_tables(kind, name, way_home="auto", **options):
    options = {"initializer": "normal", "way_home": way_home, **options}
    return [
        sok.EmbeddingVariable(dim, 100, name=f"{name}_{t}", key_dtype=dtype, hashed=hashed, seed=t, **options)
        for t, (dim, dtype, hashed) in enumerate(TABLES[kind])
    ]


def features_of(kind, tables, batch):
    return [
        Feature(tables[table], Csr(keys, splits, weights if weighted else None), combiner)
        for (table, combiner, weighted), (keys, splits, weights, _) in zip(FEATURES[kind], batch, strict=True)
    ]


def all_rows(tables):
    """Of every key, without making one."""
    keys = tf.range(NUM_KEYS, dtype=tf.int64)
    none = tf.zeros([0], tf.int64)
    features = [Feature(t, Csr(tf.cast(keys, t.key_dtype), none), "rows", exact=True) for t in tables]
    if tables[0].world_size == 1:
        return [t.sparse_read(f.ids.keys).numpy() for t, f in zip(tables, features, strict=True)]
    return [rows.numpy() for rows in lookup_group(features, training=False)]


def lookup(kind, tables, batch):
    if tables[0].world_size > 1:
        return lookup_group(features_of(kind, tables, batch))
    # One worker has no exchange; rows that nothing pools are asked for one by one.
    outputs = []
    for feature in features_of(kind, tables, batch):
        if feature.combiner == "rows":
            outputs.append(sok.lookup.lookup.lookup_rows(feature.table, feature.ids.keys))
        else:
            outputs += lookup_group([feature])
    return outputs


def train(device, case, ranks):
    """For each step outputs and gradients in weights; and the rows of all keys before and after."""
    with tf.device(device):
        tables = make_tables(case.tables, f"device_{case.name}", case.way_home)
        assert all(device.strip("/") in table.handle.device for table in tables)
        optimizer = getattr(sok.optimizers, case.optimizer)(0.1)

        def step(batch):
            weights = [w for _, _, w, _ in batch]
            with tf.GradientTape() as tape:
                tape.watch(weights)
                outputs = lookup(case.tables, tables, batch)
                loss = tf.add_n([tf.reduce_sum(o * b[3]) for o, b in zip(outputs, batch, strict=True)])
            of_tables, of_weights = tape.gradient(loss, [tables, weights])
            optimizer.apply_gradients(zip(of_tables, tables, strict=True))
            weighted = [
                g for g, (_, _, is_weighted) in zip(of_weights, FEATURES[case.tables], strict=True) if is_weighted
            ]
            return outputs, weighted

        shapes = [[tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in f] for f in batch_of(case, 0, ranks)]
        run = tf.function(step, input_signature=[[tuple(s) for s in shapes]]) if case.as_function else step
        before = all_rows(tables)
        steps = [tf.nest.map_structure(np.array, run(batch_of(case, s, ranks))) for s in range(STEPS)]
        return steps, before, all_rows(tables)


def check_init(world):
    sok.Init(seed=5)
    assert context.get_transport().size == world.size


def check_training(world):
    return {case: train(GPU, case, [world.rank]) for case in CASES}


def check_tables_that_the_host_keeps_train_beside_those_of_the_gpu(world):
    """An exchange for each device; with ids of the whole batch no keys travel, and both come home together."""
    placements = [sok.table_wise(world.size - 1), sok.column_wise(2), sok.row_wise(), sok.row_wise()]
    owners = [*placements[:2], sok.table_wise(0), sok.table_wise(0)]
    # Three ranks share few cores: the eager steps are those of two.
    for dp_input, as_function in itertools.product((True, False), (True, False)[: 2 if world.size == 2 else 1]):
        where = placements if dp_input else owners
        found, expected = (
            on_host.train(device, where, world.rank, world.size, as_function, dp_input) for device in (GPU, "/CPU:0")
        )
        on_host.assert_same(found, expected)
        assert (found[2], expected[2]) == ((6, 3) if dp_input else (2, 2))


def check_bad_input_is_raised_on_all_where_tables_are_on_two_devices(world):
    collection = on_host.collection_on(GPU, [sok.row_wise()] * 4)
    good = [tf.constant([[1, 2]])] * 5
    is_bad = world.rank == 0
    with tf.device(GPU):
        with pytest.raises(ValueError if is_bad else tf.errors.InvalidArgumentError, match="must be a list of 5"):
            collection(good[:4] if is_bad else good)
        with pytest.raises(tf.errors.InvalidArgumentError, match="outside"):  # of a table that the host keeps
            collection([*good[:4], tf.constant([[1, 77 if is_bad else 2]])])
        assert len(collection(good)) == 5


def good_batch(world):
    return batch_of(CASES[0], 3, [world.rank])


def check_bad_input_on_one_rank_raises_on_all(world):
    with tf.device(GPU):
        tables = make_tables("wide", "device_bad")
        good = good_batch(world)
        beyond, weights, python = list(good), list(good), list(good)
        beyond[3] = (tf.constant([100 * world.size], tf.int32), tf.constant([0, 1], tf.int64), *good[3][2:])
        weights[1] = (*good[1][:2], tf.ones([500]), good[1][3])
        python[3] = (tf.constant([1.5]), *good[3][1:])
        bad = [(beyond, "key 100|key [0-9]+ is outside|outside"), (weights, "`weights` .*per key")]
        run = tf.function(lambda batch: lookup("wide", tables, batch))
        for call, (batch, text) in itertools.product((run, lambda b: lookup("wide", tables, b)), bad):
            with pytest.raises(tf.errors.InvalidArgumentError, match=text):
                call(batch if world.rank == world.size - 1 else good)
            assert len(call(good)) == len(good)
        is_bad = world.rank == 0
        with pytest.raises(ValueError if is_bad else tf.errors.InvalidArgumentError, match="keys must be int32"):
            lookup("wide", tables, python if is_bad else good)
        with pytest.raises(tf.errors.FailedPreconditionError, match="`training` must be the same"):
            lookup_group(features_of("wide", tables, good), training=is_bad)
        with tf.device("/CPU:0"):
            elsewhere = [*tables[:3], make_tables("wide", "device_elsewhere")[3]]
        with pytest.raises(ValueError, match="must be on one device.*device_bad_0.*device_elsewhere_3"):
            lookup("wide", elsewhere, good)
        assert len(lookup("wide", tables, good)) == len(good)


def check_a_full_shard_raises_on_all_and_stores_nothing(world):
    with tf.device(GPU):
        table = sok.EmbeddingVariable(4, 10, name="device_full", initializer="ones")
        few = tf.range(0, 10 * world.size, dtype=tf.int64)  # ten for each
        many = tf.range(0, 11, dtype=tf.int64) * world.size  # all of rank 0
        for keys in (many, few):
            features = [Feature(table, Csr(keys, tf.zeros([0], tf.int64)), "rows")]
            if keys is few:
                np.testing.assert_array_equal(lookup_group(features)[0], np.ones([10 * world.size, 4]))
                continue
            for _ in range(2):
                with pytest.raises(tf.errors.ResourceExhaustedError, match="(?s)rank 0 could not answer.*device_full"):
                    lookup_group(features)


def check_a_gradient_of_no_row_is_told_to_all(world):
    """What a device finds on its own is raised by a later lookup: in the same one on all workers."""
    with tf.device(GPU):
        table = sok.EmbeddingVariable(4, 10, name="device_no_row", initializer="ones")
        features = [Feature(table, Csr(tf.range(2, dtype=tf.int64), tf.zeros([0], tf.int64)), "rows")]
        lookup_group(features)
        if world.rank == 0:
            gradient = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([1_000_000], tf.int64))
            sok.optimizers.SGD(1.0).apply_gradients([(gradient, table)])
        with pytest.raises(tf.errors.InvalidArgumentError, match="rank 0 could not answer.*row id 1000000"):
            for _ in range(20):
                lookup_group(features)
        np.testing.assert_array_equal(lookup_group(features)[0], np.ones([2, 4]))


def check_an_owner_that_cannot_answer_is_heard_by_all(world):
    """Keys of another rank, as a peer with other ideas of ownership would send them."""
    with tf.device(GPU):
        tables = make_tables("wide", "device_broken")
        transport = context.get_transport()
        send = transport.all_to_all

        def misdeliver(x, splits, what):
            received, sizes = send(x, splits, what)
            words = received.numpy()
            words[7 + len(tables) + 2 * len(tables)] += 1  # the first key: docs/design/exchange.md has the layout
            return tf.constant(words), sizes

        one = tf.constant([0, 1], tf.int64)
        features = [Feature(t, Csr(tf.constant([0], t.key_dtype), one), "sum") for t in tables]
        lookup_group(features)
        if world.rank == 0:
            transport.all_to_all = lambda x, s, what: (misdeliver if what.endswith("keys") else send)(x, s, what)
        try:
            with pytest.raises(tf.errors.InvalidArgumentError, match="rank 0 could not answer: table .*belongs to"):
                lookup_group(features)
        finally:
            if world.rank == 0:
                del transport.all_to_all
        assert len(lookup_group(features)) == len(tables)


def check_rows_that_travel_in_16_bit_are_those_of_the_cpu(world, monkeypatch):
    """Rounded by the device that they leave: the same bits. Gradients are added in another order, then rounded."""
    monkeypatch.setattr(context.get_transport(), "narrowing_pays", lambda: True)  # as between hosts
    for dtype, way in (("float16", "rows"), ("bfloat16", "rows"), ("float16", "sums")):
        found = {}
        for device in ("/CPU:0", GPU):
            with tf.device(device):
                tables = make_tables("wide", f"device_{dtype}_{way}", way, exchange_dtype=dtype)
                batch = batch_of(CASES[0], 3, [world.rank])
                with tf.GradientTape() as tape:
                    outputs = lookup("wide", tables, batch)
                    loss = tf.add_n([tf.reduce_sum(o * b[3]) for o, b in zip(outputs, batch, strict=True)])
                gradients = tape.gradient(loss, tables)
                sok.optimizers.SGD(1.0).apply_gradients(zip(gradients, tables, strict=True))
                found[device] = [np.array(x) for x in outputs], [np.array(x) for x in all_rows(tables)]
        step = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
        for here, there in zip(found["/CPU:0"][0], found[GPU][0], strict=True):
            if way == "rows":
                np.testing.assert_array_equal(there, here)
            else:
                np.testing.assert_allclose(there, here, rtol=2 * step, atol=2 * step)
        for here, there in zip(found["/CPU:0"][1], found[GPU][1], strict=True):
            np.testing.assert_allclose(there, here, rtol=4 * step, atol=8 * step)
            assert np.mean(np.isclose(there, here, rtol=1e-5, atol=1e-5)) > 0.8


def check_copies_are_those_of_the_cpu(world):
    """Gradients of a copy go to all workers, and rows to none, also where they are on a device."""
    for way in ("rows", "sums"):
        found = {}
        for device in ("/CPU:0", GPU):
            with tf.device(device):
                tables = make_tables("wide", f"device_copies_{way}", way, placement=sok.data_parallel())
                batch = batch_of(CASES[0], 3, [world.rank])
                with sok.trace() as trace, tf.GradientTape() as tape:
                    outputs = lookup("wide", tables, batch)
                    loss = tf.add_n([tf.reduce_sum(o * b[3]) for o, b in zip(outputs, batch, strict=True)])
                    gradients = tape.gradient(loss, tables)
                sok.optimizers.SGD(1.0).apply_gradients(zip(gradients, tables, strict=True))
                moved = {name.split("/")[2]: entry["bytes"] for name, entry in trace.by_name.items()}
                found[device] = [np.array(x) for x in outputs], [np.array(x) for x in all_rows(tables)], moved
        (outputs, rows, moved), (on_device, rows_there, moved_there) = found["/CPU:0"], found[GPU]
        assert moved == moved_there
        headers = 4 * 16 * world.size
        assert (moved["rows"] - headers) * world.size == moved["grads"] - headers
        for here, there in zip([*outputs, *rows], [*on_device, *rows_there], strict=True):
            np.testing.assert_allclose(there, here, rtol=1e-5, atol=1e-5)
        for table in rows_there:
            of_all = context.get_transport().all_gather(tf.constant(table), f"device_copies_{way}").numpy()
            np.testing.assert_array_equal(of_all.reshape([world.size, *table.shape]), [table] * world.size)


def check_a_gradient_that_overflows_in_16_bit_is_infinite_for_its_owner(world, monkeypatch):
    monkeypatch.setattr(context.get_transport(), "narrowing_pays", lambda: True)
    with tf.device(GPU):
        table = sok.EmbeddingVariable(3, 10, name="device_overflows", initializer="ones", exchange_dtype="float16")
        keys = tf.constant([0, 1], tf.int64)
        with tf.GradientTape() as tape:
            rows = sok.lookup.lookup.lookup_rows(table, keys)
            loss = tf.reduce_sum(rows * tf.constant([[70000.0], [2.0]]))
        gradient = tape.gradient(loss, table)
    pairs = zip(np.array(gradient.values), np.array(gradient.indices), strict=True)
    owned = [float(value[0]) for value, index in pairs if index >= 0]
    expected = {key: value for key, value in ((0, np.inf), (1, 2.0 * world.size)) if key % world.size == world.rank}
    assert sorted(owned) == sorted(expected.values())
    assert not bool(all_finite([gradient]))  # on all ranks, also those that own none of it


def check_a_session_keeps_rows_on_the_device_that_tensorflow_chose(world, monkeypatch):
    """With a stand-in for a Horovod that has an alltoall of its own for GPUs, in a graph that names no device."""
    transport = context.get_transport()
    monkeypatch.setattr(transport, "narrowing_pays", lambda: True)
    real = transport._hvd.alltoall

    def alltoall(tensor, splits, **options):
        with tensor.graph.colocate_with(None, ignore_existing=True), tf.device("/CPU:0"):
            received, sizes = real(tensor, splits, **options)
        return tf.identity(received), sizes

    def train_in_a_session(name, exchange_dtype):
        """The rows after two steps, and where each collective and what rounds for it ran."""
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            table = sok.EmbeddingVariable(
                4,
                100,
                name=f"device_v1_{name}_{exchange_dtype}",
                initializer="normal",
                seed=3,
                way_home="rows",
                exchange_dtype=exchange_dtype,
            )
            assert not table.handle.device
            keys = tf.constant([world.rank, 5, 6, 7, 5], tf.int64)
            (rows,) = lookup_group([Feature(table, Csr(keys, tf.zeros([0], tf.int64)), "rows")])
            optimizer = sok.optimizers.SGD(0.5)
            step = optimizer.apply_gradients(
                zip(tf.gradients(tf.reduce_sum(rows * rows), [table]), [table], strict=True)
            )
            session.run(tf.compat.v1.global_variables_initializer())
            options = tf.compat.v1.RunOptions(output_partition_graphs=True)
            metadata = tf.compat.v1.RunMetadata()
            session.run(step)
            session.run(step, options=options, run_metadata=metadata)
            found = session.run(rows)
        places = {}
        for node in (node for graph in metadata.partition_graphs for node in graph.node):
            if node.op == "Sok>TraceCollective":
                places[node.attr["collective"].s.decode().split("/")[-2]] = GPU.strip("/") in node.device
            elif node.op in ("Sok>ExchangeNarrow", "Sok>ExchangeWiden"):
                places[node.name] = GPU.strip("/") in node.device
        return found, places

    dtypes = ("float32", "float16")
    staged, places = zip(*(train_in_a_session("staged", dtype) for dtype in dtypes), strict=True)
    assert places[0] == {"keys": False, "rows": False, "grads": False}
    assert len(places[1]) == 3 + 4
    monkeypatch.setattr(transport, "moves_on_gpu", True)
    monkeypatch.setattr(transport._hvd, "alltoall", alltoall)
    for dtype, expected in zip(dtypes, staged, strict=True):
        found, places = train_in_a_session("kept", dtype)
        assert not places.pop("keys")
        assert len(places) == (2 if dtype == "float32" else 6) and all(places.values()), places
        np.testing.assert_array_equal(found, expected)


def check_a_library_that_moves_device_memory_is_given_it(world, monkeypatch):
    """Stands in for a Horovod that has an alltoall of its own for GPUs."""
    transport = context.get_transport()
    assert transport.gpu_tensors().startswith("staged through the host (Gloo")
    assert not transport.moves_on_gpu
    real, seen = transport._hvd.alltoall, []

    def alltoall(tensor, splits, **options):
        seen.append((tensor.dtype, "GPU" in tensor.device))
        with tf.device("/CPU:0"):
            received, sizes = real(tensor, splits, **options)
        with tf.device(tensor.device):
            return tf.identity(received), sizes

    monkeypatch.setattr(transport, "moves_on_gpu", True)
    monkeypatch.setattr(transport._hvd, "alltoall", alltoall)
    assert transport.gpu_tensors().startswith("on the device")
    case = dataclasses.replace(CASES[1], way_home="rows")
    found = train(GPU, case, [world.rank])
    # Keys go by way of the host, where ranks share memory; answers and gradients stay where they are, also where a
    # function is traced.
    assert set(seen) == {(tf.float32, True)} and len(seen) >= 2
    seen.clear()
    with tf.device("/CPU:0"):
        lookup("wide", make_tables("wide", "device_none"), good_batch(world))
    assert not any(on_device for _, on_device in seen)
    monkeypatch.undo()
    staged = train(GPU, case, [world.rank])
    tf.nest.map_structure(np.testing.assert_array_equal, found[0], staged[0])
    assert horovod.HorovodTransport._place_of(transport, tf.zeros([1])) == "/CPU:0"
