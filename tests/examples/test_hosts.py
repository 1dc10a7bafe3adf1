"""Hosts that are namespaces of this machine: that they are apart, and a job over them."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from examples.hosts.main import is_right
from examples.hosts.namespaces import INTERFACE, Hosts, has_openssh, why_not
from examples.hosts.wire import measure

ROOT = Path(__file__).resolve().parents[2]
REASON = why_not()
pytestmark = pytest.mark.multiprocess
needs_hosts = pytest.mark.skipif(bool(REASON), reason=f"hosts cannot be made on this machine: {REASON}")


needs_openssh = pytest.mark.skipif(
    not has_openssh(), reason="OpenSSH is not installed (apt-get install openssh-server)"
)


@pytest.fixture
def hosts(request):
    with Hosts(2, openssh=getattr(request, "param", False)) as made:
        yield made


@needs_hosts
@pytest.mark.parametrize(
    "hosts", [False, pytest.param(True, marks=needs_openssh)], indirect=True, ids=["stand-in", "OpenSSH"]
)
def test_hosts_have_names_addresses_processes_and_shared_memory_of_their_own(hosts):
    for place, name in enumerate(["host-a", "host-b"]):
        assert hosts.run(place, ["hostname"]) == f"{name}\n"
        assert hosts.run(place, ["ssh", "-p", "22", f"host-{'ba'[place]}", "hostname"]) == f"host-{'ba'[place]}\n"
    hosts.run(0, ["touch", "/dev/shm/mine"])
    assert hosts.run(1, ["ls", "/dev/shm"]) == ""
    assert int(hosts.run(0, ["sh", "-c", "ls /proc | grep -c '^[0-9]'"])) < 10  # the first, and these
    with pytest.raises(subprocess.CalledProcessError) as failure:
        hosts.run(0, ["ssh", "host-b", "echo so; echo words >&2; exit 3"])
    assert (failure.value.returncode, failure.value.output, failure.value.stderr) == (3, "so\n", "words\n")


@needs_hosts
def test_nothing_is_left_of_hosts_whose_maker_is_killed():
    program = (
        "import time; from examples.hosts.namespaces import Hosts\n"
        "hosts = Hosts(2, latency=0.001); print(hosts.hosts[0].pid, hosts.hosts[1].pid, flush=True); time.sleep(100)"
    )
    before = socket.if_nameindex()
    maker = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids) and len(pids) == 2
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    maker.stdout.close()
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert socket.if_nameindex() == before
    with Hosts(1):  # its folder goes when hosts are next made
        assert not list(Path(tempfile.gettempdir()).glob(f"sok-hosts-of-{maker.pid}-*"))


PROGRAM = """
import importlib.util, socket, sys, time
spec = importlib.util.spec_from_file_location("links", sys.argv[1])  # by itself: it knows no TensorFlow
links = importlib.util.module_from_spec(spec)
sys.modules["links"] = links
spec.loader.exec_module(links)
ends = [socket.create_connection(("host-b", 22)) for _ in range(2)]
found = links.keep_watch({}, 3.0)
assert links.lost(found) == [] and found.own == "10.77.0.1"
print("ready", flush=True)
sys.stdin.readline()
begin = time.monotonic()
ends[0].sendall(b"x")  # one has data on their way, the other waits
for one in ends:
    try:
        assert one.recv(1) != b"", "closed"
    except OSError as error:
        print(type(error).__name__, round(time.monotonic() - begin, 1))
print(links.lost(found))
"""


@needs_hosts
def test_connections_to_a_host_that_is_gone_end_in_time(hosts):
    path = str(ROOT / "sok" / "job" / "transport" / "links.py")
    command = hosts.command(0, [sys.executable, "-c", PROGRAM, path])
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    hosts.cut(1)
    out, _ = process.communicate("\n", timeout=30)
    first, second, which = out.splitlines()
    for said in (first, second):
        kind, seconds = said.split()
        assert kind in ("TimeoutError", "OSError") and float(seconds) < 10, out
    assert which == "['10.77.0.2']"


@needs_hosts
def test_a_wire_has_the_latency_and_not_more_than_the_rate():
    with Hosts(2, rate="200mbit", latency=0.005) as hosts:
        round_trip, rate = measure(hosts, seconds=0.5)
        assert 0.010 <= round_trip < 0.030
        assert 50e6 < rate < 240e6
        hosts.change("100mbit", 0.001)
        round_trip, rate = measure(hosts, seconds=0.5)
        assert 0.002 <= round_trip < 0.010
        assert 25e6 < rate < 120e6


@needs_hosts
@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
def test_a_job_over_two_hosts_equals_one_worker_and_names_the_host_that_it_loses():
    command = [str(ROOT / "examples" / "hosts.sh"), "--hosts", "2", "--workers", "2", "--network-interface", "--check"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["ssh"] == ("OpenSSH" if has_openssh() else "stand-in")
    assert told["hosts"] == ["host-a", "host-b"] and told["workers"] == 4 and told["interface"] == INTERFACE
    assert told["equal"] and told["collectives"] and told["shared_memory"] == {"one_host": True, "hosts": False}
    assert told["seconds_until_named"] < told["allowed_seconds"]
    for what, wrong in {"equal": False, "interface": "docker0", "seconds_until_named": float("nan")}.items():
        assert is_right(told) and not is_right({**told, what: wrong})


def test_openssh_that_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr("examples.hosts.namespaces._SSHD", None)
    with pytest.raises(RuntimeError, match="apt-get install openssh-server"):
        Hosts(1, openssh=True)


def test_where_hosts_cannot_be_made_the_example_says_why(tmp_path):
    command = [str(ROOT / "examples" / "hosts.sh"), "--check"]
    environment = {"PATH": str(tmp_path), "PYTHON": sys.executable}  # without `ip` and its like
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    done = subprocess.run(["/bin/bash", *command], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 77
    words = "network namespaces need root" if os.geteuid() else "not in PATH: ip, tc, unshare, nsenter, mount"
    assert f"Hosts cannot be made on this machine: {words}" in done.stderr
