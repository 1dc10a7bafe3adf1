"""What TensorFlow and Keras ask of a variable, answered for a table, which is no dense matrix."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.client import session as sessions
from tensorflow.python.ops import resource_variable_ops

from sok.base import _ops, keras_calls
from sok.job.job import Job
from sok.table import custom_gradients
from sok.table.weights import TableRows

_MAX_DRAWN = 10_000  # TensorBoard makes 30 bars of them


class AsVariable(resource_variable_ops.BaseResourceVariable):
    """A table where a variable is expected: what would read or write a dense matrix is refused."""

    # What the table says.
    _table_name: str
    _dim: int
    _key_dtype: tf.DType
    _job: Job
    export: Any
    num_rows: Any
    on_servers: Any
    _warned_not_saved = False

    # The metaclass of tf.Variable would bind positional arguments to its own signature first.
    @classmethod
    def _variable_call(cls, *args: Any, **kwargs: Any) -> None:
        return None

    @property
    def trainable(self) -> bool:
        return self._trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._trainable = bool(value)

    @property
    def shape(self) -> tf.TensorShape:
        """(0, D): no dense matrix. Keras' `summary` and `count_params` get [rows that are in use here, D]."""
        if keras_calls.is_counting_parameters() and tf.executing_eagerly():
            return tf.TensorShape([int(self.num_rows()), self._local_dim])
        return self._shape

    # A table is equal to itself only: tf.Variable's comparison would read two dense matrices.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    # A variable of TensorFlow would make a dense one of what it reads.
    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"The embedding table '{self._table_name}' cannot be copied or pickled. Make another one with its "
            "arguments, and hand over its rows, with all slots by sok.save and sok.restore, or alone: "
            "other.assign(*table.export())."
        )

    def __copy__(self) -> AsVariable:
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None) -> Any:
        return self.__reduce_ex__(None)

    def numpy(self) -> Any:
        """For Keras' `get_weights`, and for nothing else: a copy of this shard's rows."""
        keras_functions = keras_calls.running()
        if "save_own_variables" in keras_functions or any("hdf5" in name for name in keras_functions):
            self.warn_not_saved()
            return np.zeros([0, self._local_dim], np.float32)
        if "get_weights" in keras_functions and tf.executing_eagerly():
            return TableRows(*(tensor.numpy() for tensor in self.export()))
        return self._no_dense_value()

    def _ref(self) -> tf.Tensor:
        return self.handle

    def to_proto(self, export_scope: str | None = None) -> None:
        # Asked for when a meta graph is written, as tf.compat.v1.train.Saver.save does beside a checkpoint.
        self.warn_not_saved()
        return None

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        return tf.constant(True)

    def _no_dense_value(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"The embedding table '{self._table_name}' is not a dense matrix: it has rows only where keys have been "
            "seen. Read it with a layer, `variable.sparse_read(keys)` or `variable.export()`; write it "
            "with `variable.assign(keys, values)`. If an optimizer asked for it: wrap it in `sok.OptimizerWrapper` or "
            "`sok.DistributedOptimizer`, or give embedding variables to `sok.optimizers`."
        )

    def _no_stock_optimizer(self) -> Any:
        raise TypeError(
            f"A stock optimizer was given the embedding table '{self._table_name}', which it cannot update: the table "
            "has rows only where keys have been seen. Wrap the optimizer, in `sok.OptimizerWrapper` or "
            "`sok.DistributedOptimizer`, which train dense variables and tables; or give the table to one of "
            "`sok.optimizers`."
        )

    # Each stock optimizer asks for one of these two before it changes anything. Let on, it would write to the handle
    # by row numbers, and TensorFlow would say something about indices.
    constraint = property(_no_stock_optimizer)

    @property
    def _distributed_container(self) -> Any:
        # A LossScaleOptimizer asks, too, and leaves the update to that inside; a strategy does, of what is read; and a
        # checkpoint, of all that it saves, whether an optimizer has slots for it.
        asks = keras_calls.caller()
        is_scaler = type(asks).__name__.startswith("LossScaleOptimizer")
        if not hasattr(asks, "apply_gradients") or is_scaler or "get_slot" in keras_calls.running():
            raise AttributeError("_distributed_container")
        return self._no_stock_optimizer()

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        # Every dense read of the base class goes through this one.
        rows = self._drawn_rows()
        if rows is None:
            rows = custom_gradients.stand_in(self)
        return self._no_dense_value() if rows is None else rows

    def _drawn_rows(self) -> tf.Tensor | None:
        """For Keras' callback TensorBoard rows of this shard, 10,000 at the most and evenly spread; else None."""
        if "_log_weights" not in keras_calls.running() or not tf.executing_eagerly():
            return None
        if self.on_servers is not None:
            rows = self.export()[1]
            return rows[:: max(1, -(-len(rows) // _MAX_DRAWN))]
        keys = _ops.lib().sok_table_keys(self.handle, key_dtype=self._key_dtype)
        keys = keys[:: max(1, -(-len(keys) // _MAX_DRAWN))]
        return _ops.lib().sok_table_lookup(self.handle, keys, False, dim=self._local_dim)[0]

    eval = gather_nd = _in_session = _no_dense_value

    def _as_graph_element(self) -> None:
        # Asked for by stock ops that look for the graph of their inputs: this one has no tensor that says.
        return None

    # What stock optimizers and others write with; row ids are not rows of a matrix.
    assign_add = assign_sub = batch_scatter_update = _no_dense_value
    scatter_add = scatter_sub = scatter_update = scatter_min = scatter_max = scatter_mul = scatter_div = _no_dense_value
    scatter_nd_add = scatter_nd_sub = scatter_nd_update = scatter_nd_min = scatter_nd_max = _no_dense_value

    def _serialize_to_tensors(self) -> dict[str, Any]:
        self.warn_not_saved()
        return {}

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        return None

    def _copy_trackable_to_cpu(self, object_map: dict) -> None:
        # Asked for by asynchronous checkpoints, which write later.
        if self._job.size == 1:
            raise ValueError(  # NotImplementedError would be taken for "leave it out"
                f"Asynchronous checkpoints cannot hold the embedding table '{self._table_name}': its rows would be of "
                "a later step than the dense variables. Save without `experimental_enable_async_checkpoint`."
            )
        object_map.setdefault(self, self)

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"Table '{self._table_name}' cannot go into a SavedModel as it is: use sok.export_saved_model(model, path)."
        )

    def warn_not_saved(self) -> None:
        """Says once per variable that a file or other copy does not hold its rows."""
        if not self._warned_not_saved:
            self._warned_not_saved = True
            warnings.warn(
                f"The rows of embedding table '{self._table_name}' are not saved here, where only dense "
                "variables are. Use sok.save and sok.restore; see docs/checkpoints.md.",
                stacklevel=3,
            )


# What a session does with one that it is to run, and one that it is fed.
sessions.register_session_run_conversion_functions(
    AsVariable, lambda table: table._in_session(), *[AsVariable._no_dense_value] * 2
)
