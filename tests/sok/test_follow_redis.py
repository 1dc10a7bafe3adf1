"""Versions in Redis that follow a job: the answers of those in files, from copies that are made inside Redis."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import sok
from sok.base import _ops
from sok.checkpoint import read_manifest
from sok.saved_model import followed_redis, following, redis_store
from tests.messages import saying
from tests.reference.keys import extreme_keys
from tests.sok.feed_cases import DIM, Served, answers, assert_same_answers, export, new_table, told
from tests.sok.redis_needed import NEEDED, redis, redis_servers
from tests.sok.threads_world import checked, run_world

pytestmark = NEEDED


@pytest.fixture(scope="module", autouse=True)
def init():
    sok.Init()


@pytest.fixture(scope="module")
def server():
    with redis_servers.servers(1) as (one,):
        yield one


def url(server, prefix, **more):
    settings = "".join(f"&{name}={value}" for name, value in {"cache_bytes": 0, **more}.items())
    return f"redis://{server.address}/0?prefix={prefix}{settings}"


class Both:
    """A model that is published, and followed in Redis and in files."""

    def __init__(self, folder, where, model, dtype=tf.int64, **more):
        self.folder, self.model, self._spec = folder, model, {"dtype": dtype, **more}
        self.publisher = sok.Publisher(folder / "feed", model)
        self.publisher.publish()
        export(model, folder / "files" / "1", **self._spec)
        export(model, folder / "redis" / "1", rows=where, **self._spec)
        self.of_files = sok.follow_export(folder / "feed", folder / "files")
        self.of_redis = sok.follow_export(folder / "feed", folder / "redis", max_to_keep=None)

    def poll(self, ids):
        """The version in Redis, which answers as that in files does."""
        found, expected = self.of_redis.poll(), self.of_files.poll()
        assert (found is None) == (expected is None)
        if found is not None:
            assert_same_answers(found, expected, ids)
            counts = [[table["num_rows"] for table in told(one)["tables"]] for one in (found, expected)]
            assert counts[0] == counts[1]
        return found


def registry(server, prefix):
    return {
        name.decode(): text.decode()
        for name, text in server.client().hgetall(f"{prefix}:{{{prefix}}}:versions").items()
    }


def with_rows(server, prefix):
    """The numbers of versions that have rows."""
    keys = server.client().keys(f"{prefix}:*:*-*:*:*")
    return {int(key.decode().split("}:")[1].partition("-")[0]) for key in keys}


@pytest.mark.parametrize(
    ("dtype", "row_dtype"),
    [(np.int64, None), (np.int32, "int8"), (np.uint64, None), (np.uint32, "float16")],
)
def test_keys_of_all_dtypes_and_narrow_rows_follow(server, tmp_path, rng, dtype, row_dtype):
    name = f"redis_{np.dtype(dtype).name}"
    table, keys = new_table(name, dim=5, key_dtype=dtype, initializer="uniform"), np.unique(extreme_keys(dtype))
    both = Both(tmp_path, url(server, name), Served(table), tf.as_dtype(dtype), row_dtype=row_dtype)
    for change in range(3):
        table.assign(keys[change::3], rng.normal(size=[len(keys[change::3]), 5]))
        table.erase(keys[change : change + 2])
        both.publisher.publish()
        assert both.poll(keys[None]) is not None
    assert both.poll(keys[None]) is None


OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["assign", "erase"]), st.lists(st.integers(0, 11), min_size=1, max_size=4)),
    st.sampled_from([("publish", []), ("save all", []), ("compact", []), ("poll", [])]),
    st.sampled_from([("publish", []), ("poll", [])]),
)


@settings(max_examples=3, deadline=None)
@given(program=st.lists(OPERATIONS, max_size=10))
def test_versions_in_redis_answer_as_those_in_files(server, tmp_path_factory, program):
    folder = tmp_path_factory.mktemp("program")
    tables = [
        new_table("in_redis", initializer="normal"),
        new_table("identity_in_redis", hashed=False, capacity=12, initializer="normal"),
    ]
    both = Both(folder, url(server, folder.name), Served(*tables), default={tables[1].table_name: "zeros"})
    for number, (what, keys) in enumerate([*program, ("publish", []), ("poll", [])]):
        for table in tables:
            if what == "assign":
                table.assign(keys, np.full([len(keys), table.dim], number))
            elif what == "erase":
                table.erase(keys)
        if what == "publish":
            both.publisher.publish()
        elif what == "save all":
            sok.save(folder / "feed", both.model, dense=True)
        elif what == "compact":
            sok.compact(folder / "feed")
        elif what == "poll":
            both.poll([list(range(12))])


@pytest.mark.parametrize("hashed", [True, False])
def test_tables_gain_their_first_key_and_lose_their_last(server, tmp_path, hashed):
    table = new_table("emptied_in_redis", hashed=hashed, capacity=12, initializer="normal")
    both = Both(tmp_path, url(server, f"emptied{hashed:d}"), Served(table))
    for what in ("gain", "lose", "full", "gain"):
        if what == "gain":
            table.assign([0, 3], [[1.0] * DIM, [2.0] * DIM])
        elif what == "lose":
            table.erase([0, 3])
        both.publisher.publish() if what != "full" else sok.save(tmp_path / "feed", both.model, dense=True)
        assert both.poll([[0, 3, 5]])


def test_changes_alone_are_sent(server, tmp_path, monkeypatch):
    table = new_table("little", capacity=3000)
    table.assign(np.arange(2000), np.ones([2000, DIM]))
    both = Both(tmp_path, url(server, "little"), Served(table))
    table.assign([5], np.ones([1, DIM]))
    both.publisher.publish()
    assert both.poll([[5, 6, 3000]])
    written, write = [], redis_store.VersionStore.write

    def counted(self, number, parts):
        parts = list(parts)
        written.append(sum(len(fields) // 2 for _, fields in parts))
        write(self, number, iter(parts))

    monkeypatch.setattr(redis_store.VersionStore, "write", counted)
    table.assign([7, 8], np.full([2, DIM], 3.0))
    table.erase([5])
    both.publisher.publish()
    assert both.poll([[5, 6, 7, 8, 3000]]) and sum(written) == 2


def test_a_table_that_grows_has_more_buckets(server, tmp_path, monkeypatch):
    from sok.saved_model import redis_place

    monkeypatch.setattr(redis_place, "ROWS_PER_BUCKET", 4)
    table = new_table("growing", capacity=1000)
    both = Both(tmp_path, url(server, "growing"), Served(table))
    buckets = []
    for rows in (10, 100, 200, 900):
        table.assign(np.arange(rows), np.full([rows, DIM], rows))
        table.erase([3])
        both.publisher.publish()
        version = both.poll([list(range(901))])
        buckets.append(len(server.client().keys(f"growing:*:{int(Path(version).name)}-*:*:*")))
    assert buckets == [16, 16, 64, 256]


def test_older_versions_are_readable_until_their_grace_is_over(server, tmp_path):
    table = new_table("graceful")
    table.assign([1], [[1.0] * DIM])
    both = Both(tmp_path, url(server, "graceful", grace_seconds=5), Served(table))
    begun = time.monotonic()
    for value in (2.0, 3.0):
        table.assign([1], [[value] * DIM])
        both.publisher.publish()
        both.poll([[1, 2]])
    try:
        values = [answers(tmp_path / "redis" / n, [[1]])["rows_0"][0, 0, 0] for n in "123"]
        assert values == [1.0, 2.0, 3.0]
    except tf.errors.OpError:  # on a machine that has other things to do
        assert time.monotonic() > begun + 4.5
    redis_servers.until(lambda: with_rows(server, "graceful") == {3}, 10, "older versions are gone")
    assert_same_answers(tmp_path / "redis" / "3", tmp_path / "files" / "3", [[1, 2]])
    # A copy of what was to go soon stays.
    assert all(server.client().ttl(key) == -1 for key in server.client().keys("graceful:*:3-*:*:*"))
    with pytest.raises(tf.errors.OpError, match="is not in Redis"):
        answers(tmp_path / "redis" / "1", [[1]])


@pytest.mark.parametrize("what", ["all", "a bucket", "the registry", "a row"])
def test_where_rows_of_the_version_before_are_gone_all_are_written(server, tmp_path, what):
    prefix = "gone_" + what.replace(" ", "_")
    table = new_table(prefix)
    table.assign(np.arange(40), np.ones([40, DIM]))
    both = Both(tmp_path, url(server, prefix), Served(table))
    table.assign([1], [[2.0] * DIM])
    both.publisher.publish()
    both.poll([[1, 2]])
    client = server.client()
    buckets = client.keys(f"{prefix}:*:2-*:*:*")
    if what == "all":
        client.delete(*client.keys(f"{prefix}:*"))
    elif what == "a bucket":  # as an eviction takes it
        client.delete(buckets[3])
    elif what == "the registry":
        client.hdel(f"{prefix}:{{{prefix}}}:versions", next(v for v in registry(server, prefix) if v.startswith("2-")))
    else:
        bucket = next(one for one in buckets if client.hlen(one) > 1)
        client.hdel(bucket, next(field for field in client.hkeys(bucket) if field != b"h"))
    table.assign([3], [[3.0] * DIM])
    both.publisher.publish()
    assert both.poll([list(range(41))])


def test_what_goes_while_it_is_copied_is_an_error_and_the_next_poll_writes_all(server, tmp_path, monkeypatch):
    table = new_table("going")
    table.assign(np.arange(40), np.ones([40, DIM]))
    both = Both(tmp_path, url(server, "going"), Served(table))
    both.publisher.publish()
    both.poll([[1, 2]])
    copy = redis_store.VersionStore.copy

    def too_late(self, *args):
        client = server.client()
        client.delete(client.keys("going:*:2-*:*:*")[0])
        copy(self, *args)

    table.assign([3], [[3.0] * DIM])
    both.publisher.publish()
    with monkeypatch.context() as patch:
        patch.setattr(redis_store.VersionStore, "copy", too_late)
        with pytest.raises(OSError, match="is not there any more"):
            both.of_redis.poll()
    assert with_rows(server, "going") == {1, 2} and not (tmp_path / "redis" / "3").exists()
    assert both.poll([list(range(41))])


def test_a_server_that_refuses_and_dies_is_an_error_and_then_it_goes_on(tmp_path):
    table = new_table("dying")
    table.assign([1], [[1.0] * DIM])
    with redis_servers.servers(1) as (one,):
        both = Both(tmp_path, url(one, "dying"), Served(table))
        both.publisher.publish()
        one.client().config_set("maxmemory", 1)
        with pytest.raises(OSError, match=saying("rows in redis://", "maxmemory")):
            both.of_redis.poll()
        one.client().config_set("maxmemory", 0)
        one.kill()
        with pytest.raises(OSError, match=saying("rows in redis://", "no server that can be written")):
            both.of_redis.poll()
        assert sorted(path.name for path in (tmp_path / "redis").iterdir()) == ["1"]
        one.start()  # without its data
        assert both.poll([[1, 2]])


def test_a_follower_that_is_killed_leaves_what_the_next_ones_sweep(forked, server, tmp_path):
    table = new_table("killed")
    table.assign(np.arange(40), np.ones([40, DIM]))
    both = Both(tmp_path, url(server, "killed", lease_seconds=1, grace_seconds=3600), Served(table))
    both.publisher.publish()
    both.of_files.poll()
    version = both.of_redis.poll()
    (tmp_path / "here").mkdir()
    os.rename(version, tmp_path / "here" / "1")
    table.assign([3], [[3.0] * DIM])
    both.publisher.publish()
    script = Path(__file__).with_name("follow_killed_script.py")
    arguments = [str(tmp_path / "feed"), str(tmp_path / "here"), str(tmp_path), "redis"]
    done = forked.run(script, tmp_path / "run", *arguments, environment={"CUDA_VISIBLE_DEVICES": "-1"})
    assert done.status == 0, done.stderr[-4000:]
    steps = done.stdout.splitlines()
    assert len(steps) == 5
    expected = both.of_files.poll()
    for number, line in enumerate(steps):
        is_visible = line.startswith(("after it is renamed", "in the middle of retiring"))
        assert line.endswith(": 1: 2" if is_visible else ": 1"), line
        assert_same_answers(tmp_path / str(number) / "2", expected, [list(range(41))])
    writing = [name for name, text in registry(server, "killed").items() if '"writing"' in text]
    client = server.client()
    redis_servers.until(lambda: not client.keys("killed:*:writing:*"), 10, "leases have run out")
    both.of_redis._exports = str(tmp_path / "here")
    both.of_redis.poll()
    assert not set(writing) & set(registry(server, "killed"))
    states = [text for text in registry(server, "killed").values() if '"published"' in text]
    assert len(states) == 1
    assert with_rows(server, "killed") == {int(name.partition("-")[0]) for name in registry(server, "killed")}


@pytest.mark.parametrize("row_dtype", [None, "float16"])
def test_tables_whose_columns_several_workers_hold_follow(server, tmp_path, monkeypatch, row_dtype):
    name, seen = f"cut_in_redis_{row_dtype}", []
    table = sok.EmbeddingVariable(4, 100, name=name, seed=5, initializer="normal")
    model = Served(table)
    for number, where in (("files", {"native": True}), ("redis", {"rows": url(server, name)})):
        export(model, tmp_path / number / "1", row_dtype=row_dtype, **where)
    followers = [sok.follow_export(tmp_path / "feed", tmp_path / n) for n in ("redis", "files")]

    def worker(transport):
        trained = sok.EmbeddingVariable(4, 100, name=name, seed=5, placement=sok.column_wise(2), initializer="normal")
        dense = {"shift": tf.Variable(1.0), "kernel": tf.Variable(tf.ones([DIM, 1]))}
        for value in (1.0, 2.0):
            trained.assign([3, int(10 * value)], np.full([2, 4], value))
            sok.save(tmp_path / "feed", trained, incremental=True, dense=dense)
            if transport.rank == 0:
                seen.append([one.poll() for one in followers])

    with monkeypatch.context() as patch:
        checked(run_world(2, worker, patch))
    # One worker goes on, whose deltas have whole rows; what was cut before may still have to be read.
    sok.restore(tmp_path / "feed", table)
    for value in (5.0, 6.0):
        table.assign([3], np.full([1, 4], value))
        sok.save(tmp_path / "feed", model, incremental=True, dense=True)
        seen.append([one.poll() for one in followers])
    for of_redis, of_files in seen[1:]:
        assert_same_answers(of_redis, of_files, [[3, 10, 20, 30]])
    assert len(read_manifest(tmp_path / "feed").links) == 4


def test_deltas_cut_and_whole_may_be_behind_one_another(server, tmp_path, monkeypatch):
    """A follower that was away meanwhile reads cut deltas, though the newest is whole."""
    name = "cut_and_whole"
    table = sok.EmbeddingVariable(4, 100, name=name, seed=5, initializer="normal")
    model = Served(table)
    table.assign([3, 4], np.ones([2, 4]))
    sok.save(tmp_path / "feed", model, dense=True)
    for number, where in (("files", {"native": True}), ("redis", {"rows": url(server, name)})):
        export(model, tmp_path / number / "1", row_dtype="int8", **where)
    followers = [sok.follow_export(tmp_path / "feed", tmp_path / n) for n in ("redis", "files")]
    assert all(one.poll() for one in followers)

    def worker(transport):
        trained = sok.EmbeddingVariable(4, 100, name=name, seed=5, placement=sok.column_wise(2), initializer="normal")
        sok.restore(tmp_path / "feed", trained)
        trained.assign([3], np.full([1, 4], 2.0))
        dense = {"shift": tf.Variable(1.0), "kernel": tf.Variable(tf.ones([DIM, 1]))}
        sok.save(tmp_path / "feed", trained, incremental=True, dense=dense)

    with monkeypatch.context() as patch:
        checked(run_world(2, worker, patch))
    sok.restore(tmp_path / "feed", table)
    table.assign([4], np.full([1, 4], 5.0))
    sok.save(tmp_path / "feed", model, incremental=True, dense=True)
    assert len(read_manifest(tmp_path / "feed").links) == 3
    of_redis, of_files = [one.poll() for one in followers]
    assert_same_answers(of_redis, of_files, [[3, 4, 5]])
    export(model, tmp_path / "fresh", row_dtype="int8")
    assert_same_answers(of_files, tmp_path / "fresh", [[3, 4, 5]])


def test_a_cluster_copies_within_its_slots_and_answers_when_a_node_is_lost(tmp_path):
    table = new_table("of_cluster", capacity=1000)
    table.assign(np.arange(500), np.ones([500, DIM]))
    with redis_servers.cluster(3, 1, timeout_ms=1000) as nodes:
        both = Both(tmp_path, url(nodes[0], "cluster", timeout_ms=20000), Served(table))
        for value in (2.0, 3.0):
            table.assign(np.arange(0, 500, 7), np.full([72, DIM], value))
            table.erase([int(value)])
            both.publisher.publish()
            assert both.poll([list(range(501))])
        slots = {redis.cluster.key_slot(key) for node in nodes for key in node.client().keys("cluster:*:2-*:*:*")}
        copied = {redis.cluster.key_slot(key) for node in nodes for key in node.client().keys("cluster:*:3-*:*:*")}
        assert slots == copied and len(slots) == 16
        # A replica that takes over has the copies.
        lost = next(node for node in nodes if node.client().info("replication")["role"] == "master")
        served = tf.saved_model.load(str(tmp_path / "redis" / "3")).signatures["serving_default"]
        lost.kill()
        asked = tf.constant([list(range(501))], tf.int64)
        expected = answers(tmp_path / "files" / "3", asked.numpy())["rows_0"]
        redis_servers.until(lambda: answers_or_nothing(served, asked) is not None, 60, "a replica has taken over")
        np.testing.assert_array_equal(answers_or_nothing(served, asked), expected)


def answers_or_nothing(served, asked):
    try:
        return served(ids=asked)["rows_0"].numpy()
    except tf.errors.OpError:
        return None


def test_an_export_that_nobody_could_read_is_refused(server, tmp_path, monkeypatch):
    both = Both(tmp_path, url(server, "unread"), Served(new_table("unread")))
    both.publisher.publish()
    monkeypatch.setattr(_ops, "has_redis", lambda: False)
    with pytest.raises(RuntimeError, match="built without hiredis"):
        both.of_redis.poll()
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(following, "_tell", lambda *_: exec("raise OSError('disk')"))
        with pytest.raises(OSError, match="disk"):
            both.of_redis.poll()
    assert with_rows(server, "unread") == {1} and followed_redis
    assert both.poll([[1]])
