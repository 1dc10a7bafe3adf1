"""What the optimizer of a compiled model has learned, when some of the model's variables become tables."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from sok.base.types import KerasModel
from sok.distributed import DistributedOptimizer
from sok.job import context
from sok.optimizers import matching_optimizer
from sok.optimizers.matching import is_legacy
from sok.table.table import EmbeddingVariable, is_embedding_variable

# Where Keras 3 and tf_keras keep the slots that the rules call so: lists, with a variable for each of the model's.
_LISTS = {"accumulator": "_accumulators", "m": "_momentums", "v": "_velocities"}


class OptimizerState:
    """The optimizer of a compiled model, from before its layers are converted until after.

    Args:
        model: of Keras 3 or tf_keras.
        variables: of the layers that will be over tables; None of a layer that has none yet.
    """

    def __init__(self, model: KerasModel, variables: Sequence[Any]) -> None:
        self._model, self._stock = model, model.optimizer
        self._lists: list[str] = []
        self._slots: list[list[Any]] = []
        self._lost = ""
        try:
            matched = matching_optimizer(self._stock)
        except ValueError as error:
            self._lost = str(error)
            return
        if is_legacy(self._stock):
            self._lost = "It is one of tf_keras.optimizers.legacy, and has made steps." if self._stock.weights else ""
        elif self._has_steps and matched.rule not in ("sgd", "adagrad", "adam", "adamw"):
            self._lost = f"It has made steps, and slots of rule '{matched.rule}' are not."
        elif self._has_steps:
            self._lists = [_LISTS[name] for name in matched.slot_names]
            self._slots = [self._slots_of(variable) for variable in variables]

    @classmethod
    def of(cls, model: KerasModel, variables: Sequence[Any]) -> OptimizerState | None:
        """That of a model; None if it is not compiled, or with a distributed optimizer."""
        is_compiled = getattr(model, "compiled", getattr(model, "_is_compiled", False))
        if not is_compiled or getattr(model, "optimizer", None) is None or hasattr(model.optimizer, "inner"):
            return None
        return cls(model, variables)

    @property
    def _has_steps(self) -> bool:
        return bool(getattr(self._stock, "built", getattr(self._stock, "_built", False)))

    def _slots_of(self, variable: Any) -> list[Any]:
        """The slots of a variable, as a record has them; none if no step has been made with it."""
        if variable is None:
            return []
        if hasattr(self._stock, "_index_dict"):  # tf_keras
            number = self._stock._index_dict.get(self._stock._var_key(variable))
        else:
            trained = enumerate(self._stock._trainable_variables)
            number = next((i for i, one in trained if one is variable), None)
        return [] if number is None else [getattr(self._stock, name)[number] for name in self._lists]

    def carry_over(self, tables: Sequence[EmbeddingVariable | None]) -> None:
        """Compiles the model anew, with a distributed optimizer that goes on where its own was.

        Args:
            tables: in the order of the variables; None where there was none.

        Collective. Where no optimizer of tables does the same, a warning says that the model is to be compiled.
        """
        config = dict(self._model._compile_config.config)
        if self._lost:
            warnings.warn(
                f"The model is compiled with an optimizer that cannot be carried over: {self._lost} Compile it anew "
                "before it is trained.",
                stacklevel=3,
            )
            return
        has_steps = bool(self._slots)
        stock = type(self._stock).from_config(self._stock.get_config()) if has_steps else self._stock
        optimizer = config["optimizer"] = DistributedOptimizer(stock)
        if config.get("jit_compile") is True:
            config["jit_compile"] = False
        self._compile(config)
        if has_steps:
            optimizer.build(self._model.trainable_variables)
            stock.iterations.assign(np.asarray(self._stock.iterations))
            dense = [v for v in self._model.trainable_variables if not is_embedding_variable(v)]
            for i, variable in enumerate(dense):
                for name, slot in zip(self._lists, self._slots_of(variable), strict=False):
                    getattr(stock, name)[i].assign(np.asarray(slot))
            for table, slots in zip(tables, self._slots, strict=True):
                if table is not None and slots:
                    _restore(table, slots, optimizer.embedding_optimizer)

    def _compile(self, config: dict[str, Any]) -> None:
        # Not that of a subclass, which may take other arguments.
        base: Any = next(c for c in type(self._model).__mro__ if "compile" in vars(c) and _is_of_keras(c))
        base.compile(self._model, **config)


def _is_of_keras(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("keras", "tf_keras")


def _restore(table: EmbeddingVariable, slots: Sequence[Any], optimizer: Any) -> None:
    transport, name = context.get_transport(), f"sok/distributed_model/{table.table_name}/slots"
    columns = np.concatenate([np.asarray(slot) for slot in slots], axis=1)
    columns = transport.broadcast_numpy(columns, name)
    keys, values = table.export()
    table.restore_rows(
        keys,
        values,
        columns[np.asarray(keys).astype(np.int64)],
        slot_set=optimizer.slot_set,
        rule=optimizer.rule,
        slot_init=optimizer.slot_inits,
    )
