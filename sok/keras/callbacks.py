"""Callbacks for `fit` on several workers, under Keras 3 and under tf_keras.

    model.fit(..., callbacks=[sok.callbacks.BroadcastVariablesCallback(), sok.callbacks.MetricSumCallback()])

They are no subclasses of either library's `Callback`: one process may use both, and both only call methods.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import shutil
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import tracing
from sok.base.keras_callback import Callback
from sok.base.types import Logs, PathLike
from sok.checkpoint import save_weights
from sok.checkpoint.arguments import tables_of
from sok.checkpoint.manager import CheckpointManager
from sok.distributed.broadcast import broadcast_variables
from sok.distributed.replicas import variables_of
from sok.job import context
from sok.job.agreement import together
from sok.keras.metrics import of_model, sum_over_workers
from sok.keras.publishing import Publish as Publish
from sok.table.exchanged import local_bytes
from sok.table.options import whole_number
from sok.table.state import local_details, local_stats
from sok.table.table import EmbeddingVariable


class BroadcastVariablesCallback(Callback):
    """Gives all workers the dense weights and the optimizer state of worker `root_rank` when training begins.

    The first `fit` with `sok.DistributedOptimizer` gives all workers the weights of worker 0 by itself. Take this one
    for another worker's values, in each `fit` anew, and for the optimizer's state.

    It broadcasts what exists when `fit` begins, and everything once more after the first batch if that has made more
    variables (optimizer slots; weights of a model that was not built). By then replicas that differed have sent their
    gradients: build the model first, or leave it to the first `fit`, where N workers must equal one from the first
    step. Each embedding table keeps its rows, which start alike anyhow.

    Args:
        root_rank: the worker whose values all get, in [0, R). No other has to load a checkpoint.

    Collective: on all workers or on none. Two collectives a `fit` at the most, none on one worker.

    Example:
        >>> BroadcastVariablesCallback(root_rank=0).root_rank
        0
    """

    broadcasts_variables = True

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._sent: set[int] = set()
        self._is_first_batch = False

    def on_train_begin(self, logs: Logs = None) -> None:
        self._is_first_batch = True
        self._sent = set()
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._is_first_batch:
            self._is_first_batch = False
            if any(id(variable) not in self._sent for variable in variables_of(self.model)):
                self._broadcast()

    def _broadcast(self) -> None:
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise RuntimeError(
                "sok.callbacks need eager execution. In a v1 graph run sok.broadcast_variables(...) in the session, "
                "or use sok.hooks.BroadcastVariablesHook."
            )
        variables = list(variables_of(self.model))
        broadcast_variables(variables, self.root_rank)
        self._sent = {id(variable) for variable in variables}


class MetricAverageCallback(Callback):
    """Averages the logs of each epoch over the workers, so that all print, record and decide upon the same numbers.

    Put it before callbacks that decide something by the logs (EarlyStopping, ReduceLROnPlateau, ModelCheckpoint):
    workers that stop at different epochs leave the others waiting. The average of a metric that is no mean over
    samples (AUC) is only an approximation of that metric over all samples: `MetricSumCallback` is exact.

    Args:
        num_samples: how many this worker trains on: its weight in the average. None: all weigh the same.
        num_validation_samples: the same for metrics named 'val_...'.

    Collective: one a epoch, none on one worker. All workers must have the same metrics.

    Example:
        >>> logs = {"loss": 0.5}
        >>> MetricAverageCallback().on_epoch_end(0, logs)
        >>> logs
        {'loss': 0.5}
    """

    def __init__(self, num_samples: int | None = None, num_validation_samples: int | None = None) -> None:
        super().__init__()
        self._weights = {
            False: _checked_weight("num_samples", num_samples),
            True: _checked_weight("num_validation_samples", num_validation_samples),
        }

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        transport, logs = context.get_transport(), {} if logs is None else logs
        names = sorted(name for name, value in logs.items() if isinstance(value, numbers.Number))
        if transport.size == 1 or not names:
            return
        weights = tf.constant([self._weights[name.startswith("val_")] for name in names], tf.float64)
        values = tf.constant([logs[name] for name in names], tf.float64)
        sums = transport.grouped_all_reduce([tf.stack([weights * values, weights])], "sok/metrics", average=False)[0]
        for name, (weighted, weight) in zip(names, sums.numpy().T.tolist(), strict=True):
            if weight > 0:
                logs[name] = weighted / weight


class MetricSumCallback(Callback):
    """Tells metrics over the samples of all workers, exactly: sums of what each has counted, not averages of values.

    Takes Keras' own metrics (`sok.metrics.sum_over_workers` says which) and the losses; one that is no sum keeps this
    worker's value, and a warning names it. Put it before callbacks that decide something by the logs (EarlyStopping,
    ReduceLROnPlateau, ModelCheckpoint). Between batches, progress bars show this worker's values.

    `evaluate(..., callbacks=[MetricSumCallback()])` returns such values, too, if Keras knows the number of batches when
    it begins (arrays, datasets of known cardinality, `steps=`); else it says in an error what to give.

    Collective: on all workers or on none, two collectives an epoch or evaluation, none on one worker.

    Example:
        >>> MetricSumCallback().on_epoch_end(0, {"loss": 0.5})
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_fit = False
        self._told: dict[str, float] | None = None  # of the training part of this epoch
        self._told_of_validation: dict[str, float] = {}
        self._warned: set[str] = set()

    def on_train_begin(self, logs: Logs = None) -> None:
        self._is_fit = True

    def on_train_end(self, logs: Logs = None) -> None:
        self._is_fit = False

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._told, self._told_of_validation = None, {}

    def on_test_begin(self, logs: Logs = None) -> None:
        # Keras resets the metrics next, to count those of validation.
        if self._is_fit:
            self._told = self._summed()
        elif context.size() > 1 and not self.params.get("steps"):
            raise ValueError(
                "evaluate with sok.callbacks.MetricSumCallback needs the number of batches, to sum before it returns. "
                "Give steps=..., or a dataset that knows it: dataset.apply(tf.data.experimental.assert_cardinality(n))."
            )

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        # Before Keras asks the metrics for what `evaluate` returns.
        if not self._is_fit and batch + 1 == self.params.get("steps"):
            self._summed()

    def on_test_end(self, logs: Logs = None) -> None:
        if self._is_fit:
            self._told_of_validation = self._summed()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        told = {
            **(self._summed() if self._told is None else self._told),
            **{f"val_{name}": value for name, value in self._told_of_validation.items()},
        }
        if logs is not None:
            logs.update({name: value for name, value in told.items() if name in logs})

    def _summed(self) -> dict[str, float]:
        """The values over all workers' samples, which the metrics hold from now on until they are reset."""
        if self.model is None or context.size() == 1:
            return {}
        metrics, others = of_model(self.model)
        if unknown := set(others) - self._warned:
            self._warned |= unknown
            warnings.warn(
                f"Metrics {sorted(unknown)} are told of this worker's samples alone: they are not known to be "
                "functions of sums over samples. If one is, say so: metric.sums_over_workers = True.",
                stacklevel=2,
            )
        sum_over_workers(metrics)
        results = self.model.get_metrics_result()
        return {name: float(value) for name, value in results.items() if np.ndim(value) == 0}


class ModelCheckpoint(Callback):
    """Saves the weights of a model with its tables after each epoch, on any number of workers: see `sok.save_weights`.

    Use it instead of Keras' own, which on several workers would write the dense weights only, once on each. The logs of
    worker 0 decide and name the file.

    Args:
        filepath: ends in '.weights.h5'; may name the epoch and logs, as in 'w-{epoch:02d}-{val_loss:.2f}.weights.h5'.
            On storage that all workers see, and the same on all of them.
        monitor: the log that `save_best_only` compares.
        save_best_only: whether to save only when that is better than in all epochs before.
        mode: 'min' or 'max': what is better.

    Raises:
        ValueError: `mode` is neither of these; the name has another ending; the logs have no such value.

    Collective: on all workers or on none. `sok.load_weights(model, path)` reads what it writes.

    Example:
        >>> ModelCheckpoint("w-{epoch:02d}.weights.h5").filepath
        'w-{epoch:02d}.weights.h5'
    """

    def __init__(
        self,
        filepath: PathLike,
        monitor: str = "val_loss",
        save_best_only: bool = False,
        mode: str = "min",
    ) -> None:
        super().__init__()
        self.filepath = os.fspath(filepath)
        if not self.filepath.endswith(".weights.h5"):
            raise ValueError(f"`filepath` must end in '.weights.h5'. Received: {self.filepath!r}.")
        if mode not in ("min", "max"):
            raise ValueError(f"`mode` must be 'min' or 'max'. Received: {mode!r}.")
        self.monitor, self.save_best_only, self.mode = monitor, save_best_only, mode
        self.best: float | None = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, numbers.Real)}
        transport = context.get_transport()
        found = together(transport, "sok/model_checkpoint", lambda: self._decided(epoch, logs, transport.rank))[0]
        if found is not None:
            path, self.best = found
            save_weights(self.model, path)

    def _decided(self, epoch: int, logs: dict[str, float], rank: int) -> list[Any] | None:
        """Where to save this epoch, and what is the best value then; None if it is not to be saved."""
        if rank != 0:
            return None
        try:
            path = self.filepath.format(epoch=epoch + 1, **logs)
            if not self.save_best_only:
                return [path, self.best]
            value = logs[self.monitor]
        except KeyError as error:
            raise ValueError(f"The logs have no {error}. They have: {', '.join(logs) or 'nothing'}.") from None
        is_better = self.best is None or (value < self.best if self.mode == "min" else value > self.best)
        return [path, value] if is_better and not math.isnan(value) else None


class BackupAndRestore(Callback):
    """Lets `fit` of a program that was interrupted go on when it is started again, on any number of workers.

    After each epoch it saves model, tables and optimizer, by `sok.CheckpointManager`; when `fit` begins it restores
    what is there, and the first epoch is the one after. Use it instead of Keras' own, which on several workers would
    write the dense weights only. Callbacks that count epochs (EarlyStopping, ReduceLROnPlateau) begin anew.

    Args:
        backup_dir: a folder for this alone, on storage that all workers see, the same on all of them.
        delete_checkpoint: whether to remove it when `fit` has ended.

    Raises:
        ValueError: in `fit`, of a model that is not built.
        as `sok.CheckpointManager`.

    Collective: on all workers or on none.

    Example:
        >>> import sok, tempfile
        >>> ids = tf.keras.Input([1], dtype="int64")
        >>> model = tf.keras.Model(ids, sok.Embedding(100, 2, name="backed_up")(ids))
        >>> model.compile(sok.DistributedOptimizer("sgd"), "mse")
        >>> folder = tempfile.mkdtemp()
        >>> backup = BackupAndRestore(folder, delete_checkpoint=False)
        >>> _ = model.fit(tf.ones([4, 1]), tf.ones([4, 1, 2]), epochs=2, verbose=0, callbacks=[backup])
        >>> len(model.fit(tf.ones([4, 1]), tf.ones([4, 1, 2]), epochs=3, verbose=0, callbacks=[backup]).epoch)
        1
    """

    def __init__(self, backup_dir: PathLike, delete_checkpoint: bool = True) -> None:
        super().__init__()
        self.backup_dir, self.delete_checkpoint = os.fspath(backup_dir), delete_checkpoint
        self._manager: CheckpointManager | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not self.model.built:
            raise ValueError("sok.callbacks.BackupAndRestore needs a model that is built: call it on a batch before.")
        optimizer = self.model.optimizer
        if hasattr(optimizer, "build") and not getattr(optimizer, "built", False):
            optimizer.build(self.model.trainable_variables)
        saved = tf.train.Checkpoint(model=self.model, optimizer=optimizer)
        self._manager = CheckpointManager(saved, self.backup_dir, max_to_keep=1)
        path = self._manager.restore_or_initialize()
        if path is not None:
            epoch = int(path.rpartition("-")[2])
            self.model._initial_epoch = epoch  # Keras 3 asks this, tf_keras the other
            self.model._training_state = _Begun(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        assert self._manager is not None
        self._manager.save(epoch + 1)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.model._initial_epoch = self.model._training_state = None

        def remove() -> None:
            if self.delete_checkpoint and context.rank() == 0:
                shutil.rmtree(self.backup_dir, ignore_errors=True)

        together(context.get_transport(), "sok/backup/end", remove)


class _Begun:
    """What tf_keras' `fit` asks where it begins."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def maybe_load_initial_counters_from_ckpt(self, steps: Any, initial_epoch: int, mode: Any) -> tuple[int, int]:
        return max(self._epoch, initial_epoch), 0


class TableScalars(Callback):
    """Writes scalars of tables and their exchange for TensorBoard.

    Every `every` steps of `fit` and at its end, or when a loop says so.

    Each worker writes what it knows itself, into a run of its own: 'LOG_DIR/rank0' and so on. Of each table:
    `tables/NAME/rows` in this worker's shard; `tables/NAME/full`, their share of the capacity; `tables/NAME/new_ids`,
    the rows that have come to this shard since the scalars before per id that this worker has looked up in training,
    with repeats: the share of unseen ids. Of tables with `admission` or `eviction` also `tables/NAME/candidates`, the
    keys that wait for a row now, and `refused` and `evicted` since the scalars before, as `table.stats()` counts them
    in this shard. Of tables with `storage` also `bytes_in_memory` and `bytes_in_file` now, and since the scalars before
    `hit_rate`, the share of rows that were in memory, and `bytes_read` and `bytes_written` of the file; of tables on a
    GPU with `storage`, `admission` or `eviction` `bytes_on_gpu` and `gpu_hit_rate`. On several
    workers also `exchange/seconds_per_step` and `exchange/bytes_per_step` of the lookups and their gradients, as
    `sok.trace` counts them.

    Args:
        log_dir: a folder.
        every: steps from one writing to the next, at least 1.
        tables: an `EmbeddingVariable`, a layer, a model, or a list of these. None: those of the model in `fit`.
        details: writes `collisions` and `bytes_in_memory` of all tables, too, and on several workers
            `bytes_exchanged` since the scalars before, as `table.stats(details=True)` has them of this worker.

    In a loop of one's own: `scalars = TableScalars("logs", tables=model)`, and `scalars.write(step)` now and then.

    Not collective: one worker may have it alone. The counts it reads are kept anyway.

    Raises:
        ValueError: `every` is no whole number of at least 1.

    Example:
        >>> import sok, tempfile
        >>> table = sok.EmbeddingVariable(2, 100, name="watched")
        >>> folder = tempfile.mkdtemp()
        >>> scalars = TableScalars(folder, tables=table)
        >>> rows = sok.lookup_sparse(table, tf.ragged.constant([[1, 2, 2, 2]], dtype=tf.int64), combiners="sum")
        >>> scalars.write(1)
        {'tables/watched/rows': 2.0, 'tables/watched/full': 0.02, 'tables/watched/new_ids': 0.5}
        >>> os.listdir(folder)
        ['rank0']
    """

    def __init__(
        self,
        log_dir: PathLike,
        every: int = 100,
        tables: Sequence[EmbeddingVariable] | EmbeddingVariable | None = None,
        details: bool = False,
    ) -> None:
        super().__init__()
        self.details = bool(details)
        self.log_dir, self.every, self.tables = os.fspath(log_dir), whole_number("every", every), tables
        self._writer: Any = None
        self._steps = self._before_epoch = self._written = 0
        self._counts: dict[str, tuple[int, int]] = {}  # of each table at the last writing: rows, ids
        self._stats: dict[str, dict[str, int]] = {}  # of tables with policies, or a file
        self._exchanged: dict[str, int] = {}  # of each table at the last writing: bytes
        self._trace = tracing.trace()
        self._begin()

    def on_train_begin(self, logs: Logs = None) -> None:
        if self.tables is None:
            self.tables = self.model
        iterations = getattr(getattr(self.model, "optimizer", None), "iterations", None)
        self._steps = self._before_epoch = self._written = 0 if iterations is None else int(iterations)
        self._begin()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._before_epoch = self._steps

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._steps = self._before_epoch + batch + 1
        if self._steps - self._written >= self.every:
            self.write(self._steps)

    def on_train_end(self, logs: Logs = None) -> None:
        if self._steps > self._written:
            self.write(self._steps)
        if self._writer is not None:
            self._writer.flush()

    def write(self, step: int) -> dict[str, float]:
        """Writes the scalars of now under the number `step`, and returns them by their tags."""
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(os.path.join(self.log_dir, f"rank{context.rank()}"))
        scalars: dict[str, float] = {}
        before, stats_before, steps = self._counts, dict(self._stats), max(step - self._written, 1)
        lookups = self._trace.by_lookup.values()
        for table in tables_of(self.tables).values():
            (rows, ids), (old_rows, old_ids) = self._now(table), before.get(table.table_name, (0, 0))
            scalars[f"tables/{table.table_name}/rows"] = float(rows)
            scalars[f"tables/{table.table_name}/full"] = rows / table.capacity
            if self.details:
                details = local_details(table)
                details["bytes_exchanged"] -= self._exchanged.get(table.table_name, 0)
                for what, count in details.items():
                    if what != "bytes_exchanged" or context.size() > 1:
                        scalars[f"tables/{table.table_name}/{what}"] = float(count)
            old_stats = stats_before.get(table.table_name, {})
            stats = self._stats[table.table_name] = self._stats_of(table)
            came = stats["made"] - old_stats.get("made", 0) if stats else max(rows - old_rows, 0)
            if ids > old_ids:
                scalars[f"tables/{table.table_name}/new_ids"] = came / (ids - old_ids)
            for what, value in _counted(table, stats, old_stats).items():
                scalars[f"tables/{table.table_name}/{what}"] = value
        if lookups:
            for what in ("seconds", "bytes"):
                scalars[f"exchange/{what}_per_step"] = float(sum(one[what] for one in lookups) / steps)
        with self._writer.as_default(step=step):
            for tag, value in scalars.items():
                tf.summary.scalar(tag, value)
        self._begin()
        self._written = step
        return scalars

    def _begin(self) -> None:
        """Counts from here."""
        self._trace.__enter__()
        with contextlib.suppress(ValueError):  # a model that is not built has no tables yet
            tables = {} if self.tables is None else tables_of(self.tables)
            self._counts = {name: self._now(table) for name, table in tables.items()}
            self._stats = {name: self._stats_of(table) for name, table in tables.items()}
            if self.details:
                self._exchanged = {name: local_bytes(table) for name, table in tables.items()}

    @staticmethod
    def _stats_of(table: Any) -> dict[str, int]:
        """What this shard has counted; nothing of tables without policies and storage."""
        options = table.options
        return local_stats(table) if options.keeps_history or options.storage is not None else {}

    @staticmethod
    def _now(table: Any) -> tuple[int, int]:
        return int(table.num_rows()), int(table.ids_seen)


def _counted(table: Any, stats: dict[str, int], before: dict[str, int]) -> dict[str, float]:
    """What policies and storage did to a shard: how things stand, and what came since `before`."""
    now: list[str] = []
    since: list[str] = []
    if table.options.keeps_history:
        now, since = ["candidates"], ["refused", "evicted"]
    if table.options.has_file:
        now, since = [*now, "bytes_in_memory", "bytes_in_file"], [*since, "bytes_read", "bytes_written"]
    now = [*now, *(name for name in ("bytes_on_gpu",) if name in stats)]
    come = {what: count - before.get(what, 0) for what, count in stats.items()}
    told = {what: float(stats[what]) for what in now} | {what: float(come[what]) for what in since}
    for tier in "", "gpu_":
        hits, misses = come.get(f"{tier}hits", 0), come.get(f"{tier}misses", 0)
        if hits + misses > 0:
            told[f"{tier}hit_rate"] = hits / (hits + misses)
    return told


def _checked_weight(argument: str, value: float | None) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not value >= 0:
        raise ValueError(f"`{argument}` must be a number of samples, 0 or more, or None. Received: {value!r}.")
    return float(value)
