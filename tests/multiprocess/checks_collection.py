"""Collections of embedding layers on real workers, in a tf.function and in fit, against NumPy on the whole batch."""

import keras
import numpy as np
import tensorflow as tf

import distributed_embeddings as de
import sok
from tests.benchmarks.merlin_model import train_beside_stock_tensorflow, train_with_ids_of_the_whole_batch
from tests.sok import collections_of_tables as cases


def check_a_collection_gives_what_numpy_says_of_the_whole_batch(world):
    random = np.random.default_rng(5)
    tables = [cases.Table(20, 4, "sum"), cases.Table(9, 3, "mean"), cases.Table(12, 2, "sum"), cases.Table(5, 6, "sum")]
    last = world.size - 1  # with three ranks and more, some have no whole table
    placements = [sok.row_wise(), sok.table_wise(last), sok.column_wise([1, 1], [0, last]), sok.data_parallel()]
    starts = [random.normal(size=[table.rows, table.dim]).astype(np.float32) for table in tables]
    layers = [sok.Embedding(table.rows, table.dim, combiner=table.combiner) for table in tables]
    collection = sok.parallel.EmbeddingCollection(layers, placements=placements)
    collection.set_weights(starts, use_lock=True)
    optimizer = sok.DistributedOptimizer(keras.optimizers.SGD(0.1), op=sok.Sum)
    matrices = [start.copy() for start in starts]

    @tf.function(reduce_retracing=True)
    def step(ids):
        with tf.GradientTape() as tape:
            found = collection(ids)
            loss = tf.add_n([tf.reduce_sum(out * out) / 2 for out in found])
        variables = collection.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return found

    for _ in range(3):
        batch = [cases.batch_of(random, table, 7) for table in tables]
        (mine, *_) = cases.parts_of(random, 7, world.size)[world.rank :]
        found = step([cases.as_input(table, ids[mine], "ragged") for table, ids in zip(tables, batch, strict=True)])
        for i, (table, ids) in enumerate(zip(tables, batch, strict=True)):
            whole = cases.look_up(table, matrices[i], ids)
            np.testing.assert_allclose(found[i], whole[mine], rtol=1e-4, atol=1e-5)
            matrices[i] = matrices[i] - 0.1 * cases.gradient(table, matrices[i], ids, whole)
    for weight, matrix in zip(collection.get_weights(), matrices, strict=True):
        np.testing.assert_allclose(weight, matrix, rtol=1e-4, atol=1e-5)
    assert len(collection.get_weights(all_ranks=False)) == (4 if world.rank == 0 else 0)


def check_merlins_loop_and_fit_train_as_one_worker(world):
    """11, too: the callback and the new optimizers leave rows and their slots where they are."""
    sizes = [(60, 4), (40, 8), (90, 2)]
    random = np.random.default_rng(9)
    starts = [random.normal(size=size).astype(np.float32) for size in sizes]
    ids = [random.integers(0, rows, [4 * world.size, 2]) for rows, _ in sizes]
    mine = slice(4 * world.rank, 4 * world.rank + 4)
    layers = [de.Embedding(rows, width, combiner="sum") for rows, width in sizes]
    arguments = {"strategy": "memory_balanced", "column_slice_threshold": 100, "row_slice_threshold": 250}
    layer = de.DistributedEmbedding(layers, **arguments)
    layer.set_weights(starts)
    inputs = [keras.Input((2,), dtype="int64") for _ in ids]
    joined = keras.layers.Concatenate()(layer(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(joined))
    model.compile(de.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    callbacks = [de.BroadcastGlobalVariablesCallback(0)]
    batch, labels = [one[mine] for one in ids], np.zeros([4, 1], np.float32)
    model.fit(batch, labels, batch_size=4, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
    stock = keras.optimizers.SGD(0.1)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(model(batch) ** 2)
        variables = model.trainable_variables
        gradients = de.DistributedGradientTape(tape).gradient(loss, variables)
        stock.apply_gradients(zip(gradients, variables, strict=True))

    one = [keras.layers.Embedding(rows, width) for rows, width in sizes]
    inputs = [keras.Input((2,), dtype="int64") for _ in ids]
    sums = [keras.ops.sum(layer(i), 1) for layer, i in zip(one, inputs, strict=True)]
    alone = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(keras.layers.Concatenate()(sums)))
    for own, start in zip(one, starts, strict=True):
        own.set_weights([start])
    alone.compile(keras.optimizers.SGD(0.1), "mse")
    alone.fit(ids, np.zeros([4 * world.size, 1], np.float32), batch_size=10**6, epochs=4, verbose=0)
    for found, own in zip(layer.get_weights(all_ranks=True), one, strict=True):
        np.testing.assert_allclose(found, own.get_weights()[0], rtol=1e-4, atol=1e-5)


def check_ids_of_the_whole_batch_in_a_function(world):
    sizes, size = [(60, 4), (40, 8), (90, 2)], 3 * world.size
    random = np.random.default_rng(4)
    starts = [random.normal(size=shape).astype(np.float32) for shape in sizes]
    ids = [random.integers(0, rows, [size, 2]) for rows, _ in sizes]
    layers = [de.Embedding(rows, width, combiner="sum") for rows, width in sizes]
    layer = de.DistributedEmbedding(layers, "memory_balanced", column_slice_threshold=200, dp_input=False)
    layer.set_weights(starts)
    mine = [tf.constant(ids[i]) for i in layer.strategy.input_ids_list[world.rank]]
    optimizer = sok.DistributedOptimizer(keras.optimizers.SGD(0.1), op=sok.Sum)

    @tf.function(reduce_retracing=True)
    def step(inputs):
        with tf.GradientTape() as tape:
            outputs = layer(inputs)
            loss = tf.add_n([tf.reduce_sum(out * out) / 2 for out in outputs])
        variables = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return outputs

    wanted, part = [start.copy() for start in starts], slice(3 * world.rank, 3 * world.rank + 3)
    for number in range(3):
        before = sok.collective_counts()["collectives"]
        outputs = step(mine)
        if number:
            assert sok.collective_counts()["collectives"] - before == (2 if world.size > 1 else 0)
        for out, matrix, one in zip(outputs, wanted, ids, strict=True):
            whole = matrix[one].sum(1)
            np.testing.assert_allclose(out, whole[part], rtol=1e-4, atol=1e-5)
            np.subtract.at(matrix, one, 0.1 * whole[:, None])
    for found, matrix in zip(layer.get_weights(all_ranks=True), wanted, strict=True):
        np.testing.assert_allclose(found, matrix, rtol=1e-4, atol=1e-5)


def check_the_benchmark_of_merlin_trains_as_stock_tensorflow(world):
    """Tables in columns: 40 x 3 and 30 x 4 are above the threshold, 1 x 2 is not."""
    kinds = [placement.kind for placement in train_beside_stock_tensorflow("basic", 100)]
    assert kinds == (["column_wise", "column_wise", "table_wise"] if world.size > 1 else ["table_wise"] * 3)


def check_the_benchmark_of_merlin_trains_with_ids_of_the_whole_batch(world):
    for strategy in ("basic", "memory_balanced", "memory_optimized", "auto"):
        kinds = [placement.kind for placement in train_with_ids_of_the_whole_batch(strategy, 100)]
        assert set(kinds) <= {"table_wise", "column_wise"}
        if strategy == "basic" and world.size > 1:
            assert kinds[:2] == ["column_wise", "column_wise"]
