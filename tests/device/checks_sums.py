"""Dense gradients of several workers whose variables are on a device, with a stand-in for a Horovod that adds there."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from sok.distributed import reduction
from sok.job import context
from sok.job.transport.base import is_on_gpu

from .conftest import GPU

SHAPES = {
    "wide": ([3, 2], tf.float32),
    "long": ([5], tf.float32),
    "double": ([2], tf.float64),
    "host": ([4], tf.float32),
}


def variables_of(make):
    found = []
    for name, (shape, dtype) in SHAPES.items():
        with tf.device("/CPU:0" if name == "host" else GPU):
            found.append(make(np.arange(np.prod(shape), dtype=dtype.as_numpy_dtype).reshape(shape), name=name))
    return found


def pairs_of(variables, rank):
    values = [tf.convert_to_tensor(v) for v in variables]
    return [(tf.cast(rank + 1, value.dtype) * tf.sin(value), v) for value, v in zip(values, variables, strict=True)]


def as_function(rank, op, make=tf.Variable):
    variables = variables_of(make)

    @tf.function
    def reduced():
        return reduction.reduce_dense(pairs_of(variables, rank), op)

    return [grad.numpy() for grad in reduced()]


def of_keras(rank, op):
    return as_function(rank, op, lambda value, name: keras.Variable(value, dtype=value.dtype.name, name=name))


def eagerly(rank, op):
    variables = variables_of(tf.Variable)
    return [grad.numpy() for grad in reduction.reduce_dense(pairs_of(variables, rank), op)]


def in_a_session(rank, op):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = variables_of(_v1_variable)
        session.run(tf.compat.v1.global_variables_initializer())
        return session.run(reduction.reduce_dense(pairs_of(variables, rank), op))


def _v1_variable(value, name):
    return tf.compat.v1.Variable(value, name=name, use_resource=True)


def check_gradients_are_added_where_their_variables_are(world, monkeypatch):
    transport = context.get_transport()
    assert not transport.adds_on_gpu
    real, seen = transport._hvd.grouped_allreduce, []

    def grouped_allreduce(tensors, **options):
        seen.append((tensors[0].dtype, [is_on_gpu(tensor) for tensor in tensors], options["name"]))
        with tf.device("/CPU:0"):
            sums = real([tf.identity(tensor) for tensor in tensors], **options)
        with tf.device(tensors[0].device):
            return [tf.identity(one) for one in sums]

    for run in (eagerly, as_function, of_keras, in_a_session):
        for op in (reduction.Sum, reduction.Average):
            expected = run(world.rank, op)
            monkeypatch.setattr(transport, "adds_on_gpu", True)
            monkeypatch.setattr(transport._hvd, "grouped_allreduce", grouped_allreduce)
            found = run(world.rank, op)
            monkeypatch.undo()
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6)
            # What lies on the host goes by memory that workers share, and not by the library.
            added = sorted((dtype.name, places) for dtype, places, _ in seen)
            assert added == [("float32", [True, True]), ("float64", [True])], (run.__name__, added)
            assert all(name.endswith(">gpu0") for _, _, name in seen)
            seen.clear()


def check_sums_of_the_host_stay_there(world, monkeypatch):
    transport = context.get_transport()
    monkeypatch.setattr(transport, "adds_on_gpu", True)
    monkeypatch.setattr(transport._hvd, "grouped_allreduce", lambda *_, **__: pytest.fail("was asked"))
    with tf.device(GPU):
        whole = tf.constant([world.rank], tf.int64)
    (total,) = transport.grouped_all_reduce([whole], "sums/whole", average=False)
    assert total.numpy() == [sum(range(world.size))]
