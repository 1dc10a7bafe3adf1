"""`sok.job.data` under its public name."""

from sok.base.aliases import stand_for

__getattr__ = stand_for(__name__, "sok.job.data")
