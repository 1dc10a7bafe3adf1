"""Ids of several features, pooled per feature."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from sok.base.types import Condition, DTypeLike, Ids, Shape
from sok.keras.layers.base import EmbeddingLayerMixin
from sok.lookup.feature import Feature, check_combiner
from sok.lookup.inputs import check_symbol, static_batch
from sok.lookup.lookup import lookup_group
from sok.table.initializers import Initializer
from sok.table.options import whole_number


class DistributedEmbeddingMixin(EmbeddingLayerMixin):
    """Looks up the ids of `slot_num` features per sample and pools the rows of each feature into one vector.

    The table is sharded over the workers of the job: the row of `key` lives on rank `key % sok.size()`.
    Equal to `tf.nn.embedding_lookup_sparse` per feature; an empty feature gives zeros.

    Args:
        combiner: 'sum', 'mean' or 'sqrtn', in any capitalisation. Mean divides by the number of ids of the feature.
        max_vocabulary_size_per_gpu: rows that each worker's shard may hold.
        embedding_vec_size: length D of a row.
        slot_num: features F per sample.
        max_nnz: ids that one feature of one sample may have.
        max_feature_num: ids that one sample may have; 1 (the default) stands for slot_num * max_nnz.
        use_hashtable: True: any id. False: ids are row numbers, 0 <= id < max_vocabulary_size_per_gpu * sok.size().
        key_dtype: int64 (default), int32, uint32 or uint64. Every value is a legal id.
        embedding_initializer: None (uniform in [-0.05, 0.05]), a Keras name, a Keras initializer or `f(shape, dtype)`.
        padding_key: ids of dense inputs that equal it count as absent. None: all ids count.
        **kwargs: `distinct_slots`: True gives each slot rows of its own: an id and its slot together are the key,
            exactly (id * slot_num + slot, which must fit into the key dtype). False: equal ids share a row, whatever
            their slots. None (default): as False, and if equal ids come in half of the slots in the first training
            batches (of 32 samples or more, eagerly or in fit), a warning asks whether they are to. `table`, a
            `sok.TableOptions`: all properties of the table, instead of use_hashtable, key_dtype and
            embedding_initializer; or two of these properties, `exchange_dtype` and `placement`; and the arguments of
            the Keras layer (name, trainable, dtype, ...).

    Call args:
        inputs: integers, as one of
            SparseTensor with dense_shape [B * F, max_nnz] (SOK's form: row b * F + f) or [B, F, n].
            The last index is ignored, as in TensorFlow: an id counts wherever it is in its row;
            RaggedTensor [B, F, None] or [B * F, None];
            dense [B, F, n], [B, F] (one id each), or with one feature [B, n].
        training: whether unseen ids get a row; without, they read as the row they would get. None: what Keras says
            (True in fit, False in evaluate and predict), and True where it says nothing, as in a custom loop. **Keras 3
            tells the layers of a model only if the model's own `call` takes `training`**: `model(ids, training=False)`
            needs that, and so do a `test_step` or `predict_step` of your own. Without it Keras' own evaluate and
            predict are still recognized.
        weights: one float per id in the form of `inputs` and at the same places: tf.nn's rule,
            mean = sum(w e) / sum(w), sqrtn = sum(w e) / sqrt(sum(w^2)).

    Returns:
        [B, F, D] in the layer's compute dtype. B is this worker's batch; workers' batches may differ, or be empty.

    Raises:
        ValueError: an argument or the form of the input is not one of these.
        tf.errors.InvalidArgumentError: too many ids in a feature or sample, or an id outside an identity table; on
            every worker.
        tf.errors.ResourceExhaustedError: a shard is full; on every worker. That shard has stored nothing of the step.

    Collective: every worker calls it in every step. Two collectives forward, one backward. In a bare custom loop a row
    receives the sum of the gradients of all workers: see `sok.DistributedGradientTape`.

    Example:
        >>> import tensorflow as tf
        >>> import sok
        >>> layer = sok.DistributedEmbedding("mean", 1000, 4, slot_num=2, max_nnz=3, embedding_initializer="ones")
        >>> layer(tf.ragged.constant([[[1, 2], []], [[3], [4, 5, 6]]], dtype=tf.int64))[:, :, 0].numpy().tolist()
        [[1.0, 0.0], [1.0, 1.0]]

    Source: `DistributedEmbedding` of SOK v1; differences are listed in docs/migrating.md.
    """

    def __init__(
        self,
        combiner: str,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        max_nnz: int,
        max_feature_num: int = 1,
        use_hashtable: bool = True,
        key_dtype: DTypeLike | None = None,
        embedding_initializer: Initializer | None = None,
        padding_key: int | None = None,
        **kwargs: Any,
    ) -> None:
        sizes = (max_vocabulary_size_per_gpu, embedding_vec_size, slot_num)
        super().__init__(sizes, use_hashtable, key_dtype, embedding_initializer, **kwargs)
        self.max_nnz = whole_number("max_nnz", max_nnz)
        self.max_feature_num = whole_number("max_feature_num", max_feature_num)
        whole_number("slot_num * max_nnz", self.slot_num * self.max_nnz)
        if max_feature_num > slot_num * max_nnz:
            raise ValueError(
                f"`max_feature_num` must lie in [1, slot_num * max_nnz = {slot_num * max_nnz}]. "
                f"Received: {max_feature_num}."
            )
        self.combiner = check_combiner(combiner)
        self.padding_key = padding_key

    def _check_symbol(self, symbol: Any) -> None:
        check_symbol(symbol, self.slot_num)

    def call(self, inputs: Ids, training: Condition | None = None, weights: Ids | None = None) -> tf.Tensor:
        variable = self.embedding_variable
        feature = Feature(
            variable,
            inputs,
            self.combiner,
            weights,
            slot_num=self.slot_num,
            max_nnz=self.max_nnz,
            max_feature_num=self.slot_num * self.max_nnz if self.max_feature_num == 1 else self.max_feature_num,
            padding_key=self.padding_key,
            distinct_slots=bool(self.distinct_slots),
        )
        inserts = self._inserts(training)
        if self._hints_at_shared_slots():
            feature = dataclasses.replace(
                feature, seen=lambda keys, splits: self._shared_slots.look(keys, splits, inserts)
            )
        (pooled,) = lookup_group([feature], inserts)
        pooled = tf.reshape(pooled, [-1, self.slot_num, variable.dim])
        pooled.set_shape([static_batch(inputs, self.slot_num), self.slot_num, variable.dim])
        return self._to_compute_dtype(pooled)

    def compute_output_shape(self, input_shape: Shape) -> tuple[int | None, int, int]:
        batch = input_shape[0] if len(input_shape) == 3 or self.slot_num == 1 else None
        return (batch, self.slot_num, self.embedding_vec_size)

    def get_config(self) -> dict[str, Any]:
        own = ("combiner", "max_nnz", "max_feature_num", "padding_key")
        return {**super().get_config(), **{name: getattr(self, name) for name in own}}
