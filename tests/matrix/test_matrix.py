"""The matrix on one worker; tests/multiprocess/checks_matrix.py has it on several."""

import pytest

from tests.matrix.cells import chosen, covering, product
from tests.matrix.refusals import REFUSALS


@pytest.mark.parametrize("cell", chosen(), ids=str)
def test_cell(cell, tmp_path):
    cell.run(tmp_path)


def test_what_is_chosen_holds_all_pairs_and_is_a_small_part():
    cells = product()
    some = covering(cells)
    assert set().union(*(c.combinations for c in some)) == set().union(*(c.combinations for c in cells))
    assert len(some) < len(cells) / 4


def test_each_refusal_is_of_some_cell():
    for refusal in REFUSALS:
        assert any(c.operation.name in refusal.operations and refusal.of(c.kind, c.rule) for c in product()), (
            refusal.why
        )
