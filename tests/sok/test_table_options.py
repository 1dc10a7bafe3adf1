"""`sok.TableOptions`: what a table is made with, handed whole through layers, columns and variables."""

import dataclasses
import json

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from hypothesis import strategies as st

import sok
from sok.layers import for_keras
from tests.messages import saying

IDS = tf.constant([[1], [2]], tf.int64)
ALL = sok.TableOptions(
    key_dtype="uint32",
    initializer=keras.initializers.RandomUniform(-2.0, 2.0, seed=3),
    hashed=False,
    seed=7,
    placement=sok.table_wise(0),
    num_keys=9,
    way_home="rows",
    exchange_dtype="bfloat16",
    gpu_memory_bytes=2**30,
)


def whole(top):
    return st.none() | st.integers(1, top)


@st.composite
def any_options(draw):
    hashed, on_host = draw(st.booleans()), draw(st.booleans())
    names = ("ones", "HeNormal", keras.initializers.HeUniform(seed=2))
    return dict(
        key_dtype=draw(st.sampled_from(["int64", tf.int32, np.uint32, "uint64"])),
        initializer=draw(st.sampled_from([None, *names])),
        hashed=hashed,
        trainable=draw(st.booleans()),
        seed=draw(st.none() | st.integers(-(2**63), 2**64 - 1)),
        placement=draw(st.sampled_from([None, sok.table_wise(3), sok.row_wise(hash=hashed)])),
        num_keys=None if hashed else draw(whole(2**62)),
        way_home=draw(st.sampled_from(["auto", "rows", "sums"])),
        exchange_dtype=draw(st.sampled_from(["float32", tf.float16, "bfloat16"])),
        on_host=on_host,
        gpu_memory_bytes=None if on_host else draw(whole(2**62)),
    )


@hypothesis.given(any_options())
def test_options_come_back_from_their_configuration(properties):
    options = sok.TableOptions(**properties)
    assert options == sok.TableOptions(**properties) and hash(options) == hash(sok.TableOptions(**properties))
    config = json.loads(json.dumps(options.get_config()))
    assert sok.TableOptions.from_config(config) == options
    other = dataclasses.replace(options, trainable=not options.trainable)
    assert other != options and "trainable" in repr(options)


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"key_dtype": "int16"}, "`key_dtype` .*int64"),
        ({"initializer": "nil"}, "`initializer` .*Keras"),
        ({"seed": 1.5}, "`seed` .*whole number"),
        ({"placement": "mod"}, "`placement` must be sok.row_wise()"),
        ({"hashed": False, "placement": sok.row_wise(hash=True)}, "row numbers: spread by hash"),
        ({"num_keys": 3}, "give hashed=False"),
        ({"num_keys": 0, "hashed": False}, "`num_keys` .*whole number"),
        ({"way_home": "Sums"}, "`way_home` .*'auto', 'rows', 'sums'"),
        ({"exchange_dtype": "int8"}, "`exchange_dtype` .*'float32'"),
        ({"gpu_memory_bytes": -1}, "`gpu_memory_bytes` .*whole number"),
        ({"gpu_memory_bytes": 9, "on_host": True}, "`gpu_memory_bytes` is for tables on a GPU, not on_host"),
    ],
)
def test_each_property_is_checked_wherever_it_is_given(properties, message):
    for make in (sok.TableOptions, lambda **them: sok.EmbeddingVariable(2, 10, **them)):
        with pytest.raises(ValueError, match=message):
            make(**properties)


@pytest.mark.parametrize("which_keras", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("name", ["DistributedEmbedding", "All2AllDenseEmbedding"])
def test_a_layer_hands_all_properties_on_and_keeps_them(which_keras, name):
    options = ALL
    if which_keras is tf_keras:
        options = dataclasses.replace(ALL, initializer=tf_keras.initializers.RandomUniform(-2.0, 2.0, seed=3))
    make = getattr(for_keras(which_keras), name)
    sizes = ("sum", 10, 2, 1, 1) if name == "DistributedEmbedding" else (10, 2, 1, 1)
    layer = make(*sizes, table=options)
    again = make.from_config(json.loads(json.dumps(layer.get_config())))
    assert again.get_config() == layer.get_config()
    for table in (layer.embedding_variable, again.embedding_variable):
        assert table.options == options
        assert (table.key_dtype, table.hashed, table.owner) == (tf.uint32, False, 0)
        assert (table.way_home, table.exchange_dtype) == ("rows", "bfloat16")
    assert layer.embedding_variable.seed == sok.EmbeddingVariable(2, 10, options=options).seed
    frozen = make(*sizes, table=sok.TableOptions(trainable=False))
    assert not frozen.trainable and not make.from_config(frozen.get_config()).embedding_variable.trainable


@pytest.mark.parametrize("which_keras", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_a_configuration_of_before_makes_the_same_layer(which_keras):
    old = dict(
        **dict(name="old", trainable=True, combiner="sum", max_vocabulary_size_per_gpu=10, embedding_vec_size=2),
        **dict(slot_num=1, max_nnz=1, use_hashtable=True, key_dtype="int32", exchange_dtype="float16"),
        embedding_initializer={"module": "keras.initializers", "class_name": "Constant", "config": {"value": 3.0}},
        placement={"hash": True, "owner": None},
    )
    table = for_keras(which_keras).DistributedEmbedding.from_config(old).embedding_variable
    assert (table.capacity, table.dim, table.hashed, table.key_dtype) == (10, 2, True, tf.int32)
    assert (table.exchange_dtype, table.placement) == ("float16", sok.row_wise(hash=True))
    assert table.sparse_read([4]).numpy().tolist() == [[3.0, 3.0]]


def test_a_saved_model_keeps_the_options_of_its_layers(tmp_path):
    options = dataclasses.replace(ALL, trainable=True)
    model = keras.Sequential(
        [keras.Input([1], dtype="int64"), sok.DistributedEmbedding("sum", 10, 2, 1, 1, table=options)]
    )
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.layers[0].embedding_variable.options == options


def item():
    return tf.feature_column.categorical_column_with_identity("item", 10)


def test_a_column_hands_all_properties_on():
    options = sok.TableOptions(initializer="ones", seed=4, way_home="sums", exchange_dtype="float16", trainable=False)
    column = sok.feature_column.embedding_column(item(), 2, table=options)
    again = type(column).from_config(json.loads(json.dumps(column.get_config())))
    assert again == column
    layer = tf_keras.layers.DenseFeatures([again])
    layer({"item": IDS})
    (table,) = layer.non_trainable_weights
    assert table.options == dataclasses.replace(options, hashed=False, num_keys=10)


def test_a_column_of_before_is_the_same():
    old = sok.feature_column.embedding_column(item(), 2).get_config()
    del old["table"]
    old |= dict(initializer={"class_name": "Constant", "config": {"value": 2.0, "dtype": "float32"}}, trainable=False)
    for more in ({}, dict(exchange_dtype="float16", placement={"hash": False, "owner": 0})):
        options = type(sok.feature_column.embedding_column(item(), 2)).from_config(old | more).table
        assert (options.initializer.value, options.trainable, options.hashed) == (2.0, False, False)
        assert options.exchange_dtype == more.get("exchange_dtype", "float32")
        assert options.placement == (sok.table_wise(0) if more else sok.row_wise())


def test_variables_of_other_systems_hand_all_properties_on():
    options = sok.TableOptions(initializer="ones", seed=4, way_home="sums", placement=sok.table_wise(0))
    assert sok.DynamicVariable(2, table=options, max_capacity=10).options == options
    assert sok.deeprec.get_embedding_variable("handed", 2, table=options, capacity=10).options == options
    static = sok.Variable(shape=(9, 2), table=options)
    assert static.options == dataclasses.replace(options, hashed=False, num_keys=9)
    assert isinstance(static, sok.LocalizedVariable)
    of_any_size = sok.DynamicVariable(2, "13").options
    assert sok.TableOptions.from_config(json.loads(json.dumps(of_any_size.get_config()))) == of_any_size


@pytest.mark.parametrize(
    "make",
    [
        lambda **more: sok.EmbeddingVariable(2, 10, options=more.pop("table"), **more),
        lambda **more: sok.DistributedEmbedding("sum", 10, 2, 1, 1, **more),
        lambda **more: sok.All2AllDenseEmbedding(10, 2, 1, 1, **more),
        lambda **more: sok.feature_column.embedding_column(item(), 2, **more),
        lambda **more: sok.deeprec.get_embedding_variable("twice", 2, **more),
        lambda **more: sok.DynamicVariable(2, **more),
    ],
    ids=["table", "pooled", "dense", "column", "deeprec", "dynamic"],
)
def test_a_property_given_twice_is_refused(make):
    with pytest.raises(ValueError, match=saying("`placement`", "twice: leave it to `", "TableOptions(")):
        make(table=sok.TableOptions(), placement=sok.row_wise())
    with pytest.raises(ValueError, match=saying("sok.TableOptions", "Received: {}")):
        make(table={})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda t: sok.DistributedEmbedding("sum", 10, 2, 1, 1, use_hashtable=False, table=t),
            "`hashed` is given twice",
        ),
        (lambda t: sok.DistributedEmbedding("sum", 10, 2, 1, 1, trainable=True, table=t), "`trainable` is given twice"),
        (lambda t: sok.EmbeddingVariable(2, 10, options=t, owner=0), "`placement` is given twice"),
        (lambda t: sok.Variable(shape=(9, 2), mode="localized:0", table=t), "`placement` is given twice"),
        (lambda t: sok.DynamicVariable(2, table=dataclasses.replace(t, key_dtype="int32")), "`key_dtype` of its own"),
        (lambda t: sok.Variable([[1.0]], table=dataclasses.replace(t, initializer="ones")), "`initializer` of its own"),
        (
            lambda t: sok.feature_column.embedding_column(item(), 2, table=dataclasses.replace(t, hashed=False)),
            "`hashed` of its own",
        ),
    ],
)
def test_what_does_not_go_with_a_table_is_refused(make, message):
    with pytest.raises(ValueError, match=saying(message)):
        make(sok.TableOptions(trainable=False))
