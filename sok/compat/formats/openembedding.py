"""Checkpoints that OpenEmbedding's servers have written.

    DIRECTORY/model_meta                   JSON: version "0.2", and of each variable the dtype, dim, vocabulary, storage
    DIRECTORY/STORAGE/model_NODE_NUMBER    shards of variables, one behind the other

A shard is a head and blocks of rows; numbers are little-endian, without padding:

    u32 variable, its place in model_meta;  i32 dtype, 0x104 float32 or 0x108 float64;  u64 D;  u64 vocabulary
    u64 length of a text;  the text, YAML: the optimizer and its hyperparameters, among others
    i32 shard;  i32 number of shards;  u64 bytes of a row's state, 0: saved without;  u64 number of rows
    a block: u64 n;  n times u64 key;  n rows [D];  n states.  Blocks follow until all rows have come

A key of a shard stands for key * shards + shard. From a vocabulary of 2^63 on any key is legal. Each shard of a
variable is in one of the files, so that one that is not there is seen.

Source: `EmbeddingShardDataMeta` (EmbeddingShardFile.h), `EmbeddingDumpOperator::apply_request`, `ModelOfflineMeta` and
`EmbeddingVariableMeta` (Meta.h) of 4paradigm/OpenEmbedding 1e540f5; `BinaryFileArchive` (Archive.h) of 4paradigm/prpc
334d77b, which writes numbers as they lie in memory and texts behind their length.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from sok.compat.formats.columns import ChainedColumn, FileColumn, FormatError, StoredTable, reading, size_of
from sok.compat.formats.openembedding_states import STATES, rule_of, slots_from

META = "model_meta"
VERSION = "0.2"
ANY_KEY = 2**63

_DTYPES = {"float32": 0x104, "float64": 0x108}
_MAX_META, _MAX_CONFIG = 2**24, 2**20  # bytes; texts of a hundred and of some hundred are usual
_FILE = re.compile(r"model_-?\d+_\d+")
_START, _END, _COUNT = struct.Struct("<IiQQQ"), struct.Struct("<iiQQ"), struct.Struct("<Q")


@dataclass(frozen=True)
class SavedVariable:
    """What model_meta says of one."""

    number: int
    dtype: str
    dim: int
    vocabulary: int
    storage: str

    @property
    def num_keys(self) -> int | None:
        """Legal are 0 <= key < num_keys; None: all."""
        return None if self.vocabulary >= ANY_KEY else self.vocabulary

    def __str__(self) -> str:
        keys = "any key" if self.num_keys is None else f"{self.num_keys} keys"
        return f"variable {self.number} (storage {self.storage}): {self.dtype} rows of {self.dim}, {keys}"


@dataclass(frozen=True)
class Shard:
    """A head, and where its blocks are: the offset of the first key, and how many there are."""

    path: str
    offset: int
    variable: int
    config: dict[str, Any]
    number: int
    num_shards: int
    state_bytes: int
    blocks: tuple[tuple[int, int], ...]


def is_checkpoint(directory: str) -> bool:
    return os.path.isfile(os.path.join(directory, META))


def read_meta(directory: str) -> list[SavedVariable]:
    """The variables of a checkpoint, in the order in which they were made.

    Raises:
        FileNotFoundError, FormatError: there is no `model_meta`, or it is not as it should be.
    """
    path = os.path.join(directory, META)
    if size_of(path) > _MAX_META:
        raise FormatError(f"{path}: has {size_of(path)} bytes, and can have {_MAX_META}.")
    with reading(path), open(path, "rb") as file:
        text = file.read(_MAX_META)
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: is no JSON: {error}. Was it cut off?") from None
    if not isinstance(meta, dict) or not isinstance(meta.get("variables"), list):
        raise FormatError(f"{path}: must be an object that lists `variables`.")
    if meta.get("version") != VERSION:
        raise FormatError(f"{path}: `version` must be '{VERSION}'. It is {meta.get('version')!r}.")
    return [_variable(path, number, one) for number, one in enumerate(meta["variables"])]


def _variable(path: str, number: int, found: Any) -> SavedVariable:
    def value(name: str, kind: type, is_legal: Any, words: str) -> Any:
        given = found.get(name) if isinstance(found, dict) else None
        if type(given) is not kind or not is_legal(given):
            raise FormatError(f"{path}: `{name}` of variable {number} must be {words}. It is {given!r}.")
        return given

    return SavedVariable(
        number,
        value("datatype", str, _DTYPES.__contains__, " or ".join(_DTYPES)),
        value("embedding_dim", int, lambda dim: 0 < dim <= 2**20, "from 1 to 2^20"),
        value("vocabulary_size", int, lambda size: 0 < size < 2**64, "from 1 to 2^64 - 1"),
        # The name of a folder, and of no other than those in here.
        value("storage_name", str, re.compile(r"\w[\w.-]{0,254}").fullmatch, "letters and digits"),
    )


def open_variable(directory: str, variable: SavedVariable) -> OpenVariable:
    """Reads the heads of a variable's shards: where rows lie, and that all shards are there.

    Raises:
        FileNotFoundError, FormatError: a file, or a shard, is missing, there twice, cut off, or not as it should be.
    """
    folder = os.path.join(directory, variable.storage)
    with reading(folder):
        names = sorted(name for name in os.listdir(folder) if _FILE.fullmatch(name))
    shards = [shard for name in names for shard in _shards_in(os.path.join(folder, name), variable)]
    return OpenVariable(variable, _complete(folder, variable, shards))


def open_storage(directory: str, storage: str) -> tuple[StoredTable, str]:
    """The one variable of a storage, with all states of its optimizer, and our rule that has them; '': none.

    Raises:
        As `open_variable`; FormatError: there is no such storage, or it has several variables.
    """
    variables = read_meta(directory)
    found = [variable for variable in variables if variable.storage == storage]
    if len(found) != 1:
        raise FormatError(
            f"{os.path.join(directory, META)}: has {len(found)} variables in storage '{storage}'. It has: "
            f"{'; '.join(map(str, variables)) or 'none'}."
        )
    opened = open_variable(directory, found[0])
    rule = rule_of(opened.optimizer) if opened.has_state else None
    return opened.table(rule), rule or ""


@dataclass(frozen=True)
class OpenVariable:
    """A variable in files. Its shards are complete, and alike."""

    variable: SavedVariable
    shards: tuple[Shard, ...]

    @property
    def optimizer(self) -> str:
        """OpenEmbedding's word for it; 'default': none."""
        return _optimizer_of(self.shards[0])

    @property
    def hyper(self) -> dict[str, str]:
        """Of the optimizer."""
        found = self.shards[0].config.get(self.optimizer)
        return found if isinstance(found, dict) else {}

    @property
    def has_state(self) -> bool:
        return self.shards[0].state_bytes > 0

    def table(self, rule: str | None = None) -> StoredTable:
        """Keys and rows, and the slots of one of our rules, if its own states are these (`slots_from`)."""
        variable = self.variable
        dtype = np.dtype(variable.dtype).newbyteorder("<")
        size, width = variable.dim * dtype.itemsize, self.shards[0].state_bytes // dtype.itemsize
        keys: list[FileColumn] = []
        owners: list[Shard] = []
        rows, states = list(keys), list(keys)
        for shard in self.shards:
            for offset, n in shard.blocks:
                owners.append(shard)
                keys.append(FileColumn(shard.path, offset, np.dtype("<u8"), (n,)))
                rows.append(FileColumn(shard.path, offset + 8 * n, dtype, (n, variable.dim)))
                states.append(FileColumn(shard.path, offset + (8 + size) * n, dtype, (n, width)))
        columns = ChainedColumn(rows, dtype, variable.dim)
        if rule is None or not self.has_state:
            return StoredTable(_Keys(keys, owners, variable), columns)
        slots = slots_from(self.optimizer, self.hyper, rule, ChainedColumn(states, dtype, width), variable.dim)
        scalars = frozenset(name for name, column in slots.items() if column.is_scalar)
        return StoredTable(_Keys(keys, owners, variable), columns, slots, scalars)


class _Keys(ChainedColumn):
    """Keys as users know them, from those of shards."""

    def __init__(self, parts: Sequence[FileColumn], shards: Sequence[Shard], variable: SavedVariable) -> None:
        super().__init__(parts, np.dtype(np.int64))
        self._shards, self._variable = shards, variable

    def read(self, start: int, stop: int) -> np.ndarray:
        keys = np.zeros(stop - start, np.int64)
        row = start
        while row < stop:
            number = self.part_of(row)
            first, shard = int(self._starts[number]), self._shards[number]
            end = min(stop, first + self._parts[number].shape[0])
            local = self._parts[number].read(row - first, end - first)
            above = min(self._variable.vocabulary, ANY_KEY) - 1 - shard.number  # what key * shards can be
            bad = local > np.uint64(above // shard.num_shards) if above >= 0 else np.ones(len(local), bool)
            if bad.any():
                at = int(np.argmax(bad))
                raise FormatError(
                    f"{self.place(row + at)}: holds key {local[at]} of shard {shard.number} of {shard.num_shards}, "
                    f"which is {int(local[at]) * shard.num_shards + shard.number}. The file has "
                    f"{self._variable}; keys are below {min(self._variable.vocabulary, ANY_KEY)}."
                )
            keys[row - start : end - start] = local.astype(np.int64) * shard.num_shards + shard.number
            row = end
        return keys


def _optimizer_of(shard: Shard) -> str:
    return str(shard.config.get("optimizer", "default"))


def _complete(folder: str, variable: SavedVariable, shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """The shards in order, each of which is there once."""
    found: dict[int, Shard] = {}
    for shard in shards:
        first, place = shards[0], f"{shard.path}, byte {shard.offset}"
        for what in ("num_shards", "state_bytes"):
            if getattr(shard, what) != getattr(first, what):
                raise FormatError(
                    f"{place}: {what} of {variable} is {getattr(shard, what)}, and {getattr(first, what)} in "
                    f"{first.path}, byte {first.offset}. Files of two saves are in one folder."
                )
        if _optimizer_of(shard) != _optimizer_of(first):
            raise FormatError(
                f"{place}: {variable} was trained by '{_optimizer_of(shard)}', and by '{_optimizer_of(first)}' in "
                f"{first.path}, byte {first.offset}. Files of two saves are in one folder."
            )
        if shard.number in found:
            other = found[shard.number]
            raise FormatError(
                f"{place}: holds shard {shard.number} of {variable}, which is in {other.path}, byte {other.offset}, "
                "too. Files of two saves are in one folder."
            )
        found[shard.number] = shard
    if not found:
        raise FormatError(f"{folder}: holds no shard of {variable}.")
    if len(found) < shards[0].num_shards:
        missing = next(number for number in range(len(found) + 1) if number not in found)
        raise FormatError(
            f"{folder}: holds {len(found)} of {shards[0].num_shards} shards of {variable}; that of number {missing} is "
            "missing. Is a file of one of the servers missing?"
        )
    return tuple(found[number] for number in sorted(found))


class _Bytes:
    """A file being read from its beginning to its end, of which no more is asked than there is."""

    def __init__(self, path: str, file: BinaryIO, size: int) -> None:
        self.path, self._file, self.size, self.offset = path, file, size, 0

    def take(self, structure: struct.Struct, what: str) -> tuple[Any, ...]:
        return structure.unpack(self.read(structure.size, what))

    def read(self, count: int, what: str) -> bytes:
        self.expect(count, what)
        data = self._file.read(count)
        if len(data) != count:
            raise FormatError(
                f"{self.path}: byte {self.offset}: was longer when it was opened. Does somebody write it?"
            )
        self.offset += count
        return data

    def skip(self, count: int, what: str) -> None:
        self.expect(count, what)
        self._file.seek(count, os.SEEK_CUR)
        self.offset += count

    def expect(self, count: int, what: str) -> None:
        if count > self.size - self.offset:
            raise FormatError(
                f"{self.path}: byte {self.offset}: {what} of {count} bytes was to come, and the file ends after "
                f"{self.size - self.offset}. It was cut off."
            )

    def wrong(self, offset: int, words: str) -> FormatError:
        return FormatError(f"{self.path}: byte {offset}: {words}")


def _shards_in(path: str, variable: SavedVariable) -> Iterator[Shard]:
    """Those of a variable; the others of the file are read over."""
    with reading(path), open(path, "rb") as opened:
        file = _Bytes(path, opened, size_of(path))
        while file.offset < file.size:
            shard = _shard(file, variable)
            if shard.variable == variable.number:
                yield shard


def _shard(file: _Bytes, variable: SavedVariable) -> Shard:
    offset = file.offset
    number, dtype, dim, vocabulary, length = file.take(_START, "the head of a shard")
    expected = (_DTYPES[variable.dtype], variable.dim, variable.vocabulary)
    if number == variable.number and (dtype, dim, vocabulary) != expected:
        raise file.wrong(
            offset,
            f"the shard says dtype {dtype:#x}, dim {dim} and vocabulary {vocabulary}; {META} says {expected[0]:#x}, "
            f"{variable.dim} and {variable.vocabulary}.",
        )
    if dtype not in _DTYPES.values() or not 0 < dim <= 2**20:
        raise file.wrong(offset, f"the shard of variable {number} says dtype {dtype:#x} and dim {dim}.")
    if length > _MAX_CONFIG:
        raise file.wrong(offset + _START.size - 8, f"a text of {length} bytes; {_MAX_CONFIG} are the most.")
    config = _config(file, file.read(length, "a text"))
    at = file.offset
    shard, num_shards, state_bytes, num_rows = file.take(_END, "the head of a shard")
    if not 0 <= shard < num_shards:
        raise file.wrong(at, f"a shard of number {shard} of {num_shards}.")
    item = dtype & 0xFF
    _check_state(file, at + 8, config, dim, item, state_bytes)
    blocks, row_bytes = [], 8 + dim * item + state_bytes
    while num_rows:
        at = file.offset
        (n,) = file.take(_COUNT, f"the length of a block ({num_rows} rows of shard {shard} are to come)")
        if not 0 < n <= num_rows:
            raise file.wrong(at, f"a block of {n} rows, where {num_rows} are to come.")
        blocks.append((file.offset, n))
        file.skip(n * row_bytes, f"a block of {n} rows")
        num_rows -= n
    return Shard(file.path, offset, number, config, shard, num_shards, state_bytes, tuple(blocks))


def _check_state(file: _Bytes, at: int, config: dict[str, Any], dim: int, item: int, state_bytes: int) -> None:
    if "pmem_pool_path" in config:
        raise file.wrong(
            at,
            f"the rows are not in the file: persist_server_model left them in persistent memory, in "
            f"{config['pmem_pool_path']}. Have OpenEmbedding restore them there, and save_server_model write them.",
        )
    optimizer = str(config.get("optimizer", "default"))
    if state_bytes % item:
        raise file.wrong(at, f"a state of {state_bytes} bytes for each row is no whole number of {item} bytes.")
    if state_bytes and optimizer in STATES and state_bytes != STATES[optimizer].floats(dim) * item:
        raise file.wrong(
            at,
            f"a state of {state_bytes} bytes for each row; '{optimizer}' has {STATES[optimizer].floats(dim) * item} "
            f"for rows of {dim}.",
        )


def _config(file: _Bytes, text: bytes) -> dict[str, Any]:
    """The text of a shard: `key: value`, and `key:` before such lines further in."""
    found: dict[str, Any] = {}
    inner: dict[str, Any] = found
    lines = text.decode("utf-8", "replace").split("\n")
    for line in [line for line in lines if line.strip() not in ("", "~", "{}", "null")]:
        parts = re.fullmatch(r"( *)([\w.]+):(?: (.*)| ?)", line)
        if parts is None or (parts[1] and inner is found):
            raise file.wrong(file.offset - len(text), f"the text of a shard has the line {line!r}, not 'key: value'.")
        key, value = parts[2], (parts[3] or "").strip().strip("\"'")
        if parts[1]:
            inner[key] = value
        elif value:
            found[key], inner = value, found
        else:
            found[key] = inner = {}
    return found
