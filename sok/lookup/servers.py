"""The phases of a lookup and of an update whose rows lie on parameter servers.

The same ops as between workers (sok/lookup/exchange.py), and the same messages: keys are routed on the worker, found on
the server that owns them, and what comes back is combined on the worker. But an op runs where its shard is, by
`tf.device`, and nobody has to come to meet it: TensorFlow's own runtime moves the messages. A server runs what
workers ask in the order in which it comes.

    lookup    route (worker)  ->  serve (each server)                     ->  combine (worker)
    update    route (worker)  ->  serve, sum, apply, count (each server)

Between the two is the gradient: slices of the distinct keys of the step, summed on the worker. Their indices are the
keys, not numbers of rows: a server may have been restarted, or have erased a row, since it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from sok.base import _ops
from sok.base.custom_gradient import custom_gradient
from sok.lookup.feature import Csr, Feature, Group
from sok.lookup.gradients import summed_slices
from sok.lookup.messages import ANSWER_HEADER, HEADER_WORDS
from sok.table import on_servers
from sok.table.table import EmbeddingVariable

if TYPE_CHECKING:
    from sok.lookup.exchange import Sent


def rows_home(sent: Sent) -> tuple[tf.Tensor, tf.Tensor]:
    """Has each server find or make the rows that `sent` asks it for; gives the answers, checked, and their floats.

    Differentiable in the tables: see `keys_of`.
    """

    @custom_gradient
    def bring(*_: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Any]:
        answers, sizes = zip(*(served[:2] for served in _served(sent)), strict=True)
        with tf.device(sent.group.device):
            home = _ops.lib().sok_exchange_check(tf.concat(answers, 0), tf.concat(sizes, 0), sent.asked)
        return tuple(home), lambda packed, *_: _slices(sent, packed)

    return bring(*(table.handle for table in sent.group.tables))


def _served(sent: Sent) -> list[Any]:
    tables = sent.group.tables
    messages = tf.split(sent.words, sent.splits, num=tables[0].world_size)
    found = []
    for message, (device, shards) in zip(messages, on_servers.shards(tables), strict=True):
        with on_servers.on(device):
            known = tf.get_static_value(sent.insert)
            found.append(
                _ops.lib().sok_exchange_serve(
                    [shard.handle for shard in shards],
                    message,
                    tf.shape(message),
                    sent.number,
                    sent.insert if known is None else bool(known),
                    dims=sent.dims,
                    capacities=[table.capacity for table in tables],
                    num_askers=1,
                    **sent.attributes,
                )
            )
    return found


def _slices(sent: Sent, packed: tf.Tensor) -> list[tf.IndexedSlices]:
    """Of each table the gradients of its keys, each key once. packed: one for each row, as answers have the rows."""
    tables, width = sent.group.tables, len(sent.group.tables)
    servers = tables[0].world_size
    with tf.device(sent.group.device):
        begins = tf.cumsum(sent.splits, exclusive=True)[:, None] + tf.range(HEADER_WORDS, HEADER_WORDS + width)
        counts = tf.cast(tf.gather(sent.words, begins), tf.int32)  # [S, T]: rows of each server and table
        header = HEADER_WORDS + width + 2 * len(sent.attributes["table_of"])
        of_words = tf.split(sent.words, _with_header(counts, header), num=servers * (width + 1))
        of_rows = tf.split(packed, _with_header(counts * sent.dims, ANSWER_HEADER), num=servers * (width + 1))
        found = []
        for number, table in enumerate(tables):
            keys = tf.concat(of_words[number + 1 :: width + 1], 0)
            values = tf.reshape(tf.concat(of_rows[number + 1 :: width + 1], 0), [-1, table.dim])
            found.append(summed_slices(values, _as_indices(keys, table)))
        return found


def _with_header(counts: tf.Tensor, header: int) -> tf.Tensor:
    return tf.reshape(tf.pad(counts, [[0, 0], [1, 0]], constant_values=header), [-1])


def _as_indices(words: tf.Tensor, table: EmbeddingVariable) -> tf.Tensor:
    """Keys of messages as int64, with the bits that they have there."""
    if words.dtype == tf.int32 and table.key_dtype == tf.uint32:
        words = tf.bitcast(words, tf.uint32)
    return tf.cast(words, tf.int64)


def keys_of(table: EmbeddingVariable, indices: tf.Tensor) -> tf.Tensor:
    """The keys whose gradients are slices with these indices [n] int64: themselves, but for the bits of uint64."""
    return tf.bitcast(indices, tf.uint64) if table.key_dtype == tf.uint64 else tf.cast(indices, table.key_dtype)


def update(
    tables: Sequence[EmbeddingVariable],
    indices: Sequence[tf.Tensor],
    values: Sequence[tf.Tensor],
    apply: Callable[[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]], Any],
    send: Callable[[Group, Sequence[Feature], tf.Tensor], Sent],
) -> tf.Operation | None:
    """Has each server change the rows of its keys, those of all tables at once. Keys without a row are left out.

    Args:
        indices: of each table [n] int64, keys as `keys_of` takes them; they may repeat.
        values: of each table [n, D] float32.
        apply: makes the op that updates, of handles, row ids and gradients of a server's shards, no row twice.
        send: `sok.lookup.exchange.send_keys`.

    Returns:
        The op, in a graph.
    """
    lib, group = _ops.lib(), Group(tuple(tables))
    features = [Feature(table, Csr(keys_of(table, keys))) for table, keys in zip(tables, indices, strict=True)]
    with tf.device(group.device):
        sent = send(group, features, tf.constant(False))
        empty = [tf.zeros([0]) for _ in features]
        packed = lib.sok_exchange_combine_grad(
            list(values),
            sent.asked,
            sent.index,
            sent.row_splits,
            empty,
            sent.scales,
            combiners=[feature.pooling for feature in features],
            dims=sent.dims,
        )
        gradients = tf.split(packed, sent.asked, num=group.tables[0].world_size)
    done = []
    served_by = zip(on_servers.shards(tables), _served(sent), gradients, strict=True)
    for (device, shards), served, gradient in served_by:
        with on_servers.on(device):
            row_ids, sums = lib.sok_exchange_sum_grad(
                gradient,
                served.counts,
                served.piece_splits,
                served.row_ids,
                table_of=sent.attributes["table_of"],
                dims=sent.dims,
                capacities=[table.capacity for table in tables],
            )
            done.append(apply([shard.handle for shard in shards], row_ids, sums))
    return on_servers.done(done)
