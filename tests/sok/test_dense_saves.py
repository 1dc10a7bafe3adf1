"""Dense weights that are saved beside the rows of tables, of the same step."""

import json
import os
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.checkpoint import CheckpointError, manifest, read_manifest, verify
from sok.checkpoint.dense import Reader, named
from tests.messages import saying
from tests.sok.feed_cases import DIM, Served, new_table, train


@pytest.fixture(scope="module", autouse=True)
def init():
    sok.Init()


def saved(folder):
    """The dense weights that lie there, by name."""
    found = read_manifest(folder).dense
    return tf.train.load_checkpoint(str(folder / found.name)) if found else None


def dense_files(folder):
    return sorted(path.name for path in folder.iterdir() if "-dense" in path.name)


def functional(library, name):
    """BatchNormalization, a layer that is used twice, and one that draws random numbers."""
    ids = library.Input([2], dtype="int64")
    embedding = (sok.Embedding if library is keras else library.layers.Embedding)(100, 4, name=name)
    shared = library.layers.Dense(8, activation="tanh")
    hidden = library.layers.Dropout(0.5)(shared(shared(library.layers.Flatten()(embedding(ids)))))
    return library.Model(ids, library.layers.Dense(1)(library.layers.BatchNormalization()(hidden)))


class Subclassed(keras.Model):
    """Layers in a list, one of them an attribute, too, in a dict, and a weight of its own."""

    def __init__(self, name):
        super().__init__()
        self.rows = sok.Embedding(100, 2, name=name)
        self.steps = [keras.layers.Dense(3), keras.layers.BatchNormalization()]
        self.first = self.steps[0]
        self.scale = self.add_weight(name="scale", shape=[3])
        self.heads = {"click": keras.layers.Dense(1)}

    def call(self, ids, training=False):
        hidden = self.first(tf.reshape(self.rows(ids), [-1, 4]))
        return self.heads["click"](self.steps[1](hidden, training=training) * self.scale)


DATA = np.arange(16).reshape(8, 2), np.ones([8, 1])


def trained(model):
    model.compile(sok.DistributedOptimizer("adam"), "mse", metrics=["mae"])
    model.fit(*DATA, verbose=0)
    return model


def built(model):
    """One that serves: neither compiled nor trained."""
    model(DATA[0])
    return model


@pytest.mark.filterwarnings("ignore:.*another seed")
@pytest.mark.parametrize("make", [lambda n: functional(keras, n), Subclassed], ids=["functional", "subclassed"])
def test_a_model_of_keras_that_serves_has_the_names_of_the_one_that_is_trained(tmp_path, make):
    here = trained(make("served_rows"))
    sok.save(tmp_path, here, dense=True)
    names = {id(getattr(v, "_value", v)) for v in here.weights} - {id(v) for v in here.weights if "rows" in v.name}
    assert {id(v) for v in named(True, here).values()} == names and len(names) == 8 + (make is Subclassed)
    there = built(make("served_rows_there"))
    (table,) = (v for v in there.weights if "rows" in v.name)
    follower = sok.follow(tmp_path, {read_manifest(tmp_path).names[0]: table}, dense=named(True, there))
    assert follower.poll()
    np.testing.assert_array_equal(there(DATA[0]), here(DATA[0]))


def test_a_model_of_tf_keras_that_serves_has_the_names_of_the_one_that_is_trained():
    here, there = (functional(tf_keras, "stock_rows") for _ in range(2))
    here.compile("adam", "mse", metrics=["mae"])
    here.fit(*DATA, verbose=0)
    assert [(n, v.shape) for n, v in named(True, here).items()] == [(n, v.shape) for n, v in named(True, there).items()]
    assert len(named(True, here)) == len(here.weights)


def test_a_module_is_named_by_its_attributes_and_an_optimizer_is_no_part_of_it(tmp_path):
    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.table = new_table("of_module")
            self.dense = [tf.Variable(1.0), {"a": tf.Variable(2.0)}]
            self.again = self.dense[0]
            self.optimizer = sok.OptimizerWrapper(tf_keras.optimizers.Adam(0.1))

    model = Model()
    train(model.table, model.optimizer.embedding_optimizer, [1])
    sok.save(tmp_path, model, dense=True)
    assert set(read_manifest(tmp_path).dense.variables) == {"again", "dense/1/a"}
    assert list(named({"own/name": model.again}, None).values()) == [model.again]


VALUES = {
    "half": (tf.float16, [0.5, -65504.0]),
    "brain": (tf.bfloat16, [0.5, -3e38]),
    "whole": (tf.int64, [-(2**63), 2**63 - 1]),
    "truth": (tf.bool, [True, False]),
    "text": (tf.string, ["", "\0 and more"]),
    "wide": (tf.float64, [1e300, float("nan")]),
    "none": (tf.float32, []),
    "one": (tf.complex64, 1j),
}


def test_weights_of_all_dtypes_come_back(tmp_path):
    table, other = new_table("of_dtypes"), new_table("of_dtypes_there")
    variables = {name: tf.Variable(value, dtype=dtype) for name, (dtype, value) in VALUES.items()}
    there = {name: tf.Variable(tf.zeros_like(variable)) for name, variable in variables.items()}
    sok.save(tmp_path, table, incremental=True, dense=variables)
    assert sok.follow(tmp_path, {table.table_name: other}, dense=there).poll()
    for name, variable in variables.items():
        np.testing.assert_array_equal(there[name].numpy(), variable.numpy())
    assert read_manifest(tmp_path).dense.variables == tuple(sorted(VALUES))
    assert verify(tmp_path) == []


def test_variables_of_keras_may_be_given_by_names(tmp_path):
    table, weight = new_table("of_keras"), keras.Variable([1.0, 2.0])
    sok.save(tmp_path, table, dense={"weight": weight})
    there = keras.Variable([0.0, 0.0])
    sok.follow(tmp_path, {table.table_name: table}, dense={"weight": there}).poll()
    assert np.asarray(there).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("incremental", [False, True])
def test_an_asynchronous_save_has_the_weights_of_the_moment_of_the_call(tmp_path, incremental):
    model, optimizer = Served(new_table("asynchronous")), tf_keras.optimizers.Adam(0.1)
    for step in range(3):
        expected = float(model.shift), model.kernel.numpy()
        saving = sok.save(tmp_path, model, dense=True, asynchronous=True, incremental=incremental)
        model.shift.assign_add(1.0)
        model.kernel.scatter_nd_update([[0, 0]], [float(step)])
        optimizer.apply_gradients([(tf.ones_like(model.kernel), model.kernel)])
        saving.result()
        assert saved(tmp_path).get_tensor("shift") == expected[0]
        np.testing.assert_array_equal(saved(tmp_path).get_tensor("kernel"), expected[1])
        assert len(dense_files(tmp_path)) == 2  # those before are gone
    assert verify(tmp_path) == []


def test_versions_of_tables_over_files_have_dense_weights(tmp_path):
    model = Served(new_table("of_versions", storage=sok.Storage(memory_bytes=2**23, path=tmp_path / "rows")))
    for value in (1.0, 2.0):
        model.shift.assign(value)
        sok.save(tmp_path / "saves", model, dense=True, versions=True)
        assert saved(tmp_path / "saves").get_tensor("shift") == value
    assert verify(tmp_path / "saves") == []


@pytest.mark.parametrize("links", [True, False])
def test_compacting_and_erasing_keep_them(tmp_path, monkeypatch, links):
    model = Served(new_table("compacted"))
    model.tables[0].assign([1, 2], np.ones([2, DIM]))
    for value in (1.0, 2.0):
        model.shift.assign(value)
        sok.save(tmp_path, model, dense=True, incremental=True)
    if not links:  # a file system that has none
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(1, "Operation not permitted")))
    for rewrite in (
        lambda: sok.compact(tmp_path),
        lambda: sok.erase(model.tables[0], [1], checkpoints=[tmp_path]),
    ):
        rewrite()
        found = read_manifest(tmp_path)
        assert len(found.links) == 1 and found.dense.name == f"{found.generation}-dense"
        assert saved(tmp_path).get_tensor("shift") == 2.0
        assert verify(tmp_path) == [] and len(dense_files(tmp_path)) == 2


def test_files_of_older_saves_and_of_killed_ones_are_swept(tmp_path):
    model = Served(new_table("swept"))
    sok.save(tmp_path, model, dense=True)
    # What TensorFlow writes before it renames, and what was complete when the job was killed.
    for left in ("index.tempstate17", "data-00000-of-00001.tempstate1234567", "index", "data-00000-of-00001"):
        (tmp_path / f"g000002-0123abcd-dense.{left}").write_bytes(b"left")
    sok.save(tmp_path, model, dense=True, incremental=True)
    assert dense_files(tmp_path) == [
        f"{read_manifest(tmp_path).dense.name}.{e}" for e in ("data-00000-of-00001", "index")
    ]
    sok.save(tmp_path, model, incremental=True)
    assert dense_files(tmp_path) == [] and read_manifest(tmp_path).dense is None


def test_a_save_whose_weights_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    model = Served(new_table("unwritten"))
    sok.save(tmp_path, model, dense=True)
    before, files = read_manifest(tmp_path), sorted(tmp_path.iterdir())
    full = tf.errors.ResourceExhaustedError(None, None, "No space left on device")
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(tf.errors.ResourceExhaustedError):
            patch.setattr("sok.checkpoint.dense.write", lambda *_: (_ for _ in ()).throw(full))
            sok.save(tmp_path, model, dense=True, incremental=True)
        assert read_manifest(tmp_path) == before and sorted(tmp_path.iterdir()) == files
    sok.save(tmp_path, model, dense=True, incremental=True)
    assert len(read_manifest(tmp_path).links) == 2


# What is read.


def test_a_manifest_without_weights_is_what_it_was(tmp_path):
    table = new_table("plain")
    sok.save(tmp_path, table)
    data = (tmp_path / "manifest.json").read_bytes()
    body = json.loads(data)
    assert "dense" not in body and list(body)[:4] == ["format", "version", "generation", "sok_version"]
    assert manifest.to_bytes(read_manifest(tmp_path)) == data
    members = ["world_size", "created", "tables", "optimizers", "checksum"]
    assert list(body)[4:] == members  # as the sok before wrote them


def test_a_manifest_of_an_older_sok_is_read():
    for file in (Path(__file__).resolve().parents[1] / "data").rglob("manifest.json"):
        assert read_manifest(file.parent).dense is None


def damaged(folder, change):
    body = json.loads((folder / "manifest.json").read_bytes())
    change(body)
    body.pop("checksum")
    (folder / "manifest.json").write_text(json.dumps({**body, "checksum": manifest.checksum(body)}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(name="../elsewhere-dense"), "which no save gives"),
        (lambda d: d.update(name=7), "'name' of the dense weights is 7"),
        (lambda d: d.update(bytes=-1), "'bytes' of the dense weights is negative"),
        (lambda d: d.update(variables=["a", 3]), "names that are none"),
        (lambda d: d.update(variables="a"), "'variables' of the dense weights is 'a'"),
        (lambda d: d.pop("variables"), "the dense weights has no 'variables'"),
        (lambda d: d.clear(), "the dense weights has no"),
    ],
)
def test_a_manifest_that_says_nonsense_of_them_is_an_error(tmp_path, change, said):
    sok.save(tmp_path, Served(new_table("nonsense")), dense=True)
    damaged(tmp_path, lambda body: change(body["dense"]))
    with pytest.raises(CheckpointError, match=saying("manifest.json", said)):
        read_manifest(tmp_path)
    damaged(tmp_path, lambda body: body.update(dense=None))
    with pytest.raises(CheckpointError, match="dense weights"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda index, data: index.unlink(), "are missing"),
        (lambda index, data: data.unlink(), "are missing"),
        (lambda index, data: os.truncate(data, 3), "bytes, where the manifest says"),
        (lambda index, data: data.write_bytes(bytes(data.stat().st_size)), "Checksum does not match|checksum|crc"),
        (lambda index, data: index.write_bytes(bytes(index.stat().st_size)), "sstable"),
    ],
)
def test_missing_and_damaged_files_are_told_before_anything_changes(tmp_path, damage, said):
    table, other = new_table("damaged"), new_table("damaged_there")
    sok.save(tmp_path, table, dense={"w": tf.Variable(np.arange(9.0))})
    there = tf.Variable(np.zeros(9))
    follower = sok.follow(tmp_path, {table.table_name: other}, dense={"w": there})
    assert follower.poll()
    table.assign([1], np.ones([1, DIM]))
    sok.save(tmp_path, table, incremental=True, dense={"w": tf.Variable(np.ones(9))})
    index, data = (tmp_path / f"{read_manifest(tmp_path).dense.name}.{e}" for e in ("index", "data-00000-of-00001"))
    damage(index, data)
    (line,) = verify(tmp_path)
    assert "-dense" in line
    with pytest.raises((CheckpointError, tf.errors.OpError), match=f"(?i){said}"):
        follower.poll()
    assert there.numpy().tolist() == list(range(9)) and int(other.size()) == 0
    sok.save(tmp_path, table, incremental=True, dense={"w": tf.Variable(np.ones(9))})
    assert follower.poll() and there.numpy().tolist() == [1] * 9 and int(other.size()) == 1


# What is refused.


def test_what_makes_no_sense_is_refused_with_words(tmp_path):
    table, weight = new_table("refusing"), tf.Variable(1.0)
    for dense, said in (
        ({"a": 3.0}, "must give a dense variable for each name. Received: 'a': 3.0"),
        ({7: weight}, "must give a dense variable for each name. Received: 7"),
        ("all", "must be a bool, or variables by their names. Received: 'all'"),
        (None, "must be a bool, or variables by their names. Received: None"),
        ([weight], "must be a bool, or variables by their names"),
    ):
        with pytest.raises(TypeError, match=saying(said)):
            sok.save(tmp_path, table, dense=dense)
        with pytest.raises(TypeError, match=saying(said)):
            sok.follow(tmp_path, table, dense=dense)
    for what in (table, [table]):
        with pytest.raises(ValueError, match=saying("`dense=True` is for a Keras model", "dense={'name': variable}")):
            sok.save(tmp_path, what, dense=True)
    assert not tmp_path.exists() or list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_built_has_no_weights_to_save_or_to_follow(tmp_path):
    class Tower(keras.Model):
        def __init__(self):
            super().__init__(name="tower")
            self.rows = sok.Embedding(100, 4, name="of_a_tower")
            self.rows(tf.constant([1, 2], tf.int64))  # it has its table
            self.head = keras.layers.Dense(1)

        def call(self, ids):
            return self.head(self.rows(ids))

    model = Tower()
    for use in (sok.save, sok.follow):
        with pytest.raises(ValueError, match=saying("the model 'tower' is not built", "Call it on a batch first")):
            use(tmp_path, model, dense=True)
    model(tf.constant([1, 2], tf.int64))
    sok.save(tmp_path, model, dense=True)
    assert len(read_manifest(tmp_path).dense.variables) == 2


def test_a_table_is_no_dense_weight(tmp_path):
    table = new_table("no_weight")
    with pytest.raises(TypeError, match="must give a dense variable for each name"):
        sok.save(tmp_path, table, dense={"table": table})


def test_a_follower_of_other_weights_is_told_which_are_missing(tmp_path):
    table, other = new_table("others"), new_table("others_there")
    mapping = {table.table_name: other}
    table.assign([1], np.ones([1, DIM]))
    sok.save(tmp_path, table)
    with pytest.raises(ValueError, match=saying("the save has no dense weights", "follow without")):
        sok.follow(tmp_path, mapping, dense={"w": tf.Variable(1.0)}).poll()
    sok.save(tmp_path, table, dense={"w": tf.Variable([1.0, 2.0]), "v": tf.Variable(1)})
    for dense, error, said in (
        (
            {"w": tf.Variable([0.0, 0.0]), "x": tf.Variable(1.0)},
            ValueError,
            "names 'x'. It has 'v', 'w'",
        ),
        ({"v": tf.Variable(0), "w": tf.Variable([0.0])}, ValueError, "'w' have shape (2,) in the save, and (1,) here"),
        ({"w": tf.Variable([0, 0])}, tf.errors.OpError, "int32"),
    ):
        with pytest.raises(error, match=saying(said)):
            sok.follow(tmp_path, mapping, dense=dense).poll()
        assert int(other.size()) == 0 and all(not np.any(v.numpy()) for n, v in dense.items() if n != "x")
    some = tf.Variable(0)
    assert sok.follow(tmp_path, mapping, dense={"v": some}).poll() and int(some) == 1  # not all need to be followed


def test_workers_that_name_others_are_told(tmp_path, monkeypatch):
    from tests.sok.threads_world import run_world

    def worker(transport):
        table = sok.EmbeddingVariable(DIM, 100, name="named_apart")
        sok.save(tmp_path, table, dense={f"of_{transport.rank}": tf.Variable(1.0)})

    for result in run_world(2, worker, monkeypatch):
        assert isinstance(result, ValueError) and "dense" in str(result) and "of_1" in str(result)


def test_a_folder_that_was_copied_has_them(tmp_path):
    table = new_table("copied")
    sok.save(tmp_path / "a", table, dense={"w": tf.Variable(3.0)})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    found = read_manifest(tmp_path / "b").dense
    assert float(Reader(str(tmp_path / "b"), found).read("w", tf.float32)) == 3.0
