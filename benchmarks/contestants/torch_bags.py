"""Stock PyTorch: EmbeddingBag. It has no hash table, so it takes part where ids are row numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks import workloads
from benchmarks.contestant import Prepared, Unsupported

LEARNING_RATE = 0.01


def version() -> str:
    return f"PyTorch {torch.__version__}"


def set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)


def prepare(job: dict[str, Any]) -> Prepared:
    set_threads(job["threads"])
    if job["kind"] == "w1" or job.get("hashed"):
        raise Unsupported("PyTorch has no hash table")
    return {"w2": _w2, "w3": _w3, "w4": _w4}[job["kind"]](job)


def bags_of(job: dict[str, Any], distribution: str, number: int) -> workloads.Bags:
    return workloads.make_bags(
        tables=job["tables"],
        rows=job["rows"],
        batch=job["batch"],
        hotness=job["hotness"],
        distribution=distribution,
        number=number,
    )


def _row_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "adagrad":
        return torch.optim.Adagrad(parameters, lr=LEARNING_RATE)
    if name == "lazyadam":
        return torch.optim.SparseAdam(parameters, lr=LEARNING_RATE)
    raise Unsupported(f"PyTorch has no exact {name} for sparse gradients (SparseAdam is lazy)")


def _w2(job: dict[str, Any]) -> Prepared:
    options = {"mode": job["combiner"], "sparse": True, "include_last_offset": True}
    name = job.get("optimizer")
    prepared = Prepared()
    if name is None:
        # All tables in one: the fastest forward of PyTorch.
        bag = torch.nn.EmbeddingBag(job["rows"] * job["tables"], job["dim"], **options)
        prepared.about = "one stacked EmbeddingBag"
        for distribution in job.get("distributions", workloads.DISTRIBUTIONS):
            batches = [bags_of(job, distribution, i).stacked(job["rows"]) for i in range(workloads.W2_BATCHES)]
            batches = [(torch.from_numpy(ids), torch.from_numpy(offsets)) for ids, offsets in batches]

            @torch.no_grad()
            def forward(i: int, b: Any = batches) -> torch.Tensor:
                return bag(*b[i % len(b)])

            prepared[distribution] = forward
        return prepared

    bags = [torch.nn.EmbeddingBag(job["rows"], job["dim"], **options) for _ in range(job["tables"])]
    rule = _row_optimizer(name, [bag.weight for bag in bags])
    upstream = 1e-3 * torch.randn(job["batch"], job["tables"] * job["dim"])
    prepared.about = f"{len(bags)} EmbeddingBags(sparse) + {type(rule).__name__}"
    for distribution in job.get("distributions", workloads.DISTRIBUTIONS):
        batches = separate_batches(job, distribution)

        def train(i: int, b: Any = batches) -> None:
            rule.zero_grad(set_to_none=True)
            torch.cat([bag(*one) for bag, one in zip(bags, b[i % len(b)], strict=True)], 1).backward(upstream)
            rule.step()

        prepared[distribution] = train
    return prepared


def separate_batches(job: dict[str, Any], distribution: str) -> list[Any]:
    batches = []
    for i in range(workloads.W2_BATCHES):
        bags = bags_of(job, distribution, i)
        tables = [bags.table(t) for t in range(bags.num_tables)]
        batches.append([(torch.from_numpy(ids), torch.from_numpy(splits)) for ids, splits in tables])
    return batches


def _w3(job: dict[str, Any]) -> Prepared:
    keys = [torch.from_numpy(batch.copy()) for batch in workloads.load("w3_keys")]
    rows = torch.from_numpy(workloads.load("w3_grads")[:])

    def unique(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.unique(keys[i % len(keys)], sorted=False, return_inverse=True)

    def unique_and_sum(i: int) -> torch.Tensor:
        distinct, inverse = unique(i)
        return torch.zeros(distinct.numel(), rows.shape[1]).index_add_(0, inverse, rows)

    prepared = Prepared("torch.unique, index_add_")
    prepared["unique"] = unique
    prepared["sum"] = unique_and_sum
    return prepared


class Dlrm(torch.nn.Module):
    """The dense part of W4, as in benchmarks.contestants.tensors."""

    def __init__(self, tables: int, dim: int) -> None:
        super().__init__()
        vectors = tables + 1
        layer, relu = torch.nn.Linear, torch.nn.ReLU
        self.bottom = torch.nn.Sequential(layer(workloads.W4_DENSE, 64), relu(), layer(64, dim), relu())
        self.top = torch.nn.Sequential(layer(dim + vectors * (vectors - 1) // 2, 64), relu(), layer(64, 1))
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1))

    def forward(self, dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        hidden = self.bottom(dense)
        stacked = torch.cat([hidden[:, None], embeddings], 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([hidden, products], 1))


def click_step(
    job: dict[str, Any], embed: Callable[[Any], torch.Tensor], row_rule: torch.optim.Optimizer | None
) -> Callable[[tuple[torch.Tensor, torch.Tensor], Any], None]:
    """A whole step of W4: embed(batch) gives [B, T, D]; row_rule trains the tables, unless their backward does."""
    model = Dlrm(job["tables"], job["dim"])
    makers = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam, "lazyadam": torch.optim.Adam}
    rules = [makers[job["optimizer"]](model.parameters(), lr=LEARNING_RATE), *([row_rule] if row_rule else [])]

    def step(click: tuple[torch.Tensor, torch.Tensor], batch: Any) -> None:
        for rule in rules:
            rule.zero_grad(set_to_none=True)
        logits = model(click[0], embed(batch))
        torch.nn.functional.binary_cross_entropy_with_logits(logits, click[1]).backward()
        for rule in rules:
            rule.step()

    return step


def clicks(job: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    batches = [workloads.click_batch(i, job["batch"]) for i in range(workloads.W2_BATCHES)]
    return [(torch.from_numpy(dense), torch.from_numpy(labels)) for dense, labels in batches]


def _w4(job: dict[str, Any]) -> Prepared:
    bags = torch.nn.ModuleList(
        torch.nn.EmbeddingBag(job["rows"], job["dim"], mode="sum", sparse=True, include_last_offset=True)
        for _ in range(job["tables"])
    )
    rule = _row_optimizer(job["optimizer"], list(bags.parameters()))
    step = click_step(job, lambda b: torch.stack([bag(*one) for bag, one in zip(bags, b, strict=True)], 1), rule)
    made = clicks(job)
    prepared = Prepared(f"{len(bags)} EmbeddingBags(sparse) + {type(rule).__name__}")
    for distribution in job.get("distributions", workloads.DISTRIBUTIONS):
        batches = separate_batches(job, distribution)
        prepared[distribution] = lambda i, b=batches: step(made[i % len(made)], b[i % len(b)])
    return prepared
