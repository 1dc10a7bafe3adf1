"""What Keras 3 and tf_keras both take for a callback."""

from __future__ import annotations

from typing import Any

from sok.base.types import KerasModel


class Callback:
    """What both libraries expect of a callback."""

    def __init__(self) -> None:
        self.model: Any = None
        self.params: dict[str, Any] = {}

    def set_params(self, params: dict[str, Any]) -> None:
        self.params = params

    def set_model(self, model: KerasModel) -> None:
        self.model = model

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    # Keras 3 goes without waiting for each batch if all callbacks say that theirs is this one.
    _nothing._is_default = True  # type: ignore[attr-defined]

    on_train_begin = on_train_end = on_test_begin = on_test_end = on_predict_begin = on_predict_end = _nothing
    on_epoch_begin = on_epoch_end = on_batch_begin = on_batch_end = _nothing
    on_train_batch_begin = on_train_batch_end = on_test_batch_begin = on_test_batch_end = _nothing
    on_predict_batch_begin = on_predict_batch_end = _nothing

    # tf_keras asks these.
    _supports_tf_logs = False
    _chief_worker_only = None

    def _implements_train_batch_hooks(self) -> bool:
        return type(self).on_train_batch_end is not Callback.on_train_batch_end

    def _implements_test_batch_hooks(self) -> bool:
        return type(self).on_test_batch_end is not Callback.on_test_batch_end

    def _implements_predict_batch_hooks(self) -> bool:
        return False
