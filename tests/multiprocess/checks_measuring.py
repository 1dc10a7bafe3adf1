"""Links between workers as `sok doctor --measure` measures them, and plans beside what their steps move."""

import unittest.mock

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.job import context
from sok.planning import machine as machines
from sok.planning import measuring
from sok.planning.checking import check
from sok.planning.counting import _Uses
from sok.planning.distinct import draw
from sok.planning.fitting import Shape
from sok.planning.planner import plan
from sok.planning.tables import Table, model_of


def check_workers_measure_their_links(world):
    base = machines.load(machines.DEFAULT)
    # Each worker by itself is another test's: it takes a process more for each.
    alone = {"rates": {"gather": {"64": 1e9}, "update": {"64": 2e9}}, "constants": {"stream": 3e9}}
    shapes = [Shape(2, 50, 4, 2, 64), Shape(2, 50, 4, 2, 64, kind="table_wise")]
    with unittest.mock.patch.object(measuring, "_measured_alone", return_value=alone):
        machine = measuring.measure(10**10, shapes=shapes)
    assert (list(machine.gather), list(machine.update)) == ([64], [64]) and 1e8 < machine.stream < 1e11
    assert [len(points) for points in machine.measured["steps"]] == [3, 3]
    assert machine.within != base.within and machine.all_reduce_within != base.all_reduce_within
    assert machine.between == base.between and "Not measured: links between hosts" in machine.source
    assert machine.name == f"this machine, {world.size} workers on 1 host" and machine.memory == 10**10 // world.size
    sent = [points[0] for points in machine.measured["all_to_all"]]
    assert sent == sorted(sent) and abs(sent[-1] - measuring.LINK_BYTES[-1]) < 64
    assert 0 < machine.within.latency < 1 and 1e6 < machine.within.bandwidth < 1e13


def check_steps_of_a_plan_move_the_bytes_that_it_predicts(world):
    model = model_of([Table(5000, 16, hotness=[1, 9]), Table(300, 8, hotness=[3], hashed=True), Table(7, 4)])
    for pins in (
        {},
        {"table_0": "table_wise(1)"},
        {"table_0": "row_wise", "table_2": "table_wise(0)"},
        {"table_0": "column_wise(2)", "table_1": "column_wise(2)"},
        {"table_0": "row_wise", "table_1": "row_wise", "table_2": "data_parallel"},
        {"table_0": "row_wise", "table_1": "data_parallel", "table_2": "row_wise"},
    ):
        forbid = () if "data_parallel" in pins.values() else ["data_parallel"]
        made = plan(model, world.size, batch=4096, machine="cpu_2_cores", pin=pins, forbid=forbid)
        found = check(made, model, steps=4)
        for name, (predicted, measured) in found.bytes.items():
            # Headers, counts and what batches differ in.
            assert abs(predicted - measured) <= 0.02 * measured + 500, (pins, name, predicted, measured)
        # Of "rest" nothing is sure: a mean of exchanges is taken from the median of steps.
        assert all(measured > 0 for name, (_, measured) in found.parts.items() if name != "rest")
        assert "step ms" in str(found)
        # A hash spreads keys unevenly, and so few rows fill no slab.
        predicted, measured = found.memory
        assert abs(predicted - measured) <= 0.05 * measured + 20_000, (pins, predicted, measured)


def check_tables_of_all_kinds_of_a_plan_are_trained(world):
    model = model_of([Table(500, 8, hotness=[2]), Table(60, 4, hashed=True), Table(7, 4), Table(9, 4, hashed=True)])
    pins = {"table_0": "column_wise(2)", "table_1": "row_wise", "table_2": "data_parallel", "table_3": "data_parallel"}
    made = plan(model, world.size, batch=128, machine="cpu_2_cores", pin=pins)
    assert [table.where.kind for table in made.tables] == ["column_wise", "row_wise", "data_parallel", "data_parallel"]
    assert check(made, model, steps=2).parts["step"][1] > 0


def check_lookups_of_all_workers_are_counted_and_planned_alike(world):
    table = sok.EmbeddingVariable(4, 500, name="counted_by_all", options=sok.TableOptions(hashed=False))
    optimizer = sok.optimizers.SGD(0.1)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            (rows,) = sok.group_embedding_lookup_sparse([table], [ids], "sum")
            loss = tf.reduce_sum(rows)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    # 32 samples of 2 ids on rank 0, of 3 on rank 1, and so on.
    per_sample = world.rank + 2
    keys = draw(np.random.default_rng(world.rank), 400, 1.1, 32 * per_sample)
    with sok.count_lookups() as counts:
        for _ in range(3):
            step(tf.RaggedTensor.from_uniform_row_length(tf.constant(keys), per_sample))
    (found,) = counts.as_model().tables
    assert found.rows == table.num_keys and found.hotness == (np.mean(np.arange(world.size) + 2),)
    made = sok.plan(counts, batch=32 * world.size, machine="cpu_2_cores")
    told = context.get_transport().all_gather(tf.constant([[found.skew, made.step_ms]], tf.float64), "counted")
    assert len(np.unique(told.numpy(), axis=0)) == 1
    with pytest.raises(OSError, match="no_folder"):
        counts.save("/no_folder/counts.json")  # on worker 0


def check_workers_that_have_counted_different_tables_are_told(world):
    with sok.count_lookups() as counts:
        pass
    if world.rank:
        counts._tables["one"] = sok.EmbeddingVariable(4, 50, name="counted_alone"), 0, _Uses()
    with pytest.raises(ValueError, match="no table was looked up"):
        counts.as_model()
    if world.size > 1:
        if not world.rank:
            counts._tables["other"] = sok.EmbeddingVariable(4, 50, name="counted_alone"), 0, _Uses()
        with pytest.raises(ValueError, match="different tables.*other.*one"):
            counts.as_model()
