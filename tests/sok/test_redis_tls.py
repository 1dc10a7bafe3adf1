"""Rows in Redis over TLS: who is trusted, who is not, and that deadlines hold."""

import time

import numpy as np
import pytest
import tensorflow as tf
import trustme

import sok
from sok.saved_model.redis_place import place_of
from tests.sok.export_models import Rows, ids_spec
from tests.sok.redis_needed import NEEDED, redis_servers
from tests.sok.test_redis import ERRORS, filled, loaded

pytestmark = NEEDED

PATIENT = {"timeout_ms": 20_000, "connect_timeout_ms": 10_000}  # on a machine that has other things to do


@pytest.fixture(scope="module", autouse=True)
def init():
    sok.Init()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """ca.pem; server.pem of 127.0.0.1, other.pem of another host, client.pem: each with its key."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    trustme.CA().cert_pem.write_to_path(folder / "stranger.pem")
    for name, host in (("server", "127.0.0.1"), ("other", "other.example"), ("client", "reader.example")):
        one = authority.issue_cert(host)
        one.private_key_and_cert_chain_pem.write_to_path(folder / f"{name}.pem")
    return folder


def tls(folder, name="server", wants_client=False):
    pair = str(folder / f"{name}.pem")
    return redis_servers.Tls(pair, pair, str(folder / "ca.pem"), wants_client)


@pytest.fixture(scope="module")
def server(folder):
    with redis_servers.servers(1, tls=tls(folder)) as (one,):
        yield one


def place(server, prefix, scheme="rediss", **more):
    settings = "".join(f"&{name}={value}" for name, value in (PATIENT | more).items())
    return f"{scheme}://{server.address}/0?prefix={prefix}{settings}"


def exported(table, path, url):
    sok.export_saved_model(Rows(table), path, signatures=ids_spec(table.key_dtype), rows=url)
    return loaded(path)


def test_rows_come_over_tls_many_at_a_time_too(server, folder, tmp_path):
    table, keys = filled("tls", n=6000, dim=64)
    served = exported(table, tmp_path / "1", place(server, "many", ca=folder / "ca.pem", cache_bytes=0))
    for asked in (keys[:3], keys, keys[::-1]):  # of 1.5 MB, which takes records and packets
        np.testing.assert_array_equal(served(asked), Rows(table)(tf.constant(asked)).numpy())


def test_a_server_that_is_not_trusted_is_told_nothing(server, folder, tmp_path, monkeypatch):
    table, _ = filled("distrust", n=20)
    url = place(server, "distrust", ca=folder / "ca.pem", timeout_ms=500)
    exported(table, tmp_path / "1", url)
    with pytest.raises(OSError, match="certificate verify failed"):
        exported(table, tmp_path / "2", place(server, "other", ca=folder / "stranger.pem"))
    monkeypatch.setenv("SOK_REDIS_CA", str(folder / "stranger.pem"))
    with pytest.raises(ERRORS.FailedPreconditionError, match="TLS: the server's certificate is not trusted: self"):
        loaded(tmp_path / "1")
    monkeypatch.setenv("SOK_REDIS_CA", "/no/such/file")
    with pytest.raises(ERRORS.FailedPreconditionError, match="TLS: /no/such/file does not hold certificates"):
        loaded(tmp_path / "1")
    monkeypatch.setenv("SOK_REDIS_CA", str(folder / "ca.pem"))
    monkeypatch.setenv("SOK_REDIS_CERT", str(folder / "ca.pem"))
    with pytest.raises(ERRORS.FailedPreconditionError, match="does not hold the key of"):
        loaded(tmp_path / "1")
    monkeypatch.delenv("SOK_REDIS_CERT")
    loaded(tmp_path / "1")


def test_the_certificate_must_be_of_the_host_unless_it_need_not(folder, tmp_path):
    table, keys = filled("host", n=20)
    with redis_servers.servers(1, tls=tls(folder, "other")) as (server,):
        url = place(server, "host", ca=folder / "ca.pem")
        with pytest.raises(OSError, match="IP address mismatch"):
            exported(table, tmp_path / "1", url)
        served = exported(table, tmp_path / "2", url + "&check_hostname=0")
        np.testing.assert_array_equal(served(keys), Rows(table)(tf.constant(keys)).numpy())


def test_clients_show_their_certificate_where_it_is_wanted(folder, tmp_path, monkeypatch):
    table, keys = filled("client", n=20)
    with redis_servers.servers(1, tls=tls(folder, wants_client=True)) as (server,):
        url = place(server, "client", ca=folder / "ca.pem")
        with pytest.raises(OSError, match="no server that can be written"):
            exported(table, tmp_path / "1", url)
        served = exported(table, tmp_path / "2", url + f"&cert={folder / 'client.pem'}&key={folder / 'client.pem'}")
        np.testing.assert_array_equal(served(keys), Rows(table)(tf.constant(keys)).numpy())
        # The writer's files may be in its environment; a reader's, too.
        for variable in ("SOK_REDIS_CERT", "SOK_REDIS_KEY"):
            monkeypatch.setenv(variable, str(folder / "client.pem"))
        exported(table, tmp_path / "3", url)


def test_one_side_without_tls_is_an_error_in_time(server, folder, tmp_path):
    table, _ = filled("clear", n=20)
    short = {"timeout_ms": 300, "connect_timeout_ms": 300}
    with pytest.raises(OSError, match="no server that can be written"):
        exported(table, tmp_path / "1", place(server, "clear", "redis", **short))
    with redis_servers.servers(1) as (clear,):
        with pytest.raises(OSError, match="no server that can be written"):
            exported(table, tmp_path / "2", place(clear, "clear", ca=folder / "ca.pem", **short))
        exported(table, tmp_path / "3", place(clear, "clear", "redis", **short))
        # As a reader meets it: the same rows by another way.
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("SOK_REDIS_ADDRESS", server.address)
            with pytest.raises(ERRORS.DeadlineExceededError, match="Redis did not answer|closed"):
                loaded(tmp_path / "3")
    exported(
        table, tmp_path / "4", place(server, "clear", ca=folder / "ca.pem", **(short | {"connect_timeout_ms": 5000}))
    )
    with redis_servers.servers(1) as (clear,), pytest.MonkeyPatch.context() as patched:
        patched.setenv("SOK_REDIS_ADDRESS", clear.address)
        with pytest.raises(ERRORS.DeadlineExceededError, match="no answer in time|no connection within"):
            loaded(tmp_path / "4")


def test_a_server_that_hangs_while_hands_are_shaken_is_an_error_in_time(folder, tmp_path, monkeypatch):
    table, keys = filled("hang", n=20)
    with redis_servers.servers(1, tls=tls(folder)) as (server,):
        served = exported(
            table, tmp_path / "1", place(server, "hang", ca=folder / "ca.pem", cache_bytes=0, timeout_ms=500)
        )
        served(keys)
        server.stop()
        start = time.monotonic()
        with pytest.raises(ERRORS.DeadlineExceededError):
            served(keys)  # by a connection that is there
        with pytest.raises(ERRORS.DeadlineExceededError, match="no connection within|no answer in time"):
            served(keys)  # by a new one, whose bytes nobody answers
        assert time.monotonic() - start < 10
        server.go_on()
        np.testing.assert_array_equal(served(keys), Rows(table)(tf.constant(keys)).numpy())


def test_a_cluster_over_tls_goes_on_without_a_primary(folder, tmp_path):
    table, keys = filled("cluster_tls", n=500)
    with redis_servers.cluster(3, 1, tls=tls(folder)) as nodes:
        url = place(nodes[0], "cluster", ca=folder / "ca.pem", cache_bytes=0)
        served = exported(table, tmp_path / "1", url)
        expected = Rows(table)(tf.constant(keys)).numpy()
        np.testing.assert_array_equal(served(keys), expected)
        nodes[1].kill()
        np.testing.assert_array_equal(served(keys), expected)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://a?prefix=p&ca=/x", "'ca' is a setting of TLS"),
        ("redis://a?prefix=p&check_hostname=0", "'check_hostname' is a setting of TLS"),
        ("rediss://a?prefix=p&check_hostname=2", r"check_hostname must be in \[0, 1\]"),
        ("rediss://a?prefix=p&ca=" + "x" * 401, "ca must be the path of a file"),
        ("rediss://a?prefix=p&key=a%0Ab", "key must be the path of a file"),
    ],
)
def test_settings_that_make_no_sense_are_refused(url, said):
    with pytest.raises(ValueError, match=said):
        place_of(url)


def test_a_place_says_that_it_talks_tls():
    one = place_of("rediss://me:secret@a/2?prefix=p&ca=/ca.pem&check_hostname=0")
    assert (one.tls, one.ca, one.cert, one.check_hostname) == (True, "/ca.pem", "", 0)
    assert str(one) == "rediss://me@a:6379/2?prefix=p"
    assert "tls 1\nca /ca.pem\ncert \nkey \ncheck_hostname 0\n" in one.source("1-a", 0, 4)
