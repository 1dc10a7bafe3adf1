"""The matrix on one worker; tests/multiprocess/checks_matrix.py has it on several."""

import pytest

from tests.matrix.cells import chosen, covering, product
from tests.matrix.kinds import KINDS
from tests.matrix.refusals import REFUSALS, refusal_of
from tests.messages import saying


@pytest.mark.parametrize("cell", chosen(), ids=str)
def test_cell(cell, tmp_path):
    cell.run(tmp_path)


def test_what_is_chosen_holds_all_pairs_and_is_a_small_part():
    cells = product()
    some = covering(cells)
    assert set().union(*(c.combinations for c in some)) == set().union(*(c.combinations for c in cells))
    assert len(some) < len(cells) / 4


def test_each_refusal_is_of_some_kind():
    for refusal in REFUSALS:
        assert any(refusal.of(kind) for kind in KINDS), refusal.why


@pytest.mark.parametrize("kind", [kind for kind in KINDS if refusal_of(kind)], ids=str)
def test_what_cannot_be_made_is_refused_with_words(kind):
    refusal = refusal_of(kind)
    with pytest.raises(refusal.error, match=saying(*refusal.words)):
        kind.make("refused")
