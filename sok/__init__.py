"""Training and serving models whose embedding tables are the model, in TensorFlow.

    import sok

    sok.Init(global_batch_size=4096)
    layer = sok.DistributedEmbedding("sum", max_vocabulary_size_per_gpu=10_000_000, embedding_vec_size=16,
                                     slot_num=26, max_nnz=1)

Names load on first use: importing `sok` prints nothing, changes no environment variable and needs no GPU. The first one
raises `ImportError` if the native library is missing or built for another TensorFlow, and says how to repair that.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Where each public name lives. A value without a colon is a module.
_PUBLIC = {
    # The job: one call at the start, and who we are in it.
    "Init": "sok.job.context:Init",
    "rank": "sok.job.context:rank",
    "size": "sok.job.context:size",
    "local_rank": "sok.job.context:local_rank",
    "shutdown": "sok.job.context:shutdown",
    "barrier": "sok.job.communication:barrier",
    "data": "sok.job.data",
    "hash_strings": "sok.job.data:hash_strings",
    "enable_distributed_strategy": "sok.compat.strategy:enable_distributed_strategy",
    # Layers and their variables.
    "Embedding": "sok.layers:Embedding",
    "DistributedEmbedding": "sok.layers:DistributedEmbedding",
    "All2AllDenseEmbedding": "sok.layers:All2AllDenseEmbedding",
    "parallel": "sok.keras.parallel",
    "get_embedding": "sok.layers:get_embedding",
    "distributed_model": "sok.keras.conversion:distributed_model",
    "group_embedding_lookup": "sok.lookup.group:group_embedding_lookup",
    "group_embedding_lookup_sparse": "sok.lookup.group:group_embedding_lookup_sparse",
    "ahead": "sok.lookup.ahead:ahead",
    "rows_ahead": "sok.lookup.ahead:rows_ahead",
    "prefetch": "sok.keras.prefetch:prefetch",
    "group_embedding_column_scope": "sok.feature_column:group_embedding_column_scope",
    "feature_column": "sok.compat.feature_column",
    "EmbeddingVariable": "sok.table.table:EmbeddingVariable",
    "TableOptions": "sok.table.options:TableOptions",
    "Admission": "sok.table.policies:Admission",
    "Eviction": "sok.table.policies:Eviction",
    "Storage": "sok.table.storage:Storage",
    "reshard": "sok.table.resharding:reshard",
    "row_wise": "sok.table.placement:row_wise",
    "table_wise": "sok.table.placement:table_wise",
    "table_row_wise": "sok.table.placement:table_row_wise",
    "column_wise": "sok.table.placement:column_wise",
    "data_parallel": "sok.table.placement:data_parallel",
    "balance_tables": "sok.table.balancing:balance_tables",
    "plan": "sok.planning.planner:plan",
    "count_lookups": "sok.planning.counting:count_lookups",
    "split_embedding_variable_from_others": "sok.table.splitting:split_embedding_variable_from_others",
    # Training.
    "optimizers": "sok.optimizers",
    "initializer": "sok.table.own_initializer:initializer",
    "OptimizerScope": "sok.compat.optimizer_scope:OptimizerScope",
    "DistributedGradientTape": "sok.distributed:DistributedGradientTape",
    "DistributedOptimizer": "sok.distributed:DistributedOptimizer",
    "broadcast_variables": "sok.distributed:broadcast_variables",
    "Average": "sok.distributed:Average",
    "Sum": "sok.distributed:Sum",
    "callbacks": "sok.keras.callbacks",
    "metrics": "sok.keras.metrics",
    "hooks": "sok.checkpoint.hooks",
    # Checkpoints.
    "save": "sok.checkpoint:save",
    "restore": "sok.checkpoint:restore",
    "compact": "sok.checkpoint:compact",
    "elastic": "sok.checkpoint.elastic",
    "deltas": "sok.checkpoint:deltas",
    "follow": "sok.checkpoint:follow",
    "Publisher": "sok.checkpoint:Publisher",
    "follow_export": "sok.saved_model:follow_export",
    "erase": "sok.tools.erasing:erase",
    # Files of other systems.
    "Saver": "sok.compat.formats.saver:Saver",
    "dump": "sok.compat.formats.dump_load:dump",
    "load": "sok.compat.formats.dump_load:load",
    "save_npy": "sok.compat.formats.numpy_files:save_npy",
    "load_npy": "sok.compat.formats.numpy_files:load_npy",
    "load_openembedding": "sok.compat.formats.openembedding_load:load_openembedding",
    "CheckpointManager": "sok.checkpoint:CheckpointManager",
    "save_weights": "sok.checkpoint:save_weights",
    "load_weights": "sok.checkpoint:load_weights",
    # The names of SOK v2.
    "init": "sok.compat.v2.start:init",
    "tf_version": "sok.compat.v2.start:tf_version",
    "communication": "sok.job.communication",
    "set_comm_tool": "sok.communication:set_comm_tool",
    "Variable": "sok.compat.v2.variable:Variable",
    "DistributedVariable": "sok.compat.v2.variable:DistributedVariable",
    "LocalizedVariable": "sok.compat.v2.variable:LocalizedVariable",
    "DynamicVariable": "sok.compat.v2.dynamic_variable:DynamicVariable",
    "lookup_sparse": "sok.compat.v2.lookup:lookup_sparse",
    "all2all_dense_embedding": "sok.compat.v2.lookup:all2all_dense_embedding",
    "OptimizerWrapper": "sok.optimizers.wrapper:OptimizerWrapper",
    "SGD": "sok.compat.v2.sgd:SGD",
    "filter_variables": "sok.compat.v2.rows:filter_variables",
    "assign": "sok.compat.v2.rows:assign",
    "export": "sok.compat.v2.rows:export",
    "lookup": "sok.lookup",
    "optimizer": "sok.compat.v2.optimizer",
    "dump_load": "sok.compat.formats.dump_load",
    # On the way to production.
    "export_saved_model": "sok.saved_model:export_saved_model",
    # Looking inside.
    "trace": "sok.base.tracing:trace",
    "collective_counts": "sok.base.tracing:collective_counts",
    "profile": "sok.job.profiling:profile",
    # Drop-ins for TensorFlow's own.
    "tf": "sok.tf",
    "layers": "sok.keras.layers",
    "deeprec": "sok.compat.deeprec",
}

__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    target = _PUBLIC.get(name)
    if target is None:
        raise AttributeError(f"module 'sok' has no attribute {name!r}")
    # Before anything else, so that a newcomer's first line says what is missing. (`sok doctor` imports no public name.)
    importlib.import_module("sok.base._ops").check()
    module_name, _, attribute = target.partition(":")
    module = importlib.import_module(module_name)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
