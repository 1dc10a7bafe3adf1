"""Who keeps the kernels' promises: each backend takes and gives NumPy arrays.

The NumPy statements of tests/reference judge; the CPU's ops, the CUDA kernels in the emulator and on a device answer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np


class Cpu:
    """The ops of TensorFlow's CPU device."""

    name = "cpu"
    float_types = ("float32", "float16")

    def __init__(self) -> None:
        from sok.base import _ops

        self._lib = _ops.lib()

    def unique(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return tuple(x.numpy() for x in self._lib.sok_unique(keys))

    def segment_sum(self, data: np.ndarray, ids: np.ndarray, num_segments: int) -> np.ndarray:
        return self._lib.sok_unsorted_segment_sum(data, ids, num_segments).numpy()

    def combine(self, rows: Any, index: Any, splits: Any, weights: Any, combiner: str) -> np.ndarray:
        weights = np.zeros(0, np.float32) if weights is None else weights
        return self._lib.sok_combine(rows, index, splits, weights, combiner=combiner).numpy()

    def combine_grad_rows(self, grad: Any, index: Any, splits: Any, weights: Any, num_rows: int, combiner: str) -> Any:
        weights = np.zeros(0, np.float32) if weights is None else weights
        return self._lib.sok_combine_grad_rows(grad, index, splits, weights, num_rows, combiner=combiner).numpy()

    def combine_grad_weights(self, grad: Any, rows: Any, index: Any, splits: Any, weights: Any, combiner: str) -> Any:
        return self._lib.sok_combine_grad_weights(grad, rows, index, splits, weights, combiner=combiner).numpy()

    def sum_rows(self, row_ids: np.ndarray, values: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        return tuple(x.numpy() for x in self._lib.sok_sum_duplicates(row_ids, values))


class Cuda:
    """sok.cuda: on a device with CuPy, or with NumPy in the emulator."""

    float_types = ("float32", "float16", "bfloat16")

    def __init__(self, name: str, library: str | None):
        self.name = name
        self._library = library

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """Makes sok.cuda use this backend's library."""
        before = os.environ.get("SOK_CUDA_LIBRARY")
        if self._library is not None:
            os.environ["SOK_CUDA_LIBRARY"] = self._library
        try:
            yield
        finally:
            os.environ.pop("SOK_CUDA_LIBRARY", None)
            if before is not None:
                os.environ["SOK_CUDA_LIBRARY"] = before

    def put(self, x: np.ndarray | None) -> Any:
        """The array on the device."""
        from sok.cuda import _arrays

        return None if x is None else _arrays.module().asarray(x)

    @staticmethod
    def get(x: Any) -> np.ndarray:
        """The array here."""
        return x if isinstance(x, np.ndarray) else x.get()

    def unique(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        import sok.cuda

        return tuple(map(self.get, sok.cuda.unique(self.put(keys))))

    def segment_sum(self, data: np.ndarray, ids: np.ndarray, num_segments: int, **options: Any) -> np.ndarray:
        import sok.cuda

        return self.get(sok.cuda.unsorted_segment_sum(self.put(data), self.put(ids), num_segments, **options))

    def combine(
        self, rows: Any, index: Any, splits: Any, weights: Any, combiner: str, dtype: str = "float32"
    ) -> np.ndarray:
        import sok.cuda

        put = map(self.put, (rows, index, splits))
        return self.get(sok.cuda.combine(*put, weights=self.put(weights), combiner=combiner, dtype=dtype))

    def combine_grad_rows(self, grad: Any, index: Any, splits: Any, weights: Any, num_rows: int, combiner: str) -> Any:
        import sok.cuda

        put, options = map(self.put, (grad, index, splits)), {"weights": self.put(weights), "combiner": combiner}
        return self.get(sok.cuda.combine_grad_rows(*put, num_rows=num_rows, **options))

    def combine_grad_weights(self, grad: Any, rows: Any, index: Any, splits: Any, weights: Any, combiner: str) -> Any:
        import sok.cuda

        put = map(self.put, (grad, rows, index, splits))
        return self.get(sok.cuda.combine_grad_weights(*put, weights=self.put(weights), combiner=combiner))

    def sum_rows(self, row_ids: np.ndarray, values: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        import sok.cuda

        sums = sok.cuda.sum_rows([sok.cuda.Addends(self.put(row_ids), self.put(values))], [num_rows])
        n = int(self.get(sums.num_sums)[0])
        return self.get(sums.row_ids)[:n], self.get(sums.sums)[:n]
