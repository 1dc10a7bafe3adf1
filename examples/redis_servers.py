"""Redis servers of one's own, for examples, tests and benchmarks: one alone, one with a replica, or a cluster.

Needs `redis-server` and `redis-cli` (Debian, Ubuntu: apt-get install redis-server), and listens at 127.0.0.1 alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import redis


def missing() -> str:
    """What lacks for these servers; "" if nothing does."""
    lacking = [name for name in ("redis-server", "redis-cli") if shutil.which(name) is None]
    return f"there is no {' and no '.join(lacking)} (apt-get install redis-server)" if lacking else ""


@dataclasses.dataclass(frozen=True)
class Tls:
    """Files of a server that talks TLS alone: its certificate and key, and the authority of both sides, PEM."""

    cert: str
    key: str
    ca: str
    wants_client: bool = False  # whether clients must have a certificate, too

    def options(self, port: int) -> list[str]:
        said = ["--port", "0", "--tls-port", str(port), "--tls-cert-file", self.cert, "--tls-key-file", self.key]
        said += ["--tls-ca-cert-file", self.ca, "--tls-auth-clients", "yes" if self.wants_client else "no"]
        return [*said, "--tls-replication", "yes", "--tls-cluster", "yes"]


class Server:
    """One redis-server process in a folder of its own; `start` again after `kill` keeps the port."""

    def __init__(self, folder: Path, *options: str, tls: Tls | None = None) -> None:
        self.port, self.tls = free_port(), tls
        self.address = f"127.0.0.1:{self.port}"
        self._folder, self._options = folder / str(self.port), options
        self._folder.mkdir()
        self.start()

    def start(self) -> None:
        port = ["--port", str(self.port)] if self.tls is None else self.tls.options(self.port)
        command = ["redis-server", *port, "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command += ["--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0", *self._options]
        with open(self._folder / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=_dies_with_us)
        until(self._answers, 20, f"redis-server at {self.address} answers")

    def client(self, **more: object) -> redis.Redis:
        if self.tls is not None:
            more |= {"ssl": True, "ssl_ca_certs": self.tls.ca, "ssl_check_hostname": False}
            more |= {"ssl_certfile": self.tls.cert, "ssl_keyfile": self.tls.key}
        return redis.Redis(port=self.port, socket_timeout=5, **more)

    def kill(self) -> None:
        """As a machine that loses its power."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """As a process that hangs: connections stay, and nobody answers."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        with contextlib.suppress(redis.ConnectionError):
            try:
                with self.client() as client:
                    return client.ping()
            except redis.AuthenticationError:
                return True
        return False


def _dies_with_us() -> None:
    """Asks Linux to kill this process when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@contextlib.contextmanager
def servers(number: int, *options: str, tls: Tls | None = None) -> Iterator[list[Server]]:
    """Servers that know nothing of one another."""
    with tempfile.TemporaryDirectory(prefix="sok_redis_") as folder:
        started: list[Server] = []
        try:
            for _ in range(number):
                started.append(Server(Path(folder), *options, tls=tls))
            yield started
        finally:
            for server in started:
                server.kill()


@contextlib.contextmanager
def cluster(
    primaries: int, replicas: int = 0, timeout_ms: int = 1000, tls: Tls | None = None
) -> Iterator[list[Server]]:
    """The nodes of a cluster: the primaries, then `replicas` of each. A primary that is away so long is replaced."""
    options = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(timeout_ms)]
    options += ["--cluster-require-full-coverage", "no", "--cluster-allow-replica-migration", "no"]
    with servers(primaries * (1 + replicas), *options, tls=tls) as nodes:
        _join(nodes, primaries)
        yield nodes


def _join(nodes: list[Server], primaries: int) -> None:
    clients = [node.client() for node in nodes]
    for number, client in enumerate(clients[:primaries]):
        first, last = 16384 * number // primaries, 16384 * (number + 1) // primaries - 1
        client.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
        client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
    for client in clients[1:]:
        client.execute_command("CLUSTER MEET", "127.0.0.1", nodes[0].port)
    names = [_text(client.execute_command("CLUSTER MYID")) for client in clients]

    def is_joined() -> bool:
        return all(len(c.execute_command("CLUSTER NODES")) == len(nodes) for c in clients)

    until(is_joined, 20, "the nodes know one another")
    for number, client in enumerate(clients[primaries:]):
        client.execute_command("CLUSTER REPLICATE", names[number % primaries])

    def is_whole() -> bool:
        told = [client.info("replication") for client in clients]
        linked = all(one["master_link_status"] == "up" for one in told if one["role"] == "slave")
        roles = [one["role"] for one in told] == ["master"] * primaries + ["slave"] * (len(nodes) - primaries)
        fine = all(c.execute_command("CLUSTER INFO")["cluster_state"] == "ok" for c in clients)
        return linked and roles and fine

    until(is_whole, 30, "the cluster is whole")
    for client in clients:
        client.close()


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def until(condition, seconds: float, what: str) -> float:
    """Waits for a condition; gives how long it took.

    Raises:
        TimeoutError: it took longer than `seconds`.
    """
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            raise TimeoutError(f"not within {seconds} s: {what}")
        time.sleep(0.02)
    return time.monotonic() - start


def free_port() -> int:
    """A port whose cluster bus (10,000 above) exists, too."""
    while True:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        if port < 55000:
            return port


class Link:
    """A port that leads to a server's, and can be closed: connections break, and new ones are refused."""

    def __init__(self, server: Server) -> None:
        self.port, self._server = free_port(), server
        self.address = f"127.0.0.1:{self.port}"
        self.open()

    def open(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", self.port))
        self._open: list[socket.socket] = [self._listening]
        threading.Thread(target=self._accept, args=(self._listening, self._open), daemon=True).start()

    def close(self) -> None:
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self, listening: socket.socket, opened: list[socket.socket]) -> None:
        with contextlib.suppress(OSError):
            while True:
                here = listening.accept()[0]
                try:
                    there = socket.create_connection(("127.0.0.1", self._server.port))
                except OSError:
                    here.close()
                    continue
                opened += [here, there]
                for one, other in ((here, there), (there, here)):
                    threading.Thread(target=_pass_on, args=(one, other), daemon=True).start()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
        other.shutdown(socket.SHUT_RDWR)
