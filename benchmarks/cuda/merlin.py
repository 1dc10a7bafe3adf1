"""The embedding part of a step of Merlin's synthetic models: lookup of all features, gradients per row, Adagrad."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import sok.cuda
from benchmarks import synthetic
from benchmarks.cuda.measure import Case, Device

BATCH = 65536
HYPER = [synthetic.LEARNING_RATES["adagrad"], 0.1, 1e-7]
IDENTITY_GOALS = {"tiny": "1.5 ms", "small": "6 ms"}
HASHED_GOALS = {"tiny": "3.5 ms", "small": "15 ms"}


def cases(device: Device) -> Iterator[Case]:
    for name in ("tiny",) if device.emulate else ("tiny", "small"):
        batch = Batch(device, synthetic.load(name))
        device.release()
        yield from step_cases(f"Merlin {name}, identity", batch, Identity(batch), IDENTITY_GOALS[name])
        device.release()  # CuPy keeps what the identity tables took, and tables of `sok` cannot have it
        yield from step_cases(f"Merlin {name}, hashed", batch, Hashed(batch), HASHED_GOALS[name])


class Batch:
    """Ids of each feature, and the gradients of its output."""

    def __init__(self, device: Device, model: synthetic.Model):
        self.device = device
        self.size, largest = (16, 100) if device.emulate else (BATCH, 1 << 62)
        self.rows = [min(table.rows, largest) for table in model.tables]
        self.widths = [table.width for table in model.tables]
        self.features = model.features()
        rng = np.random.default_rng(4)
        self.ids, self.grads = [], []
        for f in self.features:
            ids = synthetic.power_law(rng, self.rows[f.table], self.size * f.hotness, model.exponent)
            self.ids.append(device.put(ids))
            self.grads.append(device.put(rng.standard_normal((self.size, f.width), np.float32)))

    def distinct_rows(self) -> dict[int, int]:
        """For each width, how many distinct rows its tables are asked for."""
        xp = self.device.xp
        counts: dict[int, int] = {}
        for table, width in enumerate(self.widths):
            found = xp.unique(xp.concatenate([ids for ids, _, _ in self.of_table(table)]))
            counts[width] = counts.get(width, 0) + int(found.size)
        return counts

    def of_table(self, table: int) -> list[tuple[Any, Any, int]]:
        """Ids, gradients and hotness of the table's features."""
        everything = zip(self.features, self.ids, self.grads, strict=True)
        return [(ids, grads, f.hotness) for f, ids, grads in everything if f.table == table]


class Identity:
    """Identity tables, as Merlin's are: the id is the row. Records are [weights | accumulator]."""

    def __init__(self, batch: Batch):
        self.batch = batch
        xp = batch.device.xp
        sizes = zip(batch.rows, batch.widths, strict=True)
        self.records = [sok.cuda.Records(xp.full((rows, 2 * w), 0.1, np.float32), w) for rows, w in sizes]

    def lookup(self) -> None:
        features = zip(self.batch.features, self.batch.ids, strict=True)
        sok.cuda.combine_group(
            [sok.cuda.Feature(self.records[f.table].values, ids, hotness=f.hotness, dim=f.width) for f, ids in features]
        )

    def backward_and_update(self) -> None:
        widths = self.batch.widths
        for width in sorted(set(widths)):  # the tables of one width share a sort, the sums and an update
            tables = [t for t, w in enumerate(widths) if w == width]
            addends = [
                sok.cuda.Addends(ids, grad, number, hotness=hotness)
                for number, table in enumerate(tables)
                for ids, grad, hotness in self.batch.of_table(table)
            ]
            sums = sok.cuda.sum_rows(addends, [self.batch.rows[t] for t in tables])
            sok.cuda.update_rows(
                "adagrad",
                HYPER,
                [self.records[t] for t in tables],
                sums.row_ids,
                sums.sums,
                table_of=sums.tables,
                num_grads=sums.num_sums,
            )


class Hashed:
    """Hashed tables: ids are keys, found or inserted first. What is not there yet the first call inserts."""

    def __init__(self, batch: Batch):
        self.batch = batch
        self.row_ids: list[Any] = []
        tables = []
        for number, (rows, width) in enumerate(zip(batch.rows, batch.widths, strict=True)):
            asked = sum(len(ids) for ids, _, _ in batch.of_table(number))
            tables.append(sok.cuda.Table(f"table {number}", dim=width, capacity=min(rows, asked)))
        self.group = sok.cuda.TableGroup(tables)

    def lookup(self) -> None:
        features = self.batch.features
        self.row_ids = self.group.find_or_insert(self.batch.ids, [f.table for f in features])
        with self.group.reading() as readings:
            sok.cuda.combine_group(
                [
                    sok.cuda.Feature(readings[f.table], row_ids, hotness=f.hotness, dim=f.width)
                    for f, row_ids in zip(features, self.row_ids, strict=True)
                ]
            )

    def backward_and_update(self) -> None:
        each = zip(self.batch.features, self.row_ids, self.batch.grads, strict=True)
        sums = self.group.sum_rows(
            [sok.cuda.Addends(row_ids, grad, f.table, hotness=f.hotness) for f, row_ids, grad in each]
        )
        self.group.apply("adagrad", HYPER, sums)


def step_cases(label: str, batch: Batch, step: Identity | Hashed, goal: str) -> Iterator[Case]:
    ids = sum(len(x) for x in batch.ids)
    outputs = 4 * sum(batch.size * f.width for f in batch.features)
    distinct = batch.distinct_rows()
    # A row that is asked for twice in a batch may stay in a cache: each distinct one is read once.
    rows = sum(4 * width * count for width, count in distinct.items())
    forward, backward = 8 * ids + rows + outputs, 8 * ids + outputs + 4 * rows
    step.lookup()

    def whole() -> None:
        step.lookup()
        step.backward_and_update()

    label = f"{label}, batch {batch.size:,}"
    yield Case(f"{label}: lookup", ids, "ids", forward, "ids, distinct rows, outputs", step.lookup)
    text = "ids, gradients, distinct records read and written"
    yield Case(f"{label}: backward and Adagrad", ids, "ids", backward, text, step.backward_and_update)
    yield Case(f"{label}: whole step", ids, "ids", forward + backward, "both", whole, {}, goal)
