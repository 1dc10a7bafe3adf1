"""Where SOK had its names: a table of modules, and the finder that makes them when they are imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

PACKAGE = "sparse_operation_kit"

# Modules of ours under a second name, theirs and their submodules': not copies, so that classes are the same.
ALIASES = {
    "communication": "sok.job.communication",
    "dump_load": "sok.compat.formats.dump_load",
    "experiment.communication": "sok.job.communication",
    "experiment.dump_load": "sok.compat.formats.dump_load",
    "experiment.optimizer": "sok.compat.v2.optimizer",
    "lookup": "sok.lookup",
    "optimizer": "sok.compat.v2.optimizer",
    "optimizers": "sok.optimizers",
    "tf": "sok.tf",
}

# Modules of SOK 1.1 to 2.1 in which `sok`'s names of the second column lie.
NAMES = {
    "core": (),
    "core.context_scope": ("OptimizerScope",),
    "core.embedding_variable": ("EmbeddingVariable",),
    "core.initialize": ("Init",),
    "distributed_variable": ("DistributedVariable", "LocalizedVariable", "Variable"),
    "dynamic_variable": ("DynamicVariable", "assign", "export"),
    "embeddings.all2all_dense_embedding": ("All2AllDenseEmbedding",),
    "embeddings.distributed_embedding": ("DistributedEmbedding",),
    "embeddings.get_embedding_op": ("get_embedding",),
    "experiment.distributed_variable": ("DistributedVariable", "LocalizedVariable", "Variable"),
    "experiment.dynamic_variable": ("DynamicVariable", "assign", "export"),
    "saver": (),
    "saver.Saver": ("Saver",),
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the tables above. It has to come before the finder of files, which would copy modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_known = _alias_of(fullname) or fullname.removeprefix(f"{PACKAGE}.") in NAMES
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_known else None

    def exec_module(self, module: ModuleType) -> None:
        ours = _alias_of(module.__name__)
        if ours is not None:
            # The import system takes from here what it gives to the caller.
            sys.modules[module.__name__] = importlib.import_module(ours)
            return
        sok = importlib.import_module("sok")
        names = NAMES[module.__name__.removeprefix(f"{PACKAGE}.")]
        vars(module).update({name: getattr(sok, name) for name in names}, __all__=list(names))


def _alias_of(fullname: str) -> str | None:
    """The module of ours that has this name too."""
    parts = fullname.split(".")
    for length in range(len(parts), 1, -1):
        ours = ALIASES.get(".".join(parts[1:length])) if parts[0] == PACKAGE else None
        if ours is not None:
            return ".".join([ours, *parts[length:]])
    return None
