"""Reads with today's code what `write.py` has written, on any number of workers; compares it with what was noted.

Files are unpacked from tests/data/written_by_3b85c57.
"""

from __future__ import annotations

import dataclasses
import json
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import sok
from sok.base import _ops
from sok.checkpoint import read_manifest, verify
from sok.table import state as table_state
from tests.old_files import recipe

DATA = Path(__file__).parents[1] / "data" / "written_by_3b85c57"
WRITERS = {1: "of_1_worker", 2: "of_2_workers"}


@dataclasses.dataclass(frozen=True)
class Files:
    """What a job of `size` workers has written, unpacked in `folder`, which all workers see."""

    folder: Path
    size: int

    @property
    def prefix(self) -> str:
        """Of the names of tables that read these files."""
        return f"read_of_{self.size}_"

    def expect(self, case: str, found: dict[str, np.ndarray], **tolerance: float) -> None:
        with np.load(self.folder / "expected.npz") as expected:
            for name, values in found.items():
                message = f"{case}/{name}, of {self.size} workers"
                then = expected[f"{case}/{name}"]
                assert then.dtype == values.dtype, message
                np.testing.assert_allclose(values, then, err_msg=message, **{"rtol": 1e-6, "atol": 1e-7, **tolerance})

    def used(self, case: str, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Those rows that were in use: some files have all rows of a table whose keys are row numbers."""
        with np.load(self.folder / "expected.npz") as expected:
            keep = {name: np.isin(v, expected[f"{case}/{name}"]) for name, v in found.items() if name.endswith("/keys")}
        return {name: values[keep[name.rpartition("/")[0] + "/keys"]] for name, values in found.items()}


def unpack(size: int, folder: Path) -> Files:
    """Collective: worker 0 unpacks."""
    if sok.rank() == 0:
        with tarfile.open(DATA / f"{WRITERS[size]}.tar.xz") as archive:
            # Python 3.11.2, which is Debian 12's, has no filters; the archive is our own.
            archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    if sok.size() > 1:
        sok.communication.allreduce(tf.constant(0.0))
    return Files(folder, size)


def read_checkpoints(files: Files) -> None:
    for rule, make in recipe.RULES.items():
        folder = files.folder / "checkpoints" / rule
        tables, optimizer = recipe.make_tables(sok.size(), files.prefix + rule), make()
        sok.restore(folder, {f"{rule}_{name}": table for name, table in tables.items()}, optimizer)
        files.expect(rule, recipe.contents(tables, optimizer))
        if not rule.startswith("distributed") or sok.size() == files.size:  # those average over workers
            recipe.train(tables, optimizer, range(4, 6))
            files.expect(f"{rule}/later", recipe.contents(tables), rtol=1e-5, atol=1e-6)
        assert verify(folder) == []


def read_a_chain(files: Files) -> None:
    folder = files.folder / "chain"
    assert len(read_manifest(folder).links) == 3

    def check(prefix: str) -> None:
        tables, optimizer = recipe.make_tables(sok.size(), prefix), sok.optimizers.Adagrad(0.1)
        sok.restore(folder, {f"chain_{name}": table for name, table in tables.items()}, optimizer)
        files.expect("chain", recipe.contents(tables, optimizer))

    check(f"{files.prefix}chain_")
    if sok.size() == 1:
        sok.compact(folder)
        check(f"{files.prefix}compacted_")


def read_folders_of_a_manager(files: Files) -> None:
    def check(prefix: str, restore: Callable[[tf.train.Checkpoint], Any]) -> None:
        tables, optimizer = recipe.make_tables(sok.size(), prefix), sok.optimizers.Adam(0.5)
        weight = tf.Variable([0.0, 0.0])
        restore(tf.train.Checkpoint(optimizer=optimizer, weight=weight, **tables))
        (saved,) = table_state.slot_sets(tables["hashed"])  # the optimizer takes them over with its first step
        files.expect("manager", recipe.contents(tables, saved.name))
        assert weight.numpy().tolist() == [4.0, 5.0] and int(optimizer.iterations) == 3

    folder = files.folder / "manager"
    check(
        f"{files.prefix}managed_", lambda it: sok.CheckpointManager(it, folder, max_to_keep=2).restore_or_initialize()
    )
    if sok.size() == 1:
        check(f"{files.prefix}tensorflow_", lambda it: it.restore(str(folder / "ckpt-3")).assert_consumed())


def read_models(files: Files) -> None:
    with warnings.catch_warnings():
        # Initial values depend on names of tables, which are other ones in a process that reads twice.
        warnings.filterwarnings("ignore", "Table .* has another seed or initializer")
        _read_models(files)


def _read_models(files: Files) -> None:
    for which in (keras, tf_keras):
        name = which.__name__
        folder = files.folder / "models"

        def check(model: Any, predicts: bool = True) -> None:
            tables = recipe.tables_of(model)
            files.expect(f"models/{name}", recipe.contents(tables))  # noqa: B023
            if predicts:
                found = {"predictions": model(recipe.IDS, training=False).numpy()}
                files.expect(f"models/{name}", found, rtol=1e-5)  # noqa: B023

        if which is keras:
            model = recipe.make_model(which)
            then = {t.name.split("/")[0].removesuffix("_1"): t.name for t in read_manifest(folder / "model").tables}
            sok.restore(folder / "model", {then[n]: table for n, table in recipe.tables_of(model).items()})
            check(model, predicts=False)
        model = recipe.make_model(which)
        sok.load_weights(model, str(folder / f"{name}_together.weights.h5"))
        check(model)
        if sok.size() == files.size == 1:
            model = recipe.make_model(which)
            model.load_weights(str(folder / f"{name}_alone.weights.h5"))
            check(model)
            custom = vars(sok.layers.for_keras(which))
            check(which.models.load_model(str(folder / f"{name}.keras"), custom_objects=custom, compile=False))
            if which is tf_keras:
                model = recipe.make_model(which)
                model.load_weights(str(folder / "tf_format" / "weights")).expect_partial()
                check(model)


def read_exports(files: Files) -> None:
    _ops.serving_lib()
    for folder, tolerance in (
        *((f"{which}_{kind}", 1e-5) for which in ("keras", "tf_keras") for kind in ("stock", "native")),
        *(("keras_stock_int8", 2e-2), ("keras_native_float16", 2e-3)),
    ):
        served = tf.saved_model.load(str(files.folder / "models" / folder)).signatures["serving_default"]
        (found,) = served(ids=tf.constant(recipe.IDS)).values()
        which = folder.partition("_stock")[0].partition("_native")[0]
        files.expect(f"models/{which}", {"predictions": found.numpy()}, rtol=tolerance)


def read_files_of_others(files: Files) -> None:
    folder = files.folder / "files_of_others"
    for rule, make in {**recipe.STOCK, "lazy_adam": recipe.RULES["lazy_adam"]}.items():
        tables, optimizer = recipe.make_v2(sok.size(), f"{files.prefix}{rule}_"), make()
        names = {f"{rule}_{name}_0": table.name.replace(":", "_") for name, table in tables.items()}
        again = files.folder / "again" / rule
        sok.load(_renamed(folder / "v2" / rule, names), list(tables.values()), optimizer)
        files.expect(f"v2/{rule}", files.used(f"v2/{rule}", recipe.contents(tables)))
        if sok.size() == files.size:
            sok.dump(again, list(tables.values()), optimizer)
            if sok.rank() == 0:
                for path in sorted((folder / "v2" / rule).iterdir()):
                    then, _, what = path.name.partition("-")
                    if then in names:
                        assert (again / f"{names[then]}-{what}").read_bytes() == path.read_bytes(), path.name
        if rule != "adamax":  # its step count is in no file
            getattr(optimizer, "iterations", tf.Variable(0)).assign(4)
            recipe.train(tables, optimizer, range(4, 5))
            found = files.used(f"v2/{rule}/later", recipe.contents(tables))
            files.expect(f"v2/{rule}/later", found, rtol=1e-5, atol=1e-6)
    for name, table in recipe.make_tables(sok.size(), f"{files.prefix}v1_").items():
        v1 = _renamed(folder / "v1", {f"files_{name}": table.table_name})
        sok.Saver().restore_from_file(table, str(v1))
        files.expect("files", files.used("files", recipe.contents({name: table})))
    for name, table in recipe.make_tables(sok.size(), f"{files.prefix}npy_").items():
        sok.load_npy(table, folder / "npy" / f"{name}_keys.npy", folder / "npy" / f"{name}_rows.npy")
        files.expect("files", files.used("files", recipe.contents({name: table})))


def _renamed(folder: Path, names: dict[str, str]) -> Path:
    """A folder of links to the files of `folder`, with other names of tables before the first '-' or '_keys'."""
    links = folder.parent / f"{folder.name}_as_{'_'.join(sorted(names.values()))[:60]}"
    if sok.rank() == 0:
        links.mkdir()
        for path in folder.iterdir():
            for then, now in names.items():
                if path.name.startswith((f"{then}-", f"{then}_keys", f"{then}_values")):
                    (links / f"{now}{path.name.removeprefix(then)}").symlink_to(path)
    if sok.size() > 1:
        sok.communication.allreduce(tf.constant(0.0))
    return links


def read_settings(files: Files) -> None:
    said = json.loads((files.folder / "expected.json").read_text())
    for name, config in said["optimizers"].items():
        again = getattr(sok.optimizers, name).from_config(config).get_config()
        assert {key: again[key] for key in config} == config
    for name, config in said["layers"].items():
        layer = {"pooled": sok.DistributedEmbedding, "plain": sok.All2AllDenseEmbedding}[name]
        again = layer.from_config(config).get_config()
        assert {key: again[key] for key in config if key in again} == {k: v for k, v in config.items() if k in again}
        assert layer.from_config(again).get_config() == again


READERS: list[Callable[[Files], None]] = [
    read_checkpoints,
    read_a_chain,
    read_folders_of_a_manager,
    read_models,
    read_files_of_others,
    read_settings,
]
ALONE: list[Callable[[Files], None]] = [read_exports]
