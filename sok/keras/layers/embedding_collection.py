"""Many embedding layers as one: each table where it belongs, and all of them looked up together."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base.types import Condition, Ids, Shape
from sok.job import communication, context
from sok.keras.layers.base import TableLayerMixin, _is_symbol
from sok.keras.layers.embedding import Answer, EmbeddingMixin, assign_matrix, matrix_of
from sok.lookup import exchange
from sok.lookup.feature import ROWS, Feature
from sok.lookup.inputs import describe
from sok.lookup.lookup import lookup_by_device
from sok.lookup.whole_batch import collective_name, look_up_whole_batch
from sok.table.options import TableOptions, whole_number
from sok.table.placement import Placement
from sok.table.state import by_device

_KEPT = (
    *("name", "trainable", "dtype", "input_dim", "output_dim", "embeddings_initializer", "embeddings_regularizer"),
    *("embeddings_constraint", "activity_regularizer", "mask_zero", "input_length", "combiner", "capacity"),
    *("regularize", "sparse_as_dense_size", "table"),
)
CHUNK = 2**27
"""Numbers that `get_weights` and `set_weights` handle at once."""


class EmbeddingCollectionMixin(TableLayerMixin):
    """Looks up many features in many tables, each placed where it belongs, in one exchange.

    The outputs are those of the layers it is made of, called one by one; placements and the number of workers change
    no value. All tables together make two collectives forward and one backward.

    Args:
        embeddings: layers, of which the configuration is taken: `sok.Embedding`, Keras' own `Embedding`, which become
            tables; and any others, of which each worker has a copy, whose gradients are averaged with the dense ones.
            They themselves are neither built nor trained.
        input_table_map: the layer of each input, by its place in `embeddings`; several inputs may share one. None:
            input i is looked up in layer i.
        placements: a `sok.Placement` of each layer, or None for those that stay as they are. With
            `sok.data_parallel()` a layer of row numbers is an ordinary variable.
        on_host: of each layer whether its table lies in the memory of the host, beside tables on a GPU
            (`TableOptions`). Tables of two devices make one exchange for each of these. None: as the layers say.
        dp_input: True: each worker brings its own samples. False: it brings the ids of the samples of all workers, B,
            but only for the inputs `inputs_of_ranks[rank]`, whose tables it holds, and gets the vectors of B / R of
            them, from r B / R on. Then no keys travel: one collective forward, one backward. For layers of row numbers
            whose tables are whole on one worker or in columns, and which give a vector a sample: with a `combiner`, or
            ids [B].
        **kwargs: `name`, `dtype`, `trainable`.

    Call args:
        inputs: a list of ids, one for each input, as its layer takes them: of any rank, dense, ragged or sparse.
        training: whether unseen ids get a row; see `sok.Embedding`.

    Returns:
        A list: for each input what its layer gives, in the compute dtype.

    Raises:
        ValueError: the map or `placements` do not fit; another number of inputs; as `sok.Embedding`.
        tf.errors.InvalidArgumentError: an id is no row number; on every worker.

    Collective, if one of its layers has a table.

    Example:
        >>> import sok, tensorflow as tf
        >>> layers = [sok.Embedding(1000, 4, combiner="sum"), sok.Embedding(50, 2)]
        >>> collection = sok.parallel.EmbeddingCollection(layers, [0, 0, 1], [sok.table_wise(0), sok.data_parallel()])
        >>> outputs = collection([tf.constant([[1, 2], [3, 4]]), tf.ragged.constant([[7], []]), tf.constant([5, 6])])
        >>> [tuple(output.shape) for output in outputs]
        [(2, 4), (2, 4), (2, 2)]
    """

    _classes: Any = None  # the layers for the Keras that this class is made for
    _keras: Any = None

    def __init__(
        self,
        embeddings: Sequence[Any],
        input_table_map: Sequence[int] | None = None,
        placements: Sequence[Placement | None] | None = None,
        dp_input: bool = True,
        on_host: Sequence[bool] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_jit = False
        self.autocast = self._autocast = False
        embeddings = list(embeddings)
        table_of = range(len(embeddings)) if input_table_map is None else input_table_map
        self.input_table_map = [whole_number("input_table_map", table, len(embeddings) - 1, 0) for table in table_of]
        chosen = [None] * len(embeddings) if placements is None else list(placements)
        hosted = [False] * len(embeddings) if on_host is None else [bool(one) for one in on_host]
        for argument, given in (("placements", chosen), ("on_host", hosted)):
            if len(given) != len(embeddings):
                raise ValueError(
                    f"`{argument}` must have one for each of the {len(embeddings)} layers. Received: {len(given)}."
                )
        self.embeddings = [self._of(*one) for one in zip(embeddings, chosen, hosted, strict=True)]
        self.dp_input = bool(dp_input)
        self.inputs_of_ranks: list[list[int]] = [] if self.dp_input else self._inputs_of_ranks()

    def _of(self, layer: Any, placement: Placement | None, is_hosted: bool) -> Any:
        """The layer that stands for one of those given."""
        keras_embedding = self._keras.layers.Embedding
        is_plain = isinstance(layer, keras_embedding) and type(layer).call is keras_embedding.call
        is_other = not is_plain and not isinstance(layer, EmbeddingMixin)
        if is_hosted and (is_other or (placement is not None and placement.is_copied)):
            raise ValueError(
                f"Layer '{layer.name}' must have a table, and no copies, to be on_host. It has: {placement}."
            )
        if is_other:
            return type(layer).from_config(layer.get_config())
        config = {name: value for name, value in layer.get_config().items() if name in _KEPT}
        options = config.get("table") or {}
        options = TableOptions.from_config(options, self._keras_initializers) if isinstance(options, dict) else options
        if placement is not None:
            options = dataclasses.replace(options, placement=placement)
            is_copy = placement.is_copied and config["input_dim"] is not None
            config["sparse_as_dense_size"] = config["input_dim"] if is_copy else 0
        if is_hosted:
            options, config["sparse_as_dense_size"] = dataclasses.replace(options, on_host=True), 0
        return self._classes.Embedding.from_config({**config, "table": options})

    def _inputs_of_ranks(self) -> list[list[int]]:
        """Of each rank the inputs whose tables it holds, table after table."""
        held: list[list[int]] = [[] for _ in range(context.size())]
        for table, layer in enumerate(self.embeddings):
            inputs = [i for i, of_input in enumerate(self.input_table_map) if of_input == table]
            for rank, _ in _pieces(layer):
                held[rank] += inputs
        return held

    @property
    def embedding_variable(self) -> Any:
        """Not there: each of `embeddings` has its own."""
        raise AttributeError(f"Layer '{self.name}' has a table for each of its `embeddings`.")

    var = embedding_variable

    def _tables_asked(self) -> list[Any]:
        """Those that are asked first, where peers wait: of one device."""
        asked = [self.embeddings[table] for table in dict.fromkeys(self.input_table_map)]
        found = [table for layer in asked if isinstance(layer, EmbeddingMixin) for table in layer._tables_asked()]
        return [found[place] for place in next(iter(by_device(found).values()), [])]

    def build(self, input_shape: Shape | None = None) -> None:
        for layer in self.embeddings:
            if not layer.built:
                layer.build(None if isinstance(layer, EmbeddingMixin) else (None,))
        self.built = True

    def __call__(self, inputs: Ids, *args: Any, **kwargs: Any) -> Any:
        if not self.built:
            self.build(None)
        is_symbolic = any(_is_symbol(part) for part in tf.nest.flatten(inputs))
        asks_peers = self.dp_input and not is_symbolic and context.size() > 1
        with exchange.told_to_peers(*(self._tables_asked() if asks_peers else [])):
            inputs = self._checked(inputs)
            return super(TableLayerMixin, self).__call__(inputs, *args, **kwargs)

    def _checked(self, inputs: Any) -> list[Any]:
        mine = range(len(self.input_table_map)) if self.dp_input else self.inputs_of_ranks[context.rank()]
        if not isinstance(inputs, (list, tuple)) or len(inputs) != len(mine):
            came = len(inputs) if isinstance(inputs, (list, tuple)) else repr(inputs)
            raise ValueError(
                f"`inputs` of layer '{self.name}' must be a list of {len(mine)}, one for each input. Received: {came}."
            )
        layers = [self.embeddings[self.input_table_map[i]] for i in mine]
        return [self._checked_one(layer, ids) for layer, ids in zip(layers, inputs, strict=True)]

    def _checked_one(self, layer: Any, ids: Any) -> Any:
        if not isinstance(layer, EmbeddingMixin):
            return ids
        if isinstance(ids, (list, tuple, np.ndarray)):
            return layer._from_values(ids)
        layer._check_ids(ids)
        if _is_symbol(ids):
            layer._check_symbol(ids)
        return ids

    def call(self, inputs: Sequence[Ids], training: Condition | None = None) -> list[Any]:
        inserts = EmbeddingMixin._inserts(training)
        if not self.dp_input:
            return self._of_the_whole_batch(inputs, inserts)
        layers = [self.embeddings[table] for table in self.input_table_map]
        asked: list[Feature] = []
        answers: list[tuple[Answer, int, int]] = []
        for layer, ids in zip(layers, inputs, strict=True):
            of_layer, answer = _asks(layer, ids)
            answers.append((answer, len(asked), len(asked) + len(of_layer)))
            asked += of_layer
        found = lookup_by_device(asked, inserts) if asked else []
        return [self._to_compute_dtype(answer(found[first:stop])) for answer, first, stop in answers]

    def _of_the_whole_batch(self, inputs: Sequence[Ids], inserts: Any) -> list[Any]:
        rank, asked = context.rank(), []
        for i, ids in zip(self.inputs_of_ranks[rank], inputs, strict=True):
            layer = self.embeddings[self.input_table_map[i]]
            (feature,), _ = layer.asks(layer._as_ids(ids))
            if feature.combiner == ROWS and feature.ids.shape.rank != 1:
                raise ValueError(
                    f"Input {i} of layer '{self.name}' must have shape [B], or its layer a `combiner`, with "
                    f"dp_input=False. Received: {describe(ids)}."
                )
            asked.append(feature)
        pieces = [dict(_pieces(layer)) for layer in self.embeddings]  # of each the width that a rank has
        of_ranks = [[pieces[self.input_table_map[i]][of] for i in held] for of, held in enumerate(self.inputs_of_ranks)]
        widths = [sum(held) for held in of_ranks]
        tables = [self.embeddings[table].embedding_variable for table in dict.fromkeys(self.input_table_map)]
        shared = (context.get_transport(), collective_name(self.name), tables)
        found = look_up_whole_batch(asked, inserts, widths, *shared)
        # One op: the gradient of each slice by itself would be as wide as all of them.
        columns = iter(tf.split(found, [width for held in of_ranks for width in held], 1))
        of_input = {(of, i): next(columns) for of, held in enumerate(self.inputs_of_ranks) for i in held}
        outputs = []
        for i, table in enumerate(self.input_table_map):
            parts = [of_input[of, i] for of in pieces[table]]
            outputs.append(self._to_compute_dtype(parts[0] if len(parts) == 1 else tf.concat(parts, 1)))
        return outputs

    def compute_output_shape(self, input_shape: Shape) -> list[Any]:
        layers = [self.embeddings[table] for table in self.input_table_map]
        return [self._shape_of(layer, shape) for layer, shape in zip(layers, input_shape, strict=True)]

    def _shape_of(self, layer: Any, shape: Any) -> Any:
        try:
            return layer.compute_output_shape(shape)
        except NotImplementedError:  # Keras 3, of a layer that does not say so
            return layer.compute_output_spec(self._keras.KerasTensor(shape, "int64")).shape

    def get_weights(self, all_ranks: bool = True, chunk: int = CHUNK) -> list[Any]:
        """The whole matrix of each layer, in their order, wherever its rows lie: [n, D].

        Args:
            all_ranks: False: rank 0 gets them, and the others an empty list.
            chunk: numbers that travel at once.

        Collective.
        """
        self.build(None)
        is_wanted = all_ranks or context.rank() == 0
        found: list[Any] = []
        for layer in self.embeddings:
            if isinstance(layer, EmbeddingMixin) and not layer._is_plain and layer.input_dim is not None:
                rows = max(1, chunk // layer.output_dim)
                found.append(matrix_of(layer.embedding_variable, layer.input_dim, rows, is_wanted))
            else:
                found += layer.get_weights()
        return found if is_wanted else []

    def set_weights(self, weights: Sequence[Any], chunk: int = CHUNK, use_lock: bool = False) -> None:
        """Stores whole matrices; each worker keeps what it holds of them.

        Args:
            weights: an array [n, D] for each layer, in their order, or the path of a `.npy` file, of which a worker
                reads no more than its own rows.
            chunk: numbers that are stored at once.
            use_lock: one worker after the other, so that they do not read files all at once. Collective, then; else
                it is not.

        Raises:
            ValueError: another number of arrays, or one of another shape; nothing has changed.
        """
        self.build(None)
        arrays = [np.load(one, mmap_mode="r") if isinstance(one, str) or hasattr(one, "__fspath__") else one
                  for one in weights]  # fmt: skip
        needed = [1 if isinstance(layer, EmbeddingMixin) else len(layer.get_weights()) for layer in self.embeddings]
        if len(arrays) != sum(needed):
            raise ValueError(
                f"You called `set_weights(weights)` on layer '{self.name}' with a weight list of length "
                f"{len(arrays)}, but the layer was expecting {sum(needed)} weights."
            )
        of_layers, first = [], 0
        for count in needed:
            of_layers.append(arrays[first : first + count])
            first += count
        for layer, own in zip(self.embeddings, of_layers, strict=True):
            self._check_shapes(layer, own)
        for rank in range(context.size()) if use_lock else [context.rank()]:
            if rank == context.rank():
                for layer, own in zip(self.embeddings, of_layers, strict=True):
                    _assign(layer, own, chunk)
            if use_lock:
                communication.barrier()

    @staticmethod
    def _check_shapes(layer: Any, arrays: Sequence[Any]) -> None:
        if not isinstance(layer, EmbeddingMixin) or layer.input_dim is None:
            return
        wanted = (layer.input_dim, layer.output_dim)
        if tuple(np.shape(arrays[0])) != wanted:
            raise ValueError(
                f"Weights of layer '{layer.name}' must have shape {wanted}. Received: shape {np.shape(arrays[0])}."
            )

    def save_own_variables(self, store: MutableMapping[str, np.ndarray]) -> None:
        """Nothing: the layers save theirs."""

    def load_own_variables(self, store: MutableMapping[str, np.ndarray]) -> None:
        """Nothing: the layers load theirs."""

    def get_config(self) -> dict[str, Any]:
        serialize = self._keras.layers.serialize
        own: dict[str, Any] = {"dp_input": self.dp_input}
        own |= {"embeddings": [serialize(layer) for layer in self.embeddings], "input_table_map": self.input_table_map}
        return {**super().get_config(), **own}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        layers = [cls._keras.layers.deserialize(one) for one in config["embeddings"]]
        return cls(**{**config, "embeddings": layers})


def _pieces(layer: Any) -> list[tuple[int, int]]:
    """The rank and the columns of each piece of a layer's table, from the left."""
    has_table = isinstance(layer, EmbeddingMixin) and not layer._is_plain and layer.input_dim is not None
    placement = layer._options.placement if isinstance(layer, EmbeddingMixin) else None
    if not has_table or placement is None or not (placement.cuts_rows or placement.owner is not None):
        raise ValueError(
            f"Layer '{layer.name}' must have row numbers, and a table that is whole on one worker or in columns, with "
            f"dp_input=False. It has: {placement}."
        )
    if layer.embeddings_regularizer is not None:
        raise ValueError(f"Layer '{layer.name}' must have no regularizer with dp_input=False.")
    placement.check(context.size(), False, layer.output_dim)
    return [(part.ranks[0], part.dim) for part in placement.parts(layer.output_dim, context.size())]


def _asks(layer: Any, ids: Any) -> tuple[list[Feature], Answer]:
    """What the layer looks up in a table or variable, and what it makes of that; of others nothing, and its output."""
    if isinstance(layer, EmbeddingMixin):
        return layer.asks(layer._as_ids(ids))
    return [], lambda _: layer(ids)


def _assign(layer: Any, arrays: Sequence[Any], chunk: int) -> None:
    if isinstance(layer, EmbeddingMixin) and not layer._is_plain and layer.input_dim is not None:
        assign_matrix(layer.embedding_variable, arrays[0], max(1, chunk // layer.output_dim))
    else:
        layer.set_weights([np.asarray(array) for array in arrays])
