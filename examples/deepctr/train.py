#!/usr/bin/env python3
"""A model of DeepCTR, as it is, on a log in Criteo's format: its embeddings become tables of all workers.

python examples/deepctr/train.py --data LOG                        one worker
horovodrun -np 2 python examples/deepctr/train.py --data LOG       two workers, the same model
... --backup FOLDER       a run that was interrupted goes on after its last whole epoch
... --checkpoint FOLDER   writes the weights after each epoch; --load FILE begins with one of these
... --export FOLDER/1     writes a SavedModel, for serve.py or TensorFlow Serving

Prints one line of JSON. README.md says how to get DeepCTR.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import types

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["TF_USE_LEGACY_KERAS"] = "1"  # DeepCTR 0.9.4 is written for Keras 2

import tensorflow as tf
from click_log import CATEGORIES, NUMBERS, read

import sok

# DeepCTR asks for its newest version when it is imported. A package `requests` that finds none answers it.
NONE_FOUND = types.SimpleNamespace(status_code=404)
before = sys.modules.get("requests")
sys.modules["requests"] = types.SimpleNamespace(get=lambda url: NONE_FOUND, codes=types.SimpleNamespace(ok=200))
from deepctr import models  # noqa: E402
from deepctr.feature_column import DenseFeat, SparseFeat  # noqa: E402

sys.modules.pop("requests") if before is None else sys.modules.update(requests=before)
keras = tf.keras


class Fail(keras.callbacks.Callback):
    """Ends the program in an epoch, as a machine does that fails."""

    def __init__(self, epoch: int):
        super().__init__()
        self.epoch_to_fail_in, self.epoch = epoch, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch + 1

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == self.epoch_to_fail_in and batch == 1:
            os._exit(1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="tab separated, perhaps .gz")
    parser.add_argument("--model", default="DeepFM", choices=("WDL", "DeepFM", "xDeepFM"))
    parser.add_argument("--rows", type=int, default=65536, help="of each embedding")
    parser.add_argument("--dim", type=int, default=9, help="of each row")
    parser.add_argument("--batch-size", type=int, default=256, help="of all workers together")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--backup", metavar="FOLDER", help="to go on from, if a run was interrupted")
    parser.add_argument("--fail-in-epoch", type=int, default=0, help="from 1: interrupts this run, to show --backup")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="for the weights after each epoch")
    parser.add_argument("--load", metavar="FILE", help="weights to begin with")
    parser.add_argument("--export", metavar="FOLDER", help="for a SavedModel; serving wants a number as its last part")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    sok.Init(global_batch_size=options.batch_size, seed=1)
    keras.utils.set_random_seed(1)
    columns, labels = read(options.data, options.rows)
    features = [
        *(SparseFeat(name, options.rows, options.dim) for name in CATEGORIES),
        *(DenseFeat(name, 1) for name in NUMBERS),
    ]
    model = getattr(models, options.model)(features, features)

    model = sok.distributed_model(model)
    model.compile(
        sok.DistributedOptimizer(keras.optimizers.Adagrad(0.02)),
        "binary_crossentropy",
        metrics=[keras.metrics.BinaryCrossentropy(name="log_loss"), keras.metrics.AUC(name="auc")],
    )
    if options.load:
        sok.load_weights(model, options.load)

    callbacks = [sok.callbacks.MetricSumCallback()]  # metrics of all workers' samples
    if options.backup:
        callbacks.append(sok.callbacks.BackupAndRestore(options.backup, delete_checkpoint=False))
    if options.checkpoint:
        callbacks.append(sok.callbacks.ModelCheckpoint(os.path.join(options.checkpoint, "{epoch:02d}.weights.h5")))
    if options.fail_in_epoch:
        callbacks.append(Fail(options.fail_in_epoch))
    mine = slice(sok.rank(), None, sok.size())  # so each worker gets its part of each batch
    history = model.fit(
        {name: column[mine] for name, column in columns.items()},
        labels[mine],
        batch_size=options.batch_size // sok.size(),
        epochs=options.epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    if options.export:
        sok.export_saved_model(model, options.export, overwrite=True)
    predictions = model.predict({name: column[:8] for name, column in columns.items()}, verbose=0)
    told = {
        "model": options.model,
        "workers": sok.size(),
        "epochs": [epoch + 1 for epoch in history.epoch],
        "log_loss": history.history.get("log_loss", []),
        "auc": history.history.get("auc", []),
        "first_predictions": predictions[:, 0].tolist(),
    }
    if sok.rank() == 0:
        sys.stdout.write(json.dumps(told) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
