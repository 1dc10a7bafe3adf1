"""Which choice for which table: exact where few are possible, else greedy starts and changes of one table at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from sok.planning.costs import ANSWERS, GRADIENTS, KEYS, MEMORY, SERVE, UPDATE, Job, Loads, loads
from sok.planning.state import Choice, State
from sok.planning.tables import Table

_NODES = 20_000  # of the exact search: a second or two
_PASSES = 6  # over all tables, at most: of Merlin's models later ones change less than a thousandth


@dataclasses.dataclass(frozen=True)
class Option:
    """A kind that a table may have, and the owner or owners if they are said."""

    kind: str
    widths: tuple[int, ...]
    owner: int | None = None  # of 'table_row_wise' the host


class NoRoom(Exception):
    """A table fits nowhere. Holds its number and the bytes that are missing."""

    def __init__(self, table: int, missing: float) -> None:
        super().__init__(table, missing)
        self.table, self.missing = table, missing


@dataclasses.dataclass(frozen=True)
class Found:
    """The choices, of each table one, and what is known of the best possible ones.

    Attributes:
        bound: seconds that no plan of these options is below.
        is_exact: whether no plan of these options is better.
    """

    choices: list[Choice]
    bound: float
    is_exact: bool


class Search:
    """Tables, what each may be, and the memory of the ranks.

    Args:
        options: of each table, in the order in which equal ones are preferred.
        memory: [ranks] bytes.
        start: bytes that each rank has taken before.
    """

    def __init__(
        self, tables: Sequence[Table], options: Sequence[Sequence[Option]], job: Job, memory: np.ndarray, start: float
    ) -> None:
        self.job, self.options, self.memory, self.start = job, options, memory, start
        # Tables of one shape cost the same, whatever they are called.
        shapes: dict[Table, int] = {}
        self._shape = [shapes.setdefault(dataclasses.replace(table, name=""), len(shapes)) for table in tables]
        self._shapes, self._loads = list(shapes), dict[tuple[int, str, tuple[int, ...]], Loads]()

    def run(self) -> Found:
        """The best plan found.

        Raises:
            NoRoom: no start found room for all tables.
        """
        found, failures = [], []
        for start in (self._by_mean, self._greedily, self._smallest):
            try:
                found.append(start())
            except NoRoom as failure:
                failures.append(failure)
        if not found:
            raise failures[-1]
        better = [self._improved(choices) for choices in found]
        choices = min(better, key=self._seconds_of)
        for plain in self._plain():
            if self._seconds_of(plain) < self._seconds_of(choices):
                choices = self._improved(plain)
        if len(choices) <= 8 and self.job.workers <= 8:
            exact, is_exact = self._exact(choices)
            if is_exact:
                return Found(exact, self.state_of(exact).seconds(), True)
            choices = exact
        return Found(choices, min(self._bound(), self.state_of(choices).seconds()), False)

    def _seconds_of(self, choices: Sequence[Choice]) -> float:
        return self.state_of(choices).seconds()

    def state_of(self, choices: Sequence[Choice]) -> State:
        state = State(self.job)
        state.ranks[MEMORY] += self.start
        for choice in choices:
            state.add(choice)
        return state

    def loads_of(self, table: int, option: Option) -> Loads:
        key = (self._shape[table], option.kind, option.widths)
        if key not in self._loads:
            self._loads[key] = loads(self._shapes[key[0]], option.kind, option.widths, self.job)
        return self._loads[key]

    def best_of(self, table: int, option: Option, state: State) -> tuple[float, Choice] | None:
        """The best ranks for a table in one option, and the seconds of a step then. None: there is no room."""
        cost = self.loads_of(table, option)
        room = state.room(self.memory) - cost.buffers
        if cost.everywhere:
            if (room < cost.owners[MEMORY, 0]).any():
                return None
            choice = Choice(option.kind, cost)
            return self._seconds_with(state, choice), choice
        if (room < 0).any():
            return None
        fits = room >= cost.owners[MEMORY].max()
        if option.kind == "table_row_wise":
            return self._best_host(option, cost, fits, state)
        if option.owner is not None:
            fits &= np.arange(len(fits)) == option.owner
        pieces = cost.owners.shape[1]
        if fits.sum() < pieces:
            return None
        if pieces == 1:
            seconds = np.where(fits, state.if_owned(cost), np.inf)
            owner = int(seconds.argmin())
            return float(seconds[owner]), Choice(option.kind, cost, (owner,), option.widths)
        burden = np.where(fits, state.burden(), np.inf)
        owners = tuple(sorted(np.argsort(burden, kind="stable")[:pieces].tolist()))
        choice = Choice(option.kind, cost, owners, option.widths)
        return self._seconds_with(state, choice), choice

    def _best_host(self, option: Option, cost: Loads, fits: np.ndarray, state: State) -> tuple[float, Choice] | None:
        """As `best_of`, of rows on the ranks of one host: the one whose busiest rank has least to do."""
        hosts = self._hosts()
        burden = np.where(fits, state.burden(), np.inf)[hosts].max(axis=1)
        host = int(burden.argmin()) if option.owner is None else option.owner
        if not np.isfinite(burden[host]):
            return None
        choice = Choice(option.kind, cost, tuple(hosts[host].tolist()), option.widths)
        return self._seconds_with(state, choice), choice

    def _hosts(self) -> np.ndarray:
        """[hosts, ranks of each]."""
        return np.arange(self.job.workers).reshape(self.job.hosts, -1)

    @staticmethod
    def _seconds_with(state: State, choice: Choice) -> float:
        state.add(choice)
        seconds = state.seconds()
        state.add(choice, -1.0)
        return seconds

    def mean(self, table: int, option: Option) -> float:
        """Seconds that a table costs if all ranks together are balanced: no plan is below the sum of these."""
        cost, job = self.loads_of(table, option), self.job
        share = cost.owners.sum(axis=1) / (1 if cost.everywhere else job.workers)
        moved = job.per_byte * (job.workers - 1) * share[[KEYS, ANSWERS, GRADIENTS]].sum()
        seconds = moved + share[SERVE] + share[UPDATE]
        return float(seconds + cost.route + 2 * cost.combine + cost.reduce * job.per_reduced_byte)

    def _bound(self) -> float:
        """All ranks equally busy with the cheapest kinds; or the costliest table alone."""
        empty = State(self.job)
        balanced = empty.constant() + sum(
            min(self.mean(table, option) for option in self.options[table]) for table in range(len(self.options))
        )
        alone = [
            min(found[0] for option in self.options[table] if (found := self.best_of(table, option, empty)))
            for table in range(len(self.options))
        ]
        return max([balanced, *alone])

    def _by_mean(self) -> list[Choice]:
        """Kinds as if ranks were balanced; then the costliest table first, to the rank where it harms least."""
        cheapest = []
        for table, options in enumerate(self.options):
            means = [self.mean(table, option) for option in options]
            cheapest.append(options[means.index(min(means))])
        costs = [self.mean(table, option) for table, option in enumerate(cheapest)]
        return self._fill(np.argsort(-np.array(costs), kind="stable"), lambda table: [cheapest[table]])

    def _greedily(self) -> list[Choice]:
        costs = [min(self.mean(table, option) for option in options) for table, options in enumerate(self.options)]
        return self._fill(np.argsort(-np.array(costs), kind="stable"), lambda table: self.options[table])

    def _plain(self) -> Iterator[list[Choice]]:
        """All tables in one kind, as far as they may and fit: no plan should be slower than what anyone would try."""
        costs = [min(self.mean(table, option) for option in options) for table, options in enumerate(self.options)]
        order = np.argsort(-np.array(costs), kind="stable")
        for kind in ("row_wise", "table_wise"):
            of_kind = [[option for option in options if option.kind == kind] for options in self.options]
            if any(of_kind):
                with contextlib.suppress(NoRoom):
                    yield self._fill(order, lambda table: of_kind[table] or self.options[table])  # noqa: B023

    def _smallest(self) -> list[Choice]:
        """The largest table first, in the kind that takes the least memory: for ranks that are nearly full."""

        def taken(table: int, option: Option) -> float:
            cost = self.loads_of(table, option)
            return float(cost.owners[MEMORY].sum()) * (self.job.workers if cost.everywhere else 1)

        sizes = [min(taken(table, option) for option in options) for table, options in enumerate(self.options)]

        def options(table: int) -> list[Option]:
            return sorted(self.options[table], key=lambda option: taken(table, option))[:2]

        return self._fill(np.argsort(-np.array(sizes), kind="stable"), options)

    def _fill(self, order: np.ndarray, options: Callable[[int], Sequence[Option]]) -> list[Choice]:
        """Tables one after the other. One that fits in none of its options takes any that it may have."""
        state = self.state_of([])
        choices: dict[int, Choice] = {}
        for table in order.tolist():
            found = self._best(table, options(table), state) or self._best(table, self.options[table], state)
            if found is None:
                raise NoRoom(table, self._missing(table, state))
            choices[table] = found[1]
            state.add(found[1])
        return [choices[table] for table in range(len(self.options))]

    def _best(self, table: int, options: Sequence[Option], state: State) -> tuple[float, Choice] | None:
        found = [best for option in options if (best := self.best_of(table, option, state)) is not None]
        return min(found, key=lambda best: best[0]) if found else None

    def _missing(self, table: int, state: State) -> float:
        """Bytes that the nearest option lacks."""
        room, missing = state.room(self.memory), []
        for option in self.options[table]:
            cost = self.loads_of(table, option)
            pieces = cost.owners.shape[1]
            of_each = room
            if option.kind == "table_row_wise":  # the fullest rank of a host counts
                of_each, pieces = room[self._hosts()].min(axis=1), 1
            freest = of_each if option.owner is None else of_each[[option.owner]]
            last = room.min() if cost.everywhere else np.sort(freest)[::-1][min(pieces, len(freest)) - 1]
            missing.append(cost.owners[MEMORY].max() + cost.buffers - last)
        return float(max(1.0, min(missing)))

    def _improved(self, choices: list[Choice]) -> list[Choice]:
        """Changes one table at a time, as long as a step gets shorter by that."""
        choices, state = list(choices), self.state_of(choices)
        now = state.seconds()
        order = np.argsort([-self._weight(choice) for choice in choices], kind="stable").tolist()
        for _ in range(_PASSES):
            before = now
            for table in order:
                if len(self.options[table]) == 1 and not choices[table].owners:
                    continue
                state.add(choices[table], -1.0)
                best = self._best(table, self.options[table], state)
                if best is not None and best[0] < now * (1 - 1e-9):
                    now, choices[table] = best
                state.add(choices[table])
            if now > before * (1 - 1e-3):
                break
        return choices

    @staticmethod
    def _weight(choice: Choice) -> float:
        return float(choice.loads.owners[SERVE].sum() + choice.loads.owners[UPDATE].sum())

    def _exact(self, incumbent: list[Choice]) -> tuple[list[Choice], bool]:
        """Depth first over all choices; branches end where what is placed takes as long as the best plan."""
        best, least = incumbent, self.state_of(incumbent).seconds()
        state, nodes = self.state_of([]), 0
        order = sorted(range(len(incumbent)), key=lambda table: -self._weight(incumbent[table]))
        chosen: dict[int, Choice] = {}
        after = [0.0]
        for table in reversed(order):
            costs = [self.loads_of(table, option) for option in self.options[table]]
            after.append(after[-1] + min(c.route + 2 * c.combine + c.reduce * self.job.per_reduced_byte for c in costs))
        after.reverse()

        def visit(depth: int) -> bool:
            nonlocal best, least, nodes
            nodes += 1
            if nodes > _NODES:
                return False
            if state.seconds() + after[depth] >= least * (1 - 1e-9):
                return True
            if depth == len(order):
                best, least = [chosen[table] for table in range(len(order))], state.seconds()
                return True
            for choice in self._all_choices(order[depth], state):
                chosen[order[depth]] = choice
                state.add(choice)
                is_complete = visit(depth + 1)
                state.add(choice, -1.0)
                if not is_complete:
                    return False
            return True

        is_exact = visit(0)
        return best, is_exact

    def _all_choices(self, table: int, state: State) -> Iterator[Choice]:
        for option in self.options[table]:
            cost = self.loads_of(table, option)
            room = state.room(self.memory) - cost.buffers
            if cost.everywhere:
                if (room >= cost.owners[MEMORY, 0]).all():
                    yield Choice(option.kind, cost)
                continue
            ranks = range(self.job.workers) if option.owner is None else [option.owner]
            pieces = cost.owners.shape[1]
            is_even = len(set(option.widths)) == 1
            ways: Iterable[tuple[int, ...]]
            if option.kind == "table_row_wise":
                hosts = self._hosts().tolist()
                ways = map(tuple, hosts if option.owner is None else [hosts[option.owner]])
            else:
                ways = itertools.combinations(ranks, pieces) if is_even else itertools.permutations(ranks, pieces)
            seen = set()
            for owners in ways:
                # Ranks that bear the same are the same; rounding of what was added and taken away is not meant.
                looks = tuple(tuple(float(f"{v:.9e}") for v in state.ranks[:, owner]) for owner in owners)
                fits = all(room[o] >= cost.owners[MEMORY, i] for i, o in enumerate(owners))
                if looks not in seen and fits and (room >= 0).all():
                    yield Choice(option.kind, cost, tuple(owners), option.widths)
                seen.add(looks)
