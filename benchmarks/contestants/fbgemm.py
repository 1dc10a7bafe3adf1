"""FBGEMM's CPU build: table-batched embeddings with the optimizer in their backward, and its hash map of keys."""

from __future__ import annotations

from typing import Any

import fbgemm_gpu
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks import workloads
from benchmarks.contestant import Prepared, Unsupported
from benchmarks.contestants import torch_bags


def version() -> str:
    return f"FBGEMM CPU {fbgemm_gpu.__version__}"


def prepare(job: dict[str, Any]) -> Prepared:
    torch_bags.set_threads(job["threads"])
    if job.get("hashed"):
        raise Unsupported("FBGEMM's CPU tables are trained by row number")
    makers = {"w1": _w1, "w2": _w2, "w4": _w4}
    if job["kind"] not in makers:
        raise Unsupported("FBGEMM has no such operation of its own")
    return makers[job["kind"]](job)


def _w1(job: dict[str, Any]) -> Prepared:
    """pruned_hashmap (open addressing) gives the row number, index_select the row."""
    ops = torch.ops.fbgemm
    keys = torch.from_numpy(workloads.load("keys")[:])
    buckets = 1 << 24
    table = torch.full((buckets, 2), -1, dtype=torch.int64)
    table_ends = torch.tensor([0, buckets])
    ops.pruned_hashmap_insert(keys, torch.arange(len(keys)), torch.tensor([0, len(keys)]), table, table_ends)
    room = len(keys) + 2 * workloads.W1_NEW_STEPS * workloads.W1_LOOKUPS // workloads.W1_NEW_SHARE
    rows = torch.rand(room, job["dim"])
    output = torch.empty(workloads.W1_LOOKUPS, job["dim"])
    ends = torch.tensor([0, workloads.W1_LOOKUPS])
    used = len(keys)

    def find(batch: torch.Tensor) -> None:
        torch.index_select(rows, 0, ops.pruned_hashmap_lookup(batch, ends, table, table_ends), out=output)

    def find_or_insert(batch: torch.Tensor) -> None:
        nonlocal used
        numbers = ops.pruned_hashmap_lookup(batch, ends, table, table_ends)
        missing = torch.nonzero(numbers < 0)[:, 0]
        fresh = torch.arange(used, used + len(missing))
        used += len(missing)
        ops.pruned_hashmap_insert(batch[missing], fresh, torch.tensor([0, len(missing)]), table, table_ends)
        rows[used - len(missing) : used].uniform_(-0.05, 0.05)
        numbers[missing] = fresh
        torch.index_select(rows, 0, numbers, out=output)

    prepared = Prepared("pruned_hashmap, index_select")
    for distribution in job.get("distributions", workloads.DISTRIBUTIONS):
        batches = [torch.from_numpy(batch.copy()) for batch in workloads.load(f"w1_{distribution}")]
        new = [torch.from_numpy(batch.copy()) for batch in workloads.load(f"w1_new_{distribution}")]
        prepared[f"find/{distribution}"] = lambda i, b=batches: find(b[i % len(b)])
        prepared[f"insert/{distribution}"] = lambda i, b=new: find_or_insert(b[i])
        prepared.once.add(f"insert/{distribution}")
    return prepared


def _tables(job: dict[str, Any], rule: Any, combiner: str) -> Any:
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(job["rows"], job["dim"], EmbeddingLocation.HOST, ComputeDevice.CPU)] * job["tables"],
        optimizer=rule,
        learning_rate=torch_bags.LEARNING_RATE,
        eps=1e-7,
        pooling_mode=PoolingMode.SUM if combiner == "sum" else PoolingMode.MEAN,
    )
    tables.init_embedding_weights_uniform(-0.05, 0.05)
    return tables


def _rule(name: str) -> Any:
    if name != "adagrad":
        raise Unsupported(f"FBGEMM's CPU build has no {name}")
    return OptimType.EXACT_ADAGRAD


def _batches(job: dict[str, Any], distribution: str) -> list[Any]:
    """ids and offsets of all tables, back to back; ids count from 0 in each."""
    batches = []
    for i in range(workloads.W2_BATCHES):
        bags = torch_bags.bags_of(job, distribution, i)
        _, offsets = bags.stacked(job["rows"])
        batches.append((torch.from_numpy(bags.ids), torch.from_numpy(offsets)))
    return batches


def _w2(job: dict[str, Any]) -> Prepared:
    name = job.get("optimizer")
    tables = _tables(job, _rule(name) if name else OptimType.EXACT_SGD, job["combiner"])
    upstream = 1e-3 * torch.randn(job["batch"], job["tables"] * job["dim"])
    prepared = Prepared("table-batched embeddings" + (", fused exact Adagrad" if name else ""))
    for distribution in job.get("distributions", workloads.DISTRIBUTIONS):
        batches = _batches(job, distribution)

        @torch.no_grad()
        def forward(i: int, b: Any = batches) -> None:
            tables(*b[i % len(b)])

        def train(i: int, b: Any = batches) -> None:
            tables(*b[i % len(b)]).backward(upstream)

        prepared[distribution] = train if name else forward
    return prepared


def _w4(job: dict[str, Any]) -> Prepared:
    tables = _tables(job, _rule(job["optimizer"]), "sum")
    shape = (job["batch"], job["tables"], job["dim"])
    step = torch_bags.click_step(job, lambda batch: tables(*batch).view(shape), None)
    made = torch_bags.clicks(job)
    prepared = Prepared("table-batched embeddings, fused exact Adagrad")
    for distribution in job.get("distributions", workloads.DISTRIBUTIONS):
        batches = _batches(job, distribution)
        prepared[distribution] = lambda i, b=batches: step(made[i % len(made)], b[i % len(b)])
    return prepared
