"""Tables whose rows lie on parameter servers: where their handles are, and what is asked of all shards.

To native code each server is a rank of a job that has as many, so the shard of server i is what rank i has. A table
has a handle for each, which is named: whoever makes a table of the same name finds the same rows. Beside them it has

- an *image* on the worker that looks up: a table without rows, which tells the routing of keys what is legal and whose;
- a *stand-in*, a tensor [0, dim] that is the table to a tape: a resource would pin what touches it to its server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from sok.base import _ops
from sok.job.job import Job
from sok.job.servers import Servers, ShardTransport
from sok.table.initializers import InitializerSpec
from sok.table.options import TableOptions

if TYPE_CHECKING:
    from sok.table.table import EmbeddingVariable

_numbers = itertools.count()
_program = f"{os.getpid():x}-{os.urandom(6).hex()}"  # a coordinator that starts anew has tables of its own


@dataclasses.dataclass(frozen=True, eq=False)
class OnServers:
    """Where the shards of one table are.

    Args:
        servers: which there are.
        handles: of the native table of each.
        attributes: of each.
        image: the attributes of the image.
        name: by which nothing else is known on a worker.
    """

    servers: Servers
    handles: tuple[tf.Tensor, ...]
    attributes: tuple[dict[str, Any], ...]
    image: dict[str, Any]
    name: str
    _kept: list[tf.Tensor] = dataclasses.field(default_factory=list)

    def image_here(self) -> tf.Tensor:
        """The handle of the image, in the graph that is being built or, eagerly, in this process."""
        if tf.executing_eagerly():
            if not self._kept:
                with tf.device("/CPU:0"):  # the one that functions have here: both count ids in it
                    self._kept.append(_ops.lib().sok_table_handle(shared_name=f"{self.name}/image", **self.image))
            return self._kept[0]
        graph = tf.compat.v1.get_default_graph()
        images = getattr(graph, "_sok_images", None)
        if images is None:
            images = graph._sok_images = {}
        if self.name not in images:
            with tf.control_dependencies(None), tf.device("/device:CPU:0"):
                images[self.name] = _ops.lib().sok_table_handle(shared_name=f"{self.name}/image", **self.image)
        return images[self.name]


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """Places ops on a server, whatever they would be placed beside (v1's `tf.nn.embedding_lookup` says so)."""
    with contextlib.ExitStack() as stack:
        if not tf.executing_eagerly():
            stack.enter_context(tf.compat.v1.get_default_graph().colocate_with(None, ignore_existing=True))
        stack.enter_context(tf.device(device))
        yield


def check(options: TableOptions, own_initializer: bool) -> None:
    """`ValueError` for what a table on servers cannot have."""
    placement, admission = options.placement, options.admission
    refused = ""
    if placement.cuts_rows or placement.is_copied:
        refused = f"placement={placement!r}: take row_wise(), row_wise(hash=True), table_row_wise or table_wise(server)"
    elif admission is not None and admission.counts_apart:
        refused = f"admission={admission!r}: what is counted of keys without rows is in no checkpoint of servers"
    elif own_initializer:
        refused = "an initializer of your own, which is compiled in this process and not on the servers"
    elif options.gpu_memory_bytes is not None:
        refused = "gpu_memory_bytes: servers keep rows in the memory of their processors"
    if refused:
        raise ValueError(f"A table on parameter servers cannot have {refused}.")


def make(
    table: EmbeddingVariable, servers: Servers, attributes: dict[str, Any], set_data: Callable[[tf.Tensor], None]
) -> tuple[OnServers, tf.Tensor]:
    """The shards of a table, empty or as another program has left them, and the stand-in."""
    graph_mode = not tf.executing_eagerly()
    name = f"sok/{table.table_name}"
    if not graph_mode:
        # Eager programs have one coordinator. What an earlier job of it has left under a name is not found again.
        name = f"{name}/{_program}/{next(_numbers)}"
    handles, of_each = [], []
    for rank, device in enumerate(servers.devices):
        own = {**attributes, "world_size": servers.size, "rank": rank}
        with on(device):
            handle = table.make_handle(
                shared_name=f"{name}/{rank}", name=f"{table.table_name}/{rank}" if graph_mode else None, **own
            )
        set_data(handle)
        handles.append(handle)
        of_each.append(own)
    like = {key: attributes[key] for key in ("table", "key_dtype", "dim", "capacity", "hashed", "num_keys", "owner")}
    empty = InitializerSpec("constant").to_attributes(range(table.dim), table.dim)
    image = {**like, **empty, "seed": 0, "world_size": servers.size, "rank": 0}
    with tf.device("/CPU:0" if not graph_mode else "/device:CPU:0"):
        stand_in = tf.zeros([0, table.dim])
    return OnServers(servers, tuple(handles), tuple(of_each), image, name), stand_in


def drop_at_end(table: EmbeddingVariable) -> None:
    """Has the servers forget an eager table's rows when its job ends. Those of a v1 graph stay: others may use them."""
    on_servers = table.on_servers
    if on_servers is None or table._in_graph_mode:
        return
    # Names, which keep no table from being collected: the rows outlive it.
    handles, images = on_servers.handles, on_servers._kept

    def drop() -> None:
        for handle in (*handles, *images):
            with contextlib.suppress(tf.errors.OpError):  # a server that is gone has no rows
                tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)

    table.job.at_end(drop)


def views_of(table: EmbeddingVariable) -> list[EmbeddingVariable]:
    """The table as each server would see it, were servers workers: its shard, as rank i of a job of all servers."""
    on_servers = table.on_servers
    assert on_servers is not None
    made = vars(table).get("_views")
    if made is None:
        made = [_view(table, on_servers, rank) for rank in range(on_servers.servers.size)]
        table.__dict__["_views"] = made
    return made


def _view(table: Any, on_servers: OnServers, rank: int) -> Any:
    view = object.__new__(type(table))
    for noted, nothing in (("_optimizers", list), ("_unclaimed_slots", dict)):  # sok/optimizers/claims.py
        vars(table).setdefault(noted, nothing())  # so that the view has the same one
    vars(view).update(vars(table))
    job = Job(ShardTransport(rank, on_servers.servers.size), seed=table.job.seed)
    table.job.at_end(lambda: setattr(job, "has_ended", True))
    own = {"_job": job, "on_servers": None, "_handle": on_servers.handles[rank], "_views": None}
    vars(view).update(own, _part_handles=[own["_handle"]], _attributes=on_servers.attributes[rank])
    return view


def shards(tables: Sequence[EmbeddingVariable]) -> Iterator[tuple[str, list[EmbeddingVariable]]]:
    """Of each server its device, and the views of the tables. They are all on servers."""
    servers = tables[0].job.servers
    assert servers is not None
    for device, *views in zip(servers.devices, *map(views_of, tables), strict=True):
        yield device, views


def held(tables: Sequence[EmbeddingVariable]) -> list[list[EmbeddingVariable]]:
    """What moves to files and back: the tables as this worker has them; of tables on servers those of each."""
    if tables[0].on_servers is None:
        return [list(tables)]
    return [views for _, views in shards(tables)]


def over_shards(combine: Callable[[list[Any]], Any]) -> Callable[[Any], Any]:
    """A method of a table that, of one on servers, is what `combine` makes of what the shards say."""

    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        def call(table: Any, *arguments: Any, **named: Any) -> Any:
            if table.on_servers is None:
                return method(table, *arguments, **named)
            return combine([method(view, *arguments, **named) for view in views_of(table)])

        return call

    return decorate


def _beside(said: Sequence[Any]) -> list[tf.Tensor]:
    """Where the worker is: eagerly results of servers lie there."""
    return [tf.identity(one) for one in said]


def total(said: list[tf.Tensor]) -> tf.Tensor:
    """The sum of numbers."""
    with tf.device("/device:CPU:0"):
        return tf.add_n(_beside(said))


def largest(said: list[tf.Tensor]) -> tf.Tensor:
    """The largest of numbers."""
    with tf.device("/device:CPU:0"):
        return tf.reduce_max(tf.stack(_beside(said)))


def one_after_the_other(said: list[tuple[tf.Tensor, ...]]) -> tuple[tf.Tensor, ...]:
    """Keys, and what goes with them, server after server."""
    with tf.device("/device:CPU:0"):
        return tuple(tf.concat(_beside(column), 0) for column in zip(*said, strict=True))


def done(said: list[Any]) -> tf.Operation | None:
    """One op for all, in a v1 graph."""
    return None if any(one is None for one in said) else tf.group(*said)


def added(said: list[dict[str, int]]) -> dict[str, int]:
    """The sums of numbers with names."""
    return {name: sum(one[name] for one in said) for name in said[0]}


def any_of(said: list[Any]) -> Any:
    """What one says who has something to say: all have the same, once their server has been asked for an update."""
    return next((one for one in said if one), said[0])


def either(said: list[tuple[tf.Tensor, tf.Tensor]]) -> tuple[tf.Tensor, ...]:
    """Of keys of which one server knows something, and the others zeros."""
    with tf.device("/device:CPU:0"):
        return tuple(tf.add_n(_beside(column)) for column in zip(*said, strict=True))


BY_CHECKPOINT = "Save it (sok.save), restore it into a table of a job without servers, and do it there."

FROM_CHECKPOINT = "Read it into a table of a job without servers, save that (sok.save), and restore it here."


def refuse(table: EmbeddingVariable, what: str, instead: str) -> None:
    """`ValueError` if the table lies on servers."""
    if table.on_servers is not None:
        raise ValueError(f"{what} is not there for a table on parameter servers: '{table.table_name}'. {instead}")
