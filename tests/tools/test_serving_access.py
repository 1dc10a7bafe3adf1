"""Certificates and tokens of `sok serve`: who is let in, who is told no, and what a change of the files does."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trustme

import sok
from sok.tools import cli
from sok.tools.serving.access import Access, Files
from sok.tools.serving.metrics import Metrics
from sok.tools.serving.models import Models
from sok.tools.serving.refusal import Refused
from tests.tools.conftest import LIMITS
from tests.tools.served_models import ask, export_with

ROOT = Path(__file__).resolve().parents[2]
CTR = "/v1/models/ctr"
QUESTION = {"inputs": [[7]]}
TOKEN, OTHER, CONTROL = "a" * 16, "b" * 32, "Control-token~0123456789"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    sok.Init()
    folder = tmp_path_factory.mktemp("models")
    export_with(3, folder / "ctr" / "1")
    metrics = Metrics()
    models = Models(1, 0.05, metrics)
    models.add("ctr", str(folder / "ctr"))
    yield models, metrics
    assert models.close(30)


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def secrets(tmp_path, authority):
    """The files of a server, and those of a client."""
    one = authority.issue_cert("127.0.0.1", "localhost")
    one.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    one.private_key_pem.write_to_path(tmp_path / "key.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("client@example.org").private_key_and_cert_chain_pem.write_to_path(tmp_path / "client.pem")
    (tmp_path / "tokens").write_text(f"# of clients\n{TOKEN}\n\n{OTHER}\n")
    (tmp_path / "control").write_text(CONTROL)
    return tmp_path


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def over_tls(port, path, folder, cert=None, headers=None):
    """Status, answer and the number of the server's certificate."""
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if cert is not None:
        context.load_cert_chain(cert)
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)
    try:
        connection.request("GET", path, headers=headers or {})
        serial = connection.sock.getpeercert()["serialNumber"]
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()), serial
    finally:
        connection.close()


def test_tokens_say_who_may_ask_and_who_may_load(serve, loaded, secrets):
    access = Access(Files(tokens=str(secrets / "tokens"), control_tokens=str(secrets / "control")))
    with serve(*loaded, LIMITS, access=access) as port:
        for path in (CTR, "/v1/models", "/metrics", "/nowhere"):
            status, told = ask(port, "GET", path)
            assert (status, told["error"]) == (401, "A token is wanted: Authorization: Bearer TOKEN.")
        for wrong in ("Bearer", "Basic " + TOKEN, "Bearer " + TOKEN[1:], f"Bearer {TOKEN} {TOKEN}", "Bearer ä" + TOKEN):
            for encoding in ("utf-8", "latin-1"):
                headers = {"Authorization": wrong.encode(encoding)}
                assert ask(port, "POST", f"{CTR}:predict", QUESTION, headers)[0] == 401
        for token in (TOKEN, OTHER, CONTROL):
            answer = ask(port, "POST", f"{CTR}:predict", QUESTION, bearer(token))
            assert answer == (200, {"outputs": [[3.0]]})
        for token, status in ((TOKEN, 401), (OTHER, 401), (CONTROL, 200)):
            assert ask(port, "POST", f"{CTR}/versions/1:load", None, bearer(token))[0] == status
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", CTR)
        assert connection.getresponse().headers["WWW-Authenticate"] == 'Bearer realm="sok serve"'
        connection.close()


def test_control_alone_may_want_a_token(serve, loaded, secrets):
    with serve(*loaded, LIMITS, access=Access(Files(control_tokens=str(secrets / "control")))) as port:
        assert ask(port, "GET", CTR)[0] == 200
        assert ask(port, "POST", f"{CTR}/versions/1:load")[0] == 401
        assert ask(port, "POST", f"{CTR}/versions/1:load", None, bearer(CONTROL))[0] == 200
    # Without a file of its own, control wants the token of any client.
    access = Access(Files(tokens=str(secrets / "tokens")), with_control=True)
    with serve(*loaded, LIMITS, access=access) as port:
        assert ask(port, "POST", f"{CTR}/versions/1:load")[0] == 401
        assert ask(port, "POST", f"{CTR}/versions/1:load", None, bearer(TOKEN))[0] == 200


def test_tls_has_the_servers_certificate_and_wants_that_of_clients(serve, loaded, secrets, authority):
    pair = {"cert": str(secrets / "cert.pem"), "key": str(secrets / "key.pem")}
    with serve(*loaded, LIMITS, access=Access(Files(**pair))) as port:
        assert over_tls(port, CTR, secrets)[0] == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            http.client.HTTPSConnection("127.0.0.1", port, timeout=60).request("GET", CTR)
        with pytest.raises((http.client.HTTPException, OSError)):
            ask(port, "GET", CTR)  # nothing is answered in the clear
    access = Access(Files(**pair, client_ca=str(secrets / "ca.pem")))
    with serve(*loaded, LIMITS, access=access) as port:
        assert over_tls(port, CTR, secrets, secrets / "client.pem")[0] == 200
        with pytest.raises(OSError):
            over_tls(port, CTR, secrets)
        stranger = secrets / "stranger.pem"
        trustme.CA().issue_cert("client@example.org").private_key_and_cert_chain_pem.write_to_path(stranger)
        with pytest.raises(OSError):
            over_tls(port, CTR, secrets, stranger)


def test_an_authority_that_is_added_is_trusted_at_once_and_one_that_leaves_stays(serve, loaded, secrets):
    trusted = secrets / "trusted.pem"
    trustme.CA().cert_pem.write_to_path(trusted)
    stranger = trusted.read_bytes()
    files = Files(str(secrets / "cert.pem"), str(secrets / "key.pem"), client_ca=str(trusted))
    access = Access(files)
    with serve(*loaded, LIMITS, access=access) as port:
        with pytest.raises(OSError):
            over_tls(port, CTR, secrets, secrets / "client.pem")
        for content in (stranger + (secrets / "ca.pem").read_bytes(), stranger):
            trusted.write_bytes(content)
            access.refresh()
            assert over_tls(port, CTR, secrets, secrets / "client.pem")[0] == 200


def test_files_that_change_are_read_anew_and_bad_ones_are_not_taken(serve, loaded, secrets, authority, caplog):
    pair = {"cert": str(secrets / "cert.pem"), "key": str(secrets / "key.pem")}
    access = Access(Files(**pair, tokens=str(secrets / "tokens")))
    with serve(*loaded, LIMITS, access=access) as port:
        first = over_tls(port, CTR, secrets, headers=bearer(TOKEN))
        access.refresh()
        assert "anew" not in caplog.text
        other = authority.issue_cert("127.0.0.1")
        other.cert_chain_pems[0].write_to_path(secrets / "cert.pem")
        access.refresh()  # the key is still that of the first
        assert "stay as they were: --tls-cert" in caplog.text
        assert over_tls(port, CTR, secrets, headers=bearer(TOKEN)) == first
        other.private_key_pem.write_to_path(secrets / "key.pem")
        (secrets / "tokens").write_text(OTHER)
        access.refresh()
        assert over_tls(port, CTR, secrets, headers=bearer(TOKEN))[0] == 401
        status, _, serial = over_tls(port, CTR, secrets, headers=bearer(OTHER))
        assert status == 200 and serial != first[2]
        (secrets / "tokens").unlink()
        access.refresh()
        assert "cannot be read" in caplog.text
        assert over_tls(port, CTR, secrets, headers=bearer(OTHER))[0] == 200


def test_the_command_serves_over_tls_and_takes_a_new_token(secrets, tmp_path):
    sok.Init()
    export_with(4, tmp_path / "m")
    command = [sys.executable, "-m", "sok", "serve", str(tmp_path / "m"), "--port", "0", "--poll-seconds", "0.05"]
    command += ["--tls-cert", str(secrets / "cert.pem"), "--tls-key", str(secrets / "key.pem")]
    command += ["--token-file", str(secrets / "tokens")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        said = server.stdout.readline()
        port = int(re.match(r"https://127\.0\.0\.1:(\d+)/v1/models serves m", said)[1])
        asked = lambda token: over_tls(port, "/v1/models/m", secrets, headers=bearer(token))[0]  # noqa: E731
        assert (asked(TOKEN), asked(CONTROL)) == (200, 401)
        (secrets / "tokens").write_text(CONTROL)
        ends = time.monotonic() + 30
        while asked(CONTROL) != 200:
            assert time.monotonic() < ends
        assert asked(TOKEN) == 401
        server.terminate()
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait(60)
        server.stdout.close()


def test_the_example_asks_with_a_token_over_tls(serve, loaded, secrets):
    files = Files(str(secrets / "cert.pem"), str(secrets / "key.pem"), tokens=str(secrets / "tokens"))
    with serve(*loaded, LIMITS, access=Access(files)) as port:
        command = [
            sys.executable,
            str(ROOT / "examples" / "serve_client.py"),
            "--url",
            f"https://localhost:{port}{CTR}",
        ]
        command += ["--ca", str(secrets / "ca.pem"), '{"ids": [[7]]}']
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and "answered 401" in done.stderr
        (secrets / "token").write_text(TOKEN + "\n")
        command += ["--token-file", str(secrets / "token")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout.strip()) == (0, "[[3.0]]"), done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tls-key", "key.pem"], "are of a server with --tls-cert, which is missing"),
        (["--tls-client-ca", "ca.pem"], "are of a server with --tls-cert, which is missing"),
        (["--tls-cert", "none.pem"], "must be a certificate and its key"),
        (["--tls-cert", "cert.pem"], "--tls-key (the same file) must be a certificate and its key"),
        (["--tls-cert", "cert.pem", "--tls-key", "encrypted.pem"], "without a passphrase"),
        (
            ["--tls-cert", "cert.pem", "--tls-key", "key.pem", "--tls-client-ca", "tokens"],
            "certificates of authorities",
        ),
        (["--token-file", "none"], "cannot be read: [Errno 2] No such file or directory"),
        (["--token-file", "empty"], "has no token: one a line"),
        (["--control-token-file", "short"], "token 2 in"),
    ],
)
def test_secrets_that_are_none_end_the_command_with_words(capsys, secrets, options, words):
    (secrets / "empty").write_text("# nobody\n")
    (secrets / "short").write_text(f"{TOKEN}\nshort\n")
    key = (secrets / "key.pem").read_bytes()
    from cryptography.hazmat.primitives import serialization

    encrypted = serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (secrets / "encrypted.pem").write_bytes(encrypted)
    arguments = [one if one.startswith("--") else str(secrets / one) for one in options]
    assert cli.main(["serve", str(secrets), "--port", "0", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_checks_are_of_whole_tokens(tmp_path):
    (tmp_path / "tokens").write_text(TOKEN)
    access = Access(Files(tokens=str(tmp_path / "tokens")))
    access.check(f"bearer {TOKEN}", is_control=False)
    for wrong in (None, "", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}"):
        with pytest.raises(Refused) as refused:
            access.check(wrong, is_control=False)
        assert refused.value.status == 401
    shutil.rmtree(tmp_path)
    access.refresh()  # what was read stays
    access.check(f"Bearer {TOKEN}", is_control=True)
