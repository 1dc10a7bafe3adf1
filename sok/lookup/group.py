"""Many tables, one lookup."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from sok.base import _ops
from sok.base.types import Condition, DTypeLike, Ids
from sok.lookup import exchange, lookup, plain_variables
from sok.lookup.inputs import Called, to_csr
from sok.lookup.lookup import Csr, Feature
from sok.table.keys import as_keys
from sok.table.table import is_embedding_variable

_COMBINERS = ("sum", "mean", "sqrtn")


@dataclasses.dataclass(frozen=True)
class Request:
    """One of the lookups of a group."""

    param: Any  # an EmbeddingVariable, or an ordinary variable
    ids: Any
    weights: Any = None
    combiner: str = exchange.ROWS  # or 'sum', 'mean', 'sqrtn'
    dtype: tf.DType | None = None  # of the result, if it is not that of `param`
    ids_called: str = "sp_ids"  # in messages, and the weights too
    weights_called: str = "sp_weights"


def group_embedding_lookup_sparse(
    params: Sequence[Any],
    sp_ids: Sequence[Ids],
    combiners: str | Sequence[str] | None = None,
    *,
    partition_strategy: str = "mod",
    sp_weights: Sequence[Ids | None] | None = None,
    is_sequence: bool = False,
    params_num_per_group: int | None = None,
    training: Condition = True,
    exchange_dtype: DTypeLike | None = None,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Looks up and pools the ids of many features, each in its own table, in one op.

    Each is looked up as by `tf.nn.embedding_lookup_sparse`, except that an empty sample gives zeros, at the end of the
    batch too. Where stock TensorFlow pays for kernels and Python calls per table, this pays once for the group, and all
    processors work on all tables. On several workers the group is one exchange: two collectives forward, one backward.

    Args:
        params: tables (EmbeddingVariable) of any widths and key dtypes, ordinary variables (tf.Variable) [rows, dim] of
            any float dtype, or both. The same one may come several times.
        sp_ids: for each, integer ids as SparseTensor [batch, n], RaggedTensor [batch, None] (its values are not copied)
            or dense [batch, n]. The last index of a SparseTensor is ignored, as in TensorFlow.
        combiners: 'sum', 'mean' or 'sqrtn', in any capitalisation; one for all or one each. None: 'mean'.
        partition_strategy: 'mod', and no other: a table's `placement` says which worker has a key.
        sp_weights: None, or for each feature None or weights in the form of its ids: sum(w e), sum(w e) / sum(w) and
            sum(w e) / sqrt(sum(w^2)).
        is_sequence: whether to return the rows of each sample one after the other instead of pooling them.
        params_num_per_group: how many features one op, or exchange, has at most. None: all of them.
        training: whether unseen ids of tables get a row; without, they read as the row they would get.
        exchange_dtype: None. The table says in which dtype its rows travel: `EmbeddingVariable(exchange_dtype=...)`.
        name: of the scope of the ops.

    Returns:
        A list of float32 (of an ordinary variable: its dtype) [batch, dim], one per feature. With `is_sequence`
        [batch, T, dim], where T is the largest number of ids that a sample of this feature has, filled up with zeros.
        Differentiable in tables, variables and weights.

    Raises:
        TypeError: `params` or `sp_ids` is not a list, or an entry of `params` is no variable.
        ValueError: lists of different lengths, an unknown combiner or strategy, ids of an unknown form, weights for a
            sequence.
        tf.errors.InvalidArgumentError: malformed ids, or an id outside an identity table; on every worker. The same of
            an ordinary variable; on every worker if the list has a table, else on this one.
        tf.errors.ResourceExhaustedError: a shard is full; on every worker. Rows that other tables of the group made for
            this call stay.

    Every worker has ordinary variables whole, and reads them where they lie, all of float32 in one op for all
    processors. Their gradients are those of dense weights: `sok.DistributedOptimizer` averages them.

    Collective if the list has a table.

    Example:
        >>> import tensorflow as tf
        >>> import sok
        >>> user = sok.EmbeddingVariable(2, 100, name="group_user", initializer="ones")
        >>> item = sok.EmbeddingVariable(3, 100, name="group_item", initializer="ones")
        >>> ids = tf.RaggedTensor.from_row_splits([3, 1, 4, 1, 5, 9, 2, 6], [0, 4, 4, 7, 8, 8])
        >>> outputs = sok.group_embedding_lookup_sparse([user, item], [ids, ids], ["sum", "mean"])
        >>> outputs[0].numpy()[:, 0].tolist(), outputs[1].numpy()[:, 0].tolist()
        ([4.0, 0.0, 3.0, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0, 0.0])

    Source: `group_embedding_lookup_sparse` of DeepRec, whose weights count by another rule, if at all.
    """
    params = _as_list("params", params)
    sp_ids = _one_each("sp_ids", sp_ids, len(params))
    combiners = _check_combiners(combiners, len(params))
    weights = [None] * len(params) if sp_weights is None else _one_each("sp_weights", sp_weights, len(params))
    _check_strategy(partition_strategy)
    per_group = check_per_group(params_num_per_group)
    refuse_exchange_dtype(exchange_dtype)
    variables, dtypes = _check_params(params)
    if is_sequence and any(w is not None for w in weights):
        raise ValueError("`sp_weights` must be None with is_sequence=True: rows that are not pooled have no weights.")
    if is_sequence:
        combiners = [exchange.ROWS] * len(params)
    requests = [
        Request(*request, f"sp_ids[{i}]", f"sp_weights[{i}]")
        for i, request in enumerate(zip(variables, sp_ids, weights, combiners, dtypes, strict=True))
    ]
    with tf.name_scope(name or "group_embedding_lookup_sparse"):
        return [output for of_part in lookup_parts(chunks(requests, per_group), training) for output in of_part]


def group_embedding_lookup(
    params: Sequence[Any],
    ids: Sequence[Ids],
    partition_strategy: str = "mod",
    name: str | None = None,
    *,
    training: Condition = True,
    exchange_dtype: DTypeLike | None = None,
) -> list[tf.Tensor]:
    """Looks up the rows of many features, each in its own table, in one op.

    Each is looked up as by `tf.nn.embedding_lookup`. On several workers the group is one exchange: two collectives
    forward, one backward.

    Args:
        params: tables (EmbeddingVariable) of any widths and key dtypes, ordinary variables (tf.Variable) [rows, dim] of
            any float dtype, or both. The same one may come several times.
        ids: for each, integer ids of any shape.
        partition_strategy: 'mod', and no other: a table's `placement` says which worker has a key.
        name: of the scope of the ops.
        training: whether unseen ids get a row; without, they read as the row they would get.
        exchange_dtype: None, as in `group_embedding_lookup_sparse`.

    Returns:
        A list of float32 (of an ordinary variable: its dtype) [*shape of the ids, dim], one per feature. Differentiable
        in tables and variables.

    Raises:
        TypeError: `params` or `ids` is not a list, or an entry of `params` is no variable.
        ValueError: lists of different lengths, an unknown strategy, ids that are no integers.
        tf.errors.InvalidArgumentError: an id outside an identity table; on every worker. An id that is no row of an
            ordinary variable; on every worker if the list has a table, else on this one.
        tf.errors.ResourceExhaustedError: a shard is full; on every worker. Rows that other tables of the group made for
            this call stay.

    Collective if the list has a table.

    Example:
        >>> import sok
        >>> user = sok.EmbeddingVariable(2, 100, name="rows_user", initializer="ones")
        >>> item = sok.EmbeddingVariable(3, 100, name="rows_item", initializer="zeros")
        >>> [rows.shape.as_list() for rows in sok.group_embedding_lookup([user, item], [[7, 8], [[9]]])]
        [[2, 2], [1, 1, 3]]

    Source: `group_embedding_lookup` of DeepRec, which flattens the ids.
    """
    params = _as_list("params", params)
    ids = _one_each("ids", ids, len(params))
    _check_strategy(partition_strategy)
    refuse_exchange_dtype(exchange_dtype)
    variables, dtypes = _check_params(params)
    with tf.name_scope(name or "group_embedding_lookup"):
        with _told_to_peers(variables):
            keys = [
                as_keys(_dense("ids", n, i), *_keys_of(v), f"`ids[{n}]` of {_label_of(v)}")
                for n, (v, i) in enumerate(zip(variables, ids, strict=True))
            ]
        # One segment that holds all keys of a feature, of which the rows are wanted.
        requests = [
            Request(v, _in_one_segment(k), dtype=d, ids_called=f"ids[{n}]")
            for n, (v, k, d) in enumerate(zip(variables, keys, dtypes, strict=True))
        ]
        return [_in_shape_of(k, rows) for k, (rows, _) in zip(keys, _lookup([requests], training)[0], strict=True)]


def lookup_parts(
    parts: Sequence[Sequence[Request]], training: Any, names: Sequence[str] | None = None
) -> list[list[tf.Tensor]]:
    """The pooled vectors [batch, dim] or, with the combiner `ROWS`, the padded rows [batch, T, dim] of all features.

    Collective; an exchange for each part that has a table. Each part in a name scope if `names` says so.
    """
    return [
        [
            _padded(output, row_splits) if r.combiner == exchange.ROWS else output
            for r, (output, row_splits) in zip(part, found, strict=True)
        ]
        for part, found in zip(parts, _lookup(parts, training, names), strict=True)
    ]


def lookup_sparse(requests: Sequence[Request], training: Any) -> list[tf.Tensor]:
    """`lookup_parts` of one part."""
    return lookup_parts([requests], training)[0]


def _lookup(
    parts: Sequence[Sequence[Request]], training: Any, names: Sequence[str] | None = None
) -> list[list[tuple[tf.Tensor, tf.Tensor]]]:
    """For each request its pooled vectors, or the rows of its ids; and its row splits."""
    scopes = [""] * len(parts)
    for i, name in enumerate(names or ()):
        with tf.name_scope(name) as scopes[i]:
            pass

    def of_each_part(body: Callable[[Sequence[Request], Any], Any], given: Sequence[Any]) -> list[Any]:
        results = []
        for part, scope, mine in zip(parts, scopes, given, strict=True):
            with tf.name_scope(scope) if scope else contextlib.nullcontext():
                results.append(body(part, mine))
        return results

    def of_variables(part: Sequence[Request], csrs: list[Csr]) -> list[tf.Tensor]:
        plain = [(r.param, csr, r.combiner) for r, csr in zip(part, csrs, strict=True) if not _is_table(r)]
        return plain_variables.lookup(*zip(*plain, strict=True)) if plain else []

    def of_tables(part: Sequence[Request], csrs: list[Csr]) -> list[tf.Tensor]:
        features = [_feature(r, csr) for r, csr in zip(part, csrs, strict=True) if _is_table(r)]
        return lookup.lookup_group(features, training) if features else []

    # What is wrong in any part is told where peers wait: at the first exchange.
    is_eager, waiting = tf.executing_eagerly(), [part for part in parts if any(map(_is_table, part))][:1]
    with _told_to_peers([r.param for part in waiting for r in part]):
        csrs = of_each_part(lambda part, _: [_to_csr(r) for r in part], parts)
        plain = of_each_part(of_variables, csrs) if is_eager else []
        if waiting and not is_eager:
            csrs = _with_report(parts, csrs)
    tables = of_each_part(of_tables, csrs)
    if not is_eager:
        # Their gradients need ids alone. Where the lookup of a table raises, they are not to be updated either.
        with tf.control_dependencies([outputs[0] for outputs in tables if outputs]):
            after = [[dataclasses.replace(csr, keys=tf.identity(csr.keys)) for csr in of_part] for of_part in csrs]
        plain = of_each_part(of_variables, after if waiting else csrs)
    return [_in_order(*of_part) for of_part in zip(parts, csrs, map(iter, tables), map(iter, plain), strict=True)]


def _with_report(parts: Sequence[Sequence[Request]], csrs: Sequence[Sequence[Csr]]) -> list[list[Csr]]:
    """The ids, of which those of the first table say, too, what is wrong with those of ordinary variables."""
    all_csrs = [list(of_part) for of_part in csrs]
    pairs = [(r, i, n) for i, part in enumerate(parts) for n, r in enumerate(part)]
    plain = [(r.param, csrs[i][n]) for r, i, n in pairs if not _is_table(r)]
    first, i, n = next(pair for pair in pairs if _is_table(pair[0]))
    if plain and not lookup.is_alone(first.param):
        splits = plain_variables.reported(csrs[i][n].row_splits, *zip(*plain, strict=True))
        all_csrs[i][n] = dataclasses.replace(csrs[i][n], row_splits=splits)
    return all_csrs


def _in_order(
    part: Sequence[Request], csrs: list[Csr], tables: Iterator[tf.Tensor], plain: Iterator[tf.Tensor]
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    outputs = [next(tables if _is_table(r) else plain) for r in part]
    return [
        (output if r.dtype is None else tf.cast(output, r.dtype), csr.row_splits)
        for r, output, csr in zip(part, outputs, csrs, strict=True)
    ]


def _is_table(r: Request) -> bool:
    return is_embedding_variable(r.param)


def _to_csr(r: Request) -> Csr:
    called = Called(_label_of(r.param), r.ids_called, r.weights_called)
    is_double = not is_embedding_variable(r.param) and r.param.dtype.base_dtype == tf.float64
    weights_dtype = tf.float64 if is_double else tf.float32
    return to_csr(r.ids, 1, *_keys_of(r.param), r.weights, called=called, weights_dtype=weights_dtype)


def _feature(r: Request, csr: Csr) -> Feature:
    if r.combiner == exchange.ROWS and lookup.is_alone(r.param):
        # On one worker each key is a segment of its own, so that rows too come from the fused op.
        keys = _ops.lib().sok_validate_csr(r.param.handle, csr.keys, csr.row_splits)
        return Feature(r.param, Csr(keys, tf.range(tf.size(keys, out_type=tf.int64) + 1)), "sum", checked=True)
    # 64-bit splits of a RaggedTensor are fit to be used as they are: the op checks them once more.
    is_flat = isinstance(r.ids, tf.RaggedTensor) and r.ids.ragged_rank == 1 and r.ids.shape.rank == 2
    checked = is_flat and r.weights is None and lookup.is_alone(r.param)
    return Feature(r.param, csr, r.combiner, checked=checked)


def _told_to_peers(params: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    tables = [param for param in params if is_embedding_variable(param)]
    return exchange.told_to_peers(*tables) if tables else contextlib.nullcontext()


def _keys_of(param: Any) -> tuple[tf.DType, str]:
    """The dtype of a table's keys, or of a variable's ids; and its name."""
    if is_embedding_variable(param):
        return param.key_dtype, param.table_name
    return plain_variables.ID_DTYPE, plain_variables.name_of(param)


def _label_of(param: Any) -> str:
    return f"{'table' if is_embedding_variable(param) else 'variable'} '{_keys_of(param)[1]}'"


def _in_one_segment(keys: tf.Tensor) -> tf.RaggedTensor:
    flat = tf.reshape(keys, [-1])
    return tf.RaggedTensor.from_row_splits(flat, tf.stack([0, tf.size(flat, out_type=tf.int64)]), validate=False)


def _padded(rows: tf.Tensor, row_splits: tf.Tensor) -> tf.Tensor:
    """Rows [N, D] as [S, T, D], zeros where a segment has fewer than T."""
    padded = tf.RaggedTensor.from_row_splits(rows, row_splits, validate=False).to_tensor()
    padded.set_shape([None, None, rows.shape[-1]])
    return padded


def _in_shape_of(keys: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    dim = rows.shape[-1]
    shaped = tf.reshape(rows, tf.concat([tf.shape(keys), [dim]], 0))
    shaped.set_shape(keys.shape.concatenate([dim]))
    return shaped


def check_per_group(size: Any) -> int | None:
    """`params_num_per_group`, if that is None or a whole number of at least 1."""
    if size is not None and (isinstance(size, bool) or not hasattr(size, "__index__") or size < 1):
        raise ValueError(f"`params_num_per_group` must be None or a whole number, at least 1. Received: {size!r}.")
    return None if size is None else int(size)


def refuse_exchange_dtype(dtype: Any) -> None:
    """`ValueError` unless `exchange_dtype` is None."""
    if dtype is not None:
        raise ValueError(
            "`exchange_dtype` is said once, by the table: sok.EmbeddingVariable(exchange_dtype=...), or the argument "
            f"of that name of a layer or column. Received: {dtype!r}."
        )


def chunks(items: list[Any], size: int | None) -> list[list[Any]]:
    """`items` in parts of at most `size`, in order; None: in one."""
    size = min(size or len(items), len(items)) or 1  # DeepRec says sys.maxsize for all
    return [items[i : i + size] for i in range(0, len(items), size)]


def _dense(argument: str, number: int, ids: Any) -> Any:
    if isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
        raise TypeError(
            f"`{argument}[{number}]` must be dense. Received: a {type(ids).__name__}. "
            "Look it up with sok.group_embedding_lookup_sparse(..., is_sequence=True)."
        )
    return ids


def _as_list(argument: str, value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"`{argument}` must be a list or tuple, one entry per feature. Received: {value!r}.")
    return list(value)


def _one_each(argument: str, value: Any, count: int) -> list[Any]:
    values = _as_list(argument, value)
    if len(values) != count:
        raise ValueError(f"`{argument}` must have one entry per table, {count}. Received: {len(values)}.")
    return values


def _check_combiners(combiners: Any, count: int) -> list[str]:
    if combiners is None:
        return ["mean"] * count
    values = [combiners] * count if isinstance(combiners, str) else list(combiners)
    if len(values) != count:
        raise ValueError(f"`combiners` must be one string or one per table, {count}. Received: {len(values)}.")
    lowered = [v.lower() if isinstance(v, str) else v for v in values]
    for i, v in enumerate(lowered):
        if v not in _COMBINERS:
            raise ValueError(f"`combiners[{i}]` must be 'sum', 'mean' or 'sqrtn'. Received: {values[i]!r}.")
    return lowered


def _check_strategy(partition_strategy: Any) -> None:
    if partition_strategy != "mod":
        raise ValueError(
            "`partition_strategy` must be 'mod': a key belongs to worker key % workers, which is what lets a table "
            f"take keys without end. Received: {partition_strategy!r}."
        )


def _check_params(params: list[Any]) -> tuple[list[Any], list[tf.DType | None]]:
    """Tables as they are, and the TensorFlow variables behind the others; what results are cast to, None: nothing."""
    checked, dtypes = [], []
    for i, param in enumerate(params):
        variable = param if is_embedding_variable(param) else plain_variables.as_plain_variable(param)
        if variable is None:
            raise TypeError(
                f"`params[{i}]` must be a sok.EmbeddingVariable or a tf.Variable that is not split into partitions. "
                f"Received: {param!r}."
            )
        checked.append(variable)
        dtypes.append(None if is_embedding_variable(param) else plain_variables.cast_to(param, variable))
    return checked, dtypes
