"""Feature columns and ordinary variables in groups on real workers: as one worker on the whole batch."""

import contextlib

import numpy as np
import tensorflow as tf

import sok
from tests.multiprocess.harness import World

STEPS, BATCH, BUCKETS = 4, 12, 20
COMBINERS = ("sum", "mean", "sqrtn")


def batch_of(step):
    """Rows of ids (below 0: none) of three features, and labels, of the whole batch."""
    rng = np.random.default_rng(step)
    return {f"f{c}": rng.integers(-2, BUCKETS, [BATCH, 3]) for c in COMBINERS}, rng.normal(size=[BATCH]).astype(
        np.float32
    )


def part_of(world: World, array):
    """Uneven parts: the last rank has the most."""
    ends = [BATCH * r // (world.size + 1) for r in range(world.size)] + [BATCH]
    return array[ends[world.rank] : ends[world.rank + 1]]


def make_columns(grouped, ours):
    def column(combiner):
        item = tf.feature_column.categorical_column_with_identity(f"f{combiner}", BUCKETS)
        if combiner in ours:
            return sok.feature_column.embedding_column(item, 4, combiner, initializer="ones")
        return tf.feature_column.embedding_column(item, 3, combiner, initializer=tf.ones_initializer())

    if not grouped:
        return [column(c) for c in COMBINERS]
    with sok.group_embedding_column_scope():
        return [column(c) for c in COMBINERS]


def train(world: World, grouped, ours=("sum", "mean")):
    """Losses of each step, summed over the parts that `world` has; and the rows afterwards, in a v1 session."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session, v1.variable_scope("model"):
        features = {f"f{c}": v1.placeholder(tf.int64, [None, 3]) for c in COMBINERS}
        labels = v1.placeholder(tf.float32, [None])
        net = v1.feature_column.input_layer(features, make_columns(grouped, ours))
        loss = tf.reduce_sum((tf.reduce_sum(net, 1) - labels) ** 2)
        optimizer = sok.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.01), op=sok.Sum)
        step = optimizer.minimize(loss)
        tables, plain = sok.split_embedding_variable_from_others(v1.trainable_variables())
        rows = [*[t.sparse_read(tf.range(BUCKETS, dtype=tf.int64)) for t in tables], *map(tf.convert_to_tensor, plain)]
        session.run(v1.global_variables_initializer())
        losses = []
        for number in range(STEPS):
            ids, of_batch = batch_of(number)
            feed = {features[name]: part_of(world, rows_of_ids) for name, rows_of_ids in ids.items()}
            losses.append(session.run([loss, step], {**feed, labels: part_of(world, of_batch)})[0])
        return losses, session.run(rows)


def by_numpy():
    """The same steps of gradient descent, stated by hand."""
    weights = {c: np.ones([BUCKETS, 4 if c in ("sum", "mean") else 3]) for c in COMBINERS}
    losses = []
    for number in range(STEPS):
        ids, labels = batch_of(number)
        gradients = {c: np.zeros_like(w) for c, w in weights.items()}
        kept = {c: [[i for i in row if i >= 0] for row in ids[f"f{c}"]] for c in COMBINERS}
        scale = {"sum": lambda n: 1.0, "mean": lambda n: 1.0 / max(n, 1), "sqrtn": lambda n: 1.0 / max(n, 1) ** 0.5}
        loss = 0.0
        for sample in range(BATCH):
            total = sum(weights[c][kept[c][sample]].sum() * scale[c](len(kept[c][sample])) for c in COMBINERS)
            loss += (total - labels[sample]) ** 2
            for c in COMBINERS:
                for i in kept[c][sample]:
                    gradients[c][i] += 2 * (total - labels[sample]) * scale[c](len(kept[c][sample]))
        losses.append(loss)
        for c in COMBINERS:
            weights[c] -= 0.01 * gradients[c]
    return losses, weights


def check_columns_train_as_one_worker_on_the_whole_batch(world):
    losses, weights = by_numpy()
    for grouped in (True, False):
        mine, (of_mean, of_sum, of_sqrtn) = train(world, grouped)
        np.testing.assert_allclose(of_sum, weights["sum"], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(of_mean, weights["mean"], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(of_sqrtn, weights["sqrtn"], rtol=1e-3, atol=1e-4)
        total = sok.job.context.get_transport().grouped_all_reduce(
            [tf.constant(mine)], f"losses{grouped}", average=False
        )[0]
        np.testing.assert_allclose(total, losses, rtol=1e-3)


def check_a_group_of_columns_is_one_exchange(world):
    import tf_keras

    ids, _ = batch_of(0)
    counts = []
    for grouped in (True, False):
        layer = tf_keras.layers.DenseFeatures(make_columns(grouped, COMBINERS))
        with sok.trace() as trace:
            layer({name: part_of(world, rows) for name, rows in ids.items()})
        counts.append(trace.collectives)
    assert counts == ([2, 6] if world.size > 1 else [0, 0])


def check_gradients_of_ordinary_variables_are_averaged(world):
    variables = [tf.Variable(np.ones([BUCKETS, 2], np.float32), name=f"ordinary_{i}") for i in range(2)]
    table = sok.EmbeddingVariable(2, BUCKETS, name="beside_ordinary", initializer="ones")
    ids = tf.ragged.constant([[world.rank, 5], [5]], tf.int64, ragged_rank=1)
    with sok.DistributedGradientTape(tf.GradientTape()) as tape:
        params = [variables[0], table, variables[1]]
        outputs = sok.group_embedding_lookup_sparse(params, [ids] * 3, ["sum", "sum", "mean"])
        loss = tf.add_n([tf.reduce_sum(o) for o in outputs])
    gradients = tape.gradient(loss, [*variables, table])
    summed, averaged = (tf.convert_to_tensor(g).numpy()[:, 0] for g in gradients[:2])
    expected = np.zeros(BUCKETS)
    expected[: world.size] += 1 / world.size
    expected[5] += 2
    np.testing.assert_allclose(summed, expected, rtol=1e-6)
    expected = np.zeros(BUCKETS)
    expected[: world.size] += 0.5 / world.size
    expected[5] += 1.5
    np.testing.assert_allclose(averaged, expected, rtol=1e-6)
    of_table = np.zeros(BUCKETS)
    np.add.at(of_table, table.export()[0].numpy()[gradients[2].indices], gradients[2].values.numpy()[:, 0])
    expected = np.zeros(BUCKETS)
    expected[: world.size] += 1 / world.size
    expected[5] += 2
    expected[np.arange(BUCKETS) % world.size != world.rank] = 0
    np.testing.assert_allclose(of_table, expected, rtol=1e-6)


def check_sequences_and_safe_lookups_train_as_one_worker_on_the_whole_batch(world):
    v1, ids = tf.compat.v1, batch_of(0)[0]["fsum"]
    mine = part_of(world, ids)
    for grouped in (True, False):
        with tf.Graph().as_default(), v1.Session() as session, v1.variable_scope(f"sequences_{grouped}"):
            item = sok.deeprec.sequence_categorical_column_with_embedding("item", capacity=BUCKETS)
            with sok.group_embedding_column_scope() if grouped else contextlib.nullcontext():
                column = sok.feature_column.embedding_column(item, 4, initializer="ones")
            sparse = tf.SparseTensor(np.argwhere(mine > -9), mine.reshape([-1]), mine.shape)
            net, _ = sok.deeprec.sequence_input_layer({"item": sparse}, [column])
            (table,) = v1.trainable_variables()
            pooled = sok.deeprec.safe_embedding_lookup_sparse(table, sparse, combiner="sum")
            optimizer = sok.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1), op=sok.Sum)
            step = optimizer.minimize(tf.reduce_sum(net) + tf.reduce_sum(pooled))
            session.run(v1.global_variables_initializer())
            found, of_pooled = session.run([net, pooled])
            np.testing.assert_array_equal(found[:, :, 0], mine >= 0)
            np.testing.assert_array_equal(of_pooled[:, 0], (mine >= 0).sum(1))
            session.run(step)
            rows = session.run(table.sparse_read(tf.range(BUCKETS, dtype=tf.int64)))
            times = np.bincount(ids[ids >= 0], minlength=BUCKETS)
            np.testing.assert_allclose(rows, np.tile(1 - 0.1 * 2 * times[:, None], [1, 4]), rtol=1e-5, atol=1e-6)


def check_localized_is_refused_among_several(world):
    if world.size > 1:
        try:
            sok.enable_distributed_strategy("localized")
        except RuntimeError as error:
            assert f"sok.Init has joined {world.size} workers" in str(error)
        else:
            raise AssertionError("several workers were taken for one")
    assert sok.enable_distributed_strategy("collective").numpy() == b"OK"
    assert sok.size() == world.size
