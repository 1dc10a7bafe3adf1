"""`sok serve` as a process: thousands of requests across swaps of versions, and its end by SIGTERM."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

import sok
from tests.tools.served_models import Client, ask, export_with, publish, save_kinds

REQUESTS, SWAPS, CLIENTS, EXPORTS = 10_000, 20, 4, 8
URL = "/v1/models/ctr"
ASK = {"instances": [[7, 1], [1, 1]]}


def wait_for(what, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.02)
    return found


class Server:
    """`sok serve` in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "sok", "serve", *arguments, "--port", "0", "--poll-seconds", "0.05"]
        command += ["--timeout-seconds", "120"]  # on a machine that has other things to do
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.said = self.process.stdout.readline()
        self._errors: list[str] = []
        self._reader = threading.Thread(target=lambda: self._errors.extend(self.process.stderr), daemon=True)
        self._reader.start()
        if not self.said:
            self.process.wait(60)
            raise AssertionError(self.errors())
        self.port = int(re.match(r"http://127\.0\.0\.1:(\d+)/v1/models serves ", self.said)[1])

    def errors(self) -> str:
        self._reader.join(10)
        return "".join(self._errors)


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Models that answer 0 to 7; version n of what is served is a copy of number n % 8."""
    sok.Init()
    folder = tmp_path_factory.mktemp("exports")
    for value in range(EXPORTS):
        export_with(value, folder / str(value), native=value % 2 == 1)
    return folder


@pytest.fixture(scope="module")
def served(exports, tmp_path_factory):
    """A folder of versions, and the server that watches it."""
    folder = tmp_path_factory.mktemp("served")
    publish(exports / "1", folder / "1")
    kinds = tmp_path_factory.mktemp("kinds") / "5"
    save_kinds(kinds)
    server = Server(str(folder), "--name", "ctr", "--model", f"kinds={kinds}")
    yield folder, server
    server.process.kill()
    server.process.wait()


class Asker(threading.Thread):
    """Asks until told to stop; notes every answer that is not that of some version."""

    def __init__(self, port: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.client, self.stop, self.count = Client(port), stop, 0
        self.wrong, self.values = [], []

    def run(self):
        try:
            while not self.stop.is_set():
                status, told = self.client.ask("POST", f"{URL}:predict", ASK)
                self.count += 1
                ((value,), (other,)) = told["predictions"] if status == 200 else ((None,), (None,))
                if value not in range(EXPORTS) or other != 0.0:
                    self.wrong.append((status, told))
                if not self.values or self.values[-1] != value:
                    self.values.append(value)
        except Exception as error:  # a connection that broke
            self.wrong.append(repr(error))


def test_ten_thousand_requests_across_twenty_swaps_all_get_an_answer(exports, served):
    folder, server = served
    operator = Client(server.port)
    stop = threading.Event()
    askers = [Asker(server.port, stop) for _ in range(CLIENTS)]
    for asker in askers:
        asker.start()
    try:
        for version in range(2, SWAPS + 2):
            publish(exports / str(version % EXPORTS), folder / str(version))
            # Its status is 404 until it is seen.
            wait_for(lambda of=version: states(operator, of) == "AVAILABLE")
        wait_for(lambda: sum(asker.count for asker in askers) >= REQUESTS, seconds=240)
    finally:
        stop.set()
        for asker in askers:
            asker.join(60)
    assert [wrong for asker in askers for wrong in asker.wrong] == []
    for asker in askers:  # from version to version, and never back
        assert asker.values[0] == 1.0 and asker.values[-1] == (SWAPS + 1) % EXPORTS
        assert all((after - before) % EXPORTS <= EXPORTS / 2 for before, after in itertools.pairwise(asker.values)), (
            asker.values
        )
    told = operator.ask("GET", "/metrics")[1].decode()
    assert f'sok_serve_swaps_total{{model="ctr"}} {SWAPS}.0' in told
    answers = re.findall(r'sok_serve_requests_total\{.*model="ctr",status="(\d+)",version="(\d+)"\} ([\d.e+]+)', told)
    assert {status for status, _, _ in answers} == {"200"}
    assert {int(version) for _, version, _ in answers} == set(range(1, SWAPS + 2))
    assert sum(float(number) for _, _, number in answers) == sum(asker.count for asker in askers) >= REQUESTS
    # The others have left memory.
    wait_for(lambda: len(re.findall(r'loaded_version\{model="ctr"', operator.ask("GET", "/metrics")[1].decode())) == 1)


def states(client, version):
    status, told = client.ask("GET", f"{URL}/versions/{version}")
    return told["model_version_status"][0]["state"] if status == 200 else None


def test_a_damaged_version_does_not_replace_a_good_one_and_is_taken_up_when_it_is_mended(exports, served):
    folder, server = served
    client = Client(server.port)
    before = client.ask("POST", f"{URL}:predict", ASK)
    assert before[0] == 200
    (folder / "90").mkdir()  # no saved_model.pb yet
    publish(exports / "0", folder / "91", lambda partial: cut(*(partial / "variables").glob("*.index")))
    publish(exports / "3", folder / "92", lambda partial: cut(*(partial / "assets").glob("*.sok")))
    wait_for(lambda: states(client, 91) == states(client, 92) == "END")
    for version, words in ((91, "sstable"), (92, ".sok")):
        (told,) = client.ask("GET", f"{URL}/versions/{version}")[1]["model_version_status"]
        said = told["status"]["error_message"]
        assert told["status"]["error_code"] == "UNKNOWN" and words in said and f"{folder / str(version)}" in said
    assert client.ask("GET", f"{URL}/versions/90")[0] == 404
    assert client.ask("POST", f"{URL}:predict", ASK) == before
    (table,) = (exports / "3" / "assets").glob("*.sok")
    shutil.copy(table, folder / "92" / "assets")
    wait_for(lambda: states(client, 92) == "AVAILABLE")
    assert client.ask("POST", f"{URL}:predict", ASK)[1] == {"predictions": [[3.0], [0.0]]}
    # A version that is replaced in place is swapped, too.
    publish(exports / "2", folder / "new")
    (folder / "92").rename(folder / "old")
    (folder / "new").rename(folder / "92")
    wait_for(lambda: client.ask("POST", f"{URL}:predict", ASK)[1] == {"predictions": [[2.0], [0.0]]})
    # So is one from which a user's row is erased.
    publish(exports / "3", folder / "93")
    wait_for(lambda: client.ask("POST", f"{URL}:predict", ASK)[1] == {"predictions": [[3.0], [0.0]]})
    assert sok.erase("served_3_True", [7], exports=[folder / "93"]).is_complete
    wait_for(lambda: client.ask("POST", f"{URL}:predict", ASK)[1] == {"predictions": [[0.0], [0.0]]})


def cut(file):
    os.truncate(file, file.stat().st_size * 2 // 3)


def test_models_are_loaded_by_clients_only_where_the_server_says_so(served):
    status, told = ask(served[1].port, "POST", f"{URL}:unload")
    assert status == 403 and told == {"error": ":unload is offered where the server was started with --control."}


def test_sigterm_lets_running_requests_end_and_takes_no_new_ones(served):
    _, server = served
    answers = []

    def ask_slowly():
        body = {"signature_name": "slow", "inputs": 1500}
        answers.append(ask(server.port, "POST", "/v1/models/kinds/versions/5:predict", body))

    slow = threading.Thread(target=ask_slowly)
    slow.start()
    metrics = Client(server.port)
    wait_for(lambda: b"sok_serve_requests_running 1.0" in metrics.ask("GET", "/metrics")[1])
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: is_refused(server.port))
    assert answers == []
    assert server.process.wait(30) == 0, server.errors()
    slow.join(10)
    assert answers == [(200, {"outputs": 1500})]
    assert "ends: no new connections" in server.errors() and "Traceback" not in server.errors()


def is_refused(port):
    try:
        ask(port, "GET", URL)
    except ConnectionError:
        return True
    return False


STUCK = """
import json, os, signal, socket, sys, threading, time, urllib.error, urllib.request
from sok.tools import cli

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]


def ask():
    body = json.dumps({"signature_name": "slow", "inputs": 600_000}).encode()
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models/kinds:predict", body)
        except urllib.error.HTTPError as refused:
            print(refused.code, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        except OSError:
            time.sleep(0.05)


threading.Thread(target=ask, daemon=True).start()
sys.exit(cli.main(["serve", sys.argv[1], "--name", "kinds", "--port", str(port), "--timeout-seconds", "0.5"]))
"""


def test_a_model_that_never_returns_does_not_keep_the_server_from_ending(forked, tmp_path):
    save_kinds(tmp_path / "kinds")
    ended = forked.run(STUCK, tmp_path / "run", str(tmp_path / "kinds"), deadline=120)
    assert ended.status == 0, ended.stderr
    assert ended.stdout.splitlines()[1:] == ["504"]
    assert "ended while TensorFlow was still at work" in ended.stderr and "Traceback" not in ended.stderr
