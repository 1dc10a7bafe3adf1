"""A callback that publishes what `fit` trains, for those who serve meanwhile."""

from __future__ import annotations

from typing import Any

from sok.base.keras_callback import Callback
from sok.base.types import PathLike
from sok.checkpoint.publishing import Publisher


class Publish(Callback):
    """Saves what has changed every so many steps or seconds of `fit`, and at its end, as `sok.Publisher` does: for
    `sok.follow` and `sok.follow_export`.

    Args:
        path, every_steps, every_seconds, max_chain: see `sok.Publisher`.

    Raises:
        as `sok.Publisher` and `sok.save`.

    Collective: on all workers or on none.

    Example:
        >>> import sok, tempfile
        >>> import tensorflow as tf
        >>> ids = tf.keras.Input([1], dtype="int64")
        >>> model = tf.keras.Model(ids, tf.keras.layers.Dense(1)(sok.Embedding(100, 2, name="published_rows")(ids)))
        >>> model.compile(sok.DistributedOptimizer("sgd"), "mse")
        >>> folder = tempfile.mkdtemp()
        >>> publish = sok.callbacks.Publish(folder, every_steps=2)
        >>> _ = model.fit(tf.ones([8, 1]), tf.ones([8, 1, 1]), batch_size=2, verbose=0, callbacks=[publish])
        >>> manifest = sok.checkpoint.read_manifest(folder)
        >>> len(manifest.links), len(manifest.dense.variables)
        (3, 2)
    """

    def __init__(
        self,
        path: PathLike,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        max_chain: int = 100,
    ) -> None:
        super().__init__()
        self._path = path
        self._how: dict[str, Any] = {"every_steps": every_steps, "every_seconds": every_seconds, "max_chain": max_chain}
        self._publisher: Publisher | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._publisher = None  # of another `fit`, maybe of another model

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._publisher is None:  # now the model is built
            self._publisher = Publisher(self._path, self.model, **self._how)
        self._publisher.step()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._publisher is not None:
            self._publisher.publish()
