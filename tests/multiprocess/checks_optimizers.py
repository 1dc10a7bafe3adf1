"""Optimizers on all ranks: what one rank gives, and errors that all of them raise."""

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.lookup.lookup import lookup_rows
from tests.messages import saying
from tests.sok import own_rules

KEYS, STEPS = 20, 8
CLIPPED = [
    *((rule, clipping) for rule in ("SGD", "Adam") for clipping in ({}, {"clipnorm": 0.5}, {"global_clipnorm": 0.5})),
    ("Adagrad", {"clipvalue": 0.2}),
    ("LazyAdam", {"clipnorm": 0.5, "nonfinite_gradients": "raise"}),
]
MORE_RULES = [
    ("SGD", {"momentum": 0.9, "nesterov": True, "clipnorm": 0.5}),
    ("RMSprop", {"momentum": 0.5, "centered": True, "epsilon": 1e-2}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"lazy": True, "bias_correction": "row"}),
    ("GroupFtrl", {"l21_regularization_strength": 0.1}),
    *((rule, {"epsilon": 1e-2}) for rule in ("Lamb", "RowWiseAdagrad", "RowWiseAdam")),
    *((rule, {}) for rule in ("Adadelta", "AdamW", "Adamax", "Nadam", "Lion", "Ftrl")),
]
OWN_RULES = [
    ("adagrad", {}),
    ("with_everything", {"clipnorm": 0.5, "nonfinite_gradients": "raise"}),
]


def check_optimizers_and_clipping(world):
    """Rows of two tables after some steps on uneven parts of the same batches."""
    return _train_all(world, CLIPPED)


def check_optimizers_of_more_rules(world):
    return _train_all(world, MORE_RULES)


def check_optimizers_of_rules_in_python(world):
    return _train_all(world, OWN_RULES)


def _train_all(world, cases):
    return {f"{rule} {more}": _train(world, _class_of(rule)(0.05, **more)) for rule, more in cases}


def _class_of(rule):
    return getattr(own_rules, rule, None) or getattr(sok.optimizers, rule)


def _train(world, optimizer):
    tables = [
        sok.EmbeddingVariable(dim, 2 * KEYS, name="checked", initializer="normal", seed=dim, key_dtype="int64")
        for dim in (3, 2)
    ]

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)] * 2)
    def step(first, second):
        with tf.GradientTape() as tape:
            loss = 3.0 * tf.reduce_sum(lookup_rows(tables[0], first) ** 2)
            loss += tf.reduce_sum(lookup_rows(tables[1], second) ** 3)
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))

    # The cuts need numbers of their own: how many there are depends on the world, and the batches must not.
    rng, cutter = np.random.default_rng(5), np.random.default_rng(6)
    for _ in range(STEPS):
        batches = [rng.integers(0, KEYS, rng.integers(0, 9)) for _ in tables]
        # Cut anywhere: a rank may have no keys.
        cuts = [[0, *np.sort(cutter.integers(0, len(b) + 1, world.size - 1)), len(b)] for b in batches]
        step(*(b[c[world.rank] : c[world.rank + 1]] for b, c in zip(batches, cuts, strict=True)))
    return [table.sparse_read(np.arange(KEYS)).numpy() for table in tables]


def check_a_bad_gradient_on_the_last_rank_raises_on_all(world):
    good, bad = (sok.EmbeddingVariable(1, 8, name=name, initializer="ones") for name in ("good", "bad"))
    optimizer = sok.optimizers.Adam(0.5, nonfinite_gradients="raise")
    is_last = world.rank == world.size - 1

    def step(factor):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(lookup_rows(good, [3]))
            # Key world.rank lives on this rank; what it gets, it gets from here.
            loss += factor * tf.reduce_sum(lookup_rows(bad, [world.rank]))
        optimizer.apply_gradients(zip(tape.gradient(loss, [good, bad]), [good, bad], strict=True))

    text = rf"(?s)table 'bad.*key {world.rank} " if is_last else "(?s)another rank has a gradient.*'bad"
    for run in (step, tf.function(step)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            run(tf.constant(np.nan if is_last else 1.0))
    assert int(optimizer.iterations) == 0
    everyone = range(world.size)
    np.testing.assert_array_equal(bad.sparse_read(everyone).numpy(), np.ones((world.size, 1)))
    np.testing.assert_array_equal(good.sparse_read([3]).numpy(), [[1.0]])
    step(tf.constant(1.0))
    np.testing.assert_allclose(bad.sparse_read(everyone).numpy(), 0.5, rtol=1e-4)  # few digits in 1 - beta_2


def check_own_rules_that_differ_raise_on_all(world):
    functions = [own_rules.plain, own_rules.plain_too]
    functions[1].__name__ = "plain"
    for rule in (functions[min(world.rank, 1)], [own_rules.plain, own_rules.no_name][min(world.rank, 1)]):
        optimizer, table = sok.optimizers.rule()(rule)(0.5), sok.EmbeddingVariable(1, 8, initializer="ones")

        def step(optimizer=optimizer, table=table):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(lookup_rows(table, [0, 1]))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])

        if world.size == 1:
            step()
            continue
        for run in (step, tf.function(step)):
            with pytest.raises(ValueError, match="rank 1"):
                run()
        np.testing.assert_array_equal(table.sparse_read([0, 1]), np.ones((2, 1)))


def check_an_own_rule_that_divides_by_zero_on_the_last_rank_raises_on_all(world):
    table = sok.EmbeddingVariable(1, 8, name="divided", initializer="ones")
    optimizer = own_rules.divides(0.5, nonfinite_gradients="raise")

    def step(factor):
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_sum(lookup_rows(table, [world.rank]))  # which lives on this rank
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    for run in (step, tf.function(step)):
        message = saying("divided", "divides(total)", f"key {world.size - 1}", "divide by zero")
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            run(tf.constant(0.0 if world.rank == world.size - 1 else 1.0))
    everyone = range(world.size)
    np.testing.assert_array_equal(table.sparse_read(everyone), np.ones((world.size, 1)))
    step(tf.constant(1.0))
    np.testing.assert_allclose(table.sparse_read(everyone), np.full((world.size, 1), 0.5))


def check_own_initializers_that_differ_raise_on_all(world):
    made = [sok.initializer(function) for function in (own_rules.ramp, own_rules.other_ramp)]
    made[1].kind = made[0].kind
    table = sok.EmbeddingVariable(2, 8, initializer=made[0])
    np.testing.assert_array_equal(table.sparse_read([3, 4]), [[3, 4], [4, 5]])
    if world.size > 1:
        with pytest.raises(ValueError, match=saying("initializer 'ramp'", "all workers") if not world.rank else ""):
            sok.EmbeddingVariable(2, 8, initializer=made[min(world.rank, 1)])


def check_clipping_costs_one_collective_for_all_tables(world):
    tables = [sok.EmbeddingVariable(1, 8, name="counted", initializer="ones") for _ in range(3)]
    optimizer = sok.optimizers.SGD(0.5, clipnorm=1.0, nonfinite_gradients="raise")
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(lookup_rows(table, [1])) for table in tables)
    gradients = tape.gradient(loss, tables)
    with sok.trace() as trace:
        optimizer.apply_gradients(zip(gradients, tables, strict=True))
    assert trace.collectives == (1 if world.size > 1 else 0)
