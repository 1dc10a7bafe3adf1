"""Models exported and loaded by a process that has no `sok`: they predict what training predicts."""

import threading
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.base import _ops
from sok.saved_model import rows
from sok.saved_model.stock_ops import StockOps
from tests.reference.keys import KEY_DTYPES, extreme_keys
from tests.sok.export_models import Rows, ids_spec

TOLERANCE = 1e-6


@pytest.fixture(scope="module", autouse=True)
def init():
    sok.Init()


def assert_equal(stranger, path, model, inputs, output="output_0", **options):
    expected = model(*[tf.constant(x) for x in inputs.values()], **options)
    actual = stranger.predict(path, inputs)[output]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)
    return actual


@pytest.mark.parametrize(
    "dtype, initializer",
    [
        (np.int64, "uniform"),
        (np.int64, "truncated_normal"),
        (np.int32, "normal"),
        (np.int32, "ones"),
        (np.uint32, "orthogonal"),
        (np.uint32, "uniform"),
        (np.uint64, "uniform"),
        (np.uint64, "normal"),
    ],
)
def test_every_key_seen_or_not_reads_as_in_training(rng, stranger, path, dtype, initializer):
    table = sok.EmbeddingVariable(5, 1000, name="any_key", key_dtype=dtype, initializer=initializer)
    extremes = extreme_keys(dtype)
    seen = np.unique(np.concatenate([extremes[::2], rng.integers(0, 1000, 50).astype(dtype)]))
    table.assign(seen, rng.normal(size=(len(seen), 5)).astype("f"))
    report = sok.export_saved_model(Rows(table), path, signatures=ids_spec(tf.as_dtype(dtype)))
    assert report.tables[0].num_rows == len(seen) == int(table.size())
    asked = np.concatenate([extremes, rng.permutation(seen)])
    assert_equal(stranger, path, Rows(table), {"ids": asked[None, :]})
    # All seen: another branch, and bit for bit.
    rows = stranger.predict(path, {"ids": seen[:, None]})["output_0"]
    np.testing.assert_array_equal(rows, table.sparse_read(seen[:, None]))
    assert stranger.predict(path, {"ids": np.zeros([0, 3], dtype)})["output_0"].shape == (0, 3, 5)


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_an_identity_table_has_a_row_for_every_legal_key(stranger, path, dtype):
    table = sok.EmbeddingVariable(3, 20, name="identity", key_dtype=dtype, hashed=False, initializer="normal")
    table.assign(np.array([0, 19], dtype), np.ones([2, 3], "f"))
    assert sok.export_saved_model(Rows(table), path, signatures=ids_spec(tf.as_dtype(dtype))).tables[0].num_rows == 20
    rows = assert_equal(stranger, path, Rows(table), {"ids": np.arange(20, dtype=dtype)[None]})
    assert rows[0, 0].tolist() == [1, 1, 1] and rows[0, 1].tolist() != [1, 1, 1]
    for bad in (20, np.iinfo(dtype).max):
        with pytest.raises(RuntimeError, match=r"(?s)InvalidArgumentError: .*is not in \[0, 20\)"):
            stranger.predict(path, {"ids": np.array([[bad]], dtype)})


def test_matrices_of_sok_v2_with_fewer_keys_than_room(stranger, path):
    matrix = sok.Variable(np.arange(14, dtype="f").reshape(7, 2))
    assert sok.export_saved_model(Rows(matrix), path, signatures=ids_spec()).tables[0].num_rows == 7
    assert stranger.predict(path, {"ids": np.array([[6]])})["output_0"].tolist() == [[[12.0, 13.0]]]
    with pytest.raises(RuntimeError, match="InvalidArgumentError"):
        stranger.predict(path, {"ids": np.array([[7]])})


@pytest.mark.parametrize(
    "default, expected",
    [("mean", 2.0), ("zeros", 0.0), (-7, -7.0), ({"unseen": "zeros"}, 0.0)],
)
@pytest.mark.parametrize("keys", [[], [0, 5]])
def test_unseen_keys_have_the_default_asked_for(stranger, path, default, expected, keys):
    table = sok.EmbeddingVariable(2, 9, name="unseen", initializer=keras.initializers.RandomUniform(1.0, 3.0))
    if isinstance(default, dict):
        default = {table.table_name: "zeros"}
    table.assign(np.array(keys, np.int64), np.full([len(keys), 2], 9.0, "f"))
    report = sok.export_saved_model(Rows(table), path, signatures=ids_spec(), default=default)
    assert report.tables[0].num_rows == len(keys)
    rows = stranger.predict(path, {"ids": np.array([[0, 5, -5]])})["output_0"][0, :, 0]
    assert rows.tolist() == [9.0 if key in keys else expected for key in (0, 5, -5)]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("zeros", [[], [3, 60], range(100)])
def test_rows_that_are_zero_are_left_out(monkeypatch, stranger, path, zeros, native):
    monkeypatch.setattr("sok.saved_model.rows.PIECE_BYTES", 7 * 2 * 4)
    table, plain = (sok.EmbeddingVariable(2, 100, hashed=h, name="with_zeros") for h in (True, False))
    for one in (table, plain):
        one.assign(np.arange(100), np.ones([100, 2]))
        one.assign(np.array(zeros, np.int64), np.tile(np.array([0.0, -0.0], "f"), [len(zeros), 1]))
    options = {"signatures": ids_spec(), "drop_zero_rows": True, "native": native}
    with pytest.raises(ValueError, match="`drop_zero_rows` needs default='zeros'.*'initial'"):
        sok.export_saved_model(Rows(table), path, **options)
    report = sok.export_saved_model(Rows(table), path, default=0.0, **options)
    assert report.tables[0].num_rows == 100 - len(zeros)
    if not native:
        rows = stranger.predict(path, {"ids": np.arange(-1, 101)[None]})["output_0"][0, :, 0]
        assert [key - 1 for key in np.flatnonzero(rows == 0)] == [-1, *zeros, 100]
        (found,) = sok.export_saved_model(Rows(plain), path, overwrite=True, **options).tables
        assert found.num_rows == 100  # of an identity table each key has its row


def test_an_empty_table_reads_as_initial_values(stranger, path):
    table = sok.EmbeddingVariable(2, 9, name="empty", initializer="normal")
    assert sok.export_saved_model(Rows(table), path, signatures=ids_spec()).tables[0].num_rows == 0
    assert_equal(stranger, path, Rows(table), {"ids": np.array([[0, 1, -1]])})
    assert int(table.size()) == 0


class Group(tf.Module):
    """Tables, one of them twice, and ordinary variables, by every lookup of groups."""

    def __init__(self):
        super().__init__()
        self.user = sok.EmbeddingVariable(3, 100, name="group_user", initializer="normal")
        self.item = sok.EmbeddingVariable(2, 50, name="group_item", hashed=False, initializer="uniform")
        self.new = sok.DynamicVariable(4, initializer="random")
        self.plain = tf.Variable(np.arange(20, dtype="f").reshape(10, 2))
        self.half = tf.Variable(np.arange(20).reshape(10, 2), dtype=tf.float16)

    def __call__(self, ids, weights, training=True):
        params = [self.user, self.item, self.user, self.plain, self.half]
        combiners = ["sum", "Mean", "sqrtn", "mean", "sum"]
        all_weights = [None, weights, weights, weights, None]
        outputs = sok.group_embedding_lookup_sparse(
            params, [ids] * 5, combiners, sp_weights=all_weights, training=training
        )
        outputs += sok.group_embedding_lookup_sparse(params[:4], [ids] * 4, is_sequence=True, training=training)
        outputs += sok.group_embedding_lookup(params, [ids.to_tensor()] * 5, training=training)
        if not training:  # SOK v2's lookups make rows always, but not in what is exported
            return outputs
        outputs += sok.lookup_sparse([self.new, self.item], [ids, ids], combiners=["sum", "average"])
        return [*outputs, sok.all2all_dense_embedding(self.new, ids.values)]


@pytest.mark.parametrize("lengths", [[2, 0, 3, 0], [], [0, 0]])
def test_groups_of_tables_and_variables(rng, stranger, path, lengths):
    model = Group()
    ids = tf.RaggedTensor.from_row_lengths(rng.integers(0, 10, sum(lengths)), tf.constant(lengths, tf.int64))
    weights = ids.with_values(tf.constant(rng.uniform(0.5, 2, sum(lengths)), tf.float32))
    model.user.assign([1, 2, 3], rng.normal(size=(3, 3)))

    def serve(ids, weights):
        return [*model(ids, weights, training=False), sok.lookup_sparse(model.new, ids, weights, combiners="mean")]

    specs = (tf.RaggedTensorSpec([None, None], tf.int64), tf.RaggedTensorSpec([None, None], tf.float32))
    report = sok.export_saved_model(model, path, signatures={"other": (serve, specs)})
    assert sorted(table.num_rows for table in report.tables) == [0, 3, 50]  # each once, and none was made
    flat = {
        f"{name}_{part}": getattr(x, part)
        for name, x in (("ids", ids), ("weights", weights))
        for part in ("values", "row_splits")
    }
    answer = stranger.predict(path, {name: x.numpy() for name, x in flat.items()}, signature="other")
    expected = serve(ids, weights)
    assert len(answer) == len(expected)
    for i, tensor in enumerate(expected):
        np.testing.assert_allclose(answer[f"output_{i}"], tensor, rtol=1e-6, atol=TOLERANCE, err_msg=str(i))


def test_other_threads_look_up_in_tables_while_one_exports(path):
    table = sok.EmbeddingVariable(2, 10, name="threads", initializer="ones")
    libraries = []

    def serve(ids):
        thread = threading.Thread(target=lambda: libraries.append(_ops.lib()))
        thread.start()
        thread.join()
        return table.sparse_read(ids)

    sok.export_saved_model(serve, path, signatures=ids_spec())
    assert libraries == [_ops.lib()] and not _ops.is_substituted()


def test_a_table_that_no_handle_leads_to_is_refused():
    stock = StockOps(None)
    with pytest.raises(ValueError, match="as an argument of a tf.function"):
        stock.sok_table_lookup(tf.constant(0), tf.constant([1], tf.int64), False, 2)


def test_functions_that_were_traced_before_are_traced_anew_and_left_as_they_were(stranger, path):
    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.table = sok.EmbeddingVariable(2, 10, name="traced", initializer="ones")
            self.traced = 0

        @tf.function
        def inner(self, ids):
            self.traced += 1
            return sok.lookup_sparse(self.table, ids, combiners="sum")

        @tf.function(input_signature=[ids_spec()])
        def __call__(self, ids):
            if tf.size(ids) == 0:  # AutoGraph
                return tf.fill([1, 2], -1.0)
            return self.inner(ids) + self.inner(ids)

    model = Model()
    ids = tf.constant([[1, 2], [3, 3]], tf.int64)
    before = model(ids)
    traced, size = model.traced, int(model.table.size())
    for n in (1, 2):
        sok.export_saved_model(model, path / str(n))  # its own signature
        answer = stranger.predict(path / str(n), {"ids": ids.numpy()})["output_0"]
        np.testing.assert_allclose(answer, before)
        assert stranger.predict(path / str(n), {"ids": np.zeros([0, 2], np.int64)})["output_0"].tolist() == [[-1, -1]]
    assert model.traced == traced + 2  # once for each export, though called twice
    again = model(tf.constant([[7, 8]], tf.int64))
    assert again.shape == (1, 2) and int(model.table.size()) == size + 2  # it trains as ever
    assert model.traced == traced + 2


@pytest.mark.parametrize("row_dtype, step", [("float16", 2.0**-10), ("int8", 1 / 127)])
def test_narrow_rows_lose_what_they_say(rng, caplog, stranger, path, row_dtype, step):
    table = sok.EmbeddingVariable(8, 1000, name="narrow", initializer="ones")
    rows = (rng.normal(size=(500, 8)) * rng.lognormal(size=(500, 1))).astype("f")
    rows[3] = 0
    table.assign(np.arange(500), rows)
    report = sok.export_saved_model(Rows(table), path, signatures=ids_spec(), row_dtype=row_dtype).tables[0]
    assert caplog.messages == [str(report)]
    size = {"float16": 16 + 8, "int8": 8 + 4 + 8}[row_dtype]
    assert (report.row_dtype, report.num_rows, report.num_bytes) == (row_dtype, 500, 500 * size)
    answer = stranger.predict(path, {"ids": np.arange(501)[None]})["output_0"][0]
    assert answer[500].tolist() == [1.0] * 8  # the default is no row, and exact
    error = np.abs(answer[:500] - rows)
    # Half a step, of which the largest number of a row sets the size.
    assert (error <= np.abs(rows).max(1, keepdims=True) * (step / 2 + 1e-6)).all() and error.max() > 0
    np.testing.assert_allclose(report.largest_error, error.max(), rtol=1e-5)
    np.testing.assert_allclose(report.relative_error, np.sqrt((error**2).sum() / (rows**2).sum()), rtol=1e-3)


@pytest.mark.parametrize("row_dtype, value", [("float16", 1e5), ("float16", np.nan), ("int8", np.inf)])
def test_rows_that_do_not_fit_are_refused_and_nothing_is_left(path, row_dtype, value):
    table = sok.EmbeddingVariable(2, 10, name="large")
    table.assign([1, 2], [[0.0, 1.0], [value, 1.0]])
    with pytest.raises(ValueError, match=rf"'{table.table_name}': row 1 of .* that {row_dtype} cannot hold"):
        sok.export_saved_model(Rows(table), path, signatures=ids_spec(), row_dtype=row_dtype)
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("hashed", [True, False])
def test_rows_are_written_in_pieces(rng, monkeypatch, stranger, path, hashed):
    monkeypatch.setattr("sok.saved_model.rows.PIECE_BYTES", 7 * 3 * 4)
    monkeypatch.setattr("sok.saved_model.checkpoint.FILE_BYTES", 100)
    table = sok.EmbeddingVariable(3, 100, name="pieces", hashed=hashed, initializer="normal")
    keys = rng.permutation(100)
    table.assign(keys, rng.normal(size=(100, 3)))
    sok.export_saved_model(Rows(table), path, signatures=ids_spec(), row_dtype="float32")
    assert len(list((path / "variables").glob("variables.data-*"))) > 5
    assert sorted(f.name for f in (path / "variables").iterdir())[-1] == "variables.index"  # no pieces left
    for in_session in (False, True):
        rows = stranger.predict(path, {"ids": keys[None]}, in_session=in_session)["output_0"]
        np.testing.assert_array_equal(rows, table.sparse_read(keys[None]))


def test_a_lookup_that_fails_closes_what_was_being_written(monkeypatch):
    monkeypatch.setattr("sok.saved_model.rows.PIECE_BYTES", 8)
    export, writer = mock.Mock(), mock.Mock()
    export.rows.side_effect = [np.ones([1, 2], np.float32), tf.errors.AbortedError(None, None, "a peer stopped")]
    frozen = mock.Mock(table=sok.EmbeddingVariable(2, 10, name="lost", hashed=False), row_dtype=tf.float32)
    with pytest.raises(tf.errors.AbortedError, match="a peer stopped"):
        rows.write(export, frozen, mock.Mock(writer=lambda *args: writer))
    assert [call[0] for call in writer.method_calls] == ["add", "close"]


def test_what_is_there_stays_until_the_new_model_is_whole(monkeypatch, stranger, path):
    table = sok.EmbeddingVariable(1, 10, name="twice")
    table.assign([1], [[1.0]])
    export = lambda **options: sok.export_saved_model(Rows(table), path, signatures=ids_spec(), **options)  # noqa: E731
    export()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        export()
    table.assign([1], [[2.0]])

    def full_disk(*args):
        raise OSError("no space left")

    with monkeypatch.context() as context, pytest.raises(OSError, match="no space left"):
        context.setattr("sok.saved_model.checkpoint.PiecewiseCheckpoint.add", full_disk)
        export(overwrite=True)
    assert [p.name for p in path.parent.iterdir()] == ["1"]
    assert stranger.predict(path, {"ids": np.array([[1]])})["output_0"].item() == 1.0
    export(overwrite=True)
    assert [p.name for p in path.parent.iterdir()] == ["1"]
    assert (
        tf.saved_model.load(path).signatures["serving_default"](tf.constant([[1]], tf.int64))["output_0"].numpy() == 2
    )


def test_what_cannot_be_exported_is_said(path):
    table = sok.EmbeddingVariable(1, 10, name="refused")
    model = Rows(table)

    def reads(ids):
        return table.export()[1]

    def same_names(ids):
        return {"x_values": ids, "x": tf.RaggedTensor.from_tensor(ids)}

    def calls_python(ids):
        return tf.py_function(lambda x: x, [ids], tf.int64)

    @tf.function
    def takes_table(of, ids):
        return of.sparse_read(ids)

    entries = tf.lookup.KeyValueTensorInitializer(tf.constant([1], tf.int64), tf.constant([2], tf.int64))
    untracked = tf.lookup.StaticHashTable(entries, 0)
    spec = ids_spec()
    cases = [
        (dict(signatures=None), ValueError, "what this model is called with"),
        (dict(signatures="ids"), TypeError, "`signatures` .*TensorSpec"),
        (dict(signatures={"a": (reads, spec)}), ValueError, "only sok has, Sok>TableExport"),
        (
            dict(signatures={"a": (same_names, spec)}),
            ValueError,
            "name 'x_values', of 'x_values' and of 'x'",
        ),
        (dict(signatures={"a": (calls_python, spec)}), ValueError, "Python functions of this process"),
        (dict(signatures={"a": tf.function(reads)}), ValueError, "'a': .*input_signature"),
        (dict(signatures={"a": (reads, [3])}), TypeError, "'a': .*as specs"),
        (dict(signatures={"__a": (reads, spec)}), ValueError, "not begin with '__'"),
        (
            dict(signatures={"a": (lambda x: takes_table(table, x), spec)}),
            ValueError,
            f"table '{table.table_name}' as an argument",
        ),
        (
            dict(signatures={"a": (lambda x: x + untracked.lookup(x), spec)}),
            ValueError,
            "not an attribute",
        ),
        (dict(signatures=spec, row_dtype="float64"), ValueError, "`row_dtype` .*'float32', 'float16'"),
        (dict(signatures=spec, default="none"), ValueError, "`default` .*'initial', 'mean', 'zeros'"),
        (dict(signatures=spec, default=float("nan")), ValueError, "`default` must be"),
        (dict(signatures=spec, default={"nobody": 0}), ValueError, r"names tables \['nobody'\]"),
    ]
    for options, error, text in cases:
        with pytest.raises(error, match=text):
            sok.export_saved_model(model, path, **options)
    with pytest.raises(TypeError, match="`model` must be"):
        sok.export_saved_model(3, path, signatures=spec)
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="eagerly and outside"):
        sok.export_saved_model(model, path, signatures=spec)
    assert not path.parent.exists()
    # Nothing is left of it: the model looks up as before.
    assert model(tf.constant([[1]], tf.int64)).shape == (1, 1, 1)
