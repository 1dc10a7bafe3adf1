"""What one rank refuses alone is raised on all of them, changes nothing, and leaves all in step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.job.transport import watch

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
    # The gradients need none of the rows: nothing but the exchange keeps them from running beside what raises.
    tables = [layer_named(f"refused_full_{where}").embedding_variable for where in ("here", "in_a_function")]
    weight, *biases = (tf.Variable(tf.ones([4, 3])) for _ in range(5))
    stock = [keras.optimizers.Adagrad(0.1), tf_keras.optimizers.SGD(0.1), tf_keras.optimizers.legacy.SGD(0.1)]
    of_biases = [*map(sok.DistributedOptimizer, stock[:2]), sok.OptimizerWrapper(stock[2])]
    optimizer = sok.optimizers.Adam(0.1)

    def lookup(x, table):
        return sok.group_embedding_lookup_sparse([table, weight], [x, x % 4], "sum")

    ids = tf.TensorSpec([None, None], tf.int64)

    @tf.function(input_signature=[ids, ids], autograph=False)
    def step(x, y):
        with sok.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
            found = lookup(x, tables[0]) + tf.function(lookup, autograph=False)(y, tables[1])
            loss = tf.add_n([tf.reduce_sum(vectors) for vectors in [*found, *biases]])
        *of_tables, of_weight = tape.gradient(loss, [*tables, weight])
        optimizer.apply_gradients(zip(of_tables, tables, strict=True))
        weight.assign_sub(of_weight)
        # In calls that know of no table.
        biases[0].assign_sub(tape.gradient(loss, biases[0]))
        of_rows = tf.IndexedSlices(tf.ones([4, 3]), tf.range(4))  # which Keras 3's gathers
        for of_bias, bias in zip(of_biases, biases[1:], strict=True):
            of_bias.apply_gradients([(of_rows, bias)])

    def state():
        counts = [int(counting.iterations) for counting in (optimizer, *stock)]
        return [*(table.export()[1].numpy() for table in tables), *(v.numpy() for v in (weight, *biases)), counts]

    step(IDS, IDS)
    before = state()
    full = tf.constant(np.arange(101, 101 + 80 * world.size, world.size).reshape(-1, 4))
    for bad in [(full, IDS), (IDS, full)] * 2:
        with pytest.raises(tf.errors.ResourceExhaustedError, match="This shard has stored nothing of this step"):
            step(*(bad if world.rank == 0 else (IDS, IDS)))
        for now, then in zip(state(), before, strict=True):
            np.testing.assert_array_equal(now, then)
    step(IDS, IDS)
    assert state()[-1] == [2] * 4


def check_a_session_step_that_raised_changes_no_rank(world):
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        table, x = layer_named("refused_session").embedding_variable, v1.placeholder(tf.int64, [None, None])
        bias = v1.get_variable("refused_bias", initializer=tf.ones([2]), use_resource=True)
        loss = tf.reduce_sum(sok.group_embedding_lookup_sparse([table], [x], "sum")[0]) + tf.reduce_sum(bias)
        train = sok.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.25)).minimize(loss, var_list=[table, bias])
        session.run(v1.global_variables_initializer())
        for step in range(3):
            if step == 1:
                full = np.arange(101, 101 + 80 * world.size, world.size).reshape(-1, 4)
                with pytest.raises(
                    tf.errors.ResourceExhaustedError, match="This shard has stored nothing of this step"
                ):
                    session.run(train, {x: full if world.rank == 0 else [[1, 2], [3, 4]]})
            else:
                session.run(train, {x: [[1, 2], [3, 4]]})
            assert session.run(bias).tolist() == [1 - 0.25 * (step + 1 - (step > 0))] * 2


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
    ragged = tf.RaggedTensor.from_tensor(tf.ones([2, 1, 2], tf.int64), ragged_rank=2)
    bad = [
        tf.SparseTensor(full.indices, full.values, tf.constant(shape, tf.int64))
        for shape in ([2**40, 1, 2], [2**62, 1, 2], [-1, 1, 2], [3, 1, 2])
    ]
    for splits in ([0, 4, 2], [0, -2, 4], [1, 2, 4], [0, 2, 3], [0, 2**62, 4]):
        splits = tf.constant(splits, tf.int64)
        inner = tf.RaggedTensor.from_row_splits(ragged.flat_values, splits, validate=False)
        bad.append(tf.RaggedTensor.from_row_splits(inner, ragged.row_splits, validate=False))
    compiled = tf.function(layer)
    for mine in bad:
        fine = full if isinstance(mine, tf.SparseTensor) else ragged
        for run in (layer, compiled):
            with pytest.raises(
                (ValueError, tf.errors.InvalidArgumentError), match="same number of ids|must have shape"
            ):
                run(mine if world.rank == world.size - 1 else fine)
            assert float(tf.reduce_sum(run(fine))) == 12


def check_what_the_last_part_of_a_group_refuses_is_told(world):
    table, variable = layer_named("refused_part").embedding_variable, tf.Variable(tf.ones([4, 3]))
    bad = IDS + (100 if world.rank == 0 else 0)
    with pytest.raises(tf.errors.InvalidArgumentError):
        sok.group_embedding_lookup_sparse([table, variable], [IDS, bad - 1], "sum", params_num_per_group=1)
    one, other = sok.group_embedding_lookup_sparse([table, variable], [IDS, IDS - 1], "sum", params_num_per_group=1)
    assert float(tf.reduce_sum(one)) == float(tf.reduce_sum(other)) == 12


def check_ids_outside_a_variable_beside_a_table_are_told(world):
    table, optimizer = layer_named("refused_beside").embedding_variable, sok.optimizers.SGD(1.0)
    short, wide = tf.Variable(tf.ones([4, 3]), name="short"), tf.Variable(tf.ones([4, 3], tf.float64), name="wide")

    @tf.function
    def step(ids, others):
        with tf.GradientTape() as tape:
            outputs = sok.group_embedding_lookup_sparse([table, short, wide], [IDS, ids, others], "sum")
            loss = tf.add_n([tf.reduce_sum(tf.cast(output, tf.float32)) for output in outputs])
        of_table, of_short = tape.gradient(loss, [table, short])
        optimizer.apply_gradients([(of_table, table)])
        short.assign_sub(tf.convert_to_tensor(of_short))
        return loss

    ragged = tf.RaggedTensor.from_row_splits
    splits = tf.constant([0, 5, 4], tf.int64)
    malformed = ragged(tf.reshape(IDS, [-1]) - 1, splits, validate=False)
    fine = ragged(tf.reshape(IDS, [-1]) - 1, tf.constant([0, 2, 4], tf.int64))
    bad = [
        ([fine + 2, fine], "variable 'short.*: id 4 is outside"),
        ([fine, fine - 1], "variable 'wide.*: id -1 is outside"),
        ([malformed, fine], "variable 'short.*`row_splits`"),
    ]
    for done, (mine, text) in enumerate(bad):
        is_mine = world.rank == world.size - 1
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"input of rank {world.size - 1}: {text}"):
            step(*mine if is_mine else [fine, fine])
        # Nothing has changed on any rank, and all are in the same step.
        assert float(step(fine, fine)) == 12 * (3 - done * (world.size + 1))


def check_no_memory_for_what_a_lookup_gives_is_told(world):
    layer = sok.DistributedEmbedding("sum", 4, 2**20, 1, 4, embedding_initializer="ones", name="refused_memory")
    for run in (layer, tf.function(layer)):
        mine = sparse(2**22) if world.rank == world.size - 1 else sparse(2)  # 16 TiB
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"input of rank {world.size - 1}: no memory for"):
            run(mine)
        assert float(tf.reduce_mean(run(sparse(2)))) == 1


def check_splits_that_do_not_fit_are_told(world):
    rows, fine = tf.range(world.size), tf.ones([world.size], tf.int32)
    compiled = tf.function(
        sok.communication.alltoall, input_signature=[tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.int32)]
    )
    is_mine = world.rank == world.size - 1
    told = f"rank {world.size - 1} of {world.size}: " if world.size > 1 else ""
    for run in (sok.communication.alltoall, compiled):
        for bad in (2 * fine, fine - 2):
            error = tf.errors.InvalidArgumentError if run is compiled else ValueError
            with pytest.raises(error, match=f"{told}alltoall: `splits`"):
                run(rows, bad if is_mine else fine)
            np.testing.assert_array_equal(run(rows, fine)[0], [world.rank] * world.size)


def check_ranks_that_met_in_other_tables_go_on_together(world):
    layers = [layer_named("refused_other_a"), layer_named("refused_other_b")]
    for layer in layers:
        layer(IDS)
    # In the words of the exchange, or of the transport if that knows which collective it is.
    with pytest.raises(tf.errors.FailedPreconditionError, match="different tables|it was in another call"):
        layers[world.rank == 0](IDS)
    for layer in layers:
        assert float(tf.reduce_sum(layer(IDS))) == 12


def check_keys_are_never_taken_for_gradients(world):
    # Their messages are of one size here, and of four bytes a word.
    table = sok.EmbeddingVariable(1, 100, name="refused_words", key_dtype=tf.int32, way_home="rows")
    few, many = (tf.range(1, n * world.size, world.size, dtype=tf.int32) for n in (1, 7))

    def lookup(keys):
        splits = tf.constant([0, 1], tf.int64) * tf.size(keys, tf.int64)
        return sok.group_embedding_lookup_sparse([table], [tf.RaggedTensor.from_row_splits(keys, splits)], "sum")[0]

    with tf.GradientTape() as tape:
        loss = lookup(few)
    with pytest.raises(tf.errors.FailedPreconditionError, match="it was in another call"):
        lookup(many) if world.rank == 0 else tape.gradient(loss, table)
    # The deadline would end a program that has caught this and gone on.
    assert not [one for one in watch.own_collectives().values() if one.waits]


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


def check_ranks_that_refuse_alike_while_they_build_a_v1_graph(world):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        layer = layer_named("refused_alike_v1")
        with pytest.raises(ValueError, match="keys must be int64"):
            layer(tf.constant([[1]], tf.uint64))
        total = tf.reduce_sum(layer(tf.constant([[1, 2], [3, 4]], tf.int64)))
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(total) == 12
