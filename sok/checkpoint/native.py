"""The native ops that move tables to files and back, run eagerly or in a v1 session."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import _ops
from sok.base.types import Session, TensorLike
from sok.checkpoint.manifest import SavedTable
from sok.job.agreement import plain_text
from sok.table import on_servers
from sok.table import state as table_state
from sok.table.table import EmbeddingVariable

Pairs = Sequence[tuple[str, str]]  # a slot set's name in the checkpoint, and in the table


def _parsed(summary: bytes) -> dict[str, Any]:
    return json.loads(summary.decode(errors="replace"))


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """What the table says of a file's contents (a key that it cannot hold, no room) names the file, too."""
    try:
        yield
    except tf.errors.OpError as error:
        text = plain_text(error)
        if path in text:
            raise
        raise type(error)(None, None, f"{path}: {text}") from error


def verify_shard(path: str) -> dict[str, Any]:
    """Reads a shard to its end and returns what it holds. Eager only."""
    return _parsed(_ops.lib().sok_shard_verify(path).numpy())


def compact_shards(
    paths: Sequence[str], links: Sequence[int], generation: str, path: str, **settings: Any
) -> dict[str, Any]:
    """Writes the files of a chain's links as one shard and returns what it holds. Eager only."""
    return _parsed(
        _ops.lib()
        .sok_shards_compact(tf.constant(paths, tf.string), tf.constant(links, tf.int64), generation, path, **settings)
        .numpy()
    )


def save_erasure(path: str, generation: str, table: SavedTable, dim: int, keys: TensorLike) -> None:
    """Writes the shard of a delta to a saved table, of rows of `dim`, in which the keys [n] lose theirs. Eager only."""
    lib = _ops.lib()
    keys = tf.constant(keys, table.key_dtype)
    like = {"table": table.name, "key_dtype": keys.dtype, "dim": dim, "capacity": max(1, int(tf.size(keys)))}
    with tf.device("/CPU:0"):
        fresh = {"seed": 0, "initializer": "constant", "init_a": 0.0, "init_b": 0.0}
        handle = lib.sok_table_handle(anonymous=True, hashed=True, world_size=1, rank=0, **like, **fresh)
        lib.sok_table_assign(handle, keys, tf.zeros([tf.size(keys), dim]))
        lib.sok_table_save_begin(handle, snapshot="")
        lib.sok_table_save_end(handle, generation)
        lib.sok_table_erase(handle, keys)
        lib.sok_table_save_begin(handle, snapshot="")
        lib.sok_table_save(handle, path, generation, changes=True)


class EagerCalls:
    """Runs them at once."""

    def save(self, table: EmbeddingVariable, path: str, generation: str) -> dict[str, Any]:
        return _parsed(self._run(table, "save", path=path, generation=generation))

    def save_changes(self, table: EmbeddingVariable, path: str, generation: str) -> dict[str, Any]:
        """As `save`, but only what has changed since the last complete save."""
        return _parsed(self._run(table, "save changes", path=path, generation=generation))

    def save_snapshot(self, table: EmbeddingVariable, path: str, generation: str, changes: bool) -> dict[str, Any]:
        """As `save` or `save_changes`, of what the table held at `begin`."""
        what = "save changes of snapshot" if changes else "save snapshot"
        return _parsed(self._run(table, what, path=path, generation=generation))

    def save_version(self, table: EmbeddingVariable, path: str, generation: str, beside: bool) -> dict[str, Any]:
        """What the table held at `begin`, whose rows stay in the table's file. `beside`: training goes on."""
        what = "save version beside" if beside else "save version"
        return _parsed(self._run(table, what, path=path, generation=generation))

    def keep_versions(self, table: EmbeddingVariable) -> None:
        """From now on it can be saved so, if it could not before: rows that it has are written anew then."""
        self._run(table, "keep versions")
        table.keeps_versions = True

    def begin(self, table: EmbeddingVariable, snapshot: str = "") -> None:
        """What has changed so far belongs to a save that begins; with a snapshot of 'all' rows or 'changes', or a
        'version'."""
        self._run(table, f"begin {snapshot}")

    def end(self, table: EmbeddingVariable, base: str) -> None:
        """It is complete under the name `base`; an empty one: it has failed."""
        self._run(table, "end", generation=base)

    def changes(self, table: EmbeddingVariable) -> dict[str, Any]:
        return _parsed(self._run(table, "changes"))

    def size(self, table: EmbeddingVariable) -> int:
        return int(self._run(table, "size"))

    def step(self, table: EmbeddingVariable) -> int:
        return int(self._run(table, "step"))

    def set_step(self, table: EmbeddingVariable, step: int) -> None:
        self._run(table, "set step", number=step)

    def slot_sets(self, table: EmbeddingVariable) -> list[table_state.SlotSet]:
        return table_state.as_slot_sets(self._run(table, "slot sets"))

    def second(self, table: EmbeddingVariable, num_rows: int) -> Any:
        """An empty table like this one, to load about so many rows into."""
        second = table_state.second_table(table)
        if table.keeps_versions:  # before it has rows, which would be written twice
            _ops.lib().sok_table_keep_versions(second)
        self._run(table, "reserve", second, number=tf.constant(num_rows, tf.int64))
        return second

    def load(
        self, table: EmbeddingVariable, second: tf.Tensor | None, path: str, sets: Pairs, columns: Sequence[int] = ()
    ) -> dict[str, Any]:
        """`columns`: which of the file go where (`sok.checkpoint.restoring.columns_for`)."""
        saved, own = (np.array([pair[i] for pair in sets], object) for i in (0, 1))
        given = {"path": path, "saved_sets": saved, "table_sets": own, "columns": np.array(columns, np.int64)}
        with _naming(path):
            return _parsed(self._run(table, "load", second, **given))

    def swap(self, table: EmbeddingVariable, second: tf.Tensor | None) -> None:
        self._run(table, "swap", second)

    def drop(self, table: EmbeddingVariable, second: tf.Tensor | None) -> None:
        return None  # it goes with its handle

    def read(self, variable: tf.Variable) -> Any:
        return tf.convert_to_tensor(variable).numpy().item()

    def assign(self, variable: tf.Variable, value: np.ndarray | float) -> None:
        variable.assign(value)

    def _run(self, table: Any, what: str, second: Any = None, **given: Any) -> Any:
        found = _makers(table, second, **given)[what]()
        return None if found is None else tf.nest.map_structure(lambda tensor: tensor.numpy(), found)


class SessionCalls(EagerCalls):
    """Runs them in a session. Their ops are put into the graph at the first call, or by `prepare`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def second(self, table: EmbeddingVariable, num_rows: int) -> Any:
        self.drop(table, None)  # one that an interrupted restore has left
        if table.keeps_versions:  # in some session; it does no harm in others
            self._run(table, "second keeps versions")
        self._run(table, "reserve", number=num_rows)
        return None

    def swap(self, table: EmbeddingVariable, second: tf.Tensor | None) -> None:
        super().swap(table, second)
        self.drop(table, second)

    def drop(self, table: EmbeddingVariable, second: tf.Tensor | None) -> None:
        self._run(table, "drop")

    def read(self, variable: tf.Variable) -> Any:
        return self._session.run(variable).item()

    def assign(self, variable: tf.Variable, value: np.ndarray | float) -> None:
        variable.load(value, self._session)

    def _run(self, table: Any, what: str, second: Any = None, **given: Any) -> Any:
        ops = _graph_ops(table)
        return self._session.run(ops[what], {ops[name]: value for name, value in given.items()})


def _graph_ops(table: Any) -> dict[str, Any]:
    """The ops of a table of a v1 graph; made once."""
    # In the table: the ops reach their graph and with it the table, so that a map would keep all of them for ever.
    made = vars(table).get("_checkpoint_ops")
    if made is not None:
        return made
    with table.handle.graph.as_default(), tf.control_dependencies(None):
        with tf.device("/CPU:0"):
            placeholder = tf.compat.v1.placeholder
            fed = {name: placeholder(tf.string, []) for name in ("path", "generation")}
            fed |= {name: placeholder(tf.string, [None]) for name in ("saved_sets", "table_sets")}
            fed["number"] = placeholder(tf.int64, [])
            fed["columns"] = placeholder(tf.int64, [None])
        # Where the table is. If that is for TensorFlow to choose, any device named here would move the table there.
        with tf.compat.v1.colocate_with(table.handle, ignore_existing=True):
            shared_name = f"sok_second/{table.table_name}"
            second = _ops.lib().sok_table_handle(shared_name=shared_name, **table._attributes)
            made = vars(table)["_checkpoint_ops"] = {
                **fed,
                **{what: make() for what, make in _makers(table, second, **fed).items()},
            }
    return made


def _makers(
    table: Any,
    second: Any,
    path: Any = None,
    generation: Any = None,
    saved_sets: Any = None,
    table_sets: Any = None,
    number: Any = None,
    columns: Any = None,
) -> dict[str, Callable[[], Any]]:
    """What makes each op. `second`: the handle of a second table."""
    lib, handle = _ops.lib(), table.handle
    save = functools.partial(lib.sok_table_save, handle, path, generation)
    begin = functools.partial(lib.sok_table_save_begin, handle)
    return {
        "save": save,
        "save changes": lambda: save(changes=True),
        "save snapshot": lambda: save(snapshot=True),
        "save changes of snapshot": lambda: save(changes=True, snapshot=True),
        "begin ": lambda: begin(snapshot=""),
        "begin all": lambda: begin(snapshot="all"),
        "save version": lambda: save(version=True),
        "save version beside": lambda: save(version=True, snapshot=True),
        "begin changes": lambda: begin(snapshot="changes"),
        "begin version": lambda: begin(snapshot="version"),
        "keep versions": lambda: lib.sok_table_keep_versions(handle),
        "second keeps versions": lambda: lib.sok_table_keep_versions(second),
        "end": lambda: lib.sok_table_save_end(handle, generation),
        "changes": lambda: lib.sok_table_changes(handle),
        "size": table.num_rows,
        "step": lambda: table.step,
        "set step": lambda: table_state.set_step(table, number),
        "slot sets": lambda: lib.sok_table_slot_sets(handle),
        # Records are as wide as the slots in the files make them: memory of another width would be asked for twice.
        "reserve": lambda: lib.sok_table_reserve(second, number, keys_only=True),
        "load": lambda: lib.sok_table_load(second, path, saved_sets, table_sets, columns),
        "swap": lambda: lib.sok_table_swap(handle, second),
        "drop": lambda: tf.raw_ops.DestroyResourceOp(resource=second, ignore_lookup_error=True),
    }


def prepare(tables: Sequence[Any]) -> None:
    """Puts the ops that `save` and `restore` run into the tables' v1 graph, before it is finalized."""
    for table in tables:
        if table._in_graph_mode:
            for shards in on_servers.held([table]):
                _graph_ops(shards[0])
