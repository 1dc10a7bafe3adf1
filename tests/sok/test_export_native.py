"""Native exports, loaded by a process that has sok's serving library and no `sok`: they predict as in training."""

import gc
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

import sok
from sok.base import _ops
from sok.tools import cli
from tests.messages import saying
from tests.reference.keys import KEY_DTYPES, extreme_keys
from tests.sok.export_models import Rows, ids_spec
from tests.sok.stranger import Stranger

v1 = tf.compat.v1


@pytest.fixture(scope="module", autouse=True)
def init():
    sok.Init()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Has copied the library from nowhere but an export."""
    folder = tmp_path_factory.mktemp("server")
    table = sok.EmbeddingVariable(1, 10, name="library")
    sok.export_saved_model(table.sparse_read, folder / "1", signatures=ids_spec(), native=True)
    process = Stranger(folder, folder / "1" / "assets.extra" / "libsok_serving.so")
    yield process
    process.close()


@pytest.mark.parametrize(
    "dtype, initializer",
    [
        (np.int64, "uniform"),
        (np.int64, "truncated_normal"),
        (np.int32, "normal"),
        (np.uint32, "orthogonal"),
        (np.uint64, "uniform"),
        (np.uint64, "ones"),
    ],
)
def test_every_key_seen_or_not_reads_as_in_training_bit_for_bit(rng, server, path, dtype, initializer):
    table = sok.EmbeddingVariable(5, 1000, name="any_key", key_dtype=dtype, initializer=initializer)
    extremes = extreme_keys(dtype)
    seen = np.unique(np.concatenate([extremes[::2], rng.integers(0, 1000, 50).astype(dtype)]))
    table.assign(seen, rng.normal(size=(len(seen), 5)).astype("f"))
    report = sok.export_saved_model(Rows(table), path, signatures=ids_spec(tf.as_dtype(dtype)), native=True)
    assert report.tables[0].num_rows == len(seen) == int(table.size())
    (file,) = (path / "assets").iterdir()
    assert report.tables[0].num_bytes == file.stat().st_size
    asked = np.concatenate([extremes, rng.permutation(seen)])[None, :]
    for in_session in (False, True):
        rows = server.predict(path, {"ids": asked}, in_session=in_session)["output_0"]
        np.testing.assert_array_equal(rows, Rows(table)(tf.constant(asked)))
    assert server.predict(path, {"ids": np.zeros([0, 3], dtype)})["output_0"].shape == (0, 3, 5)
    assert int(table.size()) == len(seen)


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_an_identity_table_has_a_row_for_every_legal_key(server, path, dtype):
    table = sok.EmbeddingVariable(3, 20, name="identity", key_dtype=dtype, hashed=False, initializer="normal")
    table.assign(np.array([0, 19], dtype), np.ones([2, 3], "f"))
    spec = ids_spec(tf.as_dtype(dtype))
    assert sok.export_saved_model(Rows(table), path, signatures=spec, native=True).tables[0].num_rows == 20
    asked = np.arange(20, dtype=dtype)[None]
    np.testing.assert_array_equal(server.predict(path, {"ids": asked})["output_0"], Rows(table)(tf.constant(asked)))
    for bad in (20, np.iinfo(dtype).max):
        with pytest.raises(
            RuntimeError, match=rf"(?s)InvalidArgumentError: .*'{table.table_name}': key {bad} is not in \[0, 20\)"
        ):
            server.predict(path, {"ids": np.array([[bad]], dtype)})


@pytest.mark.parametrize(
    "default, expected", [("mean", 2.0), (-7, -7.0), ({"unseen": "zeros"}, 0.0), ("initial", None)]
)
@pytest.mark.parametrize("keys", [[], [0, 5]])
def test_unseen_keys_have_the_default_asked_for(server, path, default, expected, keys):
    table = sok.EmbeddingVariable(2, 9, name="unseen", initializer=keras.initializers.RandomUniform(1.0, 3.0))
    if isinstance(default, dict):
        default = {table.table_name: "zeros"}
    table.assign(np.array(keys, np.int64), np.full([len(keys), 2], 9.0, "f"))
    report = sok.export_saved_model(Rows(table), path, signatures=ids_spec(), default=default, native=True)
    assert report.tables[0].num_rows == len(keys)
    rows = server.predict(path, {"ids": np.array([[0, 5, -5]])})["output_0"]
    if expected is None:
        np.testing.assert_array_equal(rows, Rows(table)(tf.constant([[0, 5, -5]], tf.int64)))
        return
    assert rows[0, :, 0].tolist() == [9.0 if key in keys else expected for key in (0, 5, -5)]


@pytest.mark.parametrize(("row_dtype", "dim"), [("float16", 7), ("float16", 8), ("int8", 1), ("int8", 8)])
def test_narrow_rows_read_as_those_of_the_stock_export(rng, caplog, server, path, row_dtype, dim):
    table = sok.EmbeddingVariable(dim, 1000, name="narrow", initializer="uniform")
    rows = (rng.normal(size=(500, dim)) * rng.lognormal(size=(500, 1))).astype("f")
    rows[3], rows[4] = 0, 1e-6
    table.assign(np.arange(500) * 7919, rows)
    options = dict(signatures=ids_spec(), row_dtype=row_dtype)
    stock = sok.export_saved_model(Rows(table), path.parent / "stock", **options).tables[0]
    native = sok.export_saved_model(Rows(table), path, native=True, **options).tables[0]
    assert caplog.messages == [str(stock), str(native)]
    assert (native.largest_error, native.relative_error) == pytest.approx((stock.largest_error, stock.relative_error))
    asked = np.append(np.arange(500) * 7919, -1)[None]
    expected = tf.saved_model.load(path.parent / "stock").signatures["serving_default"](ids=tf.constant(asked))
    np.testing.assert_array_equal(server.predict(path, {"ids": asked})["output_0"], expected["output_0"])


class Group(tf.Module):
    """Tables, one of them twice, and an ordinary variable."""

    def __init__(self):
        super().__init__()
        self.user = sok.EmbeddingVariable(3, 100, name="group_user", initializer="normal")
        self.item = sok.EmbeddingVariable(2, 50, name="group_item", hashed=False, initializer="uniform")
        self.plain = tf.Variable(np.arange(20, dtype="f").reshape(10, 2))

    def __call__(self, ids, weights, training=False):
        params, all_weights = [self.user, self.item, self.user, self.plain], [None, weights, weights, weights]
        return sok.group_embedding_lookup_sparse(
            params, [ids] * 4, ["sum", "Mean", "sqrtn", "mean"], sp_weights=all_weights, training=training
        )


def test_groups_of_tables_are_one_op_that_combines(rng, server, path):
    model = Group()
    model.user.assign([1, 2, 3], rng.normal(size=(3, 3)))
    specs = (tf.RaggedTensorSpec([None, None], tf.int64), tf.RaggedTensorSpec([None, None], tf.float32))
    report = sok.export_saved_model(model, path, signatures={"other": (model.__call__, specs)}, native=True)
    assert sorted(table.num_rows for table in report.tables) == [3, 50]
    assert len(list((path / "assets").iterdir())) == 2
    for lengths in ([2, 0, 3, 0], [], [0, 0], [1, 1, 1], [40, 1, 900]):
        ids = tf.RaggedTensor.from_row_lengths(rng.integers(0, 10, sum(lengths)), tf.constant(lengths, tf.int64))
        weights = ids.with_values(tf.constant(rng.uniform(0.5, 2, sum(lengths)), tf.float32))
        flat = {
            f"{name}_{part}": getattr(x, part).numpy()
            for name, x in (("ids", ids), ("weights", weights))
            for part in ("values", "row_splits")
        }
        answer = server.predict(path, flat, signature="other")
        for i, tensor in enumerate(model(ids, weights)):
            np.testing.assert_allclose(answer[f"output_{i}"], tensor, rtol=1e-6, atol=1e-6, err_msg=f"{lengths}, {i}")
        if len(lengths) == 4:
            in_session = server.predict(path, flat, signature="other", in_session=True)
            assert all((in_session[name] == rows).all() for name, rows in answer.items())


def click_model():
    ids = keras.Input([3], dtype="int64", name="ids")
    rows = sok.DistributedEmbedding("mean", 1000, 4, slot_num=3, max_nnz=1)(ids)
    return keras.Model(ids, keras.layers.Dense(1, "sigmoid", name="click")(keras.layers.Flatten()(rows)))


def test_the_folder_may_be_moved_and_what_is_there_stays_until_the_new_model_is_whole(server, path, tmp_path):
    model = click_model()
    ids = np.array([[1, 2, 3], [4, 5, 2**60]])
    model(tf.constant(ids), training=True)
    sok.export_saved_model(model, path, native=True)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        sok.export_saved_model(model, path, native=True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr("sok.saved_model.serving_file.ServingFile.add", fail_of_space)
        sok.export_saved_model(model, path, native=True, overwrite=True)
    assert [p.name for p in path.parent.iterdir()] == ["1"]
    expected = model(tf.constant(ids), training=False)
    moved = tmp_path / "elsewhere" / "7"
    shutil.copytree(path, moved)
    shutil.rmtree(path)
    for in_session in (False, True):
        answer = server.predict(moved, {"ids": ids}, in_session=in_session)["click"]
        np.testing.assert_allclose(answer, expected, rtol=0, atol=1e-6)
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob("sok_export_*/*narrow*"))


def fail_of_space(*args):
    raise OSError("no space left")


def test_two_loaded_models_and_one_that_is_gone(path):
    table = sok.EmbeddingVariable(1, 10, name="loaded")
    for n in (1, 2):
        table.assign([1], [[float(n)]])
        sok.export_saved_model(Rows(table), path / str(n), signatures=ids_spec(), native=True)
    first, second, again = (tf.saved_model.load(path / n) for n in ("1", "2", "1"))
    ask = lambda model: model.signatures["serving_default"](tf.constant([[1]], tf.int64))["output_0"].numpy().item()  # noqa: E731
    assert [ask(m) for m in (first, second, again)] == [1.0, 2.0, 1.0]
    mapped = lambda: Path("/proc/self/maps").read_text().count(f"{path}/1/assets/")  # noqa: E731
    assert mapped() == 2
    del first, second
    gc.collect()
    shutil.rmtree(path)  # what is mapped stays
    assert ask(again) == 1.0 and mapped() == 1
    del again
    gc.collect()
    assert mapped() == 0


@pytest.mark.parametrize("dense", [True, False])
def test_a_v1_session_is_exported(server, path, dense):
    with tf.Graph().as_default(), v1.Session() as session:
        table = sok.EmbeddingVariable(2, 10, name="of_session", initializer="normal")
        ids = v1.placeholder(tf.int64, [None], name="ids")
        pooled = sok.group_embedding_lookup_sparse([table], [ids[:, None]], "sum")[0]
        rows = sok.group_embedding_lookup([table], [ids])[0]
        scale = v1.get_variable("scale", initializer=3.0) if dense else tf.constant(3.0)
        session.run([v1.global_variables_initializer(), table.assign([1, 2], [[1.0, 2.0], [3.0, 4.0]])])
        signatures = {"rows": ({"ids": ids}, {"rows": rows * scale, "pooled": pooled})}
        report = sok.export_saved_model(session, path, signatures=signatures, default="zeros", native=True)
    assert report.tables[0].num_rows == 2
    answer = server.predict(path, {"ids": np.array([2, 5])}, "rows", in_session=True)
    assert answer["rows"].tolist() == [[9.0, 12.0], [0.0, 0.0]] and answer["pooled"].tolist() == [[3, 4], [0, 0]]


@pytest.mark.parametrize("in_session", [False, True])
def test_a_damaged_model_fails_when_it_is_loaded_with_the_name_of_the_file(server, path, capsys, in_session):
    table = sok.EmbeddingVariable(2, 10, name="damaged")
    sok.export_saved_model(Rows(table), path, signatures=ids_spec(), native=True)
    assert cli.main(["verify", str(path)]) == 0
    assert re.search(r": whole: native export of 1 table, \d+\.\d kB", capsys.readouterr().out)
    (file,) = (path / "assets").iterdir()
    os.truncate(file, 5000)
    with pytest.raises(RuntimeError, match=rf"(?s)DataLossError: .*{file}: at offset 5000: the file ends here"):
        server.predict(path, {"ids": np.array([[1]])}, in_session=in_session)
    assert cli.main(["verify", str(path)]) == 1
    assert f"{file}: at offset 5000" in capsys.readouterr().err
    file.unlink()
    with pytest.raises(RuntimeError, match="No such file or directory"):
        server.predict(path, {"ids": np.array([[1]])}, in_session=in_session)
    assert cli.main(["verify", str(path)]) == 1
    assert "No such file" in capsys.readouterr().err


def test_verify_says_what_is_no_native_export(path, capsys):
    table = sok.EmbeddingVariable(2, 10, name="stock")
    sok.export_saved_model(Rows(table), path, signatures=ids_spec())
    assert cli.main(["verify", str(path)]) == 1
    assert "without tables of a native export" in capsys.readouterr().err
    (path / "saved_model.pb").write_bytes(b"\xff\xff")
    assert cli.main(["verify", str(path)]) == 1
    assert "saved_model.pb: not a SavedModel" in capsys.readouterr().err


def test_a_process_without_the_library_says_which_op_it_lacks(path, stranger):
    table = sok.EmbeddingVariable(2, 10, name="lacks")
    sok.export_saved_model(Rows(table), path, signatures=ids_spec(), native=True)
    with pytest.raises(RuntimeError, match="Sok>Serving"):
        stranger.predict(path, {"ids": np.array([[1]])})


def test_the_library_needs_nothing_but_tensorflows_framework():
    answer = subprocess.run(
        ["readelf", "-d", str(_ops.serving_library_path())], capture_output=True, text=True, check=True
    )
    needed = re.findall(r"NEEDED.*\[(.*)\]", answer.stdout)
    system = ("libstdc++.so", "libm.so", "libgcc_s.so", "libc.so", "libpthread.so", "ld-linux")
    assert [name for name in needed if not name.startswith(system)] == ["libtensorflow_framework.so.2"]
    symbols = subprocess.run(
        ["nm", "-D", "-C", str(_ops.serving_library_path())], capture_output=True, text=True, check=True
    )
    assert "Py" not in {line.split()[-1][:2] for line in symbols.stdout.splitlines()}


def test_paths_of_other_file_systems_are_refused():
    table = sok.EmbeddingVariable(1, 10, name="remote")
    with pytest.raises(ValueError, match=saying("local file system", "Received: 'ram://model/1'")):
        sok.export_saved_model(Rows(table), "ram://model/1", signatures=ids_spec(), native=True)


@pytest.mark.parametrize("preloaded", [False, True])
def test_the_c_library_of_tensorflow_serves_it(path, preloaded):
    table = sok.EmbeddingVariable(2, 10, name="in_c", initializer="uniform")
    table.assign([1], [[5.0, 6.0]])
    sok.export_saved_model(Rows(table), path, signatures=ids_spec(), native=True)
    model = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    signature = model.meta_graphs[0].signature_def["serving_default"]
    libraries = [
        str(Path(tf.sysconfig.get_lib()) / name) for name in ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2")
    ]
    script = Path(__file__).with_name("serve_in_c_script.py")
    ours = str(path / "assets.extra" / "libsok_serving.so")
    done = subprocess.run(
        [
            *[sys.executable, "-I", str(script), *libraries],
            *["" if preloaded else ours, str(path)],
            *[signature.inputs["ids"].name, signature.outputs["output_0"].name, "1", "-9"],
        ],
        env={**os.environ, "LD_PRELOAD": ":".join([*libraries, ours])} if preloaded else None,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = np.float32([float(x) for x in done.stdout.split()]).reshape(1, 2, 2)
    np.testing.assert_array_equal(rows, Rows(table)(tf.constant([[1, -9]], tf.int64)))
