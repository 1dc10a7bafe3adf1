"""Data of several workers: each one's share of a `tf.data.Dataset`, and ids of several columns as keys of one table.

data = sok.data.batches(samples, global_batch_size=4096)     # on each worker its part of every batch
data = data.map(lambda ids, label: (sok.data.add_offsets(ids, sizes), label))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base.errors import refuse_strings
from sok.base.types import TensorLike
from sok.job import context

NUM_HASHES = 2**63 - 1
"""`hash_columns` gives keys below this."""


def batches(
    dataset: tf.data.Dataset, global_batch_size: int | None = None, drop_remainder: bool = True
) -> tf.data.Dataset:
    """This worker's part of each batch of a job: all workers together see what one worker would, batch by batch.

    All workers get the same number of batches, so that none waits for one that has ended.

    Args:
        dataset: of samples, in the same order on all workers: shuffle with a seed, before. Each worker reads all of it;
            map what costs time (parsing) after this, where each worker has its part only.
        global_batch_size: samples of all workers in a batch. None: that of `sok.Init`.
        drop_remainder: whether to leave out a last batch that is not full. If not, workers have parts of it that differ
            by one sample at most, and it is left out only where it has no sample for each worker.

    Returns:
        Tensors [b, ...] in the structure of `dataset`: rank r has samples r B / R to (r + 1) B / R of each batch of B.

    Raises:
        ValueError: no batch size, or one that the number of workers does not divide.

    Example:
        >>> data = batches(tf.data.Dataset.range(5), global_batch_size=2, drop_remainder=False)
        >>> [batch.tolist() for batch in data.as_numpy_iterator()]
        [[0, 1], [2, 3], [4]]
    """
    size = context.size()
    batch = context.get_global_batch_size() if global_batch_size is None else global_batch_size
    if batch is None:
        raise ValueError("`global_batch_size` must be given here or to sok.Init. Received: None in both.")
    if isinstance(batch, bool) or not hasattr(batch, "__index__") or batch < size or batch % size:
        raise ValueError(
            f"`global_batch_size` must be a whole number that the {size} workers divide, at least {size}. "
            f"Received: {batch!r}."
        )
    return parts_of(dataset, int(batch), drop_remainder, context.rank(), size)


def parts_of(
    dataset: tf.data.Dataset, global_batch_size: int, drop_remainder: bool, rank: int, size: int
) -> tf.data.Dataset:
    """What `batches` gives rank `rank` of `size`."""

    def has_parts(*batch: Any) -> tf.Tensor:
        return _length(batch) >= size

    def part(*batch: Any) -> Any:
        length = _length(batch)
        start, stop = length * rank // size, length * (rank + 1) // size
        parts = tf.nest.map_structure(lambda x: _rows(x, start, stop), batch)
        return parts[0] if len(parts) == 1 else parts

    batched = dataset.batch(global_batch_size, drop_remainder=drop_remainder)
    if size == 1:
        return batched
    if not drop_remainder:
        samples = int(dataset.cardinality())
        batched = batched.filter(has_parts)
        if samples >= 0:  # a filter forgets it, and Keras shows progress by it
            full, last = divmod(samples, global_batch_size)
            batched = batched.apply(tf.data.experimental.assert_cardinality(full + (last >= size)))
    return batched.map(part, num_parallel_calls=tf.data.AUTOTUNE)


def add_offsets(ids: TensorLike | tf.RaggedTensor, sizes: Sequence[int]) -> Any:
    """Gives the ids of each column a range of their own, for columns that share a table: no two columns share a row.

    Args:
        ids: [B, F] or ragged [B, F, None], integers: row numbers of each column.
        sizes: [F], how many ids each column has: those of column f lie in [0, sizes[f]).

    Returns:
        int64 keys in the form of `ids`, in [0, sum(sizes)).

    Raises:
        ValueError: other shapes; sizes that are not positive whole numbers; ids that are strings.
        tf.errors.InvalidArgumentError: an id outside its column.

    Example:
        >>> add_offsets([[0, 0], [2, 1]], sizes=[3, 2]).numpy().tolist()
        [[0, 3], [2, 4]]
    """
    lengths = np.asarray(sizes)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not len(lengths) or (lengths < 1).any():
        raise ValueError(f"`sizes` must be a list of positive whole numbers, one for each column. Received: {sizes!r}.")
    ids = _columns(ids, len(lengths))
    refuse_strings(ids.dtype, "`ids`")
    values, columns = _with_columns(tf.cast(ids, tf.int64), len(lengths))
    limits = tf.gather(tf.constant(lengths, tf.int64), columns)
    is_good = tf.logical_and(values >= 0, values < limits)
    bad = tf.argmin(tf.cast(tf.pad(is_good, [[0, 1]]), tf.int32))  # the first that is not, or the end

    first = tf.gather(tf.pad(tf.stack([columns, limits, values], 1), [[0, 1], [0, 0]]), bad)
    words = tf.strings.format("`ids` must lie in [0, size) of their column. Received [column, size, id]: {}", first)
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(is_good), [words])]):
        keys = values + tf.gather(tf.constant(np.cumsum(lengths) - lengths, tf.int64), columns)
    return _in_form_of(ids, keys)


def hash_columns(values: TensorLike | tf.RaggedTensor, names: Sequence[str]) -> Any:
    """Keys for values of any kind, strings or integers, of columns that share a hashed table.

    Equal values of different columns get different keys. The hash never changes; by chance two of a billion values
    share a key with a probability of 5 %.

    Args:
        values: [B, F] or ragged [B, F, None], strings or integers.
        names: [F], of the columns; part of what is hashed, so that columns may be added or change places.

    Returns:
        int64 keys in the form of `values`, in [0, 2^63 - 1).

    Raises:
        ValueError: other shapes; two columns of one name.
        TypeError: values that are neither strings nor integers.

    Example:
        >>> keys = hash_columns([["7", "7"]], names=["user", "item"]).numpy()[0]
        >>> bool(keys[0] != keys[1])
        True
        >>> bool(hash_columns([[7]], ["user"]).numpy()[0, 0] == keys[0])
        True

    Source: the 64-bit fingerprint of FarmHash, as `tf.strings.to_hash_bucket_fast` takes it.
    """
    if len(set(names)) != len(names) or not names:
        raise ValueError(f"`names` must be different names, one for each column. Received: {list(names)!r}.")
    values = _columns(values, len(names))
    if not (values.dtype == tf.string or values.dtype.is_integer):
        raise TypeError(f"`values` must be strings or integers. Received: {values.dtype.name}.")
    flat, columns = _with_columns(values, len(names))
    texts = flat if flat.dtype == tf.string else tf.strings.as_string(flat)
    # The length of the name first, so that no name and value read like another name and value.
    prefixes = tf.constant([f"{len(name.encode())}:{name}:" for name in names])
    keys = tf.strings.to_hash_bucket_fast(tf.strings.join([tf.gather(prefixes, columns), texts]), NUM_HASHES)
    return _in_form_of(values, keys)


def hash_strings(values: TensorLike | tf.RaggedTensor | tf.SparseTensor) -> Any:
    """Keys for strings: the ids that `sok.Embedding` makes of them. Also for `tf.data`.

    The hash never changes; by chance two of a billion strings share a key with a probability of 5 %. For columns that
    share a table and are not to share rows: `sok.data.hash_columns`.

    Args:
        values: strings of any shape: dense, RaggedTensor or SparseTensor.

    Returns:
        int64 keys in the form of `values`, in [0, 2^63 - 1): the 64-bit fingerprint of the bytes, modulo 2^63 - 1.

    Raises:
        TypeError: values that are no strings.

    Example:
        >>> hash_strings(["to", "be", "to"]).numpy().tolist()
        [3223756873574598834, 3681902991480312597, 3223756873574598834]

    Source: the 64-bit fingerprint of FarmHash, as `tf.strings.to_hash_bucket_fast` takes it.
    """
    if isinstance(values, tf.RaggedTensor):
        return values.with_flat_values(hash_strings(values.flat_values))
    if isinstance(values, tf.SparseTensor):
        return tf.SparseTensor(values.indices, hash_strings(values.values), values.dense_shape)
    values = tf.convert_to_tensor(values)
    if values.dtype != tf.string:
        raise TypeError(f"`values` must be strings. Received: {values.dtype.name}.")
    return tf.strings.to_hash_bucket_fast(values, NUM_HASHES)


def _columns(values: Any, count: int) -> Any:
    if not isinstance(values, tf.RaggedTensor):
        values = tf.convert_to_tensor(values)
    shape = values.shape
    ranks = (3,) if isinstance(values, tf.RaggedTensor) and values.ragged_rank > 1 else (2, 3)
    if shape.rank not in ranks or shape[1] not in (None, count):
        raise ValueError(
            f"Ids of {count} columns must have shape [B, {count}] or [B, {count}, n], dense or ragged in n. "
            f"Received: shape {shape}."
        )
    return values


def _with_columns(values: Any, count: int) -> tuple[tf.Tensor, tf.Tensor]:
    """All values [n], and the column of each."""
    if isinstance(values, tf.RaggedTensor):
        columns = tf.range(values.values.nrows()) % count
        return values.flat_values, tf.repeat(columns, values.values.row_lengths())
    columns = tf.reshape(tf.range(count, dtype=tf.int64), [1, count, *[1] * (values.shape.rank - 2)])
    return tf.reshape(values, [-1]), tf.reshape(tf.broadcast_to(columns, tf.shape(values)), [-1])


def _in_form_of(form: Any, flat: tf.Tensor) -> Any:
    if isinstance(form, tf.RaggedTensor):
        return form.with_flat_values(flat)
    return tf.ensure_shape(tf.reshape(flat, tf.shape(form)), form.shape)


def _length(batch: Any) -> tf.Tensor:
    first = tf.nest.flatten(batch)[0]
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first, tf.int64)[0]


def _rows(batch: Any, start: tf.Tensor, stop: tf.Tensor) -> Any:
    if isinstance(batch, tf.SparseTensor):
        shape = batch.dense_shape
        begin = tf.concat([[start], tf.zeros_like(shape[1:])], 0)
        return tf.sparse.slice(batch, begin, tf.concat([[stop - start], shape[1:]], 0))
    return batch[start:stop]
