"""One job for each number of ranks, started when a test first asks for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.multiprocess.harness import Job, run_checks

# A minute is usual on two idle cores.
DEADLINE = 300.0

MODULES = [
    f"tests.multiprocess.{name}"
    for name in ("checks_job", "checks_transport", "checks_distributed", "checks_lookup", "checks_training")
]


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Job]:
    """Gives the job in which that many ranks ran all checks."""
    done: dict[int, Job] = {}

    def get(ranks: int) -> Job:
        if ranks not in done:
            done[ranks] = run_checks(MODULES, ranks, tmp_path_factory.mktemp(f"ranks{ranks}"), DEADLINE)
        return done[ranks]

    return get
