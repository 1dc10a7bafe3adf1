"""Ids of fixed number, one row each."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok.base.types import Condition, DTypeLike, Ids, Shape
from sok.keras.layers.base import EmbeddingLayerMixin
from sok.lookup import lookup
from sok.lookup.inputs import check_sizes, describe, sizes, slot_keys, to_dense
from sok.table.initializers import Initializer
from sok.table.options import whole_number


class All2AllDenseEmbeddingMixin(EmbeddingLayerMixin):
    """Looks up `nnz_per_slot` ids for each of `slot_num` features per sample and gives each its row.

    The table is sharded over the workers of the job: the row of `key` lives on rank `key % sok.size()`.
    Equal to `tf.nn.embedding_lookup`. An id that occurs many times in a batch travels once.

    Args:
        max_vocabulary_size_per_gpu, embedding_vec_size, slot_num, use_hashtable, key_dtype, embedding_initializer,
            **kwargs: as `sok.DistributedEmbedding` takes them. `distinct_slots` needs dynamic_input=False.
        nnz_per_slot: ids per feature.
        dynamic_input: False: the input is [B, F, nnz_per_slot]. True: any shape.

    Call args:
        inputs: integers: dense [B, F, nnz_per_slot]; also [B, F] if nnz_per_slot is 1, and [B, nnz_per_slot] if F is 1;
            Sparse and Ragged tensors of that shape if they are full: an id at every place, in any order. With
            `dynamic_input`, any shape.
        training: whether unseen ids get a row; see `sok.DistributedEmbedding`.

    Returns:
        [B, F, nnz_per_slot, D], or with `dynamic_input` the shape of the input with D appended, in the compute dtype.

    Raises:
        ValueError: an argument or the form of the input is not one of these.
        tf.errors.InvalidArgumentError: an id is outside an identity table; on every worker.
        tf.errors.ResourceExhaustedError: a shard is full; on every worker. That shard has stored nothing of the step.

    Collective, as `sok.DistributedEmbedding`.

    Example:
        >>> import tensorflow as tf
        >>> import sok
        >>> layer = sok.All2AllDenseEmbedding(1000, 4, slot_num=2, nnz_per_slot=3)
        >>> layer(tf.zeros([5, 2, 3], tf.int64)).shape
        TensorShape([5, 2, 3, 4])

    Source: `All2AllDenseEmbedding` of SOK v1; differences are listed in docs/migrating.md.
    """

    def __init__(
        self,
        max_vocabulary_size_per_gpu: int,
        embedding_vec_size: int,
        slot_num: int,
        nnz_per_slot: int,
        dynamic_input: bool = False,
        use_hashtable: bool = True,
        key_dtype: DTypeLike | None = None,
        embedding_initializer: Initializer | None = None,
        **kwargs: Any,
    ) -> None:
        sizes = (max_vocabulary_size_per_gpu, embedding_vec_size, slot_num)
        super().__init__(sizes, use_hashtable, key_dtype, embedding_initializer, **kwargs)
        self.nnz_per_slot = whole_number("nnz_per_slot", nnz_per_slot)
        self.dynamic_input = bool(dynamic_input)
        if self.dynamic_input and self.distinct_slots:
            raise ValueError("`distinct_slots` must be False with dynamic_input=True, where ids have no slots.")

    def call(self, inputs: Ids, training: Condition | None = None) -> tf.Tensor:
        variable = self.embedding_variable
        dense, report = to_dense(inputs, variable.key_dtype, variable.table_name)
        if not self.dynamic_input:
            dense, report = self._checked(inputs, dense, report)
        if self.dynamic_input:
            return self._to_compute_dtype(self._rows(dense, training, report))
        # Flat until the lookup has judged the report: a reshape that fails would stop this worker alone.
        keys = tf.reshape(dense, [-1])
        if self.distinct_slots or self._hints_at_shared_slots():
            splits = tf.range(0, tf.size(keys, tf.int64) + 1, self.nnz_per_slot, dtype=tf.int64)
            nothing = tf.zeros([0], tf.int64) if report is None else report
        if self._hints_at_shared_slots():
            self._shared_slots.look(keys, splits, self._inserts(training))
        if self.distinct_slots:
            keys, report = slot_keys(keys, splits, nothing, self.slot_num)
        rows = self._rows(keys, training, report)
        wanted, static = [self.slot_num, self.nnz_per_slot], sizes(dense)
        rows = tf.reshape(rows, [-1, *wanted, variable.dim])
        rows.set_shape([static[0] if static else None, *wanted, variable.dim])
        return self._to_compute_dtype(rows)

    def _rows(self, keys: tf.Tensor, training: Any, report: tf.Tensor | None) -> tf.Tensor:
        variable = self.embedding_variable
        return lookup.lookup_rows(variable, keys, self._inserts(training), report)

    def _checked(self, inputs: Ids, dense: tf.Tensor, report: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor | None]:
        """`dense` as [B, F, nnz_per_slot], and the report, to which a wrong size that is seen late is added."""
        wanted, static = [self.slot_num, self.nnz_per_slot], self._checked_sizes(inputs, sizes(dense))
        if len(sizes(dense) or ()) == 2:
            dense = tf.expand_dims(dense, self._left_out)
        if static[1:] != wanted:
            report = check_sizes(report, dense, wanted)
        return dense, report

    @property
    def _left_out(self) -> int:
        """Which axis, of length 1, inputs may be without."""
        return 2 if self.nnz_per_slot == 1 else 1

    def _checked_sizes(self, inputs: Any, static: list[int | None] | None) -> list[int | None]:
        """A static shape as that of [B, F, nnz_per_slot]. ValueError if it cannot be."""
        wanted = [self.slot_num, self.nnz_per_slot]
        if static is not None and len(static) == 2 and 1 in wanted:
            static = [*static[: self._left_out], 1, *static[self._left_out :]]
        if (
            static is None
            or len(static) != 3
            or any(c not in (w, None) for c, w in zip(static[1:], wanted, strict=True))
        ):
            raise ValueError(
                f"`inputs` must have shape [batch, {self.slot_num}, {self.nnz_per_slot}] = [batch, slot_num, "
                f"nnz_per_slot]; for other shapes use dynamic_input=True. Received: {describe(inputs)}."
            )
        return static

    def _check_symbol(self, symbol: Any) -> None:
        static = sizes(symbol)
        if not self.dynamic_input and static is not None:
            self._checked_sizes(symbol, static)

    def compute_output_shape(self, input_shape: Shape) -> tuple[int | None, ...]:
        dim = self.embedding_vec_size
        if self.dynamic_input:
            return (*input_shape, dim)
        return (input_shape[0], self.slot_num, self.nnz_per_slot, dim)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "nnz_per_slot": self.nnz_per_slot,
            "dynamic_input": self.dynamic_input,
        }
