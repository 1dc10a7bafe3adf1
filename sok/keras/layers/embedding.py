"""A drop-in for Keras' `Embedding`, whose rows lie in a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tensorflow as tf

from sok.base import masks, strategies
from sok.base.types import Condition, Ids, KerasInitializer, KerasLayer, Shape, TensorLike
from sok.checkpoint import store_files
from sok.job import context
from sok.job.data import hash_strings
from sok.keras.layers.base import TableLayerMixin, check_integers, check_trainable
from sok.lookup import plain_variables
from sok.lookup.feature import ROWS, Feature, check_combiner
from sok.lookup.inputs import describe, sizes
from sok.lookup.lookup import lookup_group, lookup_rows
from sok.table import on_servers
from sok.table.initializers import with_rows
from sok.table.options import TableOptions, said_once, whole_number
from sok.table.row_terms import RowTerms
from sok.table.table import EmbeddingVariable
from sok.table.weights import rows_behind

SPARSE_AS_DENSE_SIZE = 64
"""A matrix of so many rows is no table, unless somebody says otherwise."""

Answer: TypeAlias = "Callable[[Sequence[tf.Tensor]], Any]"

_ANY = 2**30  # rows that a worker may hold of a table of any ids; memory is taken as they appear
_IN_A_STEP = 2**20  # rows that are copied at once
# Below it a float holds whole numbers as they are: Keras' inputs are floats unless told otherwise.
EXACT = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "float64": 2**53}
_REFUSED = {
    "lora_rank": "a table has no matrix to add a product of two small ones to",
    "quantization_config": "rows of a table are float32",
    "sparse": "its output is dense",
}


if TYPE_CHECKING:

    class _Base(TableLayerMixin):
        """With what Keras' own layer has, which follows it among the bases."""

        output_dim: int
        embeddings_initializer: Any
        mask_zero: bool

        def add_loss(self, loss: Any) -> None: ...
        def compute_mask(self, inputs: Any, mask: Any = None) -> Any: ...
        def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]: ...
        def get_weights(self) -> list[Any]: ...
        def set_weights(self, weights: Any) -> None: ...
else:
    _Base = TableLayerMixin


class EmbeddingMixin(_Base):
    """Looks up a row for each id: `keras.layers.Embedding` over a table that is spread over the workers.

    Same arguments, shapes, masks and gradients as Keras' own layer, and same rows for the same weights, except that
    equal ids of a batch are one row with one gradient for every optimizer, where Keras 3's own square gradients of
    equal ids one by one; and that negative ids are errors, where Keras 3 counts them from the end.

    Args:
        input_dim: n: ids are row numbers in [0, n). None or -1: any 64-bit ids, and strings, by their hash
            (`sok.hash_strings`); a row is made when its id first comes in training.
        output_dim: length D of a row.
        embeddings_initializer: a Keras name, a Keras initializer or `f(shape, dtype)`. A row's initial value is a
            function of seed and id.
        mask_zero: as in Keras. With `combiner`, id 0 counts as absent.
        weights: [n, D], or a list of that: rows to start from, equal on all workers.
        combiner: None: a row for each id. 'sum', 'mean' or 'sqrtn', in any capitalisation: the rows along the last axis
            of the ids become one, by the rule of `tf.nn.embedding_lookup_sparse`; no ids give zeros.
        table: a `sok.TableOptions` with all other properties of the table: placement, exchange_dtype, seed, ...
        capacity: rows that each worker may hold where any id is legal. None: 2^30; memory is taken as rows appear.
        sparse_as_dense_size: up to so many rows the layer keeps an ordinary variable on each worker, which is averaged
            with the dense ones. None: 64. 0: it is a table whatever `input_dim`. Layers with a `combiner` too.
        embeddings_regularizer: in `kwargs`. A penalty that is a sum over rows: L1, L2, L1L2, or your own. Each row
            that a step looks up gets its gradient once, from its owner, whatever the number of workers and `op`; the
            optimizer adds it, and no tape has it. The loss has the penalty of the rows of this worker's batch, each
            once a call.
        regularize: what the penalty does to rows that no worker has looked up in a step. "batch": nothing. "exact":
            they shrink as those of Keras' own layer; of L2 alone, trained by plain SGD. Costs D more floats a row, and
            with `input_dim` all rows are made at once.
        embeddings_constraint: in `kwargs`. Acts on each row by itself: NonNeg(), UnitNorm(axis=1), MaxNorm(axis=1),
            MinMaxNorm(axis=1), or one of your own. Applied to the rows that a step has looked up, after it.
        **kwargs: the other arguments of Keras' layer: name, trainable, dtype, activity_regularizer, input_length, ...

    Call args:
        inputs: integers of any shape: dense, RaggedTensor or SparseTensor. A SparseTensor without `combiner` reads id 0
            where it has none, as in Keras. Floats, which Keras makes of inputs unless told otherwise, where all ids
            below `input_dim` are exact in them. Strings where `input_dim` is None.
        training: whether unseen ids get a row; see `sok.DistributedEmbedding`.

    Returns:
        [*shape of the ids, D], ragged where these are; with `combiner` without their last axis. In the compute dtype.

    Raises:
        ValueError: an argument or the form of the ids is not one of these; of a table `lora_rank`, rows of float64, a
            regularizer that is no sum over rows, a constraint that does not act row by row; when training,
            regularize="exact" with another optimizer than plain SGD.
        tf.errors.InvalidArgumentError: an id is no row number; on every worker.
        tf.errors.ResourceExhaustedError: a shard is full; on every worker. That shard has stored nothing of the step.

    Collective, as `sok.DistributedEmbedding`; not where it is an ordinary variable. `get_weights` of a layer with
    row numbers gives the matrix, and is collective too.

    Example:
        >>> import tensorflow as tf
        >>> import sok
        >>> layer = sok.Embedding(1000, 4)
        >>> layer(tf.constant([[1, 2, 3]])).shape
        TensorShape([1, 3, 4])
        >>> words = sok.Embedding(None, 2, "ones", combiner="sum")
        >>> words(tf.constant([["to", "be", "or"], ["not", "to", "be"]])).numpy().tolist()
        [[3.0, 3.0], [3.0, 3.0]]
    """

    _is_plain = False  # an ordinary variable

    def __init__(
        self,
        input_dim: int | None,
        output_dim: int,
        embeddings_initializer: KerasInitializer = "uniform",
        *args: Any,
        combiner: str | None = None,
        table: TableOptions | None = None,
        capacity: int | None = None,
        sparse_as_dense_size: int | None = None,
        regularize: str = "batch",
        weights: TensorLike | None = None,
        **kwargs: Any,
    ) -> None:
        any_id = input_dim is None or input_dim == -1
        rows = None if any_id else whole_number("input_dim", input_dim, 2**62)
        dense_size = SPARSE_AS_DENSE_SIZE if sparse_as_dense_size is None else sparse_as_dense_size
        dense_size = whole_number("sparse_as_dense_size", dense_size, low=0)
        refuse(kwargs)
        options = said_once(table, own=("hashed", "num_keys"))
        if options.initializer is not None and embeddings_initializer != "uniform":
            raise ValueError(
                "The initializer is given twice: `embeddings_initializer`, and `initializer` in `table`. "
                f"Received: {embeddings_initializer!r} and {options.initializer!r}."
            )
        initializer = embeddings_initializer if options.initializer is None else options.initializer
        check_trainable(options, kwargs)
        super().__init__(rows or 1, output_dim, initializer, *args, **kwargs)  # type: ignore[call-arg]
        self.input_dim = rows
        self.combiner = None if combiner is None else check_combiner(combiner)
        self.capacity = None if capacity is None else whole_number("capacity", capacity)
        self.sparse_as_dense_size = sparse_as_dense_size
        self.regularize = regularize
        self._become(options, is_plain=rows is not None and rows <= dense_size)
        if weights is not None:
            self.build(None)
            self.set_weights(weights if isinstance(weights, list) and len(weights) == 1 else [weights])

    def _become(self, options: TableOptions, is_plain: bool) -> None:
        """The second half of the constructor: an ordinary variable, or a table with these options."""
        self._is_plain = is_plain
        if not is_plain:
            strategies.refuse(f"A sok.{type(self).__name__}", self, may_be_shared=True)
            reason = why_no_table(self, self.regularize)
            if reason is not None:
                raise ValueError(f"Layer '{self.name}' cannot be over a table: {reason}.")
        if self.input_dim is not None and self.capacity is not None:
            raise ValueError("`capacity` is for layers of any id: those with `input_dim` have a place for each id.")
        # tf_keras gives a layer by name what `tf.keras.initializers` of Keras 3 does not know.
        initializer: Any = options.initializer or self.embeddings_initializer
        if self.input_dim is None and self.capacity is None:
            initializer = with_rows(initializer, None, self.output_dim)  # refuses those that scale by a size
        self._hold(
            dataclasses.replace(
                options, initializer=initializer, hashed=self.input_dim is None, num_keys=self.input_dim
            )
        )

    def _table_size(self) -> tuple[int, int]:
        if self.input_dim is None:
            return self.output_dim, self.capacity or _ANY
        return self.output_dim, self._options.placement.share(self.input_dim, context.size())

    def _make_table(self) -> EmbeddingVariable:
        if self._is_plain:
            raise ValueError(
                f"Layer '{self.name}' has an ordinary variable of {self.input_dim} rows, `embeddings`, and no table. "
                "For a table of any size give it sparse_as_dense_size=0."
            )
        table = super()._make_table()
        table.row_terms = terms_of(self, self.regularize)
        if table.row_terms is not None and table.placement.cuts_rows:
            table.row_terms.check_cut()
        if self.input_dim is not None and table.row_terms is not None and table.row_terms.is_exact:
            # Rows shrink from when they are made on: those of a matrix from the start.
            for start in range(0, self.input_dim, _IN_A_STEP):
                part = range(start + context.rank(), min(start + _IN_A_STEP, self.input_dim), context.size())
                with tf.init_scope():
                    lookup_rows(table, tf.constant(list(part), table.key_dtype), training=True)
        return table

    def build(self, input_shape: Shape | None = None) -> None:
        if self._is_plain:
            super(TableLayerMixin, self).build(input_shape)  # type: ignore[misc]
        else:
            super().build(input_shape)

    def call(self, inputs: Ids, training: Condition | None = None) -> Any:
        return self._to_compute_dtype(self._look_up(self._as_ids(inputs), self._inserts(training)))

    def _look_up(self, ids: Any, inserts: Any) -> Any:
        asked, answer = self.asks(ids)
        return answer(lookup_group(asked, inserts))

    def asks(self, ids: Ids) -> tuple[list[Feature], Answer]:
        """What a call looks up, and what it makes of that."""
        variable, dtype = self._looked_up()
        terms = None if self._is_plain else variable.row_terms
        if self.combiner is not None:
            ids, padding_key, shaped = _segments(ids, self.output_dim, self.mask_zero)
        else:
            (ids, shaped), padding_key = _flat(ids), None
        slot_num = _slot_num(ids)
        asked = [Feature(variable, ids, self.combiner or ROWS, dtype=dtype, slot_num=slot_num, padding_key=padding_key)]
        if terms is None or terms.regularizer is None:
            return asked, lambda found: shaped(found[0])

        def with_penalty(found: Sequence[tf.Tensor]) -> Any:
            self.add_loss(terms.penalty(found[1]))
            return shaped(found[0])

        return [*asked, Feature(variable, _distinct(ids, padding_key))], with_penalty

    def _looked_up(self) -> tuple[Any, tf.DType | None]:
        """The table or variable, and what its rows are cast to; None: nothing."""
        if not self._is_plain:
            return self.embedding_variable, None
        own = vars(self).get("_embeddings", vars(self).get("embeddings"))  # Keras 3's and tf_keras' name for it
        variable = plain_variables.as_plain_variable(own)
        return variable, plain_variables.cast_to(own, variable)

    def _as_ids(self, inputs: Any) -> Any:
        if inputs.dtype == tf.string:
            return hash_strings(inputs)
        wider = tf.as_dtype(self._options.key_dtype) if inputs.dtype.is_floating else inputs.dtype
        return tf.cast(inputs, wider)

    def compute_mask(self, inputs: Ids, mask: tf.Tensor | None = None) -> Any:
        return None if self.combiner is not None else super().compute_mask(inputs, mask)

    def compute_output_shape(self, input_shape: Shape) -> tuple[int | None, ...]:
        shape = super().compute_output_shape(input_shape)
        return shape if self.combiner is None else (*shape[:-2], shape[-1])

    # Keras' hooks, in which a table is not the matrix that they know.

    def _tables_asked(self) -> list[EmbeddingVariable]:
        return [] if self._is_plain else super()._tables_asked()

    def _from_values(self, given: Any) -> tf.Tensor:
        array = np.asarray(given)
        if array.dtype.kind in "SUf" or (array.dtype == object and all(type(x) is bytes for x in array.flat)):
            self._check_ids(tensor := tf.convert_to_tensor(given))
            return tensor
        return super()._from_values(given)

    def _check_ids(self, given: Any) -> None:
        dtype = getattr(given, "dtype", None)
        name = getattr(dtype, "name", dtype)
        if name == "string" and self.input_dim is None:
            if self.mask_zero:
                raise ValueError(f"`inputs` of layer '{self.name}' must be integers with mask_zero=True.")
        elif name in EXACT and self.input_dim is not None:
            if self.input_dim > EXACT[name]:
                raise ValueError(
                    f"`inputs` of layer '{self.name}' must be integers: {name} does not tell all ids below "
                    f"{self.input_dim} apart. Keras makes inputs float32 unless told otherwise: use "
                    "keras.Input(shape, dtype='int64')."
                )
        else:
            check_integers(given, self.name)

    def _check_symbol(self, symbol: Any) -> None:
        static = sizes(symbol)
        if self.combiner is not None and static is not None and len(static) < 2:
            raise _no_last_axis(symbol)

    @staticmethod
    def _inserts(training: Any) -> Any:
        # A subclass' own `call` may have no `training` to hand on; then that of tf_keras' layer is True.
        return TableLayerMixin._inserts(None if training is True else training)

    def get_weights(self) -> list[Any]:
        if self._is_plain or self.input_dim is None or self._table is None or not tf.executing_eagerly():
            return super().get_weights()
        return [matrix_of(self.embedding_variable, self.input_dim)]

    def set_weights(self, weights: Sequence[TensorLike]) -> None:
        if self._is_plain or self.input_dim is None or len(weights) != 1 or rows_behind(weights[0]) is not None:
            super().set_weights(weights)
            return
        matrix = weights[0] if isinstance(weights[0], np.ndarray) else np.asarray(weights[0])
        if matrix.shape != (self.input_dim, self.output_dim):
            raise ValueError(
                f"Weights of layer '{self.name}' must have shape {(self.input_dim, self.output_dim)}. "
                f"Received: shape {matrix.shape}."
            )
        assign_matrix(self.embedding_variable, matrix)

    def save_own_variables(self, store: MutableMapping[str, np.ndarray]) -> None:
        if self._is_plain:
            super(TableLayerMixin, self).save_own_variables(store)  # type: ignore[misc]
        else:
            super().save_own_variables(store)

    def load_own_variables(self, store: MutableMapping[str, np.ndarray]) -> None:
        if self._is_plain:
            super(TableLayerMixin, self).load_own_variables(store)  # type: ignore[misc]
        elif self.input_dim is not None and "0" in store.keys() and not store_files.leaves_rows_out():  # noqa: SIM118
            self.set_weights([np.asarray(store["0"])])  # a file of the model with Keras' own layer
        else:
            super().load_own_variables(store)

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Refused: rows of a table are float32. `sok.export_saved_model` writes them in fewer bits."""
        raise ValueError(
            f"Layer '{self.name}' cannot be quantized. Use sok.export_saved_model, which writes fewer bits."
        )

    def enable_lora(self, *args: Any, **kwargs: Any) -> None:
        """Refused: a table has no matrix."""
        refuse({"lora_rank": args or kwargs})

    def get_config(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("combiner", "capacity", "sparse_as_dense_size", "regularize")}
        # Said by other arguments.
        options = dataclasses.replace(self._options, initializer=None, hashed=True, num_keys=None)
        return {**super().get_config(), **own, "table": options.get_config(self._keras_initializers)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        config = dict(config)
        if isinstance(config.get("table"), dict):
            config["table"] = TableOptions.from_config(config["table"], cls._keras_initializers)
        config.pop("quantization_config", None)
        return cls(**config)


def refuse(arguments: dict[str, Any]) -> None:
    """`ValueError` for arguments of Keras' layer that no table has."""
    for name, reason in _REFUSED.items():
        if arguments.get(name):
            raise ValueError(f"`{name}` is not for sok.Embedding: {reason}. Received: {arguments[name]!r}.")


def terms_of(layer: KerasLayer, regularize: str) -> RowTerms | None:
    """What the layer's regularizer and constraint are to the rows of a table. ValueError if they cannot be."""
    regularizer, constraint = layer.embeddings_regularizer, layer.embeddings_constraint
    terms = RowTerms(layer.output_dim, regularizer, regularize, constraint)
    return None if regularizer is None and constraint is None else terms


def why_no_table(layer: KerasLayer, regularize: str = "batch") -> str | None:
    """Why a layer of Keras' class `Embedding` cannot be over a table; None: it can."""
    try:
        terms_of(layer, regularize)
    except ValueError as error:
        return str(error).removesuffix(".")
    if getattr(layer, "lora_enabled", False) or getattr(layer, "lora_rank", None):
        return f"`lora_rank` is not for tables: {_REFUSED['lora_rank']}"
    if getattr(layer, "quantization_mode", None):
        return "it is quantized, and rows of a table are float32"
    if getattr(layer, "sparse", False):
        return "it gives a SparseTensor (`sparse=True`), and a lookup in a table is dense"
    policy = getattr(layer, "dtype_policy", None)
    dtype = getattr(policy, "variable_dtype", None) or getattr(layer, "dtype", None)
    if dtype == "float64":
        return "its dtype is float64, and rows of a table are float32"
    return None


def matrix_of(table: EmbeddingVariable, num_rows: int, at_once: int = _IN_A_STEP, is_wanted: bool = True) -> np.ndarray:
    """All rows of a table of row numbers, in use or not: [n, D]; on a worker that wants none, [0, D]. Collective."""
    parts = []
    for start in range(0, num_rows, at_once):
        stop = min(start + at_once, num_rows) if is_wanted else start
        parts.append(table.sparse_read(tf.range(start, stop, dtype=table.key_dtype)).numpy())
    return np.concatenate(parts)


@on_servers.over_shards(on_servers.done)
def assign_matrix(table: EmbeddingVariable, matrix: np.ndarray, at_once: int = _IN_A_STEP) -> None:
    """Stores the rows of a matrix [n, D] that this worker owns, and reads no others. Not collective."""
    start, stop, step = table.placement.local_keys(len(matrix), table.rank, table.world_size)
    for first in range(start, stop, at_once * step):
        own = slice(first, min(first + at_once * step, stop), step)
        keys = np.arange(own.start, own.stop, step).astype(table.key_dtype.as_numpy_dtype)
        table.assign(keys, np.asarray(matrix[own]))


def _distinct(ids: Any, padding_key: int | None) -> tf.Tensor:
    """The ids that are looked up, each once."""
    if isinstance(ids, tf.RaggedTensor):
        ids = ids.flat_values
    elif isinstance(ids, tf.SparseTensor):
        ids = ids.values
    distinct = tf.unique(tf.reshape(ids, [-1])).y
    return distinct if padding_key is None else masks.kept(tf.not_equal(distinct, padding_key), distinct)[0]


def _flat(ids: Any) -> tuple[Any, Callable[[tf.Tensor], Any]]:
    """Ids that are not pooled, as keys of any shape, and what makes of their rows what the ids were."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.flat_values, ids.with_flat_values
    if isinstance(ids, tf.SparseTensor):
        shape = ids.shape
        ids = tf.sparse.to_dense(tf.sparse.reorder(ids), validate_indices=False)
        ids.set_shape(shape)
    return ids, lambda rows: rows


def _segments(ids: Any, dim: int, leaves_out_zero: bool) -> tuple[Any, int | None, Callable[[tf.Tensor], Any]]:
    """Ids in a form that lookups pool, one vector for each list of ids along the last axis.

    With the id that is left out, if lookups must do that, and what makes of the vectors what the ids were.
    """
    if isinstance(ids, tf.RaggedTensor):
        if ids.flat_values.shape.rank != 1:  # [..., None, n], even in n
            inner, padding_key, of_values = _segments(ids.flat_values, dim, leaves_out_zero)
            return inner, padding_key, lambda pooled: ids.with_flat_values(of_values(pooled))
        kept = tf.ragged.boolean_mask(ids, tf.not_equal(ids, 0)) if leaves_out_zero else ids
        *outer, splits = kept.nested_row_splits
        inner = tf.RaggedTensor.from_row_splits(kept.flat_values, splits, validate=False)
        if not outer:
            return inner, None, lambda pooled: pooled
        return inner, None, lambda pooled: tf.RaggedTensor.from_nested_row_splits(pooled, outer, validate=False)
    static = sizes(ids)
    if static is None or len(static) < 2:
        raise _no_last_axis(ids)
    if isinstance(ids, tf.SparseTensor):
        if leaves_out_zero:
            ids = tf.sparse.retain(ids, tf.not_equal(ids.values, 0))
        if len(static) == 2:
            return ids, None, lambda pooled: pooled
        if len(static) != 3 or static[1] is None:
            raise ValueError(
                "`inputs` must be a SparseTensor [B, n], or [B, F, n] whose F is known. Received: "
                + describe(ids)
                + "."
            )
        return ids, None, lambda pooled: tf.reshape(pooled, [-1, static[1], dim])

    def shaped(pooled: tf.Tensor) -> tf.Tensor:
        if len(static) > 2:
            pooled = tf.reshape(pooled, tf.concat([tf.shape(ids)[:-1], [dim]], 0))
        pooled.set_shape([*static[:-1], dim])
        return pooled

    flat = tf.reshape(ids, [-1, tf.shape(ids)[-1]]) if len(static) > 2 else ids
    return flat, 0 if leaves_out_zero else None, shaped


def _slot_num(ids: Any) -> int:
    static = sizes(ids) if isinstance(ids, tf.SparseTensor) else None
    return static[1] or 1 if static is not None and len(static) == 3 else 1


def _no_last_axis(ids: Any) -> ValueError:
    return ValueError(f"`inputs` must have an axis to combine, [..., n], with `combiner`. Received: {describe(ids)}.")
