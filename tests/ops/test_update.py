"""Gradients into the table. What the optimizer rules do over many steps is tested with the optimizers."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from sok.base import _ops
from tests.messages import saying
from tests.ops.tables import NativeTable
from tests.reference.initial_values import Initializer
from tests.reference.judge import assert_close, assert_same
from tests.reference.sparse_update import sum_duplicates

ZERO = Initializer("constant", 0.0)
HYPER = {
    "sgd": (0.5,),
    "adagrad": (0.5, 0.1, 1e-7),
    "lazy_adam": (0.5, 0.9, 0.99, 1e-7),
    "adam": (0.5, 0.9, 0.99, 1e-7),
}
RULES = tuple(HYPER)
# Floats per row and whether rows carry a stamp.
SLOTS = {"sgd": (0, False), "adagrad": (1, False), "lazy_adam": (2, False), "adam": (2, True)}


def apply(table, row_ids, grads, rule, **more):
    return table.apply(row_ids, grads, **({"rule": rule, "slot_set": rule, "hyper": HYPER[rule]} | more))


def run(call, f, *args):
    """Runs an op without outputs; a `tf.function` cannot return one."""

    def without_result(*args):
        f(*args)

    call(without_result, *args)


@pytest.mark.parametrize(
    "row_ids",
    [[], [3], [-1, -1], [5, 5, 5, 5], [4, -1, 2, 4, 0, -7, 2], range(50), [2**62, 0, 2**62]],
    ids=lambda ids: f"{len(ids)} ids",
)
@pytest.mark.parametrize("dim", [1, 4, 7])
def test_duplicates_are_summed_in_order_of_first_appearance(lib, call, rng, row_ids, dim):
    row_ids = np.array(list(row_ids), np.int64)
    values = rng.normal(size=(len(row_ids), dim)).astype(np.float32)
    got_ids, got_sums = call(lambda *args: tuple(lib.sok_sum_duplicates(*args)), tf.constant(row_ids), values)
    ids, sums = sum_duplicates(row_ids, values)
    assert_same(got_ids, ids)
    assert_close(got_sums, sums, scale=1)


def test_many_duplicates_are_summed_over_threads(lib, rng):
    row_ids = rng.zipf(1.2, 40_000) % 5_000 - 1
    values = rng.normal(size=(40_000, 8)).astype(np.float32)
    got_ids, got_sums = lib.sok_sum_duplicates(row_ids, values)
    ids, sums = sum_duplicates(row_ids, values)
    order, got_order = np.argsort(ids), np.argsort(got_ids)  # so many are not in order of first appearance
    assert_same(got_ids.numpy()[got_order], ids[order])
    assert_close(
        got_sums.numpy()[got_order], sums[order], scale=200
    )  # the most frequent id has thousands of addends of size 1, which cancel
    assert_same(lib.sok_sum_duplicates(row_ids, values)[1], got_sums)


def test_sum_duplicates_shapes_and_errors(lib):
    with tf.Graph().as_default():
        p = tf.compat.v1.placeholder
        ids, sums = lib.sok_sum_duplicates(p(tf.int64, [9]), p(tf.float32, [9, 4]))
        assert ids.shape.as_list() == [None] and sums.shape.as_list() == [None, 4]
        with pytest.raises(ValueError, match="rank 2"):
            lib.sok_sum_duplicates(p(tf.int64, [9]), p(tf.float32, [9]))
    for ids, values, text in (
        ([[1]], [[1.0]], "`row_ids` must have rank 1"),
        ([1], [1.0], "`values` must have rank 2"),
        ([1, 2], [[1.0]], r"`values` must have shape \[2,1\]. Received: \[1,1\]"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            lib.sok_sum_duplicates(np.array(ids, np.int64), np.array(values, np.float32))


def test_sgd_and_adagrad_take_one_step_per_distinct_row(call):
    table = NativeTable(dim=2, init=Initializer("constant", 1.0))
    row_ids = table.lookup([7, 8, 9])[1].numpy()
    ids, grads = row_ids[[0, 1, 0]], np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    run(call, lambda ids: apply(table, ids, grads, "sgd"), tf.constant(ids))
    assert_same(table.lookup([7, 8, 9])[0], [[-2.0, -3.0], [-0.5, -1.0], [1.0, 1.0]])
    run(call, lambda ids: apply(table, ids, grads, "adagrad", hyper=(1.0, 0.0, 0.0)), tf.constant(ids))
    # With an accumulator that starts at zero the first step is one learning rate long, against the gradient's sign.
    assert_same(table.lookup([7, 8, 9])[0], [[-3.0, -4.0], [-1.5, -2.0], [1.0, 1.0]])
    keys, slots, stamps = table.slots("adagrad")
    assert_same(keys, [7, 8, 9])
    assert_same(slots, [[36.0, 64.0], [9.0, 16.0], [0.0, 0.0]])
    assert_same(stamps, [-1, -1, -1])


@pytest.mark.parametrize("rule", RULES)
def test_duplicates_and_their_sum_give_the_same_update(rng, rule):
    row_ids = np.array([3, 0, 3, 3, 1, 0])
    grads = rng.integers(-8, 8, (6, 5)).astype(np.float32)  # whole numbers: their sums are exact
    tables = [NativeTable(dim=5), NativeTable(dim=5)]
    for table in tables:
        table.lookup(range(4))
    for step in (1, 2):
        apply(tables[0], row_ids, grads, rule, step=step)
        apply(tables[1], *sum_duplicates(row_ids, grads), rule, step=step)
    for got, expected in zip(
        tables[0].export() + tables[0].slots(rule), tables[1].export() + tables[1].slots(rule), strict=True
    ):
        assert_same(got, expected)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 5), st.integers(-9, 9)), max_size=30), st.sampled_from(RULES))
def test_an_update_does_not_depend_on_the_order_of_its_rows(pairs, rule):
    tables = [NativeTable(dim=1), NativeTable(dim=1)]
    for table, order in zip(tables, (pairs, pairs[::-1]), strict=True):
        table.lookup(range(6))
        apply(table, [i for i, _ in order], np.array([[g] for _, g in order], np.float32).reshape(-1, 1), rule)
    assert tables[0].as_dict() == tables[1].as_dict()


@pytest.mark.parametrize("rule", RULES)
def test_an_update_split_over_threads_is_the_same_for_every_row(rng, rule):
    n, dim = 6_000, 4
    table = NativeTable(dim=dim, init=ZERO)
    table.lookup(np.arange(n))
    grads = rng.normal(size=(3 * n, dim)).astype(np.float32)
    row_ids = rng.integers(-1, n, 3 * n)
    apply(table, row_ids, grads, rule)
    touched, sums = sum_duplicates(row_ids, grads)
    lr = HYPER[rule][0]
    got = table.lookup(touched, insert=False)[0].numpy()
    if rule == "sgd":
        assert_close(got, -lr * sums, scale=1)
    elif rule == "adagrad":
        assert_close(got, -lr * sums / np.sqrt(0.1 + sums**2), scale=1)
    else:  # the first step of Adam: bias correction undoes the means, up to epsilon / sqrt(1 - beta_2)
        assert_close(got, -lr * sums / (np.abs(sums) + 1e-6), scale=1, factor=10)
    untouched = np.setdiff1d(np.arange(n), touched)
    assert len(untouched) and not table.lookup(untouched)[0].numpy().any()


@pytest.mark.parametrize("rule", RULES)
def test_slots_start_as_the_rule_says(rule):
    table = NativeTable(dim=3)
    table.lookup([5, 6])
    apply(table, [], np.zeros((0, 3)), rule)
    table.lookup([7])  # made after the slots
    per_row, has_stamp = SLOTS[rule]
    keys, slots, stamps = table.slots(rule)
    assert_same(keys, [5, 6, 7])
    assert slots.shape == (3, per_row * 3)
    assert_same(slots, np.full(slots.shape, np.float32(0.1 if rule == "adagrad" else 0.0)))
    assert_same(stamps, np.full(3, 1 if has_stamp else -1))


def test_rows_keep_their_values_and_ids_when_slots_are_added(rng):
    table = NativeTable(dim=5)
    keys = rng.permutation(3_000)
    before, ids = table.lookup(keys)
    for rule in ("adagrad", "lazy_adam", "adam"):
        apply(table, [], np.zeros((0, 5)), rule)
        rows, row_ids = table.lookup(keys, insert=False)
        assert_same(rows, before)
        assert_same(row_ids, ids)


def test_slot_sets_do_not_disturb_one_another(rng):
    grads = rng.normal(size=(2, 3)).astype(np.float32)
    alone, both = NativeTable(dim=3), NativeTable(dim=3)
    for table in (alone, both):
        table.lookup([1, 2])
        apply(table, [0], grads[:1], "adagrad", slot_set="first")
    apply(both, [1], grads[1:], "adagrad", slot_set="second", hyper=(0.5, 0.7, 0.0))
    assert_same(both.slots("first")[1], alone.slots("first")[1])
    second = both.slots("second")[1]
    assert_same(second[0], np.full(3, np.float32(0.7)))
    assert_close(second[1], 0.7 + grads[1].astype(np.float64) ** 2)


def test_a_slot_set_belongs_to_one_rule():
    table = NativeTable(dim=1, name="shop")
    table.lookup([1])
    apply(table, [0], [[1.0]], "adagrad", slot_set="mine")
    before = table.as_dict()
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("table 'shop'", "slot set 'mine'", "another rule")):
        apply(table, [0], [[1.0]], "sgd", slot_set="mine")
    assert table.as_dict() == before


def test_untouched_rows_move_with_adam_and_rest_with_lazy_adam():
    lr, beta_1, beta_2, epsilon = HYPER["adam"]
    for rule in ("adam", "lazy_adam"):
        table = NativeTable(dim=1, init=ZERO)
        table.lookup([1, 2])
        apply(table, [0], [[2.0]], rule, step=1)
        first = table.lookup([1])[0].numpy().item()
        apply(table, [1], [[2.0]], rule, step=2)
        # Keras: alpha_t = lr sqrt(1 - beta_2^t) / (1 - beta_1^t), w -= alpha_t m / (sqrt(v) + epsilon).
        m, v = beta_1 * (1 - beta_1) * 2.0, beta_2 * (1 - beta_2) * 4.0
        alpha = lr * np.sqrt(1 - beta_2**2) / (1 - beta_1**2)
        moved = first - alpha * m / (np.sqrt(v) + epsilon) if rule == "adam" else first
        for _ in range(2):  # reading replays, and must not replay twice
            assert_close(table.lookup([1])[0].numpy().item() * np.ones(1, np.float32), [moved], scale=0.1)
        slots = table.slots(rule)
        expected = [m, v] if rule == "adam" else [0.2, 0.04]
        assert_close(slots[1][0], expected, scale=0.1)
        assert_same(slots[2], [2, 2] if rule == "adam" else [-1, -1])
        assert_close(table.export()[1][0], [moved], scale=0.1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_gradients_raise_or_skip_or_pass(rule, bad):
    ids, grads = [0, 1, 1, 2], np.array([[1.0, 1.0], [1.0, 1.0], [1.0, bad], [1.0, 1.0]])
    clean = NativeTable(dim=2, name="shop")
    clean.lookup([70, 80, 90])
    fresh = clean.as_dict()
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("table 'shop'", "key 80", "NaN")):
        apply(clean, ids, grads, rule, nonfinite="raise")
    assert clean.as_dict() == fresh
    apply(clean, [0, 2], grads[[0, 3]], rule)

    skipped = NativeTable(dim=2)
    skipped.lookup([70, 80, 90])
    apply(skipped, ids, grads, rule, nonfinite="skip")
    assert skipped.as_dict() == clean.as_dict()
    assert skipped.as_dict()[80] == fresh[80] and skipped.as_dict()[70] != fresh[70]

    allowed = NativeTable(dim=2)
    allowed.lookup([70, 80, 90])
    apply(allowed, ids, grads, rule, nonfinite="allow")
    assert not np.all(np.isfinite(allowed.as_dict()[80]))
    assert allowed.as_dict()[70] == clean.as_dict()[70]


def test_a_sum_that_overflows_counts_as_not_finite():
    table = NativeTable(dim=1)
    table.lookup([4, 5])
    before = table.as_dict()
    grads = np.array([[3e38], [3e38]], np.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="gradient of key 5"):
        apply(table, [1, 1], grads, "sgd", nonfinite="raise")
    apply(table, [1, 1], grads, "sgd", nonfinite="skip")
    assert table.as_dict() == before


def test_negative_row_ids_are_ignored_even_when_not_finite():
    table = NativeTable(dim=1)
    table.lookup([4])
    before = table.as_dict()
    apply(table, [-1, -5], [[np.nan], [1.0]], "sgd", nonfinite="raise")
    assert table.as_dict() == before


# An identity table has a place for every row id below its capacity.
@pytest.mark.parametrize(("hashed", "row_id"), [(True, 2), (True, 10), (True, 2**40), (False, 10), (False, 2**40)])
def test_row_ids_that_do_not_exist_are_refused(hashed, row_id):
    table = NativeTable(dim=1, capacity=10, hashed=hashed, name="shop")
    table.lookup([0, 1])
    before = table.as_dict()
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f"table 'shop'.*row id {row_id}, which this shard does not"
    ):
        apply(table, [0, row_id], [[1.0], [1.0]], "sgd")
    assert table.as_dict() == before


def test_an_update_of_an_empty_table_changes_nothing(call):
    table = NativeTable(dim=2)
    run(call, lambda ids: apply(table, ids, np.zeros((0, 2)), "adam"), tf.zeros([0], tf.int64))
    assert table.size() == 0


def test_wrong_arguments_are_named():
    table = NativeTable(dim=2)
    table.lookup([0])
    grads = [[1.0, 1.0]]
    cases = [
        (lambda: apply(table, [0], [[1.0]], "sgd"), r"`grads` must have shape \[1,2\]. Received: \[1,1\]"),
        (lambda: apply(table, [0, 0], grads, "sgd"), r"`grads` must have shape \[2,2\]. Received: \[1,2\]"),
        (lambda: apply(table, [[0]], grads, "sgd"), "`row_ids` must have rank 1"),
        (
            lambda: apply(table, [0], grads, "sgd", hyper=(1.0, 2.0)),
            "'sgd' .*1 values.*: 2",
        ),
        (lambda: apply(table, [0], grads, "adagrad", hyper=(1.0,)), "'adagrad' .*3 values"),
        (lambda: apply(table, [0], grads, "adam", hyper=[[1.0] * 4]), "`hyper` must have rank 1"),
        (lambda: apply(table, [0], grads, "adam", step=0), "step must be at least 1. Received: 0"),
        (lambda: apply(table, [0], grads, "adam", hyper=(1.0, 1.0, 0.9, 1e-7)), r"beta_1 must lie in \[0, 1\)"),
        (lambda: apply(table, [0], grads, "adam", hyper=(1.0, 0.9, -0.1, 1e-7)), r"beta_2 must lie in \[0, 1\)"),
        (lambda: apply(table, [0], grads, "sgd", step=[1]), "`step` must have rank 0"),
    ]
    before = table.as_dict()
    for case, text in cases:
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            case()
    for more in ({"rule": "rmsprop"}, {"nonfinite": "warn"}):
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=next(iter(more.values()))):
            table.apply([0], grads, **more)
    assert table.as_dict() == before


def test_lookup_gradient_and_update_train_a_row(call):
    table = NativeTable(dim=1, init=ZERO)
    lib = _ops.lib()

    def step(keys):
        with tf.GradientTape() as tape:
            tape.watch(table.handle)
            loss = tf.reduce_sum((table.lookup(keys)[0] - 3.0) ** 2)
        grad = tape.gradient(loss, table.handle)
        with tf.control_dependencies([loss]):
            done = lib.sok_group_apply(
                [table.handle],
                [grad.indices],
                [grad.values],
                tf.constant(1, tf.int64),
                tf.constant([0.125], tf.float64),
                rule="sgd",
                slot_set="sgd",
                distinct=[False],
            )
        with tf.control_dependencies([done] if done is not None else []):
            return tf.identity(loss)

    keys = tf.constant([5, 5, 6], tf.int64)
    losses = [float(call(step, keys)) for _ in range(3)]
    # Key 5 occurs twice: its distance to 3 halves each step, that of key 6 falls by a quarter.
    expected = [2 * 9 * 0.25**k + 9 * 0.5625**k for k in range(3)]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
