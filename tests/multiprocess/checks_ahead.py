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
from tests.sok.ahead_cases import BETWEEN, Batches, compare

ENDS = "data have ended before those of others"


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
        compare(optimizer, in_function, depth, between, folder / str(i), world.rank, world.size, seed=i)


def check_keys_ahead_through_sockets(world, monkeypatch, tmp_path_of_rank):
    if world.size > 1:
        monkeypatch.setattr(context.get_transport(), "shares_memory", False)
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


def check_a_rank_whose_data_end_early_is_named_on_all(world):
    table, look_up = one("ahead_ends")
    mine = 4 if world.rank == world.size - 1 else 6
    taken = []

    def run():
        for ids, ticket in sok.ahead(counted(world, mine), look_up, depth=2):
            _within(ticket, look_up, ids)
            taken.append(ids)

    if world.size == 1:
        run()
    elif world.rank == world.size - 1:
        with pytest.raises(ValueError, match="This worker's data have ended, and rank 0 has another batch"):
            run()
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"rank {world.size - 1}.*{ENDS}"):
            run()
    assert len(taken) == 4
    assert lookup_rows(table, counted(world, 1)[0]).shape == [2, 2]


def check_what_the_data_of_one_rank_raise_is_told_to_all(world):
    """At the turn of that batch: in its step another lookup would be waited for."""
    (_, look_up), (in_step, _), taken = one("ahead_data"), one("ahead_in_step"), []

    def batches():
        yield from counted(world, 3)
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


def prefetched(world, library, seed, use):
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
    wrap = (lambda d: sok.prefetch(d, model, depth=2)) if use else lambda d: d
    return model, data, wrap


def check_fit_of_what_is_prefetched_is_fit_to_the_bit(world):
    for library in (keras, tf_keras):
        results = []
        for use in (False, True):
            model, data, wrap = prefetched(world, library, 1, use)
            stops = library.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0)
            history = model.fit(wrap(data), epochs=4, verbose=0, validation_data=wrap(data), callbacks=[stops])
            told = model.evaluate(wrap(data), verbose=0)
            weights = [weight.tobytes() for weight in model.get_weights()]
            tables = [layer.embedding_variable for layer in model.layers if hasattr(layer, "embedding_variable")]
            results.append([history.history, told, weights, [int(table.ids_seen) for table in tables]])
            assert len(history.history["loss"]) == 2 and len(tables) == 2
        assert results[0] == results[1]


def check_what_is_prefetched_and_uneven_is_refused_on_all(world):
    if world.size == 1:
        return
    model, data, _ = prefetched(world, keras, 2, True)
    fewer = 5 - world.rank
    with pytest.raises(ValueError, match="unequal numbers of batches .5 on rank 0, 4 on rank 1.*Give all as many"):
        model.fit(sok.prefetch(data.take(fewer), model), verbose=0)
    unknown = data.take(fewer).filter(lambda *_: True)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=ENDS if world.rank == 0 else "data have ended, and rank 0"
    ):
        model.fit(sok.prefetch(unknown, model), verbose=0)
    assert len(model.fit(sok.prefetch(data, model), verbose=0).history["loss"]) == 1

    def stop(batch, logs):
        model.stop_training = True

    stops = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    for some in data, data.filter(lambda *_: True):
        with pytest.raises(ValueError, match="stopped in the middle of an epoch, after 1 batches"):
            model.fit(sok.prefetch(some, model), verbose=0, callbacks=[stops])
