"""The names of SOK v2 on one worker, against stock TensorFlow. Several workers: tests/multiprocess/test_v2.py."""

import numpy as np
import pytest
import tensorflow as tf

import sok
from tests.multiprocess import checks_v2
from tests.multiprocess.harness import World
from tests.sok.threads_world import run_world

IDS = [[3, 1, 4, 1], [], [5, 0, 2], [3], []]
MATRIX = np.arange(18, dtype=np.float32).reshape(6, 3) / 7.0
WIDE = np.random.default_rng(3).normal(size=(6, 5)).astype(np.float32)


def ragged(rows, dtype=tf.int64):
    return tf.ragged.constant(rows, dtype=dtype, ragged_rank=1)


def dynamic(matrix, **options):
    """A DynamicVariable whose key k has row k of the matrix."""
    table = sok.DynamicVariable(matrix.shape[1], **options)
    sok.assign(table, np.arange(len(matrix)), matrix)
    return table


def stock(matrix, ids, combiner, weights=None):
    """tf.nn's answer, with zeros for every empty sample."""
    sparse = ids.to_sparse() if isinstance(ids, tf.RaggedTensor) else ids
    weights = weights.to_sparse() if isinstance(weights, tf.RaggedTensor) else weights
    pooled = tf.nn.embedding_lookup_sparse(matrix, sparse, weights, combiner=combiner)
    return tf.pad(pooled, [[0, sparse.dense_shape[0] - tf.shape(pooled, tf.int64)[0]], [0, 0]])


# lookup_sparse and all2all_dense_embedding.


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_variables_of_both_kinds_are_looked_up_together_as_by_tensorflow(call, dtype):
    tables = [sok.Variable(MATRIX), dynamic(WIDE), dynamic(MATRIX, key_type=tf.int32), sok.Variable(WIDE)]
    matrices = [MATRIX, WIDE, MATRIX, WIDE]
    words, combiners = ["Sum", "average", None, "MEAN"], ["sum", "mean", "mean", "mean"]
    ids = [ragged(IDS, dtype), ragged(IDS, dtype).to_sparse(), ragged(IDS, dtype), ragged(IDS, dtype).to_sparse()]
    upstream = [np.random.default_rng(m.size).normal(size=(5, m.shape[1])).astype(np.float32) for m in matrices]

    optimizer = sok.SGD(0.5)

    def step():
        with tf.GradientTape() as tape:
            outputs = [
                *sok.lookup_sparse(tables[:2], ids[:2], combiners=words[:2]),
                sok.lookup_sparse(tables[2], ids[2]),
                *sok.lookup_sparse((tables[3],), (ids[3],), None, "MEAN"),
            ]
            loss = tf.add_n([tf.reduce_sum(o * u) for o, u in zip(outputs, upstream, strict=True)])
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
        return outputs

    outputs = call(step)
    twins = [tf.Variable(m) for m in matrices]
    with tf.GradientTape() as tape:
        expected = [stock(t, i, c) for t, i, c in zip(twins, ids, combiners, strict=True)]
        loss = tf.add_n([tf.reduce_sum(o * u) for o, u in zip(expected, upstream, strict=True)])
    for twin, gradient in zip(twins, tape.gradient(loss, twins), strict=True):
        twin.assign_sub(0.5 * tf.convert_to_tensor(gradient))
    for table, twin, output, other in zip(tables, twins, outputs, expected, strict=True):
        np.testing.assert_allclose(output, other, rtol=1e-5, atol=1e-6)
        indices, values = sok.export(table)
        assert indices.numpy().tolist() == list(range(6))
        np.testing.assert_allclose(values, twin, rtol=1e-5, atol=1e-6)


def test_weights_are_those_of_tensorflow():
    tables, ids = [sok.Variable(MATRIX), dynamic(WIDE)], [ragged(IDS)] * 2
    weights = [ragged([[0.5, 2, 1, 1], [], [1, 3, 0.25], [2], []], tf.float32), None]
    outputs = sok.lookup_sparse(tables, ids, weights, ["mean", "sum"])
    np.testing.assert_allclose(outputs[0], stock(MATRIX, ids[0], "mean", weights[0]), rtol=1e-5)
    np.testing.assert_allclose(outputs[1], stock(WIDE, ids[1], "sum"), rtol=1e-5)
    alone = sok.lookup_sparse(tables[0], ids[0], weights[0], "sum")
    np.testing.assert_allclose(alone, stock(MATRIX, ids[0], "sum", weights[0]), rtol=1e-5)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 1, 2), (0,)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_rows_of_ids_of_any_shape(shape, dtype, rng):
    ids = rng.integers(0, 6, shape).astype(dtype)
    for table in (sok.Variable(MATRIX), dynamic(MATRIX)):
        np.testing.assert_array_equal(sok.all2all_dense_embedding(table, tf.constant(ids)), MATRIX[ids])
        np.testing.assert_array_equal(tf.nn.embedding_lookup(table, tf.constant(ids)), MATRIX[ids])


@pytest.mark.parametrize("tf_lookup", [False, True])
def test_every_lookup_of_a_dynamic_variable_makes_rows_that_train(tf_lookup):
    table = sok.DynamicVariable(2, initializer="1.5")
    look_up = tf.nn.embedding_lookup if tf_lookup else sok.all2all_dense_embedding
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(look_up(table, tf.constant([7, 2**40, 7])))
    sok.SGD(0.25).apply_gradients([(tape.gradient(loss, table), table)])
    assert table.size.numpy().tolist() == [2, 2] and int(table.total_size()) == 2
    indices, values = sok.export(table)
    assert indices.numpy().tolist() == [7, 2**40]
    assert values.numpy().tolist() == [[1.0, 1.0], [1.25, 1.25]]


def test_a_row_number_outside_a_variable_is_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"table 'bounded.*key 6 is outside \[0, 6\)"):
        sok.lookup_sparse(sok.Variable(MATRIX, name="bounded"), ragged([[1, 6]]))


def test_misuse_of_lookups_is_explained():
    table = sok.Variable(MATRIX)
    with pytest.raises(ValueError, match="`use_low_frequency_filter` must be False"):
        sok.lookup_sparse(table, ragged(IDS), use_low_frequency_filter=True)
    with pytest.raises(ValueError, match=r"`combiners\[0\]` .*'sum', 'mean' or 'sqrtn'.*'max'"):
        sok.lookup_sparse([table], [ragged(IDS)], combiners=["max"])
    with pytest.raises(TypeError, match=r"`params\[0\]` must be a sok.EmbeddingVariable"):
        sok.lookup_sparse(MATRIX, ragged(IDS))
    with pytest.raises(TypeError, match="`param` .*sok.Variable .*sok.DynamicVariable"):
        sok.all2all_dense_embedding(tf.Variable(MATRIX), [1])


# Variable.


@pytest.mark.parametrize(
    "initial_value",
    [
        MATRIX,
        MATRIX.astype(np.float64),
        MATRIX.tolist(),
        tf.constant(MATRIX),
        tf.Variable(MATRIX),
        lambda: tf.constant(MATRIX),
    ],
    ids=["array", "doubles", "list", "tensor", "variable", "function"],
)
def test_a_variable_holds_its_initial_value(initial_value, call):
    # Also when it is made while a function is traced, as tf.Variable allows once.
    made = []

    def make():
        made.append(sok.Variable(initial_value, dtype=tf.float32))
        return tf.constant(0)

    call(make)
    variable = made[0]
    np.testing.assert_array_equal(variable.numpy(), MATRIX)
    assert variable.global_shape == (6, 3) and variable.trainable
    assert (variable.target_gpu, variable.num_gpus, variable.global_gpu_id) == (-1, 1, 0)
    assert variable.key_map(5) == 5


def test_integers_become_floats_and_a_vector_one_row():
    assert sok.Variable([[1, 2], [3, 4]]).numpy().tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert sok.Variable(np.arange(3)).numpy().tolist() == [[0.0, 1.0, 2.0]]


def test_a_variable_takes_arguments_where_tf_variable_has_them():
    variable = sok.Variable(MATRIX, False, True, None, "placed")
    assert not variable.trainable and variable.table_name.startswith("placed")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.all2all_dense_embedding(variable, [1]))
    assert tape.gradient(loss, variable) is None


def test_shape_and_initializer_make_rows_as_they_are_needed():
    variable = sok.Variable(shape=(6, 2), initializer=tf.keras.initializers.Constant(0.5), dtype="float32")
    assert int(variable.size()) == 0
    assert variable.numpy().tolist() == [[0.5, 0.5]] * 6
    assert int(variable.size()) == 0
    random = sok.Variable(shape=tf.TensorShape([6, 2]), initializer="uniform")
    assert len(np.unique(random.numpy())) == 12
    np.testing.assert_array_equal(random.numpy(), sok.all2all_dense_embedding(random, range(6)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "either `initial_value`, or `shape`"),
        ({"initial_value": MATRIX, "shape": (6, 3)}, ValueError, "either `initial_value`, or `shape`"),
        ({"initial_value": MATRIX, "initializer": "ones"}, ValueError, "either `initial_value`, or `shape`"),
        ({"initial_value": MATRIX, "dtype": tf.float64}, TypeError, "`dtype` .*float32.*float64"),
        ({"initial_value": tf.constant([[1.0]], tf.float64)}, TypeError, "`initial_value` must be float32.*float64"),
        ({"initial_value": [["a"]]}, TypeError, "`initial_value` must be numbers"),
        ({"initial_value": np.zeros([2, 3, 4])}, ValueError, r"matrix \[V, D\].*\(2, 3, 4\)"),
        ({"initial_value": 1.0}, ValueError, r"matrix \[V, D\]"),
        ({"initial_value": np.zeros([0, 3])}, ValueError, r"\(V, D\), .*not empty"),
        ({"shape": (None, 3)}, ValueError, r"\(V, D\), .*not empty"),
        ({"shape": 3}, ValueError, r"\(V, D\)|must"),
        ({"initial_value": MATRIX, "constraint": abs}, ValueError, "`constraint` must be None"),
        ({"initial_value": MATRIX, "mode": "replicated"}, ValueError, "'localized:#'.*Received: 'replicated'"),
        ({"initial_value": MATRIX, "mode": "localized:1"}, ValueError, "'localized:0' to 'localized:0'"),
    ],
)
def test_misuse_of_a_variable_is_explained(arguments, error, message):
    with pytest.raises(error, match=message):
        sok.Variable(**arguments)


def test_in_a_session_initializers_store_the_initial_value_once():
    with tf.Graph().as_default():
        start = tf.compat.v1.placeholder_with_default(tf.constant(MATRIX), [6, 3])
        variables = [sok.Variable(MATRIX), sok.Variable(start, trainable=False), sok.Variable(lambda: start)]
        assert tf.compat.v1.trainable_variables() == [variables[0], variables[2]]
        pooled = sok.lookup_sparse(variables, [ragged(IDS)] * 3, combiners="sum")
        trained = [variables[0], variables[2]]
        gradients = tf.gradients(tf.add_n([tf.reduce_sum(p) for p in pooled]), trained)
        train = sok.SGD(0.5).apply_gradients(zip(gradients, trained, strict=True))
        initialize = [tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()]
        saver = tf.compat.v1.train.Saver()
        with tf.compat.v1.Session() as session:
            session.run(initialize[0])
            for variable, value in zip(variables, session.run(pooled), strict=True):
                np.testing.assert_allclose(value, stock(MATRIX, ragged(IDS), "sum").eval(), rtol=1e-6)
                np.testing.assert_array_equal(variable.eval(session), MATRIX)
            session.run(train)
            after = variables[0].eval()
            np.testing.assert_allclose(after[3], MATRIX[3] - 2 * 0.5, rtol=1e-6)
            session.run([*initialize, variables[0].initializer])  # again: training is not lost
            np.testing.assert_array_equal(variables[0].eval(), after)
        assert saver is not None


def test_rows_read_before_the_initializer_are_zeros_and_do_not_keep_it_from_storing():
    with tf.Graph().as_default():
        variable = sok.Variable(MATRIX)
        rows = sok.all2all_dense_embedding(variable, [1, 4])
        train = sok.SGD(0.5).apply_gradients([(tf.gradients(tf.reduce_sum(rows), variable)[0], variable)])
        with tf.compat.v1.Session() as session:
            np.testing.assert_array_equal(session.run(rows), np.zeros([2, 3]))
            session.run(tf.compat.v1.global_variables_initializer())
            np.testing.assert_array_equal(variable.eval(session), MATRIX)
            session.run(train)
            session.run(variable.initializer)  # from here on there is something to lose
            np.testing.assert_array_equal(session.run(rows), MATRIX[[1, 4]] - 0.5)
        with tf.compat.v1.Session() as session:  # tables belong to a session, as variables do
            session.run(variable.initializer)
            np.testing.assert_array_equal(session.run(rows), MATRIX[[1, 4]])


def test_a_monitored_session_stores_it_also_after_restoring_a_checkpoint(tmp_path):
    for run in range(2):
        with tf.Graph().as_default():
            count = tf.compat.v1.train.get_or_create_global_step()
            add = tf.compat.v1.assign_add(count, 1)
            rows = sok.all2all_dense_embedding(sok.Variable(MATRIX, name="monitored"), [2])
            with tf.compat.v1.train.MonitoredTrainingSession(checkpoint_dir=str(tmp_path)) as session:
                assert session.run(count) == run
                np.testing.assert_array_equal(session.run(rows), MATRIX[2:3])
                session.run(add)


# DynamicVariable.


@pytest.mark.parametrize(
    ("initializer", "low", "high"),
    [
        (None, -0.05, 0.05),
        ("random", -0.05, 0.05),
        ("uniform", 0.0, 1.0),
        ("ones", 1.0, 1.0),
        ("zeros", 0.0, 0.0),
        ("13", 13.0, 13.0),
        ("-2.5e-1", -0.25, -0.25),
        (0.5, 0.5, 0.5),
        (tf.keras.initializers.RandomUniform(2.0, 3.0), 2.0, 3.0),
    ],
)
def test_fresh_rows_come_from_the_initializer(initializer, low, high):
    rows = sok.all2all_dense_embedding(sok.DynamicVariable(4, initializer), tf.range(500)).numpy()
    assert low <= rows.min() <= low + 0.01 * (high - low)
    assert high - 0.01 * (high - low) <= rows.max() <= high
    assert len(np.unique(rows)) == 1 if low == high else len(np.unique(rows)) > 0.99 * rows.size


def test_a_dynamic_variable_says_what_it_is():
    table = sok.DynamicVariable(
        dimension=3, var_type="hybrid", name="told", init_capacity=4, max_capacity=64, device_id=0
    )
    assert (table.dimension, table.key_type, table.handle_dtype) == (3, tf.int64, tf.float32)
    assert (table.backend_type, table.mode, table.target_gpu, table.num_gpus) == ("hybrid", None, -1, 1)
    assert table.indices is None and not table.is_static() and table.key_map(7) == 7
    assert table.size.numpy().tolist() == [0, 3] and table.capacity == 64
    assert repr(table) == "<sok.DynamicVariable 'told' dimension=3, int64 keys, rows 0>"
    for convert in (table.to_static, table.to_dynamic):
        with pytest.raises(NotImplementedError, match="'told' has no static mode.*sok.OptimizerWrapper"):
            convert()


def test_max_capacity_is_the_number_of_rows():
    table = sok.DynamicVariable(2, name="small", max_capacity=3)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="table 'small.*all 3 rows"):
        sok.all2all_dense_embedding(table, [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dimension": 0}, ValueError, "`dim` must be a whole number"),
        ({"dimension": 2, "dtype": tf.float16}, TypeError, "`dtype` .*float32.*float16"),
        ({"dimension": 2, "var_type": "disk"}, ValueError, "`var_type` .*'hbm', 'hybrid'.*'disk'"),
        ({"dimension": 2, "key_type": tf.float32}, ValueError, "`key_type` must be one of int64"),
        ({"dimension": 2, "constraint": abs}, ValueError, "`constraint` must be None"),
        (
            {"dimension": 2, "capacity": 3, "hbm": 1},
            TypeError,
            r"keyword\(s\) capacity, hbm.*max_cap",
        ),
        ({"dimension": 2, "max_capacity": 0}, ValueError, "must be a whole number"),
        ({"dimension": 2, "initializer": "thirteen"}, ValueError, "`initializer` .*Keras"),
        ({"dimension": 2, "mode": "localized"}, ValueError, "`mode` .*'distributed' or 'localized:#'"),
    ],
)
def test_misuse_of_a_dynamic_variable_is_explained(arguments, error, message):
    with pytest.raises(error, match=message):
        sok.DynamicVariable(**arguments)


# assign, export, filter_variables.


@pytest.mark.parametrize("key_type", [tf.int64, tf.int32, tf.uint32, tf.uint64])
def test_what_is_assigned_is_exported_sorted(key_type):
    table = sok.DynamicVariable(2, key_type=key_type)
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    sok.assign(table, tf.constant([9, 2, 7, 4], key_type), values)
    indices, rows = sok.export(table)
    assert indices.dtype == key_type and indices.numpy().tolist() == [2, 4, 7, 9]
    np.testing.assert_array_equal(rows, values[[1, 3, 2, 0]])
    assert "CPU" in rows.device


def test_a_key_that_its_key_type_does_not_hold_is_not_cut_off():
    table = sok.DynamicVariable(1, key_type=tf.int32)
    sok.all2all_dense_embedding(table, [2**40])
    name = table.table_name
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"'{name}'.*key_type int32 does not hold"):
        sok.export(table)


def test_rows_of_a_variable_are_assigned_and_exported_by_number():
    variable = sok.Variable(MATRIX)
    sok.assign(variable, [4], [[1, 2, 3]])
    indices, values = sok.export(variable)
    expected = MATRIX.copy()
    expected[4] = [1, 2, 3]
    assert indices.numpy().tolist() == list(range(6))
    np.testing.assert_array_equal(values, expected)
    for function in (sok.export, lambda v: sok.assign(v, [1], [[1.0]])):
        with pytest.raises(TypeError, match="`variable` .*sok.Variable .*sok.DynamicVariable"):
            function(tf.Variable(1.0))


def test_variables_are_told_apart():
    tables = [sok.Variable(MATRIX), sok.DynamicVariable(2), sok.EmbeddingVariable(2, 10)]
    others = [tf.Variable(1.0), tf.Variable([[1.0]])]
    found = sok.filter_variables((others[0], tables[0], tables[1], others[1], tables[2]))
    assert [id(v) for v in found[0]] == [id(v) for v in tables]
    assert [id(v) for v in found[1]] == [id(v) for v in others]


# SGD, init, communication.


def test_sgd_counts_global_steps_and_follows_its_rate():
    table, steps, optimizer = sok.Variable([[1.0]]), tf.Variable(0), sok.SGD(lr=0.5)
    for rate in (0.5, 0.125):
        optimizer.lr = rate
        assert float(optimizer.lr) == rate
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.all2all_dense_embedding(table, [0]))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)], global_step=steps)
    assert int(steps) == 2 and table.numpy().tolist() == [[0.375]]


def test_init_may_be_repeated_and_rebinds_nothing():
    before = tf.keras.optimizers, tf.keras.optimizers.Adam, tf.optimizers
    assert sok.init() is None and sok.init("horovod", use_legacy_optimizer=False) is None
    sok.set_comm_tool("horovod")
    sok.Init()
    assert before == (tf.keras.optimizers, tf.keras.optimizers.Adam, tf.optimizers)
    sok.init("single")
    for function in (sok.init, sok.set_comm_tool):
        with pytest.raises(ValueError, match="`tool` .*'horovod' or 'single'.*'mpi'"):
            function("mpi")


def test_a_job_of_several_workers_is_not_single(monkeypatch):
    def program(_):
        with pytest.raises(ValueError, match="`tool` 'single' .*2 workers"):
            sok.init("single")

    run_world(2, program, monkeypatch)


def test_alone_every_collective_gives_back_what_came(call):
    c = sok.communication
    assert (c.rank(), c.num_ranks(), c.local_rank(), c.id_in_rank()) == (0, 1, 0, 0)
    assert (c.num_gpu_per_rank(), c.global_gpu_id(), c.num_gpus()) == (1, 0, 1)
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    received, splits = call(lambda x: c.alltoall(x, tf.constant([2], tf.int64)), x)
    assert splits.numpy().tolist() == [2]
    for result in (received, call(c.allgather, x), call(lambda x: c.broadcast(x, root=0), x)):
        np.testing.assert_array_equal(result, x)
    for op in ("sum", "average", "max", "min"):
        np.testing.assert_array_equal(call(lambda x, op=op: c.allreduce(x, op), x), x)
    checks_v2.check_v2_collectives_refuse_what_does_not_fit(World(0, 1))


def test_variables_without_a_name_have_the_names_that_sok_gives_them():
    # Its files are called after them.
    sok.shutdown()
    dynamic = [sok.DynamicVariable(1), sok.DynamicVariable(1, name="named"), sok.DynamicVariable(1)]
    static = [sok.Variable([[1.0]]), sok.Variable([[1.0]], mode="localized:0")]
    assert [v.table_name for v in dynamic[::2]] == ["sok_dynamic_Variable_0", "sok_dynamic_Variable_1"]
    assert [v.name for v in static] == ["sok_static_Variable_0:0", "sok_static_Variable_1:0"]
