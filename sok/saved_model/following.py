"""Exports that follow a job: from the newest one, and what the job has saved since, the next."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.saved_model import fingerprinting_utils

from sok.base import log
from sok.base.errors import CheckpointError
from sok.base.files import link_or_copy
from sok.base.types import PathLike
from sok.checkpoint.dense import Reader
from sok.checkpoint.feed import Delta, links_after, pieces_of
from sok.checkpoint.lease import seconds_since
from sok.checkpoint.manifest import Link, Manifest, SavedTable, read_manifest, sync_folder
from sok.checkpoint.restoring import TRIES, is_superseded
from sok.saved_model.erasing import description
from sok.saved_model.feed_changes import gathered
from sok.saved_model.followed_redis import followed_redis
from sok.saved_model.serving_file import verify_file
from sok.saved_model.table_file import TableFile
from sok.table.options import whole_number

_NUMBER, _PARTIAL = re.compile("[0-9]{1,18}"), re.compile(r"\.([0-9]{1,18})\.partial-[0-9]+-[0-9a-f]+")


def follow_export(path: PathLike, exports: PathLike, *, max_to_keep: int | None = 3) -> ExportFollower:
    """Returns an `ExportFollower`, whose `poll` makes the next version of an exported model, with what another job has
    saved since.

    Args:
        path: the folder into which `sok.Publisher` saves, or `sok.save(..., incremental=True, dense=True)`.
        exports: a folder whose numbered folders are versions of a model that `sok.export_saved_model` has written, with
            `native=True` or `rows="redis://..."`: '/models/ctr' with '/models/ctr/1'. Its newest version is where it
            begins; it needs neither the model's program nor its tables. `sok serve` and TensorFlow Serving take up each
            new version by themselves.
        max_to_keep: how many versions of its own it leaves there. None: all.

    Raises:
        TypeError, ValueError: an argument is out of range.

    Not collective: one process on a host that sees both folders.

    Example:
        >>> import tempfile
        >>> import sok, tensorflow as tf
        >>> class Model(tf.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.table = sok.EmbeddingVariable(1, 100, name="followed_rows", initializer="zeros")
        ...         self.bias = tf.Variable([0.5])
        ...     def __call__(self, ids):
        ...         return sok.lookup_sparse(self.table, ids, combiners="sum") + self.bias
        >>> model, feed, exports = Model(), tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> publisher = sok.Publisher(feed, model)
        >>> _ = sok.export_saved_model(
        ...     model, f"{exports}/1", signatures=tf.TensorSpec([None, None], tf.int64, "ids"), native=True
        ... )
        >>> follower = sok.follow_export(feed, exports)
        >>> model.table.assign([7], [[3.0]])
        >>> _ = model.bias.assign([1.0])
        >>> publisher.publish()
        >>> newest = follower.poll()
        >>> served = tf.saved_model.load(newest).signatures["serving_default"]
        >>> newest[-2:], served(ids=tf.constant([[7], [8]], tf.int64))["output_0"].numpy().tolist()
        ('/2', [[4.0], [1.0]])
        >>> follower.poll() is None and follower.lag < 600
        True
    """
    return ExportFollower(path, exports, max_to_keep)


class ExportFollower:
    """Versions of an exported model that follow a folder: see `sok.follow_export`."""

    def __init__(self, path: PathLike, exports: PathLike, max_to_keep: int | None) -> None:
        self._path = os.path.abspath(os.fspath(path))
        self._exports = os.path.abspath(os.fspath(exports))
        self._max_to_keep = None if max_to_keep is None else whole_number("max_to_keep", max_to_keep)
        self._feed: dict[str, Any] | None = None

    @property
    def generation(self) -> str | None:
        """The save that the newest version holds, as the last `poll` has seen it; None: a version of no save."""
        return None if self._feed is None else self._feed["generation"]

    @property
    def lag(self) -> float | None:
        """Seconds since the save was made that the newest version holds, by the clocks of its host and this one."""
        return None if self._feed is None else max(0.0, seconds_since(self._feed["created"]))

    def poll(self) -> str | None:
        """Makes the next version if the job has saved something since; gives its folder, or None.

        The version is whole when it appears under its number, by one renaming: rows, deletions and dense weights of one
        save, whatever is saved meanwhile. From the version before and the saves since; where these are not in the
        chain any more (a full save has taken its place), or the version is of no save, from all rows of the chain,
        which takes memory for them.

        Raises:
            FileNotFoundError: there is no version to begin with.
            ValueError: it was exported otherwise, or by an older sok; tables or dense weights are not those of the
                saves.
            CheckpointError, DamagedFileError, OSError, tf.errors.OpError: a file is damaged, or cannot be written.
                Versions that are there stay.
        """
        for left in reversed(range(TRIES)):
            try:
                manifest = read_manifest(self._path)
            except FileNotFoundError:
                return None
            try:
                return self._poll(manifest)
            except (CheckpointError, OSError, tf.errors.OpError):
                if left == 0 or not is_superseded(self._path, manifest.generation):
                    raise
        return None

    def _poll(self, manifest: Manifest) -> str | None:
        number, newest = self._newest()
        told = description(newest)
        if told is None or not told.get("native") or "dense" not in told:
            raise ValueError(
                f"{newest}: no export that can be followed. Export a Keras model or a tf.Module by "
                "sok.export_saved_model with native=True or rows='redis://...', by this sok."
            )
        self._feed = told.get("feed")
        links = None if self._feed is None else links_after(manifest, self._feed["generation"])
        if links == []:
            return None
        path = f"{self._exports}/{number + 1}"
        partial = f"{self._exports}/.{number + 1}.partial-{os.getpid()}-{secrets.token_hex(4)}"
        feed = {"generation": manifest.generation, "created": manifest.created}
        files = followed_redis(newest, told) or FollowedFiles(newest)
        with contextlib.closing(files):
            try:
                _copy(newest, partial)
                _write_dense(newest, partial, told["dense"], self._path, manifest)
                files.begin(links is None)
                tables = [self._write_table(files, partial, table, manifest, links) for table in told["tables"]]
                files.finish()
                _tell(partial, {**told, **files.told(), "tables": tables, "feed": feed})
                fingerprinting_utils.write_fingerprint(partial)
                _sync(partial)
                os.rename(partial, path)
                try:
                    sync_folder(self._exports)
                finally:
                    files.placed()
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        self._feed = feed
        self._sweep(number + 1)
        log.logger.info("Version %s holds the save %s of %s.", path, manifest.generation, self._path)
        return path

    def _newest(self) -> tuple[int, str]:
        numbers = {int(name): name for name in os.listdir(self._exports) if _NUMBER.fullmatch(name)}
        if not numbers:
            raise FileNotFoundError(
                f"{self._exports}: no version to begin with. Export the model into {self._exports}/1 first: "
                "sok.export_saved_model(model, ..., native=True)."
            )
        return max(numbers), f"{self._exports}/{numbers[max(numbers)]}"

    def _write_table(
        self, files: Any, partial: str, about: Mapping[str, Any], manifest: Manifest, links: list[Link] | None
    ) -> dict[str, Any]:
        name = about["name"]
        if name not in manifest.names:
            raise ValueError(
                f"{self._path} holds no table '{name}', which the export has. It has {', '.join(manifest.names)}."
            )
        table = manifest.table(name)
        old = files.table(name, bool(about["num_rows"]), table)
        here = (old.described.dim, old.described.key_dtype.name, old.described.hashed)
        if here != (table.dim, table.key_dtype, table.hashed):
            raise ValueError(
                f"Table '{name}' has other rows or keys in {self._path} than in the export. Export it anew."
            )
        is_lossy = old.described.row_dtype != tf.float32
        new = list(links or ())
        are_cut = any(link.table(name).placement.cuts_rows for link in new)
        is_full = links is None or files.is_full or (are_cut and (is_lossy or files.is_remote))
        is_full = is_full or old.has_outgrown_its_place(table.rows)
        chosen = list(manifest.links) if is_full else new
        changes = gathered(self._pieces(chosen, name), table.dim, None if is_full else old.rows_of)
        if not table.hashed and len(changes.words) and changes.words[-1] >= old.num_rows:
            raise ValueError(
                f"Table '{name}' has key {changes.words[-1]} in {self._path}, and {old.num_rows} keys in the export. "
                "Export it anew."
            )
        path = f"{partial}/assets/{os.path.basename(old.path)}"
        rows, num_bytes = old.write(path, changes, is_full)
        return {**about, "num_rows": rows, "num_bytes": num_bytes}

    def _pieces(self, links: list[Link], name: str) -> Iterator[Delta]:
        for link in links:
            yield from pieces_of(self._path, link, link.table(name))

    def _sweep(self, newest: int) -> None:
        """Removes versions of its own that are too many, and what others that were killed had begun."""
        for name in os.listdir(self._exports):
            begun = _PARTIAL.fullmatch(name)
            if begun is not None and int(begun[1]) <= newest:
                shutil.rmtree(f"{self._exports}/{name}", ignore_errors=True)
            if self._max_to_keep is None or not _NUMBER.fullmatch(name) or int(name) > newest - self._max_to_keep:
                continue
            told = description(f"{self._exports}/{name}")
            if told is not None and "feed" in told:
                shutil.rmtree(f"{self._exports}/{name}", ignore_errors=True)


def saved_at(export: str) -> float | None:
    """When the save was made that a version follows, in seconds since 1970; None: it follows none."""
    told = description(export)
    return None if told is None or "feed" not in told else time.time() - seconds_since(told["feed"]["created"])


class FollowedFiles:
    """Tables of a native export, whose files are written anew."""

    is_remote = False  # whether rows lie elsewhere
    is_full = False  # whether the rows before are of no use

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._tables = TableFile.all_in(folder)

    def begin(self, is_full: bool) -> None:
        """Before tables are written. Files that the next ones go on from are verified.

        Raises:
            DamagedFileError, OSError: of one of them.
        """
        for table in [] if is_full else self._tables.values():
            verify_file(table.path)

    def table(self, name: str, has_keys: bool, saved: SavedTable) -> TableFile:
        """The table of that name; `has_keys`: or else its one row is that of keys without rows."""
        if name not in self._tables:
            raise ValueError(f"{self._folder}: the export has no file of table '{name}'.")
        return self._tables[name].of(has_keys, saved)

    def finish(self) -> None:
        """When all are written."""

    def placed(self) -> None:
        """When servers see the version."""

    def told(self) -> dict[str, Any]:
        """What the export tells of where its rows are."""
        return {}

    def close(self) -> None:
        """In any case."""


def _copy(old: str, new: str) -> None:
    """A SavedModel without variables and the files of tables. What does not change is linked, where links can be."""
    os.makedirs(f"{new}/variables")
    os.makedirs(f"{new}/assets")
    for folder, _, names in os.walk(old):
        inside = os.path.relpath(folder, old)
        for name in names:
            is_new = inside == "variables" or (inside == "assets" and name.endswith(".sok")) or name == "sok.json"
            if is_new or name == "fingerprint.pb":
                continue
            os.makedirs(os.path.join(new, inside), exist_ok=True)
            link_or_copy(os.path.join(folder, name), os.path.join(new, inside, name))


def _write_dense(old: str, new: str, places: Mapping[str, str], feed: str, manifest: Manifest) -> None:
    """The variables of the SavedModel, with the dense weights of the save."""
    before = tf.train.load_checkpoint(f"{old}/variables/variables")
    values: dict[str, Any] = {name: before.get_tensor(name) for name in before.get_variable_to_shape_map()}
    if places:
        if manifest.dense is None:
            raise ValueError(
                f"{feed}: the saves have no dense weights, and the export has. Save with dense=True, as sok.Publisher "
                "does."
            )
        reader = Reader(feed, manifest.dense)
        missing = sorted(set(places) - set(reader.variables))
        if missing:
            raise ValueError(
                f"{feed}: the saves have no dense weights {', '.join(map(repr, missing[:5]))}, and the export has. "
                "Both must be of one model."
            )
        for name, place in places.items():
            value = reader.read(name, before.get_variable_to_dtype_map()[place]).numpy()
            if np.shape(value) != np.shape(values[place]):
                raise ValueError(f"{feed}: dense weights '{name}' have another shape than in the export.")
            values[place] = value
    names = sorted(values)
    with tf.init_scope(), tf.device("/CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=f"{new}/variables/variables",
            tensor_names=names,
            shape_and_slices=[""] * len(names),
            tensors=[tf.constant(values[name]) for name in names],
        )


def _sync(folder: str) -> None:
    """Waits until the disk has all of it."""
    for inside, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(inside, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(inside)


def _tell(folder: str, told: Mapping[str, Any]) -> None:
    os.makedirs(f"{folder}/assets.extra", exist_ok=True)
    with open(f"{folder}/assets.extra/sok.json", "w", encoding="utf-8") as file:
        file.write(json.dumps(told, indent=2))
