"""What several workers with tables on the emulated GPU do together. Run by test_workers.py."""

import numpy as np
import tensorflow as tf

import sok

from .conftest import GPU

KEYS = np.arange(40)


def table_on(device, name):
    with tf.device(device):
        return sok.EmbeddingVariable(3, 100, seed=1, name=name)


def values_of(keys):
    return np.stack([keys, keys + 0.5, -keys], 1).astype(np.float32)


def content_of(table):
    return dict(zip(*(tensor.numpy().tolist() for tensor in table.export()), strict=True))


def check_tables_are_saved_and_restored_by_all(world, tmp_path_of_rank):
    sok.Init(global_batch_size=8)
    folder = tmp_path_of_rank.parent / "saved"
    table = table_on(GPU, "shared")
    table.assign(KEYS, values_of(KEYS))
    sok.save(folder, [table])
    mine = content_of(table)
    assert sorted(mine) == [key for key in KEYS if key % world.size == world.rank]
    table.erase(KEYS[:20])
    sok.restore(folder, [table])
    assert content_of(table) == mine
    return str(folder), mine


def check_changes_are_saved_beside_training_by_all(world, tmp_path_of_rank):
    folder = tmp_path_of_rank.parent / "chain"
    table = table_on(GPU if world.rank == 1 else "/CPU:0", "mixed")
    table.assign(KEYS, values_of(KEYS))
    sok.save(folder, [table])
    table.assign(KEYS[:10], np.zeros([10, 3], np.float32))
    table.erase(KEYS[20:30])
    mine = content_of(table)
    saving = sok.save(folder, [table], incremental=True, asynchronous=True)
    table.assign(KEYS, np.ones([40, 3], np.float32))
    saving.result()
    files = sok.checkpoint.read_manifest(folder).files
    assert [(file.rows, file.erased) for file in files] == [(5, 5)] * world.size
    sok.restore(folder, [table])
    assert content_of(table) == mine
    sok.save(folder, [table], incremental=True)
    assert [file.rows for file in sok.checkpoint.read_manifest(folder).files] == [0] * world.size
