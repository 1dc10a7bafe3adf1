"""Cases of rows: gather, unique with segment sums, fused updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import sok.cuda
from benchmarks.cuda.measure import Case, Device
from benchmarks.synthetic import power_law

HYPER = {"adagrad": [0.01, 0.1, 1e-7], "lazy_adam": [0.001, 0.9, 0.999, 1e-7], "adam": [0.001, 0.9, 0.999, 1e-7]}
NUM_SLOTS = {"adagrad": 1, "lazy_adam": 2, "adam": 2}


def cases(device: Device) -> Iterator[Case]:
    """One after the other, so that the memory of one is free for the next."""
    yield from gathers(device)
    yield from sums(device)
    yield from updates(device)


def gathers(device: Device) -> Iterator[Case]:
    n, table_rows = (300, 1000) if device.emulate else (1 << 20, 1 << 24)
    rng = np.random.default_rng(0)
    for dim in (16, 64, 128, 256):
        rows = device.xp.zeros((table_rows // (1 if dim <= 64 else 4), dim), np.float32)
        index = device.put(rng.integers(0, len(rows), n))
        name = f"gather {n:,} of {len(rows):,} rows of {dim} floats"
        floor = n * (8 + 2 * 4 * dim)

        def gather(rows: Any = rows, index: Any = index) -> None:
            sok.cuda.combine(rows, index)

        def take(rows: Any = rows, index: Any = index) -> None:
            device.xp.take(rows, index, axis=0)

        rivals = {"cupy.take": take} | _torch_gather(device, rows, index)
        yield Case(
            name, n, "rows", floor, "index read, row read and written", gather, rivals, "80 %" if dim >= 64 else ""
        )


def sums(device: Device) -> Iterator[Case]:
    n = 500 if device.emulate else 1_000_000
    dim = 64
    keys = device.put(power_law(np.random.default_rng(1), 100 * n, n, 1.05))
    grads = device.put(np.random.default_rng(2).standard_normal((n, dim), np.float32))
    distinct = int(sok.cuda.unique(keys).keys.size)

    for order in ("first_appearance", "any"):

        def unique(order: str = order) -> None:
            sok.cuda.unique_padded(keys, order=order)

        yield Case(
            f"unique of {n:,} Zipf keys ({distinct:,} distinct), order {order}",
            n,
            "keys",
            n * (8 + 4 + 4) + distinct * 8,
            "keys read; inverse, counts and distinct keys written",
            unique,
            {"cupy.unique": lambda: device.xp.unique(keys, return_inverse=True, return_counts=True)},
        )

    for fixed in (True, False):

        def unique_and_sum(fixed: bool = fixed) -> None:
            found, _ = sok.cuda.unique_padded(keys)
            # With the number of segments known: a training step needs no segment sum that waits (sum_rows has none).
            sok.cuda.unsorted_segment_sum(grads, found.inverse.view(np.int32), distinct, deterministic=fixed)

        def cupy_unique_and_add() -> None:
            found, inverse = device.xp.unique(keys, return_inverse=True)
            total = device.xp.zeros((len(found), dim), np.float32)
            if device.emulate:
                np.add.at(total, inverse, grads)
            else:
                import cupyx

                cupyx.scatter_add(total, inverse, grads)

        yield Case(
            f"unique + segment sum of {n:,} x {dim}, {'repeatable' if fixed else 'atomic'}",
            n,
            "keys",
            n * (8 + 4 + 4 * dim) + distinct * (8 + 4 * dim),
            "keys and gradients read; inverse, distinct keys and sums written",
            unique_and_sum,
            {"cupy": cupy_unique_and_add} | _torch_sum(device, keys, grads),
            "5 x cupy, 3 x torch",
        )


def updates(device: Device) -> Iterator[Case]:
    n, table_rows = (200, 1000) if device.emulate else (1 << 20, 1 << 24)
    dim = 64
    rng = np.random.default_rng(3)
    row_ids = device.put(rng.permutation(table_rows)[:n])
    grads = device.put(rng.standard_normal((n, dim), np.float32))
    for rule, slots in NUM_SLOTS.items():
        decay = sok.cuda.Decay(table_rows) if rule == "adam" else None
        records = sok.cuda.Records(device.xp.zeros((table_rows, dim * (1 + slots)), np.float32), dim, decay)
        step = [0]

        def update(rule: str = rule, records: Any = records, step: list[int] = step) -> None:
            step[0] += 1
            sok.cuda.update_rows(rule, HYPER[rule], [records], row_ids, grads, step=step[0])

        yield Case(
            f"fused {rule} of {n:,} of {table_rows:,} rows of {dim} floats",
            n,
            "rows",
            n * (8 + 4 * dim + 2 * 4 * dim * (1 + slots) + (8 if decay else 0)),
            "row id and gradient read; weights and slots read and written",
            update,
            {},
            "75 %",
        )


def _torch(device: Device) -> Any:
    if device.emulate:
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _torch_gather(device: Device, rows: Any, index: Any) -> dict[str, Callable[[], Any]]:
    torch = _torch(device)
    if torch is None:
        return {}
    table, ids = torch.as_tensor(rows, device="cuda"), torch.as_tensor(index, device="cuda")
    return {"torch": _on_cupys_stream(device, torch, lambda: torch.index_select(table, 0, ids))}


def _torch_sum(device: Device, keys: Any, grads: Any) -> dict[str, Callable[[], Any]]:
    torch = _torch(device)
    if torch is None:
        return {}
    ids, values = torch.as_tensor(keys, device="cuda"), torch.as_tensor(grads, device="cuda")

    def run() -> None:
        found, inverse = torch.unique(ids, return_inverse=True)
        torch.zeros((len(found), values.shape[1]), device="cuda").index_add_(0, inverse, values)

    return {"torch": _on_cupys_stream(device, torch, run)}


def _on_cupys_stream(device: Device, torch: Any, run: Callable[[], Any]) -> Callable[[], Any]:
    """Events are recorded on CuPy's stream: the rival must work there."""

    def wrapped() -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(device.xp.cuda.get_current_stream().ptr)):
            run()

    return wrapped
