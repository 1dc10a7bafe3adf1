"""Links between workers as `sok doctor --measure` measures them, and plans beside what their steps move."""

import unittest.mock

from sok.planning import machine as machines
from sok.planning import measuring
from sok.planning.checking import check
from sok.planning.planner import plan
from sok.planning.tables import Table, model_of


def check_workers_measure_their_links(world):
    base = machines.load(machines.DEFAULT)
    # Each worker by itself is another test's: it takes a process more for each.
    alone = {"rates": {"gather": {"64": 1.0}, "update": {"64": 2.0}}, "constants": {"stream": 3.0}}
    with unittest.mock.patch.object(measuring, "_measured_alone", return_value=alone):
        machine = measuring.measure(10**10)
    assert (machine.gather, machine.update, machine.stream) == ({64: 1.0}, {64: 2.0}, 3.0)
    assert machine.within != base.within and machine.all_reduce_within != base.all_reduce_within
    assert machine.between == base.between and "Not measured: links between hosts" in machine.source
    assert machine.name == f"this machine, {world.size} workers on 1 host" and machine.memory == 10**10 // world.size
    sent = [points[0] for points in machine.measured["all_to_all"]]
    assert sent == sorted(sent) and abs(sent[-1] - measuring.LINK_BYTES[-1]) < 64
    assert 0 < machine.within.latency < 1 and 1e6 < machine.within.bandwidth < 1e13


def check_steps_of_a_plan_move_the_bytes_that_it_predicts(world):
    model = model_of([Table(5000, 16, hotness=[1, 9]), Table(300, 8, hotness=[3], hashed=True), Table(7, 4)])
    for pins in ({}, {"table_0": "table_wise(1)"}, {"table_0": "row_wise", "table_2": "table_wise(0)"}):
        made = plan(
            model, world.size, batch=4096, machine="cpu_2_cores", pin=pins, forbid=["column_wise", "data_parallel"]
        )
        found = check(made, model, steps=4)
        for name, (predicted, measured) in found.bytes.items():
            # Headers, counts and what batches differ in.
            assert abs(predicted - measured) <= 0.02 * measured + 500, (pins, name, predicted, measured)
        assert all(measured > 0 for _, measured in found.parts.values())
        assert "step ms" in str(found)
