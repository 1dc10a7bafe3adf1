"""Writes tests/data/written_by_3b85c57, with commit 3b85c57.

In a checkout of that commit, its native library built (`SOK_CUDA=OFF scripts/build_native.sh`):

    export PYTHONPATH=$PWD
    python NEW/tests/old_files/write.py NEW/tests/data/written_by_3b85c57
    horovodrun -np 2 --gloo python NEW/tests/old_files/write.py NEW/tests/data/written_by_3b85c57

Each job packs its folder: `of_1_worker.tar.xz`, with the list of public names beside it, or `of_2_workers.tar.xz`. What
the files hold is in `expected.npz` and `expected.json` there.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import keras
import names
import numpy as np
import recipe
import tensorflow as tf
import tf_keras

import sok

expected: dict[str, np.ndarray] = {}
configs: dict[str, object] = {}


def note(case: str, values: dict[str, np.ndarray]) -> None:
    expected.update({f"{case}/{name}": value for name, value in values.items()})


def checkpoints(folder: Path) -> None:
    for rule, make in recipe.RULES.items():
        tables, optimizer = recipe.make_tables(sok.size(), f"{rule}_"), make()
        recipe.train(tables, optimizer, range(4))
        sok.save(folder / rule, list(tables.values()), optimizer)
        note(rule, recipe.contents(tables, optimizer))
        recipe.train(tables, optimizer, range(4, 6))
        note(f"{rule}/later", recipe.contents(tables))


def chain(folder: Path) -> None:
    tables, optimizer = recipe.make_tables(sok.size(), "chain_"), sok.optimizers.Adagrad(0.1)
    for link in range(3):
        recipe.train(tables, optimizer, range(link, link + 2))
        tables["hashed"].erase(tf.constant(recipe.POOLS["hashed"][link : link + 2]))
        sok.save(folder, list(tables.values()), optimizer, incremental=True)
    note("chain", recipe.contents(tables, optimizer))


def manager(folder: Path) -> None:
    tables, optimizer = recipe.make_tables(sok.size(), "manager_"), sok.optimizers.Adam(0.1)
    weight = tf.Variable([1.0, 2.0])
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, weight=weight, **tables)
    kept = sok.CheckpointManager(checkpoint, folder, max_to_keep=2)
    for step in range(3):
        recipe.train(tables, optimizer, range(step, step + 1))
        weight.assign_add([1.0, 1.0])
        kept.save()
    note("manager", recipe.contents(tables, optimizer))


def models(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for which in (keras, tf_keras):
        model = recipe.make_model(which)
        recipe.train_model(model, which)
        name = which.__name__
        if which is keras:
            sok.save(folder / "model", model)
        sok.save_weights(model, str(folder / f"{name}_together.weights.h5"))
        if sok.size() == 1:
            model.save_weights(folder / f"{name}_alone.weights.h5")
            model.save(folder / f"{name}.keras")
            if which is tf_keras:
                model.save_weights(str(folder / "tf_format" / "weights"), save_format="tf")
        note(f"models/{name}", recipe.contents(recipe.tables_of(model)))
        note(f"models/{name}", {"predictions": model(recipe.IDS, training=False).numpy()})
        sok.export_saved_model(model, str(folder / f"{name}_stock"))
        sok.export_saved_model(model, str(folder / f"{name}_native"), native=True)
        if which is keras:
            sok.export_saved_model(model, str(folder / "keras_stock_int8"), row_dtype="int8")
            sok.export_saved_model(model, str(folder / "keras_native_float16"), native=True, row_dtype="float16")
        for path in folder.glob("*/assets.extra/*.so"):  # half a megabyte, and whoever reads has one
            path.unlink(missing_ok=True)


def files_of_others(folder: Path) -> None:
    for rule, make in {**recipe.STOCK, "lazy_adam": recipe.RULES["lazy_adam"]}.items():
        tables, optimizer = recipe.make_v2(sok.size(), f"{rule}_"), make()
        recipe.train(tables, optimizer, range(4))
        sok.dump(folder / "v2" / rule, list(tables.values()), optimizer)
        note(f"v2/{rule}", recipe.contents(tables))
        recipe.train(tables, optimizer, range(4, 5))
        note(f"v2/{rule}/later", recipe.contents(tables))
    tables = recipe.make_tables(sok.size(), "files_")
    recipe.train(tables, sok.optimizers.SGD(0.1), range(4))
    (folder / "npy").mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        sok.Saver().dump_to_file(table, str(folder / "v1"))
        sok.save_npy(table, folder / "npy" / f"{name}_keys.npy", folder / "npy" / f"{name}_rows.npy")
    note("files", recipe.contents(tables))


def settings(folder: Path) -> None:
    optimizers = {
        "SGD": sok.optimizers.SGD(0.1, clipnorm=2.0),
        "Adagrad": sok.optimizers.Adagrad(0.1, initial_accumulator_value=0.2),
        "Adam": sok.optimizers.Adam(0.1, beta_1=0.8, epsilon=1e-6, name="mine"),
        "LazyAdam": sok.optimizers.LazyAdam(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)),
    }
    configs["optimizers"] = {name: it.get_config() for name, it in optimizers.items()}
    model = recipe.make_model()
    configs["layers"] = {name: model.get_layer(name).get_config() for name in ("pooled", "plain")}


CASES: list[Callable[[Path], None]] = [checkpoints, chain, manager, models, files_of_others, settings]


def main(target: str) -> None:
    sok.Init(seed=1)
    place = Path(target) / ("of_1_worker" if sok.size() == 1 else f"of_{sok.size()}_workers")
    if sok.rank() == 0:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    sok.communication.allreduce(tf.constant(0.0)) if sok.size() > 1 else None
    for case in CASES:
        case(place / case.__name__)
    if sok.rank() == 0:
        np.savez_compressed(place / "expected.npz", **expected)
        (place / "expected.json").write_text(json.dumps(configs, indent=1) + "\n")
        shutil.make_archive(str(place), "xztar", place)
        shutil.rmtree(place)
        if sok.size() == 1:
            (Path(target) / "public_names.txt").write_text("\n".join(names.listed()) + "\n")


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
