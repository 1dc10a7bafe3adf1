"""`EmbeddingVariable`: what it holds and how one works with it."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.job import context
from sok.job.job import Job
from sok.table.splitting import split_embedding_variable_from_others
from sok.table.table import EmbeddingVariable, is_embedding_variable
from tests.reference.initial_values import Initializer, initial_rows
from tests.reference.judge import assert_same, assert_same_table
from tests.reference.keys import KEY_DTYPES, extreme_keys

_numbers = itertools.count()


def table(dim=3, capacity=20, name=None, **kwargs) -> EmbeddingVariable:
    return EmbeddingVariable(dim, capacity, name=name or f"test_table_{next(_numbers)}", **kwargs)


class World:
    """A transport's face: who we are, without anybody to talk to."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


@pytest.fixture
def as_rank(monkeypatch):
    return lambda rank, size: monkeypatch.setattr(context, "get_job", lambda: Job(World(rank, size)))


def test_properties_say_what_it_is():
    v = table(4, 10, name="props", key_dtype="uint32")
    assert (v.dim, v.capacity, v.key_dtype, v.hashed, v.trainable) == (4, 10, tf.uint32, True, True)
    assert (v.table_name, v.name, v.world_size, v.rank, v.dtype) == ("props", "props:0", 1, 0, tf.float32)
    assert v.shape == tf.TensorShape([0, 4])
    assert sok.EmbeddingVariable is EmbeddingVariable


def test_repr_is_for_a_person():
    v = table(4, 2000, name="read_me")
    v.assign(np.arange(1234), np.zeros([1234, 4]))
    expected = "<EmbeddingVariable 'read_me' dim=4, hashed int64 keys, rows 1,234 of 2,000, shard 0 of 1>"
    assert repr(v) == str(v) == expected
    assert "identity int32 keys" in repr(table(1, hashed=False, key_dtype=tf.int32))


@pytest.mark.parametrize(
    "arguments, text",
    [
        (dict(dim=0), r"`dim` .*\[1, 1048576\].*: 0"),
        (dict(dim=2.0), "`dim` .* Received: 2.0"),
        (dict(dim=True), "`dim` .* Received: True"),
        (dict(capacity=0), "`capacity` .*: 0"),
        (dict(capacity="10"), "`capacity` .* Received: '10'"),
        (dict(capacity=2**32), "`capacity` .* Received: 4294967296"),
        (dict(key_dtype="float32"), "`key_dtype` must be one of"),
    ],
)
def test_bad_arguments_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        table(**arguments)


def test_names_are_never_given_twice():
    names = [table(name=name).table_name for name in ("unheard_of", "unheard_of_1", "unheard_of", "unheard_of")]
    assert names == ["unheard_of", "unheard_of_1", "unheard_of_2", "unheard_of_3"]


def test_fresh_rows_are_the_stated_function_of_seed_and_key():
    v = table(5, seed=9, initializer="random_uniform")
    keys = np.array([-3, 0, 7, 2**62])
    assert_same(v.sparse_read(keys).numpy(), initial_rows(Initializer(), v.seed, keys, 5))


def test_reading_does_not_insert():
    v = table()
    first = v.sparse_read([[1, 2], [2, 3]])
    assert first.shape == [2, 2, 3]
    assert int(v.size()) == 0
    assert_same(v.sparse_read([1]).numpy()[0], first.numpy()[0, 0])


def test_seeds_follow_the_name_the_job_and_the_initializer(monkeypatch):
    def seed(name, job=0, **kwargs):
        monkeypatch.setattr(context, "get_seed", lambda: job)
        with tf.Graph().as_default():  # in which names start anew
            return EmbeddingVariable(2, 5, name=name, **kwargs).seed

    keras = tf.keras.initializers
    assert seed("a") == seed("a") == -1593542519140530303  # a stable hash: not that of one process
    assert len({seed("a"), seed("b"), seed("a", job=1), seed("a", seed=0), seed("a", seed=1)}) == 5
    assert seed("a", initializer=keras.RandomNormal(seed=3)) == seed("b", initializer=keras.HeUniform(seed=3))
    assert seed("a", initializer=keras.RandomNormal(seed=3), seed=5) == seed("a", seed=5)
    assert seed("a", initializer=keras.RandomNormal()) == seed("a")


@pytest.mark.parametrize("size", [2, 3, 8])
def test_seeds_do_not_depend_on_the_world(as_rank, size):
    alone = [table(name=f"world_{size}")]
    as_rank(size - 1, size)
    with tf.Graph().as_default():
        shard = table(name=f"world_{size}")
    assert shard.seed == alone[0].seed
    assert (shard.rank, shard.world_size) == (size - 1, size)
    assert f"shard {size - 1} of {size}" in repr(shard)


@pytest.mark.parametrize("dtype", KEY_DTYPES, ids=lambda d: np.dtype(d).name)
def test_assigned_rows_come_back_for_every_key(dtype, rng):
    keys = extreme_keys(dtype)
    v = table(key_dtype=tf.as_dtype(dtype))
    values = rng.normal(size=[len(keys), 3]).astype(np.float32)
    assert v.assign(keys, values) is None
    assert_same(v.sparse_read(keys).numpy(), values)
    found, rows = v.export()
    assert found.dtype == v.key_dtype
    assert_same_table(found.numpy(), rows.numpy(), {int(k): x for k, x in zip(keys, values, strict=True)})


def test_of_equal_keys_the_last_assigned_counts():
    v = table(1)
    v.assign([4, 5, 4], [[1.0], [2.0], [3.0]])
    assert v.sparse_read([4, 5]).numpy().tolist() == [[3.0], [2.0]]
    assert int(v.size()) == 2


def test_keys_of_other_ranks_are_left_to_them(as_rank):
    keys, values = np.arange(-4, 6), np.arange(10.0)[:, None]
    for rank in range(3):
        as_rank(rank, 3)
        v = table(1)
        v.assign(keys, values)
        mine, rows = v.export()
        assert mine.numpy().tolist() == [k for k in keys if k % 3 == rank]
        assert rows.numpy()[:, 0].tolist() == [k + 4.0 for k in keys if k % 3 == rank]
        assert int(v.erase(keys[:5])) == sum(k % 3 == rank for k in keys[:5])


def test_erased_rows_are_gone_and_come_back_as_they_were_born():
    v = table()
    born = v.sparse_read([1]).numpy()
    v.assign([1, 2], np.ones([2, 3]))
    assert int(v.erase([1, 99])) == 1
    assert v.export()[0].numpy().tolist() == [2]
    assert_same(v.sparse_read([1]).numpy(), born)


def test_size_counts_rows_in_use():
    v = table()
    sok.lookup.lookup.lookup_rows(v, tf.constant([5, 5, 6], tf.int64))
    assert int(v.size()) == int(v.total_size()) == 2


def test_slots_are_those_of_an_optimizer():
    v = table(2)
    v.assign([7], [[1.0, 1.0]])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v.sparse_read([7]) * [[1.0, 2.0]])
    optimizer = sok.optimizers.Adagrad(0.1, initial_accumulator_value=0.5, name="slots_of")
    optimizer.apply_gradients([(tape.gradient(loss, v), v)])
    keys, slots, stamps = v.slots(optimizer.slot_set)
    assert keys.numpy().tolist() == [7]
    assert slots.numpy().tolist() == [[1.5, 4.5]]
    assert stamps.numpy().tolist() == [-1]


def test_slots_of_an_unknown_optimizer_are_an_error():
    with pytest.raises(tf.errors.FailedPreconditionError, match="nobody"):
        table().slots("nobody")


class TestErrors:
    """By class, with the table's name in the text."""

    def test_a_full_table(self):
        v = table(1, 2, name="full_one")
        v.assign([1], [[5.0]])
        with pytest.raises(tf.errors.ResourceExhaustedError, match="full_one.*rank 0 of 1"):
            v.assign([1, 2, 3], np.zeros([3, 1]))
        assert_same_table(*[x.numpy() for x in v.export()], {1: np.array([5.0])})  # nothing was stored

    @pytest.mark.parametrize("key", [-1, 6])
    def test_a_key_outside_an_identity_table(self, key):
        v = table(1, 6, name=f"identity_{key}", hashed=False)
        for call in (lambda: v.sparse_read([0, key]), lambda: v.assign([0, key], [[1.0], [1.0]])):
            with pytest.raises(tf.errors.InvalidArgumentError, match=rf"{v.table_name}.*key {key} is outside \[0, 6\)"):
                call()
        assert int(v.size()) == 0

    def test_identity_tables_of_many_ranks_reach_further(self, as_rank):
        as_rank(1, 3)
        v = table(1, 2, hashed=False)
        v.assign([1, 4], [[1.0], [4.0]])
        assert v.export()[0].numpy().tolist() == [1, 4]
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"outside \[0, 6\)"):
            v.assign([7], [[1.0]])

    @pytest.mark.parametrize("keys, values", [([1, 2], [[1.0, 1.0, 1.0]]), ([1], [[1.0]]), ([[1]], [[1.0, 1.0, 1.0]])])
    def test_shapes_that_do_not_fit(self, keys, values):  # shape functions do not see eager calls: the kernel must
        with pytest.raises(tf.errors.InvalidArgumentError):
            table().assign(keys, values)


class TestDenseUse:
    """Whatever would need a dense matrix says what to use instead."""

    @pytest.mark.parametrize(
        "use",
        [
            lambda v: v.numpy(),
            lambda v: v.read_value(),
            lambda v: v.value(),
            lambda v: tf.convert_to_tensor(v),
            lambda v: v + 1.0,
            lambda v: tf.matmul(v, v),
            lambda v: v[0],
            lambda v: np.asarray(v),
            lambda v: v.assign_add([[1.0]]),
            lambda v: v.assign_sub([[1.0]]),
            lambda v: v.scatter_add(tf.IndexedSlices([[1.0]], [0])),
            lambda v: tf.gather_nd(v, [[0]]),
            lambda v: tf.function(lambda: tf.reduce_sum(v))(),
        ],
        ids=range(13),
    )
    def test_fails(self, use):
        with pytest.raises(TypeError, match=r"'dense_use.*not a dense matrix.*sparse_read"):
            use(table(name="dense_use"))

    def test_gather_is_a_lookup(self):
        v = table()
        assert_same(tf.gather(v, [3, 4]).numpy(), v.sparse_read([3, 4]).numpy())
        assert_same(tf.nn.embedding_lookup(v, [3]).numpy(), v.sparse_read([3]).numpy())

    def test_a_table_is_equal_to_itself_only(self):
        a, b = table(), table()
        assert a == a and a != b and b in [a, b] and {a: 1}[a] == 1
        assert [b, a].index(a) == 1


class TestSplit:
    def test_keeps_order(self):
        a, b, x, y = table(), table(), tf.Variable(1.0), tf.Variable(2.0)
        embeddings, others = split_embedding_variable_from_others((x, b, y, a))
        assert [v is w for v, w in zip(embeddings + others, [b, a, x, y], strict=True)] == [True] * 4
        assert isinstance(embeddings, tuple) and isinstance(others, tuple)
        assert split_embedding_variable_from_others([]) == ((), ())
        assert is_embedding_variable(a) and not is_embedding_variable(x)

    def test_takes_lists_and_tuples_only(self):
        with pytest.raises(ValueError, match="`variables` .*list or tuple.*EmbeddingVariable"):
            split_embedding_variable_from_others(table())
