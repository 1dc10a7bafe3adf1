"""The distributed optimizer on one worker: routing, state, settings, refusals. Several workers: tests/multiprocess."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.layers import for_keras
from sok.lookup.lookup import lookup_rows
from tests.messages import saying

v1 = tf.compat.v1
legacy = tf_keras.optimizers.legacy

STOCK = {
    "keras": lambda: keras.optimizers.Adam(0.1),
    "tf_keras": lambda: tf_keras.optimizers.Adam(0.1),
    "legacy": lambda: legacy.Adam(0.1),
    "v1": lambda: v1.train.AdamOptimizer(0.1),
}
KERAS_STOCK = [name for name in STOCK if name != "v1"]


@pytest.fixture(params=STOCK)
def stock(request):
    return STOCK[request.param]()


@pytest.fixture(params=KERAS_STOCK)
def keras_stock(request):
    return STOCK[request.param]()


def value(x):
    return float(np.asarray(x))


def table_of(name, **options):
    return sok.EmbeddingVariable(2, 10, name=name, initializer="ones", **options)


def gradients(table, weight):
    with tf.GradientTape() as tape:
        rows = lookup_rows(table, tf.constant([1, 2, 1], tf.int64))
        loss = tf.reduce_sum(rows * weight)
    return list(zip(tape.gradient(loss, [table, weight]), [table, weight], strict=True))


def test_the_family_of_the_optimizer_is_kept(stock):
    distributed = sok.DistributedOptimizer(stock)
    bases = (keras.optimizers.Optimizer, tf_keras.optimizers.Optimizer, legacy.Optimizer, v1.train.Optimizer)
    assert [isinstance(distributed, base) for base in bases] == [isinstance(stock, base) for base in bases]
    assert distributed.inner is stock


def test_each_variable_goes_to_its_optimizer_and_steps_are_counted_once(stock):
    table, weight = table_of("routed"), tf.Variable([2.0, 3.0])
    twin, twin_weight = tf.Variable(tf.ones([10, 2])), tf.Variable([2.0, 3.0])
    # Made anew from the same settings, for the dense twin.
    other = next(make() for make in STOCK.values() if type(make()) is type(stock))
    distributed = sok.DistributedOptimizer(stock)
    for _ in range(3):
        distributed.apply_gradients(gradients(table, weight))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(twin, [1, 2, 1]) * twin_weight)
        grads = [tf.convert_to_tensor(g) for g in tape.gradient(loss, [twin, twin_weight])]
        other.apply_gradients(zip(grads, [twin, twin_weight], strict=True))
    np.testing.assert_allclose(weight, twin_weight, rtol=1e-5)
    np.testing.assert_allclose(table.sparse_read([1, 2]), tf.gather(twin, [1, 2]), rtol=1e-5)
    assert value(distributed.embedding_optimizer.iterations) == 3
    if not isinstance(stock, v1.train.Optimizer):
        assert value(distributed.iterations) == value(stock.iterations) == 3


def test_it_works_inside_a_function(keras_stock):
    table, weight = table_of("in_function"), tf.Variable([2.0, 3.0])
    distributed = sok.DistributedOptimizer(keras_stock)

    @tf.function
    def step():
        distributed.apply_gradients(gradients(table, weight))

    for _ in range(3):
        step()
    assert value(distributed.iterations) == 3
    assert np.all(table.sparse_read([1]).numpy() < 1) and np.all(weight.numpy() < [2, 3])


def test_tables_alone_and_dense_alone_are_steps_too(keras_stock):
    table, weight = table_of("alone"), tf.Variable([2.0, 3.0])
    distributed = sok.DistributedOptimizer(keras_stock)
    distributed.build([table, weight]) if not isinstance(keras_stock, legacy.Optimizer) else None
    of_table, of_weight = gradients(table, weight)
    distributed.apply_gradients([of_table])
    assert value(distributed.iterations) == 1
    distributed.apply_gradients([of_weight, (None, table)])
    assert value(distributed.iterations) == 2
    assert value(distributed.embedding_optimizer.iterations) == 2


@pytest.mark.parametrize("given", [False, True])
def test_steps_of_tables_alone_count_with_an_optimizer_of_one_s_own(keras_stock, given):
    table, weight = table_of("alone_given"), tf.Variable([2.0, 3.0])
    own = sok.optimizers.SGD(0.5) if given else None
    distributed = sok.DistributedOptimizer(keras_stock, embedding_optimizer=own)
    if not isinstance(keras_stock, legacy.Optimizer):
        distributed.build([table, weight])
    distributed.apply_gradients([gradients(table, weight)[0], (None, weight)])
    assert value(distributed.iterations) == 1
    assert value(distributed.embedding_optimizer.iterations) == 1
    assert (distributed.embedding_optimizer is own) is given
    np.testing.assert_array_equal(weight, [2.0, 3.0])


def test_the_learning_rate_is_shared_and_can_be_set(keras_stock):
    distributed = sok.DistributedOptimizer(keras_stock)
    for name in ("learning_rate", "lr") if "tf_keras" in type(keras_stock).__module__ else ("learning_rate",):
        for rate in (0.25, 0.0):
            setattr(distributed, name, rate)
            optimizers = (keras_stock, distributed.embedding_optimizer)
            assert value(getattr(distributed, name)) == rate
            assert [value(optimizer.learning_rate) for optimizer in optimizers] == [rate] * 2


def test_an_embedding_optimizer_keeps_its_own_learning_rate(stock):
    own = sok.optimizers.LazyAdam(0.5)
    distributed = sok.DistributedOptimizer(stock, embedding_optimizer=own)
    assert distributed.embedding_optimizer is own and value(own.learning_rate) == 0.5


def test_schedules_act_on_both():
    for library in (keras, tf_keras):
        schedule = library.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.0])
        table, weight = table_of("scheduled"), tf.Variable([2.0, 3.0])
        distributed = sok.DistributedOptimizer(library.optimizers.SGD(schedule))
        for _ in range(2):
            distributed.apply_gradients(gradients(table, weight))
        after_two = table.sparse_read([1]).numpy(), weight.numpy()
        distributed.apply_gradients(gradients(table, weight))
        np.testing.assert_array_equal(table.sparse_read([1]), after_two[0])
        np.testing.assert_array_equal(weight, after_two[1])
        assert np.all(after_two[0] < 1)


@pytest.mark.parametrize("given", [None, "LazyAdam"])
def test_settings_make_the_same_optimizer_again(keras_stock, given):
    own = None if given is None else getattr(sok.optimizers, given)(0.5, beta_1=0.8)
    distributed = sok.DistributedOptimizer(keras_stock, embedding_optimizer=own, op=sok.Sum, name="mine")
    again = type(distributed).from_config(distributed.get_config())
    assert again is not distributed and again.inner is not keras_stock
    assert again.get_config() == distributed.get_config()
    assert type(again.inner) is type(keras_stock) and again.op == sok.Sum
    assert type(again.embedding_optimizer) is type(distributed.embedding_optimizer)
    library = keras if isinstance(keras_stock, keras.optimizers.Optimizer) else tf_keras
    assert type(library.optimizers.deserialize(library.optimizers.serialize(distributed))) is type(distributed)


def dense_model(library, optimizer):
    model = library.Sequential([library.layers.Input((3,)), library.layers.Dense(2), library.layers.Dense(1)])
    model.compile(optimizer=optimizer, loss="mse")
    return model


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_a_saved_model_trains_on_as_if_never_saved(tmp_path, library):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 3)), rng.normal(size=(16, 1))
    model = dense_model(library, sok.DistributedOptimizer(library.optimizers.Adam(0.1)))
    model.fit(x, y, verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    again = library.models.load_model(tmp_path / "model.keras")
    assert type(again.optimizer) is type(model.optimizer) and value(again.optimizer.iterations) == 1
    for each in (model, again):
        each.fit(x, y, epochs=2, verbose=0, shuffle=False)
    for one, other in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("name", ["keras", "tf_keras", "legacy"])
def test_checkpoints_hold_state_and_steps(tmp_path, name):
    def run(steps, optimizer, weight, table):
        for _ in range(steps):
            optimizer.apply_gradients(gradients(table, weight))

    weight, table = tf.Variable([2.0, 3.0]), table_of("saved")
    distributed = sok.DistributedOptimizer(STOCK[name](), embedding_optimizer=sok.optimizers.SGD(0.1))
    run(3, distributed, weight, table)
    path = tf.train.Checkpoint(weight=weight, optimizer=distributed).save(tmp_path / "c")

    other_weight = tf.Variable([0.0, 0.0])
    other = sok.DistributedOptimizer(STOCK[name](), embedding_optimizer=sok.optimizers.SGD(0.1))
    restored = tf.train.Checkpoint(weight=other_weight, optimizer=other).restore(path)
    restored.assert_existing_objects_matched()
    other_table = table_of("saved_other")
    other_table.assign(*table.export())
    for optimizer, w, t in ((distributed, weight, table), (other, other_weight, other_table)):
        run(2, optimizer, w, t)
    assert value(other.iterations) == 5
    np.testing.assert_allclose(other_weight, weight, rtol=1e-6)
    np.testing.assert_allclose(other_table.sparse_read([1, 2]), table.sparse_read([1, 2]), rtol=1e-6)


def test_what_is_asked_of_the_optimizer_is_asked_of_the_inner_one():
    for library in (keras, tf_keras):
        inner = library.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.5)
        distributed = sok.DistributedOptimizer(inner, embedding_optimizer=sok.optimizers.SGD(0.1))
        table, weight = table_of("averaged"), tf.Variable([2.0, 3.0])
        for _ in range(2):  # the first only starts the average
            distributed.apply_gradients(gradients(table, weight))
        own = [v.name for v in distributed.embedding_optimizer.variables]
        assert len(distributed.variables) == len(inner.variables) + len(own)
        before = weight.numpy()
        distributed.finalize_variable_values([table, weight])
        assert not np.array_equal(weight, before), "the moving average was put in its place"


def test_a_fixed_loss_scale_is_undone_for_tables_too():
    scaled = keras.optimizers.SGD(0.5, loss_scale_factor=8.0)
    distributed = sok.DistributedOptimizer(scaled, embedding_optimizer=sok.optimizers.SGD(0.5))
    assert distributed.scale_loss(1.0) == 8.0
    table, weight = table_of("scaled"), tf.Variable([2.0, 3.0])
    of_table, of_weight = (grad for grad, _ in gradients(table, weight))
    of_table = tf.IndexedSlices(of_table.values * 8.0, of_table.indices)
    distributed.apply_gradients([(of_table, table), (of_weight * 8.0, weight)])
    np.testing.assert_allclose(weight, [2.0 - 0.5 * 3, 3.0 - 0.5 * 3])
    np.testing.assert_allclose(table.sparse_read([2]), [[1 - 0.5 * 2, 1 - 0.5 * 3]])


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_models_that_compute_in_bfloat16_train(library):
    library.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        layer = for_keras(library).DistributedEmbedding("sum", 100, 4, slot_num=3, max_nnz=2)
        ids = library.Input((3, 2), dtype="int64")
        x = library.layers.Dense(1, dtype="float32")(library.layers.Flatten()(layer(ids)))
        model = library.Model(ids, x)
        model.compile(sok.DistributedOptimizer(library.optimizers.Adam(0.05)), "mse")
    finally:
        library.mixed_precision.set_global_policy("float32")
    rng = np.random.default_rng(0)
    losses = model.fit(rng.integers(0, 9, (32, 3, 2)), rng.normal(size=(32, 1)), epochs=5, verbose=0).history["loss"]
    assert layer.compute_dtype == "bfloat16" and losses[-1] < losses[0]


# Refusals.


@pytest.mark.parametrize("optimizer", [None, 0.1, sok.optimizers.SGD(0.1), keras.optimizers.SGD])
def test_what_is_no_stock_optimizer_is_refused(optimizer):
    with pytest.raises(TypeError, match=saying("`optimizer`", "Keras 3", "tf_keras or tf.compat.v1.train optimizer")):
        sok.DistributedOptimizer(optimizer)


def test_wrapping_twice_is_refused(stock):
    with pytest.raises(ValueError, match="distributed already"):
        sok.DistributedOptimizer(sok.DistributedOptimizer(stock))


def test_bad_arguments_are_refused(stock):
    with pytest.raises(ValueError, match="`op` must be"):
        sok.DistributedOptimizer(stock, op="max")
    with pytest.raises(TypeError, match=saying("`embedding_optimizer`", "sok.optimizers")):
        sok.DistributedOptimizer(stock, embedding_optimizer=keras.optimizers.SGD(0.1))


def test_gradients_that_the_tape_reduced_are_refused(stock):
    table, weight = table_of("twice"), tf.Variable([2.0, 3.0])
    with sok.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(lookup_rows(table, tf.constant([1], tf.int64)) * weight)
    pairs = zip(tape.gradient(loss, [table, weight]), [table, weight], strict=True)
    with pytest.raises(ValueError, match="would do so again"):
        sok.DistributedOptimizer(stock).apply_gradients(pairs)


def test_an_optimizer_without_a_match_says_what_to_pass_when_a_table_comes():
    for library in (keras, tf_keras):
        distributed = sok.DistributedOptimizer(library.optimizers.Adafactor(0.1))
        weight = tf.Variable([2.0, 3.0])
        distributed.build([weight])
        distributed.apply_gradients([(tf.ones([2]), weight)])
        with pytest.raises(ValueError, match=r"embedding_optimizer=sok.optimizers"):
            sok.DistributedOptimizer(library.optimizers.Adafactor(0.1)).build([table_of("unmatched"), weight])


def test_gradient_accumulation_is_refused_with_tables():
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    distributed = sok.DistributedOptimizer(inner, embedding_optimizer=sok.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="`gradient_accumulation_steps` .*embedding tables"):
        distributed.build([table_of("accumulated")])
    with pytest.raises(ValueError, match=r"Call build\(variables\) first"):
        sok.DistributedOptimizer(keras.optimizers.SGD(0.1)).apply([tf.constant(1.0)])


@pytest.mark.parametrize("given", ["adam", {"class_name": "Adam", "config": {"learning_rate": 0.25}}])
def test_names_and_configurations_are_resolved_as_keras_does(given):
    inner = sok.DistributedOptimizer(given).inner
    assert isinstance(inner, keras.optimizers.Adam)
    assert isinstance(given, str) or value(inner.learning_rate) == 0.25
    with pytest.raises(ValueError, match="admm"):
        sok.DistributedOptimizer("admm")


def test_before_init_of_several_workers_it_is_too_early(monkeypatch):
    sok.shutdown()
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    for early in (lambda: sok.DistributedOptimizer("adam"), lambda: sok.DistributedGradientTape(tf.GradientTape())):
        with pytest.raises(
            RuntimeError, match=saying("one of several workers (HOROVOD_SIZE=2)", "sok.Init has not been")
        ):
            early()
