"""Rows of which several workers hold something: columns of them, or copies."""

import tempfile

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import sok
from sok.checkpoint import CheckpointError, read_manifest, verify
from sok.table.placement import Placement
from tests.placements import ALL_PLACEMENTS
from tests.sok.threads_world import checked, run_world

DIM = 7
KEYS = np.array([0, 2, 4, 2**40, -8, 6, -1, 3], np.int64)

# Adam's step counts are not what this is about.
pytestmark = pytest.mark.filterwarnings("ignore:sok.save. the step count")


@st.composite
def _cuts(draw, world):
    widths = draw(st.sampled_from([[7], [3, 4], [1, 5, 1], [2, 2, 2, 1], [1] * 7]))
    owners = draw(st.lists(st.integers(0, world - 1), min_size=len(widths), max_size=len(widths)))
    return draw(st.sampled_from([sok.column_wise(widths, owners), sok.column_wise(len(widths))]))


@st.composite
def _placed(draw):
    """A number of workers, and any placement on them."""
    world = draw(st.integers(1, 4))
    others = [make(world) for name, make in sorted(ALL_PLACEMENTS.items()) if name != "columns"]
    return world, draw(st.sampled_from(others) | _cuts(world))


def _table(placement, name="item", **more):
    return sok.EmbeddingVariable(DIM, 300, name=name, seed=5, placement=placement, **more)


def _own(table):
    """What this worker should have of a row [.., DIM], and of which keys."""
    part = table.placement.part_of(table.rank, DIM, table.world_size)
    return slice(part.columns.start, part.columns.stop)


def _holds(table, keys):
    return keys[table.placement.holds_keys(keys, table.rank, table.world_size)]


def _rows(keys):
    return keys.astype(np.float32)[:, None] + np.arange(DIM, dtype=np.float32) / 8


@settings(max_examples=25, deadline=None)
@given(saved=_placed(), restored=_placed(), asynchronous=st.booleans())
def test_any_placement_is_restored_to_any_other_with_slots_and_increments(saved, restored, asynchronous):
    keys = np.arange(-20, 20)

    def save(transport):
        table = _table(saved[1])
        slots = np.concatenate([_rows(keys + 100), _rows(keys + 200)], 1)
        table.restore_rows(keys, _rows(keys), slots, slot_set="Adam", rule="adam")
        done = sok.save(folder, [table], asynchronous=asynchronous)
        if done is not None:
            done.result()
        table.assign(keys[:5], _rows(keys[:5] + 1000))
        table.erase(keys[5:7])
        sok.save(folder, [table], incremental=True)

    def restore(transport):
        table, follower = _table(restored[1]), _table(restored[1], "followed")
        table.assign([299], np.zeros([1, DIM]))
        sok.restore(folder, [table])
        for piece in sok.deltas(folder):
            piece.apply({"item": follower})
        mine, own = _holds(table, expected_keys), _own(table)
        for found in (table, follower):
            held, rows = (x.numpy() for x in found.export())
            order = np.argsort(held)
            np.testing.assert_array_equal(held[order], mine)
            np.testing.assert_array_equal(rows[order], _rows(np.where(mine < keys[5], mine + 1000, mine))[:, own])
        if len(mine) == 0:
            return
        held, slots, _ = (x.numpy() for x in table.slots("Adam"))
        first = np.concatenate([_rows(held + 100)[:, own], _rows(held + 200)[:, own]], 1)
        np.testing.assert_array_equal(slots, first)

    expected_keys = np.setdiff1d(keys, keys[5:7])
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        checked(run_world(saved[0], save, patch))
        assert verify(folder) == []
        manifest = read_manifest(folder)
        assert manifest.table("item").placement == saved[1] and manifest.table("item").rows == len(expected_keys)
        checked(run_world(restored[0], restore, patch))
        sok.compact(folder)
        checked(run_world(restored[0], restore, patch))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("hashed", [True, False])
def test_values_do_not_depend_on_who_holds_what(size, hashed, monkeypatch):
    keys = np.arange(30, 38) if not hashed else KEYS

    def program(transport):
        kinds = [sok.row_wise(), sok.column_wise(2), sok.column_wise([1, 5, 1], [0, size - 1, 0]), sok.data_parallel()]
        tables = [
            _table(
                kind,
                f"kind{i}_{hashed}",
                initializer="truncated_normal",
                hashed=hashed,
                num_keys=None if hashed else 100,
            )
            for i, kind in enumerate(kinds)
        ]
        before = np.stack([table.sparse_read(keys) for table in tables])
        optimizer = sok.optimizers.Adam(0.1, clipnorm=1.0)
        for step in range(20):
            mine = np.roll(keys, step + transport.rank)[: 8 // size]
            ids = tf.RaggedTensor.from_row_lengths(tf.constant(mine), [len(mine) - 1, 1])
            weights = tf.RaggedTensor.from_row_lengths(tf.range(len(mine), dtype=tf.float32) + 1, [len(mine) - 1, 1])
            with tf.GradientTape() as tape:
                pooled = sok.group_embedding_lookup_sparse(tables, [ids] * 4, ["mean"] * 4, sp_weights=[weights] * 4)
                rows = sok.group_embedding_lookup(tables, [tf.constant(mine)] * 4)
                loss = sum(tf.reduce_sum(p * p) for p in pooled) + sum(tf.reduce_sum(tf.sin(r)) for r in rows)
            optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
        after = np.stack([table.sparse_read(keys) for table in tables])
        return before, after, [int(t.total_size()) for t in tables]

    results = checked(run_world(size, program, monkeypatch))
    for before, after, sizes in results:
        assert len(set(sizes)) == 1
        for i in range(1, 4):
            np.testing.assert_array_equal(before[i], before[0])
            np.testing.assert_allclose(after[i], after[0], atol=1e-5)
        np.testing.assert_array_equal(after, results[0][1])
    assert np.abs(results[0][1] - results[0][0]).min() > 0


def test_copies_are_equal_to_the_bit_whoever_has_looked_up_what(monkeypatch):
    def program(transport):
        table, optimizer = _table(sok.data_parallel(), "copied"), sok.optimizers.Adagrad(0.3)
        for step in range(5):
            with tf.GradientTape() as tape:
                mine = KEYS[: step + transport.rank] if transport.rank < 2 else KEYS[:0]
                loss = tf.reduce_sum(tf.sin(sok.group_embedding_lookup([table], [tf.constant(mine)])[0]))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return [x.numpy() for x in (*table.export(), *table.slots(optimizer.slot_set))]

    first, *others = checked(run_world(3, program, monkeypatch))
    assert len(first[0]) > 0
    for other in others:
        for here, there in zip(first, other, strict=True):
            np.testing.assert_array_equal(here, there)


@pytest.mark.parametrize(
    "optimizer, words",
    [
        (lambda: sok.optimizers.RowWiseAdagrad(0.1), "depends on the others of its row"),
        (lambda: sok.optimizers.Lamb(0.1), "depends on the others of its row"),
        (lambda: sok.optimizers.SGD(0.1, nonfinite_gradients="skip"), "leaves rows out"),
    ],
)
def test_what_needs_whole_rows_does_not_train_columns_of_them(optimizer, words, monkeypatch):
    def program(transport):
        table = _table(sok.column_wise(2), "cut")
        before = table.sparse_read(KEYS)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.group_embedding_lookup([table], [tf.constant(KEYS)])[0])
        gradient = tape.gradient(loss, table)
        with pytest.raises(ValueError, match=words) as raised:
            optimizer().apply_gradients([(gradient, table)])
        assert "'cut'" in str(raised.value) and "column_wise(pieces=2)" in str(raised.value)
        np.testing.assert_array_equal(table.sparse_read(KEYS), before)
        with pytest.raises(ValueError, match=words):
            optimizer().build([table])

    checked(run_world(2, program, monkeypatch))


def test_terms_that_see_whole_rows_are_refused(monkeypatch):
    import keras

    def program(transport):
        options = {"sparse_as_dense_size": 0, "table": sok.TableOptions(placement=sok.column_wise(2))}
        for terms, words in (
            ({"embeddings_constraint": keras.constraints.UnitNorm(axis=1)}, "`embeddings_constraint` UnitNorm"),
            ({"embeddings_regularizer": lambda m: tf.reduce_sum(tf.norm(m, axis=1))}, "`embeddings_regularizer`"),
        ):
            with pytest.raises(ValueError, match=f"{words}.*needs whole rows"):
                sok.Embedding(100, 8, **terms, **options)(tf.constant([1]))
        by_number = {"embeddings_regularizer": "l1", "embeddings_constraint": "non_neg"}
        assert sok.Embedding(100, 8, **by_number, **options)(tf.constant([1])).shape == (1, 8)

    checked(run_world(2, program, monkeypatch))


def test_what_rows_cannot_be_cut_into_is_said():
    for wrong in (0, -1, True, 1.5, [], [0, 2], "2"):
        with pytest.raises((ValueError, TypeError), match="`pieces`"):
            sok.column_wise(wrong)
    for wrong in ([], [0], [0, 1, 1], [0, -1]):
        with pytest.raises(ValueError, match="`owners`"):
            sok.column_wise(2, wrong)
    with pytest.raises(ValueError, match=r"`owners` must be ranks in \[0, 1\).*Received: 1"):
        sok.EmbeddingVariable(DIM, 10, placement=sok.column_wise(2, [0, 1]))
    for wrong in (8, [3, 3], [4, 4]):
        with pytest.raises(ValueError, match="`pieces` must cut rows of 7 columns"):
            sok.EmbeddingVariable(DIM, 10, placement=sok.column_wise(wrong))
    for several in (sok.column_wise(2), sok.data_parallel()):  # what sok.cuda.partition_keys asks for
        with pytest.raises(ValueError, match=r"several owners of a key on 2 ranks"):
            several.to_attributes(2)
    for placement in (sok.column_wise([3, 4], [0, 0]), sok.column_wise(2), sok.data_parallel()):
        assert Placement.from_config(placement.get_config()) == placement and hash(placement)
        assert placement == eval(repr(placement), vars(sok))


def test_files_of_columns_that_do_not_fit_together_are_refused(tmp_path, monkeypatch):
    def damaged(transport):
        # A worker that has one row less than the one with the other columns.
        table = _table(sok.column_wise(2), "torn")
        keys = np.arange(5 - transport.rank)
        table.assign(keys, _rows(keys))
        sok.save(tmp_path, [table])

    def restore(transport):
        table = _table(None, "torn")
        sok.restore(tmp_path, [table])

    checked(run_world(2, damaged, monkeypatch))
    for error in run_world(1, restore, monkeypatch):
        assert isinstance(error, CheckpointError)
        assert "do not fit together" in str(error) and "table 'torn'" in str(error)
        assert "5 have column 0" in str(error) and "4 have column 6" in str(error)
