"""The CUDA kernels by themselves: CuPy arrays in and out, without TensorFlow.

Importing this needs neither a GPU nor CuPy; the first call does, and says what is missing. Arrays are CuPy's, or
anything that has `__cuda_array_interface__` or DLPack (a PyTorch tensor); results are CuPy arrays on the current
device. Work is put on CuPy's current stream, in order, and a call returns before it is done unless it says that it
waits.

Example (needs a GPU):
    >>> import cupy, sok.cuda  # doctest: +SKIP
    >>> sok.cuda.unique(cupy.array([7, 3, 7]))                                   # doctest: +SKIP
    Unique(keys=array([7, 3]), inverse=array([0, 1, 0], dtype=uint32), counts=array([2, 1], dtype=uint32))
"""

from sok.cuda._native import CudaError, OutOfMemoryError, TableFullError
from sok.cuda.combining import Feature, combine, combine_grad_rows, combine_grad_weights, combine_group, expand_segments
from sok.cuda.keys import Partitioned, Unique, partition_keys, unique, unique_padded
from sok.cuda.table import Found, Reading, Table, fill_rows
from sok.cuda.table_group import TableGrads, TableGroup
from sok.cuda.updates import (
    Addends,
    Decay,
    Records,
    RowSums,
    check,
    settle_rows,
    sum_rows,
    unsorted_segment_sum,
    update_rows,
)

__all__ = [
    "Addends",
    "CudaError",
    "Decay",
    "Feature",
    "Found",
    "OutOfMemoryError",
    "Partitioned",
    "Reading",
    "Records",
    "RowSums",
    "Table",
    "TableFullError",
    "TableGrads",
    "TableGroup",
    "Unique",
    "check",
    "combine",
    "combine_grad_rows",
    "combine_grad_weights",
    "combine_group",
    "expand_segments",
    "fill_rows",
    "partition_keys",
    "settle_rows",
    "sum_rows",
    "unique",
    "unique_padded",
    "unsorted_segment_sum",
    "update_rows",
]
