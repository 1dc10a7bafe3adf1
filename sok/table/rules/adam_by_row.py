"""Adam and Adamax that count the steps of each row."""

import dataclasses

from sok.table.rules.adam import ADAM
from sok.table.rules.adamax import ADAMAX
from sok.table.rules.rule import RowRule, Slot


def _by_row(rule: RowRule) -> RowRule:
    return dataclasses.replace(
        rule.lazily(),
        name=f"{rule.lazy}_by_row",
        slots=(*rule.slots, Slot("count", scalar=True)),
        counts_steps=False,
        dumped_as="",
        formerly=(),
    )


LAZY_ADAM_BY_ROW, LAZY_ADAMAX_BY_ROW = _by_row(ADAM), _by_row(ADAMAX)
