"""Whether `sok verify` sees what is wrong with rows in Redis."""

import numpy as np
import pytest

import sok
from sok.saved_model.redis_place import RedisPlace
from sok.saved_model.table_file import TableFile
from sok.saved_model.verifying import verify_export
from tests.sok.export_models import Rows, ids_spec
from tests.sok.redis_needed import NEEDED, redis_servers

pytestmark = NEEDED


@pytest.fixture(scope="module")
def server():
    sok.Init()
    with redis_servers.servers(1) as (one,):
        yield one


@pytest.fixture
def exported(server, tmp_path, request):
    """An export, and the names of its buckets that have rows."""
    table = sok.EmbeddingVariable(3, 400, name="verified", initializer="uniform")
    table.assign(np.arange(400) * 7919, np.random.default_rng(1).normal(size=(400, 3)).astype("f"))
    prefix = f"verified{abs(hash(request.node.name))}"
    rows = f"redis://{server.address}/0?prefix={prefix}"
    sok.export_saved_model(Rows(table), tmp_path / "1", signatures=ids_spec(table.key_dtype), rows=rows)
    (file,) = TableFile.all_in(str(tmp_path / "1")).values()
    place, words = RedisPlace.of_source(file.source, {})
    names = place.bucket_names(words["version"], int(words["table"]), int(words["bucket_bits"]))
    client = server.client()
    return str(tmp_path / "1"), client, [name for name in names if client.hlen(name) > 3]


def wrong_in(path):
    return verify_export(path)[1]


def test_whole_rows_are_whole_until_one_byte_is_another(exported):
    path, client, names = exported
    heads, wrong = verify_export(path)
    assert wrong == [] and heads[0].num_rows == 400
    field = next(one for one in client.hkeys(names[0]) if one != b"h")
    value = client.hget(names[0], field)
    for at in (0, len(value) - 1):
        damaged = bytearray(value)
        damaged[at] ^= 4
        client.hset(names[0], field, bytes(damaged))
        key = int.from_bytes(field, "little", signed=True)
        assert wrong_in(path) == [f"{names[0]}: the row of key {key} is not what was written."]
    client.hset(names[0], field, value)
    assert wrong_in(path) == []


def test_rows_that_are_missing_too_many_or_elsewhere_are_told(exported):
    path, client, names = exported
    fields = [one for one in client.hkeys(names[1]) if one != b"h"]
    client.hset(names[0], fields[0], client.hget(names[1], fields[0]))
    told = wrong_in(path)
    assert "its header says" in told[0] and "belongs into another bucket" in told[1] and len(told) == 2
    client.hdel(names[0], fields[0])
    client.hdel(names[1], fields[0])
    (told,) = wrong_in(path)
    assert told.startswith(f"{names[1]}: has {len(fields) - 1:,} rows, and its header says")
    client.hset(names[1], b"nonsense", b"1")
    assert any("is no row of the table" in line for line in wrong_in(path))


def test_a_bucket_and_a_version_that_are_gone_are_told(exported):
    path, client, names = exported
    client.delete(names[0])
    assert wrong_in(path) == [f"{names[0]}: has no header: the version is gone, or Redis has lost the bucket."]
    for name in names:
        client.delete(name)
    told = wrong_in(path)
    assert len(told) <= 11 and "such lines" in told[-1] or len(told) == len(names)


def test_a_server_that_is_away_is_told_and_no_table_is_whole(exported, server, monkeypatch):
    path, _, _ = exported
    monkeypatch.setenv("SOK_REDIS_ADDRESS", "127.0.0.1:1")
    heads, (told,) = verify_export(path)
    assert heads == [] and "no server that can be written" in told
