"""`Variable`: a matrix whose rows live on the workers, as SOK v2 makes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sok.base import _ops, keras_calls
from sok.base.types import DTypeLike, TensorLike
from sok.compat.v2.mode import HasMode, default_name, owner_of
from sok.job import context
from sok.table import custom_gradients
from sok.table.initializers import Initializer
from sok.table.options import TableOptions, said_once
from sok.table.table import EmbeddingVariable
from sok.table.weights import TableRows, rows_behind

KINDS = "a sok.Variable or sok.DynamicVariable"
"""For messages: what SOK v2's functions take."""


def Variable(
    initial_value: TensorLike | Callable[[], TensorLike] | None = None,
    trainable: bool | None = None,
    validate_shape: bool = True,
    caching_device: object = None,
    name: str | None = None,
    variable_def: object = None,
    dtype: DTypeLike | None = None,
    import_scope: str | None = None,
    constraint: object = None,
    synchronization: object = None,
    aggregation: object = None,
    shape: Sequence[int] | tf.TensorShape | None = None,
    *,
    mode: str | None = None,
    initializer: Initializer | None = None,
    collections: object = None,
    use_resource: bool | None = None,
    distribute_strategy: object = None,
    table: TableOptions | None = None,
) -> StaticVariable:
    """Makes a matrix of rows that live on the workers, with the arguments of `tf.Variable`.

    Row r is on worker r % R, or all rows on one worker. It is an `EmbeddingVariable` whose keys are row numbers: look
    it up with `sok.lookup_sparse` or `sok.all2all_dense_embedding`, train it with `sok.OptimizerWrapper(optimizer)`,
    `sok.optimizers` or `sok.DistributedOptimizer`. A stock optimizer without these refuses it.

    Args:
        initial_value: [V, D] numbers, the whole matrix on every worker (each keeps its own rows): a nested list, an
            array, a float32 tensor, or a function without arguments that gives one. [D] stands for one row.
        shape, initializer: instead of `initial_value`: (V, D), and a Keras name, a Keras initializer or
            `f(shape, dtype)`. Each row then is a function of seed and row number, the same for any number of workers.
        mode: None or 'distributed': row r is on worker r % R. 'localized:#': all rows are on worker #.
        name: made unique; the same on all workers. None: SOK's "sok_static_Variable_0", "sok_static_Variable_1", ...
        trainable: whether a tape watches it by itself. None: True.
        dtype: None or float32, which Python's and NumPy's other numbers become.
        validate_shape, caching_device, synchronization, aggregation, collections, use_resource, distribute_strategy:
            accepted without effect.
        variable_def, import_scope, constraint: must be None.
        table: all properties of the table, instead of initializer, trainable and mode. Its keys are row numbers,
            int64.

    Returns:
        A `DistributedVariable` or `LocalizedVariable`, by `mode`. In a v1 graph its initial value is stored by
        `global_variables_initializer()` or its own `initializer`; running those again changes nothing.

    Raises:
        TypeError: a dtype that is not float32.
        ValueError: a value that is no matrix; not exactly one of `initial_value` and `shape`; an unknown mode; an
            argument that must be None.

    Collective only if `initializer` is none of Keras' random or constant ones.

    Example:
        >>> import sok
        >>> table = sok.Variable([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
        >>> table.global_shape
        (3, 2)
        >>> sok.all2all_dense_embedding(table, [2, 0]).numpy().tolist()
        [[4.0, 5.0], [0.0, 1.0]]

    Source: `Variable` of SOK v2; differences are listed in docs/migrating.md.
    """
    refused = {"variable_def": variable_def, "import_scope": import_scope, "constraint": constraint}
    for argument, value in refused.items():
        if value is not None:
            raise ValueError(f"sok.Variable: `{argument}` must be None. Received: {value!r}.")
    if dtype is not None and tf.as_dtype(dtype) != tf.float32:
        raise TypeError(f"sok.Variable: `dtype` must be float32 or None. Received: {tf.as_dtype(dtype).name}.")
    if (initial_value is None) == (shape is None) or (shape is None and initializer is not None):
        raise ValueError("sok.Variable takes either `initial_value`, or `shape` and `initializer`.")
    own = ("key_dtype", "hashed", "num_keys", *(() if initial_value is None else ("initializer",)))
    options = said_once(table, own=own, initializer=initializer, trainable=trainable, owner=owner_of(mode))
    made = DistributedVariable if options.placement.owner is None else LocalizedVariable
    name = name or default_name("static")
    if initial_value is None:
        return made(_checked_shape(shape), options, name=name)
    with tf.init_scope():
        matrix = _as_matrix(initial_value() if callable(initial_value) else initial_value)
        options = dataclasses.replace(options, initializer="zeros")
        return made(_checked_shape(matrix.shape), options, name=name, initial_value=matrix)


class StaticVariable(HasMode, EmbeddingVariable):
    """What `sok.Variable` makes: the rows of a matrix, each on its worker.

    As a TensorFlow variable (`shape`, `value()`, `numpy()`, `session.run`, `variable ** 2`, which is differentiable) it
    is the matrix [n, D] of the rows that live on this worker. None of these is collective. Lookups
    (`sok.lookup_sparse`, `tf.nn.embedding_lookup`) take row numbers of the whole matrix.

    Args:
        shape: (V, D) of the whole matrix.
        options, name: as in `EmbeddingVariable`; hashed and num_keys are as `shape` says.
        initial_value: that matrix, float32 array or tensor, of which this worker stores its own rows; None: rows come
            from the initializer of `options`.
    """

    def __init__(
        self, shape: tuple[int, int], options: TableOptions, *, name: str, initial_value: TensorLike | None = None
    ) -> None:
        self._global_shape = shape
        options = dataclasses.replace(options, hashed=False, num_keys=shape[0])
        if context.get_job().servers is not None:
            raise ValueError(
                f"A sok.Variable with a shape, '{name}', is not there on parameter servers: it is a matrix of which "
                "workers hold rows. Take a sok.DynamicVariable or a sok.EmbeddingVariable."
            )
        capacity = options.placement.share(shape[0], context.size())
        super().__init__(shape[1], capacity, name=name, options=options)
        with tf.init_scope():
            if initial_value is not None:
                self._store_at_start(initial_value)
            # Made now: a session that runs the variable may have finalized its graph.
            self._fetched: tf.Tensor = self.local_rows() if self._in_graph_mode else None

    @property
    def global_shape(self) -> tuple[int, int]:
        """(V, D) of the whole matrix, over all workers."""
        return self._global_shape

    @property
    def shape(self) -> tf.TensorShape:
        """[n, D] of the rows that live on this worker."""
        return tf.TensorShape([len(range(*self._local_slice())), self.local_dim])

    @property
    def global_gpu_id(self) -> int:
        """The number of this worker."""
        return self.rank

    def key_map(self, indices: TensorLike) -> Any:
        """The place of a row among its owner's rows, given its number in the whole matrix."""
        return self.placement.row_of(indices, self.world_size)

    def local_indices(self) -> tf.Tensor:
        """Numbers of the rows that live on this worker, ascending: [n] int64. Not collective."""
        start, stop, step = self._local_slice()
        return tf.range(start, stop, step, dtype=tf.int64)

    def local_rows(self) -> tf.Tensor:
        """The rows that live on this worker: [n, D] float32, as `local_indices`. Not collective, not differentiable."""
        rows, _ = _ops.lib().sok_table_lookup(self.handle, self.local_indices(), False, dim=self.local_dim)
        return rows

    def numpy(self) -> Any:
        """The rows that live on this worker as an array [n, D]; none while Keras writes an HDF5 file."""
        keras_functions = keras_calls.running()
        if any("hdf5" in name for name in keras_functions):
            return super().numpy()
        rows = self.local_rows().numpy()
        if "get_weights" in keras_functions:
            return TableRows(self.local_indices().numpy(), rows, as_matrix=True)
        return rows

    def eval(self, session: tf.compat.v1.Session | None = None) -> np.ndarray:
        """`numpy()` in a v1 graph: runs it in `session`, or in the default one."""
        return self._fetched.eval(session=session)

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        if no_copy:
            # So it reads, and would gather from these rows by their numbers in the whole matrix.
            raise TypeError(
                f"tf.nn.embedding_lookup_sparse does not take the sok.Variable '{self.table_name}', of which it would "
                "see this worker's rows alone. Use sok.lookup_sparse, or sok.group_embedding_lookup_sparse."
            )
        for rows in (self._drawn_rows(), custom_gradients.stand_in(self)):
            if rows is not None:
                return rows
        resource_variable_ops.variable_accessed(self)
        # Rows that are not there yet are made: a gradient needs them.
        return _ops.lib().sok_table_lookup(self.handle, self.local_indices(), True, dim=self.local_dim)[0]

    def _as_graph_element(self) -> tf.Tensor | None:
        return self._fetched

    def _in_session(self) -> tuple[list[tf.Tensor], Any]:
        return [self._fetched], lambda found: found[0]

    def _assign_copy(self, array: Any) -> tf.Operation | None:
        shape = tuple(tf.TensorShape(array.shape if hasattr(array, "shape") else np.shape(array)))
        if rows_behind(array) is not None or (shape != self._global_shape and shape == (0, self.dim)):
            return super()._assign_copy(array)
        if shape != self._global_shape:
            raise ValueError(
                f"sok.Variable '{self.table_name}': assign(values) takes the whole matrix, {self._global_shape}, of "
                f"which each worker stores its rows. Received: shape {shape}. For some of the rows call "
                "assign(indices, values), indices being their numbers in the whole matrix."
            )
        return self.assign(self.local_indices(), array[slice(*self._local_slice())])

    def _local_slice(self) -> tuple[int, int, int]:
        return self.placement.local_keys(self._global_shape[0], self.rank, self.world_size)

    def _store_at_start(self, matrix: Any) -> None:
        """Stores this worker's rows: now, or in a v1 graph when it is initialized for the first time."""
        # Of an array only these become a constant of the graph.
        rows = matrix[slice(*self._local_slice())]
        if tf.executing_eagerly():
            self.assign(self.local_indices(), rows)
            return

        # Has a value once rows were stored; nothing else gives it one, and nothing saves it. Rows alone say little: a
        # lookup before the initializer makes some, of zeros.
        stored = tf.compat.v1.Variable(
            False, trainable=False, use_resource=True, collections=[], name=f"{self.table_name}/stored"
        )

        def store() -> tf.Tensor:
            with (
                tf.control_dependencies([self.assign(self.local_indices(), rows)]),
                tf.control_dependencies([stored.assign(True)]),
            ):
                return tf.constant(True)

        def is_missing() -> tf.Tensor:
            return tf.logical_or(tf.logical_not(stored.is_initialized()), tf.equal(self.num_rows(), 0))

        # This variable is no global one, which savers would read as a matrix: a flag is in its place. It is a local one
        # too, since a session that restores a checkpoint runs the initializers of those only.
        graph_keys = tf.compat.v1.GraphKeys
        self._is_stored = tf.compat.v1.Variable(
            lambda: tf.cond(is_missing(), store, lambda: tf.constant(True)),
            trainable=False,
            use_resource=True,
            name=f"{self.table_name}/is_stored",
            collections=[graph_keys.GLOBAL_VARIABLES, graph_keys.LOCAL_VARIABLES],
        )
        self._initializer_op = self._is_stored.initializer


class DistributedVariable(StaticVariable):
    """A `sok.Variable` whose row r is on worker r % R."""


class LocalizedVariable(StaticVariable):
    """A `sok.Variable` whose rows are all on one worker."""


def _as_matrix(value: Any) -> Any:
    """`value` as a float32 array or tensor [V, D]."""
    if isinstance(value, tf.Variable) or tf.is_tensor(value):
        value = tf.convert_to_tensor(value)
        if value.dtype != tf.float32:
            raise TypeError(f"sok.Variable: `initial_value` must be float32. Received: {value.dtype.name}. Cast it.")
        rank = value.shape.rank
    else:
        value = np.asarray(value)
        if value.dtype.kind not in "fiu":
            raise TypeError(f"sok.Variable: `initial_value` must be numbers. Received: {value.dtype}.")
        value, rank = value.astype(np.float32), value.ndim
    if rank == 1:
        return value[None, :]
    if rank != 2:
        raise ValueError(f"sok.Variable: `initial_value` must be a matrix [V, D]. Received: shape {value.shape}.")
    return value


def _checked_shape(shape: Any) -> tuple[int, int]:
    sizes = tf.TensorShape(shape)
    sizes = sizes.as_list() if sizes.rank is not None else []
    if len(sizes) != 2 or not all(sizes):
        raise ValueError(f"sok.Variable: the shape must be (V, D), known and not empty. Received: {shape}.")
    return sizes[0], sizes[1]
