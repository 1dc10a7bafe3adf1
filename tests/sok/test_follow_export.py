"""Versions of native exports that follow a job: each is what an export of the same instant would be."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import sok
from sok.base.errors import DamagedFileError
from sok.checkpoint import CheckpointError, read_manifest
from tests.reference.keys import extreme_keys
from tests.sok.feed_cases import (
    DIM,
    Served,
    answers,
    assert_same_answers,
    assert_same_export,
    export,
    new_table,
    told,
    train,
)
from tests.sok.threads_world import checked, run_world

ERRORS = (CheckpointError, DamagedFileError, OSError, tf.errors.OpError)


@pytest.fixture(scope="module", autouse=True)
def init():
    sok.Init()


@pytest.fixture
def feed(tmp_path):
    return tmp_path / "feed"


@pytest.fixture
def exports(tmp_path):
    folder = tmp_path / "exports"
    folder.mkdir()
    return folder


def begun(feed, exports, model, **more):
    """A publisher that has published once, and a follower of the first export."""
    publisher = sok.Publisher(feed, model)
    publisher.publish()
    export(model, exports / "1", **more)
    return publisher, sok.follow_export(feed, exports, max_to_keep=None)


def versions(exports):
    return sorted(path.name for path in exports.iterdir())


def same_as_now(model, version, scratch, **more):
    fresh = export(model, scratch / f"fresh_of_{Path(version).name}", **more)
    assert_same_export(version, fresh)
    return fresh


OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["assign", "train", "erase"]), st.lists(st.integers(0, 11), min_size=1, max_size=4)),
    st.sampled_from([("dense", []), ("publish", []), ("save all", []), ("compact", []), ("poll", [])]),
    st.sampled_from([("publish", []), ("poll", [])]),
)


@settings(max_examples=6, deadline=None)
@given(program=st.lists(OPERATIONS, max_size=12))
def test_the_newest_version_is_the_export_of_the_same_instant(tmp_path_factory, program):
    scratch = tmp_path_factory.mktemp("program")
    tables = [
        new_table("hashed", initializer="normal"),
        new_table("identity", hashed=False, capacity=12, initializer="normal"),
        new_table("narrow_keys", dim=2, key_dtype=tf.uint32, initializer="uniform"),
    ]
    model, optimizer = Served(*tables), sok.optimizers.Adagrad(0.1)
    publisher, follower = begun(scratch / "feed", scratch / "exports", model)
    saved = None
    for number, (what, keys) in enumerate([*program, ("publish", []), ("poll", [])]):
        if what == "assign":
            for table in tables:
                table.assign(np.array(keys, table.key_dtype.as_numpy_dtype), np.full([len(keys), table.dim], number))
        elif what == "train":
            for table in tables:
                train(table, optimizer, keys)
        elif what == "erase":
            for table in tables:
                table.erase(np.array(keys, table.key_dtype.as_numpy_dtype))
        elif what == "dense":
            model.shift.assign_add(1.5)
        elif what == "publish":
            publisher.publish()
        elif what == "save all":
            sok.save(scratch / "feed", model, dense=True)
        elif what == "compact":
            sok.compact(scratch / "feed")
        if what in ("publish", "save all"):
            saved = export(model, scratch / f"fresh{number}")
        if what == "poll" and (version := follower.poll()) is not None and saved is not None:
            assert_same_export(version, saved)
    assert follower.generation in [link.generation for link in read_manifest(scratch / "feed").links] + [
        link.same_as for link in read_manifest(scratch / "feed").links
    ]
    shutil.rmtree(scratch)


@pytest.mark.parametrize(
    ("dtype", "row_dtype"),
    [
        (np.int64, None),
        (np.int32, None),
        (np.uint64, None),
        (np.uint32, None),
        (np.int64, "float16"),
        (np.int64, "int8"),
    ],
)
def test_keys_of_all_dtypes_and_narrow_rows_follow(feed, exports, tmp_path, rng, dtype, row_dtype):
    table = new_table("typed", dim=5, key_dtype=dtype, initializer="uniform")
    model, keys = Served(table), np.unique(extreme_keys(dtype))
    how = {"row_dtype": row_dtype, "dtype": tf.as_dtype(dtype), "default": -7}
    table.assign(keys[::2], rng.normal(size=[len(keys[::2]), 5]))
    publisher, follower = begun(feed, exports, model, **how)
    for change in range(2):
        table.assign(keys[change::3], rng.normal(size=[len(keys[change::3]), 5]))
        table.erase(keys[change : change + 2])
        publisher.publish()
        same_as_now(model, follower.poll(), tmp_path, **how)


@pytest.mark.parametrize(("hashed", "default"), [(True, "initial"), (True, 2.5), (False, "initial"), (False, "zeros")])
def test_tables_gain_their_first_key_and_lose_their_last(feed, exports, tmp_path, hashed, default):
    table = new_table("emptied", hashed=hashed, capacity=12, initializer="normal")
    model = Served(table)
    publisher, follower = begun(feed, exports, model, default=default)
    same_as_now(model, follower.poll(), tmp_path, default=default)
    for what in ("gain", "lose", "gain", "full", "lose", "full"):
        if what == "gain":
            table.assign([0, 3], [[1.0] * DIM, [2.0] * DIM])
        elif what == "lose":
            table.erase([0, 3])
        publisher.publish() if what != "full" else sok.save(feed, model, dense=True)
        same_as_now(model, follower.poll(), tmp_path, default=default)
    assert told(exports / "2")["tables"][0]["num_rows"] == (0 if hashed else 12)


def test_several_features_of_one_table_and_dense_weights_of_all_dtypes_follow(feed, exports, tmp_path):
    class Features(Served):
        def __init__(self, *tables):
            super().__init__(*tables)
            self.half = tf.Variable([1.5], dtype=tf.bfloat16)
            self.count = tf.Variable(2**60 + 1)
            self.names = tf.Variable(["a", "b"])
            self.unused = tf.Variable(1.0)

        def __call__(self, ids):
            user, item = self.tables
            pooled = sok.group_embedding_lookup_sparse([user, item, user], [ids, ids, ids + 1], "sum", training=False)
            out = {f"pooled_{number}": one for number, one in enumerate(pooled)}
            wide = tf.cast(self.half, tf.float32) + tf.cast(self.count % 7, tf.float32)
            return {**out, "wide": wide, "names": tf.identity(self.names)}

    model = Features(new_table("feature_user"), new_table("feature_item", dim=2, hashed=False, capacity=50))
    publisher, follower = begun(feed, exports, model)
    model.tables[0].assign([7, 8], [[1.0] * DIM, [3.0] * DIM])
    model.tables[1].assign([7], [[5.0, 6.0]])
    model.half.assign([-0.5]), model.count.assign(2**60 + 3), model.names.assign(["other", ""])
    publisher.publish()
    version = follower.poll()
    fresh = same_as_now(model, version, tmp_path)
    assert_same_answers(version, fresh, [[7, 8], [9, 0]])
    assert answers(version, [[7]])["names"].tolist() == [b"other", b""]


def test_a_model_of_keras_follows(feed, exports, tmp_path):
    import keras

    ids = keras.Input([2], dtype="int64", name="ids")
    rows = sok.Embedding(100, DIM, name="keras_rows")(ids)
    hidden = keras.layers.BatchNormalization()(keras.layers.Dropout(0.5)(keras.layers.Flatten()(rows)))
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile(sok.DistributedOptimizer("sgd"), "mse")
    sok.export_saved_model(model, exports / "1", native=True)
    follower = sok.follow_export(feed, exports)
    data = np.arange(16).reshape(8, 2), np.ones([8, 1])
    model.fit(*data, batch_size=4, verbose=0, callbacks=[sok.callbacks.Publish(feed, every_steps=1)])
    version = follower.poll()
    sok.export_saved_model(model, tmp_path / "fresh", native=True)
    assert_same_export(version, tmp_path / "fresh")


@pytest.mark.parametrize("row_dtype", [None, "int8"])
def test_tables_whose_columns_several_workers_hold_follow(feed, exports, tmp_path, monkeypatch, row_dtype):
    """Two workers publish; then one alone goes on, whose deltas have whole rows."""
    name = f"cut_{row_dtype}"

    def worker(transport):
        table = sok.EmbeddingVariable(4, 100, name=name, seed=5, placement=sok.column_wise(2), initializer="normal")
        for value in (1.0, 2.0):
            table.assign([3, int(10 * value)], np.full([2, 4], value))
            dense = {"shift": tf.Variable(value), "kernel": tf.Variable(tf.ones([DIM, 1]))}
            sok.save(feed, table, incremental=True, dense=dense)
            yield_to_follower(transport)

    table = sok.EmbeddingVariable(4, 100, name=name, seed=5, initializer="normal")
    model = Served(table)
    export(model, exports / "1", row_dtype=row_dtype)
    follower = sok.follow_export(feed, exports, max_to_keep=None)
    seen = []

    def yield_to_follower(transport):
        if transport.rank == 0:
            seen.append(follower.poll())

    with monkeypatch.context() as patch:
        checked(run_world(2, worker, patch))
    assert [Path(one).name for one in seen] == ["2", "3"]
    sok.restore(feed, table)
    model.shift.assign(2.0)
    assert_same_export(seen[-1], export(model, tmp_path / "two", row_dtype=row_dtype))
    table.assign([3], np.full([1, 4], 7.0))
    sok.save(feed, model, incremental=True, dense=True)
    same_as_now(model, follower.poll(), tmp_path, row_dtype=row_dtype)
