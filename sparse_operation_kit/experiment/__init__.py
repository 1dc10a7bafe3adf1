"""What SOK 1.1.4 offered of version 2: `from sparse_operation_kit import experiment as sok`."""

from sok import (
    SGD,
    DynamicVariable,
    OptimizerWrapper,
    Variable,
    all2all_dense_embedding,
    assign,
    export,
    filter_variables,
    init,
    set_comm_tool,
)
from sparse_operation_kit.experiment import communication
from sparse_operation_kit.experiment.lookup import lookup_sparse

__all__ = [
    "SGD",
    "DynamicVariable",
    "OptimizerWrapper",
    "Variable",
    "all2all_dense_embedding",
    "assign",
    "communication",
    "export",
    "filter_variables",
    "init",
    "lookup_sparse",
    "set_comm_tool",
]
