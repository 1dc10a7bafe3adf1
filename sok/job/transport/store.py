"""A key-value store over HTTP by which workers tell one another where they are, for `watch`: one of them serves it."""

from __future__ import annotations

import http.server
import threading


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Store

    def do_PUT(self) -> None:
        value = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.values[self.path] = value
        self._answer(200)

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: nobody asked for a list of requests."""


class Store(http.server.ThreadingHTTPServer):
    """Serves, in a thread, what was last PUT under each path to whoever GETs it; 404 if nothing was.

    Example:
        >>> import http.client
        >>> store = Store()
        >>> connection = http.client.HTTPConnection("localhost", store.server_port)
        >>> connection.request("GET", "/a/0")
        >>> connection.getresponse().status
        404
        >>> store.close()
    """

    daemon_threads = True

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        super().__init__(("", 0), _Handler)
        threading.Thread(target=self.serve_forever, name="sok-store", daemon=True).start()

    def close(self) -> None:
        """Ends it."""
        self.shutdown()
        self.server_close()
