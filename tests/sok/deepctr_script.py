"""Trains models of DeepCTR, unmodified, and converted copies; prints how far apart their predictions are.

Run by test_deepctr.py under tf_keras: `-m tests.sok.deepctr_script FOLDER_OF_DEEPCTR STEPS MODEL...`. On one worker the
converted copies are saved, loaded and exported, too, and the predictions of what comes of that count.
"""

import json
import sys
import tempfile
import types


def no_network(*_, **__):
    raise OSError("DeepCTR asks PyPI for its newest version when it is imported")


sys.modules["requests"] = types.SimpleNamespace(get=no_network)
sys.path.append(sys.argv[1])

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from deepctr import models  # noqa: E402
from deepctr.feature_column import DenseFeat, SparseFeat, VarLenSparseFeat  # noqa: E402

import sok  # noqa: E402
from tests.short_stacks import with_short_stacks  # noqa: E402

with_short_stacks()
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # as in jobs of one worker (worker.py)
keras = tf.keras
ROWS, BATCH, STEPS = 100, 24, int(sys.argv[2])
WITHOUT_NUMBERS = "AFM", "CCPM", "EDCN"  # which refuse them among what they look up
OPTIONS = {  # by default its convolutions want many fields, and take long to trace
    "FGCNN": {"conv_kernel_width": (3, 3), "conv_filters": (4, 4), "new_maps": (2, 2), "pooling_width": (2, 2)}
}
RNG = np.random.default_rng(0)


def column(name, **options):
    return SparseFeat(
        name, ROWS, 4, embeddings_initializer=keras.initializers.RandomNormal(0.0, 0.05, seed=3), **options
    )


def build(name):
    keras.utils.set_random_seed(5)
    price = DenseFeat("price", 1)
    if name == "DIN":  # a history that shares the table of the item; Dice normalizes by the batch of each worker
        history = VarLenSparseFeat(column("hist_item", embedding_name="item"), maxlen=3, length_name="length")
        return models.DIN([column("item"), price, history], ["item"], att_activation="sigmoid")
    groups = ({"group_name": "a"}, {"group_name": "b"}) if name == "FLEN" else ({}, {})
    columns = [*(column(f"C{i}", **groups[i % 2]) for i in range(4)), price]
    if name in WITHOUT_NUMBERS:
        columns.pop()
    return getattr(models, name)(*[columns] * (1 if name in ("MLR", "PNN") else 2), **OPTIONS.get(name, {}))


def samples(name):
    """No id comes twice in a batch."""
    n = BATCH * STEPS
    many = {"price": RNG.random((n, 1)).astype("float32")}
    if name == "DIN":
        ids = np.concatenate([1 + RNG.permutation(ROWS - 1)[: 4 * BATCH].reshape(BATCH, 4) for _ in range(STEPS)])
        many |= {"item": ids[:, 0], "hist_item": ids[:, 1:], "length": np.full(n, 3)}
    else:
        many |= {f"C{i}": np.concatenate([RNG.permutation(ROWS)[:BATCH] for _ in range(STEPS)]) for i in range(4)}
    return many, RNG.integers(0, 2, (n, 1)).astype("float32")


def difference(name):
    """The largest difference of predictions after 20 steps: stock on all samples, ours on each worker's part."""
    stock, ours = build(name), build(name)
    sok.broadcast_variables(stock.variables)
    ours.set_weights(stock.get_weights())
    ours = sok.distributed_model(ours)
    x, y = samples(name)
    mine = np.arange(BATCH * STEPS).reshape(STEPS, sok.size(), -1)[:, sok.rank()].ravel()
    stock.compile(keras.optimizers.Adagrad(0.01), "binary_crossentropy")
    stock.optimizer.build(stock.trainable_variables)  # what is made while the step is traced has it traced twice
    ours.compile(sok.DistributedOptimizer(keras.optimizers.Adagrad(0.01)), "binary_crossentropy")
    stock.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    part = {key: value[mine] for key, value in x.items()}
    ours.fit(part, y[mine], batch_size=BATCH // sok.size(), shuffle=False, verbose=0)
    found, expected = (model.predict(x, batch_size=BATCH, verbose=0) for model in (ours, stock))
    others = [found] if sok.size() > 1 else [found, loaded(ours, x), served(ours, x)]
    return max(float(np.abs(other - expected).max()) for other in others)


def loaded(model, x):
    """The predictions of a model whose weights and rows were lost, and come from a file."""
    with tempfile.TemporaryDirectory() as folder:
        sok.save_weights(model, f"{folder}/model.weights.h5")
        before = model.predict(x, batch_size=BATCH, verbose=0)
        model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
        assert np.abs(model.predict(x, batch_size=BATCH, verbose=0) - before).max() > 0
        sok.load_weights(model, f"{folder}/model.weights.h5")
    return model.predict(x, batch_size=BATCH, verbose=0)


def served(model, x):
    """What stock ops make of the exported model."""
    with tempfile.TemporaryDirectory() as folder:
        sok.export_saved_model(model, folder, overwrite=True)
        serve = tf.saved_model.load(folder).signatures["serving_default"]
        inputs = serve.structured_input_signature[1]
        parts = {name: tf.cast(tf.reshape(x[name], [len(x[name]), -1]), spec.dtype) for name, spec in inputs.items()}
        (found,) = serve(**parts).values()
    return found.numpy()


sok.Init(seed=1)
said = {name: difference(name) for name in sys.argv[3:]}
if sok.rank() == 0:
    print("differences:", json.dumps(said), flush=True)
