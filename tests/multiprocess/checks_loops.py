"""Twenty steps in loops of one's own. What each check returns must not depend on the number of ranks."""

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import sok
from tests.multiprocess.training import (
    BATCH,
    DIM,
    IDS_PER_SLOT,
    SLOTS,
    even_shares,
    samples,
    shards,
    sum_over_ranks,
    uneven_shares,
)

v1 = tf.compat.v1
OPTIMIZERS = {
    "sgd": lambda: sok.optimizers.SGD(0.5),
    "adagrad": lambda: sok.optimizers.Adagrad(0.1),
    "adam": lambda: sok.optimizers.Adam(0.02),
    "lazy_adam": lambda: sok.optimizers.LazyAdam(0.02),
}


def make_layers(prefix):
    """A layer of each kind for each optimizer. Seeds are in the initializers: else the table's name would be one."""
    made = {}
    for seed, name in enumerate(OPTIMIZERS):
        initializer = keras.initializers.RandomNormal(stddev=0.5, seed=seed)
        made[f"{name} pooled"] = sok.DistributedEmbedding(
            "mean", 200, DIM, SLOTS, IDS_PER_SLOT, name=f"{prefix}_{name}_pooled", embedding_initializer=initializer
        )
        made[f"{name} dense"] = sok.All2AllDenseEmbedding(
            200, DIM, SLOTS, IDS_PER_SLOT, name=f"{prefix}_{name}_dense", embedding_initializer=initializer
        )
    return made


def features(layers, ids):
    return tf.concat([tf.reshape(layer(ids), [tf.shape(ids)[0], width(layer)]) for layer in layers.values()], axis=1)


def width(layer):
    return SLOTS * DIM * (1 if hasattr(layer, "combiner") else IDS_PER_SLOT)


def head_values(layers):
    rng = np.random.default_rng(3)
    return rng.normal(scale=0.3, size=(sum(width(layer) for layer in layers.values()), 1)).astype(np.float32)


def loss_of(logits, labels, divisor):
    losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels[:, None], logits=logits)
    return tf.reduce_sum(losses) / tf.cast(divisor, tf.float32)


def loop(world, name, shares, compiled, mean):
    """A loop of one's own: the distributed tape, optimizers of ours for the tables, plain SGD for the rest."""
    ids, labels = samples()
    layers = make_layers(name)
    optimizers = {key: make() for key, make in OPTIMIZERS.items()}
    head = tf.Variable(head_values(layers))

    def step(ids, labels):
        with tf.GradientTape() as tape:
            # Either the mean over local samples, to be averaged; or their share of the global mean, to be summed.
            loss = loss_of(features(layers, ids) @ head, labels, len(ids) if mean else BATCH)
        tape = sok.DistributedGradientTape(tape, op=sok.Average if mean else sok.Sum)
        tables = [layer.embedding_variable for layer in layers.values()]
        *of_tables, of_head = tape.gradient(loss, [*tables, head])
        for key, optimizer in optimizers.items():
            mine = [place for place, layer_name in enumerate(layers) if layer_name.split()[0] == key]
            optimizer.apply_gradients([(of_tables[place], tables[place]) for place in mine])
        head.assign_sub(0.1 * of_head)
        return loss

    if compiled:
        signature = [
            tf.TensorSpec([None if not mean else BATCH // world.size, SLOTS, IDS_PER_SLOT], tf.int64),
            tf.TensorSpec([None if not mean else BATCH // world.size], tf.float32),
        ]
        step = tf.function(step, input_signature=signature)
    losses = [float(step(tf.constant(ids[share]), tf.constant(labels[share]))) for share in shares]
    variables = {name: layer.embedding_variable for name, layer in layers.items()}
    return {
        "losses": sum_over_ranks(losses) / (world.size if mean else 1),
        "dense": head.numpy(),
        "tables": shards(variables, {name: optimizers[name.split()[0]].slot_set for name in layers}),
    }


def check_eager_loop(world):
    return loop(world, "eager", even_shares(world), compiled=False, mean=True)


def check_compiled_loop(world):
    return loop(world, "compiled", even_shares(world), compiled=True, mean=True)


def check_compiled_loop_with_uneven_batches(world):
    return loop(world, "uneven", uneven_shares(world), compiled=True, mean=False)


def session_loop(world, name, make_train):
    """A v1 graph: `make_train(loss, layers, head)` gives the train op and the slot set of each layer."""
    ids, labels = samples()
    with tf.Graph().as_default(), v1.Session() as session:
        ids_in = v1.placeholder(tf.int64, [None, SLOTS, IDS_PER_SLOT])
        labels_in = v1.placeholder(tf.float32, [None])
        layers = make_layers(name)
        head = v1.get_variable("head", initializer=head_values(layers))
        loss = loss_of(features(layers, ids_in) @ head, labels_in, tf.shape(ids_in)[0])
        train, slot_sets = make_train(loss, layers, head)
        session.run(v1.global_variables_initializer())
        losses = [
            session.run([loss, train], {ids_in: ids[share], labels_in: labels[share]})[0]
            for share in even_shares(world)
        ]
        variables = {name: layer.embedding_variable for name, layer in layers.items()}
        dense, tables = session.run(head), shards(variables, slot_sets, session.run)
    losses = sum_over_ranks([float(loss) for loss in losses]) / world.size
    return {"losses": losses, "dense": dense, "tables": tables}


def check_v1_session_with_optimizers_of_ours(world):
    def make_train(loss, layers, head):
        tables = {name: layer.embedding_variable for name, layer in layers.items()}
        stock = sok.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1))
        pairs = stock.compute_gradients(loss, [*tables.values(), head])
        by_variable = {id(variable): grad for grad, variable in pairs}
        ops, slot_sets = [stock.apply_gradients([(by_variable[id(head)], head)])], {}
        for key, make in OPTIMIZERS.items():
            optimizer = make()
            mine = [name for name in tables if name.split()[0] == key]
            ops.append(optimizer.apply_gradients([(by_variable[id(tables[name])], tables[name]) for name in mine]))
            slot_sets.update({name: optimizer.slot_set for name in mine})
        return tf.group(*ops), slot_sets

    return session_loop(world, "session", make_train)


def check_v1_session_with_a_distributed_optimizer(world):
    def make_train(loss, layers, head):
        optimizer = sok.DistributedOptimizer(v1.train.AdamOptimizer(0.02))
        train = optimizer.minimize(loss, global_step=v1.train.get_or_create_global_step())
        return train, dict.fromkeys(layers, optimizer.embedding_optimizer.slot_set)

    return session_loop(world, "session_minimize", make_train)


def check_v1_session_with_horovod_s_optimizer_beside_ours(world):
    def make_train(loss, layers, head):
        # Horovod does not average what is local to a rank, so our optimizer does.
        horovod = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1), scale_local_gradients=False)
        tables = {name: layer.embedding_variable for name, layer in layers.items()}
        for table in tables.values():
            horovod.register_local_var(table)
        pairs = horovod.compute_gradients(loss, [*tables.values(), head])
        of_tables = [pair for pair in pairs if pair[1] is not head]
        ours = sok.optimizers.SGD(0.5)
        train = tf.group(
            horovod.apply_gradients([pair for pair in pairs if pair[1] is head]),
            ours.apply_gradients(of_tables, gradient_scale=1.0 / world.size),
        )
        return train, dict.fromkeys(layers, ours.slot_set)

    return session_loop(world, "session_horovod", make_train)
