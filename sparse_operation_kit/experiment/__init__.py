"""What SOK 1.1.4 offered of version 2: `from sparse_operation_kit import experiment as sok`."""

from typing import Any

import sok
from sparse_operation_kit.experiment import distributed_variable, dynamic_variable  # type: ignore[attr-defined]
from sparse_operation_kit.experiment.lookup import lookup_sparse

_NAMES = (
    *("SGD", "DistributedVariable", "DynamicVariable", "LocalizedVariable", "OptimizerWrapper", "Variable"),
    *("all2all_dense_embedding", "assign", "communication", "dump", "dump_load", "export", "filter_variables"),
    *("init", "load", "optimizer", "set_comm_tool"),
)

__all__ = [*_NAMES, "distributed_variable", "dynamic_variable", "lookup_sparse"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'sparse_operation_kit.experiment' has no attribute {name!r}")
    return getattr(sok, name)
