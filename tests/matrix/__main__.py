"""`make matrix`: the product, on one worker and then on two; `--part 2/10` is the second tenth of it."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import pytest

_HOUR = 3600.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--workers", type=int, choices=(1, 2), help="only on that many")
    parser.add_argument("--part", default="1/1", help="'2/10': the second tenth of the cells, drawn by chance once")
    arguments = parser.parse_args()
    workers, os.environ["SOK_TEST_MATRIX"] = arguments.workers, arguments.part
    failed = 0
    if workers != 2:
        failed |= int(pytest.main(["-q", "-n", str(os.cpu_count()), str(Path(__file__).parent)]))
    if workers != 1:
        failed |= _on_two_workers()
    return failed


def _on_two_workers() -> int:
    os.environ["SOK_TEST_CHECK_SECONDS"] = str(_HOUR)  # a check runs all cells of its operation
    from tests.multiprocess.harness import run_checks
    from tests.multiprocess.worker import checks_of

    modules = ["tests.multiprocess.checks_job", "tests.multiprocess.checks_matrix"]
    with tempfile.TemporaryDirectory() as folder:
        job = run_checks(modules, 2, Path(folder), _HOUR)
    from tests.multiprocess import checks_matrix

    failures = 0
    for check in checks_of(checks_matrix):
        try:
            print(f"{check}: {job.values(check)[0]} cells passed on 2 workers")
        except AssertionError as error:
            failures += 1
            print(error)
    return failures


if __name__ == "__main__":
    sys.exit(main())
