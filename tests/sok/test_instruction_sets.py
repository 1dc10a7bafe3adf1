"""The contract suites once more with the instructions of lesser processors (SOK_ISA), in processes of their own."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("isa", ["generic", "avx2"])
def test_suites_pass_with(forked, tmp_path, isa):
    suites = [
        "tests/sok/test_group.py",
        "tests/ops/test_update.py",
        "tests/ops/test_lookup.py",
        "tests/ops/test_unique.py",
    ]
    # Not the property test, whose examples take as long as all the rest.
    options = ["-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-k", "not any_group"]
    options += [str(ROOT / suite) for suite in suites]
    program = f"import pytest, sys; sys.exit(pytest.main({options}))"
    done = forked.run(program, tmp_path, environment={"SOK_ISA": isa}, deadline=600)
    assert done.status == 0, done.stdout[-3000:] + done.stderr[-1000:]
