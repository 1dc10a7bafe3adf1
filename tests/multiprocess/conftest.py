"""One job for each number of ranks, started when a test first asks for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.multiprocess.harness import Job, run_checks

# Two ranks take ten minutes on two cores with other tests beside. Each check has a deadline of its own (worker.py);
# this one is for what they do not see.
DEADLINE = 2400.0

# What runs on how many ranks: everything on 2; beyond, what could depend on their number; on 1 what has a case of its
# own there: one worker has nobody to join, and tests/sok trains its converted models beside stock Keras.
_ALL = (
    *(
        "job",
        "transport",
        "distributed",
        "replicas",
        "lookup",
        "group",
        "exchange_dtype",
        "columns",
        "collection",
        "copies",
        "loops",
        "fit",
        "convert",
        "joining",
        "openembedding",
        "callbacks",
        "policies",
    ),
    *("metrics", "optimizers", "export", "checkpoint", "savers", "v2", "exchanged"),
)
_OF_SEVERAL = ("convert", "joining", "openembedding")
_OF_RANKS = {
    1: tuple(name for name in _ALL if name not in _OF_SEVERAL),
    2: (
        *_ALL,
        "calls",
        "refusals",
        "profile",
        "formats",
        "old_files",
        "matrix",
        "measuring",
        "words",
        "ahead",
        "rows_ahead",
        "staged",
        "storage",
        "reshard",
        "elastic",
        "publishing",
    ),
    3: (
        "job",
        "calls",
        "refusals",
        "lookup",
        "group",
        "exchange_dtype",
        "copies",
        "loops",
        "fit",
        "joining",
        "metrics",
        "checkpoint",
        "v2",
        "policies",
        "exchanged",
        "elastic",
        "ahead_of_three",
    ),
    4: ("job", "lookup", "loops", "collection", "copies", "policies"),
}
MODULES = {ranks: [f"tests.multiprocess.checks_{name}" for name in names] for ranks, names in _OF_RANKS.items()}


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Job]:
    """Gives the job in which that many ranks ran all checks."""
    done: dict[int, Job] = {}

    def get(ranks: int) -> Job:
        if ranks not in done:
            done[ranks] = run_checks(MODULES[ranks], ranks, tmp_path_factory.mktemp(f"ranks{ranks}"), DEADLINE)
        return done[ranks]

    return get
