"""Checks of tables on parameter servers: two servers and two workers of this host, forked by this program, the chief.

Prints one line of JSON: of each check None, or what it raised.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import time
import traceback
import warnings

import keras
import numpy as np
import tensorflow as tf

import sok
from tests.sok import own_rules
from tests.sok.parameter_servers_cluster import Cluster

WORKER = ("worker", 0)


def served(**properties):
    """A job whose tables are on the two servers."""
    sok.shutdown()
    sok.enable_distributed_strategy("parameter_server", servers=2, **properties)


def alone():
    sok.shutdown()


def tables(key_dtype):
    spread = sok.table_row_wise(0, hosts=1, hash=True)
    return [
        sok.EmbeddingVariable(4, 1000, name="spread", key_dtype=key_dtype, placement=spread),
        sok.EmbeddingVariable(2, 1000, name="whole", placement=sok.table_wise(0), initializer="normal"),
        sok.EmbeddingVariable(3, 100, name="numbers", hashed=False, key_dtype="int32"),
    ]


def trained(kind, key_dtype, compiled):
    """What four steps give: outputs and losses; then rows and slots by key, and steps."""
    a, b, c = tables(key_dtype)
    optimizer = kind()
    rng = np.random.default_rng(0)
    several = tf.RaggedTensor.from_row_lengths(tf.constant([3, 1, 3, -7, 5, 1], tf.int64), [3, 0, 2, 1])

    def step(ids, ragged, sparse, weights):
        with tf.GradientTape() as tape:
            pooled = sok.group_embedding_lookup_sparse([a, b, b], [ids, ragged, ragged], ["mean", "sum", "sqrtn"])
            weighted = sok.group_embedding_lookup_sparse([b], [sparse], ["mean"], sp_weights=[weights])
            rows = c.sparse_read(tf.constant([1, 1, 50], tf.int32))
            loss = sum(tf.reduce_sum(one * (one + 0.5)) for one in (*pooled, *weighted, rows))
        optimizer.apply_gradients(zip(tape.gradient(loss, [a, b, c]), [a, b, c], strict=True))
        return [loss, *pooled, *weighted, rows]

    step = tf.function(step) if compiled else step
    given = []
    for _ in range(4):
        ids = tf.RaggedTensor.from_tensor(tf.constant(rng.integers(0, 50, [4, 3]), key_dtype))
        places = tf.constant([[0, 0], [0, 1], [2, 0], [3, 0]], tf.int64)
        sparse = tf.SparseTensor(places, tf.constant(rng.integers(-9, 9, 4), tf.int64), [4, 2])
        weights = tf.SparseTensor(places, tf.constant(rng.random(4), tf.float32), [4, 2])
        given += [one.numpy() for one in step(ids, several, sparse, weights)]
    for table in (a, b, c):
        keys, rows = (one.numpy() for one in table.export())
        order = np.argsort(keys)
        given += [keys[order], rows[order], table.slots(optimizer.slot_set)[1].numpy()[order]]
        given += [int(table.step), int(table.num_rows()), table.stats()]
    return given


def check_same(kind, key_dtype, compiled):
    alone()
    expected = trained(kind, key_dtype, compiled)
    served()
    found = trained(kind, key_dtype, compiled)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)


def one_worker_trains_as_without_servers():
    check_same(lambda: sok.optimizers.Adam(0.1, clipnorm=1.0), "int64", compiled=False)
    check_same(lambda: sok.optimizers.Adagrad(0.1), "uint32", compiled=True)
    check_same(lambda: sok.optimizers.LazyAdam(0.1, nonfinite_gradients="skip"), "uint64", compiled=True)


def tables_have_policies_and_files():
    def run(storage):
        eviction = sok.Eviction(older_than=2, every=1)
        table = sok.EmbeddingVariable(2, 1000, name="leaves", seed=1, eviction=eviction, storage=storage)
        optimizer = sok.optimizers.SGD(0.1)
        for step in range(5):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.range(10 * step, 10 * step + 15, dtype=tf.int64)))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        keys, rows = (one.numpy() for one in table.export())
        order = np.argsort(keys)
        counts = [one.numpy() for one in table.history(keys[order])]
        assert table.stats()["evicted"] > 0
        return [keys[order], rows[order], *counts]

    alone()
    expected = run(None)
    with tempfile.TemporaryDirectory() as folder:
        served()
        for storage in (None, sok.Storage(memory_bytes=2**24, path=os.path.join(folder, "rows"))):
            for one, other in zip(expected, run(storage), strict=True):
                np.testing.assert_array_equal(one, other)
        sok.shutdown()  # whose tables have their files there


def checkpoints_by_version_leave_rows_in_the_files_of_servers():
    served()
    with tempfile.TemporaryDirectory() as folder:
        storage, saved = (
            sok.Storage(memory_bytes=2**24, path=os.path.join(folder, "rows")),
            os.path.join(folder, "saved"),
        )
        table = sok.EmbeddingVariable(2, 1000, name="versions", storage=storage)
        keys = np.arange(100)
        for number in range(3):
            table.assign(keys, np.full([100, 2], number, np.float32))
            sok.save(saved, [table], versions=True)
        table.assign(keys, np.full([100, 2], 7, np.float32))
        sok.restore(saved, [table])
        assert np.all(table.sparse_read(keys).numpy() == 2) and table.stats()["bytes_in_file"] > 0
        sok.shutdown()  # whose tables have their files there


def rows_are_written_read_and_erased():
    served()
    table = sok.EmbeddingVariable(2, 100, name="written", initializer="zeros")
    assert "on 2 servers" in repr(table)
    table.reserve(50)
    table.assign([1, 2, 3, -4], [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]])
    assert table.sparse_read([-4, 9]).numpy().tolist() == [[4.0, 4.0], [0.0, 0.0]]
    assert int(table.erase([2, 77])) == 1 and int(table.total_size()) == 3
    made = table.restore_rows([8], [[5.0, 6.0]], [[0.5, 0.25]], slot_set="Adagrad", rule="adagrad")
    assert int(made) == 1 and sorted(table.slots("Adagrad")[0].numpy()) == [-4, 1, 3, 8]
    sok.erase([table], [-4, 1000])
    assert sorted(table.export()[0].numpy()) == [1, 3, 8]
    # A gradient of a key that has been erased since is dropped; that of another counts.
    optimizer = sok.optimizers.SGD(1.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant([1, 3], tf.int64)))
    gradient = tape.gradient(loss, table)
    table.erase([1])
    optimizer.apply_gradients([(gradient, table)])
    assert table.sparse_read([1, 3]).numpy().tolist() == [[0.0, 0.0], [2.0, 2.0]]


def others_ask_for_what_is_on_servers(folder):
    """Keras, TensorFlow's checkpoints, and what raises before any server has changed."""
    served()
    layer = sok.Embedding(100, 4, name="asked")
    model = keras.Sequential([keras.Input([1], dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(sok.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    board = keras.callbacks.TensorBoard(os.path.join(folder, "board"), histogram_freq=1)
    model.fit(np.arange(32)[:, None], np.ones([32, 1]), batch_size=16, epochs=2, verbose=0, callbacks=[board])
    assert model.count_params() == 32 * 4 + 5 and int(layer.embedding_variable.ids_seen) == 64
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.save_weights(os.path.join(folder, "asked.weights.h5"))
    assert any("'asked' are not saved here" in str(one.message) for one in told), told

    table = sok.EmbeddingVariable(2, 100, name="finite", initializer="zeros")
    optimizer = sok.optimizers.SGD(1.0, nonfinite_gradients="raise")
    bad = tf.IndexedSlices(tf.constant([[1.0, 1.0], [np.nan, 1.0]]), tf.constant([0, 1], tf.int64))
    table.assign([0, 1], np.zeros([2, 2]))
    expect(tf.errors.InvalidArgumentError, ["finite", "1"], lambda: optimizer.apply_gradients([(bad, table)]))
    assert not table.sparse_read([0, 1]).numpy().any() and int(table.step) == 0

    def step(table, optimizer):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.range(4, dtype=tf.int64)) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    saved = None
    for steps in (2, 3):  # the second program goes on from the first
        served()
        table, optimizer = sok.EmbeddingVariable(2, 100, name="tracked"), sok.optimizers.Adam(0.1)
        assert int(table.num_rows()) == 0
        if saved:
            tf.train.Checkpoint(table=table).restore(saved)
            step(table, optimizer)
        else:
            step(table, optimizer)
            step(table, optimizer)
            saved = tf.train.Checkpoint(table=table).save(os.path.join(folder, "tracked", "x"))
        assert int(optimizer.iterations) == int(table.step) == steps


def lookups_run_ahead():
    def run():
        table = sok.EmbeddingVariable(2, 1000, name="ahead")
        optimizer = sok.optimizers.SGD(0.1)
        data = [tf.constant([i, i + 1, 2 * i], tf.int64) for i in range(6)]

        def embed(ids):
            return tf.nn.embedding_lookup(table, ids)

        found = []
        for ids, ticket in sok.ahead(data, embed, depth=2, rows=True):
            with ticket, tf.GradientTape() as tape:
                loss = tf.reduce_sum(embed(ids) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
            found.append(float(loss))
        return found

    alone()
    expected = run()
    served()
    same(run(), expected)


def expect(error, words, do):
    try:
        do()
    except error as raised:
        assert all(word in str(raised) for word in words), str(raised)
        return
    raise AssertionError(f"nothing raised {error}")


def combinations_that_are_impossible_are_refused():
    served()
    refused = {
        "column_wise(pieces=2)": {"placement": sok.column_wise(2)},
        "data_parallel()": {"placement": sok.data_parallel()},
        "admission": {"admission": sok.Admission(after=3)},
        "gpu_memory_bytes": {"gpu_memory_bytes": 2**30},
    }
    for word, properties in refused.items():
        expect(
            ValueError,
            ["on parameter servers cannot have", word],
            lambda given=properties: sok.EmbeddingVariable(4, 100, **given),
        )
    expect(
        ValueError,
        ["`owner`", "[0, 2)"],
        lambda: sok.EmbeddingVariable(4, 100, placement=sok.table_wise(2), name="far"),
    )
    table = sok.EmbeddingVariable(4, 2, name="small", placement=sok.table_wise(0))
    expect(
        tf.errors.ResourceExhaustedError,
        ["small", "2 rows"],
        lambda: tf.nn.embedding_lookup(table, tf.range(5, dtype=tf.int64)),
    )
    assert int(table.num_rows()) == 0
    numbers = sok.EmbeddingVariable(4, 10, name="numbered", hashed=False)
    expect(tf.errors.InvalidArgumentError, ["numbered", "20"], lambda: numbers.sparse_read([1, 20]))
    expect(ValueError, ["asynchronous"], lambda: sok.save("nowhere", [table], asynchronous=True))
    expect(ValueError, ["reshard", "small"], lambda: table.reshard(sok.row_wise()))
    leaves = sok.EmbeddingVariable(4, 10, name="leaves", eviction=sok.Eviction(older_than=2))
    expect(ValueError, ["sok.follow", "small"], lambda: sok.follow("nowhere", [table]))
    expect(ValueError, ["file of another system", "small"], lambda: sok.save_npy(table, "keys.npy", "values.npy"))
    expect(ValueError, ["DynamicVariable"], lambda: sok.Variable(np.ones([4, 2], np.float32)))
    layer = sok.Embedding(100, 4, name="exported")
    model = keras.Sequential([keras.Input([1], dtype="int64"), layer])
    expect(ValueError, ["sok.export_saved_model", "exported"], lambda: sok.export_saved_model(model, "nowhere"))
    own = sok.EmbeddingVariable(4, 10, name="own")
    rule = own_rules.signum(learning_rate=0.1, beta=0.9)
    expect(ValueError, ["compiled in this process", "own"], lambda: rule.build([own]))
    half = sok.initializer(own_rules.half)
    expect(ValueError, ["an initializer of your own"], lambda: sok.EmbeddingVariable(4, 10, initializer=half))
    regularized = sok.Embedding(100, 4, embeddings_regularizer="l2", name="regularized")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(regularized(tf.constant([1])))
    variable = regularized.embedding_variable
    apply = sok.optimizers.SGD(0.1).apply_gradients
    expect(ValueError, ["regularizer", "regularized"], lambda: apply([(tape.gradient(loss, variable), variable)]))
    expect(ValueError, ["on_evicted", "leaves"], lambda: leaves.on_evicted(print))
    expect(RuntimeError, ["before the first table"], lambda: _after_a_table())


def _after_a_table():
    alone()
    sok.EmbeddingVariable(4, 2, name="local")
    sok.enable_distributed_strategy("parameter_server", servers=2)


def arrays(seed, truth):
    ids = np.random.default_rng(seed).integers(0, len(truth), [64, 2, 1])
    return ids, truth[ids].sum(1).astype(np.float32)


def workers_train_while_one_is_killed(cluster, strategy, folder):
    """Under ParameterServerStrategy; then the tables go to a worker without servers, and back."""
    sok.shutdown()
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster.spec, "task": {"type": "chief", "index": 0}})
    with strategy.scope():
        expect(
            RuntimeError,
            ["ParameterServerStrategy", "parameter_server'"],
            lambda: sok.EmbeddingVariable(8, 9, name="x"),
        )
    sok.shutdown()
    sok.enable_distributed_strategy("parameter_server")
    truth = np.random.default_rng(1).normal(size=100)
    with strategy.scope():
        layer = sok.DistributedEmbedding("sum", 1000, 8, slot_num=2, max_nnz=1, name="layer")
        weights = tf.Variable(np.random.default_rng(2).normal(size=(16, 1)).astype(np.float32) * 0.3)
        updates = tf.Variable(0, dtype=tf.int64, trainable=False)
        optimizer = sok.optimizers.Adagrad(0.3)
    table = layer.embedding_variable
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def step(iterator):
        ids, labels = next(iterator)
        with tf.GradientTape() as tape:
            predicted = tf.matmul(tf.reshape(layer(ids, training=True), [-1, 16]), weights)
            loss = tf.reduce_mean((predicted - labels) ** 2)
        of_table, of_weights = tape.gradient(loss, [table, weights])
        optimizer.apply_gradients([(of_table, table)])
        weights.assign_sub(0.01 * of_weights)
        updates.assign_add(1)
        return loss

    def batches():
        each = zip(*(arrays(seed, truth) for seed in range(50)), strict=True)
        return tf.data.Dataset.from_tensor_slices(tuple(map(np.stack, each))).shuffle(50).repeat()

    # Workers read their own batches: TensorFlow may lose one that the chief sends while another worker comes back.
    iterator = iter(coordinator.create_per_worker_dataset(batches))

    def schedule(steps):
        return [coordinator.schedule(step, args=(iterator,)) for _ in range(steps)]

    first = schedule(10)
    coordinator.join()
    assert int(updates) == int(table.step) == 10
    losses = schedule(30)
    cluster.kill(*WORKER)
    losses += schedule(20)
    cluster.begin_anew(*WORKER)
    losses += schedule(40)
    coordinator.join()
    before, after = (np.mean([one.fetch() for one in some]) for some in (first, losses[-10:]))
    assert after < before / 2, (before, after)
    # At least once: a closure whose worker was killed is run again, on another.
    assert 100 <= int(updates) <= 110 and 100 <= int(table.step) <= 110, (int(updates), int(table.step))
    keys, rows = table.export()
    assert len(set(keys.numpy().tolist())) == len(keys) == 100 and np.isfinite(rows).all()

    sok.save(folder, [table], [optimizer])
    schedule(3)
    coordinator.join()
    sok.save(folder, [table], [optimizer], incremental=True)
    assert len(sok.checkpoint.read_manifest(folder).links) == 2
    state = by_key(table, optimizer)
    table.erase(list(range(50)))
    sok.restore(folder, [table], [optimizer])
    same(by_key(table, optimizer), state)
    schedule(2)
    coordinator.join()
    assert int(optimizer.iterations) >= state["iterations"] + 2
    return state


def by_key(table, optimizer):
    of_slots = dict(zip(*(one.numpy().tolist() for one in table.slots(optimizer.slot_set)[:2]), strict=True))
    rows = dict(zip(*(one.numpy().tolist() for one in table.export()), strict=True))
    return {"rows": rows, "slots": of_slots, "iterations": int(optimizer.iterations), "step": int(table.step)}


def same(found, expected):
    assert found == expected, (found, expected)


def checkpoints_go_to_tables_of_workers_and_back(folder, state):
    for begin in (alone, served):
        begin()
        table = sok.EmbeddingVariable(8, 1000, name="layer")
        optimizer = sok.optimizers.Adagrad(0.1)
        optimizer.build([table])
        sok.restore(folder, [table], [optimizer])
        same(by_key(table, optimizer), state)
        sok.save(folder, [table], [optimizer])


def v1_worker(spec, task, folder):
    """Between-graph replication: each worker builds the graph and runs its own steps."""
    server = tf.compat.v1.train.Server(tf.train.ClusterSpec(spec), "worker", task)
    sok.enable_distributed_strategy("parameter_server", servers=2)
    here = f"/job:worker/task:{task}"
    setter = tf.compat.v1.train.replica_device_setter(cluster=spec, worker_device=here)
    truth = np.random.default_rng(1).normal(size=100)
    with tf.Graph().as_default(), tf.compat.v1.device(setter):
        ids = tf.compat.v1.placeholder(tf.int64, [64, 2, 1])
        labels = tf.compat.v1.placeholder(tf.float32, [64, 1])
        global_step = tf.compat.v1.train.get_or_create_global_step()
        table = sok.EmbeddingVariable(4, 1000, name="v1")
        weights = tf.compat.v1.get_variable("weights", [8, 1])
        predicted = tf.matmul(tf.reshape(tf.nn.embedding_lookup(table, ids), [-1, 8]), weights)
        loss = tf.reduce_mean((predicted - labels) ** 2)
        of_table, of_weights = tf.gradients(loss, [table, weights])
        train = tf.group(
            sok.optimizers.Adagrad(0.3).apply_gradients([(of_table, table)]),
            tf.compat.v1.train.GradientDescentOptimizer(0.01).apply_gradients([(of_weights, weights)], global_step),
        )
        reads = table.sparse_read(tf.range(100, dtype=tf.int64)), table.num_rows(), table.step
        sok.checkpoint.prepare([table])
        seen = []
        begun = os.path.join(folder, "begun")
        while task and not os.path.exists(begun):  # a worker that finds no variables asks again after 30 s
            time.sleep(0.02)
        config = tf.compat.v1.ConfigProto(device_filters=["/job:ps", here])
        with tf.compat.v1.train.MonitoredTrainingSession(server.target, is_chief=task == 0, config=config) as session:
            if not task:
                open(begun, "w").close()
            while len(seen) < 60:
                of_batch = arrays(100 * task + len(seen), truth)
                seen.append(float(session.run([loss, train], dict(zip((ids, labels), of_batch, strict=True)))[0]))
            rows, num_rows, step = session.run(reads)
            if task == 0:
                sok.save(os.path.join(folder, "v1"), [table], session=session)
        with open(os.path.join(folder, f"worker{task}.json"), "w") as file:
            json.dump(
                [np.mean(seen[:5]), np.mean(seen[-5:]), bool(np.isfinite(rows).all()), int(num_rows), int(step)], file
            )


def workers_of_v1_share_the_tables_of_servers(cluster, workers, folder):
    for process in workers:
        process.join(60)
        assert process.exitcode == 0, process.exitcode
    said = []
    for task in range(2):
        with open(os.path.join(folder, f"worker{task}.json")) as file:
            said.append(json.load(file))
    first = said[0][0]
    assert all(last < 0.7 * first and is_finite for _, last, is_finite, *_ in said), said
    # Each worker sees the other's rows and steps: 120 in all, of which the last to read has seen every one.
    assert max(step for *_, step in said) == 120 and max(num_rows for *_, num_rows, _ in said) == 100, said
    alone()
    table = sok.EmbeddingVariable(4, 1000, name="v1")
    sok.restore(os.path.join(folder, "v1"), [table])
    assert 60 <= int(table.step) <= 120 and int(table.num_rows()) <= 100


def main():
    faulthandler.dump_traceback_later(150)  # where it waits, before its test's deadline kills it
    folder = sys.argv[1]
    v1 = Cluster({"ps": 2, "worker": 2}, {"ps": 2})
    workers = [v1.run(v1_worker, task, folder) for task in range(2)]
    cluster = Cluster({"chief": 1, "ps": 2, "worker": 2}, {"ps": 2, "worker": 2}, spare=(WORKER,))
    told, state, saved = {}, {}, os.path.join(folder, "saved")

    def check(name, do):
        began = time.time()
        try:
            state[name] = do()
            told[name] = None
        except Exception:
            told[name] = traceback.format_exc()
        print(f"{name}: {time.time() - began:.1f} s", file=sys.stderr)

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster.spec), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    killed = workers_train_while_one_is_killed
    asked = others_ask_for_what_is_on_servers
    for do in (
        one_worker_trains_as_without_servers,
        tables_have_policies_and_files,
        checkpoints_by_version_leave_rows_in_the_files_of_servers,
        rows_are_written_read_and_erased,
        lookups_run_ahead,
        combinations_that_are_impossible_are_refused,
    ):
        check(do.__name__, do)
    check(asked.__name__, lambda: asked(folder))
    check(killed.__name__, lambda: killed(cluster, strategy, saved))
    back = checkpoints_go_to_tables_of_workers_and_back
    check(back.__name__, lambda: back(saved, state[killed.__name__]))
    together = workers_of_v1_share_the_tables_of_servers
    check(together.__name__, lambda: together(v1, workers, folder))
    print(json.dumps(told), flush=True)
    cluster.end()
    v1.end()
    os._exit(0)  # the end of a strategy waits for its servers


if __name__ == "__main__":
    main()
