"""Keys ahead on several ranks: to the bit what the synchronous loop gives; what one rank's trouble does to all."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.job import context
from sok.lookup.lookup import lookup_rows
from tests.sok.ahead_cases import BETWEEN, Batches, compare, compare_in_a_function


def counted(world, ids):
    return [tf.constant([i, i + 100 * world.rank], tf.int64) for i in range(ids)]


def one(name, **options):
    table = sok.EmbeddingVariable(2, 500, name=name, initializer="ones", **options)
    return table, lambda ids: lookup_rows(table, ids)


def check_keys_ahead_are_the_synchronous_loop(world, tmp_path_of_rank):
    everything = list(BETWEEN)
    folder = tmp_path_of_rank.parent / "ahead"  # of all ranks: they save together
    for i, (optimizer, in_function, depth) in enumerate(
        [("adam", True, 1), ("adagrad", False, 2), ("momentum", True, 3), ("lazy", True, 4)]
    ):
        between = everything if i < 2 else ["nothing", "evaluate", "nothing", "erase"]
        fewer = (3, 1, 0, 0)[i]  # of one rank, which joins the other
        compare(optimizer, in_function, depth, between, folder / str(i), world.rank, world.size, i, fewer)


def check_keys_ahead_through_horovod(world, monkeypatch, tmp_path_of_rank):
    for what in ("is_direct", "shares_memory") if world.size > 1 else ():
        monkeypatch.setattr(context.get_transport(), what, False)
    compare("adagrad", True, 2, ["nothing", "evaluate", "nothing"], tmp_path_of_rank, world.rank, world.size, seed=7)


def check_ids_count_in_the_step_that_looks_them_up(world):
    (table, look_up), seen = one("ahead_seen"), []
    step = tf.function(lambda ids, ticket: _within(ticket, look_up, ids))
    for i, (ids, ticket) in enumerate(sok.ahead(counted(world, 6), look_up, depth=3)):
        seen.append(int(table.ids_seen))
        if i % 2:
            _within(ticket, look_up, ids)
        else:
            step(ids, ticket)
    assert seen == [0, 2, 4, 6, 8, 10] and int(table.ids_seen) == 12


def check_one_exchange_is_ahead_and_two_are_in_the_step(world):
    table, look_up = one("ahead_counts")
    optimizer = sok.optimizers.SGD(1.0)

    @tf.function
    def step(ids, ticket):
        with tf.GradientTape() as tape, ticket:
            loss = tf.reduce_sum(look_up(ids))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    pipeline = sok.ahead(counted(world, 5), look_up, depth=2)
    assert context.get_job().leave(30) == []  # those of other checks, so that they say nothing inside
    with sok.trace() as trace:
        for ids, ticket in pipeline:
            step(ids, ticket)
    if world.size == 1:
        assert trace.collectives == 0
        return
    kinds = [name.split("/")[-2] for name, count in trace.by_name.items() for _ in range(count["collectives"])]
    assert sorted(kinds) == ["grads"] * 5 + ["keys"] * 6 + ["rows"] * 5  # and one that says that the data have ended
    assert trace.by_lookup[table.table_name]["collectives"] == 16


def check_what_is_wrong_on_one_rank_raises_in_its_own_step_on_all(world):
    _, look_up = one("ahead_wrong", hashed=False)
    step = tf.function(lambda ids, ticket: _within(ticket, look_up, ids))
    batches = counted(world, 6)
    if world.rank == world.size - 1:
        batches[3] = tf.constant([-1, 2], tf.int64)
    elif world.rank == 0:
        batches = batches[:2]  # it joins, and is told
    said = []
    for ids, ticket in sok.ahead(batches, look_up, depth=4):
        try:
            step(ids, ticket)
            said.append("fine")
        except tf.errors.InvalidArgumentError as error:
            assert "ahead_wrong" in str(error) and "-1" in str(error)
            said.append("wrong")
    assert said == ["fine"] * 3 + ["wrong"] + ["fine"] * 2


def _within(ticket, look_up, ids):
    with ticket:
        return look_up(ids)


def check_a_loop_that_all_leave_costs_nothing_and_can_be_begun_anew(world):
    table, look_up = one("ahead_left")
    pipeline = sok.ahead(Batches(counted(world, 9)), look_up, depth=3)
    for _ in range(3):
        for i, (ids, ticket) in enumerate(pipeline):
            _within(ticket, look_up, ids)
            if i == 2:
                break
    for ids, ticket in itertools.islice(pipeline, 1):
        assert _within(ticket, look_up, ids).shape == [2, 2]
    with pytest.raises(KeyError):
        for _ in pipeline:
            raise KeyError("of the program, on all")
    assert lookup_rows(table, counted(world, 1)[0]).shape == [2, 2]  # eagerly, as ever
    assert len(list(pipeline)) == 9


def check_what_the_data_of_one_rank_raise_is_told_to_all(world):
    """At the turn of that batch: in its step another lookup would be waited for."""
    (_, look_up), (in_step, _), taken = one("ahead_data"), one("ahead_in_step"), []

    def batches():
        yield from counted(world, 3 if world.rank else 2)
        if world.rank == 0:
            return
        if world.rank == world.size - 1:
            raise KeyError("no fourth")
        yield from counted(world, 3)

    def run():
        for ids, ticket in sok.ahead(batches(), look_up, depth=3):
            lookup_rows(in_step, ids)
            _within(ticket, look_up, ids)
            taken.append(ids)

    if world.rank == world.size - 1:
        with pytest.raises(KeyError, match="no fourth"):
            run()
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"rank {world.size - 1}.*no fourth"):
            run()
    assert len(taken) == 3 and lookup_rows(in_step, counted(world, 1)[0]).shape == [2, 2]


def check_ranks_that_take_other_numbers_of_batches_are_told(world):
    """One takes a batch more and leaves: what it has begun meets what the others begin next."""
    _, look_up = one("ahead_apart")
    pipeline = sok.ahead(Batches(counted(world, 9)), look_up, depth=1)
    for i, (ids, ticket) in enumerate(pipeline):
        if i == (2 if world.rank == 0 and world.size > 1 else 1):
            break
        if i < 1:
            _within(ticket, look_up, ids)
    if world.size == 1:
        return
    with pytest.raises(tf.errors.FailedPreconditionError, match="call"):
        for ids, ticket in pipeline:
            _within(ticket, look_up, ids)
    assert context.get_job().leave(30) == []  # what one has begun more is waited for no more
    with pytest.raises(RuntimeError, match="sok-ahead-.* has ended"):
        next(iter(pipeline))


def check_an_error_of_a_finished_lookup_inside_a_layer_leaves_nobody_waiting(world):
    layer = sok.DistributedEmbedding("sum", 8, 4, 1, 1, use_hashtable=False, name="ahead_layer")
    layer(tf.zeros([0, 1, 1], tf.int64))
    wrong = 10**6 if world.rank == 0 else 1
    batches = [tf.constant([[[i]]], tf.int64) for i in (1, wrong, 2)]
    said = []
    for ids, ticket in sok.ahead(batches, layer, depth=2):
        try:
            _within(ticket, layer, ids)
            said.append(True)
        except tf.errors.InvalidArgumentError:
            said.append(False)
    assert said == [True, False, True]


def check_a_job_that_ends_drops_what_has_begun(world):
    _, look_up = one("ahead_last")
    pipeline = sok.ahead(Batches(counted(world, 9)), look_up, depth=4)
    next(iter(pipeline))
    before = sok.collective_counts()["collectives"] if world.size > 1 else 0
    assert context.get_job().leave() == []
    begun = sok.collective_counts()["collectives"] - before if world.size > 1 else 0
    assert 0 <= begun <= 5
    thread = pipeline._pipeline._thread._thread
    thread.join(30)
    assert not thread.is_alive()


def check_a_rank_that_has_left_is_named_where_others_take_another_batch(world):
    """And its own batches that were under way end; what nobody holds any more has left."""
    if world.size == 1:
        return
    table, look_up = one("ahead_who")
    pipeline, taken = sok.ahead(Batches(counted(world, 9)), look_up, depth=2), []

    def run():
        for ids, ticket in pipeline:
            _within(ticket, look_up, ids) if not taken else None
            taken.append(ids)
            if world.rank == 1:
                break

    if world.rank == 1:
        run()
        del pipeline
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="rank 1: it has begun no such batch"):
            run()
        with pytest.raises(tf.errors.InvalidArgumentError, match="rank 1: it has begun no such batch"):
            list(pipeline)
    assert 1 <= len(taken) <= 4 and lookup_rows(table, counted(world, 1)[0]).shape == [2, 2]


def check_the_rows_of_a_batch_are_those_of_its_turn(world):
    table, look_up = one("ahead_turn")
    for i, (ids, ticket) in enumerate(sok.ahead(counted(world, 6), look_up, depth=3)):
        everything = tf.range(600, dtype=tf.int64)
        np.testing.assert_array_equal(_within(ticket, look_up, ids), np.full([2, 2], 1.0 + i))
        table.assign(everything[:450], np.full([450, 2], 2.0 + i, np.float32))


def prefetched(world, library, seed, use, depth):
    """A converted model, this rank's batches, and what wraps them, or not."""
    library.utils.set_random_seed(seed)
    name = f"prefetch_{library.__name__}_{seed}_{use}"
    inputs = [library.Input((1,), dtype="int64", name=f"c{i}") for i in range(2)]
    rows = [library.layers.Embedding(300, 4, name=f"{name}_{i}")(x) for i, x in enumerate(inputs)]
    model = library.Model(inputs, library.layers.Dense(1)(library.layers.Flatten()(library.layers.Add()(rows))))
    model = sok.distributed_model(model, table=sok.TableOptions(seed=seed))
    model.compile(sok.DistributedOptimizer(library.optimizers.Adagrad(0.1)), "mse")
    rng = np.random.default_rng([seed, world.rank])
    ids = tuple(rng.integers(0, 300, [24, 1]) for _ in range(2))
    data = tf.data.Dataset.from_tensor_slices((ids, rng.normal(size=[24, 1]).astype("float32"))).batch(4)
    wrap = (lambda d: sok.prefetch(d, model, depth)) if use else lambda d: d
    return model, data, wrap


def check_fit_of_what_is_prefetched_is_fit_to_the_bit(world):
    """With batches that one rank has more than the other, too, whether their number is known or not."""
    for library, depth in (keras, 2), (tf_keras, 1):
        results = []
        for use in (False, True):
            model, data, wrap = prefetched(world, library, 1, use, depth)
            fewer = data.take(6 - 3 * world.rank)
            if library is tf_keras:
                fewer = fewer.filter(lambda *_: True)
            stops = library.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0)
            history = model.fit(wrap(fewer), epochs=4, verbose=0, validation_data=wrap(data), callbacks=[stops])
            told = model.evaluate(wrap(data), verbose=0)
            weights = [weight.tobytes() for weight in model.get_weights()]
            tables = [layer.embedding_variable for layer in model.layers if hasattr(layer, "embedding_variable")]
            results.append([history.history, told, weights, [int(table.ids_seen) for table in tables]])
            assert len(history.history["loss"]) == 2 and len(tables) == 2
            predicted = model.predict(data, verbose=0)
        assert results[0] == results[1]
        # Without sok.prefetch these would leave a rank waiting: a rank's own results depend on no other's data.
        alone = model.evaluate(data.take(3), verbose=0)
        told = model.evaluate(wrap(fewer), verbose=0)
        assert told == alone if world.rank else told == results[1][1]
        found = model.predict(wrap(fewer), verbose=0)
        np.testing.assert_array_equal(found, predicted[: len(found)])
        assert len(found) == 24 - 12 * world.rank
        model.evaluate(wrap(fewer), steps=2, verbose=0)


def check_a_fit_of_what_is_prefetched_that_stops_in_an_epoch(world):
    """One rank, which joins the other, or both: nothing that had begun is trained, and nobody waits for it."""
    if world.size == 1:
        return

    def fit(use, ranks, some=lambda data: data, **options):
        model, data, wrap = prefetched(world, keras, 2, use, depth=2)

        def stop(batch, logs):
            model.stop_training = world.rank in ranks and batch == 1

        stops = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
        history = model.fit(wrap(some(data)), epochs=3, verbose=0, callbacks=[stops], **options)
        assert len(history.history["loss"]) == 1
        return [history.history, model.predict(wrap(data), verbose=0).tolist(), model, wrap, data]

    unknown = fit(True, [1], lambda data: data.filter(lambda *_: True))
    assert unknown[:2] == fit(False, [1])[:2]
    *found, model, wrap, data = fit(True, [0, 1], lambda data: data.repeat(), steps_per_epoch=6)
    assert found == fit(False, [0, 1])[:2]
    with pytest.raises(ValueError, match=r"one `steps_per_epoch`.*Received, by rank: \[2, 3\]"):
        model.fit(wrap(data), verbose=0, steps_per_epoch=2 + world.rank)


def check_what_is_prefetched_and_cannot_be_joined_is_refused_on_all(world):
    if world.size == 1:
        return
    first, second = (sok.Embedding(50, 2, sparse_as_dense_size=0, name=f"prefetch_refused_{i}") for i in range(2))
    inside = tf.function(second, autograph=False)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.dense = first, second, keras.layers.Dense(1)

        def call(self, ids):
            return self.dense(tf.squeeze(first(ids) + inside(ids), 1))

    model = Model()
    model(tf.zeros([4, 1], tf.int64))
    model.compile(sok.DistributedOptimizer("sgd"), "mse")
    data = tf.data.Dataset.from_tensors((np.ones([4, 1], np.int64), np.ones([4, 1], np.float32))).repeat(4)
    words = "data have ended before.*cannot take part.*a tf.function.*Give all workers as many"
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        model.fit(sok.prefetch(data.take(4 - world.rank).filter(lambda *_: True), model), verbose=0)


def check_an_average_is_over_the_ranks_that_have_a_batch(world):
    """As one worker has it, with a batch of each: NumPy says what comes of a step."""
    table, look_up = one("ahead_weight")
    weights, sgd = tf.Variable([1.0, 2.0]), tf.keras.optimizers.SGD(0.25)
    optimizer, mine = sok.optimizers.SGD(0.25), counted(world, 4 - 2 * world.rank)

    @tf.function
    def step(ids, ticket):
        with sok.DistributedGradientTape(tf.GradientTape()) as tape:
            with ticket:
                rows = look_up(ids)
            loss = tf.reduce_mean(tf.linalg.matvec(rows, weights)) * ticket.weight
        of_rows, of_weights = tape.gradient(loss, [table, weights])
        optimizer.apply_gradients([(of_rows, table)])
        sgd.apply_gradients([(of_weights, weights)])

    rows, expected = {}, np.array([1.0, 2.0], np.float32)
    for i, (ids, ticket) in enumerate(sok.ahead(Batches(mine), look_up, depth=2)):
        step(ids, ticket)
        ranks = [rank for rank in range(world.size) if i < 4 - 2 * rank]
        keys = [key for rank in ranks for key in (i, i + 100 * rank)]  # of each batch
        share = 1 / (2 * len(ranks))
        found = [rows.get(key, np.ones(2, np.float32)).copy() for key in keys]
        for key in keys:
            rows[key] = rows.get(key, np.ones(2, np.float32)) - 0.25 * share * expected
        expected = expected - 0.25 * share * sum(found)
        np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert i == 3
    keys = sorted(rows)
    np.testing.assert_allclose(lookup_rows(table, keys), [rows[key] for key in keys], rtol=1e-6)


def check_a_loop_in_a_function_is_the_synchronous_loop(world, tmp_path_of_rank):
    for i, (optimizer, depth, fewer, schedule) in enumerate(
        [("adam", 1, 2, {}), ("lazy", 3, 1, {"rows": True})]  # of one rank, fewer: it joins
    ):
        place = world.rank, world.size, i, fewer
        compare_in_a_function(optimizer, depth, 4, tmp_path_of_rank / str(i), *place, **schedule)


def check_a_loop_in_a_function_joins_with_batches_of_a_dataset(world):
    """Of one size, sparse and ragged: those without samples are of the same form."""
    table, look_up = one("looped_joins")
    ids = tf.reshape(tf.range(24, dtype=tf.int64), [12, 2])
    data = tf.data.Dataset.from_tensor_slices((ids, tf.sparse.from_dense(ids), tf.RaggedTensor.from_tensor(ids)))
    data = data.batch(2, drop_remainder=True).take(6 - 4 * (world.rank == world.size - 1))
    sizes, weights = (tf.Variable(tf.zeros([6])) for _ in range(2))
    assert data.element_spec[0].shape == [2, 2]

    @tf.function
    def step(ids, ticket):
        with ticket:
            rows = look_up(ids)
        assert rows.shape[1:] == [2, 2]
        return tf.shape(rows)[0], ticket.weight

    @tf.function
    def epoch():
        i = 0
        for (ids, sparse, ragged), ticket in pipeline:
            size, weight = step(ids, ticket)
            for other in (sparse.dense_shape[0], ragged.nrows()):
                tf.debugging.assert_equal(tf.cast(other, tf.int32), size)
            tf.debugging.assert_equal(ticket.has_batch, size > 0)
            sizes.scatter_nd_update([[i]], [tf.cast(size, tf.float32)])
            weights.scatter_nd_update([[i]], [weight])
            i += 1
        return i

    pipeline, last = sok.ahead(data, lambda batch: look_up(batch[0]), depth=2), world.rank == world.size - 1
    for _ in range(2):
        assert int(epoch()) == (2 if world.size == 1 else 6)
    share = world.size / (world.size - 1) if world.size > 1 else 0
    np.testing.assert_array_equal(sizes, [2] * 2 + ([0] * 4 if last else [2] * 4))
    np.testing.assert_allclose(weights, [1] * 2 + ([0] * 4 if last else [share] * 4))


def check_a_loop_in_a_function_that_is_left_or_raises_on_all(world):
    """By an id of one rank, what its data raise, or `break`; then all begin anew, and meet."""
    table, look_up = one("looped_wrong", hashed=False)
    good, last = counted(world, 7), world.rank == world.size - 1
    bad, batches = [*good[:3], tf.constant([-1, 2], tf.int64), *good[4:]], Batches(good)
    pipeline = sok.ahead(batches, look_up, depth=3)

    @tf.function
    def epoch(most):
        steps = 0
        for ids, ticket in pipeline:
            if steps == most:
                break
            with ticket:
                rows = look_up(ids)
            seen.assign_add(tf.cast(rows[0, 0], tf.int32))
            steps += 1
        return steps

    def fail():
        yield from good[:3]
        raise KeyError("no fourth")

    class Failing:
        __iter__ = staticmethod(fail)

    seen = tf.Variable(0)
    assert int(epoch(tf.constant(2))) == 2
    batches.batches = bad if last else good
    for _ in range(2):
        seen.assign(0)
        with pytest.raises(tf.errors.InvalidArgumentError, match="looped_wrong.*-1|-1.*looped_wrong"):
            epoch(tf.constant(99))
        assert int(seen) == 3
    batches.batches = Failing() if last else good
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="no fourth" if last else f"rank {world.size - 1}.*no fourth"
    ):
        epoch(tf.constant(99))
    batches.batches = good
    assert int(epoch(tf.constant(99))) == 7 and lookup_rows(table, good[0]).shape == [2, 2]
    if world.size > 1:
        assert context.get_job().leave(30) == []
        with pytest.raises(tf.errors.InvalidArgumentError, match="sok-ahead-.* has ended"):
            epoch(tf.constant(1))
