"""The parts of benchmarks/network.py. The network itself: tests/examples/test_hosts.py."""

import sys

import pytest

import sok
from benchmarks import network
from examples.ahead import Model, data
from examples.hosts import namespaces


def test_a_line_has_medians_quartiles_and_what_was_hidden():
    told = {
        name: {"seconds": [0.01 * (depth + 1) * n for n in range(1, 6)], "hidden": 7.0}
        for depth, name in enumerate(["0", "1", "2", "rows"])
    }
    told["rows"] |= {"rows": 1.5, "repaired": 12.4}
    told["0"] |= {"keys": 1.0, "rows": 2.0, "grads": 3.0, "dense_gradients": 4.04}
    told["others"] = 0.51
    line = network.line_of("10gbit", 0.1, told)
    expected = "| 10 | 0.1 | 30.0 (20.0 to 40.0) | 1.0 | 2.0 | 3.0 | 4.0 | 60.0 (40.0 to 80.0) | 7.0 | "
    assert line == expected + "90.0 (60.0 to 120.0) | 7.0 | 120.0 (80.0 to 160.0) | 7.0 | 1.5 | 12 | 0.5 |"


def test_all_kinds_of_steps_take_turns():
    sok.shutdown()
    sok.Init(global_batch_size=16, seed=0)
    batches = data(6, 16, 100).cache()
    models = {depth: Model(f"network_{depth}", 100) for depth in network.VARIANTS}
    loops = {depth: network.loop_of(depth, batches, models[depth]) for depth in network.VARIANTS}
    told = network.at_a_setting(2, models, loops)
    for depth in network.VARIANTS:
        assert len(told[str(depth)]["seconds"]) == 2 * (6 - network.WARM)
        assert set(told[str(depth)]) - {"repaired"} == {"seconds", "hidden", *network.KINDS[1:]}
    assert told["rows"]["repaired"] == 0.0  # with one worker nothing is sent
    seconds, _ = network.turn(models[1], loops[1], steps=3)
    assert len(seconds) == 3 and min(seconds) > 0
    sok.shutdown()


def test_without_hosts_it_says_why(monkeypatch, capsys):
    monkeypatch.setattr(namespaces, "why_not", lambda: "network namespaces need root")
    monkeypatch.setattr(sys, "argv", ["network"])
    assert network.main() == 77
    assert "Two hosts cannot be made on this machine: network namespaces need root." in capsys.readouterr().err


def test_settings_are_all_pairs():
    class Options:
        rates, latencies = ("1gbit", "10gbit"), (0, 5)

    assert network.settings_of(Options) == [("1gbit", 0), ("1gbit", 5), ("10gbit", 0), ("10gbit", 5)]


def test_only_a_network_with_a_forwarder_changes():
    hosts = object.__new__(namespaces.Hosts)
    hosts._wire = None
    with pytest.raises(RuntimeError, match="made with a `latency`"):
        hosts.change("1gbit", 0.1)
