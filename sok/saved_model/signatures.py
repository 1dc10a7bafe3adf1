"""What is served: functions of plain tensors, made of a model and the forms of its inputs."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from sok.base.autograph import converting
from sok.base.types import Exportable, Ids

DEFAULT = "serving_default"
_SPECS = (tf.TensorSpec, tf.SparseTensorSpec, tf.RaggedTensorSpec)


@dataclasses.dataclass(frozen=True)
class Served:
    """One signature: `function(*arguments)`, where `arguments` are nests of specs."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    input_names: Sequence[str] | None = None  # of the specs in order; None: made of where they stand
    output_names: Sequence[str] | None = None
    converts: bool = True  # whether Python's `if` and `for` may be those of TensorFlow (AutoGraph)


def served_by(model: Exportable, signatures: Any) -> dict[str, Served]:
    """The signatures of `model` by name; `signatures` as `sok.export_saved_model` takes it.

    Raises:
        TypeError, ValueError: they say nothing that can be served.
    """
    if isinstance(signatures, dict) and signatures and all(_is_function(value) for value in signatures.values()):
        return {checked_name(name): _of_function(name, value) for name, value in signatures.items()}
    if _is_function(signatures):
        return {DEFAULT: _of_function(DEFAULT, signatures)}
    if not callable(model):
        raise TypeError(
            f"`model` must be a Keras model, a tf.Module or a function that can be called. Received: {model!r}."
        )
    if signatures is None:
        return {DEFAULT: _of_model(model)}
    flat = tf.nest.flatten(signatures)
    if not flat or not all(isinstance(spec, _SPECS) for spec in flat):
        raise TypeError(
            "`signatures` must be None, a tf.TensorSpec, tf.SparseTensorSpec or tf.RaggedTensorSpec (or a nest of them "
            "as the model takes it), or a dict from names to tf.functions with an input_signature, or to pairs "
            f"(function, specs). Received: {signatures!r}."
        )
    return {DEFAULT: dataclasses.replace(_call_of(model), arguments=(signatures,))}


def flat_function(served: Served) -> tuple[Callable[..., dict[str, tf.Tensor]], dict[str, tf.TensorSpec]]:
    """A function of named plain tensors that gives named plain tensors, and what they are.

    What is sparse or ragged is taken, and given, in parts: `x_indices`, `x_values` and `x_dense_shape`; `x_values` and
    `x_row_splits` (with several levels `x_row_splits_0`, the outer one, and so on).
    """
    specs = tf.nest.flatten(served.arguments)
    names = _input_names(served, specs)
    parts = [_parts_of_spec(name, spec) for name, spec in zip(names, specs, strict=True)]
    of_all = {name: spec for of_spec in parts for name, spec in of_spec.items()}
    if len(of_all) != sum(map(len, parts)):
        raise ValueError(f"The inputs of a signature must have different names. Received: {', '.join(names)}.")

    def serve(**tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        values = [
            _assembled(spec, [tensors[name] for name in of_spec]) for spec, of_spec in zip(specs, parts, strict=True)
        ]
        function = converting(served.function) if served.converts else served.function
        outputs = function(*tf.nest.pack_sequence_as(served.arguments, values))
        return _named_outputs(outputs, served.output_names)

    return serve, of_all


def _is_function(value: Any) -> bool:
    if isinstance(value, tuple) and len(value) == 2 and callable(value[0]) and not isinstance(value[0], _SPECS):
        return True
    return getattr(value, "input_signature", None) is not None or isinstance(
        value, tf.types.experimental.PolymorphicFunction
    )


def _of_function(name: str, value: Any) -> Served:
    if isinstance(value, tuple):
        function, specs = value
        if isinstance(specs, list):
            specs = tuple(specs)
        served = Served(function, specs if isinstance(specs, tuple) else (specs,))
    else:
        if value.input_signature is None:
            raise ValueError(
                f"Signature '{name}': the tf.function needs an input_signature; or give a pair (function, specs)."
            )
        served = Served(value, tuple(value.input_signature))
    flat = tf.nest.flatten(served.arguments)
    if not all(isinstance(spec, _SPECS) for spec in flat):
        raise TypeError(
            f"Signature '{name}': all inputs must be given as specs, such as tf.TensorSpec. Received: {flat}."
        )
    return dataclasses.replace(served, input_names=_argument_names(served))


def _argument_names(served: Served) -> list[str] | None:
    """The names of the arguments of a function, if each is one spec."""
    if not all(isinstance(argument, _SPECS) for argument in served.arguments):
        return None
    parameters = _parameters(served.function)
    if len(parameters) < len(served.arguments):
        return None
    pairs = zip(served.arguments, parameters, strict=False)
    return [getattr(spec, "name", None) or parameter for spec, parameter in pairs]


def _parameters(function: Any) -> list[str]:
    try:
        found = inspect.signature(getattr(function, "python_function", function)).parameters.values()
    except (TypeError, ValueError):  # of what is not written in Python
        return []
    return [p.name for p in found if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _of_model(model: Any) -> Served:
    served = _call_of(model)
    specs, names = _inputs_of_keras(model) if _is_keras(model) else (None, None)
    if specs is not None:
        outputs = getattr(model, "output_names", None)
        return dataclasses.replace(served, arguments=(specs,), input_names=names, output_names=outputs)
    for function in (model, model.__call__):
        if getattr(function, "input_signature", None) is not None:
            return _of_function(DEFAULT, function)
    raise ValueError(
        "`signatures` must say what this model is called with, which it does not know itself: for instance "
        "signatures=tf.TensorSpec([None, 26], tf.int64, name='ids'), or tf.RaggedTensorSpec, or a dict of them."
    )


def _call_of(model: Any) -> Served:
    """`model(inputs)`, with training=False where that means something; its specs are still to come."""
    if _is_keras(model):
        # Keras' layers convert what of them is to be converted.
        return Served(lambda inputs: model(inputs, training=False), (), converts=False)
    takes_training = "training" in _parameters(model)
    return Served((lambda inputs: converting(model)(inputs, training=False)) if takes_training else model, ())


def _is_keras(model: Any) -> bool:
    return any(
        c.__module__.split(".")[0] in ("keras", "tf_keras") and c.__name__ == "Layer" for c in type(model).__mro__
    )


def _inputs_of_keras(model: Any) -> tuple[Any, list[str] | None]:
    """The specs of a Keras model's one argument, and their names; None if it does not know them."""
    inputs = getattr(model, "_inputs_struct", None)  # Keras 3, functional
    if inputs is None:
        inputs = getattr(getattr(model, "_functional", None), "_inputs_struct", None)  # Keras 3, Sequential
    if inputs is None:
        inputs = getattr(model, "_nested_inputs", None)  # tf_keras
    if inputs is not None:
        is_flat_dict = isinstance(inputs, dict) and len(tf.nest.flatten(inputs)) == len(inputs)
        # tf.nest goes through dicts in the order of their keys.
        names = sorted(inputs) if is_flat_dict else [tensor.name for tensor in tf.nest.flatten(inputs)]
        return tf.nest.map_structure(_spec_of, inputs), names
    save_spec = getattr(model, "save_spec", None)  # tf_keras, a subclass that has been called
    found = save_spec(dynamic_batch=True) if save_spec is not None else None
    if found is None or len(found[0]) != 1:
        return None, None
    return found[0][0], None


def _spec_of(tensor: Any) -> Any:
    """The spec of a symbolic tensor of Keras 3 or tf_keras."""
    found = getattr(tensor, "type_spec", None)
    if found is not None:
        return found
    shape, dtype = tf.TensorShape(tensor.shape), tf.as_dtype(str(tensor.dtype))
    if getattr(tensor, "sparse", False):
        return tf.SparseTensorSpec(shape, dtype)
    if getattr(tensor, "ragged", False):
        rank = getattr(tensor, "ragged_rank", None) or shape.rank - 1
        return tf.RaggedTensorSpec(shape, dtype, ragged_rank=rank)
    return tf.TensorSpec(shape, dtype, name=tensor.name)


def _input_names(served: Served, specs: list[Any]) -> list[str]:
    given = served.input_names
    if given is None:
        paths = [
            path for path, _ in _with_paths(served.arguments[0] if len(served.arguments) == 1 else served.arguments)
        ]
        given = [getattr(spec, "name", None) or path or "inputs" for spec, path in zip(specs, paths, strict=True)]
    return [_as_identifier(name) for name in given]


def _with_paths(nest: Any, path: str = "") -> list[tuple[str, Any]]:
    """The specs of a nest in tf.nest's order, with names made of keys and places."""
    if isinstance(nest, dict):
        items = [(str(key), nest[key]) for key in sorted(nest)]
    elif isinstance(nest, (list, tuple)):
        items = [(f"{'' if path else 'inputs_'}{i}", value) for i, value in enumerate(nest)]
    else:
        return [(path, nest)]
    return [found for key, value in items for found in _with_paths(value, f"{path}_{key}" if path else key)]


def _as_identifier(name: str) -> str:
    cleaned = re.sub(r"\W", "_", name.partition(":")[0])
    return cleaned if cleaned.isidentifier() else f"_{cleaned}"


def _parts_of_spec(name: str, spec: Any) -> dict[str, tf.TensorSpec]:
    if isinstance(spec, tf.SparseTensorSpec):
        rank = spec.shape.rank
        return {
            f"{name}_indices": tf.TensorSpec([None, rank], tf.int64),
            f"{name}_values": tf.TensorSpec([None], spec.dtype),
            f"{name}_dense_shape": tf.TensorSpec([rank], tf.int64),
        }
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = spec.flat_values_spec.shape if spec.flat_values_spec is not None else None
        if inner is None:
            rank = spec.shape.rank
            inner = [None, *(spec.shape[spec.ragged_rank + 1 :] if rank is not None else [])]
        splits = [f"{name}_row_splits{f'_{i}' if spec.ragged_rank > 1 else ''}" for i in range(spec.ragged_rank)]
        return {
            f"{name}_values": tf.TensorSpec(inner, spec.dtype),
            **{split: tf.TensorSpec([None], spec.row_splits_dtype) for split in splits},
        }
    return {name: tf.TensorSpec(spec.shape, spec.dtype)}


def _assembled(spec: Any, tensors: list[tf.Tensor]) -> Any:
    if isinstance(spec, tf.SparseTensorSpec):
        sparse = tf.SparseTensor(*tensors)
        sparse.set_shape(spec.shape)  # what the spec knows of it, such as the number of features
        return sparse
    if isinstance(spec, tf.RaggedTensorSpec):
        values, *splits = tensors
        return tf.RaggedTensor.from_nested_row_splits(values, splits, validate=True)
    return tensors[0]


def _named_outputs(outputs: Any, names: Sequence[str] | None) -> dict[str, tf.Tensor]:
    if isinstance(outputs, dict) and all(not isinstance(value, (dict, list, tuple)) for value in outputs.values()):
        pairs = list(outputs.items())
    else:
        flat = tf.nest.flatten(outputs)
        if names is None or len(set(names)) != len(flat):
            names = [f"output_{i}" for i in range(len(flat))]
        pairs = list(zip(names, flat, strict=True))
    return {name: tf.identity(tensor) for name, tensor in all_parts(pairs).items()}


def all_parts(pairs: Iterable[tuple[str, Any]]) -> dict[str, tf.Tensor]:
    """Tensors as named plain tensors.

    Raises:
        ValueError: two have one name, such as the values of a ragged 'x' and a tensor 'x_values'.
    """
    found: dict[str, tf.Tensor] = {}
    whose: dict[str, str] = {}
    for name, value in pairs:
        for part, tensor in parts_of(name, value).items():
            if part in found:
                raise ValueError(
                    f"Two tensors of a signature would have the name {part!r}, of {whose[part]!r} and of {name!r}: "
                    "what is sparse or ragged comes in parts. Rename one of them."
                )
            found[part], whose[part] = tensor, name
    return found


def parts_of(name: str, value: Ids) -> dict[str, tf.Tensor]:
    """A tensor as named plain tensors: several of what is sparse or ragged."""
    if isinstance(value, (tf.SparseTensor, tf.compat.v1.SparseTensor)):
        return {f"{name}_{part}": getattr(value, part) for part in ("indices", "values", "dense_shape")}
    if isinstance(value, tf.RaggedTensor):
        splits = value.nested_row_splits
        names = [f"{name}_row_splits{f'_{i}' if len(splits) > 1 else ''}" for i in range(len(splits))]
        return {f"{name}_values": value.flat_values, **dict(zip(names, splits, strict=True))}
    return {name: tf.convert_to_tensor(value)}


def checked_name(name: object) -> str:
    if not isinstance(name, str) or not name or name.startswith("__"):
        raise ValueError(f"`signatures`: names must be texts that do not begin with '__'. Received: {name!r}.")
    return name
