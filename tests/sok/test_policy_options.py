"""`sok.Admission` and `sok.Eviction` as values, and as properties of tables and layers."""

import copy
import json
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.layers import for_keras
from tests.messages import saying
from tests.sok.policy_cases import counts_of

VALUES = [
    (sok.Admission(after=3), "Admission(after=3)"),
    (sok.Admission(probability=0.25), "Admission(probability=0.25)"),
    (sok.Eviction(older_than=1000), "Eviction(older_than=1000, every=125)"),
    (sok.Eviction(older_than=3), "Eviction(older_than=3, every=1)"),
    (sok.Eviction(norm_below=0.01, every=50), "Eviction(norm_below=0.01, every=50)"),
    (sok.Eviction(older_than=80, norm_below=0.01), "Eviction(older_than=80, norm_below=0.01, every=10)"),
    (sok.Admission(after=2, bloom=(10**6, 0.01)), "Admission(after=2, bloom=(1000000, 0.01))"),
    (sok.Eviction(max_rows=10**5, every=4), "Eviction(max_rows=100000, every=4)"),
    (
        sok.Eviction(max_rows=10**5, keep="frequent", half_life=9, every=4),
        "Eviction(max_rows=100000, keep='frequent', half_life=9, every=4)",
    ),
]


@pytest.mark.parametrize(("value", "shown"), VALUES)
def test_policies_are_values(value, shown):
    assert repr(value) == shown and eval(f"sok.{shown}") == value
    config = json.loads(json.dumps(value.get_config()))
    for other in (type(value)(**config), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert other == value and hash(other) == hash(value)
    with pytest.raises(AttributeError):
        value.after = 1
    assert all((value == other) == (shown == theirs) for other, theirs in VALUES)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sok.Admission(), ("`after`", "`probability`")),
        (lambda: sok.Admission(after=2, probability=0.5), ("`after`", "`probability`", "2", "0.5")),
        (lambda: sok.Admission(after=0), ("`after`", "[1, ", "Received: 0")),
        (lambda: sok.Admission(after=2.5), ("`after`", "whole number", "Received: 2.5")),
        (lambda: sok.Admission(after=True), ("`after`", "whole number", "Received: True")),
        (lambda: sok.Admission(probability=0.0), ("`probability`", "Received: 0.0")),
        (lambda: sok.Admission(probability=1.5), ("`probability`", "Received: 1.5")),
        (lambda: sok.Admission(probability=float("nan")), ("`probability`", "Received: nan")),
        (lambda: sok.Admission(probability="all"), ("`probability`", "Received: 'all'")),
        (lambda: sok.Eviction(), ("`older_than`", "`norm_below`")),
        (lambda: sok.Eviction(every=3), ("`older_than`", "`norm_below`")),
        (lambda: sok.Eviction(older_than=0), ("`older_than`", "Received: 0")),
        (lambda: sok.Eviction(older_than=2.5), ("`older_than`", "whole number", "Received: 2.5")),
        (lambda: sok.Eviction(older_than=8, every=0), ("`every`", "Received: 0")),
        (lambda: sok.Eviction(norm_below=0.5), ("`every`", "`older_than`")),
        (lambda: sok.Eviction(norm_below=0.0, every=1), ("`norm_below`", "Received: 0.0")),
        (lambda: sok.Eviction(norm_below=float("inf"), every=1), ("`norm_below`", "Received: inf")),
        (lambda: sok.Eviction(norm_below="small", every=1), ("`norm_below`", "Received: 'small'")),
        (lambda: sok.Admission(bloom=(10**6, 0.01), probability=0.5), ("`bloom`", "`after`")),
        (lambda: sok.Admission(after=256, bloom=(10**6, 0.01)), ("`after`", "[1, 255]", "256")),
        (lambda: sok.Admission(after=2, bloom=10**6), ("`bloom`", "(keys, rate)", "1000000")),
        (lambda: sok.Admission(after=2, bloom=(100, 0.01)), ("`bloom[0]`", "65536", "100")),
        (lambda: sok.Admission(after=2, bloom=(10**6, 0.9)), ("`bloom[1]`", "0.5", "0.9")),
        (lambda: sok.Admission(after=2, bloom=(2**40, 1e-9)), ("`bloom`", "bytes")),
        (lambda: sok.Eviction(max_rows=100, every=1), ("`max_rows`", "65536", "100")),
        (lambda: sok.Eviction(max_rows=10**5), ("`every`", "`older_than`")),
        (lambda: sok.Eviction(max_rows=10**5, keep="all", every=1), ("`keep`", "'recent'", "'all'")),
        (lambda: sok.Eviction(older_than=9, keep="frequent"), ("`keep`", "`max_rows`")),
        (lambda: sok.Eviction(max_rows=10**5, half_life=3, every=1), ("`half_life`", "'frequent'")),
        (
            lambda: sok.TableOptions(admission=sok.Admission(after=2, bloom=(10**6, 0.01))),
            ("`admission`", "row_wise()", "row_wise(hash=True)"),
        ),
        (
            lambda: sok.TableOptions(eviction=sok.Eviction(max_rows=10**5, every=1)),
            ("`eviction`", "row_wise()", "row_wise(hash=True)"),
        ),
        (lambda: sok.TableOptions(admission=3), ("`admission`", "sok.Admission", "Received: 3")),
        (lambda: sok.TableOptions(eviction=3), ("`eviction`", "sok.Eviction", "Received: 3")),
        (lambda: sok.TableOptions(admission=sok.Eviction(older_than=3)), ("`admission`", "Eviction(older_than=3")),
        (
            lambda: sok.TableOptions(hashed=False, admission=sok.Admission(after=2)),
            ("`admission`", "hashed"),
        ),
        (
            lambda: sok.TableOptions(placement=sok.column_wise(2), eviction=sok.Eviction(norm_below=0.1, every=1)),
            ("`norm_below`", "column_wise"),
        ),
    ],
)
def test_what_policies_are_not(make, words):
    with pytest.raises(ValueError, match=saying(*words)):
        make()


def test_tables_are_made_with_policies():
    admission, eviction = sok.Admission(after=3), sok.Eviction(older_than=10)
    options = sok.TableOptions(admission=admission, eviction=eviction)
    assert sok.TableOptions.from_config(json.loads(json.dumps(options.get_config()))) == options
    assert options != sok.TableOptions(admission=admission) and hash(options) != hash(sok.TableOptions())
    table = sok.EmbeddingVariable(2, 10, admission=admission, eviction=eviction)
    assert (table.options.admission, table.options.eviction) == (admission, eviction)
    before = sok.TableOptions().get_config()
    del before["admission"], before["eviction"]  # a file of before there were policies
    assert sok.TableOptions.from_config(before) == sok.TableOptions()
    with pytest.raises(ValueError, match=saying("`admission` is given twice")):
        sok.EmbeddingVariable(2, 10, options=options, admission=admission)


@pytest.mark.parametrize("which_keras", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_a_layer_trains_in_fit_with_policies(which_keras):
    table = sok.TableOptions(admission=sok.Admission(after=2), eviction=sok.Eviction(older_than=4, every=1))
    layer = for_keras(which_keras).DistributedEmbedding("sum", 100, 4, slot_num=1, max_nnz=2, table=table)
    inputs = which_keras.Input([1, 2], dtype="int64")
    model = which_keras.Sequential([inputs, layer, which_keras.layers.Flatten(), which_keras.layers.Dense(1)])
    model.compile(sok.DistributedOptimizer(which_keras.optimizers.Adam(0.1)), "mse")
    ids = np.array([[1, 2], [1, 3], [4, 5], [4, 4], [6, 7], [1, 7], [8, 8], [9, 9]])[:, None, :]
    model.fit(ids, np.ones([len(ids), 1]), batch_size=1, epochs=1, shuffle=False, verbose=0)
    model.evaluate(ids, np.ones([len(ids), 1]), batch_size=1, verbose=0)
    model.predict(ids, batch_size=1, verbose=0)
    variable = layer.embedding_variable
    # 1 came with steps 1, 2 and 6, 4 with 3 and 4, 7 with 5 and 6, the others once: 4 left after step 8.
    assert set(variable.export()[0].numpy().tolist()) == {1, 7}
    assert counts_of(variable) == {"rows": 2, "candidates": 3, "made": 3, "refused": 11, "evicted": 1}
    assert [np.asarray(one).tolist() for one in variable.history([1, 7, 6])] == [[3, 2, 1], [6, 6, 5]]
    copied = type(layer).from_config(layer.get_config())
    copied(ids)
    assert copied.embedding_variable.options == variable.options
    assert tf.reduce_all(tf.math.is_finite(variable.export()[1]))
