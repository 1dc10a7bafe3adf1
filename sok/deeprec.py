"""`sok.compat.deeprec` under its public name."""

import importlib
import sys

sys.modules[__name__] = importlib.import_module("sok.compat.deeprec")
