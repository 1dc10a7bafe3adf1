"""A thousand tables, each placed in one of five ways: what they are trained to, and what a step takes."""

import resource

import numpy as np
import tensorflow as tf

import sok

TABLES, STEPS, SAMPLES = 1000, 3, 12  # samples of all workers


def layers_of(size):
    """Layers, and a placement of each: of every kind two hundred."""
    layers, placements = [], []
    for i in range(TABLES):
        rows, dim, options = 5 + i % 7, 1 + i % 4, sok.TableOptions(seed=i)
        kind = i % 5
        is_hashed = kind in (3, 4)  # a copy of row numbers would be an ordinary variable
        layers.append(sok.Embedding(None if is_hashed else rows, dim, "normal", combiner="sum", table=options))
        columns = sok.column_wise(min(2, dim), [(i + piece) % size for piece in range(min(2, dim))])
        of_kind = (sok.row_wise(), sok.table_wise(i // 5 % size), columns, sok.row_wise(hash=True), sok.data_parallel())
        placements.append(of_kind[kind])
    return layers, placements


def processor_seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def check_a_thousand_tables(world):
    """Returns losses of this worker's samples, the rows of all tables, and the names of tables."""
    sok.Init(global_batch_size=SAMPLES)
    before = processor_seconds()
    layers, placements = layers_of(world.size)
    collection = sok.parallel.EmbeddingCollection(layers, placements=placements)
    optimizer, share = sok.optimizers.Adagrad(0.1), SAMPLES // world.size

    def step(ids):
        with tf.GradientTape() as tape:
            found = tf.concat(collection(list(ids), training=True), 1)
            loss = tf.reduce_sum(tf.square(found - 0.1))
        tables = collection.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
        return loss

    losses = []  # eagerly: TensorFlow takes minutes to optimize a graph of so many features
    for number in range(STEPS):
        random = np.random.default_rng(number)
        mine = slice(world.rank * share, (world.rank + 1) * share)
        ids = [random.integers(0, 5 + i % 7, [SAMPLES, 2])[mine] for i in range(TABLES)]
        made = sok.collective_counts()["collectives"]
        losses.append(float(step(tuple(tf.constant(one) for one in ids))))
        made = sok.collective_counts()["collectives"] - made
        assert made == (3 if world.size > 1 else 0), made
    every = [tf.range(5 + i % 7, dtype=tf.int64)[:, None] for i in range(TABLES)]
    rows = [out.numpy() for out in collection(every, training=False)]
    tables = [layer.embedding_variable for layer in collection.embeddings]
    names = [[getattr(table, name) for table in tables] for name in ("table_name", "path")]
    assert all(len(set(of_kind)) == TABLES for of_kind in names)
    return {"losses": losses, "rows": rows, "names": names, "seconds": processor_seconds() - before}
