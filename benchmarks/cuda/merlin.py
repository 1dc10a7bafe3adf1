"""The embedding part of a step of Merlin's synthetic models: lookup of all features, gradients per row, Adagrad."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import sok.cuda
from benchmarks import synthetic
from benchmarks.cuda.measure import Case, Device

BATCH = 65536
GOALS = {"tiny": "1.5 ms", "small": "6 ms"}
HYPER = [synthetic.LEARNING_RATES["adagrad"], 0.1, 1e-7]


def cases(device: Device) -> Iterator[Case]:
    for name in ("tiny",) if device.emulate else ("tiny", "small"):
        yield from identity(device, name)


class Step:
    """Identity tables, as Merlin's: the id is the row. Records are [weights | accumulator]."""

    def __init__(self, device: Device, model: synthetic.Model, batch: int, largest_table: int):
        self.device = device
        rows = [min(table.rows, largest_table) for table in model.tables]
        self.widths = [table.width for table in model.tables]
        self.records = [
            sok.cuda.Records(device.xp.full((r, 2 * w), 0.1, np.float32), w)
            for r, w in zip(rows, self.widths, strict=True)
        ]
        self.features = model.features()
        rng = np.random.default_rng(4)
        self.ids = [
            device.put(synthetic.power_law(rng, rows[f.table], batch * f.hotness, model.exponent))
            for f in self.features
        ]
        grad = rng.standard_normal((batch, sum(f.width for f in self.features)), np.float32)
        ends = np.cumsum([f.width for f in self.features])
        self.grads = [
            device.put(np.ascontiguousarray(grad[:, e - f.width : e])) for e, f in zip(ends, self.features, strict=True)
        ]
        self.batch = batch
        self.calls = 0

    def distinct_rows(self) -> dict[int, int]:
        """For each width, how many distinct rows its tables are asked for in a batch."""
        of_table: dict[int, list[np.ndarray]] = {}
        for f, ids in zip(self.features, self.ids, strict=True):
            of_table.setdefault(f.table, []).append(self.device.xp.asarray(ids))
        counts: dict[int, int] = {}
        for table, ids in of_table.items():
            found = int(self.device.xp.unique(self.device.xp.concatenate(ids)).size)
            counts[self.widths[table]] = counts.get(self.widths[table], 0) + found
        return counts

    def lookup(self) -> Any:
        return sok.cuda.combine_group(
            [
                sok.cuda.Feature(self.records[f.table].values, ids, hotness=f.hotness, dim=f.width)
                for f, ids in zip(self.features, self.ids, strict=True)
            ]
        )

    def backward_and_update(self) -> None:
        self.calls += 1
        for width in sorted(set(self.widths)):  # the tables of one width share a sort, the sums and an update
            tables = [t for t, w in enumerate(self.widths) if w == width]
            addends = [
                sok.cuda.Addends(ids, grad, tables.index(f.table), hotness=f.hotness)
                for f, ids, grad in zip(self.features, self.ids, self.grads, strict=True)
                if f.width == width
            ]
            sums = sok.cuda.sum_rows(addends, [len(self.records[t].values) for t in tables])
            sok.cuda.update_rows(
                "adagrad",
                HYPER,
                [self.records[t] for t in tables],
                sums.row_ids,
                sums.sums,
                table_of=sums.tables,
                num_grads=sums.num_sums,
                step=self.calls,
            )

    def run(self) -> None:
        self.lookup()
        self.backward_and_update()


def identity(device: Device, name: str) -> Iterator[Case]:
    model = synthetic.load(name)
    batch, largest = (32, 500) if device.emulate else (BATCH, 1 << 62)
    step = Step(device, model, batch, largest)
    ids = sum(batch * f.hotness for f in step.features)
    outputs = sum(batch * f.width for f in step.features)
    distinct = step.distinct_rows()
    # A row that is asked for twice in a batch may stay in a cache: forward reads each distinct one once.
    forward = 8 * ids + sum(4 * width * n for width, n in distinct.items()) + 4 * outputs
    backward = 8 * ids + 4 * outputs + sum(4 * 4 * width * n for width, n in distinct.items())
    label = f"Merlin {name}, batch {batch:,}, identity"
    yield Case(f"{label}: lookup", ids, "ids", forward, "ids, distinct rows, outputs", step.lookup)
    yield Case(
        f"{label}: backward and Adagrad",
        ids,
        "ids",
        backward,
        "ids, gradients, distinct records read and written",
        step.backward_and_update,
    )
    yield Case(f"{label}: whole step", ids, "ids", forward + backward, "both", step.run, {}, GOALS[name])
