"""What workers of an elastic job reach over the network: the launcher's answers, and a store of addresses."""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_OURS = "/sok."  # scopes of sok/job/transport/watch.py: what is not there is not waited for
_SECONDS_TO_HOLD = 1.0


class Store:
    """Where the workers of one job tell each other their addresses: as Horovod's rendezvous, of its own for each job.

    One for all would give workers of this job addresses of the one before. Horovod's own clears its store between jobs,
    while workers of the last may still write there.
    """

    def __init__(self, address: str) -> None:
        self._server = _Server((address, 0), _store_handler())
        self.port: int = self._server.server_address[1]
        _serve(self._server)

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()


def _store_handler() -> type[BaseHTTPRequestHandler]:
    """Answers what Horovod's HTTPStore asks: PUT, GET and DELETE of /SCOPE/KEY."""
    values: dict[str, bytes] = {}
    changed = threading.Condition()

    class Handler(BaseHTTPRequestHandler):
        timeout = 60

        def do_PUT(self) -> None:
            value = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with changed:
                values[self.path] = value
                changed.notify_all()
            _reply(self, 200, b"")

        def do_GET(self) -> None:
            """Who asks for what is not there yet is held: asking again and again takes a busy machine's time."""
            with changed:
                if not self.path.startswith(_OURS):
                    changed.wait_for(lambda: self.path in values, _SECONDS_TO_HOLD)
                value = values.get(self.path)
            _reply(self, 404 if value is None else 200, value or b"")

        def do_DELETE(self) -> None:
            """A worker is connected: its address stays, for those that are not."""
            _reply(self, 200, b"")

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


def _reply(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A worker was ended before it had its answer."""


class Answers:
    """Answers what `sok.job.elastic_launcher` asks.

    Args:
        address: of this host, where workers reach it.
        key: what they must know.
        answer: (what, worker, generation) -> the answer. Called in threads.
    """

    def __init__(self, address: str, key: str, answer: Callable[[str, int, int], dict[str, Any]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 60

            def do_POST(self) -> None:
                try:
                    asked = json.loads(self.rfile.read(min(int(self.headers.get("Content-Length", 0)), 10_000)))
                    if not hmac.compare_digest(str(asked["key"]).encode(), key.encode()):
                        return _reply(self, 403, b"the key is another one")
                    found = answer(str(asked["what"]), int(asked["worker"]), int(asked["generation"]))
                except (ValueError, KeyError, TypeError) as error:
                    return _reply(self, 400, repr(error).encode())
                _reply(self, 200, json.dumps(found).encode())

            def log_message(self, *args: Any) -> None:
                pass

        self._server = _Server((address, 0), Handler)
        self.port: int = self._server.server_address[1]
        _serve(self._server)

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()


def _serve(server: Any) -> None:
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
