"""AutoGraph rewrites what users write, and nothing of ours."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api

import sok
from sok.base import autograph


@pytest.fixture
def rewritten(monkeypatch):
    """The functions that AutoGraph has rewritten, or has taken as it had rewritten them before."""
    found, convert = [], api._convert_actual

    def note(entity, context):
        found.append(entity)
        return convert(entity, context)

    monkeypatch.setattr(api, "_convert_actual", note)
    return found


def test_a_training_step_is_traced_as_we_wrote_it(rewritten):
    tables = [sok.EmbeddingVariable(2, 10, name=f"autograph_{i}", initializer="ones") for i in range(2)]
    optimizer = sok.optimizers.Adam(0.1)

    @tf.function
    def step(ids):
        with sok.DistributedGradientTape(tf.GradientTape()) as tape:
            pooled = sok.group_embedding_lookup_sparse(tables, [ids, ids], ["sum", "mean"])
            loss = tf.add_n([tf.reduce_sum(one) for one in pooled])
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
        if loss > 0:  # AutoGraph
            loss = -loss
        return loss

    assert step(tf.ragged.constant([[1, 2], [3]], tf.int64)) == -10
    assert {entity.__module__ for entity in rewritten} == {__name__}


class Clipping(tf.Module):
    def __init__(self):
        super().__init__()
        self.table = sok.EmbeddingVariable(2, 10, name="clipping", initializer="ones")

    def __call__(self, ids, training=True):
        rows = sok.lookup_sparse(self.table, ids, combiners="sum")
        if tf.reduce_max(rows) > 2.0:  # AutoGraph
            rows = tf.fill([1, 2], 2.0)
        return rows


@pytest.mark.parametrize("of", ["module", "function"])
def test_what_we_call_of_users_is_rewritten_as_ever(of, tmp_path):
    model = Clipping()
    served = model if of == "module" else lambda ids: model(ids)
    sok.export_saved_model(served, tmp_path / "1", signatures=tf.TensorSpec([None, None], tf.int64, name="ids"))
    serve = tf.saved_model.load(tmp_path / "1").signatures["serving_default"]
    for ids, expected in (([[1, 2]], 2), ([[1, 2, 3]], 2), ([[1]], 1)):
        (found,) = serve(ids=tf.constant(ids, tf.int64)).values()
        np.testing.assert_array_equal(found, np.full([1, 2], expected))


def test_functions_objects_and_methods_of_users_are_rewritten_where_autograph_is_on():
    class Absolute:
        def __call__(self, x):
            if x < 0.0:
                x = -x
            return x

    absolute = Absolute()
    for ours in (absolute, absolute.__call__, tf.function(absolute)):
        assert tf.function(lambda x, ours=ours: autograph.converting(ours)(x))(tf.constant(-2.0)) == 2
    off = tf.function(lambda x: autograph.converting(absolute)(x), autograph=False)
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        off(tf.constant(-2.0))
