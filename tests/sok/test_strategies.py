"""Strategies of `tf.distribute` other than ours are refused with words; those of one replica train as without."""

import json
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from tests.messages import saying

# What the replicas of one process use together.
SHARED = {
    *("tf_keras layer", "EmbeddingVariable", "Variable", "DynamicVariable", "deeprec", "optimizer"),
    *("lookup", "embedding_lookup", "feature column", "optimizer step"),
}


def test_two_replicas_of_one_process_train_as_one_on_the_whole_batch(forked, tmp_path):
    done = forked.run(Path(__file__).with_name("mirrored_script.py"), tmp_path)
    assert done.status == 0, done.stderr[-3000:]
    for case, (found, expected) in json.loads(done.stdout.splitlines()[-1]).items():
        assert found["steps"] == expected["steps"], case
        for what, values in expected.items():
            np.testing.assert_allclose(found[what], values, rtol=1e-5, atol=1e-6, err_msg=f"{case}: {what}")


def test_strategies_with_replicas_are_refused_wherever_something_is_made_or_used(forked, tmp_path):
    done = forked.run(Path(__file__).with_name("strategies_script.py"), tmp_path)
    assert done.status == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told) == 2 * 16 + 3
    for case, text in told.items():
        strategy, what = case.split(", ", 1)
        if strategy == "MirroredStrategy" and what in SHARED:
            assert text is None, f"{case}: {text}"
            continue
        assert text is not None, f"{case} was let through"
        if what == "distributed step" and "must only be passed a variable created in this" in text:
            continue  # tf_keras' own words, about the weight
        if what == "fit of tf_keras" and "not created in the distribution strategy scope" in text:
            continue  # tf_keras' own words, about the table that was made outside
        if what == "fit of Keras 3" and "A stock optimizer was given the embedding table" in text:
            continue  # which is wrong without a strategy, too
        assert re.search(saying(strategy, "RuntimeError", "sok.Init()", "horovodrun"), text), f"{case}: {text}"


@pytest.mark.parametrize("library, kind", [(keras, "one_device"), (tf_keras, "mirrored")])
def test_strategies_of_one_replica_fit_as_none_does(library, kind):
    ids = np.array([[1, 2], [3, 4], [1, 4], [5, 6]] * 4)

    def fit(scope):
        sok.shutdown()  # names, and so seeds, anew
        with scope:
            library.utils.set_random_seed(1)
            keys = library.Input([2], dtype="int64")
            rows = sok.layers.for_keras(library).DistributedEmbedding("sum", 100, 4, slot_num=2, max_nnz=1, name="e")
            model = library.Model(keys, library.layers.Dense(1)(library.layers.Flatten()(rows(keys))))
            model.compile(sok.DistributedOptimizer(library.optimizers.Adam(0.1)), "mse")
        model.fit(ids, ids[:, :1] / 8, batch_size=4, shuffle=False, verbose=0)
        return rows.embedding_variable.sparse_read(np.arange(8)).numpy(), model.predict(ids, verbose=0)

    strategy = {
        "one_device": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
        "mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
    }[kind]()
    for found, expected in zip(fit(strategy.scope()), fit(tf.distribute.get_strategy().scope()), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
