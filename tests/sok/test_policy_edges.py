"""Where admission and eviction meet other things: graphs, erasure, files of Keras."""

import keras
import tensorflow as tf

import sok

v1 = tf.compat.v1


def train(table, keys, optimizer):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant(keys, tf.int64)))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])


def test_a_probability_of_one_admits_all_and_keeps_histories():
    table = sok.EmbeddingVariable(2, 100, name="all", admission=sok.Admission(probability=1.0))
    train(table, [1, 2, 2], sok.optimizers.SGD(0.1))
    assert table.stats()["rows"] == 2 and table.history([1, 2])[0].numpy().tolist() == [1, 1]


def test_a_table_of_a_graph_is_saved_and_restored_from_outside_of_it(tmp_path):
    with tf.Graph().as_default() as graph:
        table = sok.EmbeddingVariable(2, 100, name="of_a_graph", admission=sok.Admission(after=2))
        ids = v1.placeholder(tf.int64, [None])
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)
        update = sok.optimizers.SGD(0.1).apply_gradients([(tf.gradients(loss, [table])[0], table)])
        seen = table.history(tf.constant([1, 2, 3], tf.int64))
        session = v1.Session(graph=graph)
        session.run(v1.global_variables_initializer())
    session.run(update, {ids: [1, 2]})
    session.run(update, {ids: [2]})
    sok.save(tmp_path, table, (), session=session)
    before = [part.tolist() for part in session.run(seen)]
    session.run(update, {ids: [1, 3]})
    sok.restore(tmp_path, table, (), session=session)
    assert [part.tolist() for part in session.run(seen)] == before == [[1, 2, 0], [1, 2, 0]]
    session.close()


def test_a_key_that_waits_is_erased_everywhere_and_told(tmp_path):
    table = sok.EmbeddingVariable(2, 100, name="waiting", admission=sok.Admission(after=2))
    train(table, [1, 2], sok.optimizers.SGD(0.1))
    train(table, [2], sok.optimizers.SGD(0.1))
    sok.save(tmp_path, table)
    report = sok.erase([table], [1, 2, 9], checkpoints=[tmp_path])
    assert report.nowhere == (9,) and report.is_complete
    assert [(place.kind, place.found) for place in report.places] == [("table", 2), ("checkpoint", 2)]
    sok.restore(tmp_path, table)
    assert table.stats()["rows"] == table.stats()["candidates"] == 0


def test_another_table_may_be_called_candidates(tmp_path):
    table = sok.EmbeddingVariable(2, 100, name="ads", admission=sok.Admission(after=2))
    other = sok.EmbeddingVariable(2, 100, name="ads/candidates")
    train(table, [1], sok.optimizers.SGD(0.1))
    other.assign([5], [[1.0, 2.0]])
    sok.save(tmp_path, [table, other])
    assert {delta.table for delta in sok.deltas(tmp_path)} == {"ads", "ads/candidates"}
    assert sok.erase([other], [5], checkpoints=[tmp_path]).places[1].found == 1
    other.assign([6], [[1.0, 2.0]])
    sok.restore(tmp_path, [table, other])
    assert int(other.size()) == 0 and table.stats()["candidates"] == 1


def test_what_keras_files_bring_is_counted_anew(tmp_path):
    layer = sok.DistributedEmbedding(
        "sum", 100, 2, slot_num=1, max_nnz=1, table=sok.TableOptions(admission=sok.Admission(after=2))
    )
    model = keras.Sequential([keras.Input([1], dtype="int64"), layer, keras.layers.Flatten()])
    table, optimizer = layer.embedding_variable, sok.optimizers.SGD(0.1)
    for keys in ([1, 2], [2]):
        train(table, keys, optimizer)
    model.save_weights(tmp_path / "model.weights.h5")
    train(table, [3], optimizer)
    model.load_weights(tmp_path / "model.weights.h5")
    stats = table.stats()
    assert (stats["rows"], stats["candidates"]) == (1, 0)
    assert table.history([1, 2, 3])[0].numpy().tolist() == [0, 2, 0]
