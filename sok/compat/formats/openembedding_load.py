"""`load_openembedding`: tables as OpenEmbedding's servers have saved them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import log
from sok.base.errors import FormatError, TableFull
from sok.base.progress import on_stderr
from sok.base.types import PathLike
from sok.checkpoint.arguments import Optimizers, Tables, optimizers_of, tables_of
from sok.checkpoint.native import EagerCalls
from sok.compat.formats.columns import Column, StoredTable
from sok.compat.formats.destination import Destination, check_room, keys_for, own_keys
from sok.compat.formats.openembedding import META, OpenVariable, SavedVariable, open_variable, read_meta
from sok.compat.formats.openembedding_states import why_not
from sok.compat.formats.shard import destination
from sok.job import context
from sok.job.agreement import check_equal, together
from sok.job.job import job_of
from sok.optimizers import Optimizer
from sok.table import rules
from sok.table import state as table_state
from sok.table.table import EmbeddingVariable


def load_openembedding(
    path: PathLike,
    variables_or_model: Tables,
    optimizers: Optimizers | None = None,
    *,
    slots: bool = True,
    progress: bool | None = None,
) -> None:
    """Gives tables the rows that OpenEmbedding's `save_server_model` has written, and what its optimizers kept of them.

    Afterwards the tables hold what the files hold, and nothing else. Files, keys and room are checked before: if
    anything is wrong, an error is raised on all workers and no table has changed on any. Every worker reads all files,
    some 16 MiB at a time, and keeps the rows that are its own: any number of servers, shards and files becomes any
    number of workers.

    Files know variables by the order in which they were made: the first goes into the first table. Rows of float64 are
    kept as float32, with a warning.

    Args:
        path: the folder with `model_meta`, which all workers see.
        variables_or_model: tables, in the order of the variables in `model_meta`; or a model, whose tables are taken in
            the order in which they were made.
        optimizers: what trains them. None: what is known to, or what the model was compiled with.
        slots: whether to take over states: of SGD with momentum, Adagrad, Adadelta, RMSprop, Ftrl, and of Adam and
            Adamax with `lazy=True, bias_correction="row"`, as `openembedding.tensorflow` makes them. Where an optimizer
            keeps other states than that in the files, or none is known, rows are taken alone, with a warning, and it
            begins anew. So it does where files have no states (`include_optimizer=False`).
        progress: whether rank 0 shows a bar on stderr. None: if that is a terminal.

    Raises:
        FileNotFoundError: a file is missing.
        FormatError (a ValueError): a file is cut off, or is not as it should be: with its name and the offset.
        ValueError: there are more variables than tables, or fewer; a table has another dim, or other keys.
        tf.errors.ResourceExhaustedError: a worker has no room for its rows.
        RuntimeError: not executing eagerly. All on all workers.

    Collective.

    Example:
        >>> import json, pathlib, struct, tempfile, sok
        >>> folder = pathlib.Path(tempfile.mkdtemp())  # of one variable, in one shard, with one row
        >>> variable = {"datatype": "float32", "embedding_dim": 2, "vocabulary_size": 2**63, "storage_name": "0"}
        >>> _ = (folder / "model_meta").write_text(json.dumps({"version": "0.2", "variables": [variable]}))
        >>> head = struct.pack("<IiQQQ", 0, 0x104, 2, 2**63, 0) + struct.pack("<iiQQ", 0, 1, 0, 1)
        >>> (folder / "0").mkdir()
        >>> _ = (folder / "0" / "model_0_0").write_bytes(head + struct.pack("<QQff", 1, 7, 0.5, 0.25))
        >>> table = sok.EmbeddingVariable(dim=2, capacity=8, name="of_openembedding")
        >>> sok.load_openembedding(folder, table)
        >>> [array.numpy().tolist() for array in table.export()]
        [[7], [[0.5, 0.25]]]
    """
    path = os.path.abspath(os.fspath(path))
    loads: list[_Load] = []

    def plan() -> list[Any]:
        tables = tables_in_order(variables_or_model)
        if not tf.executing_eagerly() or any(table._in_graph_mode for table in tables):
            raise RuntimeError(
                "sok.load_openembedding works when executing eagerly, not in a tf.function or a v1 graph. There "
                "restore what sok.save has written of tables that were loaded eagerly."
            )
        job_of(tables)
        optimizer = _only(optimizers_of(optimizers, variables_or_model)) if slots else None
        variables = read_meta(path)
        _check_fit(path, variables, tables)
        loads[:] = [
            _Load(table, open_variable(path, variable), optimizer, slots)
            for variable, table in zip(variables, tables, strict=True)
        ]
        return [path, [str(v) for v in variables], [t.table_name for t in tables], [one.slot_set for one in loads]]

    transport, name = context.get_transport(), "sok/load_openembedding"
    check_equal(together(transport, f"{name}/plan", plan), "sok.load_openembedding: [path, variables, tables, slots]")
    if context.rank() == 0:
        _say_what_is_lost(path, loads)

    def load() -> None:
        rows = sum(one.num_rows for one in loads)
        with on_stderr("load from OpenEmbedding", rows, False if context.rank() else progress) as shown:
            for one in loads:
                one.read(shown)

    together(transport, f"{name}/load", load)
    for one in loads:
        table_state.swap(one.table, one.second)
        log.logger.info("Took %s of %s as table '%s'.", one.saved.variable, path, one.table.table_name)


def tables_in_order(variables_or_model: Tables) -> list[EmbeddingVariable]:
    """As they are listed, or those of a model in the order in which they were made."""
    tables = list(tables_of(variables_or_model).values())
    if isinstance(variables_or_model, (list, tuple)):
        return tables
    return sorted(tables, key=lambda table: table.creation_number)


@dataclass
class _Load:
    """A table and what is to come into it."""

    table: EmbeddingVariable
    saved: OpenVariable
    optimizer: Optimizer | None
    takes_slots: bool
    second: Any = None

    @property
    def num_rows(self) -> int:
        return sum(n for shard in self.saved.shards for _, n in shard.blocks)

    @property
    def lost(self) -> str:
        """Why states that are in the files cannot be taken over; empty: they can, or are not wanted."""
        if not self.saved.has_state or not self.takes_slots:
            return ""
        if self.optimizer is None:
            return "no optimizer is known that trains the table: compile the model first, or give `optimizers`"
        options = self.optimizer._rule_config()
        return why_not(self.saved.optimizer, self.saved.hyper, self.optimizer.rule, options)

    @property
    def slot_set(self) -> str | None:
        """Where states go; None: nowhere."""
        takes = self.takes_slots and self.saved.has_state and not self.lost
        if not takes or self.optimizer is None or not rules.find(self.optimizer.rule).slots:
            return None
        return self.optimizer.slot_set

    def read(self, shown: Any) -> None:
        """Puts this worker's rows into a second table."""
        optimizer = None if self.slot_set is None else self.optimizer
        to, stored = destination(self.table), self.saved.table(optimizer.rule if optimizer else None)
        mine = own_keys(stored, to)
        if to.num_keys is None:
            try:
                check_room(to, 0, len(mine))
            except TableFull as error:
                raise tf.errors.ResourceExhaustedError(None, None, str(error)) from None
        self.second = EagerCalls().second(self.table, len(mine))
        for start, stop in stored.pieces():
            self._store(stored, to, optimizer, start, stop)
            shown.add(stop - start)

    def _store(self, stored: StoredTable, to: Destination, optimizer: Optimizer | None, start: int, stop: int) -> None:
        keys = keys_for(stored, to, start, stop)
        mine = to.owns(keys)

        def of(column: Column) -> np.ndarray:
            found = column.read(start, stop)
            with np.errstate(over="ignore"):
                narrow = found.astype(np.float32)
            lost = np.isinf(narrow) & np.isfinite(found)
            if lost.any():
                row = int(np.argmax(lost.any(1)))
                raise FormatError(f"{column.place(start + row)}: holds {found[row].tolist()}, too much for float32.")
            return narrow[mine]

        rows = of(stored.rows)
        if optimizer is None:
            table_state.restore_rows(self.table, keys[mine], rows, _second=self.second)
            return
        slots = np.concatenate([of(stored.slots[name]) for name in rules.find(optimizer.rule).slot_names], 1)
        table_state.restore_rows(
            self.table,
            keys[mine],
            rows,
            slots,
            slot_set=optimizer.slot_set,
            rule=optimizer.rule,
            slot_init=optimizer.slot_inits,
            _second=self.second,
        )


def _only(optimizers: Sequence[Optimizer] | None) -> Optimizer | None:
    if optimizers and len(optimizers) > 1:
        raise ValueError(
            f"Several optimizers train these tables: {', '.join(o.slot_set for o in optimizers)}. Give the one that "
            "is to have the states as `optimizers`."
        )
    return optimizers[0] if optimizers else None


def _keys_of(table: EmbeddingVariable) -> str:
    return "any key" if table.num_keys is None else f"{table.num_keys} keys"


def _check_fit(path: str, variables: Sequence[SavedVariable], tables: Sequence[EmbeddingVariable]) -> None:
    here = [f"table '{table.table_name}': rows of {table.dim}, {_keys_of(table)}" for table in tables]
    there = f"{os.path.join(path, META)} has {len(variables)}: {'; '.join(map(str, variables)) or 'none'}."
    if len(variables) != len(tables):
        raise ValueError(f"There are {len(tables)} tables: {'; '.join(here)}. {there} Variables go by their order.")
    for variable, table, words in zip(variables, tables, here, strict=True):
        if (variable.dim, variable.num_keys) != (table.dim, table.num_keys):
            raise ValueError(
                f"{os.path.join(path, META)}: {variable} does not fit into {words}. Variables go by the order in which "
                "they were made; where that is another one here, give the tables in theirs: "
                "sok.load_openembedding(path, [table, ...])."
            )


def _say_what_is_lost(path: str, loads: Sequence[_Load]) -> None:
    for why in dict.fromkeys(one.lost for one in loads if one.lost):
        warnings.warn(
            f"{path}: rows of {_named([other for other in loads if other.lost == why])} are taken over, states of the "
            f"optimizer are not: {why}. It begins anew.",
            stacklevel=3,
        )
    wide = [one for one in loads if one.saved.variable.dtype == "float64"]
    if wide:
        warnings.warn(f"{path}: {_named(wide)} become float32, which tables have.", stacklevel=3)


def _named(loads: Sequence[_Load]) -> str:
    first = f"variable {loads[0].saved.variable.number}"
    return first if len(loads) == 1 else f"{first} and {len(loads) - 1} others"
