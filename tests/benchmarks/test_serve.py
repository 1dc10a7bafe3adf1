"""The parts of benchmarks/serve.py that decide what is measured: what is asked, and that nothing may go unanswered."""

import http.server
import json
import threading

import pytest

from benchmarks import serve, serve_load


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen: list[bytes] = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append(body)
        self.send_response(503 if body == b"bad" else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        """Says nothing."""


@pytest.fixture
def url():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/models/m:predict"
        server.shutdown()
        thread.join()


def test_each_client_asks_all_bodies_in_turn_and_every_request_counts(url):
    told = serve_load.load(url, [b"1", b"2", b"3"], clients=2, seconds=0.2)
    assert told["bad"] == [] and len(told["times"]) == len(Answers.seen) >= 6
    assert set(Answers.seen) == {b"1", b"2", b"3"} and told["wall"] >= 0.2
    measured = serve.Round.of(json.loads(json.dumps(told)))
    assert measured.requests_per_s == len(told["times"]) / told["wall"]
    assert 0 < measured.median_ms <= measured.p99_ms < 1e3 * told["wall"]


def test_a_request_that_fails_ends_the_benchmark(url):
    with pytest.raises(RuntimeError, match="requests had no answer: 503: b'{}'"):
        serve.Round.of(serve_load.load(url, [b"bad"], clients=1, seconds=0.01))
    with pytest.raises(RuntimeError, match="1 requests had no answer: ConnectionRefusedError"):
        serve.Round.of(serve_load.load("http://127.0.0.1:1/x", [b""], clients=1, seconds=0.01))


def test_a_cell_has_medians_and_quartiles_over_rounds():
    rounds = [serve.Round(float(rate), rate / 100, rate / 10) for rate in (100, 200, 300, 400, 500)]
    assert serve.cells(rounds) == "300 (200 to 400) | 3.00 | 30.00"
