"""From files into the tables of all workers: every worker reads all keys, and stores the rows that are its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import _ops
from sok.base.progress import on_stderr
from sok.compat.formats.columns import StoredTable
from sok.compat.formats.destination import Destination, check_room, keys_for, own_keys
from sok.job.agreement import agree, attempt, describe, exception_of
from sok.job.job import job_of
from sok.table.table import EmbeddingVariable


class Load:
    """One table being filled. Methods run when the graph does, on all workers.

    Args:
        variable: the table.
        to: what `shard.destination` says of it.
        open: gives the table in files, from the arrays that `inputs` have when the graph runs.
        inputs: tensors.
        store: takes keys [m], rows [m, D] and a list of slots, each [m, D], in the order of `StoredTable.slots`, and
            stores them, eagerly; None: there are no slots.
        num_slots: how many.
        show: progress; None: if standard error is a terminal.
    """

    def __init__(
        self,
        variable: EmbeddingVariable,
        to: Destination,
        open: Callable[..., StoredTable],
        inputs: Sequence[tf.Tensor] = (),
        store: Callable[[tf.Tensor, tf.Tensor, list[tf.Tensor]], None] | None = None,
        num_slots: int = 0,
        show: bool | None = None,
    ) -> None:
        self.variable, self.to, self.inputs, self.store, self.num_slots = variable, to, inputs, store, num_slots
        self._open, self._show = open, show
        self._stored: StoredTable | None = None
        self._mine: np.ndarray = np.zeros(0, np.int64)
        self._room = 0
        self._pieces: list[tuple[int, int]] = []
        self._error: Exception | None = None

    def look(self, in_use: np.ndarray, *inputs: np.ndarray) -> None:
        """Reads all keys and checks everything that can be checked without knowing which rows the table has."""
        to, self._error = self.to, None
        self._stored = self._open(*inputs)
        self._mine = own_keys(self._stored, to)
        self._pieces = list(self._stored.pieces())
        if to.num_keys is None:
            self._room = int(in_use) + len(self._mine)
        elif len(self._mine):
            self._room = to.placement.row_of(int(self._mine[-1]), to.world_size) + 1

    def may_be_full(self) -> np.bool_:
        return np.bool_(self.to.num_keys is None and self._room > self.to.capacity)

    def compare(self, in_use: np.ndarray, keys: np.ndarray) -> None:
        """Counts the rows that are new. `keys`: of all rows of the table, if `may_be_full`."""
        if self.may_be_full():
            num_new = len(np.setdiff1d(self._mine, keys, assume_unique=True))
            check_room(self.to, int(in_use), num_new)
            self._room = int(in_use) + num_new
        self._mine = self._mine[:0]  # their memory

    def room(self) -> np.int64:
        return np.int64(self._room)

    def num_pieces(self) -> np.int32:
        rank = self.to.rank
        total = 0 if self._stored is None else self._stored.num_rows
        self._shown = on_stderr(f"load {self.to.name}", total, self._show if rank == 0 else False)
        return np.int32(len(self._pieces))

    def read(self, number: np.ndarray) -> list[np.ndarray]:
        """This worker's rows of a piece: keys, rows, slots."""
        stored, to = self._stored, self.to
        nothing = [np.zeros(0, to.key_dtype), *[np.zeros([0, to.dim], np.float32)] * (1 + self.num_slots)]
        if stored is None or self._error is not None:
            return nothing
        start, stop = self._pieces[int(number)]
        try:
            keys = keys_for(stored, to, start, stop)
            mine = to.owns(keys)
            rows = [
                c.read(start, stop)[mine].astype(np.float32, copy=False) for c in (stored.rows, *stored.slots.values())
            ]
        except Exception as error:
            self.failed(error)
            return nothing
        self._shown.add(stop - start)
        return [keys[mine], *rows]

    def failed(self, error: Exception) -> None:
        """Remembers what `finish` tells: peers do not listen before."""
        self._error = self._error or error

    def note(self, error: np.ndarray | bytes) -> np.int32:
        """Remembers what the op that stores has told."""
        if error:
            self.failed(exception_of(np.asarray(error).item().decode(errors="replace")))
        return np.int32(0)

    def finish(self) -> None:
        self._stored = None
        if self._error is not None:
            said = f"{describe(self._error)} Some rows were stored before that: load again."
            raise exception_of(said) from self._error
        self._shown.close()


def load_tables(loads: Sequence[Load], name: str) -> tf.Tensor:
    """Stores all tables, or says on all workers why none was stored. Builds the ops, or executes them eagerly.

    Rows that the files do not have stay as they are.

    Args:
        loads: equal on all workers.
        name: of the collectives.

    Returns:
        A scalar that is there when all workers have stored their rows.

    Raises:
        As `agree`. Nothing was stored then, unless files changed, or could not be read a second time, meanwhile.

    Collective.
    """
    transport = job_of([load.variable for load in loads]).transport
    ready = agree(transport, f"{name}/check", _first([_check(load) for load in loads]))
    with tf.control_dependencies([ready]):
        ready = agree(transport, f"{name}/reserve", _first([_reserve(load) for load in loads]))
    # Nothing else keeps Python's functions in order inside a graph.
    for load in loads:
        with tf.control_dependencies([ready]):
            ready = _stored(load)
    with tf.control_dependencies([ready]):
        return agree(transport, f"{name}/done", _first([attempt(load.finish) for load in loads]))


def _first(texts: Sequence[tf.Tensor]) -> tf.Tensor:
    """The first that is not empty."""
    first = texts[0]
    for text in texts[1:]:
        first = tf.where(tf.equal(first, ""), text, first)
    return first


def _check(load: Load) -> tf.Tensor:
    in_use = load.variable.num_rows()
    looked = attempt(load.look, in_use, *load.inputs)

    def compare() -> tf.Tensor:
        full = tf.reshape(tf.numpy_function(load.may_be_full, [], tf.bool), [])
        keys = tf.cond(full, lambda: load.variable.export()[0], lambda: tf.zeros([0], load.variable.key_dtype))
        return attempt(load.compare, in_use, keys)

    return tf.cond(tf.equal(looked, ""), compare, lambda: looked)


def _reserve(load: Load) -> tf.Tensor:
    room = tf.reshape(tf.numpy_function(load.room, [], tf.int64), [])
    return _ops.lib().sok_table_try_reserve(load.variable.handle, room)


def _after(operation: Any, tensor: tf.Tensor) -> tf.Tensor:
    """`tensor`, in a graph once `operation` is done."""
    with tf.control_dependencies([] if operation is None else [operation]):
        return tf.identity(tensor)


def _stored(load: Load) -> tf.Tensor:
    """`_store`; eagerly, what it raises is left to `Load.finish`, where peers hear of it."""
    if not tf.executing_eagerly():
        return _store(load)
    try:
        return _store(load)
    except Exception as error:
        load.failed(error)
        return tf.constant(0)


def _store(load: Load) -> tf.Tensor:
    """Stores all rows, piece by piece. Gives a scalar that is there when that is done."""
    dtypes = [load.variable.key_dtype] + [tf.float32] * (1 + load.num_slots)

    def body(i: tf.Tensor) -> tuple[tf.Tensor]:
        keys, *rows = tf.numpy_function(load.read, [i], dtypes)
        keys = tf.ensure_shape(keys, [None])
        rows = [tf.ensure_shape(array, [None, load.variable.dim]) for array in rows]
        if load.store is None:
            error = _ops.lib().sok_table_try_assign(load.variable.handle, keys, load.variable.own_columns(rows[0]))
            stored = tf.numpy_function(load.note, [error], tf.int32)
        else:
            stored = load.store(keys, rows[0], rows[1:])
        return (_after(stored, i + 1),)

    num_pieces = tf.reshape(tf.numpy_function(load.num_pieces, [], tf.int32), [])
    (done,) = tf.while_loop(lambda i: i < num_pieces, body, [tf.constant(0)], parallel_iterations=1)
    return done
