"""DeepRec's CheckpointOption and InitializerOption, and what SOK v2 says of rows that come and go."""

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok import deeprec
from sok.lookup.lookup import lookup_rows
from sok.table.state import slot_sets
from tests.messages import saying

KEYS = np.array([3, -7, 2**40])


@pytest.fixture(autouse=True)
def job():
    sok.shutdown()
    sok.Init()
    yield
    sok.shutdown()


@pytest.fixture
def old(tmp_path):
    """The folder of a checkpoint, and its rows and Adagrad's slots."""
    table, optimizer = sok.EmbeddingVariable(2, 100, name="old"), sok.optimizers.Adagrad(0.5, name="of_rows")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(lookup_rows(table, tf.constant(KEYS)))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    sok.save(tmp_path, table, optimizer)
    return tmp_path, table.sparse_read(tf.constant(KEYS)).numpy(), table.slots(optimizer.slot_set)[1].numpy()


def option(folder, **more):
    return deeprec.EmbeddingVariableOption(ckpt=deeprec.CheckpointOption(folder, "old", **more))


def test_a_table_begins_with_the_rows_of_another_checkpoint(old):
    folder, rows, slots = old
    table = deeprec.get_embedding_variable("new", 2, ev_option=option(folder))
    np.testing.assert_array_equal(table.sparse_read(tf.constant(KEYS)).numpy(), rows)
    (kept,) = slot_sets(table)
    np.testing.assert_array_equal(table.slots(kept.name)[1].numpy(), slots)
    bare = deeprec.get_embedding_variable("bare", 2, ev_option=option(folder, slots=False))
    np.testing.assert_array_equal(bare.sparse_read(tf.constant(KEYS)).numpy(), rows)
    assert not slot_sets(bare)
    with pytest.raises(ValueError, match=saying("holds no table", "'absent'", "'old'")):
        deeprec.get_embedding_variable(
            "absent", 2, ev_option=deeprec.EmbeddingVariableOption(ckpt=deeprec.CheckpointOption(folder))
        )


def test_a_table_begins_anew_with_rows_of_a_data_source(old, tmp_path):
    folder, rows, slots = old
    given = sok.EmbeddingVariable(2, 100, name="given", seed=3)
    given.assign(KEYS, rows)
    for table in (
        deeprec.get_embedding_variable("source", 2, init_data_source=(folder, "old")),
        deeprec.get_embedding_variable("named", 2, ev_option=source_option(folder, "old")),
    ):
        assert sorted(table.export()[0].numpy().tolist()) == sorted(KEYS.tolist())
        np.testing.assert_array_equal(table.sparse_read(KEYS).numpy(), given.sparse_read(KEYS).numpy())
        (kept,) = slot_sets(table)
        np.testing.assert_array_equal(table.slots(kept.name)[1].numpy(), slots)
        assert int(table.step) == int(given.step) == 0
    sok.shutdown()  # with its tables their names
    sok.Init()
    bare = deeprec.get_embedding_variable("old", 2, ev_option=source_option(folder, slots=False))
    np.testing.assert_array_equal(bare.sparse_read(KEYS).numpy(), rows)
    assert not slot_sets(bare)
    # What comes next is a save of all rows, though the folder holds this table's.
    with pytest.warns(UserWarning, match="all rows are written"):
        sok.save(folder, bare, incremental=True)
    bare.assign(KEYS[:1], [[8.0, 9.0]])
    sok.save(folder, bare, incremental=True)
    again = deeprec.get_embedding_variable("again", 2, ev_option=option(folder))
    np.testing.assert_array_equal(again.sparse_read(KEYS).numpy(), [[8.0, 9.0], *rows[1:]])


def source_option(folder, *name, **more):
    return deeprec.EmbeddingVariableOption(ckpt=deeprec.CheckpointOption(None, *name, init_data_source=folder, **more))


def policies(**more):
    return deeprec.EmbeddingVariableOption(
        filter_option=deeprec.CounterFilter(2), evict_option=deeprec.GlobalStepEvict(9), **more
    )


def test_what_policies_have_counted_stays_in_the_old_table(tmp_path):
    table, optimizer = deeprec.get_embedding_variable("counted", 2, ev_option=policies()), sok.optimizers.SGD(0.5)
    for ids in ([5, 6], [5, 7], [5, 8]):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(lookup_rows(table, tf.constant(ids, tf.int64)))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    sok.save(tmp_path, table)
    told = {"rows": 1, "candidates": 3}
    option = deeprec.CheckpointOption(tmp_path, "counted")
    on = deeprec.get_embedding_variable("on", 2, ev_option=policies(ckpt=option))
    anew = deeprec.get_embedding_variable("anew", 2, init_data_source=(tmp_path, "counted"), ev_option=policies())
    for new, step, occurred, waiting in ((on, 3, 3, told["candidates"]), (anew, 0, 0, 0)):
        assert int(new.step) == step and new.history([5])[0].numpy().tolist() == [occurred]
        assert new.stats()["rows"] == told["rows"] and new.stats()["candidates"] == waiting
        np.testing.assert_array_equal(new.sparse_read([5]).numpy(), table.sparse_read([5]).numpy())


def test_what_cannot_be_a_data_source_is_said(old, tmp_path):
    folder, _, _ = old
    for arguments, words in (
        ({"embedding_dim": 3, "init_data_source": (folder, "old")}, ("dim 3", "'old'", "has 2")),
        ({"key_dtype": tf.int32, "init_data_source": (folder, "old")}, ("key dtype int32", "'old'", "has int64")),
        ({"init_data_source": folder}, ("holds no table 'refused", "'old'")),
        ({"init_data_source": folder, "ev_option": option(folder)}, ("`init_data_source` or a `ckpt`, not both",)),
    ):
        with pytest.raises(ValueError, match=saying(*words)):
            deeprec.get_embedding_variable("refused", **{"embedding_dim": 2, **arguments})
    with pytest.raises(FileNotFoundError, match="nowhere"):
        deeprec.get_embedding_variable("refused", 2, init_data_source=tmp_path / "nowhere")


@pytest.mark.parametrize("source", ["ckpt", "data"])
def test_tables_of_a_graph_have_both_sources(old, source):
    folder, rows, _ = old
    given = {"ev_option": option(folder)} if source == "ckpt" else {"init_data_source": (folder, "old")}
    with tf.Graph().as_default():
        table = deeprec.get_embedding_variable(f"graph_of_{source}", 2, **given)
        read, step = table.sparse_read(tf.constant(KEYS)), table.step
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=[deeprec.WarmStartHook()]) as session:
            np.testing.assert_array_equal(session.run(read), rows)
            assert session.run(step) == int(source == "ckpt")


def test_a_session_reads_them_once_unless_it_has_trained(old):
    folder, rows, _ = old
    for always in (False, True):
        with tf.Graph().as_default():
            step = tf.compat.v1.train.get_or_create_global_step()
            table = deeprec.get_embedding_variable(
                f"graph_{always}", 2, ev_option=option(folder, always_load_from_specific_ckpt=always)
            )
            read = table.sparse_read(tf.constant(KEYS))
            found = tf.nn.embedding_lookup(table, tf.constant(KEYS))
            (gradient,) = tf.gradients(tf.reduce_sum(found), table)
            train = sok.optimizers.SGD(1.0).apply_gradients([(gradient, table)])
            with tf.compat.v1.train.MonitoredTrainingSession(hooks=[deeprec.WarmStartHook()]) as session:
                np.testing.assert_array_equal(session.run(read), rows)
                session.run([train, step])
                raw = session._tf_sess()
                assert deeprec.warm_start(raw) == int(always)
                np.testing.assert_allclose(session.run(read), rows - (0.0 if always else 1.0), rtol=1e-6)


def init_option(**said):
    return deeprec.EmbeddingVariableOption(
        filter_option=deeprec.CounterFilter(2), init_option=deeprec.InitializerOption(**said)
    )


def test_initializer_options_say_what_rows_hold_and_what_others_read():
    ev_option = init_option(initializer=tf.ones_initializer(), default_value_no_permission=-1.0)
    table = deeprec.get_embedding_variable("init", 2, ev_option=ev_option)
    assert lookup_rows(table, tf.constant([7])).numpy().tolist() == [[-1.0, -1.0]]
    assert table.options.admission == sok.Admission(after=2, unadmitted=-1.0)
    table.assign([8], [[3.0, 3.0]])
    assert table.sparse_read(tf.constant([8, 9])).numpy().tolist() == [[3.0, 3.0], [-1.0, -1.0]]
    for rows in (64, 4096):
        scaled = deeprec.get_embedding_variable(
            f"scaled_{rows}", 2, ev_option=init_option(initializer="he_uniform", default_value_dim=rows)
        )
        assert scaled._initializer_spec.b == pytest.approx((6.0 / rows) ** 0.5)


def test_sok_v2_evicts_and_admits():
    for strategy, eviction in (
        ("kLru", sok.Eviction.least_recent(5000)),
        (1, sok.Eviction.least_frequent(5000)),
        ("kCustomized", None),
    ):
        table = sok.DynamicVariable(2, max_capacity=5000, evict_strategy=strategy, name="hybrid")
        assert table.options.eviction == eviction
        assert (table.placement == sok.row_wise(hash=True)) == (eviction is not None)
    table = sok.DynamicVariable(2, filter_ratio=0.25)
    sok.lookup_sparse(table, tf.RaggedTensor.from_row_lengths(np.arange(1000), [1000]), use_low_frequency_filter=True)
    assert 150 < table.stats()["rows"] < 350
    with pytest.raises(ValueError, match=saying("`filter_ratio`", "0")):
        sok.DynamicVariable(2, filter_ratio=0)
    with pytest.raises(ValueError, match=saying("`evict_strategy`", "kLru", "'often'")):
        sok.DynamicVariable(2, evict_strategy="often")
    with pytest.raises(ValueError, match=saying("`evict_strategy`", "`max_capacity`")):
        sok.DynamicVariable(2, evict_strategy="kLru")
