"""What is to be placed: tables, how often they are looked up, and the dense part beside them. Checked here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from sok.base.types import KerasLayer, KerasModel
from sok.planning.distinct import expected_distinct

if TYPE_CHECKING:
    from sok.planning.counting import Counts

_KEY_BYTES = 8
_SLAB_BYTES = 2 << 20  # cpu/row_store.cc
_INDEX_BYTES = 10  # of a hashed table, beside the key: 7 to 13, docs/performance.md


@dataclasses.dataclass(frozen=True)
class Table:
    """One table and what a sample looks up in it.

    Args:
        rows: rows that it has, or is expected to grow to.
        dim: floats of a row.
        hotness: ids per sample of each feature that reads it: [1, 10] is two features, of one id and of ten.
        skew: exponent of the power law of its ids; 0: all alike.
        distinct: measured share of different keys among the ids of one batch, in (0, 1]; None: as `skew` says.
        pooled: whether the ids of a sample are summed to one row; False: each id gives one.
        hashed: whether keys are any numbers, found by hash, not row numbers.
        name: unique among the tables of a model.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> table = Table(rows=1_000_000, dim=16, hotness=[1, 10])
        >>> table.ids, table.features
        (11.0, 2)
    """

    rows: int
    dim: int
    hotness: Sequence[float] = (1,)
    skew: float = 1.05
    distinct: float | None = None
    pooled: bool = True
    hashed: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hotness", tuple(self.hotness))
        for name in ("rows", "dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` of table {self.name!r} must be at least 1: {getattr(self, name)}.")
        if any(not 0 <= ids < float("inf") for ids in self.hotness):
            raise ValueError(f"`hotness` of table {self.name!r} must be at least 0 and finite: {self.hotness}.")
        if not 0 <= self.skew < float("inf"):
            raise ValueError(f"`skew` of table {self.name!r} must be at least 0 and finite: {self.skew}.")
        if self.distinct is not None and not 0 < self.distinct <= 1:
            raise ValueError(f"`distinct` of table {self.name!r} must be in (0, 1] or None: {self.distinct}.")

    @property
    def ids(self) -> float:
        """Per sample, of all features."""
        return float(sum(self.hotness))

    @property
    def features(self) -> int:
        return len(self.hotness)

    @property
    def outputs(self) -> float:
        """Rows that a sample gets, after pooling."""
        return self.features if self.pooled else self.ids

    @property
    def row_bytes(self) -> int:
        return 4 * self.dim

    def distinct_keys(self, samples: float, batch: float) -> float:
        """Different keys of `samples` samples; `distinct` was measured in `batch` of them."""
        ids = samples * self.ids
        found = expected_distinct(ids, self.rows, self.skew)
        if self.distinct is None or not ids:
            return found
        measured = self.distinct * batch * self.ids
        return min(float(self.rows), ids, found * measured / expected_distinct(batch * self.ids, self.rows, self.skew))

    def bytes_per_row(self, slot_floats: int) -> int:
        """Memory of a row and its slots, and of its key: a record is padded to 16 bytes."""
        return _padded(self.dim + slot_floats) + (_KEY_BYTES + _INDEX_BYTES if self.hashed else 0)

    def bytes_of(self, rows: int, slot_floats: int) -> int:
        """Memory of so many rows: tables take it in slabs, each a power of two of rows whose weights fit 2 MiB."""
        slab = 1 << max(0, (_SLAB_BYTES // _padded(self.dim)).bit_length() - 1)
        index = rows * (_KEY_BYTES + _INDEX_BYTES) if self.hashed else 0
        return -(-rows // slab) * slab * _padded(self.dim + slot_floats) + index


def _padded(floats: int) -> int:
    """Bytes of a record."""
    return 4 * (floats if floats < 4 else -(-floats // 4) * 4)


@dataclasses.dataclass(frozen=True)
class Model:
    """Tables, and the dense part that all workers have a copy of."""

    tables: tuple[Table, ...]
    dense_parameters: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        names = [table.name for table in self.tables]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"names of tables must be unique. More than one is called {repeated[0]!r}.")


Plannable: TypeAlias = (
    "Model | Counts | Iterable[Table | Mapping[str, Any] | KerasLayer] | KerasModel | Mapping[str, Any] | str | Path"
)


def model_of(tables: Plannable, model: str | None = None) -> Model:
    """Takes whatever says what is to be placed.

    Args:
        tables: a `Model`; the `Counts` of `sok.count_lookups`; a list of `Table`, of dicts with its arguments, or of
            Keras `Embedding` layers; a Keras model, whose embedding layers are taken; a dict, or the path of a JSON
            file, with `tables`, or with `models`, each of which has `tables`, as in benchmarks/synthetic_models.json.
        model: which of `models`.

    Raises:
        ValueError: it says none of these, or a table is not in order.
    """
    if isinstance(tables, Model):
        return tables
    if hasattr(tables, "as_model"):
        return tables.as_model()
    if isinstance(tables, (str, Path)):
        try:
            tables = json.loads(Path(tables).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{tables} cannot be read as JSON: {error}") from error
    if isinstance(tables, Mapping):
        return _of_json(tables, model)
    if hasattr(tables, "layers") and hasattr(tables, "count_params"):
        return _of_keras(tables)
    if not isinstance(tables, Iterable):
        raise ValueError(f"`tables` must be tables, layers, a Keras model or a JSON file. Received: {tables!r}.")
    return Model(_named([_table_of(table) for table in tables]))


def _of_json(content: Mapping[str, Any], model: str | None) -> Model:
    if "models" in content:
        known = content["models"]
        if model not in known:
            raise ValueError(f"`model` must be one of {', '.join(known)}. Received: {model!r}.")
        return _of_json({"skew": content.get("exponent", 1.05), "name": model, **known[model]}, None)
    if not isinstance(content.get("tables"), list):
        raise ValueError("a JSON file must have `tables`, a list, or `models`.")
    tables = []
    for entry in content["tables"]:
        arguments = {"skew": content.get("skew", 1.05), **entry}
        count = arguments.pop("num_tables", arguments.pop("count", 1))
        arguments.pop("shared", None)
        if "width" in arguments:
            arguments["dim"] = arguments.pop("width")
        tables += [_table_of(arguments)] * count
    numbers = content.get("num_numerical_features", content.get("numbers", 0))
    return Model(_named(tables), _dense_parameters(content, tables, numbers), content.get("name", ""))


def _dense_parameters(content: Mapping[str, Any], tables: Sequence[Table], numbers: int) -> int:
    if "dense_parameters" in content:
        return int(content["dense_parameters"])
    hidden = content.get("mlp_sizes", content.get("mlp"))
    if hidden is None:
        return 0
    width = int(sum(table.outputs * table.dim for table in tables))
    if content.get("interact_stride"):
        width = -(-width // content["interact_stride"])
    sizes = [width + numbers, *hidden, 1]
    return sum((before + 1) * after for before, after in zip(sizes, sizes[1:], strict=False))


def _of_keras(model: Any) -> Model:
    layers = list(model._flatten_layers()) if hasattr(model, "_flatten_layers") else list(model.layers)
    embeddings = [layer for layer in layers if _is_embedding(layer)]
    if not embeddings:
        raise ValueError(f"model {model.name!r} has no layer with `input_dim` and `output_dim`: nothing to place.")
    held = sum(int(layer.count_params()) for layer in embeddings if layer.built)
    dense = int(model.count_params()) - held if model.built else 0
    return Model(_named([_table_of(layer) for layer in embeddings]), dense, model.name)


def _is_embedding(layer: Any) -> bool:
    return hasattr(layer, "input_dim") and hasattr(layer, "output_dim") and hasattr(layer, "get_config")


def _table_of(value: Any) -> Table:
    if isinstance(value, Table):
        return value
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - {field.name for field in dataclasses.fields(Table)})
        missing = [name for name in ("rows", "dim") if name not in value]
        if unknown or missing:
            wrong = f"has no {missing[0]!r}" if missing else f"has {unknown[0]!r}, which is not known"
            raise ValueError(f"table {dict(value)} {wrong}.")
        return Table(**value)
    if _is_embedding(value):
        if value.input_dim is None:
            raise ValueError(f"layer {value.name!r} has no `input_dim`: say by a `Table` how many rows it will have.")
        pooled = getattr(value, "combiner", None) is not None
        return Table(value.input_dim, value.output_dim, pooled=pooled, name=value.name)
    raise ValueError(f"a table must be a `Table`, a dict or an Embedding layer. Received: {value!r}.")


def _named(tables: Sequence[Table]) -> tuple[Table, ...]:
    return tuple(
        table if table.name else dataclasses.replace(table, name=f"table_{i}") for i, table in enumerate(tables)
    )
