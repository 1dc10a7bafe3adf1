"""What the embedding layers share: the table, Keras' hooks, configuration. A mixin, so that it fits Keras 3 and tf_keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok.table import EmbeddingVariable, check_key_dtype

_COMBINERS = ("sum", "mean", "sqrtn")


def check_combiner(combiner: Any) -> str:
    """'sum', 'mean' or 'sqrtn', given in any capitalisation."""
    lowered = combiner.lower() if isinstance(combiner, str) else combiner
    if lowered not in _COMBINERS:
        raise ValueError(f"`combiner` must be 'sum', 'mean' or 'sqrtn'. Received: {combiner!r}.")
    return lowered


def check_positive(**values: Any) -> None:
    """Each value is a whole number of at least 1, else `ValueError`."""
    for name, value in values.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
            raise ValueError(f"`{name}` must be a whole number of at least 1. Received: {value!r}.")


class EmbeddingLayerMixin:
    """Set up by `_init_table` in a layer's constructor; stands before Keras' Layer among its bases."""

    def _init_table(
        self,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        use_hashtable: bool,
        key_dtype: Any,
        embedding_initializer: Any,
    ) -> None:
        check_positive(
            max_vocabulary_size_per_gpu=max_vocabulary_size_per_gpu,
            embedding_vec_size=embedding_vec_size,
            slot_num=slot_num,
        )
        # XLA has no kernels of ours; Keras decides in compile(), and only looks at this flag if it was set here.
        self.supports_jit = False
        self._table_options = {
            "max_vocabulary_size_per_gpu": int(max_vocabulary_size_per_gpu),
            "embedding_vec_size": int(embedding_vec_size),
            "slot_num": int(slot_num),
            "use_hashtable": bool(use_hashtable),
            "key_dtype": check_key_dtype(key_dtype).name,
            "embedding_initializer": embedding_initializer,
        }
        self.slot_num = int(slot_num)
        self._table: EmbeddingVariable | None = None

    @property
    def embedding_variable(self) -> EmbeddingVariable:
        """The layer's table. Asking makes it, if no input has yet."""
        if self._table is None:
            options = self._table_options
            table = EmbeddingVariable(
                options["embedding_vec_size"],
                options["max_vocabulary_size_per_gpu"],
                name=self.name,
                key_dtype=options["key_dtype"],
                initializer=options["embedding_initializer"],
                hashed=options["use_hashtable"],
                trainable=self.trainable,
            )
            # Keras 3 does not find variables that are not its own; tf_keras finds the attribute by itself.
            if hasattr(self, "_track_variable"):
                self._track_variable(table)
            self._table = table
        return self._table

    @property
    def var(self) -> EmbeddingVariable:
        """SOK's other name for `embedding_variable`."""
        return self.embedding_variable

    def build(self, input_shape: Any = None) -> None:
        self.embedding_variable  # noqa: B018 (made here)
        self.built = True

    def save_own_variables(self, store: Any) -> None:
        self.embedding_variable.warn_not_saved()

    def load_own_variables(self, store: Any) -> None:
        self.embedding_variable.warn_not_saved()

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config.update(self._table_options)
        initializer = config["embedding_initializer"]
        if initializer is not None and not isinstance(initializer, str):
            config["embedding_initializer"] = tf.keras.initializers.serialize(initializer)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        config = dict(config)
        if isinstance(config.get("embedding_initializer"), dict):
            config["embedding_initializer"] = tf.keras.initializers.deserialize(config["embedding_initializer"])
        return cls(**config)

    @staticmethod
    def _inserts(training: Any) -> Any:
        # Outside fit, evaluate and predict Keras says nothing: a bare call in a custom loop trains, as in SOK.
        return True if training is None else training if tf.is_tensor(training) else bool(training)

    def _to_compute_dtype(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.cast(rows, self.compute_dtype or tf.float32)
