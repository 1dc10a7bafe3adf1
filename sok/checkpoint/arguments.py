"""What a caller of `save` and `restore` means: which tables, which optimizers, run how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from sok.base.types import KerasLayer, KerasModel, Session, StockOptimizer
from sok.checkpoint.native import EagerCalls, SessionCalls
from sok.job.job import job_of
from sok.optimizers import Optimizer, claims
from sok.table.table import EmbeddingVariable, is_embedding_variable

Tables: TypeAlias = (
    "EmbeddingVariable | KerasModel | KerasLayer | tf.Module | Sequence[Tables] | Mapping[str, EmbeddingVariable]"
)
Optimizers: TypeAlias = "Optimizer | StockOptimizer | Sequence[Optimizer | StockOptimizer]"


def tables_of(variables_or_model: Tables) -> dict[str, EmbeddingVariable]:
    """The tables in a variable, layer, model, module, or a list of these, by name.

    Raises:
        TypeError: something else.
        ValueError: there is none; two have one name.
    """
    found: dict[int, EmbeddingVariable] = {id(table): table for table in _tables_in(variables_or_model)}
    if not found:
        raise ValueError(
            "`variables_or_model` holds no embedding table. Layers and models make theirs when they are built: call "
            f"them once before. Received: {variables_or_model!r}."
        )
    tables: dict[str, EmbeddingVariable] = {}
    for table in found.values():
        if table.table_name in tables:
            raise ValueError(f"`variables_or_model` holds two tables with the name '{table.table_name}'.")
        tables[table.table_name] = table
    return tables


def tables_by_saved_name(variables_or_model: Tables) -> dict[str, EmbeddingVariable]:
    """As `tables_of`; a mapping says itself which saved table goes where."""
    if not isinstance(variables_or_model, Mapping):
        return tables_of(variables_or_model)
    for name, table in variables_or_model.items():
        if not isinstance(name, str) or not is_embedding_variable(table):
            raise TypeError(
                "A mapping as `variables_or_model` must give an EmbeddingVariable for the name of each saved table. "
                f"Received: {name!r}: {type(table).__name__}."
            )
    if not variables_or_model:
        raise ValueError("`variables_or_model` is empty.")
    if len({id(table) for table in variables_or_model.values()}) < len(variables_or_model):
        raise ValueError("`variables_or_model` names one table twice.")
    return dict(variables_or_model)


def _tables_in(what: Any) -> Iterator[EmbeddingVariable]:
    if is_embedding_variable(what):
        yield what
    elif isinstance(what, (list, tuple)):
        for item in what:
            yield from _tables_in(item)
    elif is_embedding_variable(getattr(what, "embedding_variable", None)):
        yield what.embedding_variable
    elif hasattr(what, "variables"):
        variables = what.variables() if callable(what.variables) else what.variables
        yield from filter(is_embedding_variable, variables)
    else:
        raise TypeError(
            "`variables_or_model` must be embedding variables, layers, a model, or a list of these. "
            f"Received: {what!r} of type {type(what).__name__}."
        )


def optimizers_of(optimizers: Optimizers | None, variables_or_model: Tables) -> list[Optimizer] | None:
    """The optimizers of tables that are meant: those given, or those that train the tables; None if there are none.

    Raises:
        TypeError: something that keeps no slots in tables.
        ValueError: one twice.
    """
    if optimizers is None:
        known = claims.optimizers_of(tables_by_saved_name(variables_or_model).values())
        compiled = _of_compiled(variables_or_model)
        return known + [o for o in compiled if o not in known] or None
    if not isinstance(optimizers, (list, tuple)):
        optimizers = [optimizers]
    chosen = []
    for optimizer in optimizers:
        inner = optimizer if isinstance(optimizer, Optimizer) else getattr(optimizer, "embedding_optimizer", None)
        if not isinstance(inner, Optimizer):
            raise TypeError(
                "`optimizers` must be of sok.optimizers, a sok.DistributedOptimizer or a sok.OptimizerWrapper: others "
                f"keep no slots in tables; tf.train.Checkpoint saves them. Received: {optimizer!r}."
            )
        chosen.append(inner)
    if len({o.slot_set for o in chosen}) < len(chosen):
        raise ValueError(f"`optimizers` names one twice. Received: {[o.slot_set for o in chosen]}.")
    return chosen


def _of_compiled(model: Any) -> list[Optimizer]:
    """What a compiled model will train its tables by."""
    optimizer = getattr(model, "optimizer", None)
    try:
        # Under the policy mixed_float16 Keras puts its LossScaleOptimizer around.
        inner = getattr(getattr(optimizer, "inner_optimizer", optimizer), "embedding_optimizer", None)
    except ValueError:  # it has no rule for tables: these are not trained
        return []
    return [inner] if isinstance(inner, Optimizer) else []


def calls_for(tables: Sequence[EmbeddingVariable], session: Session | None) -> EagerCalls:
    """How ops of these tables are run now.

    Raises:
        RuntimeError: a table is of a job that has ended; inside a tf.function; or in a v1 graph without a session.
    """
    job_of(tables)
    if not any(table._in_graph_mode for table in tables):
        if session is not None:
            raise ValueError("`session` is for tables of a v1 graph; these are not.")
        if not tf.executing_eagerly():
            raise RuntimeError("Save and restore outside of tf.function: files cannot be written while it is traced.")
        return EagerCalls()
    session = session or tf.compat.v1.get_default_session()
    if session is None:
        raise RuntimeError(
            "These tables live in a v1 session: pass it as `session`, or call this inside `with session.as_default():`."
        )
    return SessionCalls(session)
