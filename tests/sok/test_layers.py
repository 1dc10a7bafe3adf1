"""The two layers: arguments, outputs, errors, configuration. Their arithmetic is judged in test_layers_against_*."""

import concurrent.futures
import inspect
import json
import time

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.table.initializers import to_spec
from sok.table.table import EmbeddingVariable
from tests.reference.judge import assert_close, assert_same


def distributed(combiner="sum", rows=100, dim=4, slot_num=2, max_nnz=3, **kwargs):
    return sok.DistributedEmbedding(combiner, rows, dim, slot_num, max_nnz, **kwargs)


def all_to_all(rows=100, dim=4, slot_num=2, nnz_per_slot=3, **kwargs):
    return sok.All2AllDenseEmbedding(rows, dim, slot_num, nnz_per_slot, **kwargs)


BOTH = pytest.mark.parametrize("make", [distributed, all_to_all])
IDS = tf.constant([[[1, 2, 3], [4, 5, 6]], [[1, 1, 7], [8, 9, 1]]], tf.int64)


def test_signatures_are_those_of_sok():
    parameters = lambda layer: list(inspect.signature(layer.__init__).parameters.items())[1:]  # noqa: E731
    assert [(n, p.default) for n, p in parameters(sok.DistributedEmbedding)][:9] == [
        *[(n, inspect.Parameter.empty) for n in ["combiner", "max_vocabulary_size_per_gpu", "embedding_vec_size"]],
        *[(n, inspect.Parameter.empty) for n in ("slot_num", "max_nnz")],
        *[("max_feature_num", 1), ("use_hashtable", True), ("key_dtype", None), ("embedding_initializer", None)],
    ]
    assert [(n, p.default) for n, p in parameters(sok.All2AllDenseEmbedding)][:8] == [
        *[(n, inspect.Parameter.empty) for n in ("max_vocabulary_size_per_gpu", "embedding_vec_size")],
        *[(n, inspect.Parameter.empty) for n in ("slot_num", "nnz_per_slot")],
        *[("dynamic_input", False), ("use_hashtable", True), ("key_dtype", None), ("embedding_initializer", None)],
    ]


@pytest.mark.parametrize(
    "make, arguments, text",
    [
        (distributed, dict(combiner="max"), "`combiner` .*'sum', 'mean' or 'sqrtn'.*'max'"),
        (distributed, dict(combiner=None), "`combiner` .* Received: None"),
        (distributed, dict(rows=0), "`max_vocabulary_size_per_gpu` .*: 0"),
        (distributed, dict(dim=1.5), "`embedding_vec_size` .* Received: 1.5"),
        (distributed, dict(slot_num=-1), "`slot_num` .* Received: -1"),
        (distributed, dict(max_nnz=True), "`max_nnz` .* Received: True"),
        (distributed, dict(max_feature_num=0), "`max_feature_num` .* Received: 0"),
        (
            distributed,
            dict(max_nnz=2**63),
            r"`max_nnz` .*9223372036854775807\].*: 92",
        ),
        (
            distributed,
            dict(max_nnz=2**62),
            r"`slot_num \* max_nnz` .*9223372036854775807\]",
        ),
        (
            distributed,
            dict(max_feature_num=7),
            r"`max_feature_num` .*slot_num \* max_nnz = 6\].*: 7",
        ),
        (
            distributed,
            dict(key_dtype="int16"),
            "`key_dtype` .*int64, int32, uint32, uint64.*'int16'",
        ),
        (distributed, dict(embedding_initializer="nil"), "`embedding_initializer` must be a name .* Received: 'nil'"),
        (all_to_all, dict(nnz_per_slot=0), "`nnz_per_slot` .*: 0"),
        (all_to_all, dict(rows="many"), "`max_vocabulary_size_per_gpu` .* Received: 'many'"),
    ],
)
def test_bad_arguments_are_named(make, arguments, text):
    with pytest.raises(ValueError, match=text):
        make(**arguments)


@pytest.mark.parametrize("spelling", ["mean", "Mean", "MEAN"])
def test_combiner_in_any_capitalisation(spelling):
    layer = distributed(spelling, embedding_initializer="ones")
    assert layer.combiner == "mean"
    assert_same(layer(IDS).numpy(), np.ones([2, 2, 4], np.float32))


class TestVariable:
    @BOTH
    def test_is_made_on_first_use_and_tracked(self, make):
        layer = make(name="tracked", trainable=True)
        assert layer.trainable_variables == []
        layer(IDS)
        assert layer.trainable_variables == layer.trainable_weights == [layer.embedding_variable]
        assert layer.var is layer.embedding_variable
        assert isinstance(layer.var, EmbeddingVariable)
        assert (layer.var.dim, layer.var.capacity) == (4, 100)

    @BOTH
    def test_may_be_asked_for_before_any_input(self, make):
        layer = make()
        variable = layer.embedding_variable
        layer(IDS)
        assert layer.trainable_variables == [variable]

    def test_two_layers_of_one_shape_are_two_tables(self):
        a, b = distributed(), distributed()
        a(IDS)
        assert a.var.table_name != b.var.table_name
        assert (int(a.var.size()), int(b.var.size())) == (9, 0)
        assert not np.allclose(a.var.sparse_read([1]), b.var.sparse_read([1]))

    def test_options_reach_it(self):
        layer = distributed(
            use_hashtable=False, key_dtype=tf.uint32, embedding_initializer=lambda s, d: np.full(s, 3.0)
        )
        assert (layer.var.hashed, layer.var.key_dtype) == (False, tf.uint32)
        assert layer.var.sparse_read([5]).numpy().tolist() == [[3.0] * 4]

    @BOTH
    def test_may_be_frozen(self, make):
        layer = make(trainable=False)
        layer(IDS)
        assert layer.trainable_variables == []
        assert layer.non_trainable_variables == [layer.var]


class TestOutput:
    @BOTH
    @pytest.mark.parametrize("batch", [5, None])
    def test_static_shapes_are_known_as_far_as_they_can_be(self, make, batch):
        layer, shapes = make(), []

        @tf.function(input_signature=[tf.TensorSpec([batch, 2, 3], tf.int64)])
        def run(ids):
            shapes.append(layer(ids).shape.as_list())
            return layer(ids)

        tail = [4] if make is distributed else [3, 4]
        assert run(tf.zeros([5, 2, 3], tf.int64)).shape == [5, 2, *tail]
        assert shapes == [[batch, 2, *tail]]

    @BOTH
    def test_batches_may_differ_and_be_empty(self, make):
        layer = make()
        run = tf.function(layer, reduce_retracing=True)
        for batch in (3, 1, 0, 7):
            assert run(tf.zeros([batch, 2, 3], tf.int64)).shape[0] == batch

    @BOTH
    @pytest.mark.parametrize(
        "policy, dtype", [("mixed_float16", tf.float16), ("mixed_bfloat16", tf.bfloat16), ("float64", tf.float64)]
    )
    def test_has_the_compute_dtype_while_rows_stay_float32(self, make, policy, dtype):
        layer = make(dtype=policy)
        with tf.GradientTape() as tape:
            out = layer(IDS)
            loss = tf.reduce_sum(tf.cast(out, tf.float32))
        assert (out.dtype, layer.var.dtype, tape.gradient(loss, layer.var).dtype) == (dtype, tf.float32, tf.float32)

    def test_weights_are_not_rounded_to_the_compute_dtype(self):
        layer = distributed(dtype="mixed_float16", slot_num=1, embedding_initializer="ones")
        ids, weights = tf.ragged.constant([[1, 2]], dtype=tf.int64), tf.ragged.constant([[2049.0, -2048.0]])
        assert layer(ids, weights=weights).numpy().tolist() == [[[1.0] * 4]]  # 2049 is no float16

    @BOTH
    def test_compute_output_shape(self, make):
        tail = (4,) if make is distributed else (3, 4)
        assert make().compute_output_shape((7, 2, 3)) == (7, 2, *tail)
        assert make().compute_output_shape((None, 2, 3)) == (None, 2, *tail)

    def test_a_layer_called_twice_adds_its_gradients(self):
        layer = distributed(slot_num=1, max_nnz=2)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer([[1], [2]])) + tf.reduce_sum(2 * layer([[2, 2]]))
        gradient = tape.gradient(loss, layer.var)
        sums = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, 2).numpy()
        assert sums.tolist() == [[1.0] * 4, [5.0] * 4]


class TestDistributedEmbedding:
    @pytest.mark.parametrize("form", [list, tuple, np.array, tf.constant, tf.ragged.constant])
    def test_ids_as_a_person_would_try_first(self, form):
        layer = distributed(slot_num=1)
        assert_same(
            layer(form([[1, 2, 3], [4, 5, 6]])).numpy()[:, 0],
            tf.reduce_sum(layer.var.sparse_read([[1, 2, 3], [4, 5, 6]]), 1).numpy(),
        )

    def test_numpy_ids_fit_into_narrower_tables(self):
        layer = distributed(key_dtype="int32")
        assert layer(np.array([[1, 2]])).shape == [1, 2, 4]
        with pytest.raises(ValueError, match="keys must be int32"):
            layer(np.array([[1, 2**40]]))

    def test_max_feature_num_of_one_stands_for_as_many_as_fit(self):
        assert distributed()(IDS).shape == [2, 2, 4]
        with pytest.raises(tf.errors.InvalidArgumentError, match="sample 0 .*max_feature_num = 5"):
            distributed(max_feature_num=5)(IDS)
        with pytest.raises(tf.errors.InvalidArgumentError, match="sample 0, feature 0 .*max_nnz = 2"):
            distributed(max_nnz=2)(IDS)

    def test_empty_features_are_zeros(self):
        for combiner in ("sum", "mean", "sqrtn"):
            out = distributed(combiner)(tf.ragged.constant([[[], [5]]], dtype=tf.int64)).numpy()
            assert not out[0, 0].any() and out[0, 1].any()

    def test_padding_key(self):
        layer = distributed("mean", padding_key=0)
        padded = layer([[[5, 0, 0], [0, 0, 0]]])
        assert_same(padded.numpy()[0, 0], layer.var.sparse_read([5]).numpy()[0])
        assert not padded.numpy()[0, 1].any()
        assert layer.var.export()[0].numpy().tolist() == [5]

    def test_weights_are_differentiable(self):
        layer = distributed("mean", slot_num=1)
        ids, weights = tf.ragged.constant([[1, 2]], dtype=tf.int64), tf.ragged.constant([[1.0, 3.0]])
        with tf.GradientTape() as tape:
            tape.watch(weights.values)
            out = layer(ids, weights=weights)
            loss = tf.reduce_sum(out)
        a, b = layer.var.sparse_read([1, 2]).numpy()
        assert_close(out.numpy()[0, 0], (a + 3 * b) / 4)
        gradient = tape.gradient(loss, weights.values).numpy()
        assert_close(gradient, np.array([3 * (a - b).sum() / 16, (b - a).sum() / 16]))

    @pytest.mark.parametrize("shape", [[2, 3, 3], [2, 3], [2]])
    def test_other_shapes_are_refused(self, shape):
        with pytest.raises(ValueError, match=r"`inputs` must be .*slot_num = 2"):
            distributed()(tf.zeros(shape, tf.int64))

    def test_keys_of_identity_tables_are_checked(self):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"key 100 is outside \[0, 100\)"):
            distributed(use_hashtable=False)([[1, 100]])


class TestAll2AllDenseEmbedding:
    def test_gives_each_id_its_row(self):
        layer = all_to_all()
        assert_same(layer(IDS).numpy(), layer.var.sparse_read(IDS).numpy())
        assert int(layer.var.size()) == 9

    @pytest.mark.parametrize("slot_num, nnz, shape", [(2, 1, [5, 2]), (1, 3, [5, 3]), (1, 1, [5, 1])])
    def test_dimensions_of_one_may_be_left_out(self, slot_num, nnz, shape):
        assert all_to_all(slot_num=slot_num, nnz_per_slot=nnz)(tf.zeros(shape, tf.int64)).shape == [5, slot_num, nnz, 4]

    @pytest.mark.parametrize("shape", [[7], [0], [2, 2, 2, 2], []])
    def test_dynamic_input_takes_any_shape(self, shape):
        layer = all_to_all(dynamic_input=True)
        assert layer(tf.zeros(shape, tf.int64)).shape == [*shape, 4]
        assert layer.compute_output_shape(tuple(shape)) == (*shape, 4)

    def test_full_sparse_and_ragged_inputs(self):
        layer = all_to_all()
        expected = layer.var.sparse_read(IDS).numpy()
        assert_same(layer(tf.sparse.from_dense(IDS)).numpy(), expected)
        assert_same(layer(tf.RaggedTensor.from_tensor(IDS, ragged_rank=2)).numpy(), expected)

    @pytest.mark.parametrize("shape", [[2, 2], [2, 3, 3], [2, 2, 3, 1]])
    def test_other_shapes_are_refused(self, shape):
        with pytest.raises(ValueError, match=r"`inputs` must have shape \[batch, 2, 3\].*dynamic_input=True. Received"):
            all_to_all()(tf.zeros(shape, tf.int64))

    def test_uneven_inputs_are_refused(self):
        with pytest.raises(tf.errors.InvalidArgumentError, match="same number of ids"):
            all_to_all()(tf.ragged.constant([[[1, 2, 3], [4, 5]]], dtype=tf.int64))
        run = tf.function(all_to_all(), input_signature=[tf.TensorSpec([None, None, None], tf.int64)])
        with pytest.raises(tf.errors.InvalidArgumentError, match="same number of ids"):
            run(tf.zeros([2, 3, 3], tf.int64))


class TestConfig:
    @BOTH
    @pytest.mark.parametrize(
        "initializer",
        [None, "HeNormal", tf.keras.initializers.RandomNormal(0.5, 0.25, seed=3), tf.keras.initializers.Constant(2.0)],
        ids=["none", "name", "object", "constant"],
    )
    def test_round_trip(self, make, initializer):
        options = dict(use_hashtable=False, key_dtype=tf.int32, embedding_initializer=initializer, name="again")
        layer = make(**options)
        config = layer.get_config()
        again = type(layer).from_config(json.loads(json.dumps(config)))
        assert again.get_config() == config
        with tf.Graph().as_default():  # in which names start anew
            seeds = [make(**options).var.seed, type(layer).from_config(config).var.seed]
        with tf.Graph().as_default():
            seeds.append(make(**options).var.seed)
        assert seeds[0] == seeds[2]
        assert again.var.key_dtype == tf.int32 and not again.var.hashed
        if initializer is not None and not isinstance(initializer, str):
            assert again.get_config()["table"]["initializer"]["config"] == initializer.get_config()

    @pytest.mark.parametrize(
        "initializer",
        [
            tf.compat.v1.glorot_normal_initializer(seed=4),
            tf.random_normal_initializer(1, 2),
            tf.keras.initializers.HeUniform,
        ],
    )
    def test_initializers_of_tensorflow_and_classes_come_back_as_keras_knows_them(self, initializer):
        layer = distributed(embedding_initializer=initializer)
        again = type(layer).from_config(json.loads(json.dumps(layer.get_config())))
        specs = [to_spec(x._options.initializer, 100, 4) for x in (layer, again)]
        assert specs[0] == specs[1] == to_spec(initializer, 100, 4)

    def test_registered_functions_come_back(self):
        @tf.keras.utils.register_keras_serializable("test_layers")
        def threes(shape, dtype=None):
            return tf.fill(shape, 3.0)

        again = type(distributed()).from_config(distributed(embedding_initializer=threes).get_config())
        assert again.var.sparse_read([1]).numpy().tolist() == [[3.0] * 4]

    def test_says_what_was_given(self):
        config = distributed("Sqrtn", max_feature_num=4, padding_key=-1).get_config()
        expected = dict(combiner="sqrtn", max_vocabulary_size_per_gpu=100, embedding_vec_size=4, slot_num=2, max_nnz=3)
        expected |= dict(max_feature_num=4, padding_key=-1, table=sok.TableOptions().get_config())
        assert expected.items() <= config.items()
        config = all_to_all(dynamic_input=True).get_config()
        assert dict(nnz_per_slot=3, dynamic_input=True).items() <= config.items()


class TestGetEmbedding:
    ARGUMENTS = dict(
        combiner="sum", max_vocabulary_size_per_gpu=10, embedding_vec_size=2, slot_num=1, max_nnz=1
    )  # fmt: skip

    def test_gets_or_makes(self):
        a = sok.get_embedding("get_a", sok.DistributedEmbedding, **self.ARGUMENTS)
        assert a.name == "get_a"
        assert sok.get_embedding("get_a") is a
        assert sok.get_embedding("get_b", sok.DistributedEmbedding, **self.ARGUMENTS) is not a

    def test_layers_belong_to_their_graph(self):
        a = sok.get_embedding("get_c", sok.DistributedEmbedding, **self.ARGUMENTS)
        with tf.Graph().as_default():
            b = sok.get_embedding("get_c", sok.DistributedEmbedding, **self.ARGUMENTS)
            assert sok.get_embedding("get_c") is b is not a

    def test_an_unknown_name_without_a_constructor_is_an_error(self):
        with pytest.raises(ValueError, match="'get_d'.*`constructor`"):
            sok.get_embedding("get_d")


def test_classes_are_made_once_per_keras():
    import keras
    import tf_keras

    assert sok.layers.for_keras(keras) is sok.layers.for_keras(tf.keras)
    assert sok.layers.for_keras(tf.keras).DistributedEmbedding is sok.DistributedEmbedding
    legacy = sok.layers.for_keras(tf_keras)
    assert legacy is sok.layers.for_keras(tf_keras)
    layer = legacy.DistributedEmbedding("sum", 100, 4, 2, 3)
    assert isinstance(layer, tf_keras.layers.Layer)
    assert layer(IDS).shape == [2, 2, 4]
    assert int(layer.var.size()) == 9


def test_threads_that_call_a_layer_first_share_its_table(monkeypatch):
    made = []

    def slowly(*args, **kwargs):
        made.append(kwargs["name"])
        time.sleep(0.05)
        return EmbeddingVariable(*args, **kwargs)

    monkeypatch.setattr("sok.keras.layers.base.EmbeddingVariable", slowly)
    layer = sok.DistributedEmbedding("sum", 100, 4, slot_num=1, max_nnz=1, name="threaded")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: layer(tf.constant([[7]], tf.int64)), range(4)))
    assert made == ["threaded"] and int(layer.var.size()) == 1
    assert sum(v is layer.var for v in layer.trainable_variables) == len(layer.trainable_variables) == 1
    assert len({out.numpy().tobytes() for out in outputs}) == 1


def test_an_uneven_list_is_told_of_ragged_tensors():
    layer = sok.DistributedEmbedding("sum", 100, 4, slot_num=2, max_nnz=2, key_dtype="int32", name="uneven")
    with pytest.raises(ValueError, match=r"'uneven': nested lists .* even.*tf.ragged.constant\(ids, dtype=tf.int32\)"):
        layer([[[1, 2], [3]], [[], [4]]])
