"""SOK v2's names on several workers, run on each by test_v2.py."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from tests.multiprocess.harness import World

ROWS, STEPS = 7, 3  # no multiple of 2 or 3: workers hold different numbers of rows
MATRIX = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
WIDE = np.random.default_rng(1).normal(size=(ROWS, 5)).astype(np.float32)
SAMPLES = 6


def batch(step: int, world: World) -> tuple[list[tf.RaggedTensor], tf.RaggedTensor]:
    """This worker's part of a batch: ids of each of six features, and weights of the first."""
    rng = np.random.default_rng(100 + step)
    features = []
    for feature in range(6):
        rows = [rng.integers(0, ROWS, rng.integers(0, 4)).tolist() for _ in range(SAMPLES)]
        rows[feature] = [ROWS - 1]
        features.append(rows)
    weights = [[float(1 + (i + j) % 3) for j in range(len(row))] for i, row in enumerate(features[0])]
    mine = slice(SAMPLES * world.rank // world.size, SAMPLES * (world.rank + 1) // world.size)
    ids = [tf.ragged.constant(rows[mine], dtype=tf.int64, ragged_rank=1) for rows in features]
    return ids, tf.ragged.constant(weights[mine], dtype=tf.float32, ragged_rank=1)


def dynamic(matrix: np.ndarray, **options) -> sok.DynamicVariable:
    table = sok.DynamicVariable(matrix.shape[1], **options)
    sok.assign(table, np.arange(ROWS), matrix)
    return table


def make_tables() -> list[sok.EmbeddingVariable]:
    return [
        sok.Variable(MATRIX, name="matrix"),
        dynamic(WIDE, name="dynamic"),
        sok.DynamicVariable(4, name="fresh"),
        sok.Variable(shape=(ROWS, 2), initializer="random_normal", name="shaped"),
        sok.Variable(MATRIX, name="localized", mode="localized:0"),
        dynamic(WIDE, name="localized_dynamic", mode=f"localized:{sok.communication.num_ranks() - 1}"),
    ]


def loss_of(tables, ids, weights) -> tf.Tensor:
    combiners = ["mean", "sum", "average", "sqrtn", "sum", "mean"]
    pooled = sok.lookup_sparse(tables, ids, [weights, *[None] * 5], combiners)
    rows = sok.all2all_dense_embedding(tables[0], ids[1].values)
    return tf.add_n([tf.reduce_sum(p**2) for p in pooled]) + tf.reduce_sum(rows**3)


def everything(tables, world: World) -> list[np.ndarray]:
    """Each table's rows, sorted by key, of all workers. Also sees that each worker has those it should."""
    found = []
    for table in tables:
        indices, values = sok.export(table)
        assert all((int(i) % world.size if table.target_gpu < 0 else table.target_gpu) == world.rank for i in indices)
        assert np.all(np.diff(indices.numpy()) > 0)
        keys = sok.communication.allgather(indices).numpy()
        rows = sok.communication.allgather(values).numpy()
        assert len(set(keys.tolist())) == len(keys)
        found.append(rows[np.argsort(keys)])
    return found


def check_v2_init_starts_the_job(world):
    assert sok.init() is None and sok.init() is None
    assert sok.communication.num_ranks() == sok.size() == world.size


def check_v2_training_eagerly(world):
    tables, optimizer = make_tables(), sok.SGD(0.05)
    for step in range(STEPS):
        ids, weights = batch(step, world)
        with tf.GradientTape() as tape:
            loss = loss_of(tables, ids, weights)
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
    return everything(tables, world)


def check_v2_training_in_a_function(world):
    tables, optimizer = make_tables(), sok.SGD(0.05)

    @tf.function(reduce_retracing=True)
    def train(ids, weights):
        with tf.GradientTape() as tape:
            loss = loss_of(tables, ids, weights)
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))

    for step in range(STEPS):
        train(*batch(step, world))
    return everything(tables, world)


def check_v2_training_in_a_session(world):
    batches = [
        [
            tf.compat.v1.ragged.RaggedTensorValue(i.values.numpy(), i.row_splits.numpy())
            for i in batch(step, world)[0][:2]
        ]
        for step in range(STEPS)
    ]
    with tf.Graph().as_default():
        sok.init()
        matrices = [MATRIX, WIDE]
        tables = [sok.Variable(m, name="v1") for m in matrices]
        places = [tf.compat.v1.ragged.placeholder(tf.int64, 1) for _ in tables]
        pooled = sok.lookup_sparse(tables, places, combiners=["sum", "mean"])
        loss = tf.add_n([tf.reduce_sum(p**2) for p in pooled])
        train = sok.SGD(0.05).apply_gradients(zip(tf.gradients(loss, tables), tables, strict=True))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for values in batches:
                session.run(train, dict(zip(places, values, strict=True)))
            rows = [(table.local_indices().eval(), table.eval()) for table in tables]
    gathered = []
    for keys, values in rows:
        assert all(key % world.size == world.rank for key in keys)
        keys, values = sok.communication.allgather(keys).numpy(), sok.communication.allgather(values).numpy()
        gathered.append(values[np.argsort(keys)])
    return gathered


WRAPPED = {
    "keras.Adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "legacy.Adagrad": lambda: tf_keras.optimizers.legacy.Adagrad(0.1),
    "keras.RMSprop": lambda: keras.optimizers.RMSprop(0.05, momentum=0.5),
    "legacy.SGD momentum": lambda: tf_keras.optimizers.legacy.SGD(0.02, momentum=0.5),
    "v1.Ftrl": lambda: tf.compat.v1.train.FtrlOptimizer(0.1, l2_regularization_strength=0.1),
    "v1.GradientDescent": lambda: tf.compat.v1.train.GradientDescentOptimizer(0.02),
}


def check_v2_wrapped_optimizers(world):
    found = {}
    for name, make in WRAPPED.items():
        tables = [sok.Variable(MATRIX), dynamic(WIDE), sok.Variable(WIDE, mode="localized:0")]
        optimizer = sok.OptimizerWrapper(make())
        weight = (keras if name.startswith("keras.") else tf).Variable([1.0, 2.0, 0.5])
        variables = [*tables, weight]

        @tf.function(reduce_retracing=True)
        def train(ids, factors, tables=tables, weight=weight, variables=variables, optimizer=optimizer):
            with sok.DistributedGradientTape(tf.GradientTape(), op=sok.Sum) as tape:
                pooled = sok.lookup_sparse(tables, ids, [factors, None, None], ["mean", "sum", "mean"])
                loss = tf.add_n([tf.reduce_sum(p**2) * weight[i] for i, p in enumerate(pooled)])
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        for step in range(STEPS):
            ids, factors = batch(step, world)
            train(ids[:3], factors)
        found[name] = [*everything(tables, world), weight.numpy()]
    return found


def check_v2_initial_values(world):
    variable = sok.Variable(MATRIX)
    np.testing.assert_array_equal(variable.numpy(), MATRIX[world.rank :: world.size])
    assert (variable.num_gpus, variable.global_gpu_id, variable.key_map(5)) == (world.size, world.rank, 5 // world.size)
    small = sok.Variable(MATRIX[:1])
    assert small.numpy().shape == (int(world.rank == 0), 3)
    np.testing.assert_array_equal(sok.all2all_dense_embedding(small, [[0]]), MATRIX[None, :1])
    return sok.Variable(shape=(ROWS, 2), initializer="uniform", name="drawn").numpy()


def check_v2_localized_rows_are_on_their_worker(world):
    last = world.size - 1
    variable = sok.Variable(MATRIX, mode=f"localized:{last}")
    assert (variable.target_gpu, variable.global_shape, variable.key_map(5)) == (last, (ROWS, 3), 5)
    np.testing.assert_array_equal(variable.numpy(), MATRIX if world.rank == last else MATRIX[:0])
    table = sok.DynamicVariable(2, mode=f"localized:{last}", initializer="3")
    ids = [world.rank, 10**6 + world.rank]
    assert sok.all2all_dense_embedding(table, ids).numpy().tolist() == [[3.0, 3.0]] * 2
    # Any worker may be the last to look something up.
    sok.communication.allreduce(tf.constant(0), "sum")
    assert (table.target_gpu, table.size.numpy().tolist()) == (last, [2 * world.size if world.rank == last else 0, 2])
    assert int(table.total_size()) == 2 * world.size
    with pytest.raises(ValueError, match=f"'localized:0' to 'localized:{last}'. Received: 'localized:{world.size}'"):
        sok.Variable(MATRIX, mode=f"localized:{world.size}")
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"key {ROWS} is outside"):
        sok.lookup_sparse(variable, tf.constant([[ROWS]]))


def check_v2_collectives(world):
    c, ranks = sok.communication, np.arange(world.size)
    assert (c.rank(), c.num_ranks(), c.global_gpu_id(), c.num_gpus()) == (
        world.rank,
        world.size,
        world.rank,
        world.size,
    )
    assert (c.local_rank(), c.id_in_rank(), c.num_gpu_per_rank()) == (world.rank, 0, 1)
    mine = tf.constant([float(world.rank), 1.0])

    def all_of_them(x):
        sent = tf.cast(world.rank * 10 + ranks, tf.int64)
        return [
            *[c.allreduce(x, op) for op in ("sum", "average", "max", "min")],
            c.allgather(x),
            c.broadcast(x, world.size - 1),
            *c.alltoall(sent, tf.ones([world.size], tf.int64)),
        ]

    for run in (all_of_them, tf.function(all_of_them)):
        total, mean, top, low, gathered, sent, received, splits = [t.numpy().tolist() for t in run(mine)]
        assert total == [sum(ranks), world.size] and mean == [np.mean(ranks), 1.0]
        assert top == [world.size - 1.0, 1.0] and low == [0.0, 1.0]
        assert gathered == [value for rank in ranks for value in (float(rank), 1.0)]
        assert sent == [world.size - 1.0, 1.0]
        assert received == (ranks * 10 + world.rank).tolist() and splits == [1] * world.size


def check_v2_a_gradient_goes_back_the_way_that_rows_came(world):
    """The worker that gets row i of [n, ...] multiplies its square by 1 + its rank, so its gradient is known here."""
    counts = [(world.rank + to) % 3 for to in range(world.size)]  # some are 0, and workers send unlike numbers
    factor = np.repeat(1.0 + np.arange(world.size), counts)
    number, empty = sum(counts), tf.zeros([0], tf.int32)
    for dtype in (tf.float32, tf.float64, tf.float16, tf.bfloat16):
        for shape in ([number], [number, 2]):
            rows = tf.cast(tf.reshape(tf.range(1, 1 + np.prod(shape)), shape), dtype)

            def gradients(rows, dtype=dtype):
                with tf.GradientTape() as outer:
                    outer.watch(rows)
                    with tf.GradientTape() as inner:
                        inner.watch(rows)
                        got = sok.communication.alltoall(rows, counts)[0]
                        loss = tf.reduce_sum(got * got) * tf.cast(1 + world.rank, dtype)
                    first = inner.gradient(loss, rows)
                    total = tf.reduce_sum(first)
                return first, outer.gradient(total, rows)

            for run in (gradients, tf.function(gradients)):
                first, second = run(rows)
                expected = 2.0 * factor.reshape([-1] + [1] * (len(shape) - 1))
                np.testing.assert_array_equal(tf.cast(first, tf.float64), expected * tf.cast(rows, tf.float64))
                np.testing.assert_array_equal(tf.cast(second, tf.float64), np.broadcast_to(expected, shape))
    with tf.GradientTape() as tape:
        tape.watch(empty)
        got, _ = sok.communication.alltoall(empty, [0] * world.size)  # integers have none
    assert got.shape == [0]


def check_v2_collectives_refuse_what_does_not_fit(world):
    """The same on one worker as on many; here all do it, so that none waits."""
    c, ones, two = sok.communication, [1] * world.size, tf.constant([1.0, 2.0])
    cases = [
        (lambda: c.alltoall(tf.constant(["a"]), ones), TypeError, "alltoall: .*dtype .*string"),
        (lambda: c.alltoall(tf.constant(1.0), ones), ValueError, "alltoall: the tensor must have rows"),
        (lambda: c.alltoall(two, [1.0] * world.size), TypeError, "`splits` must be integers. Received: float32"),
        (lambda: c.alltoall(two, [*ones, 1]), ValueError, rf"one value per worker, {world.size}\. .*{world.size + 1}"),
        (lambda: c.alltoall(two, [3] * world.size), ValueError, r"sum to the number of rows.*\[3.* for 2 rows"),
        (lambda: c.alltoall(two[:0], [-1, *ones][: world.size]), ValueError, "must not be negative"),
        (lambda: c.allreduce(two, "prod"), ValueError, "`op` must be 'sum', .* Received: 'prod'"),
        (lambda: c.allreduce(tf.constant(1), "average"), TypeError, "allreduce: a dtype to average must .*int32"),
        (lambda: c.allreduce(tf.constant(True), "sum"), TypeError, "allreduce: .*dtype to sum .*bool"),
        (lambda: c.allreduce(tf.constant("a"), "max"), TypeError, "allreduce: .*dtype .*string"),
        (lambda: c.allgather(tf.constant(1)), ValueError, "allgather: the tensor must have rows"),
        (lambda: c.allgather(tf.constant(["a"])), TypeError, "allgather: .*dtype .*string"),
        (lambda: c.broadcast(tf.constant(1j), 0), TypeError, "broadcast: .*dtype .*complex128"),
    ]
    for case, error, message in cases:
        for run in (case, tf.function(case)):
            with pytest.raises(error, match=message):
                run()

    @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([world.size], tf.int64)])
    def sent(rows, splits):
        return c.alltoall(rows, splits)[0]

    for splits in ([3] * world.size, [-1, *[1] * world.size][: world.size]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="sum to .*rows of `tensor`"):
            sent(two, tf.constant(splits, tf.int64))
    assert sent(tf.zeros([world.size]), tf.constant(ones, tf.int64)).shape == [world.size]


def check_v2_a_bad_row_number_on_one_worker_is_an_error_on_all(world):
    variable = sok.Variable(MATRIX, name="bad_v2")
    number = 1 if world.rank else 10**6
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad_v2.*key 1000000 is outside"):
        sok.lookup_sparse(variable, tf.constant([[number]]))
    sok.lookup_sparse(variable, tf.constant([[1]]))
