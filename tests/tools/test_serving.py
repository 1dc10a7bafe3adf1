"""The REST of `sok serve`: TensorFlow Serving's requests and answers, words for what is wrong, control and limits."""

from __future__ import annotations

import base64
import gzip
import json
import math
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.tools import cli
from sok.tools.serving.gate import Limits
from sok.tools.serving.metrics import Metrics
from sok.tools.serving.models import Models
from sok.tools.serving.versions import versions_in
from tests.tools.conftest import LIMITS
from tests.tools.served_models import Client, ask, export_with, publish, save_kinds

ROOT = Path(__file__).resolve().parents[2]
CTR, KINDS = "/v1/models/ctr", "/v1/models/kinds"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """ctr/1 and ctr/2, native, answer 1 and 2 for id 7; kinds is a SavedModel of many signatures."""
    sok.Init()
    folder = tmp_path_factory.mktemp("models")
    export_with(1, folder / "ctr" / "1")
    export_with(2, folder / "ctr" / "2", native=True)
    save_kinds(folder / "kinds")
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    metrics = Metrics()
    models = Models(2, 0.05, metrics)
    models.add("ctr", str(folder / "ctr"))
    models.add("kinds", str(folder / "kinds"))
    yield models, metrics
    assert models.close(30)


@pytest.fixture(scope="module")
def port(serve, loaded):
    with serve(*loaded, LIMITS) as port:
        yield port


@pytest.fixture(scope="module")
def client(port):
    client = Client(port)
    yield client
    client.close()


def predicted(client, signature, told, status=200):
    answer = client.ask("POST", f"{KINDS}:predict", {"signature_name": signature, **told})
    assert answer[0] == status, answer
    return answer[1]


def test_status_and_metadata_are_those_of_tensorflow_serving(client):
    ok = {"error_code": "OK", "error_message": ""}
    versions = [{"version": str(number), "state": "AVAILABLE", "status": ok} for number in (2, 1)]
    assert client.ask("GET", CTR) == (200, {"model_version_status": versions})
    assert client.ask("GET", f"{CTR}/versions/1") == (200, {"model_version_status": versions[1:]})
    status, told = client.ask("GET", f"{CTR}/metadata")
    assert (status, told["model_spec"]) == (200, {"name": "ctr", "signature_name": "", "version": "2"})
    (signature,) = told["metadata"]["signature_def"]["signature_def"].values()
    assert signature["method_name"] == "tensorflow/serving/predict"
    assert signature["inputs"]["ids"]["dtype"] == "DT_INT64"
    sizes = [{"size": "-1", "name": ""}] * 2
    assert signature["inputs"]["ids"]["tensor_shape"] == {"dim": sizes, "unknown_rank": False}
    models = client.ask("GET", "/v1/models")[1]["models"]
    assert [model["name"] for model in models] == ["ctr", "kinds"] and models[0]["model_version_status"] == versions


def test_rows_and_columns_are_answered_in_their_form(client):
    rows = {"instances": [[7, 7], [1, 7]]}
    assert client.ask("POST", f"{CTR}:predict", rows) == (200, {"predictions": [[4.0], [2.0]]})
    named = {"instances": [{"ids": [7, 7]}, {"ids": [1, 7]}], "signature_name": "serving_default"}
    assert client.ask("POST", f"{CTR}/versions/2:predict", named) == (200, {"predictions": [[4.0], [2.0]]})
    for columns in ({"ids": [[7]]}, [[7]]):
        assert client.ask("POST", f"{CTR}/versions/1:predict", {"inputs": columns}) == (200, {"outputs": [[1.0]]})


def test_keys_are_exact_to_the_last_bit(client):
    keys = [0, 2**53 + 1, 2**63, 2**64 - 1]
    told = predicted(client, "two", {"inputs": {"a": keys, "b": [[0.2, 1]] * 4}})
    assert told["outputs"] == {"keys": keys, "half": [[0.1, 0.5]] * 4}
    rows = [{"a": key, "b": [1e-30, 16777216]} for key in keys]
    told = predicted(client, "two", {"instances": rows})
    assert told["predictions"] == [{"keys": key, "half": [5e-31, 8388608.0]} for key in keys]


def test_floats_read_back_as_they_are_and_say_when_they_are_no_numbers(client):
    values = np.concatenate([np.random.default_rng(1).lognormal(0, 20, 500).astype("f"), [np.float32(0.1)]])
    told = predicted(client, "logarithm", {"inputs": {"x": values.tolist()}})["outputs"]
    np.testing.assert_array_equal(np.array(told["y"], np.float32), tf.math.log(values).numpy())
    body = b'{"signature_name": "logarithm", "inputs": [0, -1, Infinity, NaN]}'
    y = client.ask("POST", f"{KINDS}:predict", body)[1]["outputs"]["y"]
    assert y[0] == -math.inf and math.isnan(y[1]) and y[2] == math.inf and math.isnan(y[3])


def test_strings_are_utf_8_or_base64(client):
    raw = b"\x00\xff"
    b64 = {"b64": base64.b64encode(raw).decode()}
    told = predicted(client, "strings", {"instances": ["caf\u00e9", b64]})["predictions"]
    assert told[0] == {"same": "caf\u00e9", "same_bytes": {"b64": base64.b64encode("caf\u00e9".encode()).decode()}}
    assert told[1] == {"same": b64, "same_bytes": b64}


@pytest.mark.parametrize(
    ("signature", "told", "words"),
    [
        ("two", {"inputs": {"a": [1]}}, "takes the inputs ['a', 'b']. The request has missing inputs ['b']."),
        ("two", {"inputs": {"a": [1], "b": [], "c": 1}}, "has unknown inputs ['c']."),
        ("two", {"inputs": {"a": [-1], "b": [[1, 2]]}}, "'a' must be uint64. Received: -1, which is out of range."),
        ("two", {"inputs": {"a": [2**64], "b": [[1, 2]]}}, "18446744073709551616, which is out of range"),
        ("two", {"inputs": {"a": [1.0], "b": [[1, 2]]}}, "'a' must be uint64. Received: 1.0."),
        ("two", {"inputs": {"a": [True], "b": [[1, 2]]}}, "'a' must be uint64. Received: true."),
        ("two", {"inputs": {"a": ["1"], "b": [[1, 2]]}}, "'a' must be uint64. Received: \"1\"."),
        ("two", {"inputs": {"a": [None], "b": [[1, 2]]}}, "'a' must be uint64. Received: null."),
        ("two", {"inputs": {"a": [{}], "b": [[1, 2]]}}, "'a' must be uint64. Received: an empty object."),
        ("two", {"inputs": {"a": [1], "b": [[1, 2, 3]]}}, "'b' must have the shape [None, 2]. Received: [1, 3]."),
        ("two", {"inputs": {"a": [1], "b": [[1, 2], [3]]}}, "'b' is ragged: lists of one level must have one length."),
        ("two", {"inputs": {"a": [1], "b": [[1, [2]]]}}, "must be float32. Received: a list."),
        ("two", {"inputs": {"a": [1], "b": [[1, 2], 3]}}, "'b' has lists beside values at depth 1."),
        ("two", {"inputs": {"a": [1], "b": [[1e39, 2]]}}, "'b' must be float32. Received: 1e+39, which would not be"),
        ("two", {"inputs": {"a": [1], "b": [[2**24 + 1, 2]]}}, "Received: 16777217, which would not be exact."),
        ("two", {"inputs": {"a": [1], "b": [[10**400, 2]]}}, "which is out of range."),
        ("two", {"inputs": [1]}, "'inputs' must name the inputs, as the signature takes several: ['a', 'b']."),
        ("two", {"instances": [1]}, "'instances' must name the inputs"),
        (
            "two",
            {"instances": [{"a": 1, "b": [1, 2]}, {"a": 1}]},
            "Row 1 of 'instances' must have the inputs ['a', 'b']",
        ),
        ("two", {"instances": [{"a": 1, "b": [1, 2]}, 5]}, "as row 0. It has 5."),
        ("two", {"instances": []}, "'instances' must be a list of at least one row. Received: an empty list."),
        ("two", {"instances": {}}, "Received: an empty object."),
        ("two", {"inputs": {}, "instances": []}, "must have either 'instances' or 'inputs'."),
        ("two", {}, "must have either 'instances' or 'inputs'. Received: ['signature_name']."),
        (5, {"inputs": 1}, "'signature_name' must be a string. Received: 5."),
        ("none", {"inputs": 1}, "Serving signature name: \"none\" not found. The model has: ['gathered', 'logarithm',"),
        ("strings", {"inputs": [5]}, "'text' must be strings, or {\"b64\": ...}. Received: 5."),
        ("strings", {"inputs": [{"b64": "?"}]}, "'text': not base64: "),
        ("logarithm", {"instances": [1, 2]}, "The outputs have no rows in common: {'rows': [1], 'y': [2]}. Ask with"),
        ("gathered", {"inputs": [9]}, "indices[0] = 9 is not in [0, 3)"),
    ],
)
def test_a_request_that_cannot_be_answered_says_why(client, signature, told, words):
    error = predicted(client, signature, told, status=400)["error"]
    assert words in error and "Detected at node" not in error


def test_other_urls_and_bodies_have_their_status_and_words(client):
    for method, path, body, status, words in (
        ("POST", f"{CTR}:predict", b"{", 400, "JSON Parse error: Expecting property name"),
        ("POST", f"{CTR}:predict", b"\xff", 400, "JSON Parse error: 'utf-8' codec can't decode"),
        ("POST", f"{CTR}:predict", b"[" * 50_000, 400, "JSON Parse error: "),
        ("POST", f"{CTR}:predict", [1], 400, "must be a JSON object with 'instances' or 'inputs'. Received: a list."),
        ("POST", "/v1/models/no:predict", {"inputs": 1}, 404, "Could not find any versions of model no"),
        ("POST", f"{CTR}/versions/9:predict", {"inputs": 1}, 404, "Specific(ctr, 9). Loaded versions: 1, 2."),
        ("GET", f"{CTR}/versions/9", None, 404, "Could not find version 9 of model ctr"),
        ("GET", f"{CTR}/versions/9/metadata", None, 404, "Servable not found"),
        ("GET", f"{CTR}/labels/stable", None, 404, "Versions have no labels here"),
        ("POST", f"{CTR}:classify", {}, 501, ":classify takes tf.Examples"),
        ("POST", f"{CTR}:regress", {}, 501, ":regress takes tf.Examples"),
        ("POST", f"{CTR}:other", {}, 404, "There is no :other. There are: :predict"),
        ("GET", f"{CTR}:predict", None, 405, "Method Not Allowed"),
        ("GET", "/", None, 404, "GET /: Not Found"),
    ):
        answer = client.ask(method, path, body)
        assert answer[0] == status and words in answer[1]["error"], answer


def test_names_that_clients_invent_are_no_labels(client):
    client.ask("POST", "/v1/models/invented:predict", {"inputs": 1})
    for path in ("/metrics", "/monitoring/prometheus/metrics"):
        status, told = client.ask("GET", path)
        assert status == 200 and b"invented" not in told and b'status="404",version=""' in told
        assert b'sok_serve_loaded_version{model="ctr",version="2"} 1.0' in told
        assert b"sok_serve_request_seconds_bucket" in told and b"process_resident_memory_bytes" in told


def test_clients_load_and_unload_versions_and_models(client, folder):
    assert client.ask("POST", f"{CTR}/versions/2:unload")[0] == 200  # back to the older version
    assert client.ask("POST", f"{CTR}:predict", {"inputs": [[7]]})[1] == {"outputs": [[1.0]]}
    time.sleep(0.2)  # the watching does not bring it back
    assert client.ask("POST", f"{CTR}/versions/2:predict", {"inputs": [[7]]})[0] == 404
    assert client.ask("POST", f"{CTR}/versions/2:load")[0] == 200
    assert client.ask("POST", f"{CTR}:predict", {"inputs": [[7]]})[1] == {"outputs": [[2.0]]}
    assert client.ask("POST", f"{CTR}:unload")[0] == 200
    status, told = client.ask("POST", f"{CTR}:predict", {"inputs": [[7]]})
    assert (status, told["error"]) == (404, "Servable not found for request: Latest(ctr). Loaded versions: none.")
    assert client.ask("POST", f"{CTR}:load")[0] == 200
    assert client.ask("POST", f"{CTR}:predict", {"inputs": [[7]]})[1] == {"outputs": [[2.0]]}
    # An older one stays beside the newest; here two are kept, and 1 is the third.
    publish(folder / "ctr" / "2", folder / "ctr" / "5")
    publish(folder / "ctr" / "2", folder / "ctr" / "6")
    assert client.ask("POST", f"{CTR}/versions/1:load")[0] == 200
    answers = [client.ask("POST", f"{CTR}/versions/{n}:predict", {"inputs": [[7]]})[0] for n in (1, 2, 5, 6)]
    assert answers == [200, 404, 200, 200]
    for number in (5, 6):
        shutil.rmtree(folder / "ctr" / str(number))
        assert client.ask("POST", f"{CTR}/versions/{number}:unload")[0] == 200
    assert client.ask("POST", f"{CTR}/versions/2:predict", {"inputs": [[7]]})[1] == {"outputs": [[2.0]]}
    assert client.ask("POST", "/v1/models/other:load", {"path": str(folder / "ctr" / "1")})[0] == 200
    assert client.ask("POST", "/v1/models/other/versions/1:predict", {"inputs": [[7]]})[1] == {"outputs": [[1.0]]}


def test_what_cannot_be_loaded_or_unloaded_says_why(client, folder, tmp_path):
    publish(folder / "ctr" / "1", tmp_path / "1", lambda path: (path / "saved_model.pb").write_bytes(b"no"))
    for path, body, status, words in (
        (f"{CTR}/versions/9:load", None, 404, "has no version 9 at "),
        (f"{CTR}/versions/9:unload", None, 404, "Model ctr has not loaded 9."),
        ("/v1/models/no:load", None, 404, "Could not find any versions of model no"),
        ("/v1/models/ctr:load", {"path": "/"}, 409, "There is a model ctr already"),
        ("/v1/models/new/versions/1:load", {"path": "/"}, 400, "without /versions/N"),
        ("/v1/models/new:load", {"path": str(tmp_path / "none")}, 404, "none: No such file or directory."),
        ("/v1/models/new:load", {"path": str(folder / "kinds" / "variables")}, 404, "neither a SavedModel nor a"),
        ("/v1/models/new:load", {"path": str(tmp_path)}, 500, "no version can be loaded: version 1: "),
        ("/v1/models/a b:load", {"path": "/"}, 400, "The name of a model must be of letters"),
        ("/v1/models/new:load", {"paths": 1}, 400, 'must be empty, or {"path": FOLDER}'),
        ("/v1/models/new:load", b"{", 400, "JSON Parse error"),
    ):
        answer = client.ask("POST", path.replace(" ", "%20"), body)
        assert answer[0] == status and words in answer[1]["error"], answer
    browser = client.ask("POST", f"{CTR}:unload", None, {"Origin": "http://example.com"})
    assert browser == (403, {"error": ":unload is not for pages in browsers."})


def test_a_damaged_version_that_is_asked_for_is_refused_and_the_others_serve(client, folder):
    publish(folder / "ctr" / "1", folder / "ctr" / "3", lambda path: shutil.rmtree(path / "variables"))
    try:
        status, told = client.ask("POST", f"{CTR}/versions/3:load")
        assert status == 500 and "Version 3 of model ctr was not loaded: " in told["error"]
        assert client.ask("POST", f"{CTR}:predict", {"inputs": [[7]]})[1] == {"outputs": [[2.0]]}
    finally:
        shutil.rmtree(folder / "ctr" / "3")


def test_too_large_requests_are_refused(client, port):
    status, told = ask(port, "POST", f"{CTR}:predict", b" " * 100_001)
    assert (status, told["error"]) == (413, "The request is larger than 100,000 bytes (--max-request-bytes).")
    packed = {"Content-Encoding": "gzip"}
    bomb = gzip.compress(b" " * 10_000_000)
    assert len(bomb) < 100_000 and ask(port, "POST", f"{CTR}:predict", bomb, packed)[0] == 413
    small = gzip.compress(b'{"inputs": [[7]]}')
    assert client.ask("POST", f"{CTR}:predict", small, packed) == (200, {"outputs": [[2.0]]})


def test_requests_that_take_too_long_or_are_too_many_are_refused(serve, loaded):
    slow = {"signature_name": "slow", "inputs": 1000}
    with serve(*loaded, Limits(100_000, seconds=0.3, requests=2, threads=1)) as port:
        start, answers = time.monotonic(), []
        threads = [threading.Thread(target=lambda: answers.append(ask(port, "POST", f"{KINDS}:predict", slow)))]
        threads[0].start()
        with socket.create_connection(("127.0.0.1", port)) as half:  # the second request never arrives as a whole
            half.sendall(f"POST {CTR}:predict HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode())
            while b"sok_serve_requests_running 2.0" not in ask(port, "GET", "/metrics")[1]:
                assert time.monotonic() < start + 30
            status, told = ask(port, "POST", f"{CTR}:predict", {"inputs": [[7]]})
            words = "The server has 2 requests at once already (--max-requests). Ask again later."
            assert (status, told["error"]) == (429, words)
            assert half.recv(1000).startswith(b"HTTP/1.1 408 ")
        threads[0].join(30)
        assert answers == [(504, {"error": "No answer within 0.3 seconds (--timeout-seconds)."})]
        # Its thread is at work still: the next one waits for it in vain, too, and then there is room again.
        while (status := ask(port, "POST", f"{CTR}:predict", {"inputs": [[7]]})[0]) != 200:
            assert status in (504, 429) and time.monotonic() < start + 30
    assert time.monotonic() > start + 0.9


def test_without_control_nothing_is_loaded(serve, loaded):
    with serve(*loaded, LIMITS, with_control=False) as port:
        for verb in ("load", "unload"):
            status, told = ask(port, "POST", f"{CTR}:{verb}")
            assert status == 403 and "--control" in told["error"]


def test_the_example_asks_for_predictions(port):
    url = f"http://127.0.0.1:{port}/v1/models/ctr"
    command = [sys.executable, str(ROOT / "examples" / "serve_client.py"), "--url", url]
    done = subprocess.run([*command, '{"ids": [[7], [1]]}'], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[2.0], [0.0]]
    done = subprocess.run([*command, '{"ids": [["a"]]}'], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "answered 400: Input 'ids' must be int64" in done.stderr


def test_versions_are_numbered_folders_with_a_model(folder, tmp_path):
    assert {n: found.path for n, found in versions_in(str(folder / "ctr")).items()} == {
        number: str(folder / "ctr" / str(number)) for number in (1, 2)
    }
    publish(folder / "ctr" / "1", tmp_path / "4")
    before = versions_in(str(tmp_path))[4]
    assert versions_in(str(tmp_path))[4] == before
    (tmp_path / "4" / "assets.extra" / "note").write_text("new")
    assert versions_in(str(tmp_path))[4].stamp != before.stamp


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give EXPORT, or --model NAME=PATH"),
        (["--name", "x"], "--name is that of EXPORT, which is missing."),
        (["--model", "x"], "--model must be NAME=PATH. Received: 'x'."),
        (["a/x", "--model", "x=b"], "Two models have the name 'x': a/x and b."),
        (["/no/such"], "sok serve: /no/such: No such file or directory."),
        (["/", "--name", "a/b"], "The name of a model must be of letters"),
        (["/", "--name", "root"], "/: neither a SavedModel nor a folder of numbered ones (1/, 2/, ...)."),
    ],
)
def test_what_cannot_be_served_ends_the_command_with_words(capsys, arguments, words):
    assert cli.main(["serve", "--port", "0", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_a_port_that_is_taken_and_packages_that_are_missing_are_told(capsys, monkeypatch, folder, port):
    assert cli.main(["serve", str(folder / "ctr"), "--port", str(port)]) == 1
    assert f"cannot listen at 127.0.0.1, port {port}: Address already in use." in capsys.readouterr().err
    for package in ("aiohttp", "prometheus_client"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, package, None)
            assert cli.main(["serve", str(folder / "ctr")]) == 1
        words = f"sok serve: needs {package}, which is not installed: pip install 'sok[serve]'\n"
        assert capsys.readouterr().err == words


@pytest.mark.parametrize("flag", ["--port=70000", "--threads=0", "--poll-seconds=0", "--max-request-bytes=many"])
def test_numbers_that_make_no_sense_are_refused(capsys, flag):
    with pytest.raises(SystemExit):
        cli.main(["serve", "x", flag])
    assert f"argument {flag.partition('=')[0]}: '{flag.partition('=')[2]}' is no" in capsys.readouterr().err
