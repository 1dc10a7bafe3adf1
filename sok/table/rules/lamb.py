"""LAMB, of each row by itself."""

from sok.table.rules.adam import ADAM
from sok.table.rules.rule import Hyper, RowRule

# Not equal to Keras' Lamb, which measures the whole variable.
LAMB = RowRule(
    "lamb", slots=ADAM.slots, hyper=(*ADAM.hyper, Hyper("weight_decay")), counts_steps=True, needs_whole_row=True
)
