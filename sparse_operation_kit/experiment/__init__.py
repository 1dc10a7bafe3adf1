"""What SOK 1.1.4 offered of version 2: `from sparse_operation_kit import experiment as sok`."""

from sok import (
    SGD,
    DistributedVariable,
    DynamicVariable,
    LocalizedVariable,
    OptimizerWrapper,
    Variable,
    all2all_dense_embedding,
    assign,
    dump,
    export,
    filter_variables,
    init,
    load,
    set_comm_tool,
)
from sparse_operation_kit.experiment import (
    communication,
    distributed_variable,
    dump_load,
    dynamic_variable,
    optimizer,
)
from sparse_operation_kit.experiment.lookup import lookup_sparse

__all__ = [
    "SGD",
    "DistributedVariable",
    "DynamicVariable",
    "LocalizedVariable",
    "OptimizerWrapper",
    "Variable",
    "all2all_dense_embedding",
    "assign",
    "communication",
    "distributed_variable",
    "dump",
    "dump_load",
    "dynamic_variable",
    "export",
    "filter_variables",
    "init",
    "load",
    "lookup_sparse",
    "optimizer",
    "set_comm_tool",
]
