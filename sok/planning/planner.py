"""`sok.plan`: where each table belongs, what that costs, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sok.base.types import PathLike
from sok.planning import machine as machines
from sok.planning.costs import ANSWERS, GRADIENTS, KEYS, MEMORY, Job
from sok.planning.counting import sampled
from sok.planning.merlin import STRATEGIES, DistEmbeddingStrategy
from sok.planning.search import Found, NoRoom, Option, Search
from sok.planning.slicing import even_parts
from sok.planning.state import Choice, State
from sok.planning.tables import Model, Plannable, Table, model_of
from sok.planning.where import KINDS, Where, pinned
from sok.table import rules

_HEADER, _ANSWER_HEADER = 56, 64  # bytes before a message of keys, and of rows or gradients (docs/design/exchange.md)
_NARROWEST = 4  # columns of a piece, if nobody says otherwise: 16 bytes


class DoesNotFit(ValueError):
    """No plan fits in the memory of the workers; `shortfall` is the number of bytes that are missing."""

    def __init__(self, message: str, shortfall: int) -> None:
        super().__init__(message)
        self.shortfall = shortfall


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """Where one table is.

    Attributes:
        way: how owners answer: 'rows', 'sums', or 'local' where nobody is asked.
        memory: bytes on all workers together.
        reason: why it is not where `runner_up` says.
        runner_up, runner_up_ms: the next best kind, and the time of a step with it, all other tables as they are.
    """

    name: str
    where: Where
    way: str
    memory: int
    reason: str
    runner_up: Where | None = None
    runner_up_ms: float | None = None


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """What one rank bears in a step.

    Attributes:
        memory: bytes.
        phases: milliseconds of each phase, without waiting for others.
        bytes_in, bytes_out: that other ranks send it and that it sends, of keys, rows and gradients.
        bound_by: the phase that takes longest.
        handed: bytes that it hands over of 'keys', 'rows' and 'grads', its own share included, as
            `sok.collective_counts` counts them.
    """

    rank: int
    memory: int
    phases: dict[str, float]
    bytes_in: int
    bytes_out: int
    bound_by: str
    handed: dict[str, float]

    @property
    def ms(self) -> float:
        return sum(self.phases.values())


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `plan` gives. `print` shows it as a table, `as_dict` is for JSON, `sok.planning.showing` draws it.

    Attributes:
        step_ms: predicted time of a step.
        bound_ms: no plan of the same kinds is below this.
        is_exact: whether no plan of the same kinds is better.
        phases: milliseconds of the slowest rank in each phase.
        exchanges_ms: of 'keys', 'rows' and 'grads', on their way.
    """

    model: str
    machine: machines.Machine
    job: Job
    strategy: str
    step_ms: float
    bound_ms: float
    is_exact: bool
    phases: dict[str, float]
    exchanges_ms: dict[str, float]
    tables: tuple[TablePlan, ...]
    ranks: tuple[RankPlan, ...]

    def __str__(self) -> str:
        from sok.planning import showing

        return showing.as_text(self)

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain values, for JSON."""
        job = self.job
        return {
            **{"model": self.model, "machine": self.machine.name, "source": self.machine.source},
            **{"workers": job.workers, "hosts": job.hosts, "batch": job.batch, "optimizer": job.rule},
            **{"strategy": self.strategy, "step_ms": self.step_ms, "bound_ms": self.bound_ms, "exact": self.is_exact},
            "phases_ms": self.phases,
            "exchanges_ms": self.exchanges_ms,
            "ranks": [dataclasses.asdict(rank) | {"ms": rank.ms} for rank in self.ranks],
            "tables": [
                {
                    **{"name": table.name, "placement": table.where.as_dict(), "way_home": table.way},
                    **{"memory": table.memory, "reason": table.reason, "runner_up_ms": table.runner_up_ms},
                    "runner_up": table.runner_up.as_dict() if table.runner_up else None,
                }
                for table in self.tables
            ],
        }


def plan(
    tables: Plannable,
    workers: int | None = None,
    *,
    hosts: int = 1,
    batch: int = 65536,
    optimizer: str = "adagrad",
    memory: int | None = None,
    machine: machines.Machine | PathLike | None = None,
    model: str | None = None,
    strategy: str = "auto",
    pin: Mapping[str, str] | None = None,
    forbid: Collection[str] = (),
    dp_input: bool = True,
    way_home: str = "auto",
    column_slice_threshold: int | None = None,
    batches: Iterable[Mapping[str, Any]] | None = None,
) -> Plan:
    """Says where each table belongs, and predicts a training step.

    The cost model is that of docs/planning.md: bytes over bandwidths, operations over rates, collectives over
    latency; between two collectives the slowest rank decides. Nothing is allocated.

    Args:
        tables: a list of `sok.planning.tables.Table`, of dicts with its arguments or of Keras layers; a Keras model;
            a JSON file of these; or what `sok.count_lookups` has counted in a job that runs.
        workers: ranks W; None: those of this job.
        hosts: hosts that they are on, the same number on each.
        batch: samples of all workers in a step.
        optimizer: the update rule of all tables, a name of `sok.table.rules.RULES`.
        memory: bytes of a worker; None: what the machine has.
        machine: a file, or a name of `sok.planning.machine.shipped()`; None: what `sok doctor --measure` has
            measured here, else 'cpu_2_cores'.
        model: which of the models of a JSON file.
        strategy: 'auto'; or a kind for all tables; or 'basic', 'memory_balanced' or 'memory_optimized', Merlin's.
        pin: name of a table -> 'row_wise', 'data_parallel', 'table_wise', 'table_wise(OWNER)', 'table_row_wise',
            'table_row_wise(HOST)', 'column_wise' or 'column_wise(PIECES)'.
        forbid: kinds that no table may have, unless it is pinned to one.
        dp_input: False: each rank brings the ids of the whole batch for the tables it owns.
        way_home: 'auto', or 'sums' or 'rows' for all tables (`TableOptions`).
        column_slice_threshold: of Merlin's strategies.
        batches: some batches of real ids, as of `sok.planning.counting.sampled`, in place of `hotness`, `skew` and
            `distinct` of the tables that they name.

    Returns:
        A `Plan`, the same whenever the arguments are. Not collective, unless lookups of this job were counted.

    Raises:
        ValueError: an argument makes no sense.
        DoesNotFit: the tables do not fit, with the bytes that are missing.

    Example:
        >>> tables = [dict(rows=1000, dim=16), dict(rows=10_000_000, dim=64, hotness=[30])]
        >>> found = plan(tables, workers=4, batch=4096, machine="cpu_2_cores")
        >>> found.is_exact, [table.where.kind for table in found.tables]
        (True, ['row_wise', 'row_wise'])
    """
    asked = model_of(tables, model) if batches is None else sampled(tables, batches, model)
    job = _job(asked, workers, hosts, batch, optimizer, machines.load(machine), dp_input, way_home)
    if strategy != "auto" and strategy not in (*KINDS, *STRATEGIES):
        raise ValueError(f"`strategy` must be 'auto' or one of {', '.join((*KINDS, *STRATEGIES))}: {strategy!r}.")
    unknown = sorted(set(forbid) - set(KINDS))
    if unknown:
        raise ValueError(f"`forbid` must be some of {', '.join(KINDS)}. Received: {unknown[0]!r}.")
    pins = dict(pin or {})
    names = {table.name for table in asked.tables}
    strangers = sorted(set(pins) - names)
    if strangers:
        raise ValueError(f"`pin` names no table of the model: {strangers[0]!r}. There are: {_some(sorted(names))}.")
    limit = job.machine.memory if memory is None else memory
    options = [_options(table, job, strategy, pins.get(table.name), forbid) for table in asked.tables]
    # Of dense weights, their gradients and their slots.
    dense = 4.0 * asked.dense_parameters * (2 + job.slot_floats(1))
    search = Search(asked.tables, options, job, np.full(job.workers, float(limit)), dense)
    found = (
        _merlin(asked, search, strategy, column_slice_threshold)
        if strategy in STRATEGIES
        else _searched(search, asked, limit)
    )
    state = search.state_of(found.choices)
    over = float((state.ranks[MEMORY] - limit).max())
    if over > 0:
        raise _does_not_fit(
            f"by {strategy}, the fullest rank needs {int(state.ranks[MEMORY].max()):,} bytes", over, limit
        )
    return Plan(
        asked.name,
        job.machine,
        job,
        strategy,
        state.seconds() * 1e3,
        found.bound * 1e3,
        found.is_exact,
        _phases(state),
        {kind: seconds * 1e3 for kind, seconds in state.exchanges().items()},
        tuple(_explained(asked, search, found, state, pins)),
        tuple(_ranks(state, _counts(asked, found, job.workers))),
    )


def _job(asked: Model, workers: int | None, hosts: int, batch: int, optimizer: str, *others: Any) -> Job:
    machine, dp_input, way_home = others
    if workers is None:
        from sok.job import context

        workers = context.get_transport().size
    if workers < 1 or hosts < 1 or workers % hosts:
        raise ValueError(f"`workers` must be a multiple of `hosts`, both at least 1. Received: {workers} on {hosts}.")
    if batch < 1:
        raise ValueError(f"`batch` must be at least 1. Received: {batch}.")
    if optimizer not in rules.RULES:
        raise ValueError(f"`optimizer` must be one of {', '.join(rules.RULES)}. Received: {optimizer!r}.")
    if way_home not in ("auto", "rows", "sums"):
        raise ValueError(f"`way_home` must be 'auto', 'rows' or 'sums'. Received: {way_home!r}.")
    return Job(machine, workers, hosts, batch, optimizer, dp_input, way_home, asked.dense_parameters)


def _options(table: Table, job: Job, strategy: str, pin: str | None, forbid: Collection[str]) -> list[Option]:
    """What a table may be. Refuses what it cannot be."""
    kind, number = pinned(pin) if pin else (None, None)
    whole = rules.RULES[job.rule].needs_whole_row
    allowed = [kind] if kind else list(KINDS) if strategy not in KINDS else [strategy]
    if not kind:
        allowed = [name for name in allowed if name not in forbid]
    impossible = {
        "column_wise": f"{job.rule} needs whole rows" if whole else "it has one column" if table.dim == 1 else "",
        "row_wise": "" if job.dp_input else "dp_input=False needs owners",
        "data_parallel": "" if job.dp_input else "dp_input=False needs owners",
        "table_row_wise": _why_not_by_host(job),
    }
    left = [name for name in allowed if not impossible.get(name)]
    if not left:
        why = "; ".join(f"{name}: {impossible[name]}" for name in allowed) or "all kinds are forbidden"
        raise ValueError(f"table {table.name!r} has no placement left ({why}).")
    all_of_it = (table.dim,)
    found = []
    for name in left:
        if name == "column_wise":
            most = min(job.workers, table.dim)
            if number is not None and not 1 <= number <= most:
                raise ValueError(f"table {table.name!r} can have 1 to {most} pieces. Received: {pin}.")
            most = most if kind else min(most, table.dim // _NARROWEST)
            pieces = [number] if number is not None else [2**k for k in range(1, 12) if 2**k <= most]
            found += [Option(name, tuple(even_parts(table.dim, count))) for count in pieces]
        elif name == "table_wise":
            if number is not None and number >= job.workers:
                raise ValueError(f"table {table.name!r} cannot be on rank {number} of {job.workers}.")
            found.append(Option(name, all_of_it, number))
        elif name == "table_row_wise":
            if number is not None and number >= job.hosts:
                raise ValueError(f"table {table.name!r} cannot be on host {number} of {job.hosts}.")
            found.append(Option(name, all_of_it, number))
        elif name != "data_parallel" or job.workers > 1 or kind or strategy == name:
            found.append(Option(name, all_of_it))
    return found or [Option("table_wise", all_of_it)]


def _why_not_by_host(job: Job) -> str:
    if not job.dp_input:
        return "dp_input=False needs owners"
    if job.hosts == 1:
        return "there is one host: that is row_wise"
    return "" if job.workers > job.hosts else "a host has one worker: that is table_wise"


def _searched(search: Search, asked: Model, limit: int) -> Found:
    try:
        return search.run()
    except NoRoom as failure:
        taken = []
        for table, options in enumerate(search.options):
            costs = [search.loads_of(table, option) for option in options]
            taken.append(
                min(c.owners[MEMORY].sum() * (search.job.workers if c.everywhere else 1) for c in costs)
                + search.job.workers * min(c.buffers for c in costs)
            )
        needed, there = sum(taken) + search.job.workers * search.start, search.job.workers * limit
        if needed > there:
            raise _does_not_fit(
                f"all tables need at least {int(needed):,} bytes, and all workers have {there:,}", needed - there, limit
            ) from None
        name = asked.tables[failure.table].name
        raise _does_not_fit(f"table {name!r} has no room beside the others", failure.missing, limit) from None


def _does_not_fit(what: str, shortfall: float, limit: int) -> DoesNotFit:
    missing = int(-(-shortfall // 1))
    return DoesNotFit(
        f"no plan fits: {what}: {missing:,} bytes are missing, of {limit:,} a worker. "
        "Take more workers, raise `memory`, or allow more kinds.",
        missing,
    )


class _Layer:
    """What Merlin's strategy asks of a layer."""

    def __init__(self, table: Table) -> None:
        self.config = {"name": table.name, "input_dim": table.rows, "output_dim": table.dim, "combiner": table.pooled}

    def get_config(self) -> dict[str, Any]:
        return self.config


def _merlin(asked: Model, search: Search, strategy: str, threshold: int | None) -> Found:
    layers = [_Layer(table) for table in asked.tables]
    placed = DistEmbeddingStrategy(layers, search.job.workers, strategy, column_slice_threshold=threshold)
    choices = []
    for i in range(len(layers)):
        pieces = placed.columns_of(i)
        owners, widths = tuple(rank for rank, _, _ in pieces), tuple(stop - start for _, start, stop in pieces)
        kind = "column_wise" if len(pieces) > 1 else "table_wise"
        choices.append(Choice(kind, search.loads_of(i, Option(kind, widths)), owners, widths))
    return Found(choices, search.state_of(choices).seconds(), False)


def _phases(state: State) -> dict[str, float]:
    return {name: float(seconds.max()) * 1e3 for name, seconds in state.phases().items()}


def _counts(asked: Model, found: Found, workers: int) -> int:
    """Of how many things a message of keys says how many follow: of each part of a table, and two of each feature."""
    total = 0
    for table, choice in zip(asked.tables, found.choices, strict=True):
        if choice.loads.way != "local":
            parts = workers if choice.kind == "data_parallel" else max(1, len(choice.widths))
            total += parts * (1 + 2 * table.features)
    return total


def _ranks(state: State, counts: int) -> list[RankPlan]:
    job, phases = state.job, state.phases()
    head, answer_head = (job.workers * size * (counts > 0) for size in (_HEADER + 8 * counts, _ANSWER_HEADER))
    others = job.workers - 1
    found = []
    for rank in range(job.workers):
        mine = {name: float(seconds[rank]) * 1e3 for name, seconds in phases.items()}
        travel = state.ranks[[KEYS, ANSWERS, GRADIENTS]]
        keys, answers, gradients = map(float, travel[:, rank])
        all_keys, all_answers, all_gradients = map(float, travel.sum(axis=1))
        found.append(
            RankPlan(
                rank,
                int(state.ranks[MEMORY, rank]),
                mine,
                # Keys come to owners and answers leave them; gradients come back.
                int(others * (keys + gradients) + all_answers - answers),
                int(others * answers + all_keys - keys + all_gradients - gradients),
                max(mine, key=lambda name: mine[name]),
                {
                    "keys": (all_keys + head * job.dp_input) * (others > 0),
                    "rows": (job.workers * answers + state.kept + answer_head) * (others > 0),
                    "grads": (all_gradients + answer_head) * (others > 0),
                },
            )
        )
    return found


def _where(choice: Choice, table: Table, hosts: int) -> Where:
    is_cut = choice.kind == "column_wise"
    by_rows = choice.kind in ("row_wise", "table_row_wise")
    hosts = hosts if choice.kind == "table_row_wise" else 0
    return Where(choice.kind, choice.owners, choice.widths if is_cut else (), by_rows and table.hashed, hosts)


def _explained(
    asked: Model, search: Search, found: Found, state: State, pins: Mapping[str, str]
) -> Sequence[TablePlan]:
    now, parts = state.seconds(), state.parts()
    plans = []
    for i, (table, choice) in enumerate(zip(asked.tables, found.choices, strict=True)):
        where = _where(choice, table, search.job.hosts)
        memory = float(choice.loads.owners[MEMORY].sum()) * (search.job.workers if choice.loads.everywhere else 1)
        state.add(choice, -1.0)
        others, too_large = [], []
        for option in search.options[i]:
            if (option.kind, len(option.widths)) != (choice.kind, max(1, len(choice.widths))):
                best = search.best_of(i, option, state)
                others += [best] if best else []
                too_large += [] if best else [option.kind]
        runner_up = min(others, key=lambda best: best[0], default=None)
        reason = "the only one possible" if not too_large else f"{too_large[0]} does not fit"
        if runner_up is not None:
            state.add(runner_up[1])
            reason = _reason(parts, state.parts(), runner_up[0] - now)
            state.add(runner_up[1], -1.0)
        state.add(choice)
        if table.name in pins:
            reason = "pinned"
        plans.append(
            TablePlan(
                table.name,
                where,
                choice.loads.way,
                int(memory),
                reason,
                _where(runner_up[1], table, search.job.hosts) if runner_up else None,
                runner_up[0] * 1e3 if runner_up else None,
            )
        )
    return plans


def _reason(ours: Mapping[str, float], theirs: Mapping[str, float], seconds: float) -> str:
    saved = {name: theirs[name] - ours[name] for name in ours}
    name = max(saved, key=lambda name: saved[name])
    if saved[name] <= 1e-9:
        return "as fast as the others"
    if seconds < 0:
        return "by the strategy asked for"
    return f"saves {saved[name] * 1e3:.3g} ms of {name}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", .." if len(names) > 5 else "")
