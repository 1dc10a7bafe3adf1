"""Tables that the host keeps beside tables of another device, which is a second logical CPU: on any number of workers.

A GPU is another device, too, with other kernels: tests/device has that. Run by test_two_devices.py.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import tensorflow as tf

import distributed_embeddings as de
import sok
from tests import tables_on_host as cases

CPU, OTHER = "/CPU:0", "/CPU:1"


def placements(dp_input: bool) -> list[sok.Placement]:
    spread = [sok.row_wise()] * 2 if dp_input else [sok.table_wise(0)] * 2
    return [sok.table_wise(sok.size() - 1), sok.column_wise(2), *spread]


def models_of_both_train_as_on_one_device() -> None:
    """An exchange for each device; with ids of the whole batch no keys travel, and all come home together."""
    for dp_input, as_function in itertools.product((True, False), repeat=2):
        found, expected = (
            cases.train(device, placements(dp_input), sok.rank(), sok.size(), as_function, dp_input)
            for device in (OTHER, CPU)
        )
        cases.assert_same(found, expected)
        assert found[0][-1] < found[0][0]
        made = ((6, 3) if dp_input else (2, 2)) if sok.size() > 1 else (0, 0)
        assert (found[2], expected[2]) == made, (found[2], expected[2])


def norms_are_those_of_both() -> None:
    found, expected = (
        cases.train(device, placements(True), sok.rank(), sok.size(), True, True, sok.optimizers.SGD(0.1, **clipped))
        for device, clipped in ((OTHER, {"global_clipnorm": 0.5}), (CPU, {"global_clipnorm": 0.5}))
    )
    cases.assert_same(found, expected)


def bad_input_is_raised_on_all() -> None:
    collection = cases.collection_on(OTHER, placements(True))
    good, is_bad = [tf.constant([[1, 2]])] * 5, sok.rank() == 0
    with tf.device(OTHER):
        with pytest.raises(ValueError if is_bad else tf.errors.InvalidArgumentError, match="must be a list of 5"):
            collection(good[:4] if is_bad else good)
        with pytest.raises(tf.errors.InvalidArgumentError, match="77"):  # of a table that the host keeps
            collection([*good[:4], tf.constant([[1, 77 if is_bad else 2]])])
        assert len(collection(good)) == 5


def merlins_limit_says_which_tables_the_host_keeps() -> None:
    sizes = [(100, 4), (10, 4), (50, 4), (20, 3)]  # 400, 40, 200 and 60 numbers
    for strategy, limit in itertools.product(("basic", "auto"), (None, 0, 250)):
        with tf.device(OTHER):
            layers = [de.Embedding(rows, dim, combiner="sum") for rows, dim in sizes]
            plan = {"batch": 12, "machine": "cpu_2_cores", "forbid": ["data_parallel"]} if strategy == "auto" else None
            layer = de.DistributedEmbedding(layers, strategy, gpu_embedding_size=limit, plan=plan)
            outputs = layer([tf.constant([[1, 2]])] * 4)
        hosted = [device == "CPU:0" for device in cases.devices_of(layer)]
        if strategy == "basic":
            assert hosted == [layer.strategy.is_offloaded(table) for table in range(4)]
        assert any(hosted) == (limit is not None) and all(hosted) == (limit == 0)
        assert hosted[0] or limit is None, "the largest of all is the first to be left to the host"
        for out, matrix in zip(outputs, layer.get_weights(all_ranks=True), strict=True):
            np.testing.assert_allclose(out[0], matrix[1] + matrix[2], rtol=1e-6)


if __name__ == "__main__":
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    sok.Init(seed=1, global_batch_size=12)
    models_of_both_train_as_on_one_device()
    norms_are_those_of_both()
    bad_input_is_raised_on_all()
    merlins_limit_says_which_tables_the_host_keeps()
    sys.stdout.write(f"rank {sok.rank()} has done all\n")
