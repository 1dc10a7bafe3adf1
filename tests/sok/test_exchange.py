"""Group lookups on several workers, which are threads here: one exchange for all tables, and bad news for everyone."""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.lookup import exchange
from sok.lookup.feature import Csr, Feature
from sok.lookup.lookup import begin, finish, lookup_group, lookup_rows
from sok.table.table import EmbeddingVariable
from tests.group_features import FEATURES, TABLES, features_of, lookup_pooled, make_tables
from tests.messages import saying
from tests.reference.judge import assert_close, assert_same
from tests.sok.threads_world import checked, run_world

_numbers = itertools.count()
SEEDS = list(range(len(TABLES)))


def draw(rng, segments):
    """Inputs of all features, the fifth without any key."""
    inputs = []
    for f, (table, _, weighted) in enumerate(FEATURES):
        lengths = np.zeros(segments, int) if f == 4 else rng.integers(0, 4, segments)
        n = int(lengths.sum())
        keys = rng.integers(0, 20, n).astype(TABLES[table][1].as_numpy_dtype)
        weights = rng.uniform(0.5, 2, n).astype(np.float32) if weighted else None
        inputs.append((keys, lengths, weights))
    return inputs


def together(parts):
    return [
        tuple(None if pieces[0] is None else np.concatenate(pieces) for pieces in zip(*of_feature, strict=True))
        for of_feature in zip(*parts, strict=True)
    ]


def as_csr(inputs):
    """Tensors, with row splits for lengths."""
    return [
        (
            tf.constant(keys),
            tf.constant(np.concatenate([[0], np.cumsum(lengths)]), tf.int64),
            None if weights is None else tf.constant(weights),
        )
        for keys, lengths, weights in inputs
    ]


def run(tables, inputs, upstream):
    """Outputs, gradient of each key of each table, gradients of weights."""
    features = features_of(tables, as_csr(inputs))
    weights = [f.ids.weights for f in features if f.ids.weights is not None]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        outputs = lookup_group(features)
        loss = tf.add_n([tf.reduce_sum(o * u) for o, u in zip(outputs, upstream, strict=True)])
    of_tables, of_weights = tape.gradient(loss, [tables, weights])
    by_key = []
    for table, gradient in zip(tables, of_tables, strict=True):
        assert len(np.unique(gradient.indices)) == len(gradient.indices)
        keys, _ = table.export()
        sums = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, len(keys) if table.hashed else 300)
        row_ids = (
            range(len(keys))
            if table.hashed
            else [int(k) // (table.world_size if table.owner is None else 1) for k in keys]
        )
        by_key.append({int(k): sums[i].numpy() for i, k in zip(row_ids, keys.numpy(), strict=True)})
    # One worker has no gradient for weights that are none.
    return [o.numpy() for o in outputs], by_key, [np.zeros(0) if w is None else w.numpy() for w in of_weights]


@pytest.mark.parametrize(
    ("size", "owners"), [(2, None), (3, None), (4, None), (2, [1, None, 1, 0]), (3, [None, 0, 2, 2]), (1, [0] * 4)]
)
def test_several_workers_are_one_on_the_concatenated_batch(size, owners, rng, monkeypatch):
    segments = [7, 0, 12, 3][:size]  # the second has no samples
    assert_one_worker_gives_the_same([draw(rng, s) for s in segments], rng, monkeypatch, owners)


def assert_one_worker_gives_the_same(parts, rng, monkeypatch, owners=None, ways=None):
    """Of the inputs of each rank: outputs, gradients, collectives, and who holds what."""
    size = len(parts)
    upstream = [
        [
            rng.normal(size=(len(lengths), TABLES[table][0])).astype(np.float32)
            for (table, _, _), (_, lengths, _) in zip(FEATURES, inputs, strict=True)
        ]
        for inputs in parts
    ]
    name = f"group_{next(_numbers)}"

    def program(transport):
        tables = make_tables(name, 300, seed=SEEDS, owner=owners, way_home=ways or "auto")
        found = run(tables, parts[transport.rank], upstream[transport.rank])
        return found, list(transport.collectives), tables

    with monkeypatch.context() as m:
        results = checked(run_world(size, program, m))
    alone = make_tables(f"alone_{next(_numbers)}", 300, seed=SEEDS)
    outputs, by_key, of_weights = run(alone, together(parts), [np.concatenate(u) for u in zip(*upstream, strict=True)])
    for f, output in enumerate(outputs):
        assert_close(np.concatenate([found[0][f] for found, _, _ in results]), output, scale=10)
    for t, expected in enumerate(by_key):
        merged = {key: g for found, _, _ in results for key, g in found[1][t].items()}
        assert set(merged) == set(expected)
        for key, gradient in expected.items():
            assert_close(merged[key], gradient, scale=30)
    for w, expected in enumerate(of_weights):
        assert_close(np.concatenate([found[2][w] for found, _, _ in results]), expected, scale=30)
    for rank, (_, collectives, tables) in enumerate(results):
        # Whatever the number of tables, features and widths.
        assert [c.rsplit("/", 1)[1] for c in collectives] == (["keys", "rows", "grads"] if size > 1 else [])
        for table in tables:
            assert all((int(key) % size if table.owner is None else table.owner) == rank for key in table.export()[0])


def test_a_row_that_several_features_share_travels_once(monkeypatch):
    sizes = []

    def program(transport):
        table = EmbeddingVariable(4, 100, name="shared", way_home="rows")
        send = transport.all_to_all
        transport.all_to_all = lambda x, splits, name: (sizes.append((name, splits.numpy())), send(x, splits, name))[1]
        csr = Csr(tf.constant([2, 2, 4], tf.int64), tf.constant([0, 1, 3], tf.int64))
        a, b = lookup_group([Feature(table, csr, "sum"), Feature(table, csr, "mean")])
        rows = table.sparse_read([2, 4]).numpy()
        assert_close(a, [rows[0], rows[0] + rows[1]])
        assert_close(b, [rows[0], (rows[0] + rows[1]) / 2])

    checked(run_world(2, program, monkeypatch))
    # Rank 0 owns both keys: 7 words of header, a count and two for each of two features, 2 keys.
    assert [s.tolist() for name, s in sizes if name.endswith("keys")][:2] == [[14, 12]] * 2


def test_outputs_that_one_worker_does_not_use_have_zero_gradients(monkeypatch):
    def program(transport):
        first, second = (EmbeddingVariable(2, 100, name=f"unused_{i}") for i in range(2))
        csr = Csr(tf.constant([0, 1], tf.int64), tf.constant([0, 2], tf.int64))
        with tf.GradientTape() as tape:
            a, b = lookup_group([Feature(first, csr, "sum"), Feature(second, csr, "sum")])
            loss = tf.reduce_sum(a) if transport.rank == 0 else tf.reduce_sum(a) + tf.reduce_sum(b)
        gradients = tape.gradient(loss, [first, second])
        return [tf.math.unsorted_segment_sum(g.values, g.indices, 1).numpy() for g in gradients]

    for of_first, of_second in checked(run_world(2, program, monkeypatch)):
        assert_same(of_first, [[2.0, 2.0]])
        assert_same(of_second, [[1.0, 1.0]])


@pytest.mark.parametrize("size", [1, 3])
def test_a_lookup_that_has_begun_changes_nothing_until_its_turn(size, monkeypatch):
    def program(transport):
        hashed = EmbeddingVariable(1, 100, name="begun", initializer="ones")
        legal = EmbeddingVariable(1, 100, name="begun_legal", hashed=False)
        features = [
            Feature(hashed, Csr(tf.constant([transport.rank, 7], tf.int64))),
            Feature(legal, Csr(tf.constant([transport.rank], tf.int64), tf.constant([0, 1], tf.int64)), "sum"),
        ]
        ticket = begin(features, training=True)
        begin(features, training=True)  # nobody finishes it
        if transport.rank == size - 1:
            bad = dataclasses.replace(
                features[1], ids=Csr(tf.constant([10_000], tf.int64), tf.constant([0, 1], tf.int64))
            )
            wrong = begin([features[0], bad], training=True)
        else:
            wrong = begin(features, training=True)
        assert int(hashed.size()) == int(legal.size()) == 0
        # What happens in between is seen, and gets its gradient.
        hashed.assign(tf.range(size, dtype=tf.int64), tf.fill([size, 1], 5.0))
        with tf.GradientTape() as tape:
            rows, _ = finish(ticket)
            loss = tf.reduce_sum(rows)
        assert rows.numpy().tolist() == [[5.0], [1.0]]
        assert tf.reduce_sum(tape.gradient(loss, hashed).values) == 1.0 + (7 % size == transport.rank) * size
        with pytest.raises(tf.errors.InvalidArgumentError, match="key 10000 is outside"):
            finish(wrong)
        return lookup_rows(hashed, [7]).shape

    assert checked(run_world(size, program, monkeypatch)) == [[1, 1]] * size


def csr_of(keys, splits, weights=None):
    return Csr(keys, tf.constant(splits, tf.int64), weights)


GOOD = csr_of(tf.constant([1, 2], tf.int64), [0, 2])
BAD_INPUTS = {
    "dtype": (csr_of(tf.constant([1.0, 2.0]), [0, 2]), ValueError, "keys must be int64"),
    "value": (csr_of([1, 2**70], [0, 2]), ValueError, "keys must be int64"),
    "rank": (csr_of(tf.constant([[1, 2]], tf.int64), [0, 2]), ValueError, "`keys` must have rank 1"),
    "splits dtype": (Csr(GOOD.keys, tf.constant([0.0, 2.0])), ValueError, "int64"),
    "weights rank": (csr_of(GOOD.keys, [0, 2], tf.ones([1, 2])), ValueError, "`weights` must have rank 1"),
    "weights length": (
        csr_of(GOOD.keys, [0, 2], tf.ones([3])),
        tf.errors.InvalidArgumentError,
        r"`weights` .*per key \(2\).*: 3",
    ),
    "splits": (csr_of(GOOD.keys, [0, 3]), tf.errors.InvalidArgumentError, "`row_splits` must start with 0"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_of_one_worker_raises_on_all_in_the_same_step(case, monkeypatch):
    bad, own_error, text = BAD_INPUTS[case]

    def program(transport):
        tables = [EmbeddingVariable(2, 100, name=f"bad_{i}") for i in range(2)]
        look_up = lambda csr: lookup_group([Feature(tables[0], GOOD, "sum"), Feature(tables[1], csr, "sum")])  # noqa: E731
        look_up(GOOD)
        expected = own_error if transport.rank == 1 else tf.errors.InvalidArgumentError
        for _ in range(2):
            with pytest.raises(expected, match=text) as error:
                look_up(bad if transport.rank == 1 else GOOD)
            if transport.rank != 1:
                assert "input of rank 1" in str(error.value) and "table 'bad_" in str(error.value)
        # The ranks are in step: the next lookup is that of all of them.
        with pytest.raises(ValueError, match="never sent"), exchange.told_to_peers(*tables):
            raise ValueError("never sent")
        return look_up(GOOD)[1].shape

    with monkeypatch.context() as m:
        assert checked(run_world(3, program, m)) == [[1, 2]] * 3


def test_what_a_layer_refuses_on_one_worker_raises_on_all(monkeypatch):
    """The form of the input, seen by the layer before any lookup; twice, since Keras may build in between."""

    def program(transport):
        layer = sok.DistributedEmbedding("sum", 100, 2, slot_num=2, max_nnz=3, name="refusing")
        dense = sok.All2AllDenseEmbedding(100, 2, slot_num=2, nnz_per_slot=3, name="refusing_dense")
        bad = [tf.zeros([4, 5, 3], tf.int64), tf.zeros([4, 2, 3]), np.full([4, 2, 3], 0.5), tf.zeros([4], tf.int64)]
        for one in (layer, dense):
            for inputs in bad:
                is_bad = transport.rank == 1
                with pytest.raises(ValueError if is_bad else tf.errors.InvalidArgumentError) as error:
                    one(inputs if is_bad else tf.zeros([4, 2, 3], tf.int64))
                assert is_bad or "input of rank 1: ValueError" in str(error.value), str(error.value)
            assert one(tf.zeros([1, 2, 3], tf.int64)).shape[:2] == [1, 2]

    checked(run_world(2, program, monkeypatch))


def test_workers_in_different_calls_all_raise_and_are_then_in_step(monkeypatch):
    class Stop(Exception):
        pass

    def program(transport):
        table = EmbeddingVariable(2, 100, name="skipping")
        keys = tf.constant([transport.rank], tf.int64)
        lookup_rows(table, keys)
        if transport.rank == 1:
            # A call that ends after it has begun and before it has sent anything, as by a signal.
            send, transport.all_to_all = transport.all_to_all, lambda *_: (_ for _ in ()).throw(Stop)
            with pytest.raises(Stop):
                lookup_rows(table, keys)
            transport.all_to_all = send
        with pytest.raises(tf.errors.FailedPreconditionError, match=saying("different calls", "call 1", "2")):
            lookup_rows(table, keys)
        return lookup_rows(table, keys).shape

    assert checked(run_world(2, program, monkeypatch)) == [[1, 2]] * 2


def test_training_on_some_workers_only_raises_on_all(monkeypatch):
    def program(transport):
        table = EmbeddingVariable(2, 100, name="half_training")
        with pytest.raises(tf.errors.FailedPreconditionError, match="by rank: 1, 0"):
            lookup_rows(table, [5], training=transport.rank == 0)
        assert int(table.size()) == 0
        return lookup_rows(table, [5], training=tf.constant(False)).shape

    assert checked(run_world(2, program, monkeypatch)) == [[1, 2]] * 2


def test_one_full_table_of_a_group_is_named_on_all_workers(monkeypatch):
    def program(transport):
        roomy, small = EmbeddingVariable(2, 100, name="roomy"), EmbeddingVariable(3, 2, name="small")
        csr = csr_of(tf.constant([1, 3, 5], tf.int64), [0, 3])
        with pytest.raises(
            tf.errors.ResourceExhaustedError, match=saying("rank 1 could not answer", "table 'small'", "full")
        ):
            lookup_group([Feature(roomy, csr, "sum"), Feature(small, csr, "sum")])
        assert int(small.size()) == 0
        return lookup_group([Feature(small, GOOD, "sum")])[0].shape

    assert checked(run_world(2, program, monkeypatch)) == [[1, 3]] * 2


def test_limits_are_those_of_each_feature(monkeypatch):
    def program(transport):
        table = EmbeddingVariable(2, 100, name="limited")
        csr = csr_of(tf.constant([1, 3, 5], tf.int64), [0, 1, 3])
        limits = [{}, {"slot_num": 2, "max_nnz": 1 if transport.rank == 0 else 2}]
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=saying("sample 0", "feature 1 has more than max_nnz =")
        ):
            lookup_group([Feature(table, csr, "sum", **one) for one in limits])
        return lookup_pooled(table, csr, "sum").shape

    assert checked(run_world(2, program, monkeypatch)) == [[2, 2]] * 2


@pytest.mark.parametrize("dtype", ["int8", "half", tf.float64, None, 16])
def test_a_type_that_rows_do_not_travel_in_is_refused(dtype):
    if dtype == "half":  # TensorFlow's other name for it
        assert EmbeddingVariable(2, 10, exchange_dtype=dtype).exchange_dtype == "float16"
        return
    with pytest.raises(ValueError, match=saying("`exchange_dtype`", "'float32', 'float16', 'bfloat16'", "Received: ")):
        sok.TableOptions(exchange_dtype=dtype)


def test_one_worker_rounds_nothing():
    table = EmbeddingVariable(1, 10, exchange_dtype=tf.bfloat16)
    table.assign(np.array([3]), [[1.001]])
    assert lookup_rows(table, tf.constant([3], tf.int64)).numpy() == np.float32(1.001)
    assert table.exchange_dtype == "bfloat16" and "exchanged in bfloat16" in repr(table)
    assert "exchanged" not in repr(EmbeddingVariable(1, 10))
