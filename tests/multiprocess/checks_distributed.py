"""Tape, optimizers, metrics and loss scales on dense models; how these start alike is in checks_replicas.py."""

import contextlib
import itertools

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.distributed.reduction import reduce_dense, reduce_weighted
from sok.job import context
from sok.lookup.lookup import lookup_rows

v1 = tf.compat.v1
LIBRARIES = {"keras": keras, "tf_keras": tf_keras}
BATCH, WIDTH = 24, 6  # a batch of all ranks: 24 can be divided by 1, 2, 3 and 4


def samples(seed=0, batches=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(batches * BATCH, WIDTH)).astype(np.float32)
    return x, (x.sum(axis=1, keepdims=True) > 0).astype(np.float32)


def share(world, x):
    """This rank's part of each batch, batch after batch."""
    parts = x.reshape(-1, world.size, BATCH // world.size, *x.shape[1:])
    return parts[:, world.rank].reshape(-1, *x.shape[1:])


def gathered(array, name="test/gathered"):
    """What all ranks have, [R, ...]."""
    return context.get_transport().all_gather(tf.constant(np.asarray(array))[None], name).numpy()


def assert_equal_on_all_ranks(array):
    everyone = gathered(array)
    np.testing.assert_array_equal(everyone, np.broadcast_to(everyone[0], everyone.shape))


# The tape.


def check_tape_averages_and_sums_dense_gradients(world):
    total = sum(range(1, world.size + 1))
    weight, unused, rows = tf.Variable([2.0, 3.0]), tf.Variable(1.0), tf.Variable(tf.ones([4, 2]))
    for op, expected in ((sok.Average, total / world.size), (sok.Sum, total), ("AVERAGE", total / world.size)):
        with sok.DistributedGradientTape(tf.GradientTape(), op=op) as tape:
            # tf.gather makes IndexedSlices, of other rows on each rank
            loss = tf.reduce_sum(weight * (world.rank + 1.0)) + tf.reduce_sum(tf.gather(rows, [world.rank, 0, 0]))
        with sok.trace() as t:
            grads = tape.gradient(loss, {"w": weight, "none": unused, "rows": [rows]})
        assert t.collectives == (world.size > 1)
        np.testing.assert_allclose(grads["w"], [expected, expected], rtol=1e-6)
        assert grads["none"] is None
        scale = 1 if op == sok.Sum else world.size
        by_row = 2.0 * world.size * np.eye(4)[0] + np.eye(4)[: world.size].sum(axis=0)
        np.testing.assert_allclose(tf.convert_to_tensor(grads["rows"][0])[:, 0], by_row / scale, rtol=1e-6)


def check_tape_works_in_functions_with_single_sources_and_persistently(world):
    weight = tf.Variable(3.0)

    @tf.function
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            loss = weight * weight * x
        distributed = sok.DistributedGradientTape(tape, op="sum")
        return distributed.gradient(loss, weight), distributed.gradient([loss, loss], [weight])

    total = sum(range(1, world.size + 1))
    one, (two,) = step(tf.constant(float(world.rank + 1)))
    np.testing.assert_allclose([one, two], [6.0 * total, 12.0 * total], rtol=1e-6)


def check_a_gradient_that_only_some_ranks_have_is_an_error_on_all(world):
    if world.size == 1:
        return
    first, second = tf.Variable([1.0], name="first"), tf.Variable([1.0], name="second")
    grads = [(tf.constant([1.0]), first), (None if world.rank == 0 else tf.constant([1.0]), second)]
    for op in (sok.Average, sok.Sum):
        with pytest.raises(tf.errors.InvalidArgumentError, match="(?s)is None on some workers.*second"):
            reduce_dense(grads, op)
    np.testing.assert_array_equal(reduce_dense(grads[:1], sok.Sum)[0], [world.size])


def check_sixteen_bit_gradients_are_reduced(world):
    for dtype in (tf.float16, tf.bfloat16):
        variable = tf.Variable(tf.zeros([3], dtype))
        (grad,) = reduce_dense([(tf.cast([1.0, 2.0, world.rank], dtype), variable)], sok.Average)
        assert grad.dtype == dtype
        np.testing.assert_allclose(tf.cast(grad, tf.float32), [1.0, 2.0, (world.size - 1) / 2], rtol=1e-2)


def check_slices_are_those_of_all_ranks(world):
    """As many of each variable as a rank has, of any dtype; ids of 32 and 64 bits; weighed by samples as others are."""
    dtypes = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
    variables = [tf.Variable(tf.zeros([5, 2], dtype), name=f"v{i}") for i, dtype in enumerate(dtypes)]
    variables += [tf.Variable(tf.zeros([5])), tf.Variable(1.0), tf.Variable(tf.zeros([5, 0, 2]))]
    total = world.size * (world.size - 1) / 2

    def slices_of(rank, v, ids):
        values = tf.fill([rank, *v.shape[1:]], rank + 0.5)
        return tf.IndexedSlices(tf.cast(values, v.dtype), tf.range(rank, dtype=ids))

    def reduce(op, samples):
        ids = itertools.cycle((tf.int32, tf.int64))
        grads = [slices_of(world.rank, v, next(ids)) if v.shape.rank else None for v in variables]
        return reduce_weighted(list(zip(grads, variables, strict=True)), op, (), samples, keeps_slices=True)

    for op, samples in (sok.Average, None), (sok.Sum, None), (sok.Average, tf.constant(world.rank + 1.0)):
        with sok.trace() as t:
            whole, mean = tf.function(reduce)(op, samples)
        if world.size == 1:
            continue
        assert t.collectives == 2, t.by_name
        factor = 1.0 if op == sok.Sum else 1.0 / world.size / (1.0 if samples is None else mean.numpy())
        assert whole.pop(5) is None
        for one, v in zip(whole, variables[:5] + variables[6:], strict=True):
            assert one.values.dtype == v.dtype
            assert tuple(one.values.shape) == (total, *v.shape[1:])
            np.testing.assert_array_equal(one.indices, np.concatenate([np.arange(r) for r in range(world.size)]))
            expected = np.repeat(np.arange(world.size) + 0.5, range(world.size)) * factor
            values = tf.reshape(tf.cast(one.values, tf.float32), [int(total), -1]).numpy()
            np.testing.assert_allclose(values, np.broadcast_to(expected[:, None], values.shape), rtol=5e-3)  # bfloat16


def check_slices_that_only_some_ranks_have_are_an_error_on_all(world):
    if world.size == 1:
        return
    first, second = tf.Variable([1.0], name="first"), tf.Variable([[1.0]], name="second")
    slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]))
    for other in None, tf.constant([[1.0]]):
        # Which of them has nothing else that it would gather, too.
        for of_first in tf.constant([1.0]), None:
            pairs = [(of_first, first), (slices if world.rank == 0 else other, second)]
            if other is not None and of_first is not None:
                continue  # it does not gather
            for call in (lambda f: f()), (lambda f: tf.function(f)()):
                with pytest.raises(tf.errors.InvalidArgumentError, match="(?s)Slices on some only.*second") as error:
                    call(lambda pairs=pairs: reduce_weighted(pairs, sok.Sum, keeps_slices=True)[0])
                assert "first" not in str(error.value).rpartition("Variables")[2]
    variables = (first, second) if world.rank else (second,)
    with pytest.raises(tf.errors.InvalidArgumentError, match="(?s)same program"):
        reduce_weighted([(slices, v) for v in variables], sok.Sum, keeps_slices=True)


def check_horovod_s_own_tape_works_beside_us(world):
    if world.size == 1:
        return
    table = sok.EmbeddingVariable(2, 100, name="beside", initializer="ones")
    weight = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        rows = lookup_rows(table, tf.constant([world.rank, 7], tf.int64))
        loss = tf.reduce_sum(rows * weight) * (world.rank + 1.0)
    tape = hvd.DistributedGradientTape(tape, scale_local_gradients=False)
    tape.register_local_source(table)
    of_table, of_weight = tape.gradient(loss, [table, weight])
    total = sum(range(1, world.size + 1))
    np.testing.assert_allclose(of_weight, [2.0 * total / world.size] * 2, rtol=1e-6)
    # Owned rows hold the sum over ranks, untouched: in all, each rank asked for two rows.
    everyone = gathered(tf.reduce_sum(of_table.values, axis=0))
    np.testing.assert_allclose(everyone.sum(axis=0), 2.0 * total * np.array([1.0, 2.0]), rtol=1e-6)


# The optimizers.


def dense_model(library, seed):
    library.utils.set_random_seed(seed)
    return library.Sequential(
        [
            library.layers.Input((WIDTH,)),
            library.layers.Dense(4, activation="tanh"),
            library.layers.Dense(1, activation="sigmoid"),
        ]
    )


def stock_optimizers(library):
    yield "sgd", library.optimizers.SGD(0.5, momentum=0.9)
    yield "adam", library.optimizers.Adam(0.05, clipnorm=0.1)
    yield "clipped", library.optimizers.SGD(0.5, global_clipnorm=0.05)
    if library is tf_keras:
        yield "legacy", library.optimizers.legacy.Adam(0.05, decay=0.01)


def check_fit_trains_dense_models_as_one_rank_does(world):
    x, y = samples(batches=5)
    results = {}
    for library_name, library in LIBRARIES.items():
        for name, stock in stock_optimizers(library):
            # Other weights on each rank: the broadcast makes them rank 0's.
            model = dense_model(library, seed=1 + world.rank)
            model.compile(optimizer=sok.DistributedOptimizer(stock), loss="binary_crossentropy")
            history = model.fit(
                share(world, x),
                share(world, y),
                batch_size=BATCH // world.size,
                epochs=2,
                shuffle=False,
                verbose=0,
                callbacks=[sok.callbacks.BroadcastVariablesCallback(), sok.callbacks.MetricAverageCallback()],
            )
            weights = np.concatenate([w.ravel() for w in model.get_weights()])
            assert_equal_on_all_ranks(weights)
            assert int(np.asarray(model.optimizer.iterations)) == 10
            results[f"{library_name} {name}"] = {"weights": weights, "losses": np.array(history.history["loss"])}
    return results


def check_fit_works_in_every_way_that_keras_runs_steps(world):
    x, y = samples(batches=4)
    for library in LIBRARIES.values():
        trained = []
        for options in ({}, {"run_eagerly": True}, {"steps_per_execution": 2}):
            model = dense_model(library, seed=3)
            model.compile(
                optimizer=sok.DistributedOptimizer(library.optimizers.Adam(0.05)),
                loss="binary_crossentropy",
                **options,
            )
            model.fit(share(world, x), share(world, y), batch_size=BATCH // world.size, shuffle=False, verbose=0)
            trained.append(np.concatenate([w.ravel() for w in model.get_weights()]))
            assert_equal_on_all_ranks(trained[-1])
        np.testing.assert_allclose(trained[1], trained[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(trained[2], trained[0], rtol=1e-5, atol=1e-6)


def check_a_dense_step_is_one_collective(world):
    x, y = samples()
    for library in LIBRARIES.values():
        model = dense_model(library, seed=1)
        optimizer = sok.DistributedOptimizer(library.optimizers.SGD(0.5))
        model.compile(optimizer=optimizer, loss="binary_crossentropy")
        for _ in range(2):  # the first traces
            with sok.trace() as t:
                model.train_on_batch(share(world, x), share(world, y))
        assert t.collectives == (world.size > 1), t.by_name


def check_equal_ids_of_all_ranks_are_to_keras_3_what_those_of_one_are(world):
    """Of a variable, in one rank's batch and in several: it squares their gradients one by one, or adds them up."""
    of_rank = [6 + 2 * rank for rank in range(world.size)]
    rng = np.random.default_rng(4)
    ids, factors = rng.integers(0, 4, size=[3, sum(of_rank)]), rng.normal(size=[3, sum(of_rank), 2]).astype("float32")
    mine = slice(sum(of_rank[: world.rank]), sum(of_rank[: world.rank + 1]))
    optimizers = keras.optimizers
    kinds = {
        "adam": lambda: optimizers.Adam(0.05),
        "adagrad": lambda: optimizers.Adagrad(0.05),
        "rmsprop": lambda: optimizers.RMSprop(0.05, momentum=0.5, centered=True),
        "sgd": lambda: optimizers.SGD(0.05, momentum=0.5, nesterov=True),
        "clipped": lambda: optimizers.SGD(0.2, global_clipnorm=1.0),
        "adding up": lambda: optimizers.Adam(0.05, gradient_accumulation_steps=2),
    }

    def eagerly(function):
        return function

    def trained(optimizer, part, call, adds_up=False):
        rows, bias = keras.Variable(np.ones([4, 2], "float32")), keras.Variable(np.ones([2], "float32"))
        optimizer.build([rows, bias])

        def step(ids, factors):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((tf.gather(rows.value, ids) + bias) ** 2 * factors)
            grads = tape.gradient(loss, [rows.value, bias.value])
            assert isinstance(grads[0], tf.IndexedSlices)
            optimizer.apply([tf.convert_to_tensor(g) for g in grads] if adds_up else grads, [rows, bias])

        step = call(step)
        for of_ids, of_factors in zip(ids, factors, strict=True):
            with sok.trace() as t:
                step(tf.constant(of_ids[part]), tf.constant(of_factors[part]))
        return np.concatenate([rows.numpy().ravel(), bias.numpy()]), t.collectives

    for name, kind in kinds.items():
        call = eagerly if name in ("adam", "adding up") else tf.function
        found, collectives = trained(sok.DistributedOptimizer(kind(), op="sum"), mine, call)
        np.testing.assert_allclose(found, trained(kind(), slice(None), eagerly)[0], rtol=1e-4, atol=1e-6, err_msg=name)
        is_sum = np.allclose(found, trained(kind(), slice(None), eagerly, adds_up=True)[0], rtol=1e-3)
        assert is_sum == (name in ("sgd", "adding up")), name
        assert collectives == (world.size > 1) * (1 if is_sum else 2), name


def check_a_learning_rate_schedule_callback_acts(world):
    x, y = samples()
    for library in LIBRARIES.values():
        model = dense_model(library, seed=1)
        model.compile(optimizer=sok.DistributedOptimizer(library.optimizers.SGD(0.5)), loss="binary_crossentropy")
        callbacks = [library.callbacks.LearningRateScheduler(lambda epoch, rate: 0.0 if epoch else rate)]
        arguments = {"batch_size": BATCH // world.size, "verbose": 0, "callbacks": callbacks}
        model.fit(share(world, x), share(world, y), epochs=1, **arguments)
        before = model.get_weights()
        model.fit(share(world, x), share(world, y), initial_epoch=1, epochs=2, **arguments)
        for was, now in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(was, now)


@contextlib.contextmanager
def v1_session():
    with tf.Graph().as_default(), v1.Session() as session:
        yield session


def check_v1_optimizers_reduce_once_wherever_gradients_come_from(world):
    x, y = samples()
    results = {}
    for way in ("minimize", "compute_and_clip", "tf.gradients"):
        with v1_session() as session:
            weight = v1.get_variable("weight", initializer=tf.zeros([WIDTH, 1]))
            logits = tf.matmul(tf.constant(share(world, x)), weight)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(tf.constant(share(world, y)), logits))
            optimizer = sok.DistributedOptimizer(v1.train.AdamOptimizer(0.1))
            step_number = v1.train.get_or_create_global_step()
            if way == "minimize":
                train = optimizer.minimize(loss, global_step=step_number)
            elif way == "tf.gradients":
                train = optimizer.apply_gradients([(tf.gradients(loss, weight)[0], weight)], step_number)
            else:
                pairs = [(tf.clip_by_norm(grad, 0.01), v) for grad, v in optimizer.compute_gradients(loss)]
                train = optimizer.apply_gradients(pairs, step_number)
            session.run(v1.global_variables_initializer())
            with sok.trace() as t:
                for _ in range(3):
                    session.run(train)
            assert t.collectives == (3 if world.size > 1 else 0)
            assert session.run(step_number) == 3
            assert optimizer.get_slot(weight, "m") is not None
            results[way] = session.run(weight)
        assert_equal_on_all_ranks(results[way])
    return results


def check_v1_gradients_of_another_loss_are_reduced_too(world):
    # compute_gradients has reduced those of the first loss, in this graph; nobody has those of the second.
    with v1_session() as session:
        weight = v1.get_variable("weight", initializer=tf.zeros([1]))
        table = sok.EmbeddingVariable(1, 8, initializer="zeros", name="of_two_losses")
        row = tf.reduce_sum(lookup_rows(table, tf.constant([3], tf.int64)))
        slope = world.rank + 1.0
        optimizer = sok.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
        variables = [weight, table]
        first = optimizer.compute_gradients(slope * (tf.reduce_sum(weight) + row), variables)
        clipped = [(tf.clip_by_norm(grad, 100.0), v) for grad, v in first]
        gradients = tf.gradients(slope * (tf.reduce_sum(weight) + row), variables)
        second = list(zip(gradients, variables, strict=True))
        trains = [optimizer.apply_gradients(clipped), optimizer.apply_gradients(second)]
        with pytest.raises(ValueError, match="Some of `grads_and_vars` come from compute_gradients"):
            optimizer.apply_gradients([first[0], second[1]])
        session.run(v1.global_variables_initializer())
        average = sum(range(1, world.size + 1)) / world.size
        for steps, train in enumerate(trains, 1):
            session.run(train)
            for value in (session.run(weight)[0], session.run(table.sparse_read([3]))[0, 0]):
                np.testing.assert_allclose(value, -average * steps, rtol=1e-6)


def check_rows_that_a_function_returns_are_known_to_be_reduced(world):
    table = sok.EmbeddingVariable(2, 8, initializer="ones", name="reduced_once")

    @tf.function
    def gradient():
        with sok.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(lookup_rows(table, tf.constant([1], tf.int64)))
        return tape.gradient(loss, table)

    def apply(grad):
        sok.DistributedOptimizer(keras.optimizers.SGD(1.0)).apply([grad], [table])

    reduced = gradient()
    for call in (apply, tf.function(apply), lambda grad: apply(tf.clip_by_norm(grad, 1.0))):
        with pytest.raises(ValueError, match="come from a sok.DistributedGradientTape"):
            call(reduced)
    np.testing.assert_array_equal(table.sparse_read([1]), np.ones([1, 2]))
    sok.optimizers.SGD(1.0).apply_gradients([(reduced, table)])
    np.testing.assert_array_equal(table.sparse_read([1]), np.zeros([1, 2]))


# Callbacks.


def check_metrics_are_averaged_for_later_callbacks(world):
    x, y = samples(batches=2)
    for library in LIBRARIES.values():
        seen = []
        model = dense_model(library, seed=2)
        model.compile(optimizer=sok.DistributedOptimizer(library.optimizers.SGD(0.0)), loss="binary_crossentropy")
        history = model.fit(
            share(world, x),
            share(world, y),
            validation_data=(share(world, x), share(world, y)),
            batch_size=BATCH // world.size,
            verbose=0,
            callbacks=[
                sok.callbacks.MetricAverageCallback(),
                library.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs, seen=seen: seen.append(dict(logs))),
            ],
        )
        whole = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        for logs in (seen[0], {name: values[0] for name, values in history.history.items()}):
            np.testing.assert_allclose([logs["loss"], logs["val_loss"]], [whole, whole], rtol=1e-5)


def check_metric_average_weighs_by_samples(world):
    logs = {"loss": float(world.rank), "val_loss": float(world.rank), "note": "not a number"}
    sok.callbacks.MetricAverageCallback(num_samples=world.rank).on_epoch_end(0, logs)
    total = sum(range(world.size))
    if world.size > 1:
        np.testing.assert_allclose(logs["loss"], sum(rank * rank for rank in range(world.size)) / total)
        np.testing.assert_allclose(logs["val_loss"], total / world.size)
    assert logs["note"] == "not a number"


SCALERS = {
    "keras": (keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer),
    "tf_keras": (tf_keras.optimizers.SGD, tf_keras.mixed_precision.LossScaleOptimizer),
    "legacy": (tf_keras.optimizers.legacy.SGD, tf_keras.mixed_precision.LossScaleOptimizer),
}


def scaled_step(family, table, weight, scaler):
    """A function that does a step with a loss times `factor`: of the table, and of the weight unless it is None."""
    read = weight.value if isinstance(weight, keras.Variable) else weight
    scale_loss = scaler.scale_loss if family == "keras" else scaler.get_scaled_loss
    variables = [table] if weight is None else [table, weight]

    @tf.function
    def step(key, factor):
        with tf.GradientTape() as tape:
            rows = lookup_rows(table, key)
            scaled = scale_loss(tf.reduce_sum(rows if weight is None else rows * read) * factor)
        gradients = tape.gradient(scaled, [table, read][: len(variables)])
        if family != "keras":
            gradients = scaler.get_unscaled_gradients(gradients)
        scaler.apply_gradients(list(zip(gradients, variables, strict=True)))

    return step


def check_a_gradient_that_overflows_anywhere_stops_the_step_everywhere(world):
    """A dynamic loss scale: one worker's infinity counts for all, also for workers that own none of the rows."""
    key = tf.constant([0], tf.int64)  # one owner has all gradients of rows
    mean = (1.0 + world.size) / 2.0
    for family, has_weight in itertools.product(SCALERS, (True, False)):
        sgd, scaler_of = SCALERS[family]
        table = sok.EmbeddingVariable(2, 10, name=f"overflows_{family}_{has_weight}", initializer="ones")
        weight = (keras.Variable if family == "keras" else tf.Variable)(np.ones([2], np.float32))
        scaler = scaler_of(sok.DistributedOptimizer(sgd(1.0)), initial_scale=4.0)
        step = scaled_step(family, table, weight if has_weight else None, scaler)

        step(key, tf.constant(np.inf if world.rank == world.size - 1 else 1.0, tf.float32))
        np.testing.assert_array_equal(np.asarray(weight), [1.0, 1.0])
        np.testing.assert_array_equal(lookup_rows(table, key), [[1.0, 1.0]])
        step(key, tf.constant(1.0 + world.rank))
        np.testing.assert_allclose(np.asarray(weight), [1.0 - mean] * 2 if has_weight else [1.0, 1.0], atol=1e-6)
        np.testing.assert_allclose(lookup_rows(table, key), [[1.0 - mean] * 2], atol=1e-6)
        scale = scaler.dynamic_scale if family == "keras" else scaler.loss_scale
        assert float(np.asarray(scale)) == 2.0  # halved once


def check_a_fixed_loss_scale_of_tf_keras_reduces_gradients(world):
    weight = tf.Variable(1.0)
    for family in (tf_keras.optimizers, tf_keras.optimizers.legacy):
        optimizer = sok.DistributedOptimizer(family.SGD(1.0))
        scaling = tf_keras.mixed_precision.LossScaleOptimizer(optimizer, dynamic=False, initial_scale=2.0)
        weight.assign(1.0)
        scaling.apply_gradients([(tf.constant(2.0 + world.rank), weight)])
        np.testing.assert_allclose(weight.numpy(), -1.0 - (world.size - 1) / 2.0)
