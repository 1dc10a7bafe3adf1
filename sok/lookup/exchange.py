"""Lookups whose rows live on several workers: any number of tables by one exchange, in two halves.

    send_keys     keys of all tables go to their owners                      collective 1
    fetch_rows    owners find (or make) rows; those of all tables come home  collective 2; its gradient is collective 3

Between the two, `send_rows` may send them home as they are. `fetch_rows` then sends again only what has changed.

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
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import _ops
from sok.base.custom_gradient import custom_gradient
from sok.base.graph_ops import run_now
from sok.job.transport import ordering
from sok.job.transport.refusal import all_refuse
from sok.lookup import advice, host_ids, messages, read_ahead, servers
from sok.lookup.feature import Feature, Group
from sok.table import exchanged
from sok.table.table import EmbeddingVariable


@dataclasses.dataclass
class _Calls:
    begun: int = 0  # lookups that this rank has begun, built, refused, or finished if begun ahead
    number: int = 0  # of the next eager one, among those since the ranks last were in different calls


_lock = threading.Lock()
note_gradient: Callable[[Sent], None] | None = None  # called where the gradient of a lookup is taken, or built
# Of each exchange, by transport: a job that starts anew counts anew.
_calls: weakref.WeakKeyDictionary[Any, dict[str, _Calls]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Ahead:
    """As what keys travel whose lookup is finished later: nothing else in the job has messages of this name."""

    name: str
    number: tf.Tensor  # int64 []: of the batch; workers whose numbers differ raise as those in different calls do
    has_ended: bool | tf.Tensor = False  # this worker has no such batch, and so no ids, and says so
    rows: bool = False  # rows travel ahead as well
    is_stale: bool = False  # and are not sent again in the step
    batches: int = 1  # how many begin before the first of them has its step
    reads: list[tf.Operation] | None = None  # of a v1 graph: gets what is to run besides, so that files are read

    def collective(self, group: Group) -> str:
        return group.collective(f"{self.name}/keys")


@dataclasses.dataclass(frozen=True)
class RowsAhead:
    """Rows that have travelled before the turn of their step."""

    answers: tf.Tensor  # what this rank has sent each peer, as they have it
    answer_splits: tf.Tensor  # [R] int32
    home: tf.Tensor  # what each owner has sent this rank
    home_splits: tf.Tensor  # [R] int32
    is_stale: bool


@dataclasses.dataclass(frozen=True)
class Sent:
    """Keys that are with their owners: what this rank is asked, and where its own answers will lie."""

    group: Group
    number: tf.Tensor  # int64 []: among the eager calls; 0 inside a graph; that of `Ahead`
    insert: tf.Tensor
    attributes: dict[str, Any]  # what the native ops are told of group and features
    words: tf.Tensor  # header and keys of each peer
    splits: tf.Tensor  # [R] int32
    # Of each feature, and of each part of its table from which rows come to this rank:
    index: list[tf.Tensor]  # int32: place in the answers of each key's row, or of each partial sum
    row_splits: list[tf.Tensor]  # [S + 1] int64, of what index lists
    scales: list[tf.Tensor]  # by sums what the combiner multiplies each of them with; else empty
    asked: tf.Tensor  # [R] int32, floats this rank will get from each peer
    is_ahead: bool  # its ids count where it is finished
    rows: RowsAhead | None = None
    said: tuple[tf.Tensor, tf.Tensor] | None = None  # the words that this rank has sent, and how many to each peer

    @property
    def dtype(self) -> str:
        """What rows and gradients travel in."""
        return self.attributes["exchange_dtype"]

    @property
    def question(self) -> tuple[Any, ...]:
        """What the ops take that answer: the words of all who ask, how many of each, and what the call is."""
        return self.words, self.splits, self.number, self.insert

    @property
    def dims(self) -> list[int]:
        """Of the tables' parts."""
        return [part.dim for table in self.group.tables for part in table.parts]


def send_keys(group: Group, features: Sequence[Feature], insert: tf.Tensor, ahead: Ahead | None = None) -> Sent:
    """The first half of a lookup, which changes no table: keys go to their owners.

    Args:
        group: the tables of the features.
        features: whose ids are Csr.
        insert: whether keys without a row get one; bool, equal on all workers.
        ahead: if other lookups may be finished before this one.

    Raises:
        ValueError: the tables are on several devices.
        tf.errors.FailedPreconditionError: the transport sees that the workers are in different calls.

    Collective: one. What is wrong with ids travels, and is raised by `fetch_rows`.
    """
    group.check_device()
    exchanged.note(group.name, group.tables)
    with tf.device("/CPU:0"):  # where kernels take it
        number = tf.convert_to_tensor(_count_call(group) if ahead is None else ahead.number, tf.int64)
    asked = [f for f in features for _ in f.table.parts]
    attributes = {
        "program": group.program,
        "exchange_dtype": _common_dtype(group, features),
        "table_of": group.parts_of(features),
        "copy_of": group.copy_of,
        **{limit: [feature.limits[limit] for feature in asked] for limit in features[0].limits},
    }
    keys, row_splits, weights = map(list, zip(*(f.ids.for_ops() for f in asked), strict=True))
    # Where the tables are, so that what they answer is known to lie there when its way home is chosen.
    with _on(group.device):
        question = (group.part_handles, number, insert, keys, row_splits, weights)
        how = dict(combiners=[f.pooling for f in asked], counts_ids=ahead is None, **attributes)
        how["Tword"] = group.word_dtype
        ways = ["rows" if group.is_on_servers else table.way_home for table in group.tables for _ in table.parts]
        is_home = [part in f.home_parts for f in features for part in f.table.parts]
        # By sums the host says which pieces there are, so it gets such ids, wherever they lie.
        if "sums" not in ways and host_ids.lie_on(group.device, keys):
            routed = _ops.lib().sok_exchange_route_rows(*question, **how)
            index, splits_home = ([*compress(of_all, is_home)] for of_all in (routed.index, row_splits))
            (splits_home,) = host_ids.together(group.device, splits_home)
            places = (index, splits_home, [tf.zeros([0])] * len(index), routed.asked)
        else:
            routed = _ops.lib().sok_exchange_route(*question, ways=ways, **how)
            home = ([*compress(of_all, is_home)] for of_all in (routed.index, routed.splits_home, routed.scales))
            places = (*host_ids.from_host(group.device, *home), routed.asked)
        if group.is_on_servers:  # where they wait for the second half
            return Sent(
                group, number, insert, attributes, routed.words, routed.splits, *places, is_ahead=ahead is not None
            )
        with _counting_anew(group):
            name = group.collective("keys") if ahead is None else ahead.collective(group)
            has_ended = False if ahead is None else ahead.has_ended
            said = routed.words if has_ended is False else messages.saying_end(routed.words, routed.splits, has_ended)
            words, splits = group.transport.all_to_all(said, routed.splits, name)
    said = (said, routed.splits)
    sent = Sent(group, number, insert, attributes, words, splits, *places, is_ahead=ahead is not None, said=said)
    if ahead is not None:
        read_ahead.of_words(sent, ahead)
    return sent if ahead is None or not may_send_rows(group, ahead) else _send_rows(sent, ahead)


def may_send_rows(group: Group, ahead: Ahead) -> bool:
    """Whether rows travel ahead: not those of tables on a GPU, or on servers."""
    return (
        ahead.rows and not group.is_on_servers and tf.DeviceSpec.from_string(group.device).device_type in (None, "CPU")
    )


def _send_rows(sent: Sent, ahead: Ahead) -> Sent:
    """Has owners send the rows that there are, which changes no table. Collective: one.

    An owner sends none where that would be bad news, which is for `fetch_rows` to raise; and none of tables whose rows
    change without a gradient, unless stale ones are asked for.
    """
    with _on(sent.group.device):
        answers, splits = _ops.lib().sok_exchange_peek(
            sent.group.part_handles,
            *sent.question,
            dims=sent.dims,
            is_stale=ahead.is_stale,
            **sent.attributes,
        )
    home, home_splits = _send(sent, f"{ahead.name}/rows", answers, splits, sent.asked)
    rows = RowsAhead(_as_they_come(sent, answers, splits), splits, home, home_splits, ahead.is_stale)
    return dataclasses.replace(sent, rows=rows)


def _as_they_come(sent: Sent, answers: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
    """Answers as peers have them, of the call's dtype."""
    if sent.dtype == "float32":
        return answers
    words, word_splits = _ops.lib().sok_exchange_narrow(answers, splits, type=sent.dtype)
    return _ops.lib().sok_exchange_widen(words, word_splits, splits, type=sent.dtype)[0]


def fetch_rows(sent: Sent, features: Sequence[Feature]) -> list[tf.Tensor]:
    """The second half of a lookup: owners find or make rows, which come home.

    Returns:
        For each feature [S, D], or [N, D] of those that are not pooled.

    Raises:
        As `sok.lookup.lookup.lookup_parts`, all of it on all workers.

    Collective: one, and one for the gradient. Differentiable in the tables and weights.
    """
    parts = [(f, part) for f in features for part in f.home_parts]
    counted = None
    if sent.is_ahead and tf.get_static_value(sent.insert):
        handles = [handle for f in features for handle in f.table.part_handles]
        counted = _ops.lib().sok_count_ids(handles, [f.ids.keys for f in features for _ in f.table.parts])
    # A v1 graph runs what something waits for.
    with tf.control_dependencies([counted] if isinstance(counted, tf.Operation) else []):
        home, checked_splits = servers.rows_home(sent) if sent.group.is_on_servers else _rows_home(sent)
    outputs = _ops.lib().sok_exchange_combine(
        home,
        checked_splits,
        sent.index,
        sent.row_splits,
        [f.ids.weights_for_ops() for f, _ in parts],
        sent.scales,
        combiners=[f.pooling for f, _ in parts],
        dims=[part.dim for _, part in parts],
    )
    if not sent.group.is_on_servers:
        ordering.answered(checked_splits)
    of_parts = iter(outputs)
    return [_joined([next(of_parts) for _ in f.home_parts]) for f in features]


def _rows_home(sent: Sent) -> tuple[tf.Tensor, tf.Tensor]:
    with _on(sent.group.device), _counting_anew(sent.group):
        served = _ops.lib().sok_exchange_serve(
            sent.group.part_handles,
            *sent.question,
            dims=sent.dims,
            capacities=[table.capacity for table in sent.group.tables for _ in table.parts],
            **sent.attributes,
        )
    return _bring_home(sent, served.answers, served.answer_splits, served.counts)


def _joined(outputs: list[tf.Tensor]) -> tf.Tensor:
    """What comes of a feature, from what its table's parts gave."""
    return outputs[0] if len(outputs) == 1 else tf.concat(outputs, -1)


@contextlib.contextmanager
def told_to_peers(*tables: EmbeddingVariable) -> Iterator[None]:
    """Around a lookup in `tables`, from its first argument on: peers do not wait for what raises before they are asked.

    Eagerly, their lookups raise what this one raised. While a function is traced, its other collectives are not known
    yet, so nobody could be told in all of them: either all workers refuse what they trace, or the job ends with words.
    The same while a v1 graph is built. With one worker, or no tables, it does nothing. `tables` are those of the
    lookup's features, in their order.

    Who enters it is `sok.lookup.lookup.lookup_parts`, for everybody; and the layers' `__call__`, since Keras looks at
    inputs before they do. What is inside raises as if it were alone.
    """
    if not tables or tables[0].job.has_ended or tables[0].job.size == 1:
        yield
        return
    group = Group(tuple(dict.fromkeys(tables)))
    before = _calls_of(group).begun
    try:
        yield
    except Exception as error:  # whatever it is, the peers must not wait for this rank
        if _calls_of(group).begun == before:
            _refuse(error, group)
        raise


def _refuse(error: Exception, group: Group) -> None:
    """Takes part in collective 1 of a lookup, with nothing but bad news."""
    number, transport, text = _count_call(group), group.transport, f"{type(error).__name__}: {error}"
    if not tf.executing_eagerly():
        all_refuse(transport, f"{group.name}/refused", text)
        return
    transport.all_to_all(*_refusal(group, number, text), group.collective("keys"))


def _refusal(group: Group, number: int | tf.Tensor, text: str) -> tuple[tf.Tensor, tf.Tensor]:
    words, splits = _ops.lib().sok_exchange_refuse(
        tf.convert_to_tensor(number, tf.int64),
        True,
        Tword=group.word_dtype,
        program=group.program,
        world_size=group.transport.size,
        text=text.encode(),
    )
    return words, splits


def refuse_ahead(sent: Sent, ahead: Ahead, text: str) -> list[tf.Tensor]:
    """Takes part in a `send_keys` as that of `sent` with nothing but bad news; gives what each rank has said [R].

    Peers raise it where they finish the lookup. Collective: as `send_keys`.
    """
    group, size = sent.group, sent.group.transport.size
    words, splits = group.transport.all_to_all(*_refusal(group, ahead.number, text), ahead.collective(group))
    if may_send_rows(group, ahead):
        none = tf.tile(tf.constant([messages.NOT_SERVED, *[0.0] * messages.ANSWER_HEADER]), [size])
        sizes = tf.fill([size], messages.ANSWER_HEADER + 1)
        with tf.control_dependencies([words]):
            _send(sent, f"{ahead.name}/rows", none, sizes, sizes)
    return [words, splits]


def refusal(sent: Sent, number: int, text: str) -> dict[Any, np.ndarray]:
    """As `refuse_ahead`, of a v1 graph: what to feed so that the messages of `sent` have nothing but bad news."""
    assert sent.said is not None
    words, (said, splits) = run_now(lambda: _refusal(sent.group, number, text)[0]), sent.said
    size = sent.group.transport.size
    sizes = np.full(size, words.size // size, np.int32)
    return {
        said.ref(): words,
        splits.ref(): sizes,
        sent.asked.ref(): np.full(size, messages.ANSWER_HEADER + 1, np.int32),
    }


def note_finished(group: Group) -> None:
    """To be called where a lookup that was begun ahead is finished: should it raise, no peer waits to be told."""
    calls = _calls_of(group)
    with _lock:
        calls.begun += 1


def _count_call(group: Group) -> int:
    """Which eager call of the group's exchange this is: the same on all ranks that have made the same calls.

    Inside a graph a number that is known when it is traced would say nothing.
    """
    calls = _calls_of(group)
    with _lock:
        calls.begun += 1
        if not tf.executing_eagerly():
            return 0
        number = calls.number % 0x7FFFFFFF
        calls.number = number + 1
        return number


def _calls_of(group: Group) -> _Calls:
    with _lock:
        return _calls.setdefault(group.transport, {}).setdefault(group.name, _Calls())


@contextlib.contextmanager
def _counting_anew(group: Group) -> Iterator[None]:
    """Where ranks met in different calls, all raise here, and count all their exchanges from here on."""
    try:
        yield
    except tf.errors.FailedPreconditionError:
        with _lock:
            for calls in _calls[group.transport].values():
                calls.number = 0
        raise


def _common_dtype(group: Group, features: Sequence[Feature]) -> str:
    """What rows and gradients travel in: what all tables say, if that saves time."""
    if group.is_on_servers or not group.transport.narrowing_pays():
        return "float32"
    said = {"float32" if feature.exact else feature.table.exchange_dtype for feature in features}
    return said.pop() if len(said) == 1 else "float32"


def _bring_home(sent: Sent, answers: tf.Tensor, splits: tf.Tensor, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends answers to the peers that asked, `splits` floats to each; gives those of all owners, and their sizes, once
    it is known that they are rows. counts: of what is in them.
    """
    transport, served, step = sent.group.transport, answers, advice.counted(sent.group)
    sizes: list[tf.Tensor] = []  # not what the function gives: TensorFlow would put that on a GPU

    @custom_gradient
    def exchange(answers: tf.Tensor) -> tuple[tf.Tensor, Any]:
        if not sent.group.device:  # what a custom gradient is given is a copy, of no known place
            with _beside(served, ""):
                answers = tf.identity(answers)
        if sent.rows is None:
            home, home_splits = _send(sent, "rows", answers, splits, sent.asked)
        else:
            home, home_splits = _mended(sent, sent.rows, answers, splits, counts)
        home, checked_splits = _checked(home, home_splits, sent.asked)
        sizes.append(checked_splits)

        def grad(upstream: tf.Tensor) -> tf.Tensor:
            step.end(transport.size)
            if note_gradient is not None:
                note_gradient(sent)
            with _beside(served, sent.group.device):  # they end where the answers began
                upstream = tf.identity(tf.convert_to_tensor(upstream))
                back = (upstream, checked_splits, splits)
                if sent.attributes["copy_of"]:
                    back = _to_copies(sent, upstream, checked_splits, counts)
            return _send(sent, "grads", *back)[0]

        return home, grad

    return exchange(answers), sizes[0]


def _checked(home: tf.Tensor, splits: tf.Tensor, asked: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Answers, and the floats of each, that come when they are known to be rows; raises what an owner says instead."""
    with _beside(home, home.device):
        return _ops.lib().sok_exchange_check(home, splits, asked)


def _to_copies(sent: Sent, floats: tf.Tensor, splits: tf.Tensor, counts: tf.Tensor) -> Any:
    """Of gradients of rows that came home what `_send` takes: those of this rank's copies go to all ranks."""
    told = {name: sent.attributes[name] for name in ("table_of", "copy_of")} | {"dims": sent.dims}
    return _ops.lib().sok_exchange_to_copies(floats, splits, counts, rank=sent.group.transport.rank, **told)


def _mended(
    sent: Sent, rows: RowsAhead, answers: tf.Tensor, splits: tf.Tensor, counts: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """What `_send` gives of answers that differ little from those which went ahead: only what differs travels."""
    group, lib = sent.group, _ops.lib()
    with _on(group.device):
        repairs, repair_splits = lib.sok_exchange_repair(
            group.part_handles,
            _as_they_come(sent, answers, splits),
            splits,
            counts,
            rows.answers,
            rows.answer_splits,
            table_of=sent.attributes["table_of"],
            copy_of=sent.attributes["copy_of"],
            dims=sent.dims,
            is_stale=rows.is_stale,
        )
    with _counting_anew(group):
        repairs, repair_splits = group.transport.all_to_all(repairs, repair_splits, group.collective("rows"))
    with _on(group.device):
        return lib.sok_exchange_mend(rows.home, rows.home_splits, repairs, repair_splits)


def _send(
    sent: Sent, what: str, floats: tf.Tensor, splits: tf.Tensor, expected: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends `splits` floats to each peer, in the call's dtype; gives the `expected` ones of each, and their sizes."""
    name, transport = sent.group.collective(what), sent.group.transport
    if sent.dtype == "float32":
        with _counting_anew(sent.group):
            return transport.all_to_all(floats, splits, name)
    lib = _ops.lib()
    # Where the tables are: a GPU then has half as much to copy.
    with _beside(floats, sent.group.device):
        words, word_splits = lib.sok_exchange_narrow(floats, splits, type=sent.dtype)
    with _counting_anew(sent.group):
        received, received_splits = transport.all_to_all(words, word_splits, name)
    with _beside(words, sent.group.device):
        return lib.sok_exchange_widen(received, received_splits, expected, type=sent.dtype)


def _on(device: str) -> contextlib.AbstractContextManager[Any]:
    return tf.device(device) if device else contextlib.nullcontext()


def _beside(tensor: tf.Tensor, device: str) -> contextlib.AbstractContextManager[Any]:
    """On the device; where a v1 graph leaves that to TensorFlow, wherever it will put the tensor."""
    in_v1_graph = not tf.compat.v1.executing_eagerly_outside_functions()
    return tensor.graph.colocate_with(tensor.op, ignore_existing=True) if in_v1_graph and not device else _on(device)
