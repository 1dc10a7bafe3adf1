"""Twenty steps with tables in every mode. What each check returns must not depend on the number of ranks."""

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
import tf_keras

import sok
from sok import context
from sok.layers import for_keras

v1 = tf.compat.v1
STEPS, BATCH, SLOTS, IDS_PER_SLOT, DIM = 20, 24, 3, 2, 4
OPTIMIZERS = {
    "sgd": lambda: sok.optimizers.SGD(0.5),
    "adagrad": lambda: sok.optimizers.Adagrad(0.1),
    "adam": lambda: sok.optimizers.Adam(0.02),
    "lazy_adam": lambda: sok.optimizers.LazyAdam(0.02),
}


def samples():
    """Ids [STEPS * BATCH, SLOTS, IDS_PER_SLOT], of which some are seen often and most seldom, and labels."""
    rng = np.random.default_rng(42)
    ids = (rng.zipf(1.3, (STEPS * BATCH, SLOTS, IDS_PER_SLOT)) % 97 - 48).astype(np.int64)
    return ids, (ids.sum(axis=(1, 2)) % 3 == 0).astype(np.float32)


def even_shares(world):
    """This rank's samples of each step: as many on every rank."""
    part = BATCH // world.size
    return [slice(step * BATCH + world.rank * part, step * BATCH + (world.rank + 1) * part) for step in range(STEPS)]


def uneven_shares(world):
    """As a ragged last batch, and worse: any number of samples, often none."""
    rng = np.random.default_rng(7)
    shares = []
    for step in range(STEPS):
        cuts = np.sort(rng.integers(0, BATCH + 1, 3))[: world.size - 1]
        if step % 5 == 0:
            cuts = np.zeros_like(cuts)  # all samples on the last rank
        bounds = step * BATCH + np.concatenate([[0], cuts, [BATCH]])
        shares.append(slice(bounds[world.rank], bounds[world.rank + 1]))
    return shares


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


def shards(variables, slot_sets, run=lambda x: [t.numpy() for t in x]):
    """By table: this rank's keys with row, slots and stamp."""
    result = {}
    for name, variable in variables.items():
        keys, rows = run(variable.export())
        slot_keys, slots, stamps = run(variable.slots(slot_sets[name]))
        np.testing.assert_array_equal(keys, slot_keys)
        assert all(int(key) % context.size() == context.rank() for key in keys)
        result[name] = {
            int(key): np.concatenate([row, slot, [stamp]])
            for key, row, slot, stamp in zip(keys, rows, slots, stamps, strict=True)
        }
    return result


def sum_over_ranks(values):
    return context.get_transport().all_gather(tf.constant([values], tf.float64), "test/losses").numpy().sum(axis=0)


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


def fit(world, name, library, stock, embedding_optimizer=None, **options):
    ids, labels = samples()
    library.utils.set_random_seed(11)
    layers = for_keras(library)
    ids_in = library.Input((SLOTS, IDS_PER_SLOT), dtype="int64")
    pooled = layers.DistributedEmbedding("mean", 200, DIM, SLOTS, IDS_PER_SLOT, name=f"{name}_pooled")
    dense = layers.All2AllDenseEmbedding(200, DIM, SLOTS, IDS_PER_SLOT, name=f"{name}_dense")
    x = library.layers.Concatenate()(
        [library.layers.Flatten()(pooled(ids_in)), library.layers.Flatten()(dense(ids_in))]
    )
    x = library.layers.Dense(5, activation="tanh")(x)
    model = library.Model(ids_in, library.layers.Dense(1, activation="sigmoid")(x))
    optimizer = sok.DistributedOptimizer(stock, embedding_optimizer=embedding_optimizer)
    model.compile(optimizer=optimizer, loss="binary_crossentropy", **options)
    running_means = []
    record = library.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: running_means.append(logs["loss"]))
    shares = even_shares(world)
    model.fit(
        np.concatenate([ids[share] for share in shares]),
        np.concatenate([labels[share] for share in shares]),
        batch_size=BATCH // world.size,
        shuffle=False,
        verbose=0,
        callbacks=[sok.callbacks.BroadcastVariablesCallback(), record],
    )
    tables = {"pooled": pooled.embedding_variable, "dense": dense.embedding_variable}
    weights = [np.asarray(v) for v in model.trainable_variables if v not in tables.values()]
    assert int(np.asarray(optimizer.iterations)) == STEPS
    return {
        "losses": sum_over_ranks([float(x) for x in running_means]) / world.size,
        "dense": np.concatenate([w.ravel() for w in weights]),
        "tables": shards(tables, dict.fromkeys(tables, optimizer.embedding_optimizer.slot_set)),
    }


def check_keras_3_fit(world):
    return fit(world, "keras", keras, keras.optimizers.Adam(0.02))


def check_keras_3_fit_in_several_steps_at_once(world):
    return fit(world, "keras_steps", keras, keras.optimizers.Adagrad(0.1), steps_per_execution=4)


def check_keras_3_fit_with_an_optimizer_for_tables(world):
    stock = keras.optimizers.AdamW(0.02, global_clipnorm=0.05)
    return fit(world, "keras_given", keras, stock, sok.optimizers.LazyAdam(0.02), run_eagerly=True)


def check_tf_keras_fit(world):
    return fit(world, "tf_keras", tf_keras, tf_keras.optimizers.Adam(0.02))


def check_tf_keras_legacy_fit(world):
    return fit(world, "tf_keras_legacy", tf_keras, tf_keras.optimizers.legacy.Adagrad(0.1), steps_per_execution=4)


def check_tf_keras_fit_with_clipping(world):
    # The norm of a table is measured over all shards.
    return fit(world, "tf_keras_clip", tf_keras, tf_keras.optimizers.SGD(0.5, clipnorm=0.01))
