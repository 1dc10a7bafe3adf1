"""`sok.job.data` under its public name."""

import importlib
import sys
from typing import Any

_module = sys.modules[__name__] = importlib.import_module("sok.job.data")


def __getattr__(name: str) -> Any:
    # For what has imported this file by its path, and so has this module instead.
    return getattr(_module, name)
