"""Exports whose rows lie in Redis: the same answers as native ones, from real servers that are killed and stopped."""

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.base import _ops
from sok.saved_model.redis_place import SLOTS, RedisPlace, place_of, tags_of
from tests.messages import saying
from tests.sok.export_models import Rows, ids_spec
from tests.sok.redis_needed import NEEDED, redis, redis_servers
from tests.sok.stranger import Stranger

pytestmark = NEEDED

ERRORS = tf.errors


@pytest.fixture(scope="module", autouse=True)
def init():
    sok.Init()


@pytest.fixture(scope="module")
def server():
    with redis_servers.servers(1) as (one,):
        yield one


@pytest.fixture(scope="module")
def nodes():
    """Three primaries and a replica of each."""
    with redis_servers.cluster(3, 1, timeout_ms=1000) as six:
        yield six


def filled(name, n=300, dim=4, scale=1.0, **more):
    table = sok.EmbeddingVariable(dim, max(n, 1), name=name, initializer="uniform", **more)
    keys = (np.arange(n) * (7919 if table.hashed else 1)).astype(table.key_dtype.as_numpy_dtype)
    table.assign(keys, scale * np.random.default_rng(n).normal(size=(n, dim)).astype("f"))
    return table, keys


def exported(table, path, place, **more):
    sok.export_saved_model(Rows(table), path, signatures=ids_spec(table.key_dtype), rows=str(place), **more)
    return loaded(path)


def loaded(path):
    served = tf.saved_model.load(path).signatures["serving_default"]
    return lambda keys: served(ids=tf.constant(np.asarray(keys)[None]))["output_0"].numpy()[0]


def place(server, prefix, **more):
    settings = "".join(f"&{name}={value}" for name, value in more.items())
    return f"redis://{server.address}/0?prefix={prefix}{settings}"


@pytest.mark.parametrize("row_dtype", [None, "float16", "int8"])
@pytest.mark.parametrize("key_dtype", [np.int64, np.uint64, np.int32])
def test_rows_are_those_of_a_native_export_bit_for_bit(server, tmp_path, key_dtype, row_dtype):
    table, keys = filled("same", key_dtype=key_dtype, dim=5)
    of_redis = exported(table, tmp_path / "1", place(server, "same", cache_bytes=3000), row_dtype=row_dtype)
    sok.export_saved_model(
        Rows(table), tmp_path / "2", signatures=ids_spec(table.key_dtype), native=True, row_dtype=row_dtype
    )
    of_files = loaded(tmp_path / "2")
    extremes = np.array([0, np.iinfo(key_dtype).min, np.iinfo(key_dtype).max, 1], key_dtype)
    for asked in (keys, extremes, np.concatenate([keys[:50], extremes, keys[:50]]), keys[:0]):
        for _ in range(2):  # from Redis, and partly from a cache that is too small for all
            np.testing.assert_array_equal(of_redis(asked), of_files(asked))


def test_an_identity_table_and_one_without_keys(server, tmp_path):
    table, _ = filled("identity", 20, hashed=False)
    served = exported(table, tmp_path / "1", place(server, "identity"))
    np.testing.assert_array_equal(served(np.arange(20)), Rows(table)(tf.range(20, dtype=tf.int64)).numpy())
    with pytest.raises(ERRORS.InvalidArgumentError, match=r"key 20 is not in \[0, 20\)"):
        served([3, 20])
    empty = sok.EmbeddingVariable(2, 9, name="nothing", initializer="uniform")
    served = exported(empty, tmp_path / "2", place(server, "empty"), default=-7)
    assert served([0, 5]).tolist() == [[-7, -7], [-7, -7]]


def test_a_group_of_tables_asks_for_all_features_at_once(server, tmp_path):
    tables = [filled(f"of_group_{n}", dim=2 + n)[0] for n in range(3)]

    class Group(tf.Module):
        def __call__(self, ids):
            features = [ids, ids[:, :2], ids * 2, ids]
            of = [tables[0], tables[1], tables[2], tables[0]]
            return tuple(sok.group_embedding_lookup_sparse(of, features, "mean", training=False))

    for number, more in ((1, {"native": True}), (2, {"rows": place(server, "group", cache_bytes=0)})):
        sok.export_saved_model(Group(), tmp_path / str(number), signatures=ids_spec(), **more)
    ids = tf.constant(np.random.default_rng(3).integers(0, 400, [9, 5]) * 7919)
    native, served = (tf.saved_model.load(tmp_path / n).signatures["serving_default"] for n in "12")
    client = server.client()
    before = client.info("stats")["total_connections_received"], client.info("commandstats")
    answers = served(ids=ids)
    after = client.info("stats")["total_connections_received"], client.info("commandstats")
    for name, expected in native(ids=ids).items():
        np.testing.assert_array_equal(answers[name], expected)
    assert after[0] == before[0]  # a connection is kept
    calls = after[1]["cmdstat_hmget"]["calls"] - before[1]["cmdstat_hmget"]["calls"]
    assert 3 <= calls <= 3 * 16  # buckets that were touched, whatever the number of features and keys


def test_a_process_with_the_library_alone_serves_it(server, tmp_path):
    table, keys = filled("alone")
    sok.export_saved_model(Rows(table), tmp_path / "1", signatures=ids_spec(), rows=place(server, "alone"))
    stranger = Stranger(tmp_path, tmp_path / "1" / "assets.extra" / "libsok_serving.so")
    try:
        for in_session in (False, True):
            rows = stranger.predict(tmp_path / "1", {"ids": keys[None]}, in_session=in_session)["output_0"]
            np.testing.assert_array_equal(rows[0], Rows(table)(tf.constant(keys)).numpy())
    finally:
        stranger.close()


# What an export is called by.


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://a", "scheme 'http'"),
        ("redis://a", "must say `prefix`"),
        ("redis://a?prefix=a{b}", "must say `prefix`"),
        ("redis://a:x?prefix=p", "'a:x' is no host:port"),
        ("redis://?prefix=p", "'' is no host:port"),
        ("redis://a:70000?prefix=p", "port must be in"),
        ("redis://a/x?prefix=p", "database must be a whole number"),
        ("redis://a?prefix=p&ttl=3", "unknown setting 'ttl'"),
        ("redis://a?prefix=p&timeout_ms=0", "timeout_ms must be in"),
        ("redis://a?prefix=p&timeout_ms=1MiB", "timeout_ms must be a whole number"),
        ("redis://u%20v@a?prefix=p", "no spaces"),
    ],
)
def test_urls_that_make_no_sense_are_refused(url, said):
    with pytest.raises(ValueError, match=saying(said)):
        place_of(url)
    with pytest.raises(TypeError, match="must be a URL"):
        place_of(7)


def test_a_place_keeps_its_password_to_itself(monkeypatch):
    one = place_of("redis://me:p%40ss@a,b:7/2?prefix=p&cache_bytes=2KiB")
    assert (one.addresses, one.database, one.password, one.cache_bytes) == (("a:6379", "b:7"), 2, "p@ss", 2048)
    assert "p@ss" not in str(one) + repr(one) + one.source("1-a", 0, 4)
    monkeypatch.setenv("SOK_REDIS_PASSWORD", "of the environment")
    assert place_of("redis://a?prefix=p").password == "of the environment"


@pytest.mark.parametrize("bits", [4, 8, 13])
def test_buckets_lie_evenly_over_the_slots(bits):
    slots = [redis.cluster.key_slot(tag.encode()) for tag in tags_of(bits)]
    width = SLOTS >> bits
    assert slots == [width * bucket + width // 2 for bucket in range(1 << bits)]


def test_without_hiredis_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(_ops, "has_redis", lambda: False)
    with pytest.raises(RuntimeError, match=saying("without hiredis", "apt-get install libhiredis-dev")):
        sok.export_saved_model(
            Rows(filled("without")[0]), tmp_path / "1", signatures=ids_spec(), rows="redis://a?prefix=p"
        )


def test_where_nobody_listens_or_replicas_alone_nothing_is_written(server, tmp_path):
    table, _ = filled("nobody")
    gone = f"redis://127.0.0.1:{redis_servers.free_port()}?prefix=p"
    with pytest.raises(OSError, match=saying("no server that can be written", "Connection refused")):
        exported(table, tmp_path / "1", gone)
    assert list(tmp_path.iterdir()) == []


def test_credentials_are_asked_for_and_never_stored(tmp_path, monkeypatch):
    table, keys = filled("secret")
    with redis_servers.servers(1, "--requirepass", "swordfish") as (one,):
        url = f"redis://:swordfish@{one.address}?prefix=s"
        with pytest.raises(OSError, match="(?i)authentication"):
            exported(table, tmp_path / "1", f"redis://{one.address}?prefix=s")
        with pytest.raises(ERRORS.FailedPreconditionError, match="refuses: NOAUTH"):
            exported(table, tmp_path / "1", url)  # written, but not read by who does not know the password
        written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".so")
        assert b"swordfish" not in written
        monkeypatch.setenv("SOK_REDIS_PASSWORD", "marlin")
        with pytest.raises(ERRORS.FailedPreconditionError, match="refuses: WRONGPASS"):
            loaded(tmp_path / "1")
        monkeypatch.setenv("SOK_REDIS_PASSWORD", "swordfish")
        np.testing.assert_array_equal(loaded(tmp_path / "1")(keys), Rows(table)(tf.constant(keys)).numpy())
        monkeypatch.setenv("SOK_REDIS_ADDRESS", "127.0.0.1:1")
        with pytest.raises(ERRORS.DeadlineExceededError, match="127.0.0.1:1: cannot connect: Connection refused"):
            loaded(tmp_path / "1")
        monkeypatch.setenv("SOK_REDIS_ADDRESS", "nowhere")
        with pytest.raises(ERRORS.InvalidArgumentError, match="SOK_REDIS_ADDRESS must be host:port"):
            loaded(tmp_path / "1")


def test_sizes_are_bounded(server, tmp_path):
    table, keys = filled("bounded", n=2000, dim=8)
    served = exported(table, tmp_path / "1", place(server, "bounded", max_request_bytes=3600))
    np.testing.assert_array_equal(served(keys[:100]), Rows(table)(tf.constant(keys[:100])).numpy())
    with pytest.raises(
        ERRORS.InvalidArgumentError, match=saying("needs 3636 bytes", "`max_request_bytes` allows 3600")
    ):
        served(keys[200:301])
    with redis_servers.servers(1, "--maxmemory", "1500000") as (small,):
        with pytest.raises(OSError, match=saying("a table needs about", "maxmemory", "row_dtype")):
            exported(filled("large", n=20000, dim=8)[0], tmp_path / "2", place(small, "large"))
        assert [key for key in small.client().scan_iter() if b"last" not in key] == []


# Versions.


def versions(server, prefix):
    told = server.client().hgetall(f"{prefix}:{{{prefix}}}:versions")
    return {name.decode().partition("-")[0]: text.decode() for name, text in told.items()}


def rows_of_versions(server, prefix):
    """The numbers of versions that have rows."""
    keys = server.client().keys(f"{prefix}:*:*-*:*:*")
    return {key.decode().split("}:")[1].partition("-")[0] for key in keys}


def test_versions_are_read_whole_and_old_ones_go_after_the_grace(server, tmp_path):
    table, keys = filled("versions")
    settings = {"grace_seconds": 1, "cache_bytes": 0}
    first = exported(table, tmp_path / "1", place(server, "v", **settings))
    old = Rows(table)(tf.constant(keys)).numpy()
    table.assign(keys, old + 1)
    second = exported(table, tmp_path / "2", place(server, "v", **settings))
    np.testing.assert_array_equal(first(keys), old)
    np.testing.assert_array_equal(second(keys), old + 1)
    redis_servers.until(lambda: rows_of_versions(server, "v") == {"2"}, 10, "the first version is gone")
    for served in (first, lambda _: loaded(tmp_path / "1")):
        with pytest.raises(ERRORS.FailedPreconditionError, match=saying("version 1-", "is not in Redis (any more)")):
            served(keys[:9])
    np.testing.assert_array_equal(second(keys), old + 1)
    exported(table, tmp_path / "3", place(server, "v", **settings))
    assert set(versions(server, "v")) == {"2", "3"}  # the first is forgotten


def test_an_interrupted_export_leaves_the_old_version_and_the_next_one_cleans_up(server, tmp_path, monkeypatch):
    from sok.saved_model.redis_store import VersionStore

    table, keys = filled("interrupted")
    where = place(server, "i", lease_seconds=1)
    served = exported(table, tmp_path / "1", where)
    expected = served(keys)
    with monkeypatch.context() as dying:  # as a process that is killed: it cleans nothing, and renews no lease
        dying.setattr(VersionStore, "publish", lambda self: self._over.set() or exec("raise OSError('killed')"))
        dying.setattr(VersionStore, "abandon", lambda self: None)
        dying.setattr(VersionStore, "close", lambda self: None)
        with pytest.raises(OSError, match="killed"):
            exported(table, tmp_path / "2", where)
    assert not (tmp_path / "2").exists() and rows_of_versions(server, "i") == {"1", "2"}
    np.testing.assert_array_equal(loaded(tmp_path / "1")(keys), expected)
    lease = f"i:{{i}}:writing:{next(v for v in server.client().hkeys('i:{i}:versions') if v[:1] == b'2').decode()}"
    redis_servers.until(lambda: not server.client().exists(lease), 10, "the lease has run out")
    exported(table, tmp_path / "2", where)
    assert rows_of_versions(server, "i") == {"1", "3"} and set(versions(server, "i")) == {"1", "3"}
    # One that fails in the ordinary way cleans up by itself.
    with pytest.raises(FileExistsError):
        exported(table, tmp_path / "2", where)
    with monkeypatch.context() as failing:
        failing.setattr("sok.saved_model.export._put_in_place", lambda *_: exec("raise OSError('disk')"))
        with pytest.raises(OSError, match="disk"):
            exported(table, tmp_path / "4", where)
    assert rows_of_versions(server, "i") == {"1", "3"}


def test_a_writer_that_was_taken_for_dead_publishes_nothing(server):
    from sok.saved_model.redis_store import VersionStore

    where = dataclasses.replace(place_of(place(server, "late")), lease_seconds=1000)
    late, other = VersionStore(where), VersionStore(where)
    late.begin()
    late.add_table(4, 10)
    server.client().delete(late._lease(late.version))
    other.begin()
    late.write(0, iter([(3, [b"12345678", b"row"])]))
    with pytest.raises(OSError, match="another export took this one for dead"):
        late.publish()
    assert set(versions(server, "late")) == {"2"}
    for store in (late, other):
        store.abandon()
        store.close()


def test_rows_that_were_lost_while_they_were_written_are_not_published(server, tmp_path, monkeypatch):
    from sok.saved_model.redis_store import VersionStore

    table, _ = filled("lost")
    wait = VersionStore.write

    def write_and_lose(self, number, parts):
        wait(self, number, parts)
        server.client().delete(self._place.bucket_names(self.version, number, 4)[5])

    monkeypatch.setattr(VersionStore, "write", write_and_lose)
    with pytest.raises(OSError, match=saying("has 0 rows where", "were written")):
        exported(table, tmp_path / "1", place(server, "lost"))
    assert rows_of_versions(server, "lost") == set() and not (tmp_path / "1").exists()


# Damage.


def bucket_with(client, prefix, key):
    field = np.array([key], "<i8").tobytes()
    return next(name for name in client.keys(f"{prefix}:*:*-*:*:*") if client.hexists(name, field)), field


def test_what_is_not_what_was_written_is_an_error(server, tmp_path):
    table, keys = filled("damaged")
    served = exported(table, tmp_path / "1", place(server, "d", cache_bytes=0))
    client = server.client()
    name, field = bucket_with(client, "d", keys[5])
    other = next(f for f in client.hkeys(name) if f not in (b"h", field))
    value, header = client.hget(name, field), client.hget(name, "h")
    for bad, said in [
        (value[:-1], "has 19 bytes instead of 20"),
        (bytes([value[0] ^ 1]) + value[1:], "does not have its checksum"),
        (client.hget(name, other), "does not have its checksum"),
    ]:
        client.hset(name, field, bad)
        with pytest.raises(ERRORS.DataLossError, match=saying(f"the row of key {keys[5]} in", said)):
            served(keys)
    client.hset(name, field, value)
    for bad, kind, said in [
        (header.replace(b"sok1 1-", b"sok1 2-"), ERRORS.DataLossError, "is that of something else"),
        (None, ERRORS.FailedPreconditionError, "is not in Redis (any more)"),
    ]:
        client.hdel(name, "h") if bad is None else client.hset(name, "h", bad)
        with pytest.raises(kind, match=saying(said)):
            served(keys)
    client.set(name, "text")
    with pytest.raises(ERRORS.DataLossError, match="is no hash"):
        served(keys)


def test_users_rows_in_redis_are_said_to_go_with_the_version(server, tmp_path):
    table, keys = filled("erased")
    exported(table, tmp_path / "1", place(server, "e"))
    report = sok.erase([table], [int(keys[3])], exports=[str(tmp_path / "1")])
    assert "export it anew from the erased tables" in str(report)


# Faults.


def failing(served, keys, deadline):
    """The error that a request for keys ends with, within the deadline and a margin for a busy machine."""
    start = time.monotonic()
    with pytest.raises(ERRORS.OpError) as failed:
        served(keys)
    assert time.monotonic() - start < deadline + 2
    return failed.value


def test_a_server_that_hangs_or_dies_is_an_error_in_time_and_then_it_goes_on(tmp_path):
    table, keys = filled("hangs")
    expected = Rows(table)(tf.constant(keys)).numpy()
    with redis_servers.servers(1) as (one,):
        served = exported(table, tmp_path / "1", place(one, "h", timeout_ms=300))
        np.testing.assert_array_equal(served(keys[:100]), expected[:100])
        one.stop()
        np.testing.assert_array_equal(served(keys[:100]), expected[:100])  # of the cache
        error = failing(served, keys, 0.3)
        assert isinstance(error, ERRORS.DeadlineExceededError)
        assert "did not answer within 300 ms" in str(error) and one.address in str(error)
        one.go_on()
        np.testing.assert_array_equal(served(keys[100:200]), expected[100:200])
        one.kill()
        error = failing(served, keys, 0.3)
        assert isinstance(error, ERRORS.DeadlineExceededError) and one.address in str(error)
        one.start()  # without its data
        assert "is not in Redis" in str(failing(served, keys, 0.3))
        np.testing.assert_array_equal(exported(table, tmp_path / "2", place(one, "h"))(keys), expected)


def test_many_threads_have_right_answers_while_connections_break(server, tmp_path):
    tables = [filled(f"threads_{n}", scale=1 + n)[0] for n in range(2)]
    keys = filled("threads_keys")[1]
    served = [
        exported(t, tmp_path / str(n), place(server, f"t{n}", cache_bytes=0, timeout_ms=5000))
        for n, t in enumerate(tables)
    ]
    expected = [Rows(table)(tf.constant(keys)).numpy() for table in tables]
    stop, client = threading.Event(), server.client()

    def ask(number):
        rng, asked = np.random.default_rng(number), 0
        while not stop.is_set():
            chosen, which = rng.integers(0, len(keys), 50), int(rng.integers(2))
            np.testing.assert_array_equal(served[which](keys[chosen]), expected[which][chosen])
            asked += 1
        return asked

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, number) for number in range(8)]
        for _ in range(20):
            time.sleep(0.05)
            client.client_kill_filter(_type="normal", skipme=True)
        stop.set()
        assert all(one.result() > 0 for one in asking)


def test_a_cluster_answers_right_while_primaries_hang_die_and_move_slots(nodes, tmp_path):
    table, keys = filled("cluster", n=3000)
    expected = Rows(table)(tf.constant(keys)).numpy()
    seeds = ",".join(node.address for node in nodes[:2])
    url = f"redis://{seeds}?prefix=c&cache_bytes=0&timeout_ms=10000"
    served = exported(table, tmp_path / "1", url)
    hasty = exported(table, tmp_path / "3", url.replace("=c&", "=hasty&").replace("=10000", "=1500"))
    np.testing.assert_array_equal(served(keys), expected)
    shares = [node.client().dbsize() for node in nodes]
    assert min(shares) >= 10 and shares[:3] == shares[3:]  # 16 buckets; and replicas have all of it

    # A slot moves to another primary: key by key (ASK), then as a whole (MOVED).
    slot = 16384 // 16 * 0 + 512
    source, target = nodes[0].client(), nodes[1].client()
    names = [_text(one.execute_command("CLUSTER MYID")) for one in (source, target)]
    target.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", names[0])
    source.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", names[1])
    found = source.execute_command("CLUSTER GETKEYSINSLOT", slot, 10)  # of both models
    source.execute_command("MIGRATE", "127.0.0.1", nodes[1].port, "", 0, 5000, "KEYS", *found)
    np.testing.assert_array_equal(served(keys), expected)
    for one in (target, source):
        one.execute_command("CLUSTER SETSLOT", slot, "NODE", names[1])
    for _ in range(2):
        np.testing.assert_array_equal(served(keys), expected)

    nodes[2].stop()  # its replica answers, before and after the others have agreed that it takes over
    start = time.monotonic()
    for _ in range(30):
        np.testing.assert_array_equal(served(keys), expected)
        time.sleep(0.05)
    promoted = nodes[5].client()
    redis_servers.until(lambda: promoted.info("replication")["role"] == "master", 20, "the replica takes over")
    np.testing.assert_array_equal(served(keys), expected)
    nodes[2].go_on()
    nodes[0].kill()
    while time.monotonic() - start < 4:
        np.testing.assert_array_equal(served(keys), expected)
    nodes[3].kill()  # and its replica: these rows are nowhere
    lacking = f"redis://{nodes[1].address}?prefix=c"
    error = failing(hasty, keys, 1.5)
    assert isinstance(error, ERRORS.DeadlineExceededError), error
    # A new version cannot be written either, and what is there goes on where it is.
    with pytest.raises(OSError):
        exported(table, tmp_path / "2", lacking)
    assert not (tmp_path / "2").exists()


def _text(value):
    return value.decode() if isinstance(value, bytes) else str(value)


def test_a_place_without_settings_has_the_defaults_of_the_page():
    assert place_of("redis://a?prefix=p") == RedisPlace(("a:6379",), prefix="p")


def test_a_file_that_does_not_say_where_its_rows_are_is_damaged(tmp_path):
    from sok.saved_model.serving_file import ServingFile
    from tests.sok.test_serving_file import described, opened

    table = dataclasses.replace(described(), source="rows nowhere\n")
    path = str(tmp_path / "t.sok")
    ServingFile(path, table, None, 7).finish()
    with pytest.raises(ERRORS.DataLossError, match=saying("says that rows lie elsewhere, and not where")):
        opened(path)
