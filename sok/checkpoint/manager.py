"""`CheckpointManager`: dense variables as TensorFlow saves them, and tables beside them, for any number of workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from sok.base.types import PathLike
from sok.checkpoint import background, tf_checkpoints, versions
from sok.checkpoint.lease import Lease, of_series
from sok.checkpoint.manifest import make_folder
from sok.job import context
from sok.job.agreement import check_equal, together


class CheckpointManager:
    """Saves and restores a `tf.train.Checkpoint` with its tables, on any number of workers.

    It writes the files of `tf.train.CheckpointManager`: worker 0 writes the dense variables, `ckpt-5.index` and
    `ckpt-5.data-...`, and every worker its rows into `ckpt-5.sok`. The number of workers may change from save to
    restore; a plain `tf.train.Checkpoint.restore` of one worker reads them, too. A checkpoint is visible when all of it
    is on the disk.

    Args:
        checkpoint: a `tf.train.Checkpoint` that holds the tables, or what has them: models, layers. Its dense variables
            are those of worker 0.
        directory: on storage that all workers see; the same on all of them.
        max_to_keep: how many checkpoints stay; None: all. Of the others the tables are removed, too.
        keep_checkpoint_every_n_hours, checkpoint_name, init_fn: as of `tf.train.CheckpointManager`.
        mode: "files": a save writes all rows. "versions": of tables over files (`storage=sok.Storage(...)`) the rows
            stay in these, and a save is a mark: training goes on at once, and what memory alone holds is written beside
            it. The checkpoint is listed when it is complete; `wait` waits for that. docs/storage.md, "Versions".

    Collective: make it, save and restore on all workers between steps. An error of one worker is raised on all.

    Example:
        >>> import sok, tempfile
        >>> import tensorflow as tf
        >>> table = sok.EmbeddingVariable(dim=2, capacity=10, name="managed")
        >>> table.assign([3], [[1.0, 2.0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager = sok.CheckpointManager(tf.train.Checkpoint(table=table), folder, max_to_keep=2)
        ...     path = manager.save()
        ...     _ = table.erase([3])
        ...     manager.restore_or_initialize() == path
        True
        >>> table.sparse_read([3]).numpy().tolist()
        [[1.0, 2.0]]
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        directory: PathLike,
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        init_fn: Callable[[], Any] | None = None,
        mode: str = "files",
    ) -> None:
        self._checkpoint = checkpoint
        self._directory = os.path.abspath(os.fspath(directory))
        self._init_fn = init_fn
        self._prefix = os.path.join(self._directory, checkpoint_name)
        self._under_way: background.AsyncSave | None = None
        self._mode = mode

        def make() -> Any:
            versions.check(mode, max_to_keep, keep_checkpoint_every_n_hours)
            if mode == "versions":
                versions.prepare(_tables_in(checkpoint))
            self._max_to_keep = max_to_keep
            self._manager = tf.train.CheckpointManager(
                checkpoint, self._directory, max_to_keep, keep_checkpoint_every_n_hours, checkpoint_name
            )
            return [self._directory, checkpoint_name, mode]

        said = together(context.get_transport(), "sok/manager/make", make)
        check_equal(said, "sok.CheckpointManager: [directory, checkpoint_name, mode]")

    @property
    def directory(self) -> str:
        """The folder, as an absolute path."""
        return self._directory

    @property
    def checkpoint(self) -> tf.train.Checkpoint:
        """What is saved."""
        return self._checkpoint

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint, or None, as the folder says. Not collective."""
        return tf.train.latest_checkpoint(self._directory)

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints that are kept, oldest first, as the folder says. Not collective."""
        state = tf.train.get_checkpoint_state(self._directory)
        return list(state.all_model_checkpoint_paths) if state else []

    def save(self, checkpoint_number: int | None = None) -> str:
        """Writes a checkpoint. Collective.

        Args:
            checkpoint_number: in its name, and the same on all workers; None: one more than the last.

        Returns:
            Its path, which `restore` takes; with versions, once it is complete.

        Raises:
            as `sok.save`, and what TensorFlow says of the dense variables.
        """
        transport = context.get_transport()
        counter = self._checkpoint.save_counter
        tables = _tables_in(self._checkpoint)
        lease = Lease(of_series(self._prefix))
        background.finish(context.get_job())  # which lists what it has saved

        def plan() -> Any:
            if transport.rank == 0 and tables:
                make_folder(self._directory)
                lease.take()
            given = None if checkpoint_number is None else int(checkpoint_number)
            number = int(counter) + 1 if given is None else given
            return {"number": number, "arguments": [given, [table.table_name for table in tables]]}

        said = together(transport, "sok/manager/plan", plan)
        check_equal([answer["arguments"] for answer in said], "sok.CheckpointManager.save: [checkpoint_number, tables]")
        number = said[0]["number"]  # worker 0's: the others' counters may not have been restored
        if self._mode == "versions" and tables:
            return self._begin_version(f"{self._prefix}-{number}", number, tables, lease)
        if tables:
            tf_checkpoints.save_tables(f"{self._prefix}-{number}", tables)

        def dense() -> Any:
            if transport.rank != 0:
                return None
            if tables:
                tf_checkpoints.sweep(f"{self._prefix}-{number}", lease)
            before = set(self._manager.checkpoints)
            with tf_checkpoints.meeting():
                path = self._manager.save(number)
            tf_checkpoints.remove_without_checkpoint(before - set(self._manager.checkpoints))
            return [path, int(counter)]

        path, count = together(transport, "sok/manager/dense", dense)[0]
        counter.assign(count)
        return path

    def _begin_version(self, path: str, number: int, tables: list[Any], lease: Lease) -> str:
        transport, counter = context.get_transport(), self._checkpoint.save_counter

        def publish() -> None:
            tf_checkpoints.sweep(path, lease)
            versions.publish(self._directory, path, self._max_to_keep)

        # First, as they have to be there when rank 0 lists them; rows of the same step follow.
        def dense() -> Any:
            counter.assign(number)
            if transport.rank == 0:
                make_folder(tf_checkpoints.folder_of(path))
                with tf_checkpoints.meeting():
                    self._checkpoint.write(path)

        together(transport, "sok/manager/dense", dense)
        how = {"asynchronous": context.servers() is None, "versions": True, "_on_commit": publish}
        self._under_way = tf_checkpoints.save_tables(path, tables, **how)
        return path

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the last save is complete, which with `mode="versions"` goes on beside training. Not collective.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            as `sok.checkpoint.AsyncSave.result`: what went wrong, on all workers. The checkpoints before it are whole.
        """
        if self._under_way is not None:
            self._under_way.result(timeout)

    def restore(self, path: str) -> Any:
        """Gives dense variables and tables what the checkpoint `path` holds. Collective.

        Args:
            path: as `save` returned it, or `latest_checkpoint`; the same on all workers.

        Returns:
            What `tf.train.Checkpoint.restore` does: `assert_consumed()` and so on. With several workers make the tables
            before: one worker cannot restore a table that is made later, and warns.

        Raises:
            as `sok.restore`, and what TensorFlow says of the dense variables, which may have changed by then.
        """
        transport = context.get_transport()
        background.finish(context.get_job(), raising=False)
        status: Any = None
        met: dict[str, Any] = {}

        def dense() -> Any:
            nonlocal status, met
            with tf_checkpoints.meeting() as met:
                status = self._checkpoint.restore(path)
            return [os.path.abspath(path), sorted(met), os.path.isdir(tf_checkpoints.folder_of(path))]

        said = together(transport, "sok/manager/restore", dense)
        check_equal(said, "sok.CheckpointManager.restore: [path, tables, whether they were saved]")
        if met:
            tf_checkpoints.restore_tables(path, met)
        return status

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint, if there is one; else calls `init_fn`, if it was given. Collective.

        Returns:
            The path of the checkpoint, or None.
        """
        background.finish(context.get_job(), raising=False)  # what is being saved may be the newest
        path = together(context.get_transport(), "sok/manager/latest", lambda: self.latest_checkpoint)[0]
        if path is not None:
            self.restore(path)
        elif self._init_fn is not None:
            self._init_fn()
        return path


def _tables_in(checkpoint: tf.train.Checkpoint) -> list[Any]:
    from sok.table.table import is_embedding_variable

    descendants = tf.train.TrackableView(checkpoint).descendants()
    return sorted(filter(is_embedding_variable, descendants), key=lambda table: table.table_name)
