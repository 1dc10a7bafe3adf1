"""DeepRec's names: a script in a process of its own, and what install and the strategies do."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sok
from tests.messages import saying

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "nn.group_embedding_lookup_sparse",
    "nn.group_embedding_lookup",
    "feature_column.group_embedding_column_scope",
    "config.experimental.enable_distributed_strategy",
    "get_embedding_variable",
    "feature_column.categorical_column_with_embedding",
    "EmbeddingVariableOption",
    "CounterFilter",
    "CBFFilter",
    "GlobalStepEvict",
    "L2WeightEvict",
    "StorageOption",
)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for variable in ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    sok.shutdown()
    yield
    sok.deeprec.uninstall()
    sok.feature_column.uninstall()
    sok.shutdown()


def reach(module, name):
    for part in name.split("."):
        module = getattr(module, part)
    return module


@pytest.mark.parametrize("mode", ["v2 behaviour off", "eager execution off"])
def test_a_script_runs(forked, tmp_path, mode):
    script = Path(__file__).with_name("deeprec_script.py")
    done = forked.run(script, tmp_path, mode)
    assert done.status == 0, done.stderr[-3000:]
    assert "the script ran to its end" in done.stdout


def test_install_and_uninstall():
    modules = (tf, tf.compat.v1, tf.compat.v2)
    before = [dir(module) for module in modules]
    sok.deeprec.install()
    sok.deeprec.install()
    for module in modules:
        assert [callable(reach(module, name)) for name in NAMES] == [True] * len(NAMES)
    sok.deeprec.uninstall()
    sok.deeprec.uninstall()
    for module, names in zip(modules, before, strict=True):
        assert dir(module) == names
        for name in NAMES:
            with pytest.raises(AttributeError):
                reach(module, name)


def test_names_are_there_however_tensorflow_is_imported(forked, tmp_path):
    """`tf.compat.v1` is one module before somebody imports `tensorflow.compat.v1`, and another one since."""
    done = forked.run(Path(__file__).with_name("deeprec_imports_script.py"), tmp_path)
    assert done.status == 0, done.stderr[-3000:]


def test_nothing_of_tensorflow_is_replaced(monkeypatch):
    monkeypatch.setattr(tf.nn, "group_embedding_lookup", len, raising=False)
    with pytest.raises(RuntimeError, match="has a 'group_embedding_lookup' of its own"):
        sok.deeprec.install()
    assert not hasattr(tf, "get_embedding_variable") and not hasattr(tf.nn, "group_embedding_lookup_sparse")


@pytest.mark.parametrize(
    "arguments",
    [
        ("mod", "weights", "name"),
        ("weights", "mod"),
        ("weights",),
        (None, "weights"),
    ],
)
def test_the_positions_of_both_generations_of_deeprec(arguments):
    table = sok.EmbeddingVariable(2, 10, initializer="ones", name="positions")
    ids = tf.RaggedTensor.from_row_splits(tf.constant([3, 4], tf.int64), [0, 2])
    weights = [ids.with_values(tf.constant([2.0, 3.0]))]
    arguments = [weights if a == "weights" else a for a in arguments]
    (output,) = sok.deeprec.group_embedding_lookup_sparse([table], [ids], ["sum"], *arguments)
    assert output.numpy().tolist() == [[5.0, 5.0]]


def test_an_unknown_partition_strategy_is_refused():
    table = sok.EmbeddingVariable(2, 10, name="positions")
    with pytest.raises(ValueError, match="`partition_strategy` must be 'mod'.*'div'"):
        sok.deeprec.group_embedding_lookup_sparse([table], [tf.constant([[1]])], ["sum"], "div")


def test_embedding_variables_by_name():
    with tf.Graph().as_default():
        with tf.compat.v1.variable_scope("a"):
            first = sok.deeprec.get_embedding_variable("v", 4)
            with pytest.raises(ValueError, match="Table 'a/v' already exists"):
                sok.deeprec.get_embedding_variable("v", 4)
        with tf.compat.v1.variable_scope("a", reuse=tf.compat.v1.AUTO_REUSE):
            assert sok.deeprec.get_embedding_variable("v", 4) is first
            with pytest.raises(ValueError, match="'a/v' .*dim 4.*dim 5"):
                sok.deeprec.get_embedding_variable("v", 5)
        with tf.compat.v1.variable_scope("b", reuse=True), pytest.raises(ValueError, match="'b/v' does not exist"):
            sok.deeprec.get_embedding_variable("v", 4)
        assert (first.capacity, first.key_dtype, first.trainable) == (sok.deeprec.DEFAULT_CAPACITY, tf.int64, True)
    with pytest.raises(ValueError, match="`value_dtype` must be float32"):
        sok.deeprec.get_embedding_variable("v", 4, value_dtype=tf.float16)
    eager = [sok.deeprec.get_embedding_variable("v", 4, trainable=False) for _ in range(2)]
    assert eager[0] is not eager[1] and not eager[0].trainable


@pytest.mark.parametrize("rule", ["GradientDescent", "Adagrad", "Adam", "Ftrl"])
def test_embedding_lookup_trains_as_it_trains_a_variable(rule):
    """Ids that come twice, as DeepRec's own tests compare its embedding variables with variables."""
    v1, ids, ones = tf.compat.v1, tf.constant([0, 1, 2, 5, 6, 7, 0], tf.int64), tf.compat.v1.ones_initializer()
    found = []
    for make, shape in ((sok.deeprec.get_embedding_variable, 3), (v1.get_variable, [8, 3])):
        with tf.Graph().as_default(), v1.Session() as session:
            variable = make("v", shape, initializer=ones)
            rows = tf.nn.embedding_lookup(variable, tf.identity(ids.numpy()))
            optimizer = sok.OptimizerWrapper(getattr(v1.train, f"{rule}Optimizer")(0.1))
            train = optimizer.minimize(2.0 * tf.reduce_sum(rows))
            session.run(v1.global_variables_initializer())
            for _ in range(5):
                session.run(train)
            found.append(session.run(rows))
            if not found[1:]:
                assert session.run(variable.total_count()).tolist() == [6, 3]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def test_embedding_variables_take_deeprecs_positions():
    """name, embedding_dim, key_dtype, value_dtype, initializer, regularizer, trainable, collections, ..."""
    ones, partitioner = tf.compat.v1.ones_initializer(), tf.compat.v1.fixed_size_partitioner(4)
    usual = tf.compat.v1.GraphKeys.GLOBAL_VARIABLES
    with tf.Graph().as_default():
        for trainable in (False, True):
            table = sok.deeprec.get_embedding_variable(
                f"v{trainable}", 4, tf.int32, tf.float32, ones, None, trainable, [usual, "mine"], None, partitioner,
                True, None, None, None, None,
            )  # fmt: skip
            assert (table.dim, table.key_dtype, table.trainable) == (4, tf.int32, trainable)
            assert tf.compat.v1.get_collection("mine")[-1] is table
            with tf.compat.v1.Session() as session:
                assert session.run(table.sparse_read(tf.constant([7]))).tolist() == [[1.0] * 4]
        with tf.compat.v1.variable_scope("", reuse=True):
            sok.deeprec.get_embedding_variable("vTrue", 4, collections=["mine"])
        assert len(tf.compat.v1.get_collection("mine")) == 2


def test_embedding_variables_say_where_their_rows_lie_and_how_they_travel():
    placement = sok.row_wise(hash=True)
    table = sok.deeprec.get_embedding_variable("placed", 2, exchange_dtype="bfloat16", placement=placement)
    assert (table.placement, table.exchange_dtype) == (placement, tf.bfloat16)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        # Documents of a fork have `trainable` where the code has `regularizer`.
        ((tf.int64, None, None, True), ValueError, "`regularizer` must be None: .* Received: True"),
        ({"custom_getter": len}, ValueError, "`custom_getter` must be None"),
        ({"constraint": len}, ValueError, "`constraint` must be None"),
        ({"collections": "mine"}, ValueError, "`collections` .*'mine'"),
        ({"init_data_source": 3}, TypeError, "`init_data_source` must be the folder.* 3"),
        ({"ev_option": object()}, TypeError, "`ev_option` .*EmbeddingVariableOption"),
    ],
)
def test_what_embedding_variables_do_not_take(arguments, error, message):
    by_position, by_name = (arguments, {}) if isinstance(arguments, tuple) else ((), arguments)
    with pytest.raises(error, match=message):
        sok.deeprec.get_embedding_variable("refused", 4, *by_position, **by_name)


def test_rows_are_drawn_as_deeprecs():
    table = sok.deeprec.get_embedding_variable("drawn", 16)
    rows = table.sparse_read(tf.range(20_000, dtype=tf.int64)).numpy()
    assert abs(rows).max() <= 2 and rows.std() == pytest.approx(0.8796, rel=0.02)


def test_collective_joins_the_job():
    assert sok.enable_distributed_strategy("collective").numpy() == b"OK"
    assert sok.enable_distributed_strategy("collective").numpy() == b"OK"
    assert sok.size() == 1
    with pytest.raises(ValueError, match="The strategy 'collective' is enabled.*Received: 'localized'"):
        sok.enable_distributed_strategy("localized")


def test_collective_comes_after_init_too():
    sok.Init(global_batch_size=64)
    assert sok.enable_distributed_strategy("collective").numpy() == b"OK"


def test_localized_is_for_one_worker(monkeypatch):
    assert sok.enable_distributed_strategy() is None
    assert sok.enable_distributed_strategy("localized") is None
    with pytest.raises(ValueError, match="The strategy 'localized' is enabled"):
        sok.enable_distributed_strategy("collective")
    sok.shutdown()
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"'localized' is for one worker\. .*HOROVOD_SIZE=2"):
        sok.enable_distributed_strategy("localized")


def test_strategies_that_there_are_not():
    with pytest.raises(ValueError, match="`strategy` must be 'collective'.*Received: 'mirrored'"):
        sok.enable_distributed_strategy("mirrored")
    assert sok.enable_distributed_strategy("localized") is None  # neither was enabled


def ids_and_weights():
    indices = [[0, 0], [0, 1], [1, 0], [2, 2]]
    item = tf.SparseTensor(indices, tf.constant([2**40, 3, 3, 5], tf.int64), [3, 3])
    return {"item": item, "weight": item.with_values([1.0, 3.0, 2.0, 1.0])}


@pytest.mark.parametrize("in_scope", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_columns_of_any_ids_are_embedded_in_tables(in_scope, weighted):
    stock = tf.feature_column.embedding_column
    sok.deeprec.install()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        column = tf.feature_column.categorical_column_with_embedding(
            "item", dtype=tf.int64, ev_option=tf.EmbeddingVariableOption(evict_option=None, filter_option=None)
        )
        if weighted:
            column = tf.feature_column.weighted_categorical_column(column, "weight")
        scope = sok.group_embedding_column_scope if in_scope else contextlib.nullcontext
        with scope():
            columns = [
                tf.feature_column.embedding_column(column, 2, "mean", tf.compat.v1.constant_initializer(0.5)),
                tf.feature_column.embedding_column(
                    categorical_column=tf.feature_column.categorical_column_with_identity("item2", 4), dimension=3
                ),
            ]
        features = {**ids_and_weights(), "item2": tf.constant([[1], [2], [3]])}
        net = tf.compat.v1.feature_column.input_layer(features, columns)
        (table,), (matrix,) = sok.split_embedding_variable_from_others(tf.compat.v1.trainable_variables())
        assert matrix.shape == [4, 3]
        net = net[:, -2:]  # columns come by their names
        loss = tf.reduce_sum(net)
        (gradient,) = tf.gradients(loss, table)
        train = sok.optimizers.SGD(1.0).apply_gradients([(gradient, table)])
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(net).tolist() == [[0.5, 0.5]] * 3
        session.run(train)
        keys, rows = session.run(table.export())
    weight = {2**40: 0.25, 3: 0.75 + 1.0, 5: 1.0} if weighted else {2**40: 0.5, 3: 1.5, 5: 1.0}
    assert dict(zip(keys.tolist(), rows[:, 0].tolist(), strict=True)) == {k: 0.5 - w for k, w in weight.items()}
    sok.deeprec.uninstall()
    assert tf.feature_column.embedding_column is stock and tf.compat.v1.feature_column.embedding_column is stock


def test_columns_of_any_ids_need_a_table():
    column = sok.deeprec.categorical_column_with_embedding("item", capacity=10)
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match="'item' .*buckets.*sok.feature_column.embedding_column"),
    ):
        tf.compat.v1.feature_column.input_layer(ids_and_weights(), [tf.feature_column.embedding_column(column, 2)])
    assert sok.feature_column.embedding_column(column, 2).capacity == 10
    with pytest.raises(ValueError, match="`dtype` .*hash others"):
        sok.deeprec.categorical_column_with_embedding("item", dtype=tf.string)
    column = sok.feature_column.embedding_column(sok.deeprec.categorical_column_with_embedding("item"), 2)
    with tf.Graph().as_default(), pytest.raises(ValueError, match=saying("column 'item'", "sok.data.hash_columns")):
        tf.compat.v1.feature_column.input_layer({"item": [["a"]]}, [column])
    for make in (
        sok.deeprec.categorical_column_with_embedding,
        lambda name, **o: sok.deeprec.get_embedding_variable(name, 2, **o),
    ):
        with pytest.raises(TypeError, match="`ev_option` .*EmbeddingVariableOption"):
            make("item", ev_option=1)
