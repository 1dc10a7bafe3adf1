"""Links between workers, as `sok doctor --measure` measures them."""

import unittest.mock

from sok.planning import machine as machines
from sok.planning import measuring


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
