"""`distributed_model`: a model of Keras' own `Embedding` layers becomes one over tables, as it stands."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import strategies
from sok.base.graph_ops import variables_at_once
from sok.base.types import KerasModel
from sok.distributed import joining
from sok.job import agreement, context
from sok.keras import layers as sok_layers
from sok.keras.layers import embedding
from sok.keras.layers.base import TableLayerMixin
from sok.keras.optimizer_state import OptimizerState
from sok.lookup import cutting
from sok.table.options import TableOptions, said_once, whole_number

# What a layer over a table has of its own. A class that has one of them, too, would lose it.
_OURS = ("call", "build", "__call__", "embeddings")
_OWN = ("combiner", "capacity", "sparse_as_dense_size", "table", "regularize")  # which Keras' own layer does not take
_OF_CALLS = (
    *("_call_signature", "call_signature_parameters", "_call_has_training_arg", "_call_has_mask_arg"),  # Keras 3
    *("_call_has_context_arg", "_call_spec"),  # and tf_keras
)


@dataclasses.dataclass(frozen=True)
class Planned:
    """What becomes of one embedding layer."""

    layer: Any
    path: str
    options: TableOptions | None  # of its table; None: it stays as it is
    why: str = ""  # it stays
    is_refused: bool = False  # for that reason, which nobody has asked for

    @property
    def row(self) -> tuple[str, str, str, str, str, str]:
        rows, dim = self.layer.input_dim, self.layer.output_dim
        if self.options is None:
            where, kept = "each worker", f"dense: {self.why}"
        else:
            where, kept = f"{self.options.placement}, {context.size()} workers", "table"
        if self.is_refused:
            where, kept = "", f"cannot be converted: {self.why}"
        if isinstance(self.layer, TableLayerMixin):
            kept = "table already"
        if rows is None:
            return self.path, "any", str(dim), "as ids come", where, kept
        return self.path, f"{rows:,}", str(dim), f"{4 * rows * dim:,}", where, kept


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `distributed_model` does to a model; `str` shows it as a table."""

    layers: tuple[Planned, ...]

    @property
    def to_convert(self) -> list[Planned]:
        return [one for one in self.layers if one.options is not None and not isinstance(one.layer, TableLayerMixin)]

    def __str__(self) -> str:
        rows = [("layer", "rows", "dim", "bytes", "where", "becomes"), *(one.row for one in self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        form = "  ".join(f"{{:{side}{width}}}" for side, width in zip("<>>><<", widths, strict=True))
        return "\n".join(form.format(*row).rstrip() for row in rows)


def distributed_model(
    model: KerasModel,
    *,
    table: TableOptions | Mapping[str, TableOptions] | None = None,
    sparse_as_dense_size: int | None = None,
    keep: Iterable[str] = (),
    one_exchange: bool = True,
    dry_run: bool = False,
    regularize: str = "batch",
) -> Any:
    """Returns `model` with its `Embedding` layers over tables that are spread over the workers.

    The model itself is changed, and returned: layers, names and connections stay, whatever way it was built
    (functional, Sequential, a subclass with layers in attributes, lists and dicts, models inside models, layers that
    are called several times), under Keras 3 and tf_keras. Each `keras.layers.Embedding`, and each layer of a subclass
    of it that has no `call` or `build` of its own, becomes a `sok.Embedding` with the same arguments. If it has
    weights, its table starts with them: those of worker 0. A model that was compiled stays so, with
    `sok.DistributedOptimizer(its optimizer)` and that optimizer's state.

    Args:
        model: a model, or layer, of Keras 3 or tf_keras. One of `sok.Embedding` layers, too.
        table: a `sok.TableOptions` for all tables, or one for each of some layers, by name.
        sparse_as_dense_size: layers of up to so many rows stay as they are: ordinary variables, averaged with the dense
            ones. None: 64.
        keep: names, or paths, of layers that are to stay as they are, whatever their size.
        one_exchange: whether lookups that do not depend on each other are made together, in one exchange: in `fit`,
            `evaluate`, `predict`, and wherever the model is called in a `tf.function`. The Python code of the model
            then runs twice where a function is traced. Executing eagerly they stay one by one.
        regularize: what `embeddings_regularizer` of a layer does to rows outside the batch: see `sok.Embedding`.
        dry_run: whether to print what would be done, a line for each embedding layer, and to do nothing.

    Returns:
        The model.

    Raises:
        TypeError: `model` is none of Keras.
        ValueError: a layer cannot be converted: each is named, with its path and the reason, and nothing has changed;
            an argument is out of range, or names a layer that there is not.

    Collective: all workers call it with the same model. Executing eagerly.

    Example:
        >>> import sok, tensorflow as tf
        >>> ids = tf.keras.Input([3], dtype="int64")
        >>> rows = tf.keras.layers.Embedding(1000, 4, name="words")(ids)
        >>> model = tf.keras.Model(ids, tf.keras.layers.Dense(1)(tf.keras.layers.Flatten()(rows)))
        >>> _ = sok.distributed_model(model, dry_run=True)
        layer   rows  dim   bytes  where                  becomes
        words  1,000    4  16,000  row_wise(), 1 workers  table
        >>> model = sok.distributed_model(model)
        >>> model.compile(sok.DistributedOptimizer("adagrad"), "mse")
        >>> model.get_layer("words").embedding_variable.num_rows().numpy().item()
        1000

    Source: the role of OpenEmbedding's `distributed_model`, which leaves subclassed models alone, and weights behind.
    """
    strategies.refuse("sok.distributed_model", model)
    keras = keras_of(model)
    plan = plan_of(model, table, sparse_as_dense_size, keep, regularize)
    if dry_run:
        if context.rank() == 0:
            sys.stdout.write(f"{plan}\n")
        return model
    transport, name = context.get_transport(), "sok/distributed_model"
    said = agreement.together(transport, name, lambda: _checked(plan))
    agreement.check_equal(said, "the embedding layers of the model")
    converted = [one.layer for one in plan.to_convert]
    state = OptimizerState.of(model, [_matrix(layer) for layer in converted]) if converted else None
    for one in plan.to_convert:
        _convert(one, keras, regularize)
    if one_exchange:
        _look_up_together(model)
    if state is not None:
        state.carry_over([layer.embedding_variable if layer.built else None for layer in converted])
    return model


def plan_of(
    model: KerasModel,
    table: TableOptions | Mapping[str, TableOptions] | None = None,
    sparse_as_dense_size: int | None = None,
    keep: Iterable[str] = (),
    regularize: str = "batch",
) -> Plan:
    """What `distributed_model` would do."""
    keras = keras_of(model)
    size = embedding.SPARSE_AS_DENSE_SIZE if sparse_as_dense_size is None else sparse_as_dense_size
    size = whole_number("sparse_as_dense_size", size, low=0)
    keep = [keep] if isinstance(keep, str) else list(keep)
    tables: dict[Any, Any] = dict(table) if isinstance(table, Mapping) else {None: table}
    found = [(path, layer) for path, layer in _layers(model) if isinstance(layer, keras.layers.Embedding)]
    names = {name for path, layer in found for name in (path, layer.name)}
    for argument, given in ("keep", keep), ("table", [name for name in tables if name is not None]):
        if missing := [name for name in given if name not in names]:
            raise ValueError(
                f"`{argument}` names {', '.join(map(repr, missing))}, and the model has no such embedding layer. "
                f"It has {', '.join(path for path, _ in found) or 'none'}."
            )
    planned = []
    for path, layer in found:
        options = said_once(tables.get(path, tables.get(layer.name, tables.get(None))), own=("hashed", "num_keys"))
        if isinstance(layer, TableLayerMixin):
            is_plain = getattr(layer, "_is_plain", False)
            planned.append(Planned(layer, path, None if is_plain else layer._options, "it was made so"))
        elif path in keep or layer.name in keep:
            planned.append(Planned(layer, path, None, "`keep` names it"))
        elif layer.input_dim <= size:
            planned.append(Planned(layer, path, None, f"no more than {size} rows"))
        elif reason := _why_not(layer, keras, options, regularize):
            planned.append(Planned(layer, path, None, reason, is_refused=True))
        else:
            planned.append(Planned(layer, path, options))
    return Plan(tuple(planned))


def keras_of(model: KerasModel) -> Any:
    """The Keras whose model it is."""
    for name in ("keras", "tf_keras"):
        # Of one that nobody has imported no model can have come in.
        if name in sys.modules and isinstance(model, sys.modules[name].layers.Layer):
            return sys.modules[name]
    raise TypeError(f"`model` must be a model of Keras 3 or tf_keras. Received: {model!r}.")


def _layers(model: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """All layers, each once, with their paths: names from the outermost to its own."""
    seen = {id(model)} if seen is None else seen
    if not path:
        yield getattr(model, "name", ""), model
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if id(layer) not in seen:
            seen.add(id(layer))
            own = f"{path}/{layer.name}" if path else layer.name
            yield own, layer
            yield from _layers(layer, own, seen)


def _why_not(layer: Any, keras: Any, options: TableOptions, regularize: str) -> str | None:
    base = keras.layers.Embedding
    own = [name for name in _OURS if getattr(type(layer), name, None) is not getattr(base, name, None)]
    if own:
        return f"its class {type(layer).__name__} has a `{own[0]}` of its own"
    if reason := embedding.why_no_table(layer, regularize):
        return reason
    if options.initializer is not None:
        return "`initializer` in `table` is said by the layer"
    for node in layer._inbound_nodes:
        for given in tf.nest.flatten(getattr(node, "input_tensors", [])):
            dtype = getattr(given.dtype, "name", given.dtype)
            if layer.input_dim > embedding.EXACT.get(dtype, sys.maxsize):
                return (
                    f"its ids are {dtype}, which does not tell all below {layer.input_dim} apart: "
                    "use keras.Input(shape, dtype='int64')"
                )
    return None


def _checked(plan: Plan) -> list[list[Any]]:
    refused = [one for one in plan.layers if one.is_refused]
    if refused:
        lines = "".join(f"\n  {one.path} ({type(one.layer).__name__}): {one.why}" for one in refused)
        raise ValueError(
            f"{len(refused)} of {len(plan.layers)} embedding layers cannot be converted:{lines}\nChange them, or leave "
            f"them as they are, on each worker whole: keep={[one.path for one in refused]}. Nothing has been changed."
        )
    return [[one.path, one.layer.input_dim, one.layer.output_dim, str(one.options)] for one in plan.layers]


def _convert(one: Planned, keras: Any, regularize: str) -> None:
    """Makes a layer of Keras' one over a table, the same object."""
    layer, options = one.layer, one.options
    assert options is not None
    matrix = _taken(layer) if layer.built else None
    set_class(layer, _over_table(layer.__class__, keras))
    for name in ("build", "quantize"):  # Keras 3 keeps that of the class before
        vars(layer).pop(name, None)
    like = sok_layers.for_keras(keras).Embedding(1, 1, sparse_as_dense_size=1)
    vars(layer).update({name: vars(like)[name] for name in _OF_CALLS if name in vars(like)})
    layer.combiner = layer.capacity = None
    layer.regularize = regularize
    layer.sparse_as_dense_size = 0
    layer._become(options, is_plain=False)
    if matrix is not None:
        tracker = getattr(layer, "_tracker", None)
        if tracker is not None:
            tracker.unlock()  # a layer of Keras 3 is locked once it is built
        table = layer.embedding_variable
        if tracker is not None:
            tracker.lock()
        embedding.assign_matrix(table, matrix)


def _matrix(layer: Any) -> Any:
    """The variable of a layer of Keras'; None if it is not built."""
    return vars(layer).get("_embeddings", vars(layer).get("embeddings"))  # Keras 3's and tf_keras' name for it


def _taken(layer: Any) -> np.ndarray:
    """The matrix of worker 0, which the layer then has no more."""
    variable = _matrix(layer)
    name = "_embeddings" if "_embeddings" in vars(layer) else "embeddings"
    matrix = context.get_transport().broadcast_numpy(np.asarray(variable), f"sok/distributed_model/{layer.name}")
    if hasattr(layer, "_untrack_variable"):
        layer._untrack_variable(variable)
        tf.__internal__.tracking.AutoTrackable.__delattr__(layer, name)  # Keras 3's collects garbage each time
    else:
        delattr(layer, name)
        # tf_keras asks the penalty of the matrix there.
        layer._callable_losses = [loss for loss in layer._callable_losses if not _is_of(loss, variable)]
    return matrix


def _is_of(loss: Any, variable: Any) -> bool:
    """Whether a loss of tf_keras, a function of no argument, is the penalty of this variable."""
    while isinstance(loss, functools.partial):
        if any(argument is variable for argument in loss.args):
            return True
        loss = next(iter(loss.args), None)
    return False


@functools.cache
def _over_table(of: Any, keras: Any) -> type:
    """The class over a table that stands for this one of Keras', or of somebody's."""
    ours = sok_layers.for_keras(keras).Embedding
    if of is keras.layers.Embedding:
        return ours

    def from_config(_: type, config: dict[str, Any]) -> Any:
        config = dict(config)
        own = {name: config.pop(name, None) for name in _OWN}
        layer = of.from_config(config)
        options = TableOptions.from_config(own["table"] or {}, keras.initializers)
        _convert(Planned(layer, layer.name, options), keras, own["regularize"] or "batch")
        return layer

    mixin = ours.__mro__[1]
    body = {"_keras_initializers": keras.initializers, "from_config": classmethod(from_config)}
    made: type = keras.utils.register_keras_serializable(package="sok")(named_as(of, mixin, body))
    return made


def named_as(of: type, mixin: type, body: dict[str, Any]) -> type:
    """A subclass that files and messages know by the name of the class itself."""
    names = {"__module__": of.__module__, "__qualname__": of.__qualname__, "__doc__": of.__doc__}
    return type(of.__name__, (mixin, of), {**names, **body})


class _LooksUpTogether:
    """Stands before the class of a model whose lookups are to be one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(super().__call__, *args, **kwargs)  # type: ignore[misc]
        if any(type(part).__name__ == "KerasTensor" for part in tf.nest.flatten((args, kwargs))):
            return call()
        return cutting.grouped(call)

    def make_train_function(self, *args: Any, **kwargs: Any) -> Any:
        _make_metrics_at_once(self)
        super().make_train_function(*args, **kwargs)  # type: ignore[misc]
        joining.begin_fit(self)
        return self.train_function  # type: ignore[attr-defined] # tf_keras takes it from here


def _make_metrics_at_once(model: Any) -> None:
    """Metrics named by a string are made by the first step."""
    for name in ("_compile_metrics", "compiled_metrics"):  # Keras 3's, tf_keras'
        metrics: Any = getattr(model, name, None)
        if getattr(metrics, "built", True) or "build" in vars(metrics):
            continue

        def build(*args: Any, metrics: Any = metrics) -> None:
            del metrics.build
            with variables_at_once():
                metrics.build(*args)

        metrics.build = build


def _look_up_together(model: Any) -> None:
    of = type(model)
    if not issubclass(of, _LooksUpTogether):
        set_class(model, named_as(of, _LooksUpTogether, {}))


def set_class(layer: object, to: type) -> None:
    object.__setattr__(layer, "__class__", to)
