"""`sok.Storage` and DeepRec's `StorageOption` as values, and as properties of tables."""

import copy
import json
import pathlib
import pickle

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok import deeprec
from tests.messages import saying

VALUES = [
    (sok.Storage(memory_bytes=2**24, path="/ssd/rows"), "Storage(memory_bytes=16777216, path='/ssd/rows')"),
    (sok.Storage(memory_bytes=100, path="rows", tables=3), "Storage(memory_bytes=100, path='rows', tables=3)"),
]


@pytest.fixture(autouse=True)
def job():
    sok.shutdown()
    sok.Init()
    yield
    deeprec.uninstall()
    sok.shutdown()


@pytest.mark.parametrize(("value", "shown"), VALUES)
def test_storages_are_values(value, shown):
    assert repr(value) == shown and eval(f"sok.{shown}") == value
    config = json.loads(json.dumps(value.get_config()))
    for other in (sok.Storage(**config), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert other == value and hash(other) == hash(value)
    with pytest.raises(AttributeError):
        value.path = "elsewhere"
    options = sok.TableOptions(storage=value)
    assert sok.TableOptions.from_config(json.loads(json.dumps(options.get_config()))) == options
    assert options != sok.TableOptions() and sok.TableOptions(storage=config) == options


def test_tables_share_a_budget_in_equal_parts():
    shared = sok.Storage(memory_bytes=10**7 + 1, path=pathlib.Path("rows"), tables=2)
    assert shared.path == "rows"
    assert shared.to_attributes() == {
        "storage_memory_bytes": 5 * 10**6,
        "storage_path": str(pathlib.Path.cwd() / "rows"),
    }


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sok.Storage(memory_bytes=0, path="a"), ("`memory_bytes`", "Received: 0")),
        (lambda: sok.Storage(memory_bytes=1.5, path="a"), ("`memory_bytes`", "whole number", "1.5")),
        (lambda: sok.Storage(memory_bytes=2**70, path="a"), ("`memory_bytes`", str(2**70))),
        (lambda: sok.Storage(memory_bytes=1, path=""), ("`path`", "folder", "Received: ''")),
        (lambda: sok.Storage(memory_bytes=1, path=3), ("`path`", "folder", "Received: 3")),
        (lambda: sok.Storage(memory_bytes=1, path=b"a"), ("`path`", "folder", "b'a'")),
        (lambda: sok.Storage(memory_bytes=1, path="a\0b"), ("`path`", "folder")),
        (lambda: sok.Storage(memory_bytes=9, path="a", tables=0), ("`tables`", "Received: 0")),
        (lambda: sok.Storage(memory_bytes=9, path="a", tables=10), ("`memory_bytes`", "10 tables", "9")),
        (lambda: sok.TableOptions(storage=3), ("`storage`", "sok.Storage", "Received: 3")),
        (lambda: sok.TableOptions(storage=sok.Admission(after=2)), ("`storage`", "Admission(after=2)")),
    ],
)
def test_what_storages_are_not(make, words):
    with pytest.raises(ValueError, match=saying(*words)):
        make()


@pytest.mark.parametrize("kind", ["DRAM_SSDHASH", 12, deeprec.StorageType.DRAM_LEVELDB, 4, "PMEM_LIBPMEM", 101])
def test_deeprecs_kinds_with_a_level_below_memory_are_storages(kind):
    option = deeprec.StorageOption(kind, "/ssd", [2**20, 2**30], deeprec.CacheStrategy.LRU)
    assert option.storage == sok.Storage(memory_bytes=2**20, path="/ssd")
    assert deeprec.StorageOption(kind, "/ssd").storage.memory_bytes == 2**30


@pytest.mark.parametrize("kind", [None, "INVALID", deeprec.StorageType.DRAM, 1])
def test_deeprecs_kinds_in_memory_are_none(kind):
    assert deeprec.StorageOption(kind).storage is None


def test_deeprecs_kinds_on_a_gpu_say_how_much_of_it_rows_in_use_take():
    kinds = deeprec.StorageType
    assert deeprec.StorageOption(kinds.HBM_DRAM).storage == sok.Storage(gpu_bytes=2**30)
    assert deeprec.StorageOption("HBM_DRAM", storage_size=[2**20, 2**31]).storage == sok.Storage(gpu_bytes=2**20)
    three = deeprec.StorageOption(kinds.HBM_DRAM_SSDHASH, "/ssd", [2**20, 2**21])
    assert three.storage == sok.Storage(gpu_bytes=2**20, memory_bytes=2**21, path="/ssd")
    assert deeprec.StorageOption(102, "/ssd", [5]).storage == sok.Storage(gpu_bytes=5, memory_bytes=2**30, path="/ssd")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: deeprec.StorageOption("SSD", "/ssd"), ValueError, ("`storage_type`", "DRAM_SSDHASH", "'SSD'")),
        (lambda: deeprec.StorageOption(99, "/ssd"), ValueError, ("`storage_type`", "99")),
        (lambda: deeprec.StorageOption("DRAM_SSDHASH"), ValueError, ("`storage_path`", "DRAM_SSDHASH")),
        (lambda: deeprec.StorageOption(storage_path="/ssd"), ValueError, ("`storage_type`", "'/ssd'")),
        (lambda: deeprec.StorageOption("DRAM_SSDHASH", "/ssd", 5), ValueError, ("`storage_size`", "list", "5")),
        (lambda: deeprec.StorageOption("DRAM_SSDHASH", "/ssd", [0]), ValueError, ("`storage_size`", "0")),
        (lambda: deeprec.StorageOption(102), ValueError, ("`storage_path`", "HBM_DRAM_SSDHASH")),
    ],
)
def test_what_deeprecs_option_does_not_take(make, error, words):
    with pytest.raises(error, match=saying(*words)):
        make()


def test_a_deeprec_table_and_a_column_lie_over_files(tmp_path):
    deeprec.install()
    option = tf.EmbeddingVariableOption(
        storage_option=tf.StorageOption(deeprec.StorageType.DRAM_SSDHASH, str(tmp_path), [2**21])
    )
    table = tf.compat.v1.get_embedding_variable("over", 4, ev_option=option, capacity=20_000)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.range(20_000, dtype=tf.int64)))
    sok.optimizers.SGD(0.1).apply_gradients([(tape.gradient(loss, table), table)])
    stats = table.stats()
    assert stats["rows"] == 20_000 and stats["bytes_in_memory"] <= 2**21 and list(tmp_path.glob("over_r0.*.rows"))
    item = tf.feature_column.categorical_column_with_embedding("item", dtype=tf.int64, ev_option=option)
    assert tf.feature_column.embedding_column(item, 2).table.storage == table.options.storage
    assert type(item).from_config(json.loads(json.dumps(item.get_config()))) == item
    assert np.isfinite(table.sparse_read([3]).numpy()).all()
