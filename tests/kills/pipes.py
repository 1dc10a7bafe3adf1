"""Workers that are forked, and reach each other through pipes: what a save needs of a transport, and no launcher."""

from __future__ import annotations

import socket
import struct

import numpy as np
import tensorflow as tf

from sok.job.transport.base import Transport


def pairs(size: int) -> list[tuple[socket.socket, socket.socket]]:
    """For each rank the two ends of its line to rank 0. Made before the fork; see `PipeTransport`."""
    return [socket.socketpair() for _ in range(size)]


class PipeTransport(Transport):
    """Everything goes through rank 0. A worker that is gone is an error for the others."""

    name = "pipes"

    def __init__(self, rank: int, lines: list[tuple[socket.socket, socket.socket]]) -> None:
        self.rank, self.size, self.local_rank = rank, len(lines), rank
        self._lines = [line[0] for line in lines] if rank == 0 else [lines[rank][1]]
        kept = set(map(id, self._lines))
        for end in (end for line in lines for end in line if id(end) not in kept):
            end.close()  # or nobody would see that its owner is gone

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        mine = tensor.numpy()
        if self.rank != 0:
            _send(self._lines[0], name.encode(), mine.tobytes())
            _, everything = _receive(self._lines[0])
        else:
            said = [_receive(line) for line in self._lines[1:]]
            assert {other for other, _ in said} <= {name.encode()}, "workers met in different collectives"
            everything = b"".join([mine.tobytes(), *(data for _, data in said)])
            for line in self._lines[1:]:
                _send(line, name.encode(), everything)
        return tf.constant(np.frombuffer(everything, mine.dtype))

    def barrier(self, name: str) -> tf.Tensor:
        return self.all_gather(tf.zeros([0], tf.uint8), name)

    def all_to_all(self, tensor, splits, name):
        raise NotImplementedError("no save or restore sends rows")

    def grouped_all_reduce(self, tensors, name, average):
        raise NotImplementedError("no save or restore adds")

    def broadcast(self, tensor, root_rank, name):
        raise NotImplementedError("no save or restore broadcasts")

    def shutdown(self) -> None:
        for line in self._lines:
            line.close()


def _send(line: socket.socket, *parts: bytes) -> None:
    line.sendall(struct.pack("<2q", *map(len, parts)) + b"".join(parts))


def _receive(line: socket.socket) -> list[bytes]:
    sizes = struct.unpack("<2q", _exactly(line, 16))
    return [_exactly(line, size) for size in sizes]


def _exactly(line: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        piece = line.recv(n - len(data))
        if not piece:
            raise ConnectionError("a worker is gone")
        data += piece
    return data
