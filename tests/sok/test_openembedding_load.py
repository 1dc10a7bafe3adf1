"""OpenEmbedding's checkpoints become tables: rows, what its optimizers kept, and the step after that."""

import warnings

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import openembedding.tensorflow as embed
import sok
from sok.compat.formats import columns
from sok.compat.formats.columns import FormatError
from sok.lookup.lookup import lookup_rows
from tests.messages import saying
from tests.openembedding_files import HYPER, Saved, adam_states, write

keras = tf.keras
KEYS = np.array([3, 11, 4, 2**40, 7])
RATE = 0.25


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(columns, "READ_BYTES", 60)  # so that there are several


def numbers(rows, width, seed=1):
    return np.random.default_rng(seed).uniform(0.1, 1.0, [rows, width]).astype(np.float32)


def table_of(name, dim=2, **options):
    return sok.EmbeddingVariable(dim=dim, capacity=20, name=name, **options)


def rows_of(table):
    keys, rows = (array.numpy() for array in table.export())
    return dict(zip(keys.tolist(), rows.tolist(), strict=True))


def slots_of(table, optimizer):
    keys, slots, _ = (array.numpy() for array in table.slots(optimizer.slot_set))
    return np.stack([dict(zip(keys.tolist(), slots, strict=True))[key] for key in KEYS.tolist()])


def step(table, optimizer, keys, gradients):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(lookup_rows(table, tf.constant(keys, tf.int64)) * gradients)
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])


# What its update is, from EmbeddingOptimizer.h, said with arrays: w, g [n, D], s the states by name. Gives the new w.


def sgd(w, g, s):
    return w - (0.9 * s["moment"] + RATE * g)


def adagrad(w, g, s):
    return w - RATE * g / (np.sqrt(s["accum"] + g**2) + 1e-7)


def adam(w, g, s):
    m, v = 0.9 * s["m"] + 0.1 * g, 0.999 * s["v"] + 0.001 * g**2
    return w - RATE * np.sqrt(1 - 0.999 * s["beta_2_power"]) / (1 - 0.9 * s["beta_1_power"]) * m / (np.sqrt(v) + 1e-7)


def adamax(w, g, s):
    m, v = 0.9 * s["m"] + 0.1 * g, np.maximum(np.abs(g), 0.999 * s["v"])
    return w - RATE / (1 - 0.9 * s["beta_1_power"]) * m / (v + 1e-7)


def adadelta(w, g, s):
    accum = 0.95 * s["accum"] + 0.05 * g**2
    return w - RATE * g * np.sqrt(s["accum_update"] + 1e-7) / np.sqrt(accum + 1e-7)


def rmsprop(w, g, s):
    accum = 0.9 * s["accum"] + 0.1 * g**2
    return w - (0.5 * s["moment"] + RATE * g / np.sqrt(accum + 1e-7))


def ftrl(w, g, s):
    accum = s["accum"] + g**2
    linear = s["linear"] + g - (np.sqrt(accum) - np.sqrt(s["accum"])) / RATE * w
    return -linear / (np.sqrt(accum) / RATE)


SGD, ADAM, ADAMAX = sok.optimizers.SGD, sok.optimizers.Adam, sok.optimizers.Adamax
# Its optimizer: ours, the names of its states, and what ours keeps of them.
OPTIMIZERS = {
    "sgd": (lambda: SGD(RATE, momentum=0.9, lazy=True), ["moment"], lambda s: [-s["moment"]], sgd),
    "adagrad": (lambda: sok.optimizers.Adagrad(RATE), ["accum"], lambda s: [s["accum"]], adagrad),
    "adam": (
        lambda: ADAM(RATE, lazy=True, bias_correction="row"),
        ["m", "v", "beta_1_power", "beta_2_power"],
        lambda s: [s["m"], s["v"], s["steps"]],
        adam,
    ),
    "adamax": (
        lambda: ADAMAX(RATE, lazy=True, bias_correction="row"),
        ["m", "v", "beta_1_power"],
        lambda s: [s["m"], s["v"], s["steps"]],
        adamax,
    ),
    "adadelta": (
        lambda: sok.optimizers.Adadelta(RATE, lazy=True),
        ["accum", "accum_update"],
        lambda s: [s["accum"], s["accum_update"]],
        adadelta,
    ),
    "rmsprop": (
        lambda: sok.optimizers.RMSprop(RATE, momentum=0.5, lazy=True),
        ["accum", "moment"],
        lambda s: [s["accum"], s["moment"]],
        rmsprop,
    ),
    "ftrl": (lambda: sok.optimizers.Ftrl(RATE), ["accum", "linear"], lambda s: [s["accum"], s["linear"]], ftrl),
}
STEPS = [1, 5, 0, 700, 30]


def states_of(names):
    states = {name: numbers(5, 2, seed) for seed, name in enumerate(names)}
    powers = adam_states(numbers(5, 2), numbers(5, 2), STEPS)[:, 4:]
    states |= {"beta_1_power": powers[:, :1], "beta_2_power": powers[:, 1:], "steps": np.array(STEPS)[:, None]}
    return states, np.concatenate([states[name] for name in names], 1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_taken_over_and_the_next_step_is_its_own(tmp_path, name, dtype):
    make, names, ours, rule = OPTIMIZERS[name]
    states, flat = states_of(names)
    rows = numbers(5, 2, 9)
    saved = Saved(KEYS, rows.astype(dtype), optimizer=name, states=flat)
    path = write(tmp_path, [saved], num_shards=3, nodes=2, files=2, block=1)
    table, optimizer = table_of(f"taken_{name}_{dtype}"), make()
    step(table, optimizer, [3, 99], np.ones([2, 2]))  # rows and slots that go
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sok.load_openembedding(path, table)
    assert [str(one.message).endswith("become float32, which tables have.") for one in said] == (
        [True] if dtype == "float64" else []
    )
    assert rows_of(table) == dict(zip(KEYS.tolist(), rows.tolist(), strict=True))
    np.testing.assert_array_equal(slots_of(table, optimizer), np.concatenate(ours(states), 1).astype("float32"))
    gradients = numbers(5, 2, 12) - 0.5
    step(table, optimizer, KEYS, gradients)
    wide = {name: array.astype(np.float64) for name, array in states.items()}
    expected = rule(rows.astype(np.float64), gradients.astype(np.float64), wide)
    found = np.array([rows_of(table)[key] for key in KEYS.tolist()])
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    assert np.abs(found - rows).min() > 1e-4


def model_of(dims=(3, 2), name="oe"):
    """Two tables, of any key and of 20, the second of which is the model's first layer, and made last."""

    class Both(embed.Model):
        def __init__(self):
            super().__init__()
            self.b = embed.Embedding(20, dims[1], name=f"{name}_array", sparse_as_dense=False)
            self.a = embed.Embedding(-1, dims[0], name=f"{name}_hash")
            self.dense = keras.layers.Dense(1)

        def call(self, ids):
            return self.dense(tf.concat([self.a(ids)[:, 0], self.b(ids % 20)[:, 0]], 1))

    model = Both()
    model(tf.constant([[1]]))
    return model


@pytest.mark.parametrize("with_states", [True, False])
def test_a_model_takes_its_variables_in_the_order_in_which_they_were_made(tmp_path, with_states):
    model = model_of(name=f"order_{with_states}")
    model.compile(embed.Adam(RATE), "mse")
    m, v = numbers(5, 3, 1), numbers(5, 3, 2)
    any_key = Saved(KEYS, numbers(5, 3), optimizer="adam", states=adam_states(m, v, STEPS) if with_states else None)
    some = np.arange(0, 20, 3)
    array = Saved(some, numbers(7, 2), vocabulary=20, optimizer="adam")
    if with_states:
        array.states = adam_states(numbers(7, 2, 4), numbers(7, 2, 5), range(7))
    embed.load_server_model(model, write(tmp_path, [any_key, array], num_shards=4))
    hashed, identity = model.a.embedding_variable, model.b.embedding_variable
    assert rows_of(hashed) == dict(zip(KEYS.tolist(), any_key.rows.tolist(), strict=True))
    assert {key: rows_of(identity)[key] for key in some} == dict(zip(some.tolist(), array.rows.tolist(), strict=True))
    optimizer = model.optimizer.embedding_optimizer
    if not with_states:
        with pytest.raises(tf.errors.FailedPreconditionError, match="no optimizer has used"):
            hashed.slots(optimizer.slot_set)
    else:
        expected = np.concatenate([m, v, np.array(STEPS)[:, None]], 1)
        np.testing.assert_array_equal(slots_of(hashed, optimizer), expected.astype("float32"))
    model.fit(np.arange(8)[:, None], np.ones([8, 1]), verbose=0)


def test_tables_are_given_in_the_order_of_the_variables(tmp_path):
    path = write(tmp_path, [Saved(KEYS, numbers(5, 2, n)) for n in range(3)])
    tables = [table_of(f"given_{n}") for n in range(3)]
    sok.load_openembedding(path, [tables[2], tables[0], tables[1]])
    for place, table in enumerate([tables[2], tables[0], tables[1]]):
        assert rows_of(table) == dict(zip(KEYS.tolist(), numbers(5, 2, place).tolist(), strict=True))


def test_a_functional_model_s_tables_are_made_in_the_order_of_its_layers():
    ids = [keras.Input([1], dtype="int64", name=f"made_{n}") for n in range(4)]
    rows = [keras.layers.Embedding(100 + n, 2, name=f"made_rows_{n}")(ids[n]) for n in (2, 0, 3, 1)]
    model = embed.distributed_model(keras.Model(ids, keras.layers.Concatenate()([*rows[2:], *rows[:2]])))
    layers = [layer for layer in model.layers if isinstance(layer, sok.Embedding)]
    made = [layer.embedding_variable.creation_number for layer in layers]
    assert len(made) == 4 and made == sorted(made)


def test_what_does_not_fit_names_both_sides(tmp_path):
    path = write(
        tmp_path, [Saved(KEYS, numbers(5, 2), optimizer="adagrad"), Saved(KEYS[:1], numbers(1, 4), vocabulary=9)]
    )
    first, second = table_of("fit_first"), table_of("fit_second", dim=4, num_keys=9, hashed=False)
    with pytest.raises(
        ValueError, match=saying("There are 1 tables: table 'fit_first'", "has 2: variable 0 (storage 0)")
    ):
        sok.load_openembedding(path, first)
    for tables, words in (
        (
            [second, first],
            ("variable 0 (storage 0): float32 rows of 2, any key", "table 'fit_second': rows of 4, 9 keys"),
        ),
        ([first, table_of("fit_third", dim=4)], ("rows of 4, 9 keys", "table 'fit_third': rows of 4, any key")),
    ):
        with pytest.raises(ValueError, match=saying("model_meta", "does not fit into", *words)):
            sok.load_openembedding(path, tables)
    sok.load_openembedding(path, [first, second])
    assert len(rows_of(first)) == 5


def test_states_that_have_no_place_are_named_once_and_rows_are_kept(tmp_path):
    saved = [
        Saved(KEYS, numbers(5, 2, n), optimizer="adam", states=adam_states(*[numbers(5, 2)] * 2, STEPS)) for n in (1, 2)
    ]
    path = write(tmp_path, saved)
    tables = [table_of(f"no_place_{n}") for n in range(2)]
    for optimizer, words in (
        (None, "no optimizer is known that trains the table"),
        (sok.optimizers.Adagrad(0.1), "the state of its 'adam' is not that of 'adagrad' here"),
        (sok.optimizers.Adam(0.1), "the state of its 'adam' is not that of 'adam' here"),
    ):
        with pytest.warns(UserWarning, match=saying("rows of variable 0 and 1 others are taken over", words)) as said:
            sok.load_openembedding(path, tables, optimizer)
        assert len(said) == 1
        assert [len(rows_of(table)) for table in tables] == [5, 5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sok.load_openembedding(path, tables, sok.optimizers.Adagrad(0.1), slots=False)
    both = [sok.optimizers.Adagrad(0.1), sok.optimizers.Adam(0.1)]
    with pytest.raises(ValueError, match="Several optimizers train these tables"):
        sok.load_openembedding(path, tables, both)


@pytest.mark.parametrize("momentum", ["0", "0.899999976"])
def test_sgd_without_momentum_has_no_state_to_lose(tmp_path, momentum):
    hyper = {**HYPER["sgd"], "momentum": momentum}
    path = write(tmp_path, [Saved(KEYS, numbers(5, 2), optimizer="sgd", states=numbers(5, 2), hyper=hyper)])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sok.load_openembedding(path, table_of(f"sgd_{len(momentum)}"), sok.optimizers.SGD(0.1))
    assert ["its SGD has momentum" in str(one.message) for one in said] == [True] * (momentum != "0")


def state_of(table, optimizer):
    return [array.numpy().tolist() for array in (*table.export(), *table.slots(optimizer.slot_set))]


def test_a_file_that_ends_anywhere_leaves_the_table_as_it_was(tmp_path):
    hyper = {"learning_rate": "1"}
    saved = Saved(KEYS, numbers(5, 2), optimizer="adagrad", states=numbers(5, 2), hyper=hyper)
    path = write(tmp_path, [saved], num_shards=2, nodes=1, files=1)
    table, optimizer = table_of("cut_off"), sok.optimizers.Adagrad(0.1)
    step(table, optimizer, [3, 99], np.ones([2, 2]))
    before = state_of(table, optimizer)
    for file in (tmp_path / "0" / "model_0_0", tmp_path / "model_meta"):
        data = file.read_bytes()
        for end in range(len(data)):
            file.write_bytes(data[:end])
            with pytest.raises(FormatError, match="model_meta|model_0_0|holds (no|1 of 2) shard"):
                sok.load_openembedding(path, table)
        file.write_bytes(data)
    assert state_of(table, optimizer) == before
    sok.load_openembedding(path, table)
    assert state_of(table, optimizer) != before and len(rows_of(table)) == 5


def test_what_is_found_while_rows_are_read_leaves_tables_as_they_were(tmp_path):
    states = adam_states(numbers(5, 2), numbers(5, 2), STEPS)
    states[4, 5] = 2.0
    good = Saved(KEYS, numbers(5, 2), optimizer="adam", states=adam_states(numbers(5, 2), numbers(5, 2), STEPS))
    path = write(tmp_path / "power", [good, Saved(KEYS, numbers(5, 2), optimizer="adam", states=states)])
    tables = [table_of("power_0"), table_of("power_1")]
    optimizer = sok.optimizers.Adam(RATE, lazy=True, bias_correction="row")
    with pytest.raises(FormatError, match="powers of betas"):
        sok.load_openembedding(path, tables, optimizer)
    wide = np.array([[1.0, 2.0], [1.0, 1e39]])
    wide = write(tmp_path / "wide", [Saved(np.array([1, 2]), wide, optimizer="adagrad")], num_shards=1)
    words = saying("model_0_0, byte", "holds [1.0, 1e+39], too much for float32")
    with pytest.warns(UserWarning, match="become float32"), pytest.raises(FormatError, match=words):
        sok.load_openembedding(wide, tables[:1])
    twice = write(tmp_path / "twice", [Saved(np.array([3, 5, 3]), numbers(3, 2))], num_shards=1)
    with pytest.raises(FormatError, match="hold key 3 more than once"):
        sok.load_openembedding(twice, tables[:1])
    many = write(tmp_path / "many", [Saved(np.arange(30), numbers(30, 2))])
    with pytest.raises(tf.errors.ResourceExhaustedError, match="30 new ones were to come"):
        sok.load_openembedding(many, tables[:1])
    array = write(tmp_path / "array", [Saved(np.array([9]), numbers(1, 2), vocabulary=9)])
    with pytest.raises(FormatError, match="holds key"):
        sok.load_openembedding(array, table_of("power_array", num_keys=9, hashed=False))
    assert [rows_of(table) for table in tables] == [{}, {}]


def test_it_works_when_executing_eagerly(tmp_path):
    path, table = write(tmp_path, [Saved(KEYS, numbers(5, 2))]), table_of("in_a_function")
    with pytest.raises(RuntimeError, match="works when executing eagerly"):
        tf.function(lambda: sok.load_openembedding(path, table))()
    with tf.Graph().as_default(), tf.compat.v1.Session().as_default():
        of_graph = table_of("in_a_graph")
        with pytest.raises(RuntimeError, match="works when executing eagerly"):
            sok.load_openembedding(path, of_graph)


SOME = np.array([3, 11, 4, 99, 7])


@pytest.fixture(scope="module")
def saved_by_keras_2(tmp_path_factory):
    """A model of OpenEmbedding as Keras 2 saves it: a table's layer has a weight of one row, and counts batches.

    Gives what `load_weights` is called with, by form, and the weights of its other layers.
    """
    folder = tmp_path_factory.mktemp("keras_2")
    ids = tf_keras.Input([1], dtype="int64")
    fake = tf_keras.layers.Embedding(1, 2, name="of_two_rows")
    rows = fake(ids)
    fake.model_version = tf.Variable(7.1, dtype=tf.float64)
    small = tf_keras.layers.Embedding(5, 2, name="of_two_small")(ids)
    joined = tf_keras.layers.Flatten()(rows + small)
    model = tf_keras.Model(ids, tf_keras.layers.Dense(1, name="of_two_top")(joined))
    model.compile("adam", "mse")
    model.fit(np.zeros([2, 1], "int64"), np.zeros([2, 1]), verbose=0)
    model.save(folder / "model")
    paths = {"saved_model": folder / "model" / "variables" / "variables"}
    paths |= {"checkpoint": folder / "weights", "hdf5": folder / "weights.h5"}
    for path in folder / "weights", folder / "weights.h5":
        model.save_weights(str(path))
    saved = Saved(SOME, numbers(5, 2), vocabulary=100, optimizer="adagrad", states=numbers(5, 2, 4))
    for name in ("model", "weights.openembedding", "weights.h5.openembedding"):
        write(folder / name / "openembedding", [saved])
    return paths, {name: model.get_layer(f"of_two_{name}").get_weights() for name in ("small", "top")}


def model_here(library, top="of_two_top", dim=2):
    ids = library.Input([1], dtype="int64")
    rows = library.layers.Embedding(100, 2, name="of_two_rows")(ids)
    small = library.layers.Embedding(5, dim, name="of_two_small")(ids)
    joined = library.layers.Flatten()(library.layers.Concatenate()([rows, small]) if dim > 2 else rows + small)
    return embed.distributed_model(library.Model(ids, library.layers.Dense(1, name=top)(joined)))


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras_3", "tf_keras"])
@pytest.mark.parametrize("form", ["checkpoint", "hdf5", "saved_model"])
def test_load_weights_finds_dense_weights_and_rows(saved_by_keras_2, form, library):
    paths, dense = saved_by_keras_2
    model = model_here(library)
    model.compile(embed.distributed_optimizer(library.optimizers.Adagrad(RATE)), "mse")
    model.load_weights(str(paths[form]))
    table, optimizer = model.get_layer("of_two_rows").embedding_variable, model.optimizer.embedding_optimizer
    assert rows_of(table) == dict(zip(SOME.tolist(), numbers(5, 2).tolist(), strict=True))
    keys, accumulators, _ = (array.numpy() for array in table.slots(optimizer.slot_set))
    np.testing.assert_array_equal(accumulators[np.argsort(keys)], numbers(5, 2, 4)[np.argsort(SOME)])
    for name, expected in dense.items():
        for found, weight in zip(model.get_layer(f"of_two_{name}").get_weights(), expected, strict=True):
            np.testing.assert_array_equal(found, weight)


@pytest.mark.parametrize("form", ["checkpoint", "hdf5"])
def test_dense_weights_that_do_not_fit_leave_all_as_it_was(saved_by_keras_2, form, tmp_path):
    path = str(saved_by_keras_2[0][form])
    for model, words in (
        (model_here(keras, top="another"), ("has no weight 'another/kernel'", "of_two_top/kernel", "rows alone")),
        (model_here(keras, dim=3), ("'of_two_small/embeddings' is [5, 2] there, and [5, 3] here",)),
    ):
        table = model.get_layer("of_two_rows").embedding_variable
        before = rows_of(table)
        with pytest.raises(ValueError, match=saying(path, *words)):
            model.load_weights(path)
        assert rows_of(table) == before


def test_rows_without_dense_weights_are_named(tmp_path):
    write(tmp_path / "w.openembedding" / "openembedding", [Saved(SOME, numbers(5, 2), vocabulary=100)])
    (tmp_path / "w").write_bytes(b"neither")
    with pytest.raises(FileNotFoundError, match=saying("w.index", "rows alone")):
        model_here(keras).load_weights(str(tmp_path / "w"))
