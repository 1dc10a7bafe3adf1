"""Rows ahead on several ranks: to the bit what the synchronous loop gives; how old stale rows are; what errors do."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sok
from sok.job import context
from tests.multiprocess.checks_ahead import _within, counted, one, prefetched
from tests.sok.ahead_cases import BETWEEN, KINDS, OPTIMIZERS, Batches, compare


def check_rows_ahead_are_the_synchronous_loop(world, tmp_path_of_rank):
    """Random programs, the same on all ranks: what is drawn depends on no chance."""
    folders = (tmp_path_of_rank.parent / "rows_ahead" / str(i) for i in itertools.count())  # they save together
    kinds = itertools.cycle(KINDS)
    rules = itertools.cycle(sorted(OPTIMIZERS))

    @settings(
        max_examples=9,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        in_function=st.booleans(),
        depth=st.integers(1, 4),
        between=st.lists(st.sampled_from(BETWEEN), min_size=2, max_size=3),
        fewer=st.integers(0, 1),
        seed=st.integers(0, 99),
    )
    def programs(in_function, depth, between, fewer, seed):
        which = {"kind": next(kinds), "rows": True, "fewer": fewer, "seed": seed}
        compare(next(rules), in_function, depth, between, next(folders), world.rank, world.size, **which)

    programs()


def check_rows_ahead_through_horovod(world, monkeypatch, tmp_path_of_rank):
    """In 16 bit they travel as that only there."""
    for what in ("is_direct", "shares_memory") if world.size > 1 else ():
        monkeypatch.setattr(context.get_transport(), what, False)
    which = {"kind": "16 bit", "rows": True, "seed": 7}
    compare("adagrad", True, 2, ["nothing", "evaluate", "nothing"], tmp_path_of_rank, world.rank, world.size, **which)


def check_rows_that_no_update_touched_are_not_sent_again(world):
    """The batches of odd numbers are of other rows than those of even numbers, so a step touches none of the next."""
    table, look_up = one("rows_ahead_repaired")
    optimizer = sok.optimizers.SGD(1.0)

    @tf.function
    def step(ids, ticket):
        with tf.GradientTape() as tape, ticket:
            loss = tf.reduce_sum(look_up(ids))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    pipelines = []  # one that nobody holds would say that it has ended
    for same in (False, True):
        batches = [tf.range(100, dtype=tf.int64) + (0 if same else 100 * (i % 2)) for i in range(6)]
        before = sok.rows_ahead(table)
        pipelines.append(sok.ahead(batches, look_up, depth=1, rows=True))
        with sok.trace() as trace:
            for ids, ticket in pipelines[-1]:
                step(ids, ticket)
        found = {name: count - before[name] for name, count in sok.rows_ahead(table).items()}
        if world.size == 1:
            assert found == {"sent": 0, "repaired": 0} and trace.collectives == 0
            continue
        # Each rank asks for as many rows of this one; those of a batch that has begun after the step are as they were.
        own = sum(int(key) % world.size == world.rank for key in range(100))
        assert found["sent"] == 6 * own * world.size
        assert found["repaired"] <= (5 if same else 0) * own * world.size
        names = [name.split("/")[2:-1] for name, count in trace.by_name.items() for _ in range(count["collectives"])]
        newest = max((name[0] for name in names if len(name) > 1), key=lambda name: int(name.removeprefix("ahead")))
        # Pipelines of before may say in between that they have ended.
        kinds = [name[-1] if len(name) == 1 else f"ahead/{name[-1]}" for name in names if name[0] in (newest, name[-1])]
        # The repair travels as rows do without. One message of keys, and one of rows, may be of the end of the data.
        assert kinds.count("grads") == kinds.count("rows") == 6, kinds
        assert set(kinds) == {"ahead/keys", "ahead/rows", "grads", "rows"}, kinds
        assert kinds.count("ahead/keys") in (6, 7) and kinds.count("ahead/rows") in (6, 7), kinds
    with pytest.raises(TypeError, match="`table` must be"):
        sok.rows_ahead("rows_ahead_repaired")


def check_stale_rows_are_of_at_most_so_many_updates_ago(world):
    """A row says how many updates there were: each adds one on each rank."""
    for depth in (1, 3):
        table, look_up = one(f"rows_ahead_stale_{depth}")
        optimizer = sok.optimizers.SGD(1.0)

        @tf.function
        def step(ids, ticket, look_up=look_up, optimizer=optimizer, table=table):
            with tf.GradientTape() as tape, ticket:
                rows = look_up(ids)
                loss = -tf.reduce_sum(rows) / world.size
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
            return rows

        ages = []
        batches = [tf.constant([1, 2, 3], tf.int64)] * 20
        for i, (ids, ticket) in enumerate(sok.ahead(batches, look_up, depth=depth, stale=depth)):
            rows = step(ids, ticket).numpy()
            ages += (i - (rows - 1.0)).flatten().tolist()
        assert all(0 <= age <= depth and age == round(age) for age in ages), ages
        assert world.size == 1 or max(ages) > 0
        assert world.size > 1 or max(ages) == 0  # nothing travels, and all is exact


def check_errors_of_a_batch_whose_rows_went_ahead_are_raised_in_its_step(world):
    """On all ranks: ids that are none, a table that becomes full, and data that raise."""
    for rows, stale in (True, None), (False, 4):
        schedule = {"depth": 4, "rows": rows, "stale": stale}
        _, wrong = one("rows_ahead_wrong", hashed=False)
        full = sok.EmbeddingVariable(2, 4, name="rows_ahead_fills", hashed=True, initializer="ones")
        batches = counted(world, 6)
        if world.rank == world.size - 1:
            batches[3] = tf.constant([-1, 2], tf.int64)
        elif world.rank == 0:
            batches = batches[:2]  # it joins, and is told
        said = []
        for ids, ticket in sok.ahead(batches, wrong, **schedule):
            try:
                _within(ticket, wrong, ids)
                said.append("fine")
            except tf.errors.InvalidArgumentError as error:
                assert "rows_ahead_wrong" in str(error) and "-1" in str(error)
                said.append("wrong")
        assert said == ["fine"] * 3 + ["wrong"] + ["fine"] * 2

        def fill(ids, full=full):
            return sok.group_embedding_lookup([full], [ids])[0]

        batches, said = [tf.range(4 * world.size, dtype=tf.int64) * n for n in (1, 1, 7, 1)], []
        for ids, ticket in sok.ahead(batches, fill, **schedule):
            try:
                said.append(float(tf.reduce_sum(_within(ticket, fill, ids))))
            except tf.errors.ResourceExhaustedError as error:
                assert "rows_ahead_fills" in str(error)
                said.append("full")
        assert said == [8.0 * world.size] * 2 + ["full"] + [8.0 * world.size]


def check_a_rank_that_cannot_begin_a_batch_leaves_nobody_waiting_for_its_rows(world):
    _, look_up = one("rows_ahead_data")
    taken = []

    def batches():
        yield from counted(world, 3)
        if world.rank == world.size - 1:
            raise KeyError("no fourth")
        yield from counted(world, 3)

    error = KeyError if world.rank == world.size - 1 else tf.errors.InvalidArgumentError
    with pytest.raises(error, match="no fourth"):
        for ids, ticket in sok.ahead(batches(), look_up, depth=2, rows=True):
            taken.append(_within(ticket, look_up, ids))
    assert len(taken) == 3
    pipeline = sok.ahead(Batches(counted(world, 9)), look_up, depth=3, rows=True)
    for _ in range(2):
        for ids, ticket in itertools.islice(pipeline, 2):
            _within(ticket, look_up, ids)
    assert len(list(pipeline)) == 9
    assert context.get_job().leave(30) == []


def check_fit_with_rows_ahead_is_fit_to_the_bit(world):
    results = []
    for use in (False, True):
        model, data, _ = prefetched(world, keras, 5, use, 2)
        wrap = (lambda d, m=model: sok.prefetch(d, m, 2, rows=True)) if use else lambda d: d
        history = model.fit(wrap(data.take(6 - 2 * world.rank)), epochs=1, verbose=0, validation_data=wrap(data))
        told = model.predict(wrap(data), verbose=0)
        results.append([history.history, told.tobytes(), [weight.tobytes() for weight in model.get_weights()]])
    assert results[0] == results[1]


def check_exact_adam_keeps_its_rows_in_the_step(world):
    """Its decay moves every row in every step."""
    table, look_up = one("rows_ahead_adam")
    optimizer = sok.optimizers.Adam(0.1)
    for ids, ticket in sok.ahead(counted(world, 6), look_up, depth=1, rows=True):
        with tf.GradientTape() as tape, ticket:
            loss = tf.reduce_sum(look_up(ids))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    # At most those of the batches that had begun before the first update.
    assert sok.rows_ahead(table)["sent"] <= 2 * 2 * world.size
    np.testing.assert_array_equal(look_up(counted(world, 1)[0]).shape, [2, 2])
