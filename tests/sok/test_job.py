"""Tables belong to a job: those of one that has ended are refused by whatever would mix them with the job of now."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.job import context
from sok.job.job import Job, job_of
from sok.job.transport.local import LocalTransport
from sok.lookup.lookup import lookup_rows
from tests.sok.test_two_runs import fit, model_of, table_of

KEYS = tf.constant([1, 2], tf.int64)
ENDED = r"table '{}' is of a job that has ended: <Job \d+: rank 0 of 1, local, seed 3, ended>. Make the table.*anew"


def test_what_is_set_for_a_job_is_taken_back_when_it_ends_the_last_first():
    done = []
    job = Job(LocalTransport())
    for number in range(3):
        job.at_end(functools.partial(done.append, number))
    assert not done
    for _ in range(2):
        job.end()
        assert done == [2, 1, 0]


@pytest.fixture(scope="module")
def ended():
    """A model of a job that has ended, its table, and a checkpoint of it."""
    sok.shutdown()
    sok.Init(seed=3)
    model = model_of(keras)
    fit(model)
    yield model, table_of(model)
    sok.shutdown()


@pytest.fixture(scope="module")
def old(ended, tmp_path_factory):
    model, table = ended
    folder = tmp_path_factory.mktemp("saved") / "tables"
    sok.save(folder, table)
    follower = sok.follow(folder, table)
    optimizer = sok.optimizers.Adam(0.1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(lookup_rows(table, KEYS))
    gradient = tape.gradient(loss, table)
    sok.shutdown()
    sok.Init(seed=3)
    model_of(keras)  # has a table of that name, too
    return {
        "model": model,
        "table": table,
        "folder": folder,
        "follower": follower,
        "optimizer": optimizer,
        "gradient": gradient,
    }


def checkpoint_of(old):
    return tf.train.Checkpoint(table=old["table"])


WAYS = {
    "lookup": lambda old, to: lookup_rows(old["table"], KEYS),
    "lookup in a function": lambda old, to: tf.function(lookup_rows)(old["table"], KEYS),
    "sparse_read": lambda old, to: old["table"].sparse_read(KEYS),
    "group": lambda old, to: sok.group_embedding_lookup([old["table"]], [KEYS]),
    "layer": lambda old, to: old["model"](np.array([[1, 2]])),
    "fit": lambda old, to: fit_anew(old["model"]),
    "update": lambda old, to: old["optimizer"].apply_gradients([(old["gradient"], old["table"])]),
    "total_size": lambda old, to: old["table"].total_size(),
    "save": lambda old, to: sok.save(to, old["table"]),
    "asynchronous save": lambda old, to: sok.save(to, old["model"], asynchronous=True),
    "restore": lambda old, to: sok.restore(old["folder"], old["table"]),
    "follow": lambda old, to: sok.follow(old["folder"], old["table"]),
    "poll": lambda old, to: old["follower"].poll(),
    "CheckpointManager": lambda old, to: sok.CheckpointManager(checkpoint_of(old), str(to), max_to_keep=1).save(),
    "tf.train.Checkpoint": lambda old, to: checkpoint_of(old).write(str(to / "tf")),
    "save_weights": lambda old, to: sok.save_weights(old["model"], str(to / "all.weights.h5")),
    "model.save_weights": lambda old, to: old["model"].save_weights(str(to / "own.weights.h5")),
    "export": lambda old, to: sok.export_saved_model(old["model"], str(to / "exported")),
    "dump": lambda old, to: sok.dump(str(to), old["table"]),
    "load": lambda old, to: sok.load(str(to), old["table"]),
    "Saver": lambda old, to: sok.Saver().dump_to_file(old["table"], str(to)),
}


def fit_anew(model):
    model.compile(sok.DistributedOptimizer(keras.optimizers.Adam(0.05)), "mse")
    fit(model)


@pytest.mark.parametrize("way", WAYS)
def test_a_table_whose_job_has_ended_is_refused(way, old, tmp_path):
    before = [tensor.numpy() for tensor in old["table"].export()]
    with pytest.raises(RuntimeError, match=ENDED.format("ads")):
        WAYS[way](old, tmp_path)
    for tensor, expected in zip(old["table"].export(), before, strict=True):
        np.testing.assert_array_equal(tensor, expected)


def test_a_new_table_of_the_name_has_nothing_of_the_old_one(old, tmp_path):
    sok.shutdown()
    sok.Init(seed=3)
    new = sok.EmbeddingVariable(4, 100, name="ads")
    assert new.table_name == old["table"].table_name and int(new.num_rows()) == 0 < int(old["table"].num_rows())
    for together in ([new, old["model"]], [old["table"], new]):
        with pytest.raises((RuntimeError, ValueError), match="has ended|two tables with the name 'ads'"):
            sok.save(tmp_path, together)
    new.assign(*old["table"].export())  # what the words say
    np.testing.assert_array_equal(new.export()[1], old["table"].export()[1])
    sok.save(tmp_path, new)


def test_init_goes_on_with_the_job_of_the_first_table():
    sok.shutdown()
    table = sok.EmbeddingVariable(2, 10, name="first")
    job = context.get_job()
    assert not table.job.is_explicit
    sok.Init(global_batch_size=8)
    assert table.job is job is context.get_job() and context.get_global_batch_size() == 8
    lookup_rows(table, KEYS)
    sok.shutdown()
    assert job.has_ended and context.get_job().epoch > job.epoch
    sok.shutdown()


def test_tables_of_different_jobs_do_not_go_together(monkeypatch):
    jobs = [Job(LocalTransport(), seed=seed) for seed in (1, 2)]
    tables = []
    for name, job in zip("ab", jobs, strict=True):
        monkeypatch.setattr(context, "get_job", lambda job=job: job)
        tables.append(sok.EmbeddingVariable(2, 10, name=name))
    assert job_of(tables[1:]) is jobs[1]
    with pytest.raises(ValueError, match=r"different jobs .*'a' of <Job .* seed 1>, 'b' of <Job .* seed 2>"):
        job_of(tables)
    for way in (sok.save, sok.restore):
        with pytest.raises(ValueError, match="different jobs"):
            way("nowhere", tables)
