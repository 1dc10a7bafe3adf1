"""All that is measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import group_lookup, layer, synthetic, workloads
from benchmarks.job import GIB, Case, Check, Job, ratios

_BEST = Check(against="best peer", at_least=1)


def _w1(dim: int) -> Job:
    # dims beyond 16 want other steps per gigabyte, not other targets
    checks = (*ratios(ref=0.85), _BEST)
    cases = []
    for distribution in workloads.DISTRIBUTIONS:
        quick = dim == 16 and distribution == "zipf"
        cases.append(Case(f"W1 find, {dim} floats, {distribution}", f"find/{distribution}", checks, quick))
    for distribution in workloads.DISTRIBUTIONS:
        name = f"W1 find or insert 10 % new, {dim} floats, {distribution}"
        cases.append(Case(name, f"insert/{distribution}", checks))
    rows = (workloads.W1_KEYS + 2_400_000) * dim * 4 / GIB
    return Job(
        f"w1/{dim}",
        {"kind": "w1", "dim": dim},
        ("sok", "ref", "tf", "fbgemm", "tfra"),
        tuple(cases),
        sizes="10M resident int64 keys, 1M lookups a step",
        gib=rows + 1.5,
        gib_of=(("tfra", 1.6 * rows + 2.0),),
    )


def _bags(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "tables": workloads.W2_TABLES,
        "rows": workloads.W2_ROWS,
        "dim": workloads.W2_DIM,
        "batch": workloads.W2_BATCH,
        "hotness": workloads.W2_HOTNESS,
        "hashed": False,
        **more,
    }


_W2_SIZES = "26 tables x 1M rows x 16 floats, batch 4096, 1..10 ids a feature"


def _w2_forward(combiner: str, hashed: bool) -> Job:
    kind = "hashed" if hashed else "identity"
    if hashed:
        checks = ratios(ref=0.35, **{"tf": 4, "tf-hashed": 4, "tfra": 4})
        contestants: tuple[str, ...] = ("sok", "ref", "tf", "tf-hashed", "tfra")
    else:
        checks = (*ratios(ref=0.8), _BEST)
        contestants = ("sok", "ref", "tf", "torch", "fbgemm")
    cases = tuple(
        Case(
            f"W2 forward, {kind}, {combiner}, {distribution}",
            distribution,
            checks,
            quick=combiner == "sum" and not hashed and distribution == "zipf",
            measure_of=(("ref", f"{combiner}/{distribution}"),),
        )
        for distribution in workloads.DISTRIBUTIONS
    )
    return Job(
        f"w2-forward/{kind}-{combiner}",
        _bags("w2", combiner=combiner, hashed=hashed),
        contestants,
        cases,
        sizes=_W2_SIZES,
        gib=2.7,
        gib_of=(("sok", 4.0), ("tf-hashed", 3.6), ("tfra", 8.0)) if hashed else (),
    )


_TRAIN_CHECKS = {
    ("adagrad", False): ratios(ref=0.75, fbgemm=6, tf=8),
    ("lazyadam", False): ratios(ref=0.75, torch=8),
    ("adam", False): ratios(**{"sok-lazyadam": 0.5, "tf": 30}),
    ("adagrad", True): ratios(ref=0.35, **{"tf": 4, "tf-hashed": 4, "tfra": 4}),
    ("lazyadam", True): ratios(ref=0.35, tfra=4),
}
_TRAIN_CONTESTANTS = {
    ("adagrad", False): ("sok", "ref", "tf", "torch", "fbgemm"),
    ("lazyadam", False): ("sok", "ref", "torch"),
    ("adam", False): ("sok", "sok-lazyadam", "tf"),
    ("adagrad", True): ("sok", "ref", "tf", "tf-hashed", "tfra"),
    ("lazyadam", True): ("sok", "ref", "tfra"),
}


def _w2_train(optimizer: str, hashed: bool) -> Job:
    kind = "hashed" if hashed else "identity"
    cases = []
    for distribution in workloads.DISTRIBUTIONS:
        checks = _TRAIN_CHECKS[optimizer, hashed]
        if optimizer == "adam" and distribution == "uniform":
            # Against LazyAdam exact Adam is judged where keys repeat.
            checks = tuple(check for check in checks if check.against == "tf")
        cases.append(
            Case(
                f"W2 train, {kind}, {optimizer}, {distribution}",
                distribution,
                checks,
                quick=optimizer == "adagrad" and not hashed and distribution == "zipf",
                measure_of=(("ref", f"train/{distribution}"),),
            )
        )
    floats = 2 if optimizer == "adagrad" else 3
    rows = workloads.W2_TABLES * workloads.W2_ROWS * workloads.W2_DIM * 4 / GIB
    return Job(
        f"w2-train/{kind}-{optimizer}",
        _bags("w2", combiner="sum", hashed=hashed, optimizer=optimizer),
        _TRAIN_CONTESTANTS[optimizer, hashed],
        tuple(cases),
        sizes=_W2_SIZES,
        gib=floats * rows + 1.2,
        gib_of=(("sok", floats * rows + 2.0), ("tf-hashed", floats * rows + 2.1), ("tfra", 2.0 * floats * rows + 3.0))
        if hashed
        else (),
    )


def _w3() -> Job:
    checks = ratios(ref=0.85, tf=4)
    cases = (
        Case("W3 unique", "unique", checks, quick=True),
        Case("W3 unique + segment sum, 64 floats", "sum", checks, quick=True),
    )
    return Job("w3", {"kind": "w3"}, ("sok", "ref", "tf", "torch"), cases, sizes="1M int64 keys, Zipf 1.05", gib=1.5)


def _w4(hotness: int, optimizer: str, hashed: bool) -> Job:
    ids = "one-hot" if hotness == 1 else "multi-hot"
    kind = "hashed" if hashed else "identity"
    peers: tuple[str, ...] = ("tfra",) if hashed else ("torch", "fbgemm")
    if optimizer == "adam":
        peers = ()
    checks = (*ratios(tf=2), *(Check(against=peer, at_least=1) for peer in peers))
    case = Case(f"W4 step, {ids}, {kind}, {optimizer}", "zipf", checks, quick=hotness == 1 and not hashed)
    if optimizer == "adam":
        case = dataclasses.replace(case, quick=False)
    return Job(
        f"w4/{ids}-{kind}-{optimizer}",
        _bags("w4", hotness=hotness, optimizer=optimizer, hashed=hashed, distributions=["zipf"]),
        ("sok", "tf", *peers),
        (case,),
        sizes="13 numbers, 26 tables x 1M rows x 16 floats, MLP 64-16 and 64-1, batch 4096"
        + (", 1..10 ids a feature" if hotness > 1 else ""),
        gib=5.0,
        gib_of=(("tfra", 11.0),),
    )


def _synthetic(model: str, batch: int, optimizer: str, under_ms: float, times: float) -> Job:
    floats = {"sgd": 1, "adagrad": 2}[optimizer]
    checks: tuple[Check, ...] = ratios(tf=times) if times else ()
    if under_ms:
        checks = (Check(under_ms=under_ms), *checks)
    description = synthetic.load(model)
    return Job(
        f"synthetic/{model}-{batch}",
        {"kind": "synthetic", "model": model, "batch": batch, "optimizer": optimizer},
        ("sok", "tf"),
        (Case(f"Merlin's {model}, batch {batch:,}, {optimizer}", "step", checks),),
        sizes=f"{len(description.tables)} tables, {description.bytes / GIB:.2f} GiB, {optimizer}",
        gib=floats * description.bytes / GIB + 1.5,
    )


def _merlin(model: str, scale: int, batch: int, workers: int) -> Job:
    """One job trains a copy of the model by each strategy in turn: processes of Horovod that wait keep cores busy."""
    subject = f"sok-{workers}x{2 // workers}"
    description = synthetic.load(model).scaled(scale)
    on = "2 workers x 1 thread" if workers == 2 else "1 worker x 2 threads"
    # On one worker all placements are one. On several sok.plan's is to be no slower than the best by more than 5 %.
    checks = (Check(figure="auto_to_best", at_most=1.05),) if workers > 1 else ()
    return Job(
        f"merlin/{model}-{workers}",
        {"kind": "merlin", "model": model, "scale": scale, "batch": batch, "optimizer": "adagrad"},
        (subject,),
        (Case(f"Merlin's {model} by strategy, {on}, batch {batch:,}", "figures", checks),),
        subject=subject,
        sizes=f"{len(description.tables)} tables, rows / {scale}, {description.bytes / GIB:.2f} GiB, adagrad",
        gib=len(synthetic.STRATEGIES) * 2 * description.bytes / GIB + 1.5 * workers,
    )


def _workers(kind: str, **more: Any) -> Job:
    name = "W2 train" if kind == "w2" else "W4 step, multi-hot"
    case = Case(f"{name}, 2 workers x 1 thread, batch 16,384", "zipf", ratios(**{"sok-1x2": 0.8}))
    return Job(
        f"workers/{kind}",
        _bags(kind, batch=16384, combiner="sum", optimizer="adagrad", hashed=True, distributions=["zipf"], **more),
        ("sok-2x1", "sok-1x2"),
        (case,),
        subject="sok-2x1",
        sizes="global batch 16,384, 26 hashed tables x 1M rows x 16 floats, 1..10 ids a feature, Adagrad",
        gib=6.0,
    )


def _probe(name: str, title: str, checks: tuple[Check, ...], gib: float, quick: bool = False, **more: Any) -> Job:
    """Not a race of steps: one process says figures."""
    return Job(
        name, {"kind": name.partition("/")[0], **more}, ("sok",), (Case(title, "figures", checks, quick),), gib=gib
    )


def _memory(rows: int, dim: int) -> Job:
    checks = (
        # 16 bytes a key, and a quarter of slack over record and index.
        Check(figure="overhead_bytes_per_key", at_most=16 + 0.25 * (4 * dim + 16)),
        Check(figure="longest_step_ms", at_most=50),
    )
    return _probe(
        f"memory/{rows // 10**6}M",
        f"Memory and growth, {rows // 10**6}M rows of {dim} floats",
        checks,
        gib=1.5 + rows * (4 * dim + 16) * 1.25 / GIB,
        quick=rows == 10**6,
        rows=rows,
        dim=dim,
    )


def all_jobs() -> list[Job]:
    """Every job, in the order of docs/performance.md."""
    startup = (Check(figure="import_s", at_most=0.3), Check(figure="tracing_s", at_most=3.0))
    return [
        *(_w1(dim) for dim in (16, 64, 128)),
        *(_w2_forward(combiner, hashed) for hashed in (False, True) for combiner in ("sum", "mean")),
        *(_w2_train(optimizer, False) for optimizer in ("adagrad", "lazyadam", "adam")),
        *(_w2_train(optimizer, True) for optimizer in ("adagrad", "lazyadam")),
        _w3(),
        *(_w4(hotness, "adagrad", hashed) for hashed in (False, True) for hotness in (1, workloads.W2_HOTNESS)),
        _w4(1, "adam", False),
        _synthetic("tiny", 65536, "adagrad", 250, 2.5),
        _synthetic("tiny", 4096, "adagrad", 25, 2),
        _synthetic("criteo", 65536, "sgd", 0, 0),
        _synthetic("criteo", 4096, "sgd", 60, 2),
        *(_merlin(*sizes, workers) for sizes in (("tiny", 16, 4096), ("small", 128, 1024)) for workers in (1, 2)),
        _workers("w2"),
        _workers("w4"),
        *group_lookup.jobs(),
        *layer.jobs(),
        *(_memory(rows, 16) for rows in (10**6, 10**7, 10**8)),
        _probe("startup", "Start-up", startup, gib=3.0, quick=True),
    ]


def _parameters_for(job: Job, cases: Sequence[Case]) -> dict[str, Any]:
    """Those of the job, with the distributions that its cases want: others need not be prepared."""
    named = {word for case in cases for word in case.measure.split("/")}
    wanted = [distribution for distribution in workloads.DISTRIBUTIONS if distribution in named]
    return {**job.parameters, "distributions": wanted} if wanted else job.parameters


def select(jobs: Sequence[Job], only: Sequence[str], quick: bool) -> Iterator[Job]:
    """The jobs with those of their cases that are asked for: `only` holds beginnings of job or case names."""
    for job in jobs:
        cases = []
        for case in job.cases:
            names = (job.name.lower(), case.name.lower())
            is_wanted = any(name.startswith(one.lower()) for name in names for one in only)
            if is_wanted if only else case.quick or not quick:
                cases.append(case)
        if cases:
            yield dataclasses.replace(job, cases=tuple(cases), parameters=_parameters_for(job, cases))
