"""Clipping as on the equivalent dense table, and gradients that are not finite."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.job.job import Job
from sok.lookup.lookup import lookup_rows
from sok.optimizers import gradients
from sok.table import state as table_state
from tests.messages import saying
from tests.reference import optimizers as reference
from tests.reference.judge import assert_close
from tests.sok.optimizer_cases import DIM, ROWS, gradient, initial_rows, random_steps, rows_of, table_of

POLICIES = ("allow", "skip", "raise")
CLIPPINGS = ({"clipnorm": 1.5}, {"clipvalue": 0.4}, {"global_clipnorm": 1.5})


def name_of(options):
    return next(iter(options))


def step_of(optimizer, tables, steps):
    """A function that does one step, each table with its own keys."""

    def step():
        grads = [gradient(table, s.keys, s.grads) for table, s in zip(tables, steps, strict=True)]
        optimizer.apply_gradients(zip(grads, tables, strict=True))

    return step


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("clipping", CLIPPINGS, ids=name_of)
def test_clipped_steps_are_those_of_stock_keras_on_dense_variables(clipping, policy, rng, call):
    # Two tables: clipnorm measures each, global_clipnorm both together. Duplicate keys are in both.
    weights = [initial_rows(rng), initial_rows(rng)]
    tables = [table_of(w, f"clipped_{i}") for i, w in enumerate(weights)]
    dense = [keras.Variable(w) for w in weights]
    ours = sok.optimizers.Adagrad(0.1, nonfinite_gradients=policy, **clipping)
    stock = keras.optimizers.Adagrad(0.1, **clipping)
    assert getattr(ours, name_of(clipping)) == clipping[name_of(clipping)]
    for pair in zip(random_steps(rng, 6), random_steps(rng, 6), strict=True):
        stock.apply([tf.constant(step.dense()) for step in pair], dense)
        call(step_of(ours, tables, pair))
    for table, variable in zip(tables, dense, strict=True):
        assert_close(rows_of(table), variable.numpy(), factor=3.0)  # six steps add up


def test_clipping_in_a_session_measures_summed_duplicates(rng):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.EmbeddingVariable(1, 4, initializer="zeros", name="clipped")
        loss = 3.0 * tf.reduce_sum(lookup_rows(table, tf.constant([1, 1, 2], tf.int64)))
        optimizer = sok.optimizers.SGD(1.0, clipnorm=2.0)
        update = optimizer.apply_gradients([(tf.gradients(loss, table)[0], table)])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(update)
        rows = session.run(table.sparse_read([1, 2]))
    assert_close(rows, -reference.clip_by_norm(np.array([[6.0], [3.0]]), 2.0))


def test_limits_that_are_not_reached_change_nothing(rng):
    weights = initial_rows(rng)
    free, clipped = table_of(weights, "free"), table_of(weights, "clipped")
    for table, options in ((free, {}), (clipped, {"clipnorm": 1e6})):
        sok.optimizers.SGD(0.5, **options).apply_gradients([(gradient(table, [1, 2, 1], np.ones((3, DIM))), table)])
    np.testing.assert_array_equal(rows_of(free), rows_of(clipped))


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=name_of)
def test_a_step_without_keys_clips_nothing(clipping, rng):
    weights = initial_rows(rng)
    table = table_of(weights)
    optimizer = sok.optimizers.Adam(0.5, **clipping)
    optimizer.apply_gradients([(gradient(table, np.zeros(0), np.zeros((0, DIM))), table)])
    np.testing.assert_array_equal(rows_of(table), weights)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"clipnorm": 1.0, "clipvalue": 1.0}, "one of `clipnorm`, `clipvalue` and `global_clipnorm`"),
        ({"clipnorm": 0.0}, "`clipnorm` .*above 0.*: 0.0"),
        ({"clipvalue": -1.0}, "`clipvalue` must be"),
        ({"global_clipnorm": "1"}, "`global_clipnorm` must be"),
        ({"clipnorm": True}, "`clipnorm` must be"),
        ({"clipvalue": float("nan")}, "`clipvalue` must be"),
        ({"nonfinite_gradients": "ignore"}, "`nonfinite_gradients` must be one of .*'ignore'"),
    ],
)
def test_options_that_make_no_sense_are_errors(options, text):
    with pytest.raises(ValueError, match=text):
        sok.optimizers.SGD(**options)


# Gradients that are not finite. Key 4 has one; keys 1 and 2 are fine.

KEYS = [1, 4, 2, 1]
ONES = np.ones((4, DIM), np.float32)


def spoiled(table, bad):
    grads = np.ones((4, DIM), np.float32)
    grads[1, 2] = bad
    return gradient(table, KEYS, grads)


@pytest.fixture(params=[np.nan, np.inf, -np.inf], ids=["nan", "inf", "-inf"])
def bad(request):
    return request.param


def test_allow_lets_it_through(bad, rng):
    weights = initial_rows(rng)
    table = table_of(weights)
    sok.optimizers.SGD(0.5).apply_gradients([(spoiled(table, bad), table)])
    rows = rows_of(table)
    assert not np.isfinite(rows[4, 2])
    assert_close(rows[1], weights[1] - 1.0)


@pytest.mark.parametrize("clipping", ({}, *CLIPPINGS), ids=lambda options: name_of(options or {"unclipped": 0}))
@pytest.mark.parametrize("rule", [sok.optimizers.SGD, sok.optimizers.Adam])
def test_skip_leaves_that_row_and_trains_the_others(rule, clipping, bad, rng):
    weights = initial_rows(rng)
    table, clean = table_of(weights, "spoiled"), table_of(weights, "clean")
    optimizers = [rule(0.5, nonfinite_gradients="skip", **clipping) for _ in range(2)]
    optimizers[0].apply_gradients([(spoiled(table, bad), table)])
    optimizers[1].apply_gradients([(gradient(clean, [1, 2, 1], np.ones((3, DIM))), clean)])
    np.testing.assert_array_equal(rows_of(table), rows_of(clean))
    np.testing.assert_array_equal(rows_of(table)[4], weights[4])


def test_a_row_that_adam_skips_decays_as_if_it_were_not_in_the_batch(bad, rng):
    weights = initial_rows(rng)
    table, absent = table_of(weights, "spoiled"), table_of(weights, "absent")
    optimizers = [sok.optimizers.Adam(0.5, nonfinite_gradients="skip") for _ in range(2)]
    for optimizer, variable in zip(optimizers, (table, absent), strict=True):
        optimizer.apply_gradients([(gradient(variable, [4], np.ones((1, DIM))), variable)])
    before = rows_of(table)[4].copy()
    optimizers[0].apply_gradients([(spoiled(table, bad), table)])
    optimizers[1].apply_gradients([(gradient(absent, [1, 2, 1], np.ones((3, DIM))), absent)])
    np.testing.assert_array_equal(rows_of(table), rows_of(absent))
    assert np.all(rows_of(table)[4] != before)


@pytest.mark.parametrize("clipping", ({}, *CLIPPINGS), ids=lambda options: name_of(options or {"unclipped": 0}))
def test_raise_names_table_and_key_and_changes_nothing(clipping, bad, rng, call):
    weights = initial_rows(rng)
    table = table_of(weights, "guarded")
    optimizer = sok.optimizers.SGD(0.5, nonfinite_gradients="raise", **clipping)
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"(?s){table.table_name}.*\b4\b"):
        call(lambda: optimizer.apply_gradients([(spoiled(table, bad), table)]))
    np.testing.assert_array_equal(rows_of(table), weights)
    assert int(optimizer.iterations) == 0
    optimizer.apply_gradients([(gradient(table, [1], np.ones((1, DIM))), table)])
    assert int(optimizer.iterations) == 1


def test_raise_changes_no_other_table_of_the_call(bad, rng, call):
    weights = initial_rows(rng)
    tables = [table_of(weights, "before"), table_of(weights, "spoiled"), table_of(weights, "after")]
    optimizer = sok.optimizers.Adam(0.5, nonfinite_gradients="raise")

    def step():
        grads = [gradient(tables[0], KEYS, ONES), spoiled(tables[1], bad), gradient(tables[2], KEYS, ONES)]
        optimizer.apply_gradients(zip(grads, tables, strict=True))

    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"(?s){tables[1].table_name}.*\b4\b"):
        call(step)
    for table in tables:
        np.testing.assert_array_equal(rows_of(table), weights)
        assert table_state.slot_sets(table) == []  # nobody has applied anything
    assert int(optimizer.iterations) == 0


# Several ranks: this process is rank 0 of two, and the other one's part of the collective is given.


class TwoRanks:
    """Gathers this rank's tensor and what the other rank sent; remembers the calls."""

    size, rank, local_rank, name = 2, 0, 0, "two"

    def __init__(self, other):
        self.other = np.asarray([other], np.float32)
        self.calls = []

    def all_gather(self, tensor, name):
        self.calls.append((name, tensor.shape))
        return tf.concat([tensor, self.other], 0)


@pytest.fixture
def two_ranks(monkeypatch):
    def start(other):
        transport = TwoRanks(other)
        monkeypatch.setattr(gradients, "job_of", lambda tables: Job(transport))
        return transport

    return start


@pytest.mark.parametrize("limit", ["clipnorm", "global_clipnorm"])
def test_norms_span_the_shards_of_all_ranks_in_one_collective(limit, two_ranks, rng):
    weights = initial_rows(rng)
    tables = [table_of(weights, "a"), table_of(weights, "b")]
    optimizer = sok.optimizers.SGD(1.0, **{limit: 1.0})
    here = [reference.dense_gradient(np.array([k, k]), np.ones((2, DIM)), ROWS) for k in (1, 2)]
    squares_there = [5.0, 30.0]
    transport = two_ranks(squares_there)
    optimizer.apply_gradients(
        [(gradient(t, [k, k], np.ones((2, DIM))), t) for t, k in zip(tables, (1, 2), strict=True)]
    )
    assert transport.calls == [(f"sok/{optimizer.slot_set}/gradients", (1, 2))]
    squares = [np.sum(g**2) + there for g, there in zip(here, squares_there, strict=True)]
    if limit == "global_clipnorm":
        squares = [sum(squares)] * 2
    for table, grads, square in zip(tables, here, squares, strict=True):
        assert_close(rows_of(table), weights - grads / np.sqrt(square))


def test_raise_tells_every_rank(two_ranks, rng, call):
    weights = initial_rows(rng)
    tables = [table_of(weights, "good"), table_of(weights, "bad_elsewhere")]
    optimizer = sok.optimizers.SGD(0.5, nonfinite_gradients="raise")
    transport = two_ranks([0.0, 1.0])
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("another rank has a gradient", "bad_elsewhere")):
        call(lambda: optimizer.apply_gradients([(gradient(t, [1], np.ones((1, DIM), np.float32)), t) for t in tables]))
    assert len(transport.calls) == 1
    for table in tables:
        np.testing.assert_array_equal(rows_of(table), weights)
    assert int(optimizer.iterations) == 0


def test_the_rank_with_the_bad_row_names_the_key(two_ranks, rng, call):
    weights = initial_rows(rng)
    good, table = table_of(weights, "good"), table_of(weights, "bad_here")
    optimizer = sok.optimizers.SGD(0.5, nonfinite_gradients="raise")
    transport = two_ranks([0.0, 0.0])

    def step():
        optimizer.apply_gradients([(gradient(good, KEYS, ONES), good), (spoiled(table, np.nan), table)])

    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"(?s){table.table_name}.*\b4\b"):
        call(step)
    assert len(transport.calls) == 1
    np.testing.assert_array_equal(rows_of(good), weights)


def test_norms_and_flags_share_one_collective(two_ranks, rng):
    weights = initial_rows(rng)
    table = table_of(weights)
    optimizer = sok.optimizers.SGD(1.0, clipnorm=1.0, nonfinite_gradients="raise")
    transport = two_ranks([6.0, 0.0])
    optimizer.apply_gradients([(gradient(table, [1], np.ones((1, DIM))), table)])
    assert [shape for _, shape in transport.calls] == [(1, 2)]
    assert_close(rows_of(table)[1], weights[1] - 1.0 / 3.0)


@pytest.mark.parametrize("options", [{}, {"clipvalue": 1.0}, {"nonfinite_gradients": "skip"}], ids=str)
def test_what_needs_no_peers_costs_no_collective(options, two_ranks, rng):
    table = table_of(initial_rows(rng))
    transport = two_ranks([0.0])
    sok.optimizers.SGD(1.0, **options).apply_gradients([(gradient(table, [1], np.ones((1, DIM))), table)])
    assert transport.calls == []
