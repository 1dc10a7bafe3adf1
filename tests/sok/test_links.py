"""What is asked of the kernel about other hosts, and what is said of them. Real ones: tests/examples/test_hosts.py."""

import socket

import pytest

from sok.job.transport import links


@pytest.fixture
def connection():
    """The two ends of a connection between two addresses of this machine that are not its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.1", 9))  # sends nothing; says which address would
        except OSError as error:
            pytest.skip(f"this machine has no network: {error}")
        own = one.getsockname()[0]
    with socket.create_server((own, 0)) as server:
        client = socket.create_connection(server.getsockname(), source_address=("127.0.0.1", 0))
        accepted, _ = server.accept()
        with client, accepted:
            yield client, accepted


def test_connections_to_other_addresses_are_watched_and_known_by_them(connection):
    before = links.connected()
    client, _ = connection
    assert links.keep_watch(before) == links.Links()  # all were there before
    found = links.keep_watch({fd: name for fd, name in before.items() if fd != client.fileno()}, seconds=12)
    address, port = client.getpeername()[:2]
    assert found == links.Links("127.0.0.1", {address: port})
    assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 12_000
    assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 4
    client.sendall(b"it is still ours")
    assert connection[1].recv(5) == b"it is"


def test_connections_within_a_host_are_left_alone():
    before = links.connected()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert links.keep_watch(before) == links.Links()
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0


def test_a_host_that_refuses_is_there():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert links.lost(links.Links("10.0.0.1", {"127.0.0.1": port})) == []
    assert links.lost(links.Links()) == []


def test_a_host_without_a_route_is_lost():
    assert links.lost(links.Links("10.0.0.1", {"255.255.255.255": 9})) == ["255.255.255.255"]


def test_cards_tell_hosts_of_all_workers(monkeypatch):
    monkeypatch.setenv("HOROVOD_HOSTNAME", "node-7")
    mine = links.card(links.Links("10.0.0.7", {}))
    monkeypatch.delenv("HOROVOD_HOSTNAME")
    monkeypatch.setattr(socket, "gethostname", lambda: "n" * 500)
    long = links.card(links.Links("2001:db8::1", {}))
    assert len(mine) == len(long)
    assert links.read_cards(mine + long) == [("node-7", "10.0.0.7"), ("n" * 120, "2001:db8::1")]


def test_several_lost_hosts_are_named_each_and_strangers_by_address():
    workers = [("a", "10.0.0.1"), ("b", "10.0.0.2")]
    said = links.describe_lost(["10.0.0.2", "10.0.0.9"], workers, 60.0)
    assert "host 'b' (10.0.0.2; rank 1) cannot be reached" in said
    assert "the host (10.0.0.9) cannot be reached" in said
    assert "Connections to them have ended after 60 s" in said
    assert links.describe_lost([], workers, 60.0) == ""
