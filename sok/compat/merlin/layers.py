"""Merlin's layers for Keras 3 and tf_keras."""

from __future__ import annotations

import itertools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base.types import KerasInitializer, Shape, TensorLike
from sok.compat.merlin.integer_lookup import IntegerLookupMixin
from sok.compat.merlin.training import begin
from sok.job import context
from sok.keras import layers
from sok.keras.layers.embedding_collection import CHUNK
from sok.lookup.feature import ROWS, Feature
from sok.lookup.lookup import lookup_group
from sok.lookup.plain_variables import as_plain_variable
from sok.planning import planner
from sok.planning.merlin import DistEmbeddingStrategy
from sok.planning.where import Where
from sok.table.options import whole_number
from sok.table.placement import Placement, column_wise, data_parallel, row_wise, table_wise

# Of a configuration of Keras' own layer, what this one has no argument for.
_DROPPED = (
    "mask_zero",
    "input_length",
    "lora_rank",
    "lora_alpha",
    "sparse",
    "batch_input_shape",
    "quantization_config",
)
_NOT_HERE = ("table", "capacity", "sparse_as_dense_size", "regularize", *_DROPPED)


class EmbeddingMixin:
    """A matrix of rows that this worker has whole, and a lookup that may pool.

    `sok.Embedding` with Merlin's arguments, as an ordinary variable, whose gradients are averaged with the dense ones.
    `DistributedEmbedding` makes tables of such layers.

    Args:
        combiner: None, 'sum', 'mean' or 'sqrtn'.
        use_custom_kernel: taken. Lookups of float32 matrices are one native op.
        **kwargs: those of Keras' layer: name, dtype, trainable, ...

    Raises:
        As `sok.Embedding`.

    Example:
        >>> import distributed_embeddings
        >>> layer = distributed_embeddings.Embedding(10, 4, combiner="sum")
        >>> layer(tf.ragged.constant([[1, 2], []], dtype=tf.int64)).shape
        TensorShape([2, 4])
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: KerasInitializer = "uniform",
        embeddings_regularizer: object = None,
        activity_regularizer: object = None,
        embeddings_constraint: object = None,
        combiner: str | None = None,
        use_custom_kernel: bool = True,
        **kwargs: Any,
    ) -> None:
        terms = {
            "embeddings_regularizer": embeddings_regularizer,
            "activity_regularizer": activity_regularizer,
            "embeddings_constraint": embeddings_constraint,
        }
        for name, size in (("input_dim", input_dim), ("output_dim", output_dim)):
            whole_number(name, size)
        super().__init__(
            input_dim,  # type: ignore[call-arg]
            output_dim,
            embeddings_initializer,
            combiner=combiner,
            sparse_as_dense_size=input_dim,
            **{name: term for name, term in terms.items() if term is not None},
            **kwargs,
        )
        self.use_custom_kernel = bool(use_custom_kernel)

    def set_weights(self, weights: Sequence[TensorLike]) -> None:
        if not self.built:  # type: ignore[attr-defined]
            self.build(None)  # type: ignore[attr-defined]
        super().set_weights(weights)  # type: ignore[misc]

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()  # type: ignore[misc]
        kept = {name: value for name, value in config.items() if name not in _NOT_HERE}
        return {**kept, "use_custom_kernel": self.use_custom_kernel}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        return cls(**{name: value for name, value in config.items() if name not in _DROPPED})


class ConcatOneHotEmbeddingMixin:
    """Many small tables of one width in one matrix: column f of the ids is looked up in table f.

    Args:
        feature_sizes: rows of each table.
        embedding_width: D.

    Call args:
        inputs: integers [B, F], of column f in [0, feature_sizes[f]).

    Returns:
        [B, F, D].

    Raises:
        ValueError: inputs are not [B, F].
        tf.errors.InvalidArgumentError: an id is outside of the matrix.

    Example:
        >>> import distributed_embeddings
        >>> layer = distributed_embeddings.ConcatOneHotEmbedding([10, 5], 4)
        >>> layer(tf.constant([[9, 4], [0, 0]])).shape
        TensorShape([2, 2, 4])
    """

    def __init__(self, feature_sizes: Sequence[int], embedding_width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.feature_sizes = [whole_number("feature_sizes", size) for size in feature_sizes]
        self.embedding_width = whole_number("embedding_width", embedding_width)
        self._starts = np.cumsum([0, *self.feature_sizes[:-1]])
        shape = (sum(self.feature_sizes), self.embedding_width)
        self.params = self.add_weight(  # type: ignore[attr-defined]
            name="params", shape=shape, dtype="float32", initializer="uniform"
        )

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        if inputs.shape.rank != 2 or inputs.shape[1] != len(self.feature_sizes):
            raise ValueError(f"`inputs` must be [B, {len(self.feature_sizes)}]. Received: shape {inputs.shape}.")
        ids = tf.cast(inputs, tf.int64) + self._starts
        return lookup_group([Feature(as_plain_variable(self.params), ids, ROWS)])[0]

    def compute_output_shape(self, input_shape: Shape) -> tuple[int | None, int, int]:
        return (input_shape[0], len(self.feature_sizes), self.embedding_width)

    def get_config(self) -> dict[str, Any]:
        own = {"feature_sizes": self.feature_sizes, "embedding_width": self.embedding_width}
        return {**super().get_config(), **own}  # type: ignore[misc]


class DistributedEmbeddingMixin:
    """Embedding layers, each where Merlin's strategy says: a `sok.parallel.EmbeddingCollection` with its arguments.

    Args:
        embeddings: layers of which the configuration is taken; see `sok.parallel.EmbeddingCollection`.
        strategy: 'basic', 'memory_balanced' or 'memory_optimized': Merlin's. 'auto': `sok.plan`, by what a step costs.
        column_slice_threshold, row_slice_threshold, data_parallel_threshold, gpu_embedding_size: numbers of elements;
            see `DistEmbeddingStrategy`. On one worker no table is cut into rows or copied. A table that some rank's GPU
            has no room for is in the memory of the host on all. 'auto' takes the last alone: costs decide the others.
        dp_input: True: each worker brings its own samples, of all inputs. False: the samples of all workers, of the
            inputs `strategy.input_ids_list[rank]` ('auto': `inputs_of_ranks[rank]`), whose tables it holds.
        input_table_map: the layer of each input.
        plan: of 'auto': arguments for `sok.plan`: batch, machine, optimizer, pin, ...; and what it is to know of the
            model: `hotness`, ids a sample of each input; `distinct`, of each table; `dense_parameters`.
        **kwargs: `name`, `dtype`, `trainable`.

    Call args:
        inputs: a list of ids, one for each input.

    Returns:
        A list of outputs, in the order of inputs.

    Attributes:
        strategy: the `DistEmbeddingStrategy`; with 'auto' None.
        plan: the `sok.planning.planner.Plan` of 'auto', else None.

    Raises:
        ValueError: an unknown strategy; a threshold with 'auto', or `plan` without; as
            `sok.parallel.EmbeddingCollection`.

    Collective. `get_weights(all_ranks=False)` is, too: rank 0 gets all matrices, the others an empty list.

    Example:
        >>> import distributed_embeddings
        >>> tables = [distributed_embeddings.Embedding(100, 4, combiner="sum"), tf.keras.layers.Embedding(50, 8)]
        >>> layer = distributed_embeddings.DistributedEmbedding(tables, strategy="memory_balanced")
        >>> [tuple(out.shape) for out in layer([tf.constant([[1, 2]]), tf.constant([3])])]
        [(1, 4), (1, 8)]
    """

    _keras: Any

    def __init__(
        self,
        embeddings: Sequence[Any],
        strategy: str = "basic",
        column_slice_threshold: int | None = None,
        row_slice_threshold: int | None = None,
        dp_input: bool = True,
        input_table_map: Sequence[int] | None = None,
        data_parallel_threshold: int | None = None,
        gpu_embedding_size: int | None = None,
        plan: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        begin()
        self._merlin = {
            "strategy": strategy,
            "column_slice_threshold": column_slice_threshold,
            "row_slice_threshold": row_slice_threshold,
            "dp_input": bool(dp_input),
            "input_table_map": None if input_table_map is None else list(input_table_map),
            "data_parallel_threshold": data_parallel_threshold,
            "gpu_embedding_size": gpu_embedding_size,
            "plan": None if plan is None else dict(plan),
        }
        self._given = list(embeddings)
        self._refuse_what_is_not_asked()
        made, found = None, None
        if strategy == "auto":
            found, placements = _planned(self._given, input_table_map, {"dp_input": bool(dp_input), **(plan or {})})
            on_host = _left_to_hosts(self._given, [table.where for table in found.tables], gpu_embedding_size)
        else:
            size = context.size()
            made = DistEmbeddingStrategy(
                self._given,
                size,
                strategy,
                input_table_map,
                column_slice_threshold,
                row_slice_threshold if size > 1 and dp_input else None,
                data_parallel_threshold if size > 1 and dp_input else None,
                gpu_embedding_size,
            )
            placements = placements_of(made)
            on_host = [made.is_offloaded(table) for table in range(len(self._given))]
        super().__init__(self._given, input_table_map, placements, dp_input, on_host, **kwargs)  # type: ignore[call-arg]
        if made is not None and not dp_input:
            self.inputs_of_ranks = made.input_ids_list
        self.strategy, self.plan = made, found

    def _refuse_what_is_not_asked(self) -> None:
        is_auto = self._merlin["strategy"] == "auto"
        thresholds = ("column_slice_threshold", "row_slice_threshold", "data_parallel_threshold")
        for name in thresholds if is_auto else ("plan",):
            if self._merlin[name] is not None:
                what = "'auto' decides by what a step costs" if is_auto else "Merlin's strategies ask for no plan"
                remedy = "forbid or pin kinds with plan={'forbid': [...]}" if is_auto else "set strategy='auto'"
                raise ValueError(
                    f"`{name}` has no effect here: {what}. Leave it out, or {remedy}. {name}={self._merlin[name]}"
                )

    def get_weights(self, all_ranks: bool = False, chunk: int = CHUNK) -> list[Any]:
        """As that of `sok.parallel.EmbeddingCollection`, but rank 0 alone gets matrices by default. Collective."""
        return super().get_weights(all_ranks, chunk)  # type: ignore[misc]

    def get_config(self) -> dict[str, Any]:
        serialize = self._keras.layers.serialize
        config = super().get_config()  # type: ignore[misc]
        return {**config, **self._merlin, "embeddings": [serialize(layer) for layer in self._given]}


def placements_of(strategy: DistEmbeddingStrategy) -> list[Placement]:
    """What Merlin's plan says of each table, as placements of ours."""
    copied, _, rows = strategy.table_groups
    found = []
    for table in range(len(strategy.global_configs)):
        if table in copied or table in rows:
            found.append(data_parallel() if table in copied else row_wise())
            continue
        pieces = strategy.columns_of(table)
        owners, widths = [rank for rank, _, _ in pieces], [stop - start for _, start, stop in pieces]
        found.append(table_wise(owners[0]) if len(pieces) == 1 else column_wise(widths, owners))
    return found


def _planned(embeddings: Sequence[Any], map_of: Sequence[int] | None, arguments: Mapping[str, Any]) -> Any:
    """The plan of `sok.plan`, and the placement of each table.

    Beside the arguments of `sok.plan`: `hotness`, ids a sample of each input (1); `distinct`, of each table; and
    `dense_parameters`.
    """
    inputs = list(range(len(embeddings)) if map_of is None else map_of)
    arguments = dict(arguments)
    hotness = arguments.pop("hotness", [1] * len(inputs))
    distinct = arguments.pop("distinct", [None] * len(embeddings))
    model = {"dense_parameters": arguments.pop("dense_parameters", 0), "tables": []}
    for i, (layer, share) in enumerate(zip(embeddings, distinct, strict=True)):
        config = layer.get_config()
        model["tables"].append(
            {
                **{"name": f"table_{i}", "rows": config["input_dim"], "dim": config["output_dim"], "distinct": share},
                "hotness": [ids for ids, table in zip(hotness, inputs, strict=True) if table == i],
                "pooled": config.get("combiner") is not None,
            }
        )
    found = planner.plan(model, workers=context.size(), **arguments)
    return found, [table.where.placement() for table in found.tables]


def _left_to_hosts(embeddings: Sequence[Any], places: Sequence[Where], limit: int | None) -> list[bool]:
    """Whether some rank leaves each table to its host: Merlin's rule, of all that is no copy.

    Of the tables that a rank holds, or their parts, the smallest come first; those from the first on with which they
    have more than `limit` elements are left.
    """
    configs = [layer.get_config() for layer in embeddings]
    elements = [config["input_dim"] * config["output_dim"] for config in configs]
    left: set[int] = set()
    for rank in range(context.size()):
        held = [0.0 if where.kind == "data_parallel" else where.share_of(rank, context.size()) for where in places]
        parts = sorted(
            (share * all_of, i) for i, (share, all_of) in enumerate(zip(held, elements, strict=True)) if share
        )
        sums = itertools.accumulate(part for part, _ in parts)
        left |= {i for (_, i), total in zip(parts, sums, strict=True) if limit is not None and total > limit}
    return [i in left for i in range(len(places))]


_made: dict[type, types.SimpleNamespace] = {}


def for_keras(keras: types.ModuleType) -> types.SimpleNamespace:
    """Gives Merlin's layers as classes of `keras`: Keras 3, or an explicitly imported `tf_keras`.

    Returns:
        A namespace with `Embedding`, `ConcatOneHotEmbedding`, `IntegerLookup` and `DistributedEmbedding`, the same
        classes in every call. `distributed_embeddings` has those for `tf.keras`.

    Example:
        >>> import tf_keras
        >>> issubclass(for_keras(tf_keras).DistributedEmbedding, tf_keras.layers.Layer)
        True
    """
    layer = keras.layers.Layer
    if layer not in _made:
        ours = layers.for_keras(keras)
        bases = {
            "Embedding": (EmbeddingMixin, ours.Embedding),
            "ConcatOneHotEmbedding": (ConcatOneHotEmbeddingMixin, layer),
            "IntegerLookup": (IntegerLookupMixin, layer),
            "DistributedEmbedding": (DistributedEmbeddingMixin, ours.EmbeddingCollection),
        }
        register = keras.utils.register_keras_serializable(package="distributed_embeddings")
        _made[layer] = types.SimpleNamespace()
        for name, of_class in bases.items():
            own = {"__module__": __name__, "__doc__": of_class[0].__doc__}
            setattr(_made[layer], name, register(type(name, of_class, own)))
    return _made[layer]


Embedding = for_keras(tf.keras).Embedding
ConcatOneHotEmbedding = for_keras(tf.keras).ConcatOneHotEmbedding
IntegerLookup = for_keras(tf.keras).IntegerLookup
DistributedEmbedding = for_keras(tf.keras).DistributedEmbedding
