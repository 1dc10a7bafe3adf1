"""Where in Redis the rows of an export lie, as its URL says."""

from __future__ import annotations

import binascii
import dataclasses
import os
import re
import urllib.parse

SLOTS = 16384  # of a cluster
ROWS_PER_BUCKET = 16384
MIN_BITS, MAX_BITS = 4, 13  # of buckets: enough for some servers to have equal shares
PASSWORD = "SOK_REDIS_PASSWORD"
EXAMPLE = "redis://host:6379/0?prefix=ctr"
_SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_MAX_ADDRESSES_BYTES = 1000  # they stand in the head of each table's file


@dataclasses.dataclass(frozen=True)
class RedisPlace:
    """A server or cluster, and how it is read.

    Args:
        addresses: "host:port"; of a cluster any of its nodes, else the server and its replicas.
        database: its number; a cluster has 0 alone.
        username, password: of Redis' ACL or requirepass; "" for none.
        prefix: what keys begin with. Exports of one prefix are versions of one model.
        timeout_ms: in which a lookup is answered or fails.
        connect_timeout_ms: in which a server accepts a connection.
        cache_bytes: of rows that a process keeps of each table.
        max_request_bytes: of rows that one lookup may need from Redis.
        grace_seconds: how long an older version is readable after a newer one was published.
        lease_seconds: after which an export that says nothing counts as dead.
    """

    addresses: tuple[str, ...]
    database: int = 0
    username: str = ""
    password: str = dataclasses.field(default="", repr=False)
    prefix: str = ""
    timeout_ms: int = 1000
    connect_timeout_ms: int = 200
    cache_bytes: int = 64 << 20
    max_request_bytes: int = 64 << 20
    grace_seconds: int = 3600
    lease_seconds: int = 30

    def __str__(self) -> str:
        """The URL, without what is secret."""
        user = f"{self.username}@" if self.username else ""
        return f"redis://{user}{','.join(self.addresses)}/{self.database}?prefix={self.prefix}"

    def source(self, version: str, table: int, bits: int) -> str:
        """What the file of a table says of where its rows are. The password stays out of it."""
        words = {
            "addresses": ",".join(self.addresses),
            "database": self.database,
            "username": self.username,
            "prefix": self.prefix,
            "version": version,
            "table": table,
            "bucket_bits": bits,
            "timeout_ms": self.timeout_ms,
            "connect_timeout_ms": self.connect_timeout_ms,
            "cache_bytes": self.cache_bytes,
            "max_request_bytes": self.max_request_bytes,
        }
        return "".join(f"{word} {value}\n" for word, value in words.items())

    def bucket_names(self, version: str, table: int, bits: int) -> list[str]:
        """The keys of the buckets of a table."""
        tags = tags_of(bits)
        return [f"{self.prefix}:{{{tag}}}:{version}:{table}:{number}" for number, tag in enumerate(tags)]


def place_of(url: object) -> RedisPlace:
    """What `rows` of `sok.export_saved_model` says.

    Raises:
        TypeError, ValueError: it is no such URL; the message says what is wrong with it.

    Example:
        >>> place = place_of("redis://reader@10.0.0.1,10.0.0.2:6380/0?prefix=ctr&timeout_ms=50&cache_bytes=1GiB")
        >>> place.addresses, place.timeout_ms, place.cache_bytes
        (('10.0.0.1:6379', '10.0.0.2:6380'), 50, 1073741824)
    """
    if not isinstance(url, str):
        raise TypeError(f"`rows` must be a URL such as '{EXAMPLE}'. Received: {url!r}.")
    scheme, _, rest = url.partition("://")
    if scheme in ("rediss", "redis+tls"):
        raise ValueError(
            "`rows`: no TLS: the library that reads Redis here (hiredis 0.14) has none. Let a tunnel on this host "
            "(stunnel, a sidecar proxy) encrypt, and name it by redis://127.0.0.1:port. Received a URL of scheme "
            f"'{scheme}'."
        )
    if scheme != "redis":
        raise ValueError(f"`rows` must be a URL such as '{EXAMPLE}'. Received one of scheme '{scheme[:20]}'.")
    rest, _, query = rest.partition("?")
    rest, _, database = rest.partition("/")
    credentials, _, hosts = rest.rpartition("@")
    username, _, password = (urllib.parse.unquote(part) for part in credentials.partition(":"))
    said: dict[str, str] = {}
    for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True):
        if name not in _NUMBERS and name != "prefix":
            raise ValueError(f"`rows`: unknown setting '{name}'. Known: prefix, {', '.join(_NUMBERS)}.")
        said[name] = value
    place = RedisPlace(
        addresses=_addresses(hosts),
        database=_number("database", database or "0", 0, 1 << 20),
        username=username,
        password=password or os.environ.get(PASSWORD, ""),
        prefix=said.pop("prefix", ""),
        **{name: _number(name, value, *_NUMBERS[name]) for name, value in said.items()},
    )
    if not re.fullmatch(r"[A-Za-z0-9_.:-]{1,100}", place.prefix):
        raise ValueError(
            "`rows` must say `prefix`, with which the keys of this model begin in Redis: letters, digits and _.:- , "
            f"such as '{EXAMPLE}'. Exports of one prefix are versions of one model. Received: {place.prefix!r}."
        )
    if re.search(r"[\s\0]", place.username):
        raise ValueError("`rows`: the user's name must have no spaces.")
    return place


_NUMBERS = {
    "timeout_ms": (1, 600_000),
    "connect_timeout_ms": (1, 600_000),
    "cache_bytes": (0, 1 << 50),
    "max_request_bytes": (1, 1 << 40),
    "grace_seconds": (0, 10 * 365 * 86400),
    "lease_seconds": (1, 86400),
}


def _number(name: str, value: str, least: int, most: int) -> int:
    found = re.fullmatch(r"(\d{1,18})(KiB|MiB|GiB)?", value)
    if not found or (found[2] and not name.endswith("_bytes")):
        raise ValueError(f"`rows`: {name} must be a whole number. Received: '{value}'.")
    number = int(found[1]) * _SIZES.get(found[2] or "", 1)
    if not least <= number <= most:
        raise ValueError(f"`rows`: {name} must be in [{least}, {most}]. Received: {value}.")
    return number


def _addresses(hosts: str) -> tuple[str, ...]:
    addresses = []
    for host in hosts.split(","):
        found = re.fullmatch(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?", host)
        if not found:
            raise ValueError(f"`rows`: '{host}' is no host:port. A URL is such as '{EXAMPLE}'.")
        addresses.append(f"{found[1]}:{_number('port', found[2] or '6379', 1, 65535)}")
    if len(",".join(addresses)) > _MAX_ADDRESSES_BYTES:
        raise ValueError(f"`rows`: the addresses are longer than {_MAX_ADDRESSES_BYTES} bytes. Some nodes are enough.")
    return tuple(addresses)


def bits_of(num_rows: int) -> int:
    """Of how many buckets, 2^bits, a table of so many rows is made."""
    return min(MAX_BITS, max(MIN_BITS, (-(-num_rows // ROWS_PER_BUCKET) - 1).bit_length()))


def tags_of(bits: int) -> list[str]:
    """The hash tags of 2^bits buckets: each the smallest number whose slot is in the middle of its share."""
    width = SLOTS >> bits
    tags: dict[int, str] = {}
    number = 0
    while len(tags) < 1 << bits:
        slot = binascii.crc_hqx(str(number).encode(), 0) % SLOTS
        if slot % width == width // 2:
            tags.setdefault(slot // width, str(number))
        number += 1
    return [tags[bucket] for bucket in range(1 << bits)]
