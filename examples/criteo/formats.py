"""What the columns of a click log mean: Criteo's tab-separated format, and Avazu's CSV.

A format turns the located fields of some lines into numbers. The keys of all columns share one table, so each key
carries its column in the high bits; a missing value is a value of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from criteo.fields import load_words, mix64, parse_hex, parse_int


@dataclasses.dataclass(frozen=True)
class Parsed:
    """Some lines of a click log as numbers; `bad_field` is the first unreadable field of each line, or -1."""

    labels: np.ndarray  # [n] float32, 0 or 1
    dense: np.ndarray  # [n, num_dense] float32
    keys: np.ndarray  # [n, num_sparse] int64
    bad_field: np.ndarray  # [n] int64


@dataclasses.dataclass(frozen=True)
class LogFormat:
    """The shape of one kind of click log and the function that reads its fields."""

    name: str
    separator: str
    columns: tuple[str, ...]
    num_dense: int
    num_sparse: int
    has_header: bool
    has_counts: bool
    """Whether the dense columns are counts, log(1 + x), -1 where missing."""
    parse: Callable[[np.ndarray, np.ndarray, np.ndarray], Parsed]


def criteo_keys(columns: np.ndarray, values: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Return the int64 table keys of Criteo values: column, then one bit for "missing", then the 32 bits of the value.

    The key of a missing value ends in its column number, so that these very frequent keys spread over the workers.
    """
    columns = columns.astype(np.int64)
    low = np.where(missing, columns, values.astype(np.int64))
    return (columns << 33) | (missing.astype(np.int64) << 32) | low


def _first_bad(fields_legal: np.ndarray) -> np.ndarray:  # [n, fields] -> [n]
    bad = ~fields_legal
    return np.where(bad.any(axis=1), bad.argmax(axis=1), -1)


def _parse_criteo(
    buffer: np.ndarray,  # [bytes] uint8
    starts: np.ndarray,  # [n, 40] int64
    lengths: np.ndarray,  # [n, 40] int64
) -> Parsed:
    n = starts.shape[0]
    numbers, numbers_legal = parse_int(buffer, starts[:, :14].ravel(), lengths[:, :14].ravel())
    numbers, numbers_legal = numbers.reshape(n, 14), numbers_legal.reshape(n, 14)
    labels = numbers[:, 0]
    numbers_legal[:, 0] &= (lengths[:, 0] == 1) & (labels <= 1)
    # log(1 + x) tames counts that reach millions; the few negative ones count as 0; a missing one is told apart by -1.
    dense = np.log1p(np.maximum(numbers[:, 1:], 0).astype(np.float32))
    dense[lengths[:, 1:14] == 0] = -1.0
    values, values_legal = parse_hex(buffer, starts[:, 14:].ravel(), lengths[:, 14:].ravel())
    keys = criteo_keys(np.arange(26)[None, :], values.reshape(n, 26), lengths[:, 14:] == 0)
    legal = np.concatenate([numbers_legal, values_legal.reshape(n, 26)], axis=1)
    return Parsed(labels.astype(np.float32), dense, keys, _first_bad(legal))


def _parse_avazu(
    buffer: np.ndarray,  # [bytes] uint8
    starts: np.ndarray,  # [n, 24] int64
    lengths: np.ndarray,  # [n, 24] int64
) -> Parsed:
    n = starts.shape[0]
    legal = np.ones((n, 24), dtype=bool)
    labels, legal[:, 1] = parse_int(buffer, starts[:, 1], lengths[:, 1])
    legal[:, 1] &= (lengths[:, 1] == 1) & (labels <= 1)
    # `hour` is YYMMDDHH. Only the hour of the day says something about another day's clicks.
    hours, legal[:, 2] = parse_int(buffer, starts[:, 2], lengths[:, 2])
    legal[:, 2] &= lengths[:, 2] == 8
    angle = (hours % 100).astype(np.float32) * np.float32(2 * np.pi / 24)
    legal[:, 3:] = lengths[:, 3:] <= 8
    words = load_words(buffer, starts[:, 3:].ravel(), np.minimum(lengths[:, 3:], 8).ravel()).reshape(n, 21)
    words = np.concatenate([(hours % 100).astype(np.uint64)[:, None], words], axis=1)  # [n, 22]
    columns = np.arange(22, dtype=np.int64)[None, :]
    keys = (columns << 48) | (mix64(words) >> np.uint64(16)).astype(np.int64)
    return Parsed(labels.astype(np.float32), np.stack([np.sin(angle), np.cos(angle)], axis=1), keys, _first_bad(legal))


CRITEO = LogFormat(
    name="criteo",
    separator="\t",
    columns=("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))),
    num_dense=13,
    num_sparse=26,
    has_header=False,
    has_counts=True,
    parse=_parse_criteo,
)

AVAZU = LogFormat(
    name="avazu",
    separator=",",
    columns=(
        *("id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain"),
        *("app_category", "device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
        *(f"C{i}" for i in range(14, 22)),
    ),
    num_dense=2,
    num_sparse=22,
    has_header=True,
    has_counts=False,
    parse=_parse_avazu,
)

FORMATS = {log_format.name: log_format for log_format in (CRITEO, AVAZU)}
