"""OpenEmbedding's names: what its scripts call, over sok."""

import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import openembedding
import openembedding.tensorflow as embed
import sok
from openembedding import server, servers
from tests.messages import saying

keras = tf.keras
IDS = np.arange(40).reshape(20, 2)


def model(name="oe"):
    ids = keras.Input([2], dtype="int64")
    rows = keras.layers.Embedding(100, 4, name=f"{name}_rows")(ids)
    small = keras.layers.Embedding(64, 4, name=f"{name}_small")(ids)
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(rows), keras.layers.Flatten()(small)])
    return keras.Model(ids, keras.layers.Dense(1, "sigmoid")(joined))


def trained(made):
    optimizer = embed.distributed_optimizer(keras.optimizers.Adagrad(0.1))
    made.compile(optimizer, "binary_crossentropy", metrics=["AUC"])
    made.fit(IDS, np.ones([20, 1]), verbose=0)
    return made.predict(IDS, verbose=0)


def test_arguments_without_a_name_are_those_of_keras_2():
    with pytest.warns(UserWarning, match="input_length"):
        layer = embed.Embedding(100, 4, "ones", None, None, "non_neg", True, 2)
    assert layer.mask_zero and layer.embeddings_regularizer is None and layer.embeddings_constraint is not None
    assert layer.compute_mask(tf.constant([[0, 3]])).numpy().tolist() == [[False, True]]
    with pytest.raises(TypeError, match=saying("at most 8 arguments", "Received: 9")):
        embed.Embedding(100, 4, "ones", None, None, None, True, 2, 3)


def test_the_lines_of_its_readme_train_save_and_load(tmp_path):
    made = embed.distributed_model(model())
    assert isinstance(made.get_layer("oe_rows"), sok.Embedding)
    assert type(made.get_layer("oe_small")) is keras.layers.Embedding  # 64, inclusive
    expected = trained(made)
    made.save_weights(str(tmp_path / "w"))
    made.save(str(tmp_path / "m"))
    made.save_as_original_model(str(tmp_path / "o"), include_optimizer=False)
    embed.save_server_model(made, str(tmp_path / "s"))
    for path in (tmp_path / "w", tmp_path / "m" / "variables" / "variables"):
        for layer in made.layers:
            layer.set_weights([np.zeros_like(weight) for weight in layer.get_weights()])
        assert np.abs(made.predict(IDS, verbose=0) - expected).max() > 0
        made.load_weights(str(path))
        np.testing.assert_array_equal(made.predict(IDS, verbose=0), expected)
    made.get_layer("oe_rows").set_weights([np.zeros([100, 4], "float32")])
    embed.load_server_model(made, str(tmp_path / "s"))
    np.testing.assert_array_equal(made.predict(IDS, verbose=0), expected)
    with pytest.raises(OSError, match="no weights"):
        made.load_weights(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="include_optimizer"):
        made.save_as_original_model(str(tmp_path / "o"))


def test_layers_take_its_arguments():
    layer = embed.Embedding(-1, 3, keras.initializers.RandomNormal(0.0, 1e-4), num_shards=4, explicit=False)
    assert layer(tf.constant([[2**62]])).shape == (1, 1, 3) and layer.input_dim is None
    assert not embed.Embedding(10, 3)._is_plain and embed.Embedding(1000, 3, sparse_as_dense=True)._is_plain
    copy = embed.Embedding.from_config(embed.Embedding(1000, 3, sparse_as_dense=True).get_config())
    assert copy._is_plain and copy.input_dim == 1000
    assert embed.Adam(0.5).inner.learning_rate == 0.5

    class Mine(embed.Model):
        def __init__(self):
            super().__init__()
            self.rows = embed.Embedding(-1, 1, "zeros")

        def call(self, ids):
            return tf.reduce_sum(self.rows(ids), 1)

    mine = Mine()
    mine.compile(embed.SGD(0.1), "mse")
    mine.fit(IDS, np.ones([20, 1]), verbose=0)
    assert int(mine.rows.embedding_variable.num_rows()) == 40


# By its formulas: four rows that begin at 1, gradients of 1, learning rate 0.1.
LAZY = {
    "Adam": ({}, [0.8, 0.7, 0.9, 1.0]),
    "Adamax": ({}, [0.8, 0.7, 0.9, 1.0]),
    "SGD": ({"momentum": 0.9}, [0.71, 0.439, 0.9, 1.0]),
    "RMSprop": ({}, [0.454, 0.262, 0.684, 1.0]),
    "Adagrad": ({}, None),
}


@pytest.mark.parametrize("name", LAZY)
def test_rows_outside_the_batch_stay_and_each_counts_its_own_steps(name):
    arguments, expected = LAZY[name]
    layer = embed.Embedding(-1, 1, "ones", name=f"lazy_{name}")
    optimizer = getattr(embed, name)(0.1, **arguments)
    for ids in ([0, 1], [1], [1], [0, 2]):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant(ids)))
        table = layer.embedding_variable
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    if expected is None:  # which leaves them anyway
        assert type(optimizer.embedding_optimizer).__name__ == "Adagrad"
        return
    np.testing.assert_allclose(tf.squeeze(layer(tf.range(4))), expected, atol=6e-4)
    assert int(optimizer.iterations) == int(optimizer.embedding_optimizer.iterations) == 4


def test_horovod_around_it_is_one_optimizer():
    hvd = pytest.importorskip("horovod.tensorflow.keras")
    made = embed.distributed_optimizer(keras.optimizers.Adam(0.5))
    around = hvd.DistributedOptimizer(made, op=hvd.Sum)
    assert type(around) is type(made) and around.op == sok.Sum
    assert hvd.DistributedOptimizer(made).op == sok.Average


def test_rows_are_on_servers_that_a_master_knows(forked, tmp_path):
    script = Path(__file__).with_name("openembedding_servers_script.py")
    done = forked.run(script, tmp_path, str(tmp_path), environment={"TF_USE_LEGACY_KERAS": "1"}, deadline=120)
    assert done.status == 0 and "the script ran to its end" in done.stdout, done.stderr[-3000:]


def test_servers_that_there_are_not(monkeypatch):
    monkeypatch.setattr(embed.flags, "wait_num_servers", 2)
    with pytest.raises(ValueError, match="master_endpoint must be 'ip:port'. Received: ''"):
        embed.Embedding(10, 2)
    with pytest.raises(ValueError, match="master_endpoint must be 'ip:port'. Received: 'nowhere'"):
        openembedding.Server(master_endpoint="nowhere")
    with pytest.raises(ValueError, match="bind_ip must be 'ip' or 'ip:port'. Received: 'a:b'"):
        openembedding.Master("a:b")
    master = openembedding.Master("127.0.0.1")
    silent = socket.create_connection(servers.address_of(master.endpoint, ""))  # keeps nobody waiting
    monkeypatch.setattr(embed.flags, "master_endpoint", master.endpoint)
    monkeypatch.setattr(servers, "SECONDS_TO_WAIT", 0.5)
    with pytest.raises(TimeoutError, match=r"knows 0 servers that are ready, of 2 \(flags.wait_num_servers\)"):
        embed.Embedding(10, 2)
    monkeypatch.setattr(embed.flags, "wait_num_servers", 0)
    with pytest.raises(ValueError, match="wait_num_servers is 0"):
        embed.Embedding(10, 2)
    silent.close()
    master.exit()
    monkeypatch.setattr(embed.flags, "wait_num_servers", 1)
    with pytest.raises(TimeoutError, match="no master has answered"):
        embed.Embedding(10, 2)


def test_a_master_that_says_nothing_is_gone_after_a_while(monkeypatch):
    monkeypatch.setattr(servers, "_SECONDS_OF_A_CALL", 0.2)
    monkeypatch.setattr(servers, "SECONDS_TO_WAIT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listens:  # and never answers
        endpoint = f"127.0.0.1:{listens.getsockname()[1]}"
        with pytest.raises(TimeoutError, match="no master has answered in 0.5 s"):
            openembedding.Server("127.0.0.1", endpoint)
        begun = object.__new__(openembedding.Server)
        begun._master, begun._is_left = servers._asked(endpoint), threading.Event()
        ends = threading.Thread(target=begun.join, daemon=True)
        ends.start()
        ends.join(30)
        assert not ends.is_alive()


def test_the_server_command_says_what_is_wrong(capsys):
    assert server.main(["--bind_ip", "a:b"]) == 2
    assert "bind_ip must be" in capsys.readouterr().err


def test_pulling_gives_fit_the_first_steps_of_the_dataset():
    inputs = {"ids": keras.Input([1], dtype="int64", name="ids")}
    rows = embed.Embedding(-1, 2, name="pulled")(inputs["ids"])
    model = keras.Model(inputs, keras.layers.Flatten()(rows))
    model.compile(embed.distributed_optimizer(keras.optimizers.SGD(0.1)), "mse")
    ids = np.arange(12)[:, None]
    data = tf.data.Dataset.from_tensor_slices(({"ids": ids}, np.ones([12, 2], "float32"))).batch(3)
    model.fit(embed.pulling(data, model, steps=2), verbose=0)
    table = model.get_layer("pulled").embedding_variable
    assert sorted(table.export()[0].numpy()) == list(range(6))
    model.fit(embed.pulling(data, model), verbose=0)
    assert int(table.num_rows()) == 12 and int(table.ids_seen) == 18


def test_what_is_not_there_says_what_to_do_instead():
    for name, words in (("Variable", "sok.EmbeddingVariable"),):
        assert getattr(embed.exb, name) is getattr(embed, name)
        with pytest.raises(NotImplementedError, match=saying(f"openembedding.tensorflow.{name} is not there", words)):
            getattr(embed, name)("model", "path")
    assert embed.flags.num_workers == sok.size() == 1
