"""Errors of our own that several rooms raise or tell their peers."""

from __future__ import annotations

from typing import TypeVar

Kind = TypeVar("Kind", bound=type[Exception])

# By name, those that all workers raise if one does (sok/job/agreement.py). Each is made from a text.
OURS: dict[str, type[Exception]] = {}


def raised_on_all(kind: Kind) -> Kind:
    """Decorates a class of errors that all workers raise if one does."""
    OURS[kind.__name__] = kind
    return kind


@raised_on_all
class FormatError(ValueError):
    """A file is damaged, or not what it should be. The message names file and place."""


# Checkpoints and native exports have other names for it.
CheckpointError = DamagedFileError = FormatError


@raised_on_all
class TableFull(Exception):
    """The rows do not fit into a worker's share of the table. All workers raise `tf.errors.ResourceExhaustedError`."""


def refuse_strings(dtype: object, label: str) -> None:
    """`ValueError` if ids have the dtype of strings: of TensorFlow, NumPy or Keras."""
    is_numpy = getattr(dtype, "kind", "") in tuple("SUT")
    if is_numpy or getattr(dtype, "name", dtype) == "string":
        raise ValueError(
            f"{label}: the ids are strings, and keys of tables are integers. Hash them first: "
            "sok.data.hash_columns(values, names), which keeps columns that share a table apart, or "
            "tf.strings.to_hash_bucket_fast(values, num_buckets) for one column."
        )
