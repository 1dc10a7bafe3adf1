"""The CUDA kernels by themselves: arrays of CuPy, Numba or PyTorch in, CuPy's out, without TensorFlow.

Importing this needs neither a GPU nor CuPy; the first call does, and says what is missing.

Arrays are CuPy's, or anything on the current device that has DLPack (a PyTorch tensor) or `__cuda_array_interface__` of
version 2 or 3 (an array of Numba's). Those of others are never copied: they must be contiguous, and writable where
kernels write (`first_bad`, `Records.values`). Results are CuPy's arrays, which have both protocols:
`torch.from_dlpack(x)`, `numba.cuda.as_cuda_array(x)`.

*In stream order* means, of a function: its work is put on CuPy's current stream of the current device, and it returns
before that is done, unless it says that it waits. Of an array of another library,

- the device first waits for the stream that it was made on: the one in `__cuda_array_interface__` (None: for none),
  or, by DLPack, what `x.__dlpack__(stream=...)` makes our stream wait for. The host does not wait.
- what the stream in `__cuda_array_interface__` is given after the call waits for the call's work, so that it may write
  there again. DLPack names no stream for which this could be done: work on one stream, or let the other wait.
- the memory stays, though nobody else has it any more, until the call's work is done. A later call on the same stream
  and thread lets go of it.

CuPy makes whoever takes a result wait for CuPy's stream at that moment: hand it on under the stream it was made on.

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
