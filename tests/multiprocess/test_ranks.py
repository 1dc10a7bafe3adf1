"""Every check passes on every rank of jobs of different sizes."""

import importlib

import pytest

from tests.multiprocess.conftest import MODULES
from tests.multiprocess.worker import checks_of

pytestmark = pytest.mark.multiprocess


def checks_on(ranks):
    return [name for module in MODULES[ranks] for name in checks_of(importlib.import_module(module))]


def test_no_two_checks_have_one_name():
    names = checks_on(1)
    assert names and len(set(names)) == len(names)


@pytest.mark.parametrize("ranks", MODULES)
def test_the_job_ends_by_itself(job, ranks):
    ended = job(ranks)
    assert not ended.timed_out and ended.returncode == 0, ended.output[-3000:]


@pytest.mark.parametrize("ranks, check", [(ranks, check) for ranks in MODULES for check in checks_on(ranks)])
def test_check_passes_on_all_ranks(job, ranks, check):
    job(ranks).values(check)
