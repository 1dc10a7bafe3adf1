"""What one rank refuses alone is raised on all of them, changes nothing, and leaves all in step."""

import numpy as np
import pytest
import tensorflow as tf

import sok

IDS = tf.constant([[1, 2], [3, 4]], tf.int64)


def sparse(rows, columns=4):
    return tf.SparseTensor([[0, 0], [1, 0]], tf.constant([1, 2], tf.int64), tf.constant([rows, columns], tf.int64))


def layer_named(name, rows=20):
    return sok.DistributedEmbedding("sum", rows, 3, 1, 4, embedding_initializer="ones", name=name)


def trained(layer, optimizer):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x))
        optimizer.apply_gradients([(tape.gradient(loss, layer.embedding_variable), layer.embedding_variable)])
        return loss

    return step


def check_a_step_that_raised_changes_no_rank(world):
    # The gradient needs none of the rows: nothing but the exchange keeps it from running beside what raises.
    layer, optimizer = layer_named("refused_full"), sok.optimizers.Adam(0.1)
    weight, table = tf.Variable(tf.ones([4, 3])), layer.embedding_variable

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            of_table, of_weight = sok.group_embedding_lookup_sparse([table, weight], [x, x % 4], "sum")
            loss = tf.reduce_sum(of_table) + tf.reduce_sum(of_weight)
        gradient, of_weight = tape.gradient(loss, [table, weight])
        optimizer.apply_gradients([(gradient, table)])
        weight.assign_sub(tf.convert_to_tensor(of_weight))
        return loss

    step(IDS)
    before = [table.export()[1].numpy(), weight.numpy(), int(optimizer.iterations)]
    full = tf.constant(np.arange(101, 101 + 80 * world.size, world.size).reshape(-1, 4))
    for _ in range(3):
        with pytest.raises(tf.errors.ResourceExhaustedError, match="Nothing of this step was stored"):
            step(full if world.rank == 0 else IDS)
        for now, then in zip(
            [table.export()[1].numpy(), weight.numpy(), int(optimizer.iterations)], before, strict=True
        ):
            np.testing.assert_array_equal(now, then)
    step(IDS)
    assert int(optimizer.iterations) == 2


REFUSED = {
    "rows": lambda: sparse(2**40),
    "all memory": lambda: sparse(2**62, 1),
    "negative": lambda: sparse(-1),
    "outside": lambda: sparse(1),
    "none": lambda: None,
    "object": object,
    "dtype": lambda: tf.constant([[1]], tf.uint64),
    "floats": lambda: tf.constant([[1.5]]),
    "rank": lambda: tf.constant([1, 2], tf.int64),
    "uneven": lambda: [[1, 2], [3]],
}
SEEN_WHEN_IT_RUNS = ("rows", "all memory", "negative", "outside")


def check_what_one_rank_refuses_is_raised_on_all(world):
    layer, optimizer = layer_named("refused"), sok.optimizers.SGD(1.0)
    step, total = trained(layer, optimizer), 0
    compiled = tf.function(step)
    for name, make in REFUSED.items():
        for run in (step, compiled) if name in SEEN_WHEN_IT_RUNS else (step,):
            mine = make() if world.rank == world.size - 1 else sparse(2)
            with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="refused|inputs") as error:
                run(mine)
            assert world.rank == world.size - 1 or f"rank {world.size - 1}" in str(error.value), name
            # All are in the same step afterwards, and train what they would have.
            assert float(run(IDS)) == 4 * 3 * (1 - total), name
            total += world.size


def check_dense_lookups_refuse_alike(world):
    layer = sok.All2AllDenseEmbedding(20, 3, 1, 2, name="refused_dense", embedding_initializer="ones")
    full = tf.sparse.from_dense(tf.ones([2, 1, 2], tf.int64))
    for shape in ([2**40, 1, 2], [2**62, 1, 2], [-1, 1, 2], [3, 1, 2]):
        bad = tf.SparseTensor(full.indices, full.values, tf.constant(shape, tf.int64))
        for run in (layer, tf.function(layer)):
            with pytest.raises(tf.errors.InvalidArgumentError, match="same number of ids"):
                run(bad if world.rank == world.size - 1 else full)
            assert float(tf.reduce_sum(run(full))) == 12


def check_what_the_last_part_of_a_group_refuses_is_told(world):
    table, variable = layer_named("refused_part").embedding_variable, tf.Variable(tf.ones([4, 3]))
    bad = IDS + (100 if world.rank == 0 else 0)
    with pytest.raises(tf.errors.InvalidArgumentError):
        sok.group_embedding_lookup_sparse([table, variable], [IDS, bad - 1], "sum", params_num_per_group=1)
    one, other = sok.group_embedding_lookup_sparse([table, variable], [IDS, IDS - 1], "sum", params_num_per_group=1)
    assert float(tf.reduce_sum(one)) == float(tf.reduce_sum(other)) == 12


def check_an_initializer_that_fails_on_one_rank(world):
    def initializer(shape, dtype=None):
        if world.rank == world.size - 1:
            raise FileNotFoundError("no such file: pretrained.npy")
        return np.zeros(shape, np.float32)

    with pytest.raises(FileNotFoundError, match=r"pretrained\.npy"):
        sok.EmbeddingVariable(2, 10, initializer=initializer, name="refused_initializer")
    assert float(tf.reduce_sum(layer_named("refused_after")(IDS))) == 12


def check_ranks_that_refuse_alike_while_they_trace(world):
    layer = layer_named("refused_alike")
    with pytest.raises(ValueError, match="keys must be int64"):
        tf.function(layer)(tf.constant([[1]], tf.uint64))
    assert float(tf.reduce_sum(tf.function(layer)(IDS))) == 12
