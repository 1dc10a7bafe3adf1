"""All tables together: what each rank bears, and when the slowest one is done."""

from __future__ import annotations

import dataclasses

import numpy as np

from sok.planning.costs import ANSWERS, GRADIENTS, KEYS, MEMORY, SERVE, UPDATE, Job, Loads


@dataclasses.dataclass(frozen=True)
class Choice:
    """One placement of one table, without names: what it brings and where. Owners are empty where all ranks share."""

    kind: str
    loads: Loads
    owners: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()


class State:
    """The sum of the choices made so far.

    A step has barriers, its collectives, and between two of them the slowest rank decides: so the time of a step is
    the sum over what lies between barriers of the largest share of a rank.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.ranks = np.zeros((6, job.workers))
        self.route = self.combine = self.reduce = self.kept = 0.0
        self.exchanged = 0  # tables that travel
        # Seconds for the bytes of one asker: a rank answers all others.
        self._out = job.per_byte * (job.workers - 1)

    def add(self, choice: Choice, sign: float = 1.0) -> None:
        loads = choice.loads
        if loads.everywhere:
            self.ranks += sign * loads.owners
        elif len(choice.owners) == 1:
            self.ranks[:, choice.owners[0]] += sign * loads.owners[:, 0]
        else:  # two pieces may be on one rank
            np.add.at(self.ranks.T, list(choice.owners), sign * loads.owners.T)
        self.ranks[MEMORY] += sign * loads.buffers
        self.exchanged += int(sign) * (loads.way != "local")
        self.route += sign * loads.route
        self.combine += sign * loads.combine
        self.reduce += sign * loads.reduce
        self.kept += sign * loads.kept

    def exchange(self, row: int) -> np.ndarray:
        """[ranks] seconds for what each sends and gets of keys, answers or gradients, both at once."""
        mine = self.ranks[row]
        return np.maximum(self._out * mine, self.job.per_byte * (mine.sum() - mine))

    def _slowest_exchange(self, row: int) -> float:
        """The largest of `exchange`."""
        mine = self.ranks[row]
        return max(self._out * mine.max(), self.job.per_byte * (mine.sum() - mine.min()))

    def phases(self) -> dict[str, np.ndarray]:
        """[ranks] seconds of each phase, were there no barrier in it."""
        job, machine, one = self.job, self.job.machine, np.ones(self.job.workers)
        latency = job.latency if self.exchanged else 0.0
        keys = latency if job.dp_input else 0.0
        answers, gradients = self.exchange(ANSWERS) + latency, self.exchange(GRADIENTS) + latency
        dense = 6 * job.dense_parameters * job.samples / machine.flops
        return {
            "key exchange": self.route + self.exchange(KEYS) + keys,
            "forward": self.ranks[SERVE] + answers + self.combine,
            "backward": gradients + self.combine,
            "update": self.ranks[UPDATE].copy(),
            "dense": (dense + self._reduced()) * one,
            "fixed": machine.per_step * one,
        }

    def _reduced(self) -> float:
        job = self.job
        if job.workers == 1:
            return 0.0
        sent = 2 * (job.workers - 1) / job.workers * 4 * job.dense_parameters + self.reduce
        return sent * job.per_reduced_byte + (job.reduce_latency if sent else 0.0)

    def exchanges(self) -> dict[str, float]:
        """Seconds of each exchange, its latency included."""
        latency = self.job.latency if self.exchanged else 0.0
        keys = float(self.exchange(KEYS).max()) + (latency if self.job.dp_input else 0.0)
        answers, gradients = (float(self.exchange(row).max()) + latency for row in (ANSWERS, GRADIENTS))
        return {"keys": keys, "rows": answers, "grads": gradients}

    def parts(self) -> dict[str, float]:
        """Seconds of what lies between barriers: what a step is the sum of, by names for reasons."""
        job = self.job
        return {
            "looking for distinct keys": self.route,
            "key exchange": float(self.exchange(KEYS).max()),
            "owners' work": float(self.ranks[SERVE].max()),
            "exchange of rows and gradients": sum(float(self.exchange(row).max()) for row in (ANSWERS, GRADIENTS)),
            "pooling": 2 * self.combine,
            "update": float(self.ranks[UPDATE].max()),
            "all-reduce": self.reduce * job.per_reduced_byte,
        }

    def seconds(self) -> float:
        """Of a step."""
        slowest = sum(self._slowest_exchange(row) for row in (KEYS, ANSWERS, GRADIENTS))
        slowest += self.ranks[SERVE].max() + self.ranks[UPDATE].max()
        return float(slowest) + self.constant()

    def constant(self) -> float:
        """Seconds that do not depend on which ranks own what."""
        job = self.job
        exchanges = self._latencies() if self.exchanged else 0.0
        dense = 6 * job.dense_parameters * job.samples / job.machine.flops + self._reduced()
        return self.route + 2 * self.combine + exchanges + dense + job.machine.per_step

    def _latencies(self) -> float:
        return (3 if self.job.dp_input else 2) * self.job.latency

    def if_owned(self, loads: Loads) -> np.ndarray:
        """[ranks] seconds of a step if a whole table were added and that rank owned it, as `seconds` would say."""
        job, total = self.job, np.zeros(self.job.workers)
        added = loads.owners[:, 0]
        for row in (KEYS, ANSWERS, GRADIENTS):
            mine = self.ranks[row]
            low, lowest = _lowest_of_others(mine)
            fewest = np.minimum(np.where(np.arange(len(mine)) == lowest[0], low[1], low[0]), mine + added[row])
            sent = self._out * np.maximum(_highest_of_others(mine), mine + added[row])
            total += np.maximum(sent, job.per_byte * (mine.sum() + added[row] - fewest))
        for row in (SERVE, UPDATE):
            total += np.maximum(_highest_of_others(self.ranks[row]), self.ranks[row] + added[row])
        first = 0.0 if self.exchanged else self._latencies()
        return total + first + self.constant() + loads.route + 2 * loads.combine

    def burden(self) -> np.ndarray:
        """[ranks] seconds that each rank bears as owner: who has the least takes pieces."""
        return self.ranks[SERVE] + self.ranks[UPDATE] + self._out * self.ranks[[KEYS, ANSWERS, GRADIENTS]].sum(axis=0)

    def room(self, memory: np.ndarray) -> np.ndarray:
        """[ranks] bytes left."""
        return memory - self.ranks[MEMORY]


def _lowest_of_others(values: np.ndarray) -> tuple[tuple[float, float], tuple[int, int]]:
    """The two lowest values, and where they are; of one value the other is infinite."""
    if len(values) == 1:
        return (float(values[0]), np.inf), (0, 0)
    order = np.argsort(values, kind="stable")[:2]
    return (float(values[order[0]]), float(values[order[1]])), (int(order[0]), int(order[1]))


def _highest_of_others(values: np.ndarray) -> np.ndarray:
    """[ranks] the highest value of all other ranks."""
    (low, second), (where, _) = _lowest_of_others(-values)
    found = np.full(len(values), -low)
    found[where] = -second
    return found
