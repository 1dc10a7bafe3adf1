"""What the network between two hosts of namespaces.py does: its round trip, and its rate.

python -m examples.hosts.wire --rate 1gbit --latency 1      prints both beside what was asked for
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from examples.hosts.namespaces import Hosts

_PORT, _CHUNK = 5201, 1 << 20


def measure(hosts: Hosts, seconds: float = 2.0) -> tuple[float, float]:
    """Seconds of a round trip of one byte (the median), and bits per second one way, by TCP from host 0 to host 1."""
    program = [sys.executable, __file__]
    server = subprocess.Popen(hosts.command(1, [*program, "serve"]), stdout=subprocess.PIPE, text=True)
    try:
        if server.stdout is None or server.stdout.readline() != "ready\n":
            raise RuntimeError("the program that answers did not start in the second host.")
        command = [*program, "ask", hosts.hosts[1].address, str(seconds)]
        told = json.loads(hosts.run(0, command, seconds=30 + 10 * seconds))
        return told["round_trip"], told["rate"]
    finally:
        server.kill()
        server.communicate()


def _serve() -> None:
    """Echoes one connection, and counts what comes by the next."""
    with socket.create_server(("", _PORT)) as server:
        print("ready", flush=True)
        with server.accept()[0] as echo:
            echo.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := echo.recv(1):
                echo.sendall(data)
        with server.accept()[0] as sink:
            count, first, buffer = 0, None, bytearray(_CHUNK)
            while size := sink.recv_into(buffer):
                # The first second fills windows and buckets.
                now = time.monotonic()
                if first is None and count > 0:
                    first = now
                    count = 0
                count += size
            taken = time.monotonic() - (first or 0.0)
            sink.sendall(json.dumps(8 * count / taken).encode())


def _ask(address: str, seconds: float) -> None:
    with socket.create_connection((address, _PORT)) as echo:
        echo.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(60):
            begin = time.perf_counter()
            echo.sendall(b"x")
            echo.recv(1)
            times.append(time.perf_counter() - begin)
    with socket.create_connection((address, _PORT)) as sink:
        data, end = bytes(_CHUNK), time.monotonic() + seconds
        while time.monotonic() < end:
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
        rate = json.loads(sink.recv(1000))
    print(json.dumps({"round_trip": statistics.median(times[10:]), "rate": rate}))


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        _serve()
        return 0
    if sys.argv[1:2] == ["ask"]:
        _ask(sys.argv[2], float(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", help="as tc has it: 1gbit")
    parser.add_argument("--latency", type=float, help="milliseconds one way; without it, a bridge")
    options = parser.parse_args()
    # What answers in a host needs the standard library alone.
    from examples.hosts.namespaces import Hosts, why_not

    if reason := why_not():
        print(f"Hosts cannot be made on this machine: {reason}.", file=sys.stderr)
        return 77
    latency = None if options.latency is None else options.latency / 1e3
    with Hosts(2, options.rate, latency) as hosts:
        round_trip, rate = measure(hosts)
    wanted = "as it comes" if latency is None else f"{2e3 * latency:g} ms"
    print(
        f"round trip {1e3 * round_trip:.3f} ms (asked for: {wanted}), {rate / 1e9:.2f} Gbit/s ({options.rate or 'any'})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
