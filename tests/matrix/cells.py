"""Which cells of the matrix are run: some that hold all pairs, and all triples with the placement; or the product."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.matrix.case import Case
from tests.matrix.kinds import ENVIRONMENT, KINDS, ON_EACH, Kind
from tests.matrix.operations import OPERATIONS, Operation
from tests.matrix.refusals import refusal_of
from tests.matrix.rules import RULES


@dataclasses.dataclass(frozen=True)
class Cell:
    operation: Operation
    kind: Kind
    rule: str

    def __str__(self) -> str:
        return f"{self.operation.name}-{self.kind}-{self.rule.replace(' ', '_')}"

    @property
    def factors(self) -> tuple[str, ...]:
        return self.kind.placement, self.operation.name, self.kind.maker, self.kind.keys, self.rule

    @property
    def combinations(self) -> set[tuple]:
        """Pairs of factors, and triples with the placement."""
        first, *others = enumerate(self.factors)
        pairs = list(itertools.combinations(others, 2))
        return {*pairs, *((first, other) for other in others), *((first, *pair) for pair in pairs)}

    @property
    def pairs(self) -> set[tuple]:
        """Pairs with the operation."""
        placement, operation, *others = enumerate(self.factors)
        return {(operation, other) for other in (placement, *others)}

    def run(self, folder: Path) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            for name, value in ENVIRONMENT.items():
                monkeypatch.setenv(name, value)
            self.operation.run(Case(self.kind, self.rule, folder, f"{self.operation.name}_{_number(self)}"))


def product(
    operations: Iterable[Operation] = OPERATIONS, kinds: Iterable[Kind] = KINDS, rules: Iterable[str] = RULES
) -> list[Cell]:
    return [
        Cell(operation, kind, rule)
        for operation in operations
        for kind in kinds
        if operation.applies(kind) and refusal_of(kind) is None
        for rule in (rules if operation.trains else ["SGD"])
        if kind.placement != "columns" or rule not in _BY_ROW
    ]


def covering(cells: list[Cell], combinations: Callable[[Cell], set] = lambda cell: cell.combinations) -> list[Cell]:
    """Some of the cells, in which all combinations of all of them are. The same ones in every run."""
    bits: dict[tuple, int] = {}  # of each combination
    shuffled = random.Random(0).sample(cells, len(cells))
    left = [(cell, sum(1 << bits.setdefault(one, len(bits)) for one in combinations(cell))) for cell in shuffled]
    missing, chosen = (1 << len(bits)) - 1, set()
    # First those that bring much that is new: each round is content with less.
    for enough in range(len(combinations(cells[0])), 0, -1):
        before, left = left, []
        for cell, its in before:
            new = (its & missing).bit_count()
            if new >= enough:
                missing &= ~its
                chosen.add(cell)
            elif new:  # what brings nothing will never
                left.append((cell, its))
    return [cell for cell in cells if cell in chosen]


def chosen() -> list[Cell]:
    """What one worker is to do. Alone it holds whole rows, once, whoever else would have columns or copies of them."""
    return _part() or covering([cell for cell in product() if cell.kind.placement not in ON_EACH])


def chosen_for_workers() -> list[Cell]:
    """What several workers are to do: each operation with every maker, keys, placement and rule."""
    return _part() or covering(product(), lambda cell: cell.pairs)


def _part() -> list[Cell]:
    """What SOK_TEST_MATRIX asks for: '1/1' is the product, '2/10' the second tenth of it, in any order but the same."""
    asked = os.environ.get("SOK_TEST_MATRIX")
    if not asked:
        return []
    part, parts = map(int, asked.split("/"))
    cells = product()
    part_of_them = set(random.Random(0).sample(cells, len(cells))[part - 1 :: parts])
    return [cell for cell in cells if cell in part_of_them]


_BY_ROW = [name for name, rule in RULES.items() if rule.by_row]
_numbers = {cell: number for number, cell in enumerate(product())}


def _number(cell: Cell) -> int:
    return _numbers[cell]
