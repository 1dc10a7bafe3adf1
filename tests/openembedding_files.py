"""Writes checkpoints as OpenEmbedding's servers do, for tests of what reads them.

Made from the layout in its source, 4paradigm/OpenEmbedding 1e540f5: `EmbeddingDumpOperator::apply_request` and
`EmbeddingShardDataMeta` (openembedding/server), `ModelOfflineMeta` and `EmbeddingVariableMeta` (openembedding/variable/
Meta.h), which file a shard is in from `ShardStorageDumpOperator::generate_request` of 4paradigm/parameter-server, and
numbers and texts from `Archive.h` of 4paradigm/prpc 334d77b. OpenEmbedding itself has written none of these files.
"""

import dataclasses
import json
import struct
from pathlib import Path

import numpy as np

CODES = {"float32": 0x104, "float64": 0x108}
HYPER = {
    "default": {"learning_rate": "0"},
    "sgd": {"learning_rate": "0.00999999978", "momentum": "0.899999976", "nesterov": "false"},
    "adagrad": {"learning_rate": "0.001", "initial_accumulator_value": "0.1", "epsilon": "1e-07"},
    "adam": {"learning_rate": "0.001", "beta_1": "0.899999976", "beta_2": "0.999000013", "epsilon": "1e-07"},
    "adamax": {"learning_rate": "0.001", "beta_1": "0.899999976", "beta_2": "0.999000013", "epsilon": "1e-07"},
    "adadelta": {"learning_rate": "0.001", "rho": "0.949999988", "epsilon": "1e-07"},
    "rmsprop": {"learning_rate": "0.001", "rho": "0.899999976", "momentum": "0", "epsilon": "1e-07"},
    "ftrl": {"learning_rate": "0.001", "initial_accumulator_value": "0.1", "beta": "0"},
}


@dataclasses.dataclass
class Saved:
    """A variable to be written.

    Attributes:
        keys: [n].
        rows: [n, D], of the dtype that the file is to have.
        vocabulary: 2^63: any key.
        states: [n, S]; None: saved without.
        hyper: what the text says of the optimizer; None: usual ones.
    """

    keys: np.ndarray
    rows: np.ndarray
    vocabulary: int = 2**63
    optimizer: str = "default"
    states: np.ndarray | None = None
    hyper: dict | None = None
    pmem: str = ""

    @property
    def dtype(self):
        return np.asarray(self.rows).dtype

    @property
    def meta(self):
        return {
            "datatype": self.dtype.name,
            "embedding_dim": self.rows.shape[1],
            "vocabulary_size": self.vocabulary,
        }

    def text(self):
        hyper = HYPER.get(self.optimizer, {}) if self.hyper is None else self.hyper
        lines = [f"table: {'hash' if self.vocabulary >= 2**63 else 'array'}", f"reserve_items: {len(self.keys)}"]
        lines += [f"optimizer: {self.optimizer}", "initializer: constant", f"{self.optimizer}:"]
        lines += [f"  {name}: {value}" for name, value in hyper.items()] + ["constant:", "  value: 0"]
        lines += [f"pmem_pool_path: {self.pmem}", "checkpoint: 3"] if self.pmem else []
        return "\n".join(lines).encode()


def shard(variable, number, num_shards, saved, block=2):
    """The bytes of one shard of a variable."""
    mine = np.asarray(saved.keys, np.uint64) % np.uint64(num_shards) == number
    keys, rows = np.asarray(saved.keys, np.uint64)[mine] // np.uint64(num_shards), saved.rows[mine]
    states = np.zeros([len(keys), 0], saved.dtype) if saved.states is None else saved.states[mine].astype(saved.dtype)
    num_items = 0 if saved.pmem else len(keys)
    out = struct.pack("<IiQQ", variable, CODES[saved.dtype.name], saved.rows.shape[1], saved.vocabulary)
    out += struct.pack("<Q", len(saved.text())) + saved.text()
    out += struct.pack("<iiQQ", number, num_shards, states.shape[1] * saved.dtype.itemsize, num_items)
    for start in range(0, num_items, block):
        part = slice(start, start + block)
        out += struct.pack("<Q", len(keys[part])) + keys[part].tobytes() + rows[part].tobytes() + states[part].tobytes()
    return out


def write(folder, variables, num_shards=3, nodes=2, files=2, block=2):
    """A checkpoint of several variables, storage i of each, in `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    listed = [{**saved.meta, "storage_name": str(number)} for number, saved in enumerate(variables)]
    meta = {"model_sign": "0b7c7e5e-2f0d-11ec-8d3d-0242ac130003-7", "variables": listed, "version": "0.2"}
    (folder / "model_meta").write_text(json.dumps(meta, indent=4))
    for variable, saved in enumerate(variables):
        storage = folder / str(variable)
        storage.mkdir(exist_ok=True)
        for node in range(nodes):
            for file in range(files):
                own = [s for s in range(num_shards) if s % nodes == node and s % files == file]
                data = b"".join(shard(variable, s, num_shards, saved, block) for s in own)
                (storage / f"model_{node}_{file}").write_bytes(data)
    return str(folder)


def adam_states(m, v, steps, beta_1=0.9, beta_2=0.999, dtype=np.float32):
    """[n, 2 D + 2]: powers multiplied step by step, as OpenEmbedding does."""
    powers = np.ones([len(steps), 2], dtype)
    betas = np.array([beta_1, beta_2], dtype)
    for row, count in enumerate(steps):
        for _ in range(count):
            powers[row] *= betas
    return np.concatenate([m, v, powers], 1).astype(dtype)
