"""Every check passes on every rank of jobs of different sizes."""

import importlib

import pytest

from tests.multiprocess.conftest import MODULES
from tests.multiprocess.worker import checks_of

pytestmark = pytest.mark.multiprocess

CHECKS = [name for module in MODULES for name in checks_of(importlib.import_module(module))]


def test_no_two_checks_have_one_name():
    assert len(set(CHECKS)) == len(CHECKS)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("check", CHECKS)
def test_check_passes_on_all_ranks(job, ranks, check):
    job(ranks).values(check)
