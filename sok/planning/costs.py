"""What one table costs in one placement: bytes over bandwidths, operations over rates. In words: docs/planning.md."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from sok.planning.machine import Machine
from sok.planning.tables import Table
from sok.table import rules

KEYS, ANSWERS, GRADIENTS, SERVE, UPDATE, MEMORY = range(6)
"""Rows of what a rank bears: key bytes that one asker sends it, bytes that it answers one asker, gradient bytes that
one asker sends it, seconds as owner to find and gather, seconds to update, bytes of memory."""

_KEY = 8  # bytes


@dataclasses.dataclass(frozen=True)
class Job:
    """What is the same for all tables.

    Attributes:
        workers, hosts: ranks W, and the hosts they are on, as many on each.
        batch: samples of all workers together.
        rule: the update rule of all tables, by its name.
        dp_input: whether each worker brings its own samples; False: the ids of the whole batch for its own tables.
        way_home: 'auto', or 'sums' or 'rows' for all tables.
    """

    machine: Machine
    workers: int
    hosts: int
    batch: int
    rule: str = "adagrad"
    dp_input: bool = True
    way_home: str = "auto"
    dense_parameters: int = 0

    @property
    def samples(self) -> float:
        """Of one worker."""
        return self.batch / self.workers

    def slot_floats(self, dim: int) -> int:
        return rules.RULES[self.rule].slot_floats(dim)

    @functools.cached_property
    def per_byte(self) -> float:
        """Seconds for a byte that a rank sends, evenly to all others."""
        return self._mean(1 / self.machine.within.bandwidth, 1 / self.machine.between.bandwidth)

    @functools.cached_property
    def per_reduced_byte(self) -> float:
        machine = self.machine
        return self._mean(1 / machine.all_reduce_within.bandwidth, 1 / machine.all_reduce_between.bandwidth)

    def _mean(self, near: float, far: float) -> float:
        if self.workers == 1:
            return 0.0
        neighbours = self.workers // self.hosts - 1
        return (neighbours * near + (self.workers - 1 - neighbours) * far) / (self.workers - 1)

    @functools.cached_property
    def latency(self) -> float:
        """Of one exchange of all tables."""
        if self.workers == 1:
            return 0.0
        return self.machine.between.latency if self.hosts > 1 else self.machine.within.latency

    @functools.cached_property
    def reduce_latency(self) -> float:
        if self.workers == 1:
            return 0.0
        machine = self.machine
        return machine.all_reduce_between.latency if self.hosts > 1 else machine.all_reduce_within.latency


@dataclasses.dataclass(frozen=True)
class Loads:
    """What a table brings in one kind of placement, before anybody says which ranks own it.

    Attributes:
        owners: [6, pieces] what the owner of each piece bears; of a kind that all ranks share, [6, 1] each rank.
        everywhere: whether it is the latter.
        route, combine: seconds on every rank: to find distinct keys and their owners; to pool, each way.
        reduce: bytes that every rank sends with the dense gradients.
        buffers: bytes of memory on every rank for what is on the way.
        way: 'rows', 'sums', or 'local'.
        kept: bytes of rows that every rank hands over to itself alone.
    """

    owners: np.ndarray
    everywhere: bool
    route: float
    combine: float
    reduce: float
    buffers: float
    way: str
    kept: float = 0.0


def loads(table: Table, kind: str, widths: tuple[int, ...], job: Job) -> Loads:
    """What a table costs.

    Args:
        kind: as in `Where`.
        widths: columns of each piece; of kinds other than 'column_wise' all of them.
    """
    if kind == "data_parallel" and not table.hashed:
        return _copied(table, job)
    ways = ("sums", "rows") if job.way_home == "auto" else (job.way_home,)
    if not table.pooled:
        ways = ("rows",)
    elif not job.dp_input:
        ways = ("sums",)
    make = {"row_wise": _by_rows, "table_row_wise": _on_one_host, "data_parallel": _copied_by_key}.get(kind, _by_owner)
    # What moves less travels, as tables themselves choose.
    return min((make(table, widths, way, job) for way in ways), key=_moved)


def _moved(loads: Loads) -> float:
    return float(loads.owners[[KEYS, ANSWERS, GRADIENTS]].sum())


def _by_rows(table: Table, _: tuple[int, ...], way: str, job: Job) -> Loads:
    return _over(job.workers, table, way, job)


def _on_one_host(table: Table, _: tuple[int, ...], way: str, job: Job) -> Loads:
    ranks = job.workers // job.hosts
    loads = _over(ranks, table, way, job)
    return dataclasses.replace(loads, owners=np.repeat(loads.owners, ranks, axis=1), everywhere=False)


def _copied_by_key(table: Table, widths: tuple[int, ...], way: str, job: Job) -> Loads:
    """A copy on each rank of a hashed table: keys and gradients go to all of them, and each rank reads its own."""
    loads, part = _by_owner(table, widths, way, job), _Part(table, table.dim, job)
    owners, own = loads.owners.copy(), float(loads.owners[ANSWERS, 0])
    owners[ANSWERS] = 0.0
    read = part.distinct_here if way == "rows" else job.samples * table.ids
    owners[SERVE] = part.serve(read, part.distinct_here, found=job.workers * read)
    return dataclasses.replace(loads, owners=owners, everywhere=True, buffers=job.workers * loads.buffers, kept=own)


def _over(ranks: int, table: Table, way: str, job: Job) -> Loads:
    """Rows over that many ranks, each of which bears the same."""
    part = _Part(table, table.dim, job)
    # A rank has a whole number of rows, and the slowest counts.
    rows = -(-table.rows // ranks)
    distinct = max(part.distinct / ranks, min(part.distinct, 1.0))
    if way == "rows":
        asked = max(part.distinct_here / ranks, min(part.distinct_here, 1.0))
        owner = part.owner(rows, _KEY * asked, asked, job.workers * asked, distinct)
        return part.asker(owner, True, "rows", answers=part.distinct_here)
    # Of a segment of h ids some owners have none.
    touched = sum(1 - (1 - 1 / ranks) ** ids for ids in table.hotness) * job.samples
    ids = job.samples * table.ids / ranks
    owner = part.owner(rows, _KEY * (ids + touched), touched, job.workers * ids, distinct)
    return part.asker(owner, True, "sums", answers=touched * ranks)


def _by_owner(table: Table, widths: tuple[int, ...], way: str, job: Job) -> Loads:
    columns, answers = [], 0.0
    for width in widths:
        part = _Part(table, width, job)
        if way == "rows":
            keys = _KEY * part.distinct_here
            answers, gathered = part.distinct_here, part.distinct_here * job.workers
        else:
            keys = _KEY * job.samples * (table.ids + table.features)
            answers, gathered = job.samples * table.features, job.batch * table.ids
        columns.append(part.owner(table.rows, keys, answers, gathered, part.distinct))
    return _Part(table, table.dim, job).asker(np.concatenate(columns, axis=1), False, way, answers)


def _copied(table: Table, job: Job) -> Loads:
    """A copy on each rank, a variable of TensorFlow: Keras makes its gradient dense, and changes all its rows."""
    ranks, part = job.workers, _Part(table, table.dim, job)
    owner = part.owner(table.rows, 0.0, 0.0, job.samples * table.ids, part.distinct_here)
    owner[SERVE] = part.read(job.samples * table.ids, part.distinct_here)
    owner[UPDATE] = table.rows * table.row_bytes / job.machine.copied
    made = part.asker(owner, True, "local", answers=part.distinct_here)
    if ranks == 1:
        return made
    # What travels is all rows, or distinct ones with their keys.
    dense = 2 * (ranks - 1) / ranks * table.rows * table.row_bytes
    sparse = (ranks - 1) * part.distinct_here * (table.row_bytes + _KEY)
    return dataclasses.replace(made, reduce=min(dense, sparse))


class _Part:
    """Columns of one table, as many as `width`."""

    def __init__(self, table: Table, width: int, job: Job) -> None:
        self.table, self.job, self.bytes = table, job, 4.0 * width
        self.record = 4.0 * (width + job.slot_floats(width))
        self._columns = dataclasses.replace(table, dim=width)
        self._slot_floats = job.slot_floats(width)
        self.distinct = table.distinct_keys(job.batch, job.batch)
        self.distinct_here = table.distinct_keys(job.samples, job.batch)

    def owner(self, rows: float, keys: float, answers: float, gathered: float, distinct: float) -> np.ndarray:
        """[6, 1]: what an owner bears.

        Args:
            rows: that it keeps.
            keys: bytes from one asker.
            answers: rows to one asker.
            gathered: rows that it reads in a step, for all.
            distinct: different ones among them.
        """
        job, travel = self.job, answers * self.bytes
        buffers = job.workers * (keys + 2 * travel)
        sent = keys if job.dp_input else 0.0
        serve, update = self.serve(gathered, distinct, gathered), self.update(gathered, distinct)
        memory = self._columns.bytes_of(math.ceil(rows), self._slot_floats) + buffers
        return np.array((sent, travel, travel, serve, update, memory))[:, None]

    def serve(self, gathered: float, distinct: float, found: float) -> float:
        """Seconds to look for `found` keys, and to read rows, `distinct` different ones."""
        machine = self.job.machine
        probing = found / machine.probe if self.table.hashed else 0.0
        return self.read(gathered, distinct) + probing + machine.per_piece / 2

    def read(self, gathered: float, distinct: float) -> float:
        """Seconds to read rows, `distinct` different ones."""
        machine, again = self.job.machine, max(gathered - distinct, 0.0)
        return distinct * self.bytes / machine.gather_rate(self.bytes) + again * self.bytes / machine.stream

    def update(self, gradients: float, distinct: float) -> float:
        """Seconds to add up gradients of rows, and to change each row once."""
        machine = self.job.machine
        added = gradients * self.bytes / machine.stream + gradients / machine.probe
        return added + 2 * distinct * self.record / machine.update_rate(self.record) + machine.per_piece / 2

    def asker(self, owners: np.ndarray, everywhere: bool, way: str, answers: float) -> Loads:
        """With what every rank does for its own samples, which gets `answers` rows of the whole width."""
        job, table, machine = self.job, self.table, self.job.machine
        ids = job.samples * table.ids
        if not job.dp_input:
            route = 0.0
        elif way == "sums":
            route = 2 * ids * _KEY / machine.stream
        else:
            route = ids / machine.unique
        # Ops of TensorFlow, which every rank has for every table, whoever owns it.
        fixed = machine.per_table * (2 if way == "local" else owners.shape[1])
        read = ids if way != "sums" else answers
        combine = fixed / 4 + (read + job.samples * table.outputs) * table.row_bytes / machine.stream
        buffers = 2 * (answers + job.samples * table.outputs) * table.row_bytes
        return Loads(owners, everywhere, route + fixed / 2, combine, 0.0, buffers, way)
