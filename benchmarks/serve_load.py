"""Asks a server of TensorFlow Serving's REST, and says how long it took: python -m benchmarks.serve_load URL FILE.

The standard library alone, and a process of its own: what asks must not wait for what answers.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
import urllib.parse
from pathlib import Path


def ask(address: str, path: str, bodies: list[bytes], until: float, times: list[float], bad: list[str]) -> None:
    """Asks one after the other by one connection, at least once; appends the seconds of each request."""
    connection = http.client.HTTPConnection(address, timeout=60)
    number = 0
    try:
        while not number or time.perf_counter() < until:
            start = time.perf_counter()
            connection.request("POST", path, bodies[number % len(bodies)], {"Content-Type": "application/json"})
            answer = connection.getresponse()
            told = answer.read()
            times.append(time.perf_counter() - start)
            number += 1
            if answer.status != 200:
                bad.append(f"{answer.status}: {told[:200]!r}")
    except OSError as error:
        bad.append(repr(error))
    finally:
        connection.close()


def load(url: str, bodies: list[bytes], clients: int, seconds: float) -> dict[str, list[float] | list[str] | float]:
    """Seconds of each request of so many clients at once, what was not answered, and how long all of it took."""
    parts = urllib.parse.urlsplit(url)
    times: list[list[float]] = [[] for _ in range(clients)]
    bad: list[str] = []
    start = time.perf_counter()
    work = (parts.netloc, parts.path, bodies, start + seconds)
    threads = [threading.Thread(target=ask, args=(*work, of_client, bad)) for of_client in times]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"times": sum(times, []), "bad": bad, "wall": time.perf_counter() - start}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="http://HOST:PORT/v1/models/NAME:predict")
    parser.add_argument("bodies", type=Path, help="a file of JSON requests, one a line")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    bodies = options.bodies.read_bytes().splitlines()
    print(json.dumps(load(options.url, bodies, options.clients, options.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
