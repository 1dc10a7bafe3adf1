"""The native ops that move tables to files and back, run eagerly or in a v1 session."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import _ops
from sok.job.agreement import plain_text
from sok.table import state as table_state

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


class EagerCalls:
    """Runs them at once."""

    def save(self, table: Any, path: str, generation: str) -> dict[str, Any]:
        return _parsed(_ops.lib().sok_table_save(table.handle, path, generation).numpy())

    def save_changes(self, table: Any, path: str, generation: str) -> dict[str, Any]:
        """As `save`, but only what has changed since the last complete save."""
        return _parsed(_ops.lib().sok_table_save(table.handle, path, generation, changes=True).numpy())

    def save_snapshot(self, table: Any, path: str, generation: str, changes: bool) -> dict[str, Any]:
        """As `save` or `save_changes`, of what the table held at `begin`."""
        lib = _ops.lib()
        return _parsed(lib.sok_table_save(table.handle, path, generation, changes=changes, snapshot=True).numpy())

    def begin(self, table: Any, snapshot: str = "") -> None:
        """What has changed so far belongs to a save that begins; with a snapshot of 'all' rows or of 'changes'."""
        _ops.lib().sok_table_save_begin(table.handle, snapshot=snapshot)

    def end(self, table: Any, base: str) -> None:
        """It is complete under the name `base`; an empty one: it has failed."""
        _ops.lib().sok_table_save_end(table.handle, base)

    def changes(self, table: Any) -> dict[str, Any]:
        return _parsed(_ops.lib().sok_table_changes(table.handle).numpy())

    def size(self, table: Any) -> int:
        return int(table.num_rows())

    def slot_sets(self, table: Any) -> list[table_state.SlotSet]:
        return table_state.slot_sets(table)

    def second(self, table: Any, num_rows: int) -> Any:
        """An empty table like this one, to load about so many rows into."""
        second = table_state.second_table(table)
        # Records are as wide as the slots in the files make them: memory of another width would be asked for twice.
        _ops.lib().sok_table_reserve(second, tf.constant(num_rows, tf.int64), keys_only=True)
        return second

    def load(self, table: Any, second: Any, path: str, sets: Pairs) -> dict[str, Any]:
        saved, own = _columns(sets)
        with _naming(path):
            return _parsed(_ops.lib().sok_table_load(second, path, saved, own).numpy())

    def swap(self, table: Any, second: Any) -> None:
        table_state.swap(table, second)

    def drop(self, table: Any, second: Any) -> None:
        return None  # it goes with its handle

    def read(self, variable: Any) -> Any:
        return tf.convert_to_tensor(variable).numpy().item()

    def assign(self, variable: Any, value: Any) -> None:
        variable.assign(value)


class SessionCalls:
    """Runs them in a session. Their ops are put into the graph at the first call, or by `prepare`."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def save(self, table: Any, path: str, generation: str) -> dict[str, Any]:
        ops = _graph_ops(table)
        return _parsed(self._session.run(ops["save"], {ops["path"]: path, ops["generation"]: generation}))

    def save_changes(self, table: Any, path: str, generation: str) -> dict[str, Any]:
        ops = _graph_ops(table)
        return _parsed(self._session.run(ops["save_changes"], {ops["path"]: path, ops["generation"]: generation}))

    def save_snapshot(self, table: Any, path: str, generation: str, changes: bool) -> dict[str, Any]:
        ops = _graph_ops(table)
        saved = ops["save_snapshot_of_changes" if changes else "save_snapshot"]
        return _parsed(self._session.run(saved, {ops["path"]: path, ops["generation"]: generation}))

    def begin(self, table: Any, snapshot: str = "") -> None:
        self._session.run(_graph_ops(table)["begin" + snapshot])

    def end(self, table: Any, base: str) -> None:
        ops = _graph_ops(table)
        self._session.run(ops["end"], {ops["generation"]: base})

    def changes(self, table: Any) -> dict[str, Any]:
        return _parsed(self._session.run(_graph_ops(table)["changes"]))

    def size(self, table: Any) -> int:
        return int(self._session.run(_graph_ops(table)["size"]))

    def slot_sets(self, table: Any) -> list[table_state.SlotSet]:
        columns = [column.tolist() for column in self._session.run(_graph_ops(table)["slot_sets"])]
        return [table_state.SlotSet(n.decode(), r.decode(), k, c) for n, r, k, c in zip(*columns, strict=True)]

    def second(self, table: Any, num_rows: int) -> Any:
        self.drop(table, None)  # one that an interrupted restore has left
        ops = _graph_ops(table)
        self._session.run(ops["reserve"], {ops["num_rows"]: num_rows})
        return None

    def load(self, table: Any, second: Any, path: str, sets: Pairs) -> dict[str, Any]:
        ops = _graph_ops(table)
        saved, own = (np.array(column, object) for column in zip_sets(sets))
        feed = {ops["path"]: path, ops["saved_sets"]: saved, ops["table_sets"]: own}
        with _naming(path):
            return _parsed(self._session.run(ops["load"], feed))

    def swap(self, table: Any, second: Any) -> None:
        self._session.run(_graph_ops(table)["swap"])
        self.drop(table, second)

    def drop(self, table: Any, second: Any) -> None:
        self._session.run(_graph_ops(table)["drop"])

    def read(self, variable: Any) -> Any:
        return self._session.run(variable).item()

    def assign(self, variable: Any, value: Any) -> None:
        variable.load(value, self._session)


def zip_sets(sets: Pairs) -> tuple[list[str], list[str]]:
    """The pairs as two lists."""
    return [saved for saved, _ in sets], [own for _, own in sets]


def _columns(sets: Pairs) -> list[tf.Tensor]:
    return [tf.constant(column, tf.string, [len(column)]) for column in zip_sets(sets)]


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
            fed["num_rows"] = placeholder(tf.int64, [])
        # Where the table is. If that is for TensorFlow to choose, any device named here would move the table there.
        with tf.compat.v1.colocate_with(table.handle, ignore_existing=True):
            made = vars(table)["_checkpoint_ops"] = fed | _ops_of(table, **fed)
    return made


def _ops_of(
    table: Any,
    path: tf.Tensor,
    generation: tf.Tensor,
    saved_sets: tf.Tensor,
    table_sets: tf.Tensor,
    num_rows: tf.Tensor,
) -> dict[str, Any]:
    lib = _ops.lib()
    second = lib.sok_table_handle(shared_name=f"sok_second/{table.table_name}", **table._attributes)
    return {
        "save": lib.sok_table_save(table.handle, path, generation),
        "save_changes": lib.sok_table_save(table.handle, path, generation, changes=True),
        "save_snapshot": lib.sok_table_save(table.handle, path, generation, snapshot=True),
        "save_snapshot_of_changes": lib.sok_table_save(table.handle, path, generation, changes=True, snapshot=True),
        **{f"begin{of}": lib.sok_table_save_begin(table.handle, snapshot=of) for of in ("", "all", "changes")},
        "end": lib.sok_table_save_end(table.handle, generation),
        "changes": lib.sok_table_changes(table.handle),
        "size": table.num_rows(),
        "slot_sets": lib.sok_table_slot_sets(table.handle),
        "reserve": lib.sok_table_reserve(second, num_rows, keys_only=True),
        "load": lib.sok_table_load(second, path, saved_sets, table_sets),
        "swap": lib.sok_table_swap(table.handle, second),
        "drop": tf.raw_ops.DestroyResourceOp(resource=second, ignore_lookup_error=True),
    }


def prepare(tables: Sequence[Any]) -> None:
    """Puts the ops that `save` and `restore` run into the tables' v1 graph, before it is finalized."""
    for table in tables:
        if table._in_graph_mode:
            _graph_ops(table)
