"""Adam, as stock Keras does it on a dense table."""

from __future__ import annotations

from typing import Any

from sok.base.types import Rate
from sok.optimizers.base import Optimizer


class Adam(Optimizer):
    """Adam of the equivalent dense table: every row moves every step, at the cost of the rows of the batch.

    With t the number of steps and alpha = learning_rate sqrt(1 - beta_2^t) / (1 - beta_1^t), for each row

        m += (g - m) (1 - beta_1);   v += (g^2 - v) (1 - beta_2);   w -= alpha m / (sqrt(v) + epsilon)

    where g is zero for rows outside the batch: their momentum still moves them and fades. The table does that later,
    when such a row is next looked up, updated or exported, with the learning rates that each missed step had; the
    values are those of `keras.optimizers.Adam` on a dense variable, within 1e-5 relative. Keys never seen have no
    momentum, so nothing is missed for them. `LazyAdam` does not change rows outside the batch.

    Args:
        amsgrad: the denominator is that of the largest v so far, which does not shrink. One slot more, vhat.
        lazy: rows outside the batch stay as they are.
        bias_correction: "step": by the number of the optimizer's steps. "row": by the number of the row's own, which
            the table counts, as OpenEmbedding does; with `lazy` alone.
        **options: see `sok.optimizers.Optimizer`.

    Two slots, m and v, starting at zero; with `bias_correction="row"` also count, one number a row.

    Source: Kingma and Ba, "Adam" (2015), in Keras' form (epsilon is added to the uncorrected root); Reddi, Kale, Kumar,
    "On the Convergence of Adam and Beyond" (2018).

    Example:
        >>> import tensorflow as tf, sok
        >>> table = sok.EmbeddingVariable(dim=1, capacity=8, initializer="ones", name="adam_example")
        >>> optimizer = sok.optimizers.Adam(learning_rate=0.1)
        >>> one, none = tf.ones([1, 1]), tf.zeros([0, 1])
        >>> from sok.lookup.lookup import lookup_rows
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(lookup_rows(table, tf.constant([3], tf.int64)))
        >>> optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        >>> print("%.3f" % float(table.sparse_read([3])[0, 0]))
        0.900
        >>> optimizer.apply_gradients([(tf.IndexedSlices(none, tf.zeros([0], tf.int64)), table)])
        >>> print("%.3f" % float(table.sparse_read([3])[0, 0]))
        0.833
    """

    rule = "adam"
    rules: tuple[str, ...] = ("adam", "amsgrad", "lazy_adam", "lazy_amsgrad", "lazy_adam_by_row")
    beta_1: float
    beta_2: float
    epsilon: float

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        name: str | None = None,
        amsgrad: bool = False,
        lazy: bool = False,
        bias_correction: str = "step",
        **options: Any,
    ) -> None:
        self._choose("amsgrad" if amsgrad else "adam", lazy, bias_correction)
        hyper = {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon}
        super().__init__(learning_rate, name, hyper=hyper, **options)

    @classmethod
    def _options_of(cls, rule: str) -> dict[str, Any]:
        return {"amsgrad": rule.endswith("amsgrad"), **super()._options_of(rule)}
