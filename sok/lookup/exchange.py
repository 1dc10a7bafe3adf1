"""Lookups whose rows live on several workers: any number of tables by one exchange.

Three steps, each a function from values to values:

    input exchange    keys of all tables go to their owners    collective 1
    local lookup      owners find (or make) rows
    output exchange   rows of all tables come home             collective 2; its gradient is collective 3

then the answers are pooled, or gathered as they are. Owners answer in one of two ways, table by table
(`EmbeddingVariable.way_home`): with each distinct key's row once, or with partial sums that they have pooled.
docs/design/exchange.md has the layout of the messages.

A worker that stopped before a collective would leave its peers waiting. So messages carry input errors, and all workers
raise them. What Python itself refuses (a dtype, a rank, a form) is told to the peers when executing eagerly; inside a
function, or a v1 graph, such an error comes while it is built, before anything is sent, and ends the job unless all
workers refuse alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from sok.base import _ops
from sok.job import context
from sok.job.transport import ordering
from sok.job.transport.refusal import all_refuse
from sok.table import reading
from sok.table.keys import as_keys
from sok.table.table import EmbeddingVariable

if TYPE_CHECKING:
    from sok.job.transport.base import Transport
    from sok.lookup.lookup import Feature

# A feature with this for a combiner gives the rows of its keys.
ROWS = "rows"


@dataclasses.dataclass
class _Calls:
    begun: int = 0
    number: int = 0  # of the next eager one, among those since the ranks last were in different calls


_lock = threading.Lock()
# Of each exchange, by transport: a job that starts anew counts anew.
_calls: weakref.WeakKeyDictionary[Any, dict[str, _Calls]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class _Group:
    """The distinct tables of some features, in order of first use."""

    tables: tuple[EmbeddingVariable, ...]

    @property
    def name(self) -> str:
        """Of no other group of the program: a '+' of a table's name is doubled."""
        more = f"+{len(self.tables) - 1}" if len(self.tables) > 1 else ""
        return f"sok/{self.tables[0].table_name.replace('+', '++')}{more}"

    @property
    def handles(self) -> list[tf.Tensor]:
        return [table.handle for table in self.tables]

    @property
    def dims(self) -> list[int]:
        return [table.dim for table in self.tables]

    @property
    def device(self) -> str:
        """Where the tables are; empty in a v1 graph that leaves it to TensorFlow."""
        return self.tables[0].handle.device or ""

    def check_device(self) -> None:
        """`ValueError` unless all tables are in one place."""
        for table in self.tables:
            device = table.handle.device or ""
            if device != self.device:
                raise ValueError(
                    "The tables of one lookup must be on one device; look them up in two calls. Received: "
                    f"'{self.tables[0].table_name}' on {self.device} and '{table.table_name}' on {device}."
                )

    @property
    def word_dtype(self) -> tf.DType:
        return tf.int64 if any(table.key_dtype.size == 8 for table in self.tables) else tf.int32

    @property
    def program(self) -> int:
        """A number that differs for other tables, so that workers notice that they run different programs."""
        text = ";".join(
            f"{t.table_name},{t.dim},{t.key_dtype.name},{t.capacity},{t.hashed},{t.placement}" for t in self.tables
        )
        return zlib.crc32(text.encode()) & 0x7FFFFFFF


@dataclasses.dataclass(frozen=True)
class _Request:
    """This rank as an owner: what its peers ask of it. And where this rank's own answers will lie."""

    words: tf.Tensor  # header and keys of each peer
    splits: tf.Tensor  # [R] int32
    index: list[tf.Tensor]  # of each feature int32: place in the answers of each key's row, or of each partial sum
    row_splits: list[tf.Tensor]  # of each feature [S + 1] int64, of what index lists
    scales: list[tf.Tensor]  # of each feature by sums what its combiner multiplies each of them with; else empty
    asked: tf.Tensor  # [R] int32, floats this rank will get from each peer


@dataclasses.dataclass(frozen=True)
class _Call:
    """One lookup of a group."""

    group: _Group
    number: int  # among the eager calls; 0 inside a graph
    insert: tf.Tensor
    attributes: dict[str, Any]  # what the native ops are told of group and features

    @property
    def dtype(self) -> str:
        """What rows and gradients travel in."""
        return self.attributes["exchange_dtype"]

    def collective(self, what: str) -> str:
        return context.unique_collective_name(f"{self.group.name}/{what}")


def lookup_group(features: Sequence[Feature], training: Any = True) -> list[tf.Tensor]:
    """One pooled vector per segment of each feature, from any number of tables.

    Args:
        features: at least one; several may share a table. All of the same job.
        training: whether keys without a row get one; bool or bool scalar tensor, equal on all workers. Without, they
            read as their initial value.

    Returns:
        For each feature [S, D] float32 of its table; an empty segment gives zeros. With the combiner `ROWS`, one row
        per key, [N, D].

    Raises:
        tf.errors.InvalidArgumentError: the input of a worker is not what it should be; on all workers.
        tf.errors.ResourceExhaustedError: a shard is full; on all workers.
        tf.errors.FailedPreconditionError: the workers are in different calls, or `training` differs; on all workers.
        ValueError, TypeError: of what Python refuses; see `told_to_peers`.

    Collective: 2 collectives, and 1 for the gradient. Differentiable in the tables and weights. If an output of a group
    contributes to the loss on one worker, one must on every worker: the gradient is a collective too.
    """
    group = _Group(tuple(dict.fromkeys(feature.table for feature in features)))
    for table in group.tables:
        reading.note(table)
    with told_to_peers(*group.tables):
        training = tf.convert_to_tensor(training, tf.bool)
        group.check_device()
        keys = [as_keys(f.csr.keys, f.table.key_dtype, f.table.table_name) for f in features]
        row_splits = [tf.convert_to_tensor(f.csr.row_splits, tf.int64) for f in features]
        weights = [_weights(f.csr.weights) for f in features]
        _check_ranks(features, keys, row_splits, weights)
    number = _count_call(group)
    call = _Call(group, number, training, _attributes(group, features))
    # Where the tables are, so that what they answer is known to lie there when its way home is chosen.
    with _on(group.device):
        request = _input_exchange(call, keys, row_splits, weights, [f.combiner for f in features])
        answers, answer_splits = _local_lookup(call, request)
    home, home_splits = _output_exchange(call, answers, answer_splits, request.asked)
    outputs, checked_splits = _ops.lib().sok_exchange_combine(
        home,
        home_splits,
        request.asked,
        request.index,
        request.row_splits,
        weights,
        request.scales,
        combiners=[f.combiner for f in features],
        dims=[f.table.dim for f in features],
    )
    ordering.answered(checked_splits)
    return outputs


@contextlib.contextmanager
def told_to_peers(*tables: EmbeddingVariable) -> Iterator[None]:
    """Around what prepares one lookup in `tables`, and the lookup itself: peers do not wait for what raises before it.

    Eagerly, their lookups raise what this one raised. While a function is traced, its other collectives are not known
    yet, so nobody could be told in all of them: either all workers refuse what they trace, or the job ends with words.
    The same while a v1 graph is built. With one worker it does nothing. `tables` are those of the lookup's features, in
    their order.
    """
    if tables[0].world_size == 1:
        yield
        return
    group = _Group(tuple(dict.fromkeys(tables)))
    before = _begun(group)
    try:
        yield
    except Exception as error:  # whatever it is, the peers must not wait for this rank
        if _begun(group) == before:
            _refuse(error, group)
        raise


def _refuse(error: Exception, group: _Group) -> None:
    """Takes part in collective 1 of a lookup, with nothing but bad news."""
    number, transport, text = _count_call(group), context.get_transport(), f"{type(error).__name__}: {error}"
    if not tf.executing_eagerly():
        all_refuse(transport, f"{group.name}/refused", text)
        return
    words, splits = _ops.lib().sok_exchange_refuse(
        tf.constant(number, tf.int64),
        True,
        Tword=group.word_dtype,
        program=group.program,
        world_size=transport.size,
        text=text.encode(),
    )
    transport.all_to_all(words, splits, context.unique_collective_name(f"{group.name}/keys"))


def _count_call(group: _Group) -> int:
    """Which eager call of the group's exchange this is: the same on all ranks that have made the same calls.

    Inside a graph a number that is known when it is traced would say nothing.
    """
    with _lock:
        calls = _calls.setdefault(context.get_transport(), {}).setdefault(group.name, _Calls())
        calls.begun += 1
        if not tf.executing_eagerly():
            return 0
        number = calls.number % 0x7FFFFFFF
        calls.number = number + 1
        return number


def _begun(group: _Group) -> int:
    """How many lookups of the group this rank has begun, or built, or refused."""
    with _lock:
        return _calls.setdefault(context.get_transport(), {}).setdefault(group.name, _Calls()).begun


@contextlib.contextmanager
def _counting_anew() -> Iterator[None]:
    """Where ranks met in different calls, all raise here, and count all their exchanges from here on."""
    try:
        yield
    except tf.errors.FailedPreconditionError:
        with _lock:
            for calls in _calls[context.get_transport()].values():
                calls.number = 0
        raise


def _attributes(group: _Group, features: Sequence[Feature]) -> dict[str, Any]:
    number = {table: i for i, table in enumerate(group.tables)}
    return {
        "program": group.program,
        "exchange_dtype": _common_dtype(features),
        "table_of": [number[feature.table] for feature in features],
        "slot_num": [feature.limits.slot_num for feature in features],
        "max_nnz": [feature.limits.max_nnz for feature in features],
        "max_feature_num": [feature.limits.max_feature_num for feature in features],
    }


def _common_dtype(features: Sequence[Feature]) -> str:
    """What rows and gradients travel in: what all tables say."""
    said = {"float32" if feature.exact else feature.table.exchange_dtype for feature in features}
    return said.pop() if len(said) == 1 else "float32"


def _input_exchange(
    call: _Call,
    keys: list[tf.Tensor],
    row_splits: list[tf.Tensor],
    weights: list[tf.Tensor],
    combiners: list[str],
) -> _Request:
    routed = _ops.lib().sok_exchange_route(
        call.group.handles,
        call.number,
        call.insert,
        keys,
        row_splits,
        weights,
        Tword=call.group.word_dtype,
        combiners=combiners,
        ways=[table.way_home for table in call.group.tables],
        **call.attributes,
    )
    with _counting_anew():
        words, splits = context.get_transport().all_to_all(routed.words, routed.splits, call.collective("keys"))
    return _Request(words, splits, routed.index, routed.splits_home, routed.scales, routed.asked)


def _local_lookup(call: _Call, request: _Request) -> tuple[tf.Tensor, tf.Tensor]:
    with _counting_anew():
        served = _ops.lib().sok_exchange_serve(
            call.group.handles,
            request.words,
            request.splits,
            call.number,
            call.insert,
            dims=call.group.dims,
            **call.attributes,
        )
    return served.answers, served.answer_splits


def _output_exchange(
    call: _Call, answers: tf.Tensor, splits: tf.Tensor, asked: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends answers to the peers that asked, `splits` floats to each; gives those of all owners, and their sizes."""
    transport, served = context.get_transport(), answers

    @tf.custom_gradient
    def exchange(answers: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Any]:
        if not call.group.device:  # what a custom gradient is given is a copy, of no known place
            with _beside(served, ""):
                answers = tf.identity(answers)
        home, home_splits = _send(transport, call, "rows", answers, splits, asked)

        def grad(upstream: tf.Tensor, _: Any) -> tf.Tensor:
            with _beside(served, call.group.device):  # they end where the answers began
                upstream = tf.identity(tf.convert_to_tensor(upstream))
            return _send(transport, call, "grads", upstream, home_splits, splits)[0]

        return (home, home_splits), grad

    return exchange(answers)


def _send(
    transport: Transport, call: _Call, what: str, floats: tf.Tensor, splits: tf.Tensor, expected: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends `splits` floats to each peer, in the call's dtype; gives the `expected` ones of each, and their sizes."""
    name = call.collective(what)
    if call.dtype == "float32":
        with _counting_anew():
            return transport.all_to_all(floats, splits, name)
    lib = _ops.lib()
    # Where the tables are: a GPU then has half as much to copy.
    with _beside(floats, call.group.device):
        words, word_splits = lib.sok_exchange_narrow(floats, splits, type=call.dtype)
    with _counting_anew():
        received, received_splits = transport.all_to_all(words, word_splits, name)
    with _beside(words, call.group.device):
        return lib.sok_exchange_widen(received, received_splits, expected, type=call.dtype)


def _on(device: str) -> contextlib.AbstractContextManager[Any]:
    return tf.device(device) if device else contextlib.nullcontext()


def _beside(tensor: tf.Tensor, device: str) -> contextlib.AbstractContextManager[Any]:
    """On the device; where a v1 graph leaves that to TensorFlow, wherever it will put the tensor."""
    in_v1_graph = not tf.compat.v1.executing_eagerly_outside_functions()
    return tensor.graph.colocate_with(tensor.op, ignore_existing=True) if in_v1_graph and not device else _on(device)


def _weights(weights: Any) -> tf.Tensor:
    return tf.zeros([0], tf.float32) if weights is None else tf.convert_to_tensor(weights, tf.float32)


def _check_ranks(
    features: Sequence[Feature], keys: list[tf.Tensor], row_splits: list[tf.Tensor], weights: list[tf.Tensor]
) -> None:
    for f, feature in enumerate(features):
        for what, tensor in (("keys", keys[f]), ("row_splits", row_splits[f]), ("weights", weights[f])):
            if tensor.shape.rank not in (1, None):
                raise ValueError(
                    f"table '{feature.table.table_name}': `{what}` must have rank 1. Received: shape {tensor.shape}."
                )
