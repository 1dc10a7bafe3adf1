"""Whole training steps of the layers beside stock TensorFlow on a dense table with the same initial rows."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok
from tests.reference.judge import assert_close
from tests.reference.keys import KEY_DTYPES, extreme_keys

v1 = tf.compat.v1
DIM, SLOTS, BATCH, STEPS = 4, 3, 6, 3
COMBINERS = ["sum", "mean", "sqrtn"]
FORMS = ["ragged", "sok", "cube", "dense", "weighted ragged"]


def vocabulary(key_dtype):
    """Twelve keys, the extreme ones among them. Number i stands for vocabulary[i] in the dense table."""
    extremes = extreme_keys(key_dtype)
    return np.unique(np.concatenate([extremes, np.arange(40, 60).astype(key_dtype)]))[-12:]


class Batch:
    """Numbers of keys for BATCH samples of SLOTS features, with 0 to 3 each, duplicates and empty ones among them."""

    def __init__(self, rng, form):
        static = form == "dense"
        self.lengths = np.full(BATCH * SLOTS, 2) if static else rng.integers(0, 4, BATCH * SLOTS)
        self.numbers = rng.integers(0, 12, self.lengths.sum())
        self.weights = rng.uniform(0.5, 2.0, len(self.numbers)).astype(np.float32) if "weighted" in form else None
        self.targets = rng.normal(size=[BATCH, 1]).astype(np.float32)

    def csr(self, values):
        return tf.RaggedTensor.from_row_lengths(values, self.lengths)

    def stock(self, dense, combiner):
        """[B, F, D] by TensorFlow; the `safe` one, because the other drops empty features at the end."""
        ids = self.csr(self.numbers).to_sparse()
        ids = tf.SparseTensor(ids.indices, ids.values, [BATCH * SLOTS, 3])
        weights = None if self.weights is None else tf.SparseTensor(ids.indices, self.weights, ids.dense_shape)
        pooled = tf.nn.safe_embedding_lookup_sparse(dense, ids, weights, combiner=combiner)
        return tf.reshape(pooled, [BATCH, SLOTS, DIM])

    def given(self, form, keys):
        """What the layer is called with."""
        flat = self.csr(keys[self.numbers])
        cube = tf.RaggedTensor.from_uniform_row_length(flat, SLOTS)
        if form == "weighted ragged":
            weights = tf.RaggedTensor.from_uniform_row_length(self.csr(self.weights), SLOTS)
            return dict(inputs=cube, weights=weights)
        if form == "sok":
            sparse = flat.to_sparse()
            return dict(inputs=tf.SparseTensor(sparse.indices, sparse.values, [BATCH * SLOTS, 3]))
        if form == "cube":
            return dict(inputs=cube.to_sparse())
        return dict(inputs=cube if form == "ragged" else tf.constant(keys[self.numbers].reshape(BATCH, SLOTS, 2)))


def loss_of(pooled, projection, targets):
    return tf.reduce_mean((tf.matmul(tf.reshape(pooled, [BATCH, SLOTS * DIM]), projection) - targets) ** 2)


def layer_of(combiner, key_dtype):
    return sok.DistributedEmbedding(combiner, 50, DIM, SLOTS, 3, key_dtype=key_dtype, embedding_initializer="normal")


def first_projection(rng):
    return rng.normal(size=[SLOTS * DIM, 1]).astype(np.float32)


OPTIMIZERS = {
    "sgd": (lambda: sok.optimizers.SGD(0.5), lambda: keras.optimizers.SGD(0.5)),
    "adagrad": (lambda: sok.optimizers.Adagrad(0.5), lambda: keras.optimizers.Adagrad(0.5)),
    "adam": (lambda: sok.optimizers.Adam(0.05), lambda: keras.optimizers.Adam(0.05)),
}


def assert_both_train_alike(combiner, key_dtype, form, optimizer, compiled, rng):
    keys, layer = vocabulary(key_dtype), layer_of(combiner, key_dtype)
    start = first_projection(rng)
    dense, ours, theirs = tf.Variable(layer.var.sparse_read(keys)), tf.Variable(start), tf.Variable(start)
    for_rows, stock = (make() for make in OPTIMIZERS[optimizer])
    for_dense = OPTIMIZERS[optimizer][1]()

    def our_step(given, targets):
        with tf.GradientTape() as tape:
            pooled = layer(**given, training=True)
            loss = loss_of(pooled, ours, targets)
        of_rows, of_dense = tape.gradient(loss, [layer.var, ours])
        for_rows.apply_gradients([(of_rows, layer.var)])
        for_dense.apply_gradients([(of_dense, ours)])
        return pooled, loss

    if compiled:
        our_step = tf.function(our_step, reduce_retracing=True)
    for _ in range(STEPS):
        batch = Batch(rng, form)
        pooled, loss = our_step(batch.given(form, keys), batch.targets)
        with tf.GradientTape() as tape:
            expected = batch.stock(dense, combiner)
            expected_loss = loss_of(expected, theirs, batch.targets)
        # Each tiny difference changes the rows that the next step starts from, hence the factors.
        assert_close(pooled.numpy(), expected.numpy(), factor=STEPS)
        assert_close(loss.numpy(), expected_loss.numpy(), factor=STEPS)
        stock.apply_gradients(zip(tape.gradient(expected_loss, [dense, theirs]), [dense, theirs], strict=True))
    assert_close(layer.var.sparse_read(keys).numpy(), dense.numpy(), factor=STEPS)
    assert_close(ours.numpy(), theirs.numpy(), factor=STEPS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("key_dtype", KEY_DTYPES, ids=lambda d: np.dtype(d).name)
def test_eager_training(key_dtype, combiner, form, rng):
    assert_both_train_alike(combiner, key_dtype, form, "sgd", compiled=False, rng=rng)


# Every combiner in every form, and every optimizer with every combiner: it does not see the form.
COMPILED = [(*case, "sgd") for case in itertools.product(COMBINERS, FORMS[:3])]
COMPILED += [(combiner, "ragged", optimizer) for combiner in COMBINERS for optimizer in ("adagrad", "adam")]


@pytest.mark.parametrize(
    "combiner, form, optimizer, key_dtype",
    [(*case, dtype) for case, dtype in zip(COMPILED, itertools.cycle(KEY_DTYPES), strict=False)],
)
def test_compiled_training(combiner, form, optimizer, key_dtype, rng):
    assert_both_train_alike(combiner, key_dtype, form, optimizer, compiled=True, rng=rng)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("combiner, key_dtype", list(zip(COMBINERS, KEY_DTYPES[1:], strict=True)))
def test_training_in_a_session(combiner, key_dtype, form, rng):
    keys, start = vocabulary(key_dtype), first_projection(rng)
    with tf.Graph().as_default(), v1.Session() as session:
        layer = layer_of(combiner, key_dtype)
        initial = session.run(layer.var.sparse_read(keys))
        dense, ours, theirs = (v1.Variable(x, use_resource=True, trainable=False) for x in (initial, start, start))
        for_dense = v1.train.GradientDescentOptimizer(0.5)
        for_rows, numbers = sok.optimizers.SGD(0.5), []
        for _ in range(STEPS):  # constants: a graph for each batch
            batch = Batch(rng, form)
            pooled = layer(**batch.given(form, keys), training=True)
            loss = loss_of(pooled, ours, batch.targets)
            of_rows, of_dense = tf.gradients(loss, [layer.var, ours])
            expected = batch.stock(dense, combiner)
            expected_loss = loss_of(expected, theirs, batch.targets)
            before = [pooled, expected, loss, expected_loss]
            train = [
                for_rows.apply_gradients([(of_rows, layer.var)]),
                for_dense.apply_gradients([(of_dense, ours)]),
                for_dense.minimize(expected_loss, var_list=[dense, theirs]),
            ]
            numbers.append((before, train))
        after = [layer.var.sparse_read(keys), dense, ours, theirs]
        session.run(v1.global_variables_initializer())
        for before, train in numbers:
            # Nothing orders a lookup and an update in one run of a v1 graph: read first.
            pooled, expected, loss, expected_loss = session.run(before)
            session.run(train)
            assert_close(pooled, expected, factor=STEPS)
            assert_close(loss, expected_loss, factor=STEPS)
        rows, expected_rows, weights, expected_weights = session.run(after)
        assert_close(rows, expected_rows, factor=STEPS)
        assert_close(weights, expected_weights, factor=STEPS)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("key_dtype", KEY_DTYPES, ids=lambda d: np.dtype(d).name)
def test_all_to_all_trains_as_embedding_lookup(key_dtype, compiled, rng):
    keys = vocabulary(key_dtype)
    layer = sok.All2AllDenseEmbedding(50, DIM, SLOTS, 2, key_dtype=key_dtype, embedding_initializer="normal")
    dense, for_rows, stock = (
        tf.Variable(layer.var.sparse_read(keys)),
        sok.optimizers.SGD(0.5),
        keras.optimizers.SGD(0.5),
    )

    def our_step(ids, factors):
        with tf.GradientTape() as tape:
            rows = layer(ids, training=True)
            loss = tf.reduce_sum(rows**2 * factors)
        for_rows.apply_gradients([(tape.gradient(loss, layer.var), layer.var)])
        return rows

    if compiled:
        our_step = tf.function(our_step)
    for _ in range(STEPS):
        numbers, factors = rng.integers(0, 12, [BATCH, SLOTS, 2]), rng.normal(size=[BATCH, SLOTS, 2, DIM]) / 10
        factors = factors.astype(np.float32)
        rows = our_step(tf.constant(keys[numbers]), factors)
        with tf.GradientTape() as tape:
            expected = tf.nn.embedding_lookup(dense, numbers)
            loss = tf.reduce_sum(expected**2 * factors)
        assert_close(rows.numpy(), expected.numpy(), factor=STEPS)
        stock.apply_gradients([(tape.gradient(loss, dense), dense)])
    assert_close(layer.var.sparse_read(keys).numpy(), dense.numpy(), factor=STEPS)
