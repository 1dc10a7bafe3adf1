"""`sok.callbacks.TableScalars`: what TensorBoard finds. On two workers: tests/multiprocess/checks_lookup.py."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.core.util.event_pb2 import Event

import sok
from sok.layers import for_keras

IDS = np.arange(40).reshape(20, 2) % 30
LABELS = np.ones([20, 1], np.float32)


def read(folder):
    """{tag: {step: value}} of the event files in a folder."""
    found = {}
    for file in folder.iterdir():
        for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
            event = Event.FromString(record)
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = float(tf.make_ndarray(value.tensor))
    return found


@pytest.mark.parametrize("k", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_fit_writes_them_every_n_steps(k, tmp_path):
    sok.shutdown()
    layer = for_keras(k).DistributedEmbedding("sum", 100, 4, slot_num=2, max_nnz=1, name="ads")
    model = k.Sequential([k.Input((2,), dtype="int64"), layer, k.layers.Flatten(), k.layers.Dense(1)])
    model.compile(sok.DistributedOptimizer(k.optimizers.SGD(0.1)), "mse")
    options = dict(batch_size=4, shuffle=False, verbose=0, callbacks=[sok.callbacks.TableScalars(tmp_path, every=3)])
    model.fit(IDS, LABELS, epochs=2, validation_data=(IDS + 50, LABELS), **options)
    scalars = read(tmp_path / "rank0")
    # 5 steps an epoch, 8 ids a step, of which 30 are distinct; validation looks up others, which make no rows.
    rows = {3: 24.0, 6: 30.0, 9: 30.0, 10: 30.0}  # at the end, too
    assert scalars["tables/ads/rows"] == rows
    assert scalars["tables/ads/full"] == {step: pytest.approx(n / 100) for step, n in rows.items()}
    assert scalars["tables/ads/new_ids"] == {3: 1.0, 6: pytest.approx(6 / 24), 9: 0.0, 10: 0.0}
    assert len(scalars) == 3  # one worker exchanges nothing
    model.fit(IDS, LABELS, epochs=1, **options)  # goes on where the first ended
    assert list(read(tmp_path / "rank0")["tables/ads/rows"]) == [3, 6, 9, 10, 13, 15]


def test_a_model_that_the_first_batch_builds_has_them_too(tmp_path):
    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.rows = sok.DistributedEmbedding("sum", 100, 4, slot_num=2, max_nnz=1, name="late")

        def call(self, ids, training=None):
            return tf.reshape(self.rows(ids), [-1, 8])

    model = Late()
    model.compile(sok.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    dataset = tf.data.Dataset.from_tensor_slices((IDS, np.ones([20, 8], np.float32))).batch(4)
    model.fit(dataset, shuffle=False, verbose=0, callbacks=[sok.callbacks.TableScalars(tmp_path, every=5)])
    assert read(tmp_path / "rank0")["tables/late/new_ids"] == {5: 0.75}


def test_a_loop_writes_them_when_it_likes(tmp_path):
    first, second = (sok.EmbeddingVariable(2, 50, name=name) for name in ("first", "second"))
    first.assign([1, 2], np.ones([2, 2]))
    scalars = sok.callbacks.TableScalars(tmp_path, tables=[first, second])
    read_rows = lambda ids, **how: sok.group_embedding_lookup([first, first, second], ids, **how)  # noqa: E731
    read_rows([[1, 3, 3], [4], [9]])
    assert scalars.write(7)["tables/first/new_ids"] == 0.5
    read_rows([[5], [6], [7]], training=False)
    assert "tables/first/new_ids" not in scalars.write(8)
    first.erase([1, 2, 3])
    read_rows([[1], [], []])
    assert scalars.write(9)["tables/first/new_ids"] == 0.0  # two rows less than before
    assert read(tmp_path / "rank0")["tables/second/rows"] == {7: 1.0, 8: 1.0, 9: 1.0}
    assert (int(first.ids_seen), int(second.ids_seen)) == (5, 1)


def test_what_policies_do_is_written(tmp_path):
    policies = {"admission": sok.Admission(after=2), "eviction": sok.Eviction(older_than=1, every=1)}
    table = sok.EmbeddingVariable(2, 50, name="guests", **policies)
    scalars = sok.callbacks.TableScalars(tmp_path, tables=table)
    optimizer = sok.optimizers.SGD(1.0)

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant(ids, tf.int64)))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    step([1, 2, 2])
    told = scalars.write(1)
    assert {tag.split("/")[2]: value for tag, value in told.items()} == {
        **{"rows": 0.0, "full": 0.0, "new_ids": 0.0, "candidates": 2.0, "refused": 3.0, "evicted": 0.0}
    }
    step([1, 1])
    step([5])
    told = scalars.write(3)
    assert told["tables/guests/new_ids"] == 1 / 3 and told["tables/guests/candidates"] == 1.0
    assert (told["tables/guests/rows"], told["tables/guests/refused"], told["tables/guests/evicted"]) == (0.0, 1.0, 1.0)


def test_what_is_no_number_of_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`every`"):
        sok.callbacks.TableScalars(tmp_path, every=0)
