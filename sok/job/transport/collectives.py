"""Many workers through TensorFlow's own collectives, those of `tf.distribute.MultiWorkerMirroredStrategy`.

TensorFlow's collectives take tensors of equal shapes on all ranks, and one whose shape differs ends all of them for
good. So each of ours is two of TensorFlow's:

    headers   every rank tells all others what it is in, and how many rows it has for each
    payload   rows, padded to the most that any rank has for any other; rounded up, so that there are few sizes

All ranks see all headers, and so refuse alike what does not fit, before the payload.

TensorFlow matches a collective by two numbers, its group's key and its instance's. Both come from a checksum of our
name; the instance's also says which of the two it is, of which dtype and size. So a name has few instances, which is
what TensorFlow keeps memory for, and none is met with another shape.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import tracing
from sok.base.graph_ops import run_now
from sok.job.transport import cluster
from sok.job.transport.base import check_has_rows, check_movable
from sok.job.transport.many import ManyTransport
from sok.job.transport.store import Store
from sok.job.transport.watch import Watch

_CPU = "/CPU:0"
# What TensorFlow's collectives move; of others we move the bits, or wider numbers.
_WIRE = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_BITS = {tf.bfloat16: tf.float16, tf.int16: tf.float16, tf.uint16: tf.float16, tf.uint32: tf.int32, tf.uint64: tf.int64}
_WIDER = {tf.uint8: tf.int32, tf.int8: tf.int32, tf.bool: tf.int32}

_HEADER, _ALL_TO_ALL, _GATHER, _REDUCE, _BROADCAST = range(5)
# Sizes of payloads, in elements: eight in each octave, so that at most a ninth is padding.
_SIZES = np.array([m << e for e in range(1, 31) for m in range(8, 16)], np.int64)
_EAGER = "sok/eager"  # the name under which eager all-to-alls meet, whatever they are: who is out of step is told
_NO_V1 = (
    "{}: this job runs on TensorFlow's collectives (TF_CONFIG, MultiWorkerMirroredStrategy), which do not reach other "
    "workers from a v1 graph or session. Use eager mode and tf.function, or start the workers by horovodrun."
)
_WORDS = 4  # of a header before its counts: rank, checksum of the name, kind and dtype, elements of a row


@contextlib.contextmanager
def told_if_some_do_not_come(seconds: float) -> Iterator[None]:
    """Ends collectives that wait in the body for longer, with words about `sok.Init`. 0: never."""
    timer = threading.Timer(
        seconds,
        cluster.abort,
        [
            f"sok.Init has waited for {seconds:g} s, and not all workers have called it. Call it once on every worker "
            "that TF_CONFIG names, after the strategy is made. sok.Init(deadline=) says how long it waits."
        ],
    )
    timer.daemon = True
    if seconds:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class CollectivesTransport(ManyTransport):
    """The workers of TF_CONFIG, or of the `MultiWorkerMirroredStrategy` that there is. Makes one if there is none.

    Works eagerly and in `tf.function`. A v1 graph is refused: its sessions reach other workers through a server of
    their own, which eager programs do not have.

    Args:
        deadline: seconds that a collective may wait for workers which do not come (`transport/watch.py`); 0: for ever.

    Raises:
        RuntimeError: TensorFlow cannot meet the others any more, or orders them in another way.
    """

    name = "tensorflow"
    _added_as = {tf.uint8: tf.int32, tf.int8: tf.int32, tf.bfloat16: tf.float32}

    def __init__(self, deadline: float = 0.0) -> None:
        with tf.init_scope():
            if not tf.executing_eagerly():
                raise RuntimeError(_NO_V1.format("sok.Init"))
        met = cluster.meet()
        self.rank, self.size, self.local_rank = met.rank, met.size, met.local_rank
        self._store: Store | None = None
        with told_if_some_do_not_come(deadline):  # nothing else watches yet
            headers = run_now(
                lambda: self._headers([], "sok/ranks", (_HEADER, tf.int32), tf.constant([0] * (1 + self.size)))
            )
            store = self._address_of_store(met) if deadline else ""
        if headers[:, 0].tolist() != list(range(self.size)):
            raise RuntimeError(
                f"TensorFlow numbers the workers {headers[:, 0].tolist()}, sok in the order of TF_CONFIG."
            )
        if deadline:
            self._watch = Watch(self.rank, self.size, deadline, store, self.abort)

    def _address_of_store(self, met: cluster.Cluster) -> str:
        """'host:port' of the key-value store that rank 0 starts now."""
        if self.rank == 0:
            self._store = Store()
        mine = tf.constant(self._store.server_port if self._store else 0)
        port = run_now(lambda: self.broadcast(mine, 0, "sok/watch/store"))
        return f"{met.addresses[0].rpartition(':')[0]}:{port}"

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.device(_CPU):
            tensor, splits = tf.convert_to_tensor(tensor), tf.cast(splits, tf.int64)
            wire, width = _flat(tensor, "all_to_all")

            def collective(wire: tf.Tensor, turns: list[tf.Tensor]) -> list[tf.Tensor]:
                fits = tf.reduce_all(splits >= 0) & tf.equal(tf.reduce_sum(splits), tf.shape(tensor, tf.int64)[0])
                counts = self._meet(turns, name, (_ALL_TO_ALL, tensor.dtype), width, tf.where(fits, splits, -1))
                size, place = _padded(tf.reduce_max(counts) * width)
                parts: list[tf.Tensor] = []
                ends = tf.unstack(tf.cumsum(splits * width), self.size)
                for begin, end in zip([tf.zeros_like(width), *ends[:-1]], ends, strict=True):
                    parts += [wire[begin:end], tf.zeros([size - end + begin], wire.dtype)]
                received = tf.raw_ops.CollectiveAllToAllV2(
                    input=tf.reshape(tf.concat(parts, 0), [self.size, size]),
                    **self._keys(_met_as(name, _ALL_TO_ALL), _ALL_TO_ALL, wire.dtype, place, turns),
                )
                mine = counts[:, self.rank]
                return [_cut(received, mine * width, self.size), tf.cast(mine, tf.int32)]

            received, received_splits = self._run("all_to_all", name, wire, collective)
            received_splits.set_shape([self.size])
            return _like(received, tensor, tf.reduce_sum(received_splits)), received_splits

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        with tf.device(_CPU):
            tensor = tf.convert_to_tensor(tensor)
            check_has_rows(tensor, f"all_gather '{name}'")
            wire, width = _flat(tensor, "all_gather")

            def collective(wire: tf.Tensor, turns: list[tf.Tensor]) -> list[tf.Tensor]:
                rows = tf.concat([tf.shape(tensor, tf.int64)[:1], tf.zeros([self.size - 1], tf.int64)], 0)
                counts = self._meet(turns, name, (_GATHER, tensor.dtype), width, rows)[:, 0]
                size, place = _padded(tf.reduce_max(counts) * width)
                received = tf.raw_ops.CollectiveGatherV2(
                    input=_pad(wire, size)[tf.newaxis], **self._keys(name, _GATHER, wire.dtype, place, turns)
                )
                return [_cut(received, counts * width, self.size), tf.cast(tf.reduce_sum(counts), tf.int32)]

            gathered, rows_of_all = self._run("all_gather", name, wire, collective)
            return _like(gathered, tensor, rows_of_all)

    def _reduce_group(self, group: list[tf.Tensor], name: str, average: bool) -> list[tf.Tensor]:
        def collective(first: tf.Tensor, turns: list[tf.Tensor]) -> list[tf.Tensor]:
            tensors = [first, *group[1:]]
            flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
            count = tf.size(flat, tf.int64)
            size, place = _padded(count + self._meet(turns, name, (_REDUCE, flat.dtype), count)[0, 0])
            sums = tf.raw_ops.CollectiveReduceV2(
                input=_pad(flat, size),
                merge_op="Add",
                final_op="Id",
                **self._keys(name, _REDUCE, flat.dtype, place, turns),
            )[:count]
            pieces = tf.split(sums / self.size if average else sums, [tf.size(tensor) for tensor in tensors])
            return [tf.reshape(piece, tf.shape(tensor)) for piece, tensor in zip(pieces, tensors, strict=True)]

        return self._run("all_reduce", name, group, collective)

    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str) -> tf.Tensor:
        self._check_root(root_rank)
        with tf.device(_CPU):
            tensor = tf.convert_to_tensor(tensor)
            wire, _ = _flat(tensor, "broadcast")

            def collective(wire: tf.Tensor, turns: list[tf.Tensor]) -> list[tf.Tensor]:
                count = tf.size(wire, tf.int64)
                size, place = _padded(count + self._meet(turns, name, (_BROADCAST, tensor.dtype), count)[0, 0])
                # TensorFlow remembers who has sent in an instance: so each root has names of its own.
                keys = self._keys(f"{name}/of rank {root_rank}", _BROADCAST, wire.dtype, place)
                if self.rank == root_rank:
                    received = tf.raw_ops.CollectiveBcastSendV2(input=_pad(wire, size), **keys)
                else:
                    shape = tf.cast(size, tf.int32)[tf.newaxis]
                    received = tf.raw_ops.CollectiveBcastRecvV2(T=wire.dtype, shape=shape, **keys)
                return [received[:count]]

            (received,) = self._run("broadcast", name, wire, collective)
            return _like(received, tensor, None)

    def barrier(self, name: str) -> tf.Tensor:
        with tf.device(_CPU):

            def collective(one: tf.Tensor, turns: list[tf.Tensor]) -> list[tf.Tensor]:
                counts = self._meet(turns, name, (_HEADER, tf.int32), one)
                return [one + tf.cast(counts[0, 0], tf.int32)]

            return self._run("barrier", name, tf.constant(1), collective)[0]

    def _meet(
        self, turns: list[tf.Tensor], name: str, kind: tuple[int, tf.DType], width: Any, counts: Any = None
    ) -> tf.Tensor:
        """Meets all ranks in one collective: what each has for each [R, R] int64; zeros if `counts` are None.

        It raises, on all ranks, unless all are in the same; what is to run after it must depend on its result.
        """
        counts = tf.zeros([self.size], tf.int64) if counts is None else counts
        words = tf.concat([tf.reshape(tf.cast(width, tf.int64), [1]), counts], 0)
        headers = self._headers(turns, name, kind, words)
        if tf.executing_eagerly():
            if wrong := self._wrong(headers.numpy(), name):
                tracing.done(headers, name)  # it waits for nobody any more
                raise wrong
            return headers[:, _WORDS:]
        counts, is_same = headers[:, _WORDS:], tf.reduce_all(headers[:, 1:_WORDS] == headers[self.rank, 1:_WORDS])
        fits = tf.reduce_all(counts >= 0)
        bad = f"all_to_all '{name}': the splits of a rank are negative, or do not sum to the rows of its tensor."
        said = tf.where(is_same, tf.where(fits, "0", bad), _in_another_call(name, "another rank"))
        # What is no number raises, with its words. No Assert: a function runs these in the order of its program, and
        # each of them would wait for a collective.
        return counts + tf.strings.to_number(said, tf.int64)

    def _wrong(self, headers: np.ndarray, name: str) -> Exception | None:
        for rank, header in enumerate(headers):
            if (header[1:_WORDS] != headers[self.rank, 1:_WORDS]).any():
                # A rank that differs from most of the others; each rank names one.
                return tf.errors.FailedPreconditionError(None, None, _in_another_call(name, f"rank {rank}"))
        bad = np.flatnonzero((headers[:, _WORDS:] < 0).any(axis=1)).tolist()
        if not bad:
            return None
        text = (
            f"all_to_all '{name}': the splits of rank {bad[0]} are negative, or do not sum to the rows of its tensor."
        )
        return tf.errors.InvalidArgumentError(None, None, text)

    def _headers(self, turns: list[tf.Tensor], name: str, kind: tuple[int, tf.DType], words: tf.Tensor) -> tf.Tensor:
        """What all ranks say of the collective that they are in: [R, 4 + R] int64."""
        kind_and_dtype = kind[0] * 256 + kind[1].as_datatype_enum
        own = tf.constant([self.rank, _checksum(name), kind_and_dtype], tf.int64)
        with tf.device(_CPU):
            mine = tf.concat([own, tf.cast(words, tf.int64)], 0)
            return tf.raw_ops.CollectiveGatherV2(
                input=mine[tf.newaxis], **self._keys(_met_as(name, kind[0]), _HEADER, tf.int64, 0, turns)
            )

    def _keys(self, name: str, kind: int, dtype: tf.DType, place: Any, turns: Any = None) -> dict[str, Any]:
        """What TensorFlow matches a collective by: 30 bits of the name's checksum and 17 others, and what it is."""
        checksum = _checksum(name)
        instance = ((checksum >> 30) % 2**17 << 14) + (kind << 11) + (_WIRE.index(dtype) << 8)
        return {
            "group_size": self.size,
            # Above the keys of strategies, which count from 1.
            "group_key": 2**30 + checksum % 2**30,
            "instance_key": tf.cast(place, tf.int32) + instance,
            # Else TensorFlow would order a function's collectives among all that it has, not those of a name.
            **({} if turns is None else {"ordering_token": turns}),
        }

    def _run(self, kind: str, name: str, tensors: Any, collective: Any) -> Any:
        if not tf.executing_eagerly() and not tf.compat.v1.executing_eagerly_outside_functions():
            raise RuntimeError(_NO_V1.format(f"{kind} '{name}'"))
        return super()._run(kind, name, tensors, collective)

    def gpu_tensors(self) -> str:
        return "staged through the host (TensorFlow's collectives over gRPC)"

    def describe_ended(self) -> str:
        return "" if self._watch is None else self._watch.describe_ended()

    def abort(self) -> None:
        self._was_aborted = True
        cluster.abort((self._watch and self._watch.verdict) or "The job was ended (see above).")

    def shutdown(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        # TensorFlow's server, and with it the store, lives as long as the process: peers may still ask both.


def _met_as(name: str, kind: int) -> str:
    return _EAGER if kind == _ALL_TO_ALL and tf.executing_eagerly() else name


def _checksum(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def _in_another_call(name: str, who: str) -> str:
    return (
        f"what {who} sent is not of collective '{name}', or has another dtype or shape: it was in another call. All "
        "workers must make the same lookups, in the same order."
    )


def _flat(tensor: tf.Tensor, what: str) -> tuple[tf.Tensor, tf.Tensor]:
    """The elements of a tensor as TensorFlow's collectives move them [n], and how many a row has."""
    check_movable(tensor.dtype, what)
    wire = tensor
    if tensor.dtype in _BITS:
        wire = tf.bitcast(tensor, _BITS[tensor.dtype])
    elif tensor.dtype in _WIDER:
        wire = tf.cast(tensor, _WIDER[tensor.dtype])
    return tf.reshape(wire, [-1]), tf.reduce_prod(tf.shape(tensor, tf.int64)[1:])


def _like(wire: tf.Tensor, tensor: tf.Tensor, rows: tf.Tensor | None) -> tf.Tensor:
    """The reverse of `_flat`, of the dtype of `tensor` and its shape, but for the number of `rows` if that is given."""
    shape = tf.shape(tensor) if rows is None else tf.concat([tf.reshape(rows, [1]), tf.shape(tensor)[1:]], 0)
    if tensor.dtype in _BITS:
        wire = tf.bitcast(wire, tensor.dtype)
    elif tensor.dtype in _WIDER:
        wire = tf.cast(wire, tensor.dtype)
    result = tf.reshape(wire, shape)
    if rows is None:
        result.set_shape(tensor.shape)
    elif tensor.shape.rank is not None:
        result.set_shape([None, *tensor.shape[1:]])
    return result


def _padded(count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The size of a payload of so many elements, int64, and its place among all sizes."""
    place = tf.searchsorted(_SIZES, tf.reshape(count, [1]))[0]
    return tf.gather(_SIZES, place), place


def _pad(flat: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    return tf.concat([flat, tf.zeros([size - tf.size(flat, tf.int64)], flat.dtype)], 0)


def _cut(received: tf.Tensor, counts: tf.Tensor, size: int) -> tf.Tensor:
    """The first elements of each row, one row after the other."""
    rows = zip(tf.unstack(received, size), tf.unstack(counts, size), strict=True)
    return tf.concat([row[:count] for row, count in rows], 0)
