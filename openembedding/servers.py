"""OpenEmbedding's master and servers: tasks of TensorFlow's runtime that hold tables, and who knows their addresses.

A server tells the master where it is; a worker asks the master until there are as many as it waits for, and has its
tables on them: see docs/parameter_servers.md.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import socket
import socketserver
import threading
import time
import xmlrpc.client
import xmlrpc.server
from typing import Any

from sok.job import context
from sok.job.servers import JOB, Servers

SECONDS_TO_WAIT = 300.0  # for servers, and for the master: OpenEmbedding's own `master.recv_timeout`
_SECONDS_BETWEEN = 0.2
_SECONDS_OF_A_CALL = 30.0  # after which whoever listens there says nothing, and is asked anew
_HERE = "localhost"  # TensorFlow's job of a process alone


def address_of(endpoint: str, what: str) -> tuple[str, int]:
    """Host and port of 'ip:port', 'ip' or ''. Raises ValueError."""
    host, _, port = endpoint.partition(":")
    if port and not (port.isdigit() and int(port) < 2**16):
        raise ValueError(f"openembedding.flags.{what} must be 'ip' or 'ip:port'. Received: {endpoint!r}.")
    return host or "127.0.0.1", int(port or 0)


class Directory:
    """What the master knows: who serves, in which order. Its methods are called from other processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[str] = []
        self._ready: set[str] = set()
        self._is_over = False

    def enter(self, address: str) -> int:
        """The number of the server at `address`, which begins."""
        with self._lock:
            if address not in self._known:
                self._known.append(address)
            return self._known.index(address)

    def is_ready(self, address: str) -> bool:
        with self._lock:
            self._ready.add(address)
        return True

    def ready(self) -> list[str]:
        """The addresses of all servers, if each that has begun is ready; else none."""
        with self._lock:
            return list(self._known) if len(self._ready) == len(self._known) else []

    def is_over(self) -> bool:
        return self._is_over

    def end(self) -> bool:
        """Tells all servers that their worker has ended."""
        self._is_over = True
        return True


class _Listener(socketserver.ThreadingMixIn, xmlrpc.server.SimpleXMLRPCServer):
    """Asks in a thread each: who connects and says nothing keeps nobody else waiting."""

    daemon_threads = True


class Master:
    """Begins to listen at `flags.bind_ip` ('ip' or 'ip:port'; without a port at one that is free), in a thread.

    Args:
        bind_ip: in place of `flags.bind_ip`.

    Raises:
        ValueError: `bind_ip` is no address.
        OSError: nobody may listen there.

    Example:
        >>> import openembedding
        >>> openembedding.Master("127.0.0.1").endpoint.partition(":")[0]
        '127.0.0.1'
    """

    def __init__(self, bind_ip: str | None = None) -> None:
        from openembedding import flags

        host, port = address_of(flags.bind_ip if bind_ip is None else bind_ip, "bind_ip")
        self._server = _Listener((host, port), logRequests=False, allow_none=True)
        self._server.register_instance(Directory())
        threading.Thread(target=self._server.serve_forever, daemon=True, name="openembedding master").start()
        self.endpoint = f"{host}:{self._server.server_address[1]}"

    def exit(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()


class Server:
    """Begins a server that holds tables, and tells the master at `flags.master_endpoint` of it.

    Args:
        bind_ip: in place of `flags.bind_ip`: 'ip', by which workers reach this host. A port is the master's.
        master_endpoint: in place of `flags.master_endpoint`.

    Raises:
        ValueError: there is no master endpoint, or an argument is no address.
        TimeoutError: no master answers in 300 s.
    """

    def __init__(self, bind_ip: str | None = None, master_endpoint: str | None = None) -> None:
        import tensorflow as tf

        from openembedding import flags
        from sok.base import _ops

        _ops.lib()  # before anybody asks for an op of ours
        endpoint = flags.master_endpoint if master_endpoint is None else master_endpoint
        host, _ = address_of(flags.bind_ip if bind_ip is None else bind_ip, "bind_ip")
        self._master, self._is_left = _asked(endpoint), threading.Event()
        self.address = f"{host}:{_free_port(host)}"
        number = _answered(self._master.enter, self.address)
        self._server = tf.distribute.Server(tf.train.ClusterSpec({JOB: {number: self.address}}), JOB, number, "grpc")
        _answered(self._master.is_ready, self.address)

    def join(self) -> None:
        """Waits until the worker has ended, the master is gone, or `exit` is called.

        A master that says nothing is gone after 300 s: its host may have left without a word.
        """
        heard = time.monotonic()
        while not self._is_left.wait(1.0):
            try:
                if self._master.is_over():
                    return
                heard = time.monotonic()
            except TimeoutError:
                if time.monotonic() - heard > SECONDS_TO_WAIT:
                    return
            except OSError:
                return

    def exit(self) -> None:
        """Lets `join` return. What it holds goes with the process."""
        self._is_left.set()


def connect(endpoint: str, number: int) -> None:
    """Has the tables of this program on the servers that the master at `endpoint` knows. Once; later calls do nothing.

    Args:
        number: how many servers to wait for; -1: one at least, and as many as there are then.

    Raises:
        NotImplementedError: this is one of several workers.
        TimeoutError: there are fewer servers after `seconds`.
    """
    import tensorflow as tf

    if context.servers() is not None:
        return
    if number == 0:
        raise ValueError("openembedding.flags.wait_num_servers is 0: there is nobody to hold tables. Leave it at -1.")
    if context.size() > 1:
        raise NotImplementedError(
            f"openembedding.flags name a master, and this is one of {context.size()} workers, which hold rows "
            "themselves. Leave master_endpoint and wait_num_servers as they are; or start one worker alone."
        )
    seconds = SECONDS_TO_WAIT
    master, deadline = _asked(endpoint), time.monotonic() + seconds
    addresses: list[str] = []
    while len(addresses) < max(number, 1):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"openembedding: the master at {endpoint} knows {len(addresses)} servers that are ready, of "
                f"{max(number, 1)} (flags.wait_num_servers), after {seconds:g} s."
            )
        time.sleep(_SECONDS_BETWEEN)
        addresses = _answered(master.ready)
    here = _address_towards(*address_of(endpoint, "master_endpoint"))
    # By the name that this process has had so far, so that variables which were made before are found on.
    cluster = tf.train.ClusterSpec({JOB: addresses, _HERE: [f"{here}:{_free_port(here)}"]})
    tf.config.experimental_connect_to_cluster(cluster, job_name=_HERE, task_index=0)
    context.use_servers(Servers(len(addresses)))
    atexit.register(_end, master)


def _end(master: Any) -> None:
    with contextlib.suppress(OSError):
        master.end()


class _Impatient(xmlrpc.client.Transport):
    """Calls that raise TimeoutError where nothing is said for so long."""

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        connection = super().make_connection(host)
        connection.timeout = _SECONDS_OF_A_CALL
        return connection


def _asked(endpoint: str) -> Any:
    if not endpoint or not address_of(endpoint, "master_endpoint")[1]:
        raise ValueError(f"openembedding.flags.master_endpoint must be 'ip:port'. Received: {endpoint!r}.")
    return xmlrpc.client.ServerProxy(f"http://{endpoint}", transport=_Impatient())


def _answered(ask: Any, *arguments: Any) -> Any:
    """What the master says, as soon as there is one."""
    seconds = SECONDS_TO_WAIT
    deadline = time.monotonic() + seconds
    while True:
        try:
            return ask(*arguments)
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"openembedding: no master has answered in {seconds:g} s: {error}.") from error
            time.sleep(_SECONDS_BETWEEN)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as held:
        return int(held.getsockname()[1])


def _address_towards(host: str, port: int) -> str:
    """This host's address, as who is at `host` has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
