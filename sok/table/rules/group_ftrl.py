"""Ftrl whose rows become zero as a whole."""

import dataclasses

from sok.table.rules.ftrl import FTRL
from sok.table.rules.rule import Hyper

GROUP_FTRL = dataclasses.replace(
    FTRL,
    name="group_ftrl",
    hyper=(*FTRL.hyper, Hyper("l21_regularization_strength")),
    dumped_as="",
    equals=(),
    formerly=(),
    needs_whole_row=True,
)
