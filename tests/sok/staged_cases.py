"""Programs for v1 sessions whose input is staged, with lookups in their step or ahead of it."""

import contextlib

import numpy as np
import tensorflow.compat.v1 as tf

import sok

DIM, IDS, RATE = 4, 3, 0.01
OPTIMIZERS = {
    "adagrad": lambda: tf.train.AdagradOptimizer(0.1),
    "adam": lambda: tf.train.AdamOptimizer(0.1),
    "sgd": lambda: tf.train.GradientDescentOptimizer(RATE),
}


@contextlib.contextmanager
def deeprec():
    """DeepRec's names are in `tf` inside."""
    sok.deeprec.install()
    try:
        yield
    finally:
        sok.deeprec.uninstall()


def asynchronous(capacity, threads=1):
    """The seed's lines; 0: not asynchronous."""
    config = tf.ConfigProto()
    if capacity:
        config.graph_options.optimizer_options.do_async_embedding = True
        config.graph_options.optimizer_options.async_embedding_options.threads_num = threads
        config.graph_options.optimizer_options.async_embedding_options.capacity = capacity
    return config


def samples(rank, count, seed=0):
    rng = np.random.default_rng([seed, rank])
    return rng.integers(0, 40, [count, IDS]), rng.normal(size=[count, 1]).astype(np.float32)


def batches_of(ids, labels, batch_size=8):
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(batch_size)
    return tf.data.make_one_shot_iterator(data).get_next()


def train(name, rank, capacity=0, optimizer="adagrad", count=80, hooks=(), more=None, look_up=None, **stage):
    """Losses, rows by key, the dense weight, and what `more(tables)` gives to be run after each step."""
    with tf.Graph().as_default():
        ids, labels = tf.staged(batches_of(*samples(rank, count)), capacity=2, **stage)
        tables = [tf.get_embedding_variable(f"{name}_{i}", DIM, initializer=tf.ones_initializer()) for i in range(2)]
        if look_up is None:
            vectors = tf.concat([tf.reshape(tf.nn.embedding_lookup(t, ids), [-1, DIM * IDS]) for t in tables], 1)
        else:
            vectors = look_up(tables, ids)
        weight = tf.get_variable("w", [vectors.shape[-1], 1], initializer=tf.ones_initializer(), use_resource=True)
        loss = tf.reduce_mean(tf.square(vectors @ weight - labels))
        own = sok.DistributedOptimizer(OPTIMIZERS[optimizer]())
        update = own.minimize(loss * sok.deeprec.batch_weight(), tf.train.get_or_create_global_step())
        exports = [table.export() for table in tables]
        between = more(tables) if more is not None else ()
        losses = []
        hooks = [tf.make_prefetch_hook(), sok.hooks.BroadcastVariablesHook(), *hooks]
        with tf.train.MonitoredTrainingSession(config=asynchronous(capacity), hooks=hooks) as session:
            while not session.should_stop():
                losses.append(session.run([loss, update])[0])
                if not session.should_stop():
                    rows, dense, _ = session.run([exports, weight, between])
    rows = [dict(zip(keys.tolist(), values, strict=True)) for keys, values in rows]  # of this rank
    return {"losses": np.array(losses), "rows": rows, "dense": dense}


def same(one, other):
    tf.nest.map_structure(np.testing.assert_array_equal, one, other)
