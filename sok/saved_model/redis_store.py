"""Versions of an export's rows in Redis: written, published, retired, removed. docs/redis.md has the layout."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from sok.base import log
from sok.saved_model.redis_place import RedisPlace

# Redis answers nobody else while it does one command.
FIELDS_AT_A_TIME = 512
BYTES_AT_A_TIME = 4 << 20
REPLICA_SECONDS = 10.0
# What a row takes in Redis beside its bytes: an entry of a hash, two strings' heads and their rounding.
OVERHEAD_BYTES = 72
_BUCKETS_AT_A_TIME = 64  # that are copied

_EXCHANGE = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""


@contextlib.contextmanager
def plain_errors(place: RedisPlace) -> Iterator[None]:
    """Inside, errors of redis-py become `OSError` that names the place."""
    from redis.exceptions import RedisError

    try:
        yield
    except RedisError as error:
        raise OSError(f"rows in {place}: {type(error).__name__}: {error}") from error


def connected(place: RedisPlace) -> Any:
    """A client of redis-py for the server, or the cluster.

    Raises:
        ImportError: redis-py is not installed.
        OSError: nobody answers, or the credentials are refused.
    """
    try:
        import redis
        from redis.cluster import ClusterNode, RedisCluster
    except ImportError as error:
        raise ImportError("rows in Redis are written by redis-py: pip install 'sok[redis]'") from error

    said = []
    common: dict[str, Any] = {"username": place.username or None, "password": place.password or None}
    common |= {"socket_timeout": 10.0, "socket_connect_timeout": 5.0}
    if place.tls:
        files = {"ssl_ca_certs": place.ca, "ssl_certfile": place.cert, "ssl_keyfile": place.key}
        common |= {"ssl": True, "ssl_check_hostname": bool(place.check_hostname)}
        common |= {name: path or None for name, path in files.items()}
    # What answers nothing is asked once: redis-py would go on for a minute.
    once = {"retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0), "socket_timeout": 5.0}
    for address in place.addresses:
        host, port = _host_and_port(address)
        try:
            with redis.Redis(host=host, port=port, db=place.database, **common | once) as client:
                is_cluster = client.info("cluster").get("cluster_enabled")
                role = client.info("replication")["role"]
            if is_cluster:
                nodes = [ClusterNode(*_host_and_port(one)) for one in place.addresses]
                return RedisCluster(startup_nodes=nodes, **common)
            if role == "master":
                return redis.Redis(host=host, port=port, db=place.database, **common)
            said.append(f"{address} is a replica")
        except redis.exceptions.RedisError as error:
            said.append(f"{address}: {type(error).__name__}: {error}")
    raise OSError(f"rows in {place}: no server that can be written: {'; '.join(said)}")


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


@dataclasses.dataclass(frozen=True)
class Entry:
    """What the registry of a prefix says of a version.

    state: writing, published, retired (readable until `until`, seconds) or removing.
    bits: of the buckets of each table.
    """

    state: str
    bits: tuple[int, ...] = ()
    at: float = 0.0
    until: float = 0.0

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    def of(text: bytes) -> Entry:
        said = json.loads(text)
        return Entry(**{**said, "bits": tuple(said["bits"])})


class VersionStore:
    """One version that is being written, and the others of its prefix. Used by rank 0 alone.

    Its life: `begin`, then `add_table` and `write` for each, `publish`; then `retire_others`, or `abandon`.

    Raises:
        OSError: of all methods, naming the place.
    """

    def __init__(self, place: RedisPlace) -> None:
        self._place, self._client = place, connected(place)
        self.version = ""
        self._registry = f"{place.prefix}:{{{place.prefix}}}:versions"
        self._entry: Entry | None = None
        self._sizes: list[list[int]] = []  # of the buckets of each table
        self._over = threading.Event()

    def begin(self) -> None:
        """Removes what dead exports have left and versions whose grace is over; begins a new version."""
        with plain_errors(self._place):
            self.sweep()
            number = self._client.incr(f"{self._place.prefix}:{{{self._place.prefix}}}:last")
            self.version = f"{number}-{uuid.uuid4().hex[:8]}"
            self._renew()
            self._entry = Entry("writing", at=self._now())
            self._client.hset(self._registry, self.version, self._entry.text())
        threading.Thread(target=self._keep_lease, name="sok-redis-lease", daemon=True).start()

    def add_table(self, bits: int, num_bytes: int) -> int:
        """Begins a table of 2^bits buckets and so many bytes; gives its number in this version."""
        with plain_errors(self._place):
            self._check_room(num_bytes)
            entry = self._current()
            self._exchange(entry, dataclasses.replace(entry, bits=(*entry.bits, bits)))
        self._sizes.append([0] * (1 << bits))
        return len(self._sizes) - 1

    def write(self, table: int, parts: Iterator[tuple[int, list[bytes]]]) -> None:
        """Writes parts of buckets: (number of the bucket, field, value, field, value, ...)."""
        names = self._place.bucket_names(self.version, table, self._current().bits[table])
        with plain_errors(self._place):
            pipe, size = self._client.pipeline(transaction=False), 0
            for bucket, fields in parts:
                for begin in range(0, len(fields), 2 * FIELDS_AT_A_TIME):
                    some = fields[begin : begin + 2 * FIELDS_AT_A_TIME]
                    pipe.execute_command("HSET", names[bucket], *some)
                    size += sum(map(len, some))
                    if size >= BYTES_AT_A_TIME:
                        pipe.execute()
                        size = 0
                self._sizes[table][bucket] += len(fields) // 2
            pipe.execute()

    def copy(self, table: int, version: str, of_table: int) -> None:
        """Gives a new table the rows of a table of another version, which has as many buckets; inside Redis.

        Raises:
            OSError: they are not all there.
        """
        bits = self._current().bits[table]
        names = self._place.bucket_names(self.version, table, bits)
        old = self._place.bucket_names(version, of_table, bits)
        with plain_errors(self._place):
            for begin in range(0, len(names), _BUCKETS_AT_A_TIME):
                pipe = self._client.pipeline(transaction=False)
                some = slice(begin, begin + _BUCKETS_AT_A_TIME)
                for source, name in zip(old[some], names[some], strict=True):
                    pipe.execute_command("HGET", source, "h")
                    pipe.execute_command("COPY", source, name)
                    pipe.execute_command("HDEL", name, "h")
                    pipe.execute_command("PERSIST", name)  # the old one may go soon
                    pipe.execute_command("HLEN", name)  # or be gone by now, and the copy, too
                answers = pipe.execute()
                for place, source in enumerate(old[some]):
                    found, is_copied, _, _, num_rows = answers[5 * place : 5 * place + 5]
                    expected = header(version, of_table, begin + place, int(num_rows)).encode()
                    if found != expected or not int(is_copied):
                        raise OSError(f"rows in {self._place}: {source} of version {version} is not there any more.")

    def remove_rows(self, table: int, fields: Mapping[int, list[bytes]]) -> None:
        """Removes fields of buckets, by the buckets' numbers."""
        names = self._place.bucket_names(self.version, table, self._current().bits[table])
        with plain_errors(self._place):
            pipe = self._client.pipeline(transaction=False)
            for bucket, some in fields.items():
                for begin in range(0, len(some), FIELDS_AT_A_TIME):
                    pipe.execute_command("HDEL", names[bucket], *some[begin : begin + FIELDS_AT_A_TIME])
            pipe.execute()

    def count_rows(self, table: int) -> int:
        """How many rows a table has now, which was not written row by row."""
        names = self._place.bucket_names(self.version, table, self._current().bits[table])
        with plain_errors(self._place):
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.hlen(name)
            self._sizes[table] = pipe.execute()
        return sum(self._sizes[table])

    def is_readable(self, version: str, table: int, bits: int) -> bool:
        """Whether a version is published, or retired and not over yet, and all rows of that table are there."""
        with plain_errors(self._place):
            text = self._versions().get(version)
            entry = None if text is None else Entry.of(text)
            is_readable = entry is not None and (
                entry.state == "published" or (entry.state == "retired" and self._now() < entry.until)
            )
            if not is_readable:
                return False
            pipe = self._client.pipeline(transaction=False)
            for name in self._place.bucket_names(version, table, bits):
                pipe.execute_command("HGET", name, "h")
                pipe.execute_command("HLEN", name)
            answers = pipe.execute()
            return all(
                found == header(version, table, bucket, num_fields - 1).encode()
                for bucket, (found, num_fields) in enumerate(zip(answers[::2], answers[1::2], strict=True))
            )

    def publish(self) -> None:
        """Writes the buckets' headers, looks whether all is there, on replicas too, and says so in the registry."""
        entry = self._current()
        with plain_errors(self._place):
            for table, bits in enumerate(entry.bits):
                sizes, names = self._sizes[table], self._place.bucket_names(self.version, table, bits)
                pipe = self._client.pipeline(transaction=False)
                for bucket, name in enumerate(names):
                    pipe.execute_command("HSET", name, "h", header(self.version, table, bucket, sizes[bucket]))
                pipe.execute()
                pipe = self._client.pipeline(transaction=False)
                for name in names:
                    pipe.hlen(name)
                for name, size, found in zip(names, sizes, pipe.execute(), strict=True):
                    if found != size + 1:
                        raise OSError(
                            f"rows in {self._place}: {name} has {found - 1:,} rows where {size:,} were written: "
                            "another program has changed it, Redis has evicted it, or this export was taken for dead."
                        )
            self._wait_for_replicas()
            self._exchange(entry, dataclasses.replace(entry, state="published", at=self._now()))
        self._over.set()

    def retire_others(self) -> None:
        """When servers can see this version: what was published before it is readable for the grace, no longer."""
        with plain_errors(self._place):
            for version, text in self._versions().items():
                entry = Entry.of(text)
                if version == self.version or entry.state != "published":
                    continue
                until = self._now() + self._place.grace_seconds
                if self._try_exchange(version, text, dataclasses.replace(entry, state="retired", until=until)):
                    # Redis removes them by itself then; the next export makes sure, and forgets the version.
                    self._of_all_buckets(version, entry, "PEXPIRE", max(1, 1000 * self._place.grace_seconds))

    def sweep(self) -> None:
        """Removes versions that nobody writes any more and nobody may read."""
        for version, text in self._versions().items():
            entry = Entry.of(text)
            is_dead = entry.state == "writing" and not self._client.exists(self._lease(version))
            is_over = entry.state == "retired" and self._now() >= entry.until
            if not (is_dead or is_over or entry.state == "removing"):
                continue
            # Only one comes past this: a writer that was stopped for long and goes on sees that it is too late.
            if entry.state != "removing" and not self._try_exchange(
                version, text, dataclasses.replace(entry, state="removing")
            ):
                continue
            self._remove(version, entry)

    def abandon(self) -> None:
        """Removes this version. Best effort: the next export removes what is left."""
        self._over.set()
        if self._entry is not None:
            with contextlib.suppress(OSError), plain_errors(self._place):
                self._remove(self.version, self._entry)

    def close(self) -> None:
        self._over.set()
        with contextlib.suppress(OSError), plain_errors(self._place):
            self._client.delete(self._lease(self.version))
            self._client.close()

    def _remove(self, version: str, entry: Entry) -> None:
        self._of_all_buckets(version, entry, "UNLINK")
        self._client.hdel(self._registry, version)

    def _of_all_buckets(self, version: str, entry: Entry, command: str, *arguments: object) -> None:
        for table, bits in enumerate(entry.bits):
            pipe = self._client.pipeline(transaction=False)
            for name in self._place.bucket_names(version, table, bits):
                pipe.execute_command(command, name, *arguments)
            pipe.execute()

    def _versions(self) -> dict[str, bytes]:
        return {name.decode(): text for name, text in self._client.hgetall(self._registry).items()}

    def _current(self) -> Entry:
        if self._entry is None:
            raise RuntimeError("`begin` comes first")
        return self._entry

    def _exchange(self, old: Entry, new: Entry) -> None:
        if not self._try_exchange(self.version, old.text().encode(), new):
            raise OSError(
                f"rows in {self._place}: version {self.version} was removed while it was written: another export took "
                f"this one for dead, after {self._place.lease_seconds} s (`lease_seconds`) without a sign of life."
            )
        self._entry = new

    def _try_exchange(self, version: str, old: bytes, new: Entry) -> bool:
        return bool(self._client.eval(_EXCHANGE, 1, self._registry, version, old, new.text()))

    def _lease(self, version: str) -> str:
        return f"{self._place.prefix}:{{{self._place.prefix}}}:writing:{version}"

    def _renew(self) -> None:
        self._client.set(self._lease(self.version), 1, ex=self._place.lease_seconds)

    def _keep_lease(self) -> None:
        while not self._over.wait(self._place.lease_seconds / 4):
            with contextlib.suppress(OSError), plain_errors(self._place):
                self._renew()

    def _now(self) -> float:
        """Seconds, by the clock of Redis."""
        client = next(iter(self._primaries()))
        seconds, micros = client.time()
        return seconds + 1e-6 * micros

    def _primaries(self) -> list[Any]:
        get_primaries = getattr(self._client, "get_primaries", None)
        if get_primaries is None:
            return [self._client]
        return [self._client.get_redis_connection(node) for node in get_primaries()]

    def _check_room(self, num_bytes: int) -> None:
        primaries = self._primaries()
        for client in primaries:
            memory = client.info("memory")
            limit, used = memory.get("maxmemory", 0), memory["used_memory"]
            needed = num_bytes // len(primaries)
            if limit and needed > limit - used:
                raise OSError(
                    f"rows in {self._place}: a table needs about {needed:,} bytes of a server that has "
                    f"{max(0, limit - used):,} of {limit:,} free (maxmemory). Give it more memory, add servers, or "
                    "export narrower rows (row_dtype='float16' or 'int8')."
                )
            if limit and memory.get("maxmemory_policy", "noeviction").startswith("allkeys"):
                log.logger.warning(
                    "rows in %s: maxmemory-policy is %s: when memory is short, Redis evicts rows, and requests for "
                    "them fail. Take noeviction.",
                    self._place,
                    memory["maxmemory_policy"],
                )

    def _wait_for_replicas(self) -> None:
        """Until replicas have what was written, or else a promoted one would lack it: requests would fail."""
        for client in self._primaries():
            written = client.info("replication")["master_repl_offset"]
            end = time.monotonic() + REPLICA_SECONDS
            while True:
                told = client.info("replication")
                replicas = [v for k, v in told.items() if k.startswith("slave") and isinstance(v, dict)]
                behind = [one for one in replicas if one.get("offset", 0) < written]
                if not behind:
                    break
                if time.monotonic() > end:
                    names = ", ".join(f"{one['ip']}:{one['port']}" for one in behind)
                    log.logger.warning(
                        "rows in %s: replicas %s are behind after %d s. If one of them takes over now, requests fail "
                        "until it is exported again.",
                        self._place,
                        names,
                        REPLICA_SECONDS,
                    )
                    break
                time.sleep(0.05)


def header(version: str, table: int, bucket: int, num_rows: int) -> str:
    """The value of the field "h" of a bucket; what has it is whole."""
    return f"sok1 {version} {table} {bucket} {num_rows}"
