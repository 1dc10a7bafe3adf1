"""`sok.save` and `sok.restore` in sessions of tf.compat.v1."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import prepare, read_manifest

v1 = tf.compat.v1


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def trained(keys=(1, 2, 5)):
    """A table, its optimizer and a step."""
    table = sok.EmbeddingVariable(2, 100, name="item", seed=5)
    rows = table.sparse_read(tf.constant(keys, tf.int64))
    fill = table.assign(np.array(keys), np.ones([len(keys), 2], np.float32))
    optimizer = sok.optimizers.Adam(v1.get_variable("rate", initializer=0.5))
    gradient = tf.IndexedSlices(tf.ones([3, 2]), tf.range(3, dtype=tf.int64))
    with tf.control_dependencies([fill] if fill is not None else []):
        step = optimizer.apply_gradients([(gradient, table)])
    return table, optimizer, rows, fill, step


def test_a_session_saves_and_restores(tmp_path, graph):
    table, optimizer, rows, fill, step = trained()
    export = table.export()
    with v1.Session(graph=graph) as session:
        session.run(v1.global_variables_initializer())
        session.run(fill)
        session.run(step)
        before = session.run(export)
        sok.save(tmp_path, table, optimizer, session=session)
        session.run(step)
        session.run(v1.assign(optimizer.variables[1], 0.25))
        assert not np.array_equal(session.run(export)[1], before[1])
        with session.as_default():
            sok.restore(tmp_path, table, optimizer)
        after = session.run(export)
        order = np.argsort(after[0])
        np.testing.assert_array_equal(after[0][order], before[0])
        np.testing.assert_array_equal(after[1][order], before[1])
        assert session.run([optimizer.iterations, optimizer.variables[1]]) == [1, 0.5]
    assert read_manifest(tmp_path).optimizers[0].iterations == 1


def test_another_session_goes_on_from_the_checkpoint(tmp_path, graph):
    table, optimizer, rows, fill, step = trained()
    prepare([table])
    init = v1.global_variables_initializer()
    graph.finalize()
    with v1.Session(graph=graph) as session:
        session.run(init)
        session.run(fill)
        session.run(step)
        before = session.run(rows)
        sok.save(tmp_path, table, optimizer, session=session)
    with v1.Session(graph=graph) as session:
        session.run(init)
        assert not np.array_equal(session.run(rows), before)
        sok.restore(tmp_path, table, optimizer, session=session)
        np.testing.assert_array_equal(session.run(rows), before)
        for _ in range(2):  # a second restore finds nothing in its way
            sok.restore(tmp_path, table, optimizer, session=session)


def test_a_damaged_file_changes_no_table(tmp_path, graph):
    table, optimizer, rows, fill, step = trained()
    with v1.Session(graph=graph) as session:
        session.run(v1.global_variables_initializer())
        session.run(fill)
        sok.save(tmp_path, table, session=session)
        (file,) = tmp_path.glob("*.shard")
        file.write_bytes(file.read_bytes()[:-1])
        session.run(step)
        before = session.run(rows)
        with pytest.raises(tf.errors.DataLossError, match=f"{file.name}: at offset"):
            sok.restore(tmp_path, table, session=session)
        np.testing.assert_array_equal(session.run(rows), before)


def test_a_session_is_needed(tmp_path):
    table = sok.EmbeddingVariable(2, 100, name="item")
    with pytest.raises(RuntimeError, match="pass it as `session`"):
        sok.save(tmp_path, table)


def test_a_graph_that_was_saved_is_freed(tmp_path):
    def program():
        with tf.Graph().as_default() as graph:
            layer = sok.get_embedding(
                "freed", sok.DistributedEmbedding, combiner="sum", max_vocabulary_size_per_gpu=10,
                embedding_vec_size=2, slot_num=1, max_nnz=1,
            )  # fmt: skip
            table = sok.EmbeddingVariable(2, 100, name="freed", seed=5)
            with v1.Session() as session:
                session.run(table.assign([1], [[1.0, 2.0]]))
                sok.save(tmp_path, table, session=session)
            assert sok.get_embedding("freed") is layer
        return [weakref.ref(what) for what in (graph, table, layer)]

    kept = program()
    gc.collect()
    assert [reference() for reference in kept] == [None, None, None]
