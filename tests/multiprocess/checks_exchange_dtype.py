"""Rows and gradients that travel in 16 bit on real workers: what is rounded, and what goes wrong all the same."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.job import context
from sok.layers import for_keras
from sok.lookup.feature import Csr, Feature
from sok.lookup.lookup import lookup_group, lookup_rows
from tests.multiprocess.checks_distributed import SCALERS
from tests.multiprocess.checks_transport import compare_with_horovod
from tests.reference.exchange import ANSWER_HEADER, owner
from tests.reference.exchange_wire import rounded

ENVIRONMENT = {"SOK_SHARED_MEMORY": "0"}  # as between hosts: over TCP; in shared memory nothing is narrowed
DTYPES = ("float16", "bfloat16")
DIMS, NUM_KEYS, SEGMENTS = (1, 3, 5), 12, 7  # odd widths, so that some messages are filled up
# (table, combiner) of each feature; nothing that weights, so that all may come by sums.
FEATURES = [(0, "sum"), (1, "mean"), (1, "sum"), (2, "sqrtn")]


def check_what_goes_over_tcp_is_what_horovod_sends(world, monkeypatch):
    if world.size > 1:
        assert not context.get_transport().shares_memory
        compare_with_horovod(world, monkeypatch)


def rows_of(table):
    """Initial rows that no 16 bit can hold: [NUM_KEYS, dim]."""
    rng = np.random.default_rng(table)
    return rng.normal(size=(NUM_KEYS, DIMS[table])).astype(np.float32)


def make_tables(name, dtypes, way_home, placement=None):
    dtypes = [dtypes] * len(DIMS) if isinstance(dtypes, str) else dtypes
    tables = [
        sok.EmbeddingVariable(
            dim, 100, name=f"{name}_{t}", way_home=way_home, exchange_dtype=dtype, placement=placement
        )
        for t, (dim, dtype) in enumerate(zip(DIMS, dtypes, strict=True))
    ]
    for t, table in enumerate(tables):
        table.assign(np.arange(NUM_KEYS), rows_of(t))
    return tables


def inputs_of(rank, size):
    """Keys, splits and upstream gradients of a rank; the last of several has no keys at all."""
    rng = np.random.default_rng([rank, size])
    inputs = []
    for table, _ in FEATURES:
        lengths = rng.integers(0, 4, SEGMENTS + rank) * (size == 1 or rank < size - 1)
        splits = np.concatenate([[0], np.cumsum(lengths)])
        upstream = rng.normal(size=(len(lengths), DIMS[table])).astype(np.float32)
        inputs.append((rng.integers(0, NUM_KEYS, splits[-1]), splits, upstream))
    return inputs


def segments_of(splits):
    return [range(int(a), int(b)) for a, b in itertools.pairwise(splits)]


def scale_of(combiner, count):
    return np.float32({"sum": 1, "mean": 1 / max(count, 1), "sqrtn": 1 / np.sqrt(max(count, 1))}[combiner])


def expected_by_rows(size, dtype):
    """Each row is rounded once on its way; each rank's sum of gradients for a row once on its way back."""
    outputs, gradients = [], [np.zeros([NUM_KEYS, dim]) for dim in DIMS]
    for rank in range(size):
        mine, of_rank = [], [np.zeros([NUM_KEYS, dim]) for dim in DIMS]
        for (table, combiner), (keys, splits, upstream) in zip(FEATURES, inputs_of(rank, size), strict=True):
            rows, parts = rounded(rows_of(table), dtype), segments_of(splits)
            output = np.zeros([len(parts), DIMS[table]])
            for s, part in enumerate(parts):
                scale = scale_of(combiner, len(part))
                for i in part:
                    output[s] += scale * rows[keys[i]]
                    of_rank[table][keys[i]] += scale * upstream[s]
            mine.append(output)
        outputs.append(mine)
        for table, sums in enumerate(of_rank):
            gradients[table] += rounded(sums, dtype)
    return outputs, gradients


def expected_by_sums(size, dtype):
    """What an owner has of a segment is summed and then rounded; and so is its gradient on the way back."""
    outputs, gradients = [], [np.zeros([NUM_KEYS, dim]) for dim in DIMS]
    for rank in range(size):
        mine = []
        for (table, combiner), (keys, splits, upstream) in zip(FEATURES, inputs_of(rank, size), strict=True):
            rows, parts = rows_of(table), segments_of(splits)
            output = np.zeros([len(parts), DIMS[table]])
            for s, part in enumerate(parts):
                scale = scale_of(combiner, len(part))
                for of_owner in range(size):
                    piece = [keys[i] for i in part if owner(keys[i], size) == of_owner]
                    output[s] += scale * rounded(sum((rows[key] for key in piece), np.zeros(DIMS[table])), dtype)
                    for key in piece:
                        gradients[table][key] += rounded(scale * upstream[s], dtype)
            mine.append(output)
        outputs.append(mine)
    return outputs, gradients


def assert_close_up_to_order(found, expected, dtype):
    """A sum that was rounded may, if it lies in the middle of two halves, have gone to either: few do."""
    step = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    np.testing.assert_allclose(found, expected, rtol=2 * step, atol=4 * step)
    assert np.mean(np.isclose(found, expected, rtol=1e-5, atol=1e-5)) > 0.9


def features_of(tables, inputs):
    return [
        Feature(tables[table], Csr(tf.convert_to_tensor(keys), tf.convert_to_tensor(splits)), combiner)
        for (table, combiner), (keys, splits, _) in zip(FEATURES, inputs, strict=True)
    ]


def trainer(tables):
    """A step with SGD: from inputs to outputs."""
    optimizer = sok.optimizers.SGD(1.0)

    def train(inputs):
        with tf.GradientTape() as tape:
            outputs = lookup_group(features_of(tables, inputs))
            loss = tf.add_n([tf.reduce_sum(o * i[2]) for o, i in zip(outputs, inputs, strict=True)])
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
        return outputs

    return train


def check_what_is_rounded_is_what_numpy_rounds(world):
    if world.size == 1:
        return
    statements = {"rows": expected_by_rows, "sums": expected_by_sums}
    for dtype, way in itertools.product(DTYPES, statements):
        expected, gradients = statements[way](world.size, dtype)
        # Each type, and each way, once in a function.
        kind = "function" if (dtype == "float16") == (way == "rows") else "eager"
        tables = make_tables(f"wire_{dtype}_{way}_{kind}", dtype, way)
        inputs = inputs_of(world.rank, world.size)
        train = trainer(tables)
        outputs = (tf.function(train) if kind == "function" else train)(inputs)
        for output, of_feature in zip(outputs, expected[world.rank], strict=True):
            if way == "rows":  # rounded as they lie
                np.testing.assert_allclose(output, of_feature, rtol=2e-6, atol=2e-6)
            else:
                assert_close_up_to_order(output, of_feature, dtype)
        for t, table in enumerate(tables):
            keys, after = (x.numpy() for x in table.export())
            assert len(keys) == len([k for k in range(NUM_KEYS) if k % world.size == world.rank])
            assert_close_up_to_order(rows_of(t)[keys] - after, gradients[t][keys], dtype)


def check_copies_are_read_as_rows_that_travel_are(world):
    """A worker's own copy is rounded, too; and the gradients are, which all workers get alike."""
    if world.size == 1:
        return
    for dtype in DTYPES:
        expected, gradients = expected_by_rows(world.size, dtype)
        tables = make_tables(f"wire_copies_{dtype}", dtype, "rows", sok.data_parallel())
        outputs = trainer(tables)(inputs_of(world.rank, world.size))
        for output, of_feature in zip(outputs, expected[world.rank], strict=True):
            np.testing.assert_allclose(output, of_feature, rtol=2e-6, atol=2e-6)
        for t, table in enumerate(tables):
            keys, after = (x.numpy() for x in table.export())
            assert len(keys) == NUM_KEYS
            assert_close_up_to_order(rows_of(t)[keys] - after, gradients[t][keys], dtype)
            of_all = context.get_transport().all_gather(tf.constant(after), f"copies/{table.table_name}").numpy()
            np.testing.assert_array_equal(of_all.reshape([world.size, *after.shape]), [after] * world.size)


def check_rows_come_as_they_were_rounded(world):
    """Without pooling: each element is the stored one, rounded once, on whichever rank the row lies."""
    for dtype in DTYPES:
        tables = make_tables(f"wire_as_is_{dtype}", dtype, "auto")
        for t, table in enumerate(tables):
            keys = tf.constant([5, 0, 5, 3], tf.int64)
            of_rows = rounded(rows_of(t), dtype if world.size > 1 else "float32")
            np.testing.assert_array_equal(lookup_rows(table, keys), of_rows[keys.numpy()])
            # What reads a table's rows for their own sake gets all of them.
            np.testing.assert_array_equal(table.sparse_read(keys), rows_of(t)[keys.numpy()])
            np.testing.assert_array_equal(lookup_rows(table, keys, exact=True), rows_of(t)[keys.numpy()])
        assert f"exchanged in {dtype}" in repr(tables[0]) and tables[0].exchange_dtype == dtype


def bytes_moved(call):
    """By kind of collective: what this rank's messages hold."""
    with sok.trace() as trace:
        call()
    return {name.split("/")[-1].split("_")[0]: entry["bytes"] for name, entry in trace.by_name.items()}


def check_half_as_much_is_moved(world):
    if world.size == 1:
        return
    inputs, moved = inputs_of(world.rank, world.size), {}
    for dtype in ("float32", *DTYPES):
        tables = make_tables(f"wire_bytes_{dtype}", dtype, "rows")
        train = trainer(tables)
        moved[dtype] = bytes_moved(lambda train=train: train(inputs))
    headers = 4 * ANSWER_HEADER * world.size
    for what in ("rows", "grads"):
        half = (moved["float32"][what] - headers) / 2
        assert half > 0 or what == "grads"
        for dtype in DTYPES:
            assert 0 <= moved[dtype][what] - headers - half <= 2 * world.size  # what fills odd messages up
    assert moved["float32"]["keys"] == moved["float16"]["keys"] == moved["bfloat16"]["keys"]


def check_a_group_that_is_not_of_one_mind_travels_in_float32(world):
    inputs = inputs_of(world.rank, world.size)
    for kinds in (("float16", "float16", "float32"), ("float16", "bfloat16", "float16")):
        tables = make_tables(f"wire_mixed_{kinds[1]}", kinds, "rows")
        outputs = lookup_group(features_of(tables, inputs))
        for output, expected in zip(outputs, expected_by_rows(world.size, "float32")[0][world.rank], strict=True):
            np.testing.assert_allclose(output, expected, rtol=2e-6, atol=2e-6)


def check_group_functions_and_columns_travel_as_their_tables_say(world):
    ids = tf.RaggedTensor.from_row_splits(tf.constant([4, 1], tf.int64), [0, 1, 2])
    # Beyond the largest half, so that nobody can mistake one type for another.
    for dtype, first in (("float32", 70000.0), ("float16", np.inf), (tf.bfloat16, 70144.0)):
        first = first if world.size > 1 else 70000.0
        table = sok.EmbeddingVariable(3, 100, name="wire_group", exchange_dtype=dtype)
        table.assign([4, 1], [[70000.0, 1 + 2**-12, 1.0]] * 2)
        (pooled,) = sok.group_embedding_lookup_sparse([table], [ids], "sum")
        (found,) = sok.group_embedding_lookup([table], [[[4]]])
        assert pooled[0, 0] == found[0, 0, 0] == first
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            with sok.group_embedding_column_scope():
                item = tf.feature_column.categorical_column_with_identity("item", 10)
                constant = tf.keras.initializers.Constant(70000.0)
                columns = [sok.feature_column.embedding_column(item, 2, initializer=constant, exchange_dtype=dtype)]
            net = tf.compat.v1.feature_column.input_layer({"item": [[4], [1]]}, columns)
            np.testing.assert_array_equal(session.run(net), np.full([2, 2], first))


def check_workers_that_round_otherwise_are_told_of_it(world):
    if world.size == 1:
        return
    mine = "float16" if world.rank == 0 else "bfloat16"
    table = sok.EmbeddingVariable(3, 100, name="wire_other", initializer="ones", exchange_dtype=mine)
    asked = ", ".join(["float16"] + ["bfloat16"] * (world.size - 1))
    keys = tf.constant([1, 2], tf.int64)
    for _ in range(2):
        with pytest.raises(tf.errors.FailedPreconditionError, match=f"`exchange_dtype`.*by rank: {asked}"):
            lookup_rows(table, keys)
    np.testing.assert_array_equal(lookup_rows(table, keys, exact=True), np.ones([2, 3]))


def check_bad_news_travel_in_16_bit(world):
    if world.size == 1:
        return
    for dtype in DTYPES:
        table = sok.EmbeddingVariable(4, 10, name=f"wire_full_{dtype}", initializer="ones", exchange_dtype=dtype)
        for n in (11, 12, 13):
            many = tf.range(n, dtype=tf.int64) * world.size  # all of rank 0, which has room for ten
            with pytest.raises(
                tf.errors.ResourceExhaustedError, match=f"(?s)rank 0 could not answer.*wire_full_{dtype}"
            ):
                lookup_rows(table, many)
        identity = sok.EmbeddingVariable(1, 4, name=f"wire_key_{dtype}", hashed=False, exchange_dtype=dtype)
        with pytest.raises(tf.errors.InvalidArgumentError, match="outside"):
            lookup_rows(identity, tf.constant([4 * world.size if world.rank == 1 else 0], tf.int64))
        is_bad = world.rank == world.size - 1
        with pytest.raises(ValueError if is_bad else tf.errors.InvalidArgumentError, match="keys must be"):
            lookup_rows(table, tf.constant([1.5] if is_bad else [1]))
        np.testing.assert_array_equal(lookup_rows(table, tf.constant([3], tf.int64)), np.ones([1, 4]))


def check_a_gradient_that_overflows_on_its_way_stops_the_step_everywhere(world):
    """Finite where it is made: only in 16 bit it is too large, and the loss scale is halved until it is not."""
    if world.size != 2:  # Keras takes seconds to trace what it does then
        return
    key, mean = tf.constant([0], tf.int64), (1.0 + world.size) / 2.0
    for family in ("keras", "tf_keras"):
        sgd, scaler_of = SCALERS[family]
        table = sok.EmbeddingVariable(
            2, 10, name=f"wire_overflows_{family}", initializer="ones", exchange_dtype="float16"
        )
        scaler = scaler_of(sok.DistributedOptimizer(sgd(1.0)), initial_scale=65536.0 * 2)

        @tf.function
        def step(key, factor, table=table, scaler=scaler, family=family):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(lookup_rows(table, key)) * factor
                scaled = scaler.scale_loss(loss) if family == "keras" else scaler.get_scaled_loss(loss)
            gradients = tape.gradient(scaled, [table])
            if family != "keras":
                gradients = scaler.get_unscaled_gradients(gradients)
            scaler.apply_gradients([(gradients[0], table)])

        # The last rank's is too large until the scale is so small that rank + 1 times it fits: below 65520.
        skipped, scale = 0, 65536.0 * 2
        while scale * world.size >= 65520.0:
            skipped, scale = skipped + 1, scale / 2
        assert skipped >= 2
        for _ in range(skipped):
            step(key, tf.constant(1.0 + world.rank))
            np.testing.assert_array_equal(lookup_rows(table, key), [[1.0, 1.0]])
        step(key, tf.constant(1.0 + world.rank))
        np.testing.assert_allclose(lookup_rows(table, key), [[1.0 - mean] * 2], atol=1e-6)
        now = scaler.dynamic_scale if family == "keras" else scaler.loss_scale
        assert float(np.asarray(now)) == scale


def check_layers_travel_as_they_were_told_under_any_policy(world):
    ids, stored = tf.constant([[[4], [1]], [[0], [4]]], tf.int64), 1 + 2**-9
    for library, (policy, travels) in itertools.product(
        (keras, tf_keras), (("mixed_float16", None), ("mixed_bfloat16", "float16"), ("float32", "bfloat16"))
    ):
        layers = for_keras(library)
        options = {"embedding_initializer": library.initializers.Constant(stored), "dtype": policy}
        options |= {} if travels is None else {"exchange_dtype": travels}
        made = [
            layers.DistributedEmbedding("sum", 50, 3, slot_num=2, max_nnz=2, **options),
            layers.All2AllDenseEmbedding(50, 3, slot_num=2, nnz_per_slot=1, **options),
        ]
        for layer in made:
            layer = type(layer).from_config(layer.get_config())

            def step(layer=layer):
                with tf.GradientTape() as tape:
                    out = layer(ids)
                    loss = tf.reduce_sum(tf.cast(out, tf.float32))
                return out, tape.gradient(loss, layer.embedding_variable)

            out, gradient = step()
            computed = policy.removeprefix("mixed_")
            assert out.dtype == computed and gradient.dtype == tf.float32
            home = rounded(np.full(out.shape, stored), (travels if world.size > 1 else None) or "float32")
            np.testing.assert_array_equal(np.asarray(out, np.float32), rounded(home, computed))
            assert gradient.values.shape[0] == 0 or float(gradient.values[0, 0]) in (world.size, 2.0 * world.size)
            # Stored rows have all their bits.
            assert (layer.embedding_variable.export()[1].numpy() == np.float32(stored)).all()
            if world.size == 1:
                continue
            # Three keys, of which this rank answers those that are its own: to each of the ranks.
            owned = 3 * sum(owner(key, world.size) == world.rank for key in (0, 1, 4))
            size = ANSWER_HEADER + (owned if travels is None else (owned + 1) // 2)
            assert bytes_moved(step)["rows"] == 4 * size * world.size


def check_one_lookup_in_a_v1_session(world):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.EmbeddingVariable(3, 100, name="wire_v1", exchange_dtype="bfloat16")
        store = table.assign(np.arange(NUM_KEYS), rows_of(1))
        rows = lookup_rows(table, tf.constant([2, 7], tf.int64))
        train = sok.optimizers.SGD(1.0).apply_gradients([(tf.gradients(rows * 1.0078125, table)[0], table)])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(store)
        dtype = "bfloat16" if world.size > 1 else "float32"
        found, _ = session.run([rows, train])
        np.testing.assert_array_equal(found, rounded(rows_of(1), dtype)[[2, 7]])
        keys, after = session.run(table.export())
        expected = rows_of(1)[keys]
        expected[np.isin(keys, [2, 7])] -= rounded(1.0078125, dtype) * world.size
        np.testing.assert_allclose(after, expected, atol=1e-6)
