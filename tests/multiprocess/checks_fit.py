"""Twenty steps of `fit`. What each check returns must not depend on the number of ranks."""

import keras
import numpy as np
import tf_keras

import sok
from sok.layers import for_keras
from tests.multiprocess.training import (
    BATCH,
    DIM,
    IDS_PER_SLOT,
    SLOTS,
    STEPS,
    STEPS_AT_ONCE,
    even_shares,
    samples,
    shards,
    sum_over_ranks,
)


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
    tables = {"pooled": pooled.embedding_variable, "dense": dense.embedding_variable}
    return train(world, library, model, optimizer, tables, ids, labels, **options)


def train(world, library, model, optimizer, tables, ids, labels, **options):
    """Twenty steps of `fit` with this rank's samples: what the rank reports."""
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
    weights = [np.asarray(v) for v in model.trainable_variables if v not in tables.values()]
    assert int(np.asarray(optimizer.iterations)) == STEPS
    return {
        "losses": sum_over_ranks([float(x) for x in running_means]) / world.size,
        "dense": np.concatenate([w.ravel() for w in weights]),
        "tables": shards(tables, dict.fromkeys(tables, optimizer.embedding_optimizer.slot_set)),
    }


def fit_drop_in(world, name, library, stock):
    """Layers with the arguments of Keras' own: of row numbers, of any ids, and one that stays a variable."""
    ids, labels = samples()
    library.utils.set_random_seed(11)
    layer = for_keras(library).Embedding
    layers = {
        "rows": layer(97, DIM, name=f"{name}_rows", sparse_as_dense_size=0),
        "any": layer(None, DIM, name=f"{name}_any", combiner="mean", mask_zero=True),
        "small": layer(97, DIM, name=f"{name}_small", sparse_as_dense_size=97),
    }
    ids_in = library.Input((SLOTS, IDS_PER_SLOT), dtype="int64")
    x = library.layers.Concatenate()([library.layers.Flatten()(layer(ids_in)) for layer in layers.values()])
    model = library.Model(ids_in, library.layers.Dense(1, activation="sigmoid")(x))
    tables = {which: layers[which].embedding_variable for which in ("rows", "any")}
    found = train(world, library, model, sok.DistributedOptimizer(stock), tables, np.abs(ids), labels)
    # On each rank the matrix of all ranks, and so the same.
    return {**found, "dense": np.concatenate([found["dense"], layers["rows"].get_weights()[0].ravel()])}


def check_keras_3_fit_of_drop_in_layers(world):
    return fit_drop_in(world, "drop_in", keras, keras.optimizers.SGD(0.5))


def check_tf_keras_fit_of_drop_in_layers(world):
    return fit_drop_in(world, "tf_drop_in", tf_keras, tf_keras.optimizers.Adagrad(0.1))


def check_keras_3_fit(world):
    return fit(world, "keras", keras, keras.optimizers.Adam(0.02))


def check_keras_3_fit_in_several_steps_at_once(world):
    return fit(world, "keras_steps", keras, keras.optimizers.Adagrad(0.1), steps_per_execution=STEPS_AT_ONCE)


def check_keras_3_fit_with_an_optimizer_for_tables(world):
    stock = keras.optimizers.AdamW(0.02, global_clipnorm=0.05)
    return fit(world, "keras_given", keras, stock, sok.optimizers.LazyAdam(0.02), run_eagerly=True)


def check_tf_keras_fit(world):
    return fit(world, "tf_keras", tf_keras, tf_keras.optimizers.Adam(0.02))


def check_tf_keras_legacy_fit(world):
    return fit(
        world, "tf_keras_legacy", tf_keras, tf_keras.optimizers.legacy.Adagrad(0.1), steps_per_execution=STEPS_AT_ONCE
    )


def check_tf_keras_fit_with_clipping(world):
    # The norm of a table is measured over all shards.
    return fit(world, "tf_keras_clip", tf_keras, tf_keras.optimizers.SGD(0.5, clipnorm=0.01))
