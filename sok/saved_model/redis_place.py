"""Where in Redis the rows of an export lie, as its URL says."""

from __future__ import annotations

import binascii
import dataclasses
import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

SLOTS = 16384  # of a cluster
ROWS_PER_BUCKET = 16384
MIN_BITS, MAX_BITS = 4, 13  # of buckets: enough for some servers to have equal shares
PASSWORD = "SOK_REDIS_PASSWORD"
EXAMPLE = "redis://host:6379/0?prefix=ctr"
_SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_MAX_ADDRESSES_BYTES = 1000  # they stand in the head of each table's file
_MAX_PATH_BYTES = 400  # so do these


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
        tls: whether connections are encrypted.
        ca: file of the authorities that are trusted, PEM; "" for those of the system.
        cert, key: files of the client's certificate and its key, PEM; "" for none.
        check_hostname: whether the server's certificate must be of the host that is asked.
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
    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    check_hostname: int = 1

    def __str__(self) -> str:
        """The URL, without what is secret."""
        user = f"{self.username}@" if self.username else ""
        return f"redis{'s' * self.tls}://{user}{','.join(self.addresses)}/{self.database}?prefix={self.prefix}"

    def source(self, version: str, table: int, bits: int, identity: str = "") -> str:
        """What the file of a table says of where its rows are. The password stays out of it.

        identity: of the version that has written the rows first, "VERSION:TABLE"; "": this one.
        """
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
        if identity:
            words["identity"] = identity
        if self.tls:
            words |= {"tls": 1, "ca": self.ca, "cert": self.cert, "key": self.key}
            words["check_hostname"] = self.check_hostname
        return "".join(f"{word} {value}\n" for word, value in words.items())

    @staticmethod
    def of_source(source: str, settings: Mapping[str, Any]) -> tuple[RedisPlace, dict[str, str]]:
        """What `source` was made of, for a version that takes the place of that one, and all that it says.

        settings: `grace_seconds` and `lease_seconds`, which it does not say. The password, and another way to the same
        servers, are read from the environment as servers read them.
        """
        words = dict(line.split(" ", 1) for line in source.splitlines() if " " in line)
        numbers = ("database", "timeout_ms", "connect_timeout_ms", "cache_bytes", "max_request_bytes")
        said: dict[str, Any] = {name: int(words[name]) for name in numbers}
        if "tls" in words:
            files = {name: os.environ.get(variable, "") or words[name] for name, variable in _FILES.items()}
            said |= {"tls": True, "check_hostname": int(words["check_hostname"]), **files}
        addresses = os.environ.get("SOK_REDIS_ADDRESS", "") or words["addresses"]
        place = RedisPlace(
            addresses=tuple(addresses.split(",")),
            username=words["username"],
            password=os.environ.get(PASSWORD, ""),
            prefix=words["prefix"],
            **said,
            **settings,
        )
        return place, words

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
    if scheme not in ("redis", "rediss"):
        raise ValueError(
            f"`rows` must be a URL such as '{EXAMPLE}', or one of scheme 'rediss' for TLS. Received one of scheme "
            f"'{scheme[:20]}'."
        )
    rest, _, query = rest.partition("?")
    rest, _, database = rest.partition("/")
    credentials, _, hosts = rest.rpartition("@")
    username, _, password = (urllib.parse.unquote(part) for part in credentials.partition(":"))
    said: dict[str, str] = {}
    for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True):
        if name not in _NUMBERS and name not in _FILES and name != "prefix":
            raise ValueError(f"`rows`: unknown setting '{name}'. Known: {', '.join(['prefix', *_NUMBERS, *_FILES])}.")
        if scheme == "redis" and (name in _FILES or name == "check_hostname"):
            raise ValueError(f"`rows`: '{name}' is a setting of TLS, of a URL that begins with rediss://.")
        said[name] = value
    files = {name: _file(name, said.pop(name, os.environ.get(variable, ""))) for name, variable in _FILES.items()}
    settings: dict[str, Any] = dict(files) if scheme == "rediss" else {}
    prefix = said.pop("prefix", "")
    settings |= {name: _number(name, value, *_NUMBERS[name]) for name, value in said.items()}
    place = RedisPlace(
        addresses=_addresses(hosts),
        database=_number("database", database or "0", 0, 1 << 20),
        username=username,
        password=password or os.environ.get(PASSWORD, ""),
        prefix=prefix,
        tls=scheme == "rediss",
        **settings,
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
    "check_hostname": (0, 1),
}
# Of TLS, and the variables of the environment that name them where the URL does not.
_FILES = {"ca": "SOK_REDIS_CA", "cert": "SOK_REDIS_CERT", "key": "SOK_REDIS_KEY"}


def _file(name: str, path: str) -> str:
    if path and (len(path.encode()) > _MAX_PATH_BYTES or not path.isprintable()):
        raise ValueError(f"`rows`: {name} must be the path of a file, of at most {_MAX_PATH_BYTES} bytes.")
    return path


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
