"""Rows in use on a GPU under other names, and in what is made of them: DeepRec, SOK v2, exports, erasure, layers."""

import json

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok import deeprec
from sok.tools import cli
from tests.sok import test_deeprec_options as of_deeprec
from tests.sok.export_models import Rows, ids_spec

from .conftest import GPU
from .tier_cases import CPU, DIM, FILL, LITTLE, assert_close, new_table

test_deeprecs_options = of_deeprec.test_options_say_policies
test_deeprecs_tables_live_as_long = of_deeprec.test_a_table_lives_as_long_as_deeprecs
test_deeprecs_tables_admit_and_evict = of_deeprec.test_a_table_admits_and_evicts_by_weight
test_deeprecs_columns = of_deeprec.test_columns_hand_options_on_to_their_tables
test_sok_v2_filters = of_deeprec.test_sok_v2_filters_by_the_admission_of_its_tables
job = of_deeprec.job


@pytest.fixture(autouse=True)
def on_the_gpu(job):
    with tf.device(GPU):
        yield


def train(table, optimizer, keys):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(tf.nn.embedding_lookup(table, tf.constant(keys)) - 1.0))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])


def read(table, keys):
    """Without new rows: `sparse_read` of these makes some."""
    return sok.group_embedding_lookup([table], [tf.constant(keys)], training=False)[0]


@pytest.mark.parametrize("kind", ["HBM_DRAM", "HBM_DRAM_SSDHASH"])
def test_deeprecs_tables_of_several_levels_train_more_rows_than_the_first_holds(tmp_path, kind):
    path = str(tmp_path) if "SSD" in kind else None
    option = deeprec.EmbeddingVariableOption(
        storage_option=deeprec.StorageOption(kind, path, [LITTLE, 2**24]), filter_option=deeprec.CounterFilter(2)
    )
    table = deeprec.get_embedding_variable("levels", DIM, ev_option=option, capacity=2 * FILL)
    optimizer = sok.optimizers.Adagrad(0.1)
    for first in [*range(0, FILL, 100)] * 2:
        train(table, optimizer, np.arange(first, first + 100))
    stats = table.stats()
    assert stats["rows"] == stats["made"] == FILL == stats["refused"] > 2 * stats["gpu_cache_rows"]
    assert ("bytes_in_file" in stats) == (kind == "HBM_DRAM_SSDHASH")
    before = read(table, np.arange(FILL)).numpy()
    train(table, optimizer, np.arange(FILL - 100, FILL))
    assert_close(read(table, np.arange(FILL - 100)), before[:-100])


def test_dynamic_variables_of_sok_v2_have_rows_in_use_there(tmp_path):
    ids = [np.random.default_rng(step).integers(0, FILL, [50, 3]) for step in range(8)]
    told = []
    for device in (CPU, GPU):
        with tf.device(device):
            options = sok.TableOptions(
                storage=sok.Storage(gpu_bytes=LITTLE), eviction=sok.Eviction(older_than=4, every=2), seed=3
            )
            variable = sok.DynamicVariable(DIM, table=options, var_type="hybrid", name=f"of_v2_{device[1:4]}")
            optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.01))
            for batch in ids:
                with tf.GradientTape() as tape:
                    pooled = sok.lookup_sparse(variable, tf.RaggedTensor.from_tensor(batch), combiners="sum")
                    loss = tf.reduce_sum(tf.square(pooled - 1.0))
                optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
            keys, rows = sok.export(variable)
            order = np.argsort(keys.numpy())
            told.append([keys.numpy()[order], rows.numpy()[order], variable.stats()["evicted"]])
            sok.dump(str(tmp_path), variable, optimizer)
            sok.assign(variable, keys, np.zeros(rows.shape, np.float32))
            sok.load(str(tmp_path), variable, optimizer)
            np.testing.assert_array_equal(read(variable, keys.numpy()), rows)
    assert "GPU" in variable.handle.device and variable.stats()["gpu_misses"] > 400
    for found, expected in zip(told[1], told[0], strict=True):
        assert_close(found, expected)
    assert told[0][2] > 100


def test_an_erased_row_is_nowhere(tmp_path, capsys):
    table, optimizer = new_table(GPU, name="users", admission=sok.Admission(after=2)), sok.optimizers.Adam(0.1)
    table.assign(np.arange(FILL), np.ones([FILL, DIM], np.float32))
    for _ in range(2):
        train(table, optimizer, np.arange(50))
    train(table, optimizer, np.array([4711]))
    sok.save(tmp_path / "saved", [table], [optimizer])
    sok.export_saved_model(Rows(table), tmp_path / "exported", signatures=ids_spec(tf.int64))
    assert cli.main(["find", "7", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["found"]) == 2
    report = sok.erase([table], [7, 4711, 5000], checkpoints=[tmp_path / "saved"], exports=[tmp_path / "exported"])
    assert report.is_complete and report.nowhere == (5000,), str(report)
    assert [(place.kind, place.found) for place in report.places][:2] == [("table", 2), ("checkpoint", 2)]
    assert cli.main(["find", "7", str(tmp_path)]) == 1
    expected = table.sparse_read(np.arange(FILL))
    sok.restore(tmp_path / "saved", [table], [optimizer])
    assert table.stats()["rows"] == FILL - 1 and table.stats()["candidates"] == 0
    assert_close(table.sparse_read(np.arange(FILL)), expected)
    train(table, optimizer, np.array([7]))
    assert table.stats()["candidates"] == 1


def test_exports_hold_what_was_trained(tmp_path):
    table, optimizer = new_table(GPU), sok.optimizers.Adagrad(0.1)
    for first in range(0, FILL, 100):
        train(table, optimizer, np.arange(first, first + 100))
    report = sok.export_saved_model(Rows(table), tmp_path / "exported", signatures=ids_spec(tf.int64))
    assert report.tables[0].num_rows == FILL
    with tf.device(CPU):
        loaded = tf.saved_model.load(tmp_path / "exported").signatures["serving_default"]
        found = loaded(ids=tf.reshape(tf.range(FILL + 50, dtype=tf.int64), [1, -1]))["output_0"]
    assert_close(found[0], table.sparse_read(np.arange(FILL + 50)))


TERMS = {
    "penalty": {"embeddings_regularizer": tf.keras.regularizers.L2(0.03)},
    "penalty and constraint": {
        "embeddings_regularizer": tf.keras.regularizers.L1L2(0.02, 0.03),
        "embeddings_constraint": tf.keras.constraints.MaxNorm(0.1, axis=1),
    },
}


@pytest.mark.parametrize("terms", TERMS)
def test_penalties_and_constraints_act_as_on_the_cpu(terms):
    told = []
    for device in (CPU, GPU):
        with tf.device(device):
            options = sok.TableOptions(storage=sok.Storage(gpu_bytes=60_000))
            normal = tf.keras.initializers.RandomNormal(stddev=0.1, seed=3)
            layer = sok.Embedding(600, DIM, normal, sparse_as_dense_size=0, table=options, **TERMS[terms])
            layer.build([None, 3])
            table, optimizer = layer.embedding_variable, sok.optimizers.SGD(0.1)
            losses = []
            for step in range(9):
                ids = tf.constant(np.random.default_rng(step).integers(0, 60, [20, 3]) + 60 * step)
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(layer(ids) ** 2) + (tf.add_n(layer.losses) if layer.losses else 0.0)
                optimizer.apply_gradients([(tape.gradient(loss, table), table)])
                losses.append(float(loss))
            told.append([np.array(losses), *(part.numpy() for part in table.export())])
    assert table.stats()["gpu_misses"] > 300 > table.stats()["gpu_cache_rows"]
    for found, expected in zip(told[1], told[0], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_tables_in_use_there_keep_their_placement():
    with pytest.raises(ValueError, match="'stays' is on a GPU.*sok.save"):
        new_table(GPU, name="stays").reshard(sok.row_wise(hash=True))
