"""Notices when another host is gone: its power, its network cable, the switch between.

Nobody then closes connections, and a worker that waits for data would wait for ever. So the kernel is told to ask, on
connections to other hosts that are silent, whether the other side is still there, and to end them after a while of no
answer. Horovod's collectives then fail as they do when a worker dies. The kernel answers for a process that is busy or
stopped, so these are not taken for lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent import futures

SECONDS = 60.0  # of no answer, at the most
_SECONDS_TO_TRY = 3.0
_WORD_BYTES = 192


@dataclasses.dataclass(frozen=True)
class Links:
    """Connections of this process to other hosts.

    Args:
        own: the address by which others have reached this host, or it them; empty: there are none.
        ports: of each address of another host, a port that was in use there.
    """

    own: str = ""
    ports: dict[str, int] = dataclasses.field(default_factory=dict)


def connected() -> dict[int, str]:
    """The sockets of this process: what the kernel calls each."""
    found = {}
    with contextlib.suppress(OSError):  # no /proc
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if (link := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:"):
                    found[int(name)] = link
    return found


def keep_watch(before: dict[int, str], seconds: float = SECONDS) -> Links:
    """Has the kernel watch the connections to other hosts that are not in `before`; tells where they lead."""
    own, ports = "", {}
    for fd in (fd for fd, link in connected().items() if before.get(fd) != link):
        with _borrowed(fd) as one:
            if one is None or one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                continue
            with contextlib.suppress(OSError):  # it listens, or has ended
                (here, *_), (there, port, *_) = one.getsockname(), one.getpeername()
                if here == there or ipaddress.ip_address(there).is_loopback:
                    continue
                _ask_now_and_then(one, seconds)
                own, ports[there] = here, port
    return Links(own, ports)


def _ask_now_and_then(one: socket.socket, seconds: float) -> None:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds / 3)))
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(seconds / 6)))
    # While data are on their way nothing is asked; this is for both.
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket | None]:
    """The socket of another library, which stays its own; None if it has ended meanwhile."""
    one = None
    with contextlib.suppress(OSError):
        one = socket.socket(fileno=os.dup(fd))
    try:
        yield one
    finally:
        if one is not None:
            one.close()


def end(fd: int) -> None:
    """Ends a TCP connection of another library, which keeps the socket. Does nothing with what is none."""
    with _borrowed(fd) as one:
        if one is not None and one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
            with contextlib.suppress(OSError):  # it listens, or has ended
                one.getpeername()
                one.shutdown(socket.SHUT_RDWR)


def lost(links: Links) -> list[str]:
    """The addresses of other hosts, which all were reached before, that now are not. Takes some seconds."""
    if not links.ports:
        return []
    with futures.ThreadPoolExecutor(min(32, len(links.ports))) as pool:
        answers = pool.map(_answers, *zip(*links.ports.items(), strict=True))
        return [address for address, is_there in zip(links.ports, answers, strict=True) if not is_there]


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _SECONDS_TO_TRY).close()
    except ConnectionRefusedError:
        return True  # nobody listens, and the host says so
    except OSError:
        return False
    return True


def card(links: Links) -> bytes:
    """What a worker tells others of its host, so long on all workers: its name and address."""
    name = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    return f"{name[:120]} {links.own}".encode()[:_WORD_BYTES].ljust(_WORD_BYTES, b"\0")


def read_cards(cards: bytes) -> list[tuple[str, str]]:
    """Of each worker its host's name and address, from the cards of all."""
    words = [cards[i : i + _WORD_BYTES].rstrip(b"\0").decode() for i in range(0, len(cards), _WORD_BYTES)]
    return [(name, address) for name, _, address in (word.partition(" ") for word in words)]


def describe_lost(addresses: Sequence[str], workers: Sequence[tuple[str, str]], seconds: float) -> str:
    """Which hosts cannot be reached, in words; empty if there are none.

    Args:
        addresses: that do not answer.
        workers: of each rank its host's name and address.

    Example:
        >>> print(describe_lost(["10.0.0.2"], [("a", "10.0.0.1"), ("b", "10.0.0.2"), ("b", "10.0.0.2")], 60))
        host 'b' (10.0.0.2; ranks 1, 2) cannot be reached: it has stopped, or its network has.
          Connections to it have ended after 60 s without an answer. This worker cannot go on without it.
    """
    lines = []
    for address in addresses:
        ranks = [rank for rank, (_, its) in enumerate(workers) if its == address]
        name = f"host '{workers[ranks[0]][0]}'" if ranks else "the host"
        of_it = f"; rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
        lines.append(f"{name} ({address}{of_it}) cannot be reached: it has stopped, or its network has.")
    if lines:
        which = "it" if len(lines) == 1 else "them"
        lines.append(
            f"  Connections to {which} have ended after {seconds:g} s without an answer. This worker cannot go on "
            f"without {which}."
        )
    return "\n".join(lines)
