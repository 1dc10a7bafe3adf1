"""Lookups of which each rank brings the ids of the whole batch, for the tables it holds: no keys travel.

    each rank looks up the ids of all samples in its own rows, as one worker does
    a vector of each sample goes to the rank whose sample it is     one collective; its gradient is another

Messages carry input errors, as those of `sok.lookup.exchange` do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from sok.base.custom_gradient import custom_gradient
from sok.base.types import Training
from sok.job import context
from sok.lookup.feature import ROWS, Csr, Feature, Group, by_device
from sok.lookup.inputs import to_csr
from sok.lookup.lookup import Ticket, finish
from sok.table import exchanged

if TYPE_CHECKING:
    from sok.job.transport.base import Transport
    from sok.table.table import EmbeddingVariable

_HEADER = 4  # int32: what is wrong, of which feature, and the two halves of an id
_BAD_ID, _UNEVEN = 1, 2


def look_up_whole_batch(
    features: Sequence[Feature],
    training: Training,
    widths: Sequence[int],
    transport: Transport,
    name: str,
    tables: Sequence[EmbeddingVariable] = (),
) -> tf.Tensor:
    """For each sample of this rank the vectors of all ranks' features, one after the other.

    Args:
        features: of tables of row numbers that lie here, whole or some columns of them; a vector of each of B samples:
            pooled, or keys [B]. The same B on all ranks that have features.
        training: as in `sok.lookup.lookup.lookup_parts`.
        widths: of each rank how many columns all its features have.
        transport: of the ranks that share the batch.
        name: of the collectives, the same on all ranks.
        tables: those of all ranks' features: a rank that holds none that is trained takes part in the gradient, too.

    Returns:
        [B / R, sum(widths)] float32: samples r B / R to (r + 1) B / R on rank r. Collective: one, and one for the
        gradient. Differentiable in the tables.

    Raises:
        tf.errors.InvalidArgumentError: an id is no row number; B is not a multiple of R, or differs: on all ranks.
    """
    exchanged.note(name, [*tables, *(f.table for f in features)])
    features = [dataclasses.replace(f, ids=to_csr(f)) for f in features]
    header, num_samples = _judged(features, transport.size)
    is_good = tf.equal(header[0], 0)
    outputs: list[Any] = []
    if features:
        keys = [tf.where(is_good, f.ids.keys, tf.zeros_like(f.ids.keys)) for f in features]
        asked = [
            dataclasses.replace(f, ids=dataclasses.replace(f.ids, keys=k)) for f, k in zip(features, keys, strict=True)
        ]
        insert = tf.logical_and(tf.convert_to_tensor(training, tf.bool), is_good)
        outputs = [None] * len(asked)
        for places in by_device(asked):
            there = [asked[place] for place in places]
            for place, out in zip(places, finish(Ticket(tuple(there), Group.of(there), insert, None)), strict=True):
                outputs[place] = out
    rows = num_samples // transport.size * transport.size
    mine = tf.concat([out[:rows] for out in outputs], 1) if outputs else tf.zeros([0, 0])
    watched = _watched([f.table for f in features], tables)
    mine = mine if watched is None else mine + watched
    return _sent_home(mine, tf.bitcast(header, tf.float32), widths, transport, name)


def _watched(mine: Sequence[EmbeddingVariable], tables: Sequence[EmbeddingVariable]) -> tf.Tensor | None:
    """Zero; made of a table that is trained, if none of `mine` is: what depends on none has no gradient to wait for."""
    trained = [table for table in tables if table.trainable]
    if not trained or any(table.trainable for table in mine):
        return None
    nothing = Feature(trained[0], Csr(tf.zeros([0], trained[0].key_dtype)))
    (rows,) = finish(Ticket((nothing,), Group.of([nothing]), tf.constant(False), None))
    return tf.reduce_sum(rows)


def _judged(features: Sequence[Feature], size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """What is wrong here, [4] int32; and the number of samples."""
    if not features:
        return tf.zeros([_HEADER], tf.int32), tf.zeros([], tf.int64)
    # Few ops of each feature: there may be thousands, and each op is built, and run, in every program.
    lowest, highest, samples, axis = [], [], [], tf.constant([0])
    for f in features:
        keys = tf.cast(f.ids.keys, tf.int64)
        lowest.append(tf.raw_ops.Min(input=keys, axis=axis))  # of none the largest number there is
        highest.append(tf.raw_ops.Max(input=keys, axis=axis))
        samples.append(tf.size(keys if f.combiner == ROWS else f.ids.row_splits, tf.int64))
    low, high = tf.stack(lowest), tf.stack(highest)
    are_wrong = (low < 0) | (high >= tf.constant([f.table.num_keys for f in features], tf.int64))
    first = tf.argmax(are_wrong, output_type=tf.int32)
    counts = tf.stack(samples) - tf.constant([int(f.combiner != ROWS) for f in features], tf.int64)
    is_uneven = tf.reduce_any(counts != counts[0]) | (counts[0] % size != 0)
    code = tf.where(tf.reduce_any(are_wrong), _BAD_ID, tf.where(is_uneven, _UNEVEN, 0))
    detail = tf.where(tf.reduce_any(are_wrong), tf.where(low < 0, low, high)[first], tf.reduce_max(counts))
    fewest = tf.reduce_min(counts)
    return tf.concat([[code, first], tf.bitcast(detail, tf.int32)], 0), fewest


def _sent_home(mine: tf.Tensor, header: tf.Tensor, widths: Sequence[int], transport: Transport, name: str) -> tf.Tensor:
    size, width, total = transport.size, widths[transport.rank], sum(widths)

    @custom_gradient
    def exchange(mine: tf.Tensor) -> tuple[tf.Tensor, Any]:
        body = tf.reshape(mine, [size, -1]) if width else tf.zeros([size, 0])
        message = tf.concat([tf.tile(header[None], [size, 1]), body], 1)
        splits = tf.fill([size], tf.shape(message)[1])
        home, came = transport.all_to_all(tf.reshape(message, [-1]), splits, f"{name}/rows")
        part = (tf.size(home) - size * _HEADER) // max(total, 1)
        starts = tf.cumsum(came, exclusive=True)
        headers = [tf.bitcast(home[starts[rank] : starts[rank] + _HEADER], tf.int32) for rank in range(size)]
        # Who has refused its input has sent something else than the others expect: that is said first.
        checks = [check for rank, one in enumerate(headers) for check in _raised(rank, one, size)]
        with tf.control_dependencies([check for check in checks if check is not None]):
            is_whole = tf.reduce_all(came == _HEADER + part * tf.constant(widths))
            check = tf.debugging.Assert(is_whole, ["The batch of all samples must be one on all ranks."])
        with tf.control_dependencies([] if check is None else [check]):
            bodies = [home[starts[rank] + _HEADER : starts[rank] + came[rank]] for rank in range(size)]
            found = [tf.reshape(body, [part, columns]) for body, columns in zip(bodies, widths, strict=True)]

        def grad(upstream: tf.Tensor) -> tf.Tensor:
            parts = [tf.reshape(one, [-1]) for one in tf.split(upstream, list(widths), 1)]
            sizes = tf.stack([tf.size(one) for one in parts])
            back, _ = transport.all_to_all(tf.concat(parts, 0), sizes, f"{name}/grads")
            return tf.reshape(back, [-1, width]) if width else tf.zeros([0, 0])

        return tf.concat(found, 1), grad

    return exchange(mine)


def _raised(rank: int, header: tf.Tensor, size: int) -> list[Any]:
    """Ops that raise what a rank says of its input."""
    detail = tf.strings.as_string(tf.bitcast(header[2:], tf.int64))
    place = tf.strings.as_string(header[1])
    bad_id = tf.strings.join(["Input ", place, f" of those of rank {rank} has an id that is no row number: ", detail])
    uneven = tf.strings.join(
        [f"All inputs of rank {rank} must have one number of samples, a multiple of {size}: ", detail]
    )
    return [
        tf.debugging.Assert(tf.not_equal(header[0], _BAD_ID), [bad_id]),
        tf.debugging.Assert(tf.not_equal(header[0], _UNEVEN), [uneven]),
    ]


def collective_name(name: str) -> str:
    """Of one lookup of the whole batch, the same on all ranks."""
    return context.unique_collective_name(f"sok/{name}/whole_batch")
