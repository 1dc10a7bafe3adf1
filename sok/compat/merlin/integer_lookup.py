"""`IntegerLookup` of Merlin's distributed-embeddings: numbers any int64 keys in order of their first appearance."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base.types import Ids, Shape, TensorLike
from sok.table.options import whole_number

_NO_KEY = -1  # out of vocabulary, as in Merlin
_NAME = "vocabulary"


class IntegerLookupMixin:
    """Gives each int64 key a number: 1, 2, ... in order of first appearance, and 0 once there is no room.

    Exact: no two keys share a number, and a key keeps its own. Every worker numbers for itself, as in Merlin: give all
    workers one vocabulary (`set_weights`), or look up by hashed tables, which need no numbers.

    Args:
        max_tokens: how many keys get a number. Later ones are out of vocabulary: 0.
        use_gpu: taken. The vocabulary lies in the memory of the host either way.

    Call args:
        inputs: int64 of any shape, dense, RaggedTensor or SparseTensor. -1 is out of vocabulary, and gets no number;
            every other value is a key.

    Returns:
        Numbers, int64, in the form of the inputs.

    Raises:
        ValueError: inputs are not int64.

    Keras' files, `tf.train.Checkpoint` and `get_weights` keep the vocabulary: what is restored goes on where it was.

    Example:
        >>> import distributed_embeddings
        >>> layer = distributed_embeddings.IntegerLookup(3)
        >>> layer(tf.constant([[7, 9], [7, 5]], tf.int64)).numpy().tolist()
        [[1, 2], [1, 3]]
        >>> layer(tf.constant([11, 7, -1], tf.int64)).numpy().tolist(), layer.get_vocabulary()
        ([0, 1, 0], [-1, 7, 9, 5])
    """

    def __init__(self, max_tokens: int, use_gpu: bool = True, **kwargs: Any) -> None:
        super().__init__(**{"dtype": "int64", **kwargs})
        self.supports_jit = False
        self.max_tokens = whole_number("max_tokens", max_tokens)
        self.use_gpu = bool(use_gpu)
        with tf.init_scope(), tf.device("/CPU:0"):
            self._numbers = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def call(self, inputs: Ids | Sequence[Ids]) -> Any:
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(self._number(inputs.flat_values))
        if isinstance(inputs, tf.SparseTensor):
            return tf.SparseTensor(inputs.indices, self._number(inputs.values), inputs.dense_shape)
        return self._number(inputs)

    def __call__(self, inputs: Ids | Sequence[Ids], *args: Any, **kwargs: Any) -> Any:
        if isinstance(inputs, (list, tuple, int, np.ndarray)):
            inputs = tf.convert_to_tensor(inputs, None if isinstance(inputs, np.ndarray) else tf.int64)
        dtype = getattr(getattr(inputs, "dtype", None), "name", getattr(inputs, "dtype", None))
        if dtype != "int64":
            raise ValueError(f"`inputs` of layer '{self.name}' must be int64. Received: {dtype}.")  # type: ignore[attr-defined]
        return super().__call__(inputs, *args, **kwargs)  # type: ignore[misc]

    def compute_output_shape(self, input_shape: Shape) -> Any:
        return input_shape

    def _number(self, ids: tf.Tensor) -> tf.Tensor:
        keys = tf.reshape(ids, [-1])
        found = tf.ensure_shape(self._numbers.lookup(keys), keys.shape)
        unseen = tf.boolean_mask(keys, (found == 0) & (keys != _NO_KEY))
        size = self._numbers.size()

        def with_new() -> tf.Tensor:
            new = tf.unique(unseen).y[: self.max_tokens - size]
            inserted = self._numbers.insert(new, size + 1 + tf.range(tf.size(new, tf.int64)))
            with tf.control_dependencies([] if inserted is None else [inserted]):
                return tf.ensure_shape(self._numbers.lookup(keys), keys.shape)

        has_new = (tf.size(unseen) > 0) & (size < self.max_tokens)
        numbers = tf.reshape(tf.cond(has_new, with_new, lambda: found), tf.shape(ids))
        return tf.ensure_shape(numbers, ids.shape)

    def get_vocabulary(self) -> list[int]:
        """[-1, the key of number 1, that of number 2, ...]."""
        return [_NO_KEY, *self._keys().tolist()]

    def _keys(self) -> np.ndarray:
        keys, numbers = (part.numpy() for part in self._numbers.export())
        return keys[np.argsort(numbers)]

    def get_weights(self) -> list[np.ndarray]:
        """The keys, int64, in order of their numbers."""
        return [self._keys()]

    def set_weights(self, weights: Sequence[TensorLike]) -> None:
        """Numbers these keys 1, 2, ...; others have no number.

        Raises:
            ValueError: there are more than `max_tokens`, one comes twice, or one is -1.
        """
        keys = np.asarray(weights[0], np.int64).reshape(-1) if len(weights) == 1 else None
        if keys is None or len(keys) > self.max_tokens or len(np.unique(keys)) < len(keys) or _NO_KEY in keys:
            raise ValueError(
                f"`weights` must be one array of at most {self.max_tokens} different keys, without -1. "
                f"Received: {weights!r}."
            )
        self._numbers.remove(self._numbers.export()[0])
        self._numbers.insert(keys, np.arange(1, len(keys) + 1))

    def save_own_variables(self, store: MutableMapping[str, np.ndarray]) -> None:
        store[_NAME] = self._keys()

    def load_own_variables(self, store: MutableMapping[str, np.ndarray]) -> None:
        self.set_weights([np.asarray(store[_NAME])])

    def get_config(self) -> dict[str, Any]:
        own = {"max_tokens": self.max_tokens, "use_gpu": self.use_gpu}
        return {**super().get_config(), **own}  # type: ignore[misc]
