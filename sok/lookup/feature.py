"""What a lookup is of: the ids of one feature, and the tables of several."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok.base import _ops
from sok.job import context
from sok.job.job import job_of
from sok.job.transport.base import Transport
from sok.table import on_servers, state
from sok.table.placement import Part
from sok.table.table import EmbeddingVariable, is_embedding_variable

# Combiners of a feature that is not pooled: each key's row, [..., D] for keys [...]; and the rows of each segment one
# after the other, [S, T, D], filled up with zeros to the longest.
ROWS = "rows"
PADDED = "padded"
_POOLING = ("sum", "mean", "sqrtn")


def check_combiner(combiner: object, argument: str = "combiner") -> str:
    """'sum', 'mean' or 'sqrtn', given in any capitalisation."""
    lowered = combiner.lower() if isinstance(combiner, str) else combiner
    if lowered not in _POOLING:
        raise ValueError(f"`{argument}` must be 'sum', 'mean' or 'sqrtn'. Received: {combiner!r}.")
    return lowered


@dataclasses.dataclass(frozen=True)
class Csr:
    """Ids of S segments, back to back: segment s holds keys[row_splits[s]:row_splits[s + 1]].

    Where something is wrong with the ids that only a run can tell, a report of it stands in place of the row splits:
    the lookup raises it, on every rank (`sok.lookup.inputs`).
    """

    keys: tf.Tensor  # [N]; with the combiner ROWS [...]
    row_splits: tf.Tensor | None = None  # [S + 1] int64; None or [0]: no segments, with ROWS alone
    weights: tf.Tensor | None = None  # [N] float32; for ordinary variables of float64, that
    needs_check: bool = True  # unless it is known that `row_splits` are no report

    def for_ops(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Keys [N], row splits and weights, as the native ops take them: an empty vector for what there is not."""
        keys = self.keys if self.keys.shape.rank == 1 else tf.reshape(self.keys, [-1])
        splits = tf.zeros([0], tf.int64) if self.row_splits is None else self.row_splits
        return keys, splits, self.weights_for_ops()

    def weights_for_ops(self) -> tf.Tensor:
        return tf.zeros([0]) if self.weights is None else self.weights


@dataclasses.dataclass(frozen=True)
class Feature:
    """One of the lookups of a call: ids of one table or ordinary variable, and what becomes of their rows."""

    table: Any  # an EmbeddingVariable; or an ordinary variable, of which every worker has all rows
    ids: Any  # Csr, or any form that `sok.lookup.inputs` takes; with ROWS, keys of any shape
    combiner: str = ROWS  # or PADDED, 'sum', 'mean', 'sqrtn'
    weights: Any = None  # in the form of the ids, unless those are Csr
    dtype: tf.DType | None = None  # of the result, if it is not that of `table`
    slot_num: int = 1  # segments per sample
    max_nnz: int = 0  # keys that a segment may have; 0: any number
    max_feature_num: int = 0  # keys that a sample may have; 0: any number
    padding_key: int | None = None  # in dense ids, those equal to it are left out
    distinct_slots: bool = False  # the key of a row is an id with the number of its feature in the sample
    exact: bool = False  # rows travel as they are, whatever `table.exchange_dtype` says
    seen: Callable[[tf.Tensor, tf.Tensor], None] | None = None  # is shown the keys and row splits of ids with slots
    ids_called: str = "inputs"  # in messages: the argument that a person passed
    weights_called: str = "weights"

    @property
    def is_of_table(self) -> bool:
        return is_embedding_variable(self.table)

    @property
    def key_dtype(self) -> tf.DType:
        """Of a table's keys; an ordinary variable's are row numbers."""
        return self.table.key_dtype if self.is_of_table else tf.int64

    @property
    def name(self) -> str:
        """Of the table or variable; eager tensors have none."""
        return self.table.table_name if self.is_of_table else getattr(self.table, "name", "tensor").partition(":")[0]

    @property
    def source(self) -> str:
        """What is looked up, in messages."""
        return f"{'table' if self.is_of_table else 'variable'} '{self.name}'"

    @property
    def label(self) -> str:
        """What is looked up, and by which argument if it is not the input of a layer."""
        return self.source if self.ids_called == "inputs" else f"`{self.ids_called}` of {self.source}"

    @property
    def pooling(self) -> str:
        """The combiner in words of the native ops, which fill nothing up."""
        return ROWS if self.combiner == PADDED else self.combiner

    @property
    def home_parts(self) -> list[Part]:
        """The parts of its table from which rows come to this worker: of copies its own."""
        return [part for part in self.table.parts if part.copy_of in (-1, self.table.rank)]

    @property
    def limits(self) -> dict[str, int]:
        return {"slot_num": self.slot_num, "max_nnz": self.max_nnz, "max_feature_num": self.max_feature_num}


def by_device(features: Sequence[Feature]) -> list[list[int]]:
    """The places of the features whose tables lie on one device, device by device; ordinary variables with the first.

    Example:
        >>> import sok
        >>> a, b = (sok.EmbeddingVariable(2, 10, name=f"at_{n}", on_host=n == "a") for n in "ab")
        >>> by_device([Feature(tf.Variable([[1.0]]), None), Feature(a, None), Feature(b, None)])
        [[0, 1, 2]]
    """
    of_tables = [place for place, f in enumerate(features) if f.is_of_table]
    others = [place for place, f in enumerate(features) if not f.is_of_table]
    found = [[of_tables[i] for i in one] for one in state.by_device([features[p].table for p in of_tables]).values()]
    return [sorted(found[0] + others), *found[1:]] if found else [others]


@dataclasses.dataclass(frozen=True)
class Group:
    """The distinct tables of some features, in order of first use."""

    tables: tuple[EmbeddingVariable, ...]

    @classmethod
    def of(cls, features: Sequence[Feature]) -> Group:
        return cls(tuple(dict.fromkeys(feature.table for feature in features)))

    def table_of(self, features: Sequence[Feature]) -> list[int]:
        number = {table: i for i, table in enumerate(self.tables)}
        return [number[feature.table] for feature in features]

    def parts_of(self, features: Sequence[Feature]) -> list[int]:
        """Of each feature the parts of its table, by their places in `part_handles`."""
        first, places = 0, {}
        for table in self.tables:
            places[table] = range(first, first + len(table.parts))
            first += len(table.parts)
        return [place for feature in features for place in places[feature.table]]

    @property
    def is_alone(self) -> bool:
        """Whether a lookup asks nobody: there is no other worker and no server, or a model is being traced for its
        export."""
        if _ops.is_substituted():
            on_servers.refuse(self.tables[0], "sok.export_saved_model", on_servers.BY_CHECKPOINT)
            return True
        return job_of(self.tables).size == 1 and not self.is_on_servers

    @property
    def is_on_servers(self) -> bool:
        """Whether the rows are on parameter servers."""
        return self.tables[0].on_servers is not None

    @property
    def transport(self) -> Transport:
        return self.tables[0].job.transport

    @property
    def name(self) -> str:
        """Of no other group of the program: a '+' of a table's name is doubled."""
        more = f"+{len(self.tables) - 1}" if len(self.tables) > 1 else ""
        return f"sok/{self.tables[0].table_name.replace('+', '++')}{more}"

    def collective(self, what: str) -> str:
        """The name of one of the group's collectives, on all workers."""
        return context.unique_collective_name(f"{self.name}/{what}")

    @property
    def handles(self) -> list[tf.Tensor]:
        return self.part_handles if self.is_on_servers else [table.handle for table in self.tables]

    @property
    def part_handles(self) -> list[tf.Tensor]:
        return [handle for table in self.tables for handle in table.part_handles]

    @property
    def copy_of(self) -> list[int]:
        """Of each of `part_handles` the rank whose copy it is, or -1; empty: there are no copies."""
        found = [part.copy_of for table in self.tables for part in table.parts]
        return found if any(rank >= 0 for rank in found) else []

    @property
    def dims(self) -> list[int]:
        return [table.dim for table in self.tables]

    @property
    def device(self) -> str:
        """Where the tables are; empty in a v1 graph that leaves it to TensorFlow. Of tables on servers where a worker
        does its part."""
        if self.is_on_servers:
            return "/device:CPU:0"
        return self.tables[0].handle.device or ""

    def check_device(self) -> None:
        """`ValueError` unless all tables are in one place."""
        if self.is_on_servers:
            return
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
