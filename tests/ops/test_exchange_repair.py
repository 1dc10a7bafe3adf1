"""Rows that go home ahead of their step and are repaired in it: the answers of the step itself, to the bit."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from sok.base import _ops
from tests.ops.worlds import World, i32, rows
from tests.reference.exchange import all_to_all

DIMS, TABLES = [3, 2], (0, 1, 1)
BETWEEN = st.sampled_from(["update", "nothing", "erase", "assign", "make", "look", "decay"])


class WithRows(World):
    """A world whose lookups begin with rows, and are finished later."""

    def begin(self, features_of_rank, **options):
        """What each rank keeps of a lookup."""
        routed = [self.route(r, features) for r, features in enumerate(features_of_rank)]
        words = list(zip(*all_to_all(*sent_of(routed, "words", "splits")), strict=True))
        tables = [f[0] for f in features_of_rank[0]]
        ahead = [self.peek(r, *of_rank, tables, **options) for r, of_rank in enumerate(words)]
        home = list(zip(*all_to_all(*sent_of(ahead, "answers", "answer_splits")), strict=True))
        return words, tables, ahead, home

    def peek(self, rank, words, splits, tables, is_stale=False):
        attributes = self.attributes(tables)
        return _ops.lib().sok_exchange_peek(
            self.handles(rank), words, splits, 0, True, dims=self.dims, is_stale=is_stale, **attributes
        )

    def repair(self, rank, served, tables, ahead, is_stale=False):
        return _ops.lib().sok_exchange_repair(
            self.handles(rank),
            served.answers,
            served.answer_splits,
            served.counts,
            ahead.answers,
            ahead.answer_splits,
            table_of=tables,
            dims=self.dims,
            is_stale=is_stale,
        )

    def finish(self, begun, is_stale=False):
        """For each rank its answers as repaired, as they are without, and the floats that were sent again."""
        words, tables, ahead, home = begun
        served = [self.serve(r, *of_rank, tables) for r, of_rank in enumerate(words)]
        repairs = [self.repair(r, s, tables, a, is_stale) for r, (s, a) in enumerate(zip(served, ahead, strict=True))]
        now = zip(*all_to_all(*sent_of(served, "answers", "answer_splits")), strict=True)
        again = zip(*all_to_all(*sent_of(repairs, "repairs", "repair_splits")), strict=True)
        lib, found = _ops.lib(), []
        for before, expected, sent in zip(home, now, again, strict=True):
            found.append((lib.sok_exchange_mend(*before, *sent), expected, int(np.sum(sent[1]))))
        return found

    def counts(self, rank, table=0):
        return _ops.lib().sok_table_rows_ahead(self.shards[rank][table].handle).numpy().tolist()


def sent_of(outputs, floats, splits):
    return [getattr(o, floats).numpy() for o in outputs], [getattr(o, splits).numpy() for o in outputs]


def equal(found):
    for (answers, splits), (expected, expected_splits), _ in found:
        np.testing.assert_array_equal(splits, expected_splits)
        assert answers.numpy().tobytes() == expected.tobytes()


def batch(rng, size):
    """Features by rows, pooled by rows or sums, and with weights; some of them empty."""
    keys = [rng.integers(0, 30, rng.integers(0, 9)) for _ in range(3)]
    splits = [np.sort(np.r_[0, rng.integers(0, len(k) + 1, 2), len(k)]) for k in keys]
    weights = rng.normal(size=len(keys[2])).astype(np.float32)
    return [rows(keys[0]), (1, keys[1], splits[1], None, "mean"), (1, keys[2], splits[2], weights, "sum")]


def change(world, what, rng):
    for rank, shards in enumerate(world.shards):
        owned = np.arange(rank, 40, world.size)
        keys = rng.choice(owned, min(5, len(owned)), replace=False)
        for shard in shards:
            grads = rng.normal(size=[len(keys), shard.dim]).astype(np.float32)
            if what in ("update", "decay"):
                rule, hyper = {"update": ("adagrad", [0.1, 0.1, 1e-7]), "decay": ("adam", [0.1, 0.9, 0.99, 1e-7])}[what]
                ids = shard.lookup(keys, insert=False)[1]
                shard.apply(ids, grads, hyper=hyper, rule=rule, slot_set=rule)
            elif what == "erase":
                shard.erase(keys)
            elif what == "assign":
                shard.assign(keys, grads)
            elif what in ("make", "look"):
                shard.lookup(keys, insert=what == "make")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    world_size=st.integers(1, 3),
    way=st.sampled_from(["rows", "sums", "auto"]),
    between=st.lists(BETWEEN, min_size=1, max_size=6),
    depth=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_it_is_the_answer_of_the_step_to_the_bit(world_size, way, between, depth, seed):
    """Lookups begin `depth` steps ahead, and tables change by all that may happen between."""
    rng = np.random.default_rng(seed)
    world = WithRows(world_size, key_dtypes=(tf.int64, tf.int64), dims=DIMS, ways=[way] * 2)
    begun = [world.begin([batch(rng, world_size) for _ in range(world_size)]) for _ in range(depth)]
    for what in [*between, *["nothing"] * depth]:
        sizes = [shard.size() for shards in world.shards for shard in shards]
        begun.append(world.begin([batch(rng, world_size) for _ in range(world_size)]))
        assert sizes == [shard.size() for shards in world.shards for shard in shards]
        equal(world.finish(begun.pop(0)))
        change(world, what, rng)


def test_only_rows_that_an_update_has_touched_are_sent_again():
    world = WithRows(2)
    keys = np.arange(100)
    world.rows([keys, keys])
    begun = world.begin([[rows(keys)], [rows(keys[:0])]])
    shard = world.shards[1][0]
    ids = shard.lookup([1, 5, 7], insert=False)[1]
    shard.apply(ids, tf.ones([3, 3]), hyper=[0.5], rule="sgd", slot_set="sgd")
    found = world.finish(begun)
    equal(found)
    # Two headers; keys 1 and 5, 7: in the answer of rank 1 they are rows 0, 2 and 3, so two runs.
    assert found[0][2] == 2 * 16 + 2 * 2 + 3 * 3 and found[1][2] == 2 * 16
    assert world.counts(1) == [50, 3] and world.counts(0) == [50, 0]


def test_a_key_that_the_step_makes_is_not_sent_again():
    """Its row is what it was to become."""
    world = WithRows(2)
    begun = world.begin([[rows([1, 2, 3])]] * 2)
    assert [s.size() for shards in world.shards for s in shards] == [0, 0]
    found = world.finish(begun)
    equal(found)
    assert [s.size() for shards in world.shards for s in shards] == [1, 2]
    assert [sent for *_, sent in found] == [32, 32]


def test_stale_rows_are_those_of_the_time_at_which_they_were_sent():
    world = WithRows(2)
    before = world.rows([[1, 2]] * 2)[0].copy()
    begun = world.begin([[rows([1, 2])]] * 2)
    for key, shards in zip([2, 1], world.shards, strict=True):
        ids = shards[0].lookup([key], insert=False)[1]
        shards[0].apply(ids, tf.ones([1, 3]), hyper=[0.5], rule="sgd", slot_set="sgd")
    (answers, splits), (now, _), sent = world.finish(begun, is_stale=True)[0]
    assert splits.numpy().tolist() == [19, 19] and sent == 32
    np.testing.assert_array_equal(answers.numpy().reshape(2, 19)[::-1, 16:], before)
    assert not np.array_equal(answers, now)


def test_rows_that_move_without_a_gradient_are_not_sent_ahead():
    world = WithRows(2)
    world.rows([[1, 2]] * 2)
    change(world, "decay", np.random.default_rng(0))
    _, _, ahead, _ = begun = world.begin([[rows([1, 2])]] * 2)
    assert [a.answers.numpy()[0] for a in ahead] == [4.0, 4.0]  # a status that is not that of rows
    found = world.finish(begun)
    equal(found)
    assert found[0][2] == 2 * (16 + 3) and world.counts(0) == [0, 0]
    stale = world.begin([[rows([1, 2])]] * 2, is_stale=True)[2]
    assert [a.answers.numpy()[0] for a in stale] == [0.0, 0.0]


def test_bad_news_wait_for_the_step():
    """A key outside of the table, and a table that is full, raise there what they raise without."""
    world = WithRows(2, hashed=False, capacity=5)
    begun = world.begin([[rows([1])], [rows([99])]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="key 99"):
        world.finish(begun)
    world = WithRows(2, capacity=2)
    begun = world.begin([[rows([1, 3, 5])], [rows([2])]])
    found = world.finish(begun)
    equal(found)
    of_rank_1 = found[0][0][0].numpy()[int(found[0][0][1][0]) :]
    assert of_rank_1[0] == 1.0 and "rank 1 of 2" in bytes(of_rank_1[16:].astype(np.uint8)).decode()


@pytest.mark.parametrize("bad", [[3, 3], [16, 4], [-1, 3], [16, 0], [16, 2**30], [2**31 - 1, 3]])
def test_a_repair_that_does_not_fit_is_refused(bad):
    ahead = np.zeros(19, np.float32)
    repair = np.zeros(16 + 2 + 3, np.float32)
    repair[2] = 1
    repair[16:18] = i32(*bad).view(np.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not fit"):
        _ops.lib().sok_exchange_mend(ahead, i32(19), repair, i32(21))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a | {"splits": i32(18)}, "`answers` do not fit"),
        (lambda a: a | {"ahead_splits": i32(20)}, "`ahead` do not fit"),
        (lambda a: a | {"counts": np.int64([[2, 0, 0]])}, "does not have the rows"),
        (lambda a: a | {"counts": np.int64([[-1, 0, 0]])}, r"must lie in \[0"),
        (lambda a: a | {"counts": np.int64([[1, 0]])}, "counts"),
        (lambda a: a | {"table_of": [1]}, "must name one of the tables"),
        (lambda a: a | {"dims": [0]}, "`dims` must lie in"),
    ],
)
def test_answers_that_do_not_fit_are_refused(change, words):
    world, floats = World(1), np.zeros(19, np.float32)
    arguments = {"answers": floats, "splits": i32(19), "counts": np.int64([[1, 0, 0]]), "ahead": floats}
    arguments |= {"ahead_splits": i32(19), "table_of": [0], "dims": [3]}
    repair = _ops.lib().sok_exchange_repair
    assert repair(world.handles(0), **arguments).repair_splits.numpy().tolist() == [16]
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=words):
        repair(world.handles(0), **change(arguments))
