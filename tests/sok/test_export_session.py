"""Graphs of v1 exported from their sessions."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sok

v1 = tf.compat.v1


def test_a_script_with_v2_behaviour_off_exports_what_its_monitored_session_has(forked, tmp_path, stranger):
    script = Path(__file__).with_name("export_session_script.py")
    path = str(tmp_path / "1")
    done = forked.run(script, tmp_path / "runs", path)
    assert done.status == 0, done.stderr[-3000:]
    table, predicted = done.stdout.splitlines()[-2:]
    assert table == "table 'pooled': 5 rows of 4 as float32, 120 bytes"
    inputs = {
        "pairs_indices": np.array([[0, 0], [1, 0], [2, 0], [3, 1]]),
        "pairs_values": np.array([1, 2, 3, -4]),
        "pairs_dense_shape": np.array([4, 3]),
        "ids": np.array([[1, 77], [-9, 4]]),
    }
    for in_session in (True, False):
        answer = stranger.predict(path, inputs, signature="click", in_session=in_session)["logits"]
        np.testing.assert_allclose(answer.ravel(), [float(x) for x in predicted.split()[1:]], rtol=0, atol=1e-6)


def graph_with(name, **options):
    """A table, ids and their rows, in the default graph."""
    table = sok.EmbeddingVariable(2, 10, name=name, initializer="normal", **options)
    ids = v1.placeholder(tf.int64, [None], name="ids")
    return table, ids, sok.group_embedding_lookup([table], [ids])[0]


@pytest.mark.parametrize("hashed", [True, False])
def test_several_signatures_share_variables_and_conditions_are_kept(tmp_path, stranger, hashed):
    with tf.Graph().as_default(), v1.Session() as session:
        table, ids, rows = graph_with("shared", hashed=hashed)
        scale = v1.get_variable("scale", initializer=3.0)
        # With v2 control flow a function, and without ops of ours inside.
        scaled = tf.cond(tf.size(ids) > 1, lambda: rows * scale, lambda: -rows)
        unused = v1.get_variable("unused", [1000])
        session.run([scale.initializer, unused.initializer, table.assign([1, 2], [[1.0, 2.0], [3.0, 4.0]])])
        signatures = {"rows": ({"ids": ids}, {"rows": rows}), "scaled": ({"ids": ids}, {"x": scaled, "ids": ids})}
        report = sok.export_saved_model(session, tmp_path / "1", signatures=signatures, default="zeros")
        expected = session.run(rows, {ids: [5]}) if not hashed else np.zeros([1, 2])
    assert report.tables[0].num_rows == (2 if hashed else 10) and report.signatures == ("rows", "scaled")
    predict = lambda ids, name: stranger.predict(tmp_path / "1", {"ids": np.array(ids)}, name, in_session=True)  # noqa: E731
    assert predict([2, 1], "rows")["rows"].tolist() == [[3, 4], [1, 2]]
    assert predict([2, 1], "scaled")["x"].tolist() == [[9, 12], [3, 6]]
    assert predict([2], "scaled")["x"].tolist() == [[-3, -4]]
    np.testing.assert_array_equal(predict([5], "rows")["rows"], expected)
    names = [name for name, _ in tf.train.list_variables(str(tmp_path / "1" / "variables" / "variables"))]
    assert "scale" in names and "unused" not in names


def test_a_session_is_exported_from_outside_its_graph(tmp_path, stranger):
    with tf.Graph().as_default() as graph:
        table, ids, rows = graph_with("outside")
        scaled = rows * v1.get_variable("scale", initializer=3.0)
        ready = [v1.global_variables_initializer(), table.assign([1], [[1.0, 2.0]])]
    with v1.Session(graph=graph) as session:
        session.run(ready)
    session = v1.Session(graph=graph)
    session.run(ready)
    assert v1.get_default_graph() is not graph
    sok.export_saved_model(session, tmp_path / "1", signatures={"scaled": ({"ids": ids}, {"x": scaled})})
    assert stranger.predict(tmp_path / "1", {"ids": np.array([1])}, "scaled", in_session=True)["x"].tolist() == [[3, 6]]


def test_what_cannot_be_exported_is_said(tmp_path):
    with tf.Graph().as_default(), v1.Session() as session:
        table, ids, rows = graph_with("refused")
        hidden = v1.get_variable("hidden", [2], collections=[])
        session.run(hidden.initializer)
        v1.disable_control_flow_v2()
        try:
            loop = tf.while_loop(lambda x: tf.reduce_sum(x) < 9, lambda x: x + 1, [rows])
        finally:
            v1.enable_control_flow_v2()
        given = {"ids": ids}
        cases = [
            (
                {"a": (given, {"y": rows + tf.cast(table.size(), tf.float32)})},
                ValueError,
                "only sok has, Sok>TableSize",
            ),
            ({"a": ({"x": tf.constant(1)}, {"y": rows})}, ValueError, "placeholder 'ids'"),
            ({"a": (given, {"y": loop})}, ValueError, "loop of v1"),
            ({"a": (given, {"y": rows + hidden})}, ValueError, "'hidden' .*collections"),
            ({"a": rows}, TypeError, "dict .*pairs of dicts"),
            (None, TypeError, "dict .*pairs of dicts"),
            ({"__a": (given, {"y": rows})}, ValueError, "do not begin with '__'"),
            (
                {"a": (given, {"y": tf.RaggedTensor.from_row_lengths(rows, [1]), "y_values": rows})},
                ValueError,
                "name 'y_values', of 'y' and of 'y_values'",
            ),
        ]
        for signatures, error, text in cases:
            with pytest.raises(error, match=text):
                sok.export_saved_model(session, tmp_path / "1", signatures=signatures)
    assert not list(tmp_path.iterdir())
