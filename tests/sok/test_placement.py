"""Which worker holds the row of a key: spread by key or by hash, or all on one."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import sok
from sok.table.balancing import balance_tables
from sok.table.placement import Placement, buckets_of
from tests.placements import PLACEMENTS, UpperRanks
from tests.reference import placement as reference
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
    with pytest.raises(ValueError, match="`owner` .*rank"):
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
        assert ", all on rank 1" in text


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


KEYS = st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 40)
SIZES = st.integers(1, 9) | st.integers(1, 4096)


@given(st.lists(KEYS, max_size=20), SIZES, st.sampled_from(sorted(PLACEMENTS)))
def test_every_key_has_one_owner_at_any_world_size(keys, size, kind):
    placement = PLACEMENTS[kind](size)
    for dtype in (np.int64, np.uint64):
        expected = [reference.owner(key % 2**64 if dtype == np.uint64 else key, size, kind) for key in keys]
        found = placement.owner_of(np.array(keys, np.int64).astype(dtype), size)
        assert found.tolist() == expected and all(0 <= owner < size for owner in expected)


def test_the_hash_of_files_never_changes():
    keys = np.array([0, 1, 2, -1, 2**40, -(2**63)])
    assert buckets_of(keys).tolist() == [reference.bucket(int(key)) for key in keys] == [0, 2885, 939, 1611, 3712, 2295]
    narrow = np.array([0, 1, 2, -1], np.int32)
    np.testing.assert_array_equal(buckets_of(narrow), buckets_of(keys[:4]))


@given(st.integers(-(2**63), 2**63 - 1), SIZES, SIZES)
def test_a_resize_moves_whole_buckets_in_order(key, before, after):
    by_hash = sok.row_wise(hash=True)
    neighbours = np.arange(key % 1000, key % 1000 + 3000)
    for size in (before, after):
        bucket, owner = buckets_of(neighbours), by_hash.owner_of(neighbours, size)
        order = np.argsort(bucket, kind="stable")
        assert (np.diff(owner[order]) >= 0).all()
        assert len({*zip(bucket.tolist(), owner.tolist(), strict=True)}) == len({*bucket.tolist()})


@given(
    st.lists(KEYS, min_size=1, max_size=20),
    *[st.integers(1, 12)] * 2,
    *[st.sampled_from(sorted(PLACEMENTS))] * 2,
)
def test_no_file_that_holds_a_key_of_mine_is_left_out(keys, before, after, kind, saved_kind):
    keys = np.array(keys, np.int64)
    here, saved = PLACEMENTS[kind](after), PLACEMENTS[saved_kind](before)
    for rank, saved_rank in zip(here.owner_of(keys, after), saved.owner_of(keys, before), strict=True):
        assert here.may_hold(int(rank), after, saved, int(saved_rank), before)
    if kind == saved_kind == "by hash":
        readers = sum(here.may_hold(r, after, saved, s, before) for r in range(after) for s in range(before))
        assert readers < after + before  # as many as two lists of ranges overlap


@pytest.mark.parametrize("placement", [*[make(3) for make in PLACEMENTS.values()], UpperRanks()], ids=repr)
def test_a_placement_is_a_value(placement):
    assert (
        Placement.from_config(placement.get_config())
        == placement
        == eval(repr(placement), {**vars(sok.table.placement), "upper_ranks": UpperRanks})
    )
    assert hash(placement)
    layer = sok.All2AllDenseEmbedding(10, 2, 1, 1, placement=None if placement.owner else placement)
    again = type(layer).from_config(layer.get_config())
    assert again.embedding_variable.placement == layer.embedding_variable.placement


def test_what_a_table_cannot_be_placed_by_is_said():
    with pytest.raises(ValueError, match=r"row numbers: spread by hash.*hashed=True"):
        sok.EmbeddingVariable(2, 10, hashed=False, placement=sok.row_wise(hash=True))
    with pytest.raises(ValueError, match="`placement` or `owner`, not both"):
        sok.EmbeddingVariable(2, 10, owner=0, placement=sok.row_wise())
    with pytest.raises(ValueError, match=r"`placement` must be sok.row_wise\(\).*'mod'"):
        sok.EmbeddingVariable(2, 10, placement="mod")
    with pytest.raises(ValueError, match=r"a rank in \[0, 1\)"):
        sok.EmbeddingVariable(2, 10, placement=sok.table_wise(1))
    with pytest.raises(ValueError, match="4096 buckets, and this job 4097"):
        sok.row_wise(hash=True).check(4097, hashed=True)
    with pytest.raises(ValueError, match="Received: None"):
        sok.table_wise(None)
    with pytest.raises(ValueError, match=r"`host` must be in \[0, 2\), the hosts. Received: 2"):
        sok.table_row_wise(2, hosts=2)
    with pytest.raises(ValueError, match="`hash` must be True or False"):
        sok.table_row_wise(0, 1, hash=1)
    with pytest.raises(ValueError, match="must have rows on some of the 1 workers"):
        sok.EmbeddingVariable(2, 10, placement=sok.table_row_wise(0, hosts=2))
    with pytest.raises(ValueError, match="ranks below 16,384"):
        UpperRanks().to_attributes(16384)
    assert UpperRanks().to_attributes(16383)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_tables_of_any_placement_are_looked_up_in_one_group_and_trained_alike(size, monkeypatch):
    keys = np.array([0, 2, 4, 2**40, -8, 6, -1, 3], np.int64)

    def program(transport):
        tables = [
            sok.EmbeddingVariable(2, 50, name=f"group_{kind}", seed=3, placement=make(transport.size))
            for kind, make in PLACEMENTS.items()
        ]
        ids = tf.RaggedTensor.from_row_lengths(tf.constant(np.roll(keys, transport.rank)), [3, 0, 5])
        with tf.GradientTape() as tape:
            pooled = sok.group_embedding_lookup_sparse(tables, [ids] * len(tables), ["sum"] * len(tables))
            rows = sok.group_embedding_lookup(tables, [tf.constant(keys)] * len(tables))
            loss = sum(tf.reduce_sum(p * p) for p in pooled) + sum(tf.reduce_sum(r) for r in rows)
        sok.optimizers.Adam(0.1).apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
        for table in tables:
            # From anywhere: those of others are ignored.
            table.assign(tf.constant([100, 102], tf.int64), tf.ones([2, 2]))
            table.erase(tf.constant([3, 100], tf.int64))
        held = [t.export()[0].numpy() for t in tables]
        return (
            held,
            np.stack([t.sparse_read(np.append(keys, 102)) for t in tables]),
            [int(t.total_size()) for t in tables],
        )

    kept = {*keys.tolist(), 102} - {3}
    results = checked(run_world(size, program, monkeypatch))
    for rank, (held, rows, sizes) in enumerate(results):
        assert sizes == [len(kept)] * len(PLACEMENTS)
        for kind, of_table in zip(PLACEMENTS, held, strict=True):
            expected = {key for key in kept if reference.owner(key, size, kind) == rank}
            assert {*of_table.tolist()} == expected, (kind, rank)
        for of_table in rows[1:]:
            np.testing.assert_allclose(of_table, rows[0], atol=1e-5)
        np.testing.assert_array_equal(rows, results[0][1])


def test_ids_with_a_pattern_crowd_by_key_and_not_by_hash_and_a_save_says_so(tmp_path, monkeypatch, recwarn):
    keys = np.arange(0, 8000, 2)

    def program(transport):
        tables = [
            sok.EmbeddingVariable(1, 5000, name=name, initializer="zeros", placement=placement)
            for name, placement in (("by_key", sok.row_wise()), ("by_hash", sok.row_wise(hash=True)))
        ]
        for table in tables:
            table.assign(keys, np.zeros([len(keys), 1], np.float32))
        for _ in range(2):
            sok.save(tmp_path, tables)
        return [int(t.size()) for t in tables]

    sizes = np.array(checked(run_world(2, program, monkeypatch)))
    assert sizes[:, 0].tolist() == [4000, 0] and abs(sizes[0, 1] - 2000) < 200
    told = [str(w.message) for w in recwarn if "its share" in str(w.message)]
    assert len(told) == 1 and "'by_key'" in told[0] and "rank 0 holds 4,000 of its 4,000 rows" in told[0]
    assert "row_wise(hash=True)" in told[0]


def test_a_dump_finds_its_way_into_a_table_of_another_placement(tmp_path, monkeypatch):
    keys = np.arange(-20, 60)

    def dump(transport):
        table = sok.DynamicVariable(2, name="dumped", placement=sok.row_wise(hash=True))
        table.assign(keys, np.stack([keys, -keys], 1))
        sok.dump(tmp_path, table)

    def load(kind):
        def program(transport):
            table = sok.DynamicVariable(2, name="dumped", placement=PLACEMENTS[kind](3))
            sok.load(tmp_path, table)
            return {int(key): row.tolist() for key, row in zip(*(x.numpy() for x in table.export()), strict=True)}

        return program

    checked(run_world(2, dump, monkeypatch))
    for kind in PLACEMENTS:
        for rank, held in enumerate(checked(run_world(3, load(kind), monkeypatch))):
            assert held == {int(k): [k, -k] for k in keys if reference.owner(int(k), 3, kind) == rank}
