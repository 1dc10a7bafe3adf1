"""Session hooks for `tf.compat.v1.train.MonitoredTrainingSession`."""

from __future__ import annotations

import os
import warnings
from typing import Any

import tensorflow as tf

from sok.base.types import PathLike, Session
from sok.checkpoint import background, prepare, save, tf_checkpoints, versions
from sok.checkpoint.arguments import Optimizers, Tables, tables_of
from sok.checkpoint.lease import Lease, of_series
from sok.checkpoint.manifest import make_folder
from sok.distributed.broadcast import broadcast_variables
from sok.job import context
from sok.job.agreement import together
from sok.optimizers import claims
from sok.table import reading
from sok.table.counted import with_counted
from sok.table.table import is_embedding_variable


class BroadcastVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives all workers the global variables of worker `root_rank` once their session is made (or restored).

    Horovod's `BroadcastGlobalVariablesHook` does not exist with this TensorFlow. Give `checkpoint_dir` to worker
    `root_rank` only: the others get what it restored. Embedding tables keep their rows.

    Args:
        root_rank: the worker whose values all get, in [0, R).

    Collective. Use it on all workers with the same graph.

    Example:
        >>> import sok, tensorflow as tf
        >>> with tf.Graph().as_default():
        ...     weight = tf.compat.v1.get_variable("weight", initializer=2.0)
        ...     hooks = [sok.hooks.BroadcastVariablesHook(root_rank=0)]
        ...     with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
        ...         print(session.run(weight))
        2.0
    """

    def __init__(self, root_rank: int = 0) -> None:
        self.root_rank = root_rank
        self._broadcast: Any = None

    def begin(self) -> None:
        reading.tell_untrained(_tables_of_graph())
        # Here, since the graph is finalized afterwards.
        self._broadcast = broadcast_variables(tf.compat.v1.global_variables(), self.root_rank)

    def after_create_session(self, session: Session, coord: tf.train.Coordinator) -> None:
        session.run(self._broadcast)


class CheckpointSaverHook(tf.compat.v1.train.SessionRunHook):
    """Saves and restores global variables and tables of a `MonitoredTrainingSession`, on any number of workers.

    Worker 0 writes the global variables with a `tf.compat.v1.train.Saver` (`model.ckpt-100.index` and so on), and every
    worker its rows into `model.ckpt-100.sok`: every `save_steps` steps and at the end. When a session is made, all
    workers restore the newest checkpoint of the folder, if there is one. It takes the place of the saver that
    `MonitoredTrainingSession` makes for `checkpoint_dir`, which only the chief runs and which knows no tables: leave
    that argument out.

    Args:
        checkpoint_dir: on storage that all workers see; the same on all of them.
        save_steps: how many global steps lie between two checkpoints.
        tables: the tables; None: all trainable ones of the graph.
        optimizers: of the tables, as `sok.save` takes them; None: all that train them.
        saver: a `tf.compat.v1.train.Saver` for the rest; None: one for all global variables.
        checkpoint_basename: what the files are called before '-100.index'.
        mode: as of `sok.CheckpointManager`. With "versions" a checkpoint is listed when it is complete, and training
            goes on meanwhile; `saver` says by its `max_to_keep` how many stay.

    Raises:
        ValueError: `save_steps` is not a whole number of at least 1; the graph has no table, or no global step; `mode`
            is none.

    Collective: all workers, with the same graph, as many steps each. An error of one worker is raised on all.

    Example:
        >>> import sok, tempfile, tensorflow as tf
        >>> with tf.Graph().as_default(), tempfile.TemporaryDirectory() as folder:
        ...     step = tf.compat.v1.train.get_or_create_global_step()
        ...     table = sok.EmbeddingVariable(dim=1, capacity=10, name="hooked")
        ...     store, next_step = table.assign([3], [[5.0]]), tf.compat.v1.assign_add(step, 1)
        ...     row = table.sparse_read([3])
        ...     for runs in ([store, next_step], row):
        ...         hook = sok.hooks.CheckpointSaverHook(folder, save_steps=100)
        ...         with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
        ...             found = session.run(runs)
        >>> found.tolist()
        [[5.0]]
    """

    def __init__(
        self,
        checkpoint_dir: PathLike,
        save_steps: int,
        tables: Tables | None = None,
        optimizers: Optimizers | None = None,
        saver: tf.compat.v1.train.Saver | None = None,
        checkpoint_basename: str = "model.ckpt",
        mode: str = "files",
    ) -> None:
        versions.check(mode, None, None)
        if isinstance(save_steps, bool) or not isinstance(save_steps, int) or save_steps < 1:
            raise ValueError(f"`save_steps` must be a whole number of at least 1. Received: {save_steps!r}.")
        self._folder = os.path.abspath(os.fspath(checkpoint_dir))
        self._prefix = os.path.join(self._folder, checkpoint_basename)
        self._save_steps = save_steps
        self._given = (tables, optimizers, saver)
        self._mode = mode
        self._last_step = 0  # that was saved or restored
        self._seen, self._largest_stride = 0, 1  # the global step as it was read last, and by how much it has grown

    def begin(self) -> None:
        tables, optimizers, saver = self._given
        if tables is None:
            tables = _tables_of_graph()
        self._tables = list(with_counted(tables_of(tables)).values())
        self._optimizers = claims.optimizers_of(self._tables) if optimizers is None else optimizers
        self._step = tf.compat.v1.train.get_global_step()
        if self._step is None:
            raise ValueError("CheckpointSaverHook needs tf.compat.v1.train.get_or_create_global_step() in the graph.")
        reading.tell_untrained(self._tables)
        # Here, since the graph is finalized afterwards.
        prepare(self._tables)
        self._saver = saver or tf.compat.v1.train.Saver()

    def after_create_session(self, session: Session, coord: tf.train.Coordinator) -> None:
        transport = context.get_transport()
        path = together(transport, "sok/hook/latest", lambda: tf.train.latest_checkpoint(self._folder))[0]
        if path is not None:
            together(transport, "sok/hook/restore", lambda: self._restore_dense(session, path))
            tf_checkpoints.restore_tables(path, {table.table_name: table for table in self._tables}, session)
        self._last_step = self._seen = int(session.run(self._step))
        self._largest_stride = 1

    def _restore_dense(self, session: Any, path: str) -> None:
        self._saver.restore(session, path)
        # What an earlier process has written counts among what the saver keeps.
        state = tf.train.get_checkpoint_state(self._folder)
        self._saver.recover_last_checkpoints(list(state.all_model_checkpoint_paths) if state else [path])

    def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> Any:
        return tf.compat.v1.train.SessionRunArgs(self._step)

    def after_run(
        self, run_context: tf.compat.v1.train.SessionRunContext, run_values: tf.compat.v1.train.SessionRunValues
    ) -> None:
        # Read beside the step, before or after it counts, and on each worker otherwise. So it only says when the exact
        # number is worth a run of its own: all workers ask well before a save is due, and decide by what they get.
        seen = int(run_values.results)
        self._largest_stride = max(self._largest_stride, seen - self._seen)
        self._seen = seen
        due = self._last_step + self._save_steps
        if seen + max(2 * self._largest_stride, self._save_steps // 10) < due:
            return
        step = int(run_context.session.run(self._step))
        if step >= due:
            self._save(run_context.session, step)

    def end(self, session: Session) -> None:
        step = int(session.run(self._step))
        if step != self._last_step:
            self._save(session, step)
        if self._mode == "versions":
            background.finish(context.get_job())  # what is being saved needs the session

    def _save(self, session: Any, step: int) -> None:
        prefix = f"{self._prefix}-{step}"
        transport = context.get_transport()
        lease = Lease(of_series(self._prefix))
        background.finish(context.get_job())  # which lists what it has saved

        def begin() -> None:
            make_folder(self._folder)
            if transport.rank == 0:
                lease.take()

        together(transport, "sok/hook/folder", begin)
        if self._mode == "versions":
            self._begin_version(session, prefix, lease)
            self._last_step = step
            return
        save(tf_checkpoints.folder_of(prefix), self._tables, self._optimizers, session=session)

        def dense() -> None:
            if transport.rank != 0:
                return
            tf_checkpoints.sweep(prefix, lease)
            tf_checkpoints.note_objects(prefix, {table.table_name: table for table in self._tables})
            before = set(self._saver.last_checkpoints)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The rows of embedding table")  # they are: above
                self._saver.save(session, self._prefix, global_step=step)
            tf_checkpoints.remove_without_checkpoint(before - set(self._saver.last_checkpoints))

        together(transport, "sok/hook/dense", dense)
        self._last_step = step

    def _begin_version(self, session: Any, prefix: str, lease: Lease) -> None:
        """As `sok.CheckpointManager` does: dense variables first, then the mark, and the list when all is written."""
        transport = context.get_transport()

        def dense() -> None:
            if transport.rank == 0:
                make_folder(tf_checkpoints.folder_of(prefix))
                tf_checkpoints.note_objects(prefix, {table.table_name: table for table in self._tables})
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "The rows of embedding table")  # they are: below
                    self._saver.save(session, prefix, write_state=False)

        def publish() -> None:
            tf_checkpoints.sweep(prefix, lease)
            versions.publish(self._folder, prefix, self._saver.saver_def.max_to_keep or None)

        together(transport, "sok/hook/dense", dense)
        how: dict[str, Any] = {"asynchronous": context.servers() is None, "versions": True, "_on_commit": publish}
        save(tf_checkpoints.folder_of(prefix), self._tables, self._optimizers, session=session, **how)


def _tables_of_graph() -> list[Any]:
    return list(filter(is_embedding_variable, tf.compat.v1.trainable_variables()))
