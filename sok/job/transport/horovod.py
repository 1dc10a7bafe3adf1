"""Many workers through Horovod: the only file that imports it, on first use."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import tensorflow as tf

from sok.base import _ops, log
from sok.base.graph_ops import run_now
from sok.job import elastic_launcher
from sok.job.transport import links
from sok.job.transport.base import check_has_rows, check_movable, is_on_gpu
from sok.job.transport.many import ManyTransport
from sok.job.transport.store import Store
from sok.job.transport.watch import Watch

_CPU = "/CPU:0"
_SENT = (tf.int32, tf.int64, tf.float32, tf.float64)  # vectors of these, without Horovod
# What Horovod does not move as it is: we move the bits.
_MOVED_AS = {tf.bfloat16: tf.uint16, tf.uint32: tf.int32, tf.uint64: tf.int64}
# What Horovod does not add: we add wider numbers.
_ADDED_AS = {tf.bfloat16: tf.float32}


def running_size() -> int:
    """How many workers a Horovod that runs in this process has; 0 if none runs. Does not import it."""
    hvd: Any = sys.modules.get("horovod.tensorflow")
    is_initialized = getattr(hvd, "is_initialized", None)
    return hvd.size() if is_initialized is not None and is_initialized() else 0


_made: dict[int, str] = {}  # sockets that Horovod's start has made: of each its number and what the kernel calls it


def end() -> None:
    """Ends Horovod on this worker, where it runs."""
    hvd: Any = sys.modules.get("horovod.tensorflow")
    if hvd is not None:
        hvd.shutdown()


def cut() -> None:
    """Ends the connections of Horovod, so that no worker waits for another in it: not this one, and not for this one.

    `hvd.shutdown` waits for a thread that may itself wait for a peer, and (0.28.1) leaves the connections open: a peer
    that waits for this worker waits on. Both end at once where the connections do.
    """
    for fd, link in links.connected().items():
        if _made.get(fd) == link:
            links.end(fd)


def _start(hvd: Any) -> dict[int, str]:
    """Starts Horovod; the sockets that there were before. Empty if the program has started Horovod itself."""
    global _made
    if hvd.is_initialized():
        if elastic_launcher.is_there():
            raise RuntimeError(
                "hvd.init() was called before sok.Init. In a job of `sok elastic` sok.Init does that: call it first."
            )
        return {}
    if elastic_launcher.is_there():
        elastic_launcher.take_place()
    before = links.connected()
    hvd.init()
    _made = {fd: link for fd, link in links.connected().items() if before.get(fd) != link}
    if elastic_launcher.is_there():
        elastic_launcher.tell_begun()
    return before


class HorovodTransport(ManyTransport):
    """The processes and collectives of Horovod, as it was built (Gloo or MPI). Starts Horovod if nobody has.

    Tensors are staged through the CPU; TensorFlow copies those of a GPU there and back. `all_to_all`, and sums of
    numbers that lie there, go without Horovod, whose workers agree on each collective by several messages before they
    send: between workers of one host through memory that they share, between others over TCP, by connections of our
    own. In the environment of any worker SOK_SHARED_MEMORY=0 and SOK_TCP=0 turn these off for all. With MPI or NCCL,
    which may know a faster network, hosts talk by Horovod unless all workers have SOK_TCP=1. Only a Horovod that was
    built to do its alltoall on GPUs (HOROVOD_GPU_OPERATIONS=NCCL) gets floats that lie on one as they are; all workers
    must then have them there.

    Args:
        deadline: seconds that a collective may wait for workers which do not come (`transport/watch.py`); 0: for ever.

    Raises:
        ImportError: Horovod is not installed.
    """

    name = "horovod"
    _added_as = _ADDED_AS

    def __init__(self, deadline: float = 0.0) -> None:
        try:
            import horovod.tensorflow as hvd
        except ImportError as error:
            raise ImportError(
                "This process was launched as one of several workers, but Horovod cannot be imported here "
                f"({error}). Install Horovod (docs/install.md), or start one process without horovodrun or mpirun."
            ) from error
        self._hvd = hvd
        before = _start(hvd)
        self.rank, self.size, self.local_rank = hvd.rank(), hvd.size(), hvd.local_rank()
        self.is_direct = self.shares_memory = False
        self._lost_after = min(links.SECONDS, deadline / 2) if deadline else links.SECONDS
        self._links = links.keep_watch(before, self._lost_after)
        try:
            self._hosts = self._tell_hosts()
            if deadline and self.size > 1:
                self._watch = Watch(self.rank, self.size, deadline, self._store(), self.abort)
            self.is_direct, self.shares_memory = self._connect()
        except BaseException:
            self.shutdown()
            raise
        self.moves_on_gpu = _has_gpu_kernel("HorovodAlltoall")
        self.adds_on_gpu = _has_gpu_kernel("HorovodGroupedAllreduce")

    def _store(self) -> str:
        """'host:port' of a key-value store that all workers reach: horovodrun's, or else one that rank 0 starts now."""
        host, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{what}", "") for what in ("ADDR", "PORT"))
        if host and port:
            return f"{host}:{port}"
        own = b""
        if self.rank == 0:
            own = f"{socket.gethostname()}:{Store().server_port}".encode()
        told = run_now(lambda: self.all_gather(tf.constant(list(own), tf.uint8), "sok/watch/store"))
        return bytes(told).decode()

    def _tell_hosts(self) -> list[tuple[str, str]]:
        """Of each rank its host's name and address."""
        if self.size == 1:
            return []
        mine = list(links.card(self._links))
        cards = run_now(lambda: self.all_gather(tf.constant([mine], tf.uint8), "sok/hosts"))
        return links.read_cards(cards.tobytes())

    def _connect(self) -> tuple[bool, bool]:
        """Whether workers send to one another without Horovod, and whether all share memory. The same on all."""
        if self.size == 1:
            return False, False
        lib = _ops.lib()
        may_share = os.environ.get("SOK_SHARED_MEMORY", "1") != "0"
        may_know_faster = self._hvd.mpi_enabled() or self._hvd.nccl_built()
        may_use_tcp = os.environ.get("SOK_TCP", "0" if may_know_faster else "1") != "0"
        # Workers of one host have no address that another host has reached.
        host = self._hosts[self.rank][1] or "127.0.0.1" if may_use_tcp else ""

        def ask() -> tf.Tensor:
            offer = lib.sok_shared_offer(rank=self.rank, size=self.size, host=host)
            offers = self.all_gather(offer[tf.newaxis], "sok/shared_memory/offers")
            can_read = tf.logical_and(lib.sok_shared_can_read(offers, rank=self.rank), may_share)
            answer = tf.concat([[may_use_tcp], can_read], 0)
            answers = self.all_gather(answer[tf.newaxis], "sok/shared_memory/answers")
            can_read = tf.logical_and(answers[:, 1:], tf.transpose(answers[:, 1:]))
            are_on_one_host = tf.reduce_all(can_read)
            can_connect = tf.logical_or(are_on_one_host, tf.reduce_all(answers[:, 0]))

            def connect() -> tf.Tensor:
                return lib.sok_mail_connect(offers, can_read[self.rank], lost_after=max(1.0, self._lost_after))

            is_connected = tf.cond(can_connect, connect, lambda: tf.constant(False))
            are_connected = self.all_gather(is_connected[tf.newaxis], "sok/shared_memory/connected")
            is_direct = tf.reduce_all(are_connected)
            return tf.stack([is_direct, tf.logical_and(is_direct, are_on_one_host), can_connect])

        is_direct, shares_memory, has_tried = run_now(ask)
        if not is_direct:
            _ops.close_mail()  # what listens, and connections of those who could
        if has_tried and not is_direct and self.rank == 0:
            log.logger.warning(
                "Some workers cannot reach others over TCP, at ports that the system chooses (a firewall?). So all "
                "send by Horovod, which takes longer. SOK_TCP=0 leaves out the attempt."
            )
        return bool(is_direct), bool(shares_memory)

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        place = self._place_of(tensor)
        with tf.device(place) if place else tensor.graph.colocate_with(tensor.op, ignore_existing=True):
            tensor = tf.convert_to_tensor(tensor)
            wire, splits = _to_wire(tensor, "all_to_all"), tf.convert_to_tensor(splits, tf.int32)
            is_direct = self.is_direct and place == _CPU and wire.shape.rank == 1 and wire.dtype in _SENT

            def collective(wire: tf.Tensor, turns: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
                if is_direct:
                    return self._direct_all_to_all(wire, splits, name, turns)
                return self._hvd.alltoall(wire, splits, **_named(name))

            received, received_splits = self._run("all_to_all", name, wire, collective)
            received.set_shape([None, *tensor.shape[1:]])
            received_splits.set_shape([self.size])
            return _from_wire(received, tensor.dtype), received_splits

    def _direct_all_to_all(
        self, wire: tf.Tensor, splits: tf.Tensor, name: str, turns: list[tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        in_graph = not tf.executing_eagerly()
        return _ops.lib().sok_shared_all_to_all(wire, splits, turns, collective=name, rank=self.rank, in_graph=in_graph)

    def _place_of(self, tensor: tf.Tensor) -> str:
        """Where the all-to-all of a tensor runs. The same on all ranks, if all have the tensor on a GPU or none.

        Empty in a v1 graph that leaves it to TensorFlow where the tensor is: there, which is known when a session runs.
        """
        if not (self.moves_on_gpu and tf.is_tensor(tensor) and tensor.dtype.is_floating):
            return _CPU
        if not tensor.device and not tf.compat.v1.executing_eagerly_outside_functions():
            return ""
        return tensor.device if is_on_gpu(tensor) else _CPU

    def narrowing_pays(self) -> bool:
        # In shared memory to copy floats takes less time than to narrow and widen them.
        return self.moves_on_gpu or not self.shares_memory

    def gpu_tensors(self) -> str:
        if self.moves_on_gpu:
            return f"on the device ({'NCCL' if self._hvd.nccl_built() else 'MPI'})"
        way = "MPI" if self._hvd.mpi_enabled() else "Gloo"
        direct = ", in shared memory" if self.shares_memory else ", by sockets of sok's own" if self.is_direct else ""
        return f"staged through the host ({way}{direct})"

    def _reduce_group(self, group: list[tf.Tensor], name: str, average: bool) -> list[tf.Tensor]:
        op = self._hvd.Average if average else self._hvd.Sum

        def collective(first: tf.Tensor, turns: list[tf.Tensor]) -> list[tf.Tensor]:
            tensors = [first, *group[1:]]
            if self.is_direct and first.dtype in _SENT and not is_on_gpu(first):
                # Each rank adds up its part of all numbers, in the order of ranks, and all get all parts.
                how = dict(rank=self.rank, average=average, in_graph=not tf.executing_eagerly())
                return _ops.lib().sok_shared_all_reduce(tensors, turns, collective=name, **how)
            return self._hvd.grouped_allreduce(tensors, op=op, **_named(name))

        return self._run("all_reduce", name, group, collective)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        with tf.device("/CPU:0"):
            tensor = tf.convert_to_tensor(tensor)
            check_has_rows(tensor, f"all_gather '{name}'")
            wire = _to_wire(tensor, "all_gather")

            (gathered,) = self._run("all_gather", name, wire, lambda x, _: [self._hvd.allgather(x, **_named(name))])
            if tensor.shape.rank is not None:
                gathered.set_shape([None, *tensor.shape[1:]])
            return _from_wire(gathered, tensor.dtype)

    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str) -> tf.Tensor:
        self._check_root(root_rank)
        with tf.device("/CPU:0"):
            tensor = tf.convert_to_tensor(tensor)
            wire = _to_wire(tensor, "broadcast")

            def collective(x: tf.Tensor, _: Any) -> list[tf.Tensor]:
                return [self._hvd.broadcast(x, root_rank, **_named(name))]

            (received,) = self._run("broadcast", name, wire, collective)
            received.set_shape(tensor.shape)
            return _from_wire(received, tensor.dtype)

    def barrier(self, name: str) -> tf.Tensor:
        with tf.device("/CPU:0"):

            def collective(x: tf.Tensor, _: Any) -> list[tf.Tensor]:
                return [self._hvd.allreduce(x, op=self._hvd.Sum, **_named(name))]

            return self._run("barrier", name, tf.constant(1), collective)[0]

    def describe_ended(self) -> str:
        told = links.describe_lost(links.lost(self._links), self._hosts, self._lost_after)
        return told or ("" if self._watch is None else self._watch.describe_ended())

    def abort(self) -> None:
        self._was_aborted = True
        if self.is_direct:
            _ops.close_mail()
        self._hvd.shutdown()

    def shutdown(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        # Horovod ends with the process. Ended here, it could not be started again: horovodrun's rendezvous keeps the
        # addresses of the first time until all ranks have left, and a rank that is early connects to those and aborts.


def _has_gpu_kernel(op: str) -> bool:
    from tensorflow.python.framework import kernels

    return any("GPU" in kernel.device_type for kernel in kernels.get_registered_kernels_for_op(op).kernel)


def _named(name: str) -> dict[str, Any]:
    """How Horovod is told the name: the last part of the node's name, so '/' must not occur in it.

    The scopes before it are ignored: they hold counters of what else this rank has traced. No two names become one,
    nor do they differ by case alone, which TensorFlow takes for the same.
    """

    def legal(c: str) -> str:
        if c.isascii() and (c.islower() or c.isdigit()):
            return c
        return f"-{c.lower()}" if c.isascii() and c.isupper() else f"_{ord(c):x}_"

    parts = ["".join(map(legal, part)) for part in name.split("/")]
    # A part must begin with a letter, a digit or a dot, which occurs nowhere else.
    return {"name": ">".join(p if p[:1].isalnum() else f".{p}" for p in parts), "ignore_name_scope": True}


def _to_wire(tensor: tf.Tensor, what: str) -> tf.Tensor:
    check_movable(tensor.dtype, what)
    return tf.bitcast(tensor, _MOVED_AS[tensor.dtype]) if tensor.dtype in _MOVED_AS else tensor


def _from_wire(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tensor if tensor.dtype == dtype else tf.bitcast(tensor, dtype)
