"""Admission and eviction of one worker's table, beside a twin of dicts: tests/reference/policies.py."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import sok
from sok.lookup.lookup import lookup_rows
from sok.table.state import count_step, slot_sets
from tests.messages import saying
from tests.reference.policies import PolicyTable, hash_key, is_drawn
from tests.sok.policy_cases import DIM, KEYS, Both, counts_of, random_batches, twin_of

POLICIES = {
    "after": {"admission": sok.Admission(after=3)},
    "probability": {"admission": sok.Admission(probability=0.5)},
    "older_than": {"eviction": sok.Eviction(older_than=4, every=2)},
    "norm_below": {"eviction": sok.Eviction(norm_below=0.4, every=3)},
    "all": {"admission": sok.Admission(after=2), "eviction": sok.Eviction(older_than=5, norm_below=0.2, every=1)},
}


def do(both: Both, what: int, rng: np.random.Generator, folder) -> None:
    """One of the things that happen to a table; most of them are steps."""
    keys = rng.choice(KEYS, 3, replace=False)
    if what == 0:
        both.assign(keys)
    elif what == 1:
        both.erase(keys)
    elif what == 2:
        both.evaluate(rng.choice(KEYS, [2, 3]))
    elif what == 3:
        both.save_and_restore(folder, lambda: both.train(random_batches(rng, 1)))
    else:
        both.train(random_batches(rng, 1))


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("policies", POLICIES)
def test_a_long_program_leaves_what_its_twin_has(tmp_path, policies, in_function):
    rule = "adam" if policies in ("all", "after") else "sgd"
    both = Both.make(rule, in_function, **POLICIES[policies])
    rng = np.random.default_rng(list(POLICIES).index(policies))
    restored = False
    for number in range(40):
        what = int(rng.integers(0, 12))
        do(both, what, rng, tmp_path / str(number))
        restored = restored or what == 3
        both.check(with_counts=not restored)
    # The program met what it is here for.
    assert both.twin.rows and (both.twin.refused > 0) == ("admission" in POLICIES[policies])
    assert (both.twin.evicted > 0) == ("eviction" in POLICIES[policies])
    assert both.traces == 1 or not in_function or both.traces < 6


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(["sgd", "adam"]),
    st.lists(st.integers(0, 7).filter(lambda what: what != 3), max_size=12),
    st.integers(0, 2**32),
)
def test_any_program_leaves_what_its_twin_has(policies, rule, program, seed):
    both, rng = Both.make(rule, **POLICIES[policies]), np.random.default_rng(seed)
    for what in program:
        do(both, what, rng, None)
    both.check()


def single(*keys):
    return [[np.array(keys, np.int64)]]


def test_the_nth_occurrence_gives_a_key_its_row_before_it_is_read():
    table = sok.EmbeddingVariable(DIM, 10, name="nth", initializer="ones", admission=sok.Admission(after=2))
    optimizer = sok.optimizers.SGD(1.0)

    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(lookup_rows(table, tf.constant(keys, tf.int64)))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return table.sparse_read(tf.constant([7], tf.int64)).numpy()[0, 0]

    assert step([7, 7, 7]) == 1.0  # three times in one step are one occurrence; its gradient is dropped
    assert counts_of(table) == {"rows": 0, "candidates": 1, "made": 0, "refused": 3, "evicted": 0}
    assert step([7]) == 0.0  # the second one has a row, and the gradient finds it
    assert counts_of(table) == {"rows": 1, "candidates": 0, "made": 1, "refused": 3, "evicted": 0}
    assert [array.tolist() for array in map(np.asarray, table.history([7, 8]))] == [[2, 0], [2, 0]]


def test_lookups_that_are_no_training_count_nothing():
    both = Both.make(**POLICIES["after"])
    both.train(single(5, 8))
    for _ in range(5):
        both.evaluate(np.array([5, 8, 13]))
        both.table.sparse_read(tf.constant([5], tf.int64))
    both.check()
    assert both.twin.candidates == {5: [1, 1], 8: [1, 1]}


def test_several_lookups_of_a_step_are_one_occurrence():
    both = Both.make(**POLICIES["after"])
    for _ in range(3):
        both.look_up([tf.constant([5, 8], tf.int64)])  # no update comes: it is all of one step
        both.twin.look_up([5, 8])
    both.check()
    both.train(single(5))
    both.train(single(5))
    both.check()
    assert both.twin.history([5, 8]) == ([2, 1], [2, 1])


def test_features_of_one_lookup_share_the_row_that_the_first_of_them_makes():
    both = Both.make(admission=sok.Admission(after=2))
    keys = np.array([5, 8, 5], np.int64)
    for _ in range(3):
        both.train([[keys, keys[:, None], keys]])  # two features in one op, and another op
        both.check()
    assert both.twin.stats() == {"rows": 2, "candidates": 0, "made": 2, "refused": 9, "evicted": 0}


@pytest.mark.parametrize("probability", [2.0**-64, 0.25, 0.7, 1.0])
def test_who_is_drawn_is_a_function_of_seed_and_key(probability):
    keys = np.random.default_rng(0).integers(-(2**62), 2**62, 400)
    for seed in (0, 5, -1):
        table = sok.EmbeddingVariable(
            1, 1000, name="drawn", seed=seed, admission=sok.Admission(probability=probability)
        )
        for _ in range(2):
            lookup_rows(table, tf.constant(keys))
        drawn = {int(key) for key in keys if is_drawn(int(key), table.seed, probability)}
        assert set(table.export()[0].numpy().tolist()) == drawn
        assert abs(len(drawn) - 400 * probability) < 60
        stats = table.stats()
        assert (stats["rows"], stats["refused"], stats["candidates"]) == (len(drawn), 2 * (400 - len(drawn)), 0)


def test_uint64_keys_are_drawn_by_their_words():
    keys = np.array([0, 1, 2**63, 2**64 - 1, 2**64 - 7, 12345], np.uint64)
    admission = sok.Admission(probability=0.5)
    table = sok.EmbeddingVariable(1, 10, name="words", key_dtype="uint64", seed=3, admission=admission)
    lookup_rows(table, tf.constant(keys))
    assert set(table.export()[0].numpy().tolist()) == {int(k) for k in keys if is_drawn(int(k), table.seed, 0.5)}


def test_the_twin_hashes_as_others_do():
    """Values of the finaliser by hand: a bijection that moves zero nowhere."""
    assert hash_key(0) == 0 and len({hash_key(key) for key in range(1000)}) == 1000
    assert hash_key(1) == 0x5692161D100B05E5


def test_rows_leave_at_the_age_that_was_said_and_come_again_fresh():
    both = Both.make(eviction=sok.Eviction(older_than=3, every=1))
    both.train(single(5, 8))
    trained = both.twin.rows[5].values.copy()
    both.train(single(8))
    both.train(single(8))
    both.check()
    assert 5 in both.twin.rows  # step 3 - last 1 is 2
    both.train(single(8))
    both.check()
    assert 5 not in both.twin.rows and both.twin.evicted == 1
    both.evaluate(np.array([5]))
    both.train(single(5))
    both.check()
    assert both.twin.rows[5].count == 1 and not np.allclose(trained, both.twin.fresh(5))


def test_a_pass_comes_after_every_few_updates_and_not_between():
    both = Both.make(eviction=sok.Eviction(older_than=1, every=4))
    for step in range(1, 9):
        both.train(single(step))
        both.check()
        assert len(both.twin.rows) == {4: 1, 8: 1}.get(step, step % 4 + (step > 4))


def test_an_assigned_row_ages_from_the_first_pass_on():
    both = Both.make(eviction=sok.Eviction(older_than=3, every=2))
    both.assign(np.array([5]))
    both.check()
    assert both.twin.history([5]) == ([0], [0])
    lasts = []
    for _ in range(6):
        both.train(single(8))
        both.check()
        lasts.append(both.twin.history([5])[1][0])
    assert lasts == [0, 2, 2, 2, 2, 0] and 5 not in both.twin.rows


def test_a_gradient_from_before_an_eviction_is_dropped():
    both = Both.make(eviction=sok.Eviction(older_than=1, every=1))
    both.train(single(5))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(lookup_rows(both.table, tf.constant([8], tf.int64)))
    gradient = tape.gradient(loss, both.table)
    both.twin.look_up([8])
    both.train(single(5))  # the row of 8 is of this step, too: it stays
    both.train(single(5))  # and now it leaves
    both.check()
    assert 8 not in both.twin.rows
    both.train(single(8))  # a fresh row, perhaps in the same place
    both.optimizer.apply_gradients([(gradient, both.table)])
    both.twin.update("sgd", {})
    both.check()


def test_old_candidates_are_forgotten():
    both = Both.make(admission=sok.Admission(after=3), eviction=sok.Eviction(older_than=2, every=1))
    for keys in ([5], [5], [8], [8], [5], [5]):
        both.train(single(*keys))
        both.check()
    assert 5 not in both.twin.rows  # two, forgotten, and two again
    both.train(single(5))
    both.check()
    assert 5 in both.twin.rows and both.twin.evicted == 0


def test_norms_are_those_after_the_step_of_an_exact_adam():
    """Rows that no batch holds move by their moments, and fall below the norm in a step that does not know them."""
    both = Both.make("adam", eviction=sok.Eviction(norm_below=0.1, every=1))
    values = np.full([2, DIM], [[-0.25], [0.6]], np.float32)
    both.table.assign([5, 8], values)
    both.twin.assign([5, 8], values)
    both.train(single(5, 8))
    left = []
    for _ in range(12):
        both.train(single(8))
        both.check()
        left.append(5 in both.twin.rows)
    assert left[0] and not left[-1] and 8 in both.twin.rows


def test_an_erased_key_begins_anew():
    both = Both.make(admission=sok.Admission(after=2))
    both.train(single(5, 8))
    both.erase(np.array([5]))  # a candidate
    both.check()
    both.train(single(5, 8))
    both.check()
    assert set(both.twin.rows) == {8} and both.twin.candidates == {5: [1, 2]}
    both.erase(np.array([8]))  # a row
    both.train(single(5, 8))
    both.check()
    assert set(both.twin.rows) == {5} and both.twin.candidates == {8: [1, 3]}


def test_assigned_keys_have_rows_whatever_the_count():
    both = Both.make(admission=sok.Admission(after=5))
    both.train(single(5))
    both.assign(np.array([5, 8]))
    both.check()
    both.train(single(5, 8))
    both.check()
    assert both.twin.refused == 1 and set(both.twin.rows) == {5, 8}
    drawn = Both.make(admission=sok.Admission(probability=2.0**-64))
    drawn.assign(KEYS[:3])
    drawn.train(single(*KEYS[:5].tolist()))
    drawn.check()
    assert set(drawn.twin.rows) == set(KEYS[:3].tolist())


def test_a_shard_has_room_for_its_capacity_of_rows_and_candidates_take_none():
    table = sok.EmbeddingVariable(DIM, 3, name="narrow", admission=sok.Admission(after=2))
    many = tf.range(50, dtype=tf.int64)
    lookup_rows(table, many)
    assert table.stats()["candidates"] == 50
    count_step([table])
    with pytest.raises(tf.errors.ResourceExhaustedError, match="narrow"):
        lookup_rows(table, many)
    lookup_rows(table, many[:3])
    assert table.stats()["rows"] == 3


def test_a_table_of_row_numbers_evicts_and_does_not_admit():
    both = Both.make(hashed=False, eviction=sok.Eviction(older_than=2, every=1))
    for keys in ([5, 8], [8], [8], [5]):
        both.train(single(*keys))
        both.check()
    assert both.twin.evicted == 1
    with pytest.raises(ValueError, match=saying("`admission`", "hashed")):
        sok.EmbeddingVariable(DIM, 10, hashed=False, admission=sok.Admission(after=2))


def test_a_table_without_policies_keeps_no_history():
    table = sok.EmbeddingVariable(DIM, 10, name="without")
    lookup_rows(table, tf.constant([5, 8], tf.int64))
    assert slot_sets(table) == []
    assert table.stats() == {"rows": 2, "candidates": 0, "made": 2, "refused": 0, "evicted": 0}
    with pytest.raises(tf.errors.FailedPreconditionError, match=saying("'without'", "neither admission nor eviction")):
        table.history([5])


def test_the_history_is_in_the_record_as_slots_are():
    both = Both.make(**POLICIES["older_than"])
    both.train(single(5, 8))
    (slots,) = (found for found in slot_sets(both.table) if found.name == "history")
    assert (slots.rule, slots.num_slots) == ("history(;count,last)", 2)
    keys, values, _ = (tensor.numpy() for tensor in both.table.slots("history"))
    assert dict(zip(keys.tolist(), values.view(np.uint32).tolist(), strict=True)) == {5: [1, 1], 8: [1, 1]}


def test_twins_that_differ_are_told_apart():
    """The judge judges: a twin of another rule does not pass."""
    both = Both.make(**POLICIES["after"])
    both.twin = PolicyTable(DIM, both.table.seed, after=2)
    both.train(single(5))
    both.check()
    with pytest.raises(AssertionError):
        both.train(single(5))
        both.check()
    assert twin_of(both.table).after == 3
