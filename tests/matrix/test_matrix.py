"""The matrix on one worker; tests/multiprocess/checks_matrix.py has it on several."""

import itertools

import pytest

from tests.matrix.cells import chosen, chosen_for_workers, covering, product
from tests.matrix.kinds import ANYWHERE, KINDS, MAKERS, ON_EACH, ON_SEVERAL, ON_SOME, OVER_A_FILE, WITH_POLICIES, Kind
from tests.matrix.operations import OPERATIONS, Operation
from tests.matrix.refusals import REFUSALS, refusal_of
from tests.matrix.rules import RULES
from tests.messages import saying
from tests.multiprocess import checks_matrix
from tests.multiprocess.conftest import MODULES
from tests.multiprocess.worker import checks_of

PLACEMENT, OPERATION, MAKER, KEYS, RULE = range(5)  # of `Cell.factors`


@pytest.mark.parametrize("cell", chosen(), ids=str)
def test_cell(cell, tmp_path):
    cell.run(tmp_path)


def met(cells, *places):
    """The combinations of these factors that some cell has."""
    return {tuple(cell.factors[place] for place in places) for cell in cells}


def test_what_is_chosen_holds_all_pairs_and_all_triples_with_the_placement():
    every, some = product(), covering(product())
    pairs = list(itertools.combinations(range(5), 2))
    triples = [(PLACEMENT, *pair) for pair in pairs if PLACEMENT not in pair]
    assert len(pairs) == 10 and len(triples) == 6
    for places in pairs + triples:
        assert met(some, *places) == met(every, *places)
    # And `every` has what the lists hold.
    kinds = [kind for kind in KINDS if refusal_of(kind) is None]
    assert len(met(some, PLACEMENT, MAKER, KEYS)) == len(kinds)
    assert len(met(some, OPERATION, RULE)) == sum(len(RULES) if op.trains else 1 for op in OPERATIONS)
    by_operation = [{(kind.placement, kind.maker) for kind in kinds if op.applies(kind)} for op in OPERATIONS]
    assert len(met(some, PLACEMENT, OPERATION, MAKER)) == sum(map(len, by_operation))
    assert len(some) < len(every) / 4


def test_whoever_makes_tables_places_them_anywhere():
    kinds = {(kind.maker, kind.placement) for kind in KINDS if refusal_of(kind) is None}
    by_mode = {("Variable", "by hash"), ("Variable of an array", "by hash")}  # which `mode` cannot say
    elsewhere = {(ON_SOME, "upper workers"), *((ON_SEVERAL, placement) for placement in ON_EACH)}
    elsewhere |= {(WITH_POLICIES, "by key"), (OVER_A_FILE, "by key")}  # tests/multiprocess/checks_*.py have the others
    makers = set(MAKERS) - {ON_SOME, ON_SEVERAL, WITH_POLICIES, OVER_A_FILE}
    assert kinds == set(itertools.product(makers, ANYWHERE)) - by_mode | elsewhere


def test_two_workers_do_every_operation_with_every_value_of_each_factor():
    assert checks_matrix.__name__ in MODULES[2]
    assert list(checks_of(checks_matrix)) == [f"check_matrix_{operation.name}" for operation in OPERATIONS]
    for place in (PLACEMENT, MAKER, KEYS, RULE):
        assert met(chosen_for_workers(), OPERATION, place) == met(product(), OPERATION, place)


def test_a_new_operation_kind_or_rule_joins_by_its_line():
    operation, kind = Operation(test_a_new_operation_kind_or_rule_joins_by_its_line), Kind("new", "int64", "by key")
    cells = covering(product([*OPERATIONS, operation], [*KINDS, kind], [*RULES, "new rule"]))
    done = met(cells, PLACEMENT, OPERATION, MAKER)
    for placement, maker in met(product(), PLACEMENT, MAKER):  # the new operation meets what the old ones do, ...
        assert (placement, operation.name, maker) in done
    for old in OPERATIONS:  # ... and each old one the new kind and the new rule
        assert not old.applies(kind) or ("by key", old.name, "new") in done
    trained = {(old.name, "new rule") for old in [*OPERATIONS, operation] if old.trains}
    assert {pair for pair in met(cells, OPERATION, RULE) if pair[1] == "new rule"} == trained


def test_each_refusal_is_of_some_kind():
    for refusal in REFUSALS:
        assert any(refusal.of(kind) for kind in KINDS), refusal.why


@pytest.mark.parametrize("kind", [kind for kind in KINDS if refusal_of(kind)], ids=str)
def test_what_cannot_be_made_is_refused_with_words(kind):
    refusal = refusal_of(kind)
    with pytest.raises(refusal.error, match=saying(*refusal.words)):
        kind.make("refused")
