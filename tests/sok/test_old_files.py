"""What commit 3b85c57 has written, read by one worker; tests/multiprocess/checks_old_files.py has several read it."""

import pytest

import sok
from tests.old_files import reading


@pytest.fixture(scope="module", params=reading.WRITERS, ids="written by {}".format)
def files(request, tmp_path_factory) -> reading.Files:
    sok.Init()
    return reading.unpack(request.param, tmp_path_factory.mktemp("old"))


@pytest.mark.parametrize("read", [*reading.READERS, *reading.ALONE], ids=lambda read: read.__name__)
def test_todays_code_reads_it(files, read):
    read(files)
