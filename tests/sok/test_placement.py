"""Tables that lie on one worker whole."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import sok
from sok.placement import balance_tables
from tests.sok.threads_world import checked, run_world


@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 3))
def test_no_worker_has_more_than_four_thirds_of_the_best(costs, world):
    def largest(owners):
        return max(sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(world))

    owners = balance_tables(costs, world)
    assert all(0 <= owner < world for owner in owners)
    best = min(largest(choice) for choice in itertools.product(range(world), repeat=len(costs)))
    assert 3 * largest(owners) <= 4 * best


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_costs_are_checked(cost):
    with pytest.raises(ValueError, match=r"`costs\[1\]` must be finite"):
        balance_tables([1.0, cost], 2)
    with pytest.raises(ValueError, match="`world_size` must be at least 1"):
        balance_tables([1.0], 0)


@pytest.mark.parametrize("owner", [-1, 1, True, 0.0])
def test_an_owner_is_a_rank(owner):
    with pytest.raises(ValueError, match="`owner` must be None or a rank in"):
        sok.EmbeddingVariable(2, 10, owner=owner)


@pytest.mark.parametrize("hashed", [True, False])
def test_rows_written_from_anywhere_arrive_at_the_owner(hashed, monkeypatch):
    values = np.arange(12, dtype=np.float32).reshape(6, 2)

    def program(transport):
        table = sok.EmbeddingVariable(2, 6, name=f"whole_{hashed}", hashed=hashed, owner=1)
        table.assign(tf.range(6, dtype=tf.int64), values)
        read = table.sparse_read(tf.constant([5, 0], tf.int64)).numpy()
        return int(table.size()), read, repr(table)

    for rank, (size, read, text) in enumerate(checked(run_world(3, program, monkeypatch))):
        assert size == (6 if rank == 1 else 0)
        np.testing.assert_array_equal(read, values[[5, 0]])
        assert "all on rank 1 of 3" in text


def test_an_identity_table_on_one_worker_has_its_capacity_of_keys(monkeypatch):
    def program(transport):
        table = sok.EmbeddingVariable(2, 6, name="bounded", hashed=False, owner=1)
        return table.sparse_read(tf.constant([6 if transport.rank == 0 else 0], tf.int64))

    for error in run_world(2, program, monkeypatch):
        assert isinstance(error, tf.errors.InvalidArgumentError)
        assert "key 6 is outside [0, 6) = [0, capacity per worker)" in error.message


def test_workers_that_disagree_about_the_owner_notice(monkeypatch):
    def program(transport):
        table = sok.EmbeddingVariable(2, 6, name="disputed", owner=transport.rank)
        return table.sparse_read(tf.constant([1], tf.int64))

    for error in run_world(2, program, monkeypatch):
        assert isinstance(error, tf.errors.FailedPreconditionError)


@pytest.mark.parametrize("owner", [None, 1])
@pytest.mark.parametrize("key", [7, -1])
def test_a_table_of_fewer_keys_than_there_is_room_for_refuses_the_others(owner, key, monkeypatch):
    def program(transport):
        table = sok.EmbeddingVariable(2, 10, name="short", hashed=False, num_keys=7, owner=owner)
        table.sparse_read(tf.range(7, dtype=tf.int64))
        return table.sparse_read(tf.constant([key if transport.rank == 0 else 0], tf.int64))

    for error in run_world(2, program, monkeypatch):
        assert isinstance(error, tf.errors.InvalidArgumentError)
        assert f"key {key} is outside [0, 7), its row numbers." in error.message


def test_the_number_of_keys_is_checked():
    with pytest.raises(tf.errors.InvalidArgumentError, match="num_keys must lie in"):
        sok.EmbeddingVariable(2, 10, name="too_many", hashed=False, num_keys=11).size()
    with pytest.raises(ValueError, match="`num_keys` must be a whole number"):
        sok.EmbeddingVariable(2, 10, hashed=False, num_keys=0)
    with pytest.raises(ValueError, match="give hashed=False"):
        sok.EmbeddingVariable(2, 10, num_keys=5)
    table = sok.EmbeddingVariable(2, 10, name="alone", hashed=False, num_keys=7)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"key 7 is outside \[0, 7\)"):
        table.sparse_read(tf.constant([6, 7], tf.int64))
