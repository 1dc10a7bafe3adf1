"""What several workers with tables on the emulated GPU do together. Run by test_workers.py."""

import os

import numpy as np
import pytest
import tensorflow as tf

import sok

from .conftest import EMULATED_GPU

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
    table = table_on(EMULATED_GPU, "shared")
    table.assign(KEYS, values_of(KEYS))
    sok.save(folder, [table])
    mine = content_of(table)
    assert sorted(mine) == [key for key in KEYS if key % world.size == world.rank]
    table.erase(KEYS[:20])
    sok.restore(folder, [table])
    assert content_of(table) == mine
    return str(folder), mine


def check_what_one_worker_cannot_do_is_told_to_all(world, tmp_path_of_rank):
    folder = tmp_path_of_rank.parent / "refused"
    table = table_on(EMULATED_GPU if world.rank == 1 else "/CPU:0", "mixed")
    table.assign(KEYS, values_of(KEYS))
    sok.save(folder, [table])
    before = sorted(os.listdir(folder))
    for how in ("incremental", "asynchronous"):
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"rank 1 of 2.*is on a GPU"):
            sok.save(folder, [table], **{how: True})
        assert sorted(os.listdir(folder)) == before
    sok.save(folder, [table])
    assert sorted(content_of(table)) == [key for key in KEYS if key % world.size == world.rank]
