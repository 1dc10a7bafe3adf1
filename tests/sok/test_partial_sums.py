"""Rows that come home as partial sums, on workers that are threads here: the same results, and which way is chosen."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sok
from sok.lookup.feature import Csr, Feature
from sok.lookup.lookup import lookup_group
from sok.table.table import EmbeddingVariable
from tests.group_features import FEATURES, TABLES, lookup_pooled
from tests.messages import saying
from tests.reference.exchange import ANSWER_HEADER
from tests.reference.judge import assert_close, assert_same
from tests.sok.test_exchange import assert_one_worker_gives_the_same, draw
from tests.sok.threads_world import checked, run_world

_numbers = itertools.count()

SUMS, AUTO, MIXED = ["sums"] * 4, ["auto"] * 4, ["sums", "auto", "rows", "sums"]


@pytest.mark.parametrize("ways", [SUMS, AUTO, MIXED], ids=["sums", "auto", "mixed"])
@pytest.mark.parametrize(
    ("size", "owners"), [(2, None), (3, None), (4, None), (2, [1, None, 1, 0]), (3, [None, 0, 2, 2])]
)
def test_every_way_gives_what_one_worker_gives(size, owners, ways, rng, monkeypatch):
    segments = [7, 0, 12, 3][:size]  # the second has no samples
    assert_one_worker_gives_the_same([draw(rng, s) for s in segments], rng, monkeypatch, owners, ways)


def inputs_of(rng, lengths, num_keys):
    inputs = []
    for table, _, weighted in FEATURES:
        n = int(np.sum(lengths))
        keys = rng.integers(0, num_keys, n).astype(TABLES[table][1].as_numpy_dtype)
        weights = rng.uniform(0.5, 2, n).astype(np.float32) if weighted else None
        inputs.append((keys, np.array(lengths, int), weights))
    return inputs


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.lists(st.integers(0, 12), max_size=6), min_size=2, max_size=4),
    num_keys=st.sampled_from([1, 5, 200]),
    ways=st.lists(st.sampled_from(["auto", "rows", "sums"]), min_size=4, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_segments_of_any_lengths_give_what_one_worker_gives(lengths, num_keys, ways, seed, monkeypatch):
    rng = np.random.default_rng(seed)
    parts = [inputs_of(rng, of_rank, num_keys) for of_rank in lengths]
    assert_one_worker_gives_the_same(parts, rng, monkeypatch, ways=ways)


@pytest.mark.parametrize("lengths", [[[2, 0, 0], [0, 0]], [[0, 0], [0]], [[0, 3, 0, 0], [9]]])
def test_empty_segments_are_zeros_wherever_they_stand(lengths, rng, monkeypatch):
    parts = [inputs_of(rng, of_rank, 50) for of_rank in lengths]
    assert_one_worker_gives_the_same(parts, rng, monkeypatch, ways=SUMS)


def asked_of(features, monkeypatch, **of_table):
    """Rows that rank 0 of two gets from each for `features` (keys [S, hotness], combiner) of one table of dim 4."""
    name, found = f"asked_{next(_numbers)}", []

    def program(transport):
        table = EmbeddingVariable(4, 10**6, name=name, **of_table)
        send = transport.all_to_all

        def all_to_all(x, splits, name):
            home, home_splits = send(x, splits, name)
            if transport.rank == 0 and name.endswith("rows"):
                found.append(home_splits.numpy())
            return home, home_splits

        transport.all_to_all = all_to_all
        csrs = [
            Csr(tf.constant(np.ravel(keys), tf.int64), tf.range(len(keys) + 1, dtype=tf.int64) * keys.shape[1])
            for keys, _ in features
        ]
        pooled = lookup_group([Feature(table, csr, c) for csr, (_, c) in zip(csrs, features, strict=True)])[0]
        keys, combiner = features[0]
        rows = table.sparse_read(tf.constant(keys)).numpy()
        assert_close(pooled, rows.mean(1) if combiner == "mean" else rows.sum(1), scale=100)

    with monkeypatch.context() as m:
        checked(run_world(2, program, m))
    return ((found[0] - ANSWER_HEADER) // 4).tolist()


DISTINCT = np.arange(400).reshape(8, 50)  # fifty keys per sample, none twice
REPEATED = np.tile(np.arange(50), (8, 1))  # the same fifty in each sample


@pytest.mark.parametrize(
    ("keys", "options", "rows"),
    [
        (DISTINCT, {}, [8, 8]),  # one sum per sample and owner, not 200 rows
        (DISTINCT, {"way_home": "rows"}, [200, 200]),
        (DISTINCT, {"owner": 1}, [0, 8]),  # one sum per sample
        (DISTINCT * 2, {}, [8, 0]),
        (REPEATED, {"way_home": "sums"}, [8, 8]),
        (REPEATED[:, :2], {}, [1, 1]),  # two rows for eight samples
        (REPEATED[:, :2], {"way_home": "sums"}, [8, 8]),
        (DISTINCT[:, :1], {}, [8, 0]),
        (DISTINCT[:, :1], {"way_home": "sums"}, [8, 0]),
    ],
)
def test_the_way_that_moves_less_is_chosen(keys, options, rows, monkeypatch):
    for combiner in ("sum", "mean"):
        assert asked_of([(keys, combiner)], monkeypatch, **options) == rows


def test_features_that_cannot_be_summed_leave_the_others_their_way(monkeypatch):
    # 400 keys summed beside rows of eight of them: eight sums and four rows from each owner.
    assert asked_of([(DISTINCT, "sum"), (DISTINCT[:, :1] // 50, "rows")], monkeypatch) == [12, 12]
    # Rows that are there anyway cost nothing more.
    assert asked_of([(DISTINCT, "sum"), (DISTINCT, "rows")], monkeypatch) == [200, 200]


def test_gradients_of_weights_flow_beside_partial_sums(monkeypatch):
    keys, splits = tf.constant([1, 2, 3, 1], tf.int64), tf.constant([0, 3, 4], tf.int64)

    def program(transport):
        table = EmbeddingVariable(3, 100, name="weighted_beside", way_home="sums")
        weights = tf.Variable([1.0, 2.0, 0.5, 3.0])
        with tf.GradientTape() as tape:
            a, b = lookup_group(
                [Feature(table, Csr(keys, splits), "mean"), Feature(table, Csr(keys, splits, weights), "mean")]
            )
            loss = tf.reduce_sum(a * b)
        of_weights = tape.gradient(loss, weights)
        rows = table.sparse_read(keys)
        with tf.GradientTape() as tape:
            w = tf.convert_to_tensor(weights)
            tape.watch(w)
            mean = tf.stack([tf.reduce_sum(w[:3, None] * rows[:3], 0) / tf.reduce_sum(w[:3]), rows[3]])
            expected = tf.reduce_sum(mean * tf.stack([tf.reduce_mean(rows[:3], 0), rows[3]]))
        assert_close(loss, expected)
        assert_close(of_weights, tape.gradient(expected, w), scale=10)

    checked(run_world(2, program, monkeypatch))


def test_keys_that_are_not_there_read_as_their_initial_value(monkeypatch):
    def program(transport):
        table = EmbeddingVariable(2, 100, name="unseen_sums", way_home="sums")
        csr = Csr(tf.constant([1, 2, 1, 5], tf.int64), tf.constant([0, 3, 4], tf.int64))
        pooled = lookup_pooled(table, csr, "sum", training=False)
        rows = table.sparse_read(csr.keys).numpy()
        assert int(table.size()) == 0
        assert_close(pooled, [rows[:3].sum(0), rows[3]])

    checked(run_world(2, program, monkeypatch))


def test_a_shard_with_room_for_the_distinct_keys_is_not_full(monkeypatch):
    """An owner is asked for keys that nobody has made distinct: twelve of two, where it has room for two."""

    def program(transport):
        table = EmbeddingVariable(2, 2, name="tight_sums", way_home="sums", initializer="ones")
        csr = Csr(tf.constant([0, 1, 2, 3] * 3, tf.int64), tf.constant([0, 5, 12], tf.int64))
        assert_same(lookup_pooled(table, csr, "sum"), [[5.0, 5.0], [7.0, 7.0]])
        assert int(table.size()) == 2
        more = Csr(tf.constant([0, 1, 5], tf.int64), tf.constant([0, 3], tf.int64))
        with pytest.raises(tf.errors.ResourceExhaustedError, match=saying("rank 1 could not answer", "full")):
            lookup_pooled(table, more, "sum")
        assert int(table.size()) == 2
        return lookup_pooled(table, csr, "mean").numpy()

    for result in checked(run_world(2, program, monkeypatch)):
        assert_close(result, np.ones([2, 2]))


def test_a_new_key_of_a_nearly_full_table_is_stored_once_for_all(monkeypatch):
    def program(transport):
        table = EmbeddingVariable(2, 3, name="nearly_full_sums", way_home="sums", initializer="ones")
        csr = Csr(tf.constant([0, 2, 0, 4], tf.int64), tf.constant([0, 2, 4], tf.int64))
        for _ in range(2):
            assert_same(lookup_pooled(table, csr, "sum"), [[2.0, 2.0], [2.0, 2.0]])
        return int(table.size())

    assert checked(run_world(2, program, monkeypatch)) == [3, 0]


def test_bad_keys_and_limits_are_told_to_all(monkeypatch):
    def program(transport):
        table = EmbeddingVariable(2, 10, name="identity_sums", hashed=False, way_home="sums")
        good = Csr(tf.constant([0, 3], tf.int64), tf.constant([0, 2], tf.int64))
        bad = Csr(tf.constant([0, 20], tf.int64), tf.constant([0, 2], tf.int64))
        mine = bad if transport.rank == 1 else good
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=saying("input of rank 1", "key 20 is outside [0, 20)")
        ):
            lookup_pooled(table, mine, "sum")
        with pytest.raises(tf.errors.InvalidArgumentError, match="more than max_nnz = 1"):
            lookup_group([Feature(table, good, "sum", max_nnz=1)])
        assert int(table.size()) == 0
        return lookup_pooled(table, good, "sum").shape

    assert checked(run_world(2, program, monkeypatch)) == [[1, 2]] * 2


def test_ranks_may_choose_different_ways(monkeypatch):
    def program(transport):
        table = EmbeddingVariable(2, 100, name="one_each", way_home="sums" if transport.rank else "rows")
        csr = Csr(tf.constant([0, 1, 2, 1], tf.int64), tf.constant([0, 3, 4], tf.int64))
        with tf.GradientTape() as tape:
            pooled = lookup_pooled(table, csr, "sum")
            loss = tf.reduce_sum(pooled)
        gradient = tape.gradient(loss, table)
        rows = table.sparse_read(csr.keys).numpy()
        assert_close(pooled, [rows[:3].sum(0), rows[3]])
        keys = table.export()[0].numpy()[gradient.indices.numpy()]
        return {int(key): g.tolist() for key, g in zip(keys, gradient.values.numpy(), strict=True)}

    of_even, of_odd = checked(run_world(2, program, monkeypatch))
    assert of_even == {0: [2.0, 2.0], 2: [2.0, 2.0]} and of_odd == {1: [4.0, 4.0]}


def test_an_optimizer_trains_the_same_rows_either_way(rng, monkeypatch):
    keys = [rng.integers(0, 30, 60) for _ in range(2)]

    def trained(way, monkeypatch):
        def program(transport):
            table = EmbeddingVariable(3, 100, name=f"trained_{way}", way_home=way, seed=1)
            optimizer = sok.optimizers.Adagrad(0.1)
            csr = Csr(tf.constant(keys[transport.rank], tf.int64), tf.range(0, 61, 10, tf.int64))
            for _ in range(3):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(lookup_pooled(table, csr, "mean") ** 2)
                optimizer.apply_gradients([(tape.gradient(loss, table), table)])
            return dict(zip(table.export()[0].numpy().tolist(), table.export()[1].numpy(), strict=True))

        with monkeypatch.context() as m:
            return {k: row for of_rank in checked(run_world(2, program, m)) for k, row in of_rank.items()}

    by_rows, by_sums = trained("rows", monkeypatch), trained("sums", monkeypatch)
    assert set(by_rows) == set(by_sums) == set(np.concatenate(keys).tolist())
    for key, row in by_rows.items():
        assert_close(by_sums[key], row, scale=10)


@pytest.mark.parametrize("way", ["Sums", None, ["rows"], 1])
def test_a_way_that_there_is_not_is_refused(way):
    with pytest.raises(ValueError, match=saying("`way_home`", "'auto'", "'rows'", "'sums'")):
        sok.TableOptions(way_home=way)


def test_a_table_says_its_way_home():
    assert EmbeddingVariable(2, 10, name="homing").way_home == "auto"
    table = EmbeddingVariable(2, 10, name="homing", way_home="sums")
    assert table.way_home == "sums" and "home by sums" in repr(table)
