"""`sok.compat.feature_column` under its public name."""

import importlib
import sys

sys.modules[__name__] = importlib.import_module("sok.compat.feature_column")
