"""`group_embedding_column_scope`: columns made inside are looked up as one group."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from sok.base.patching import Here, Patch
from sok.base.types import DTypeLike
from sok.compat.feature_column import input_layer
from sok.compat.feature_column.grouping import Group
from sok.compat.feature_column.tf_columns import GROUPED
from sok.lookup.group import check_per_group, refuse_exchange_dtype

_groups = Here()


def current_group() -> Group | None:
    """The group of the innermost scope that this thread is in."""
    return _groups.value


@contextlib.contextmanager
def group_embedding_column_scope(
    name: str | None = None, params_num_per_group: int | None = None, *, exchange_dtype: DTypeLike | None = None
) -> Iterator[Group]:
    """A scope: embedding columns that are made inside are looked up as one group, wherever they are used.

    `tf.compat.v1.feature_column.input_layer` and tf_keras' `DenseFeatures` look such columns up in one op (for tables
    of ours on several workers: by one exchange) instead of some ten ops for each. Results are the same: the columns in
    the usual order, the same variables under the same names (so checkpoints fit), the same values. TensorFlow's
    rules hold: ids below 0 are left out and so are, unless the combiner is 'sum', weights that are not
    positive; a sample without ids is zeros. With `use_safe_embedding_lookup=False` weights count as they are, an id
    below 0 is an error, and a sample without ids is zeros also at the end of the batch, where TensorFlow gives fewer
    rows.

    In the scope `tf.feature_column.embedding_column`, `tf.feature_column.shared_embeddings`,
    `tf.compat.v1.feature_column.shared_embedding_columns` and `sok.feature_column.embedding_column` make grouped
    columns. Other columns, and those made outside, do not change. So are grouped ones with `max_norm` or
    `ckpt_to_load_from`, in variables that are split into partitions, in `linear_model` and, with variables, in layers
    of sequences. (`sok.deeprec.sequence_input_layer` looks the tables of a group up together.)

    Args:
        name: of the scope of the ops.
        params_num_per_group: how many columns one op, or exchange, has at most. None: all of them.
        exchange_dtype: None. `sok.feature_column.embedding_column(exchange_dtype=...)` says in which dtype rows travel.

    Yields:
        The group. Several scopes make several groups; inside another one, the inner scope counts.

    Raises:
        ValueError: `params_num_per_group` is no whole number of at least 1; an `exchange_dtype`.

    Not collective; a layer whose columns have tables of ours is.

    TensorFlow's classes are changed as long as a scope is open, only in the threads that are in one. The first scope
    also replaces what `input_layer` calls by a version of our own; `sok.feature_column.uninstall()` takes that back.

    Example:
        >>> import sok, tensorflow as tf
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...     with sok.group_embedding_column_scope():
        ...         item = tf.feature_column.categorical_column_with_identity("item", 10)
        ...         columns = [tf.feature_column.embedding_column(item, 4)]
        ...     net = tf.compat.v1.feature_column.input_layer({"item": [[1], [2]]}, columns)
        ...     session.run(tf.compat.v1.global_variables_initializer())
        ...     session.run(net).shape
        (2, 4)

    Source: `group_embedding_column_scope` of DeepRec.
    """
    refuse_exchange_dtype(exchange_dtype)
    group = Group(name, check_per_group(params_num_per_group))
    input_layer.install()
    with _patch.begun(), _groups.inside(group):
        yield group


def in_group(column_class: type, group: Group, kind: type | None = None) -> type:
    """The class of the columns of `column_class` in a group; `kind` is that of such columns without one.

    Columns are tuples, which TensorFlow compares by what they hold and Keras copies, so that the group can neither be
    in them nor beside them. What is written of a model names the class by the name it has without a group.
    """
    members = {"_sok_group": group, "_sok_kind": kind or column_class, "__module__": column_class.__module__}
    return type(column_class.__name__, (column_class,), {**members, "__reduce__": _reduce})


def _reduce(column: Any) -> tuple[Any, ...]:
    # A pickle cannot name the class, which nobody finds by its name.
    return restore, (column._sok_kind, column._sok_group, tuple(column))


def restore(kind: type, group: Group, fields: tuple[Any, ...]) -> Any:
    """The grouped column of a pickle, or of a copy."""
    input_layer.install()
    return in_group(GROUPED.get(kind, kind), group, kind)(*fields)


def _grouping(plain: type, make: Any) -> Any:
    """What makes, in place of `make`, grouped columns in threads that are in a scope."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        group = current_group()
        if cls is not plain or group is None:
            return make(cls, *args, **kwargs)
        return make(in_group(GROUPED[plain], group, plain), *args, **kwargs)

    return new


_patch = Patch(lambda: [(plain, "__new__", functools.partial(_grouping, plain)) for plain in GROUPED])
