"""Who this worker is, and plain collectives: the functions of SOK v2's `communication`, over this job's transport.

`sok.init()` (or `sok.Init`) comes first where there are several workers; a single process needs neither. A worker is
one process with one device, so what SOK counts in GPUs is counted in workers here.

The collectives work eagerly, in `tf.function` and in v1 graphs, and are *collective*: every worker calls them in the
same order. `alltoall` is differentiable; the others promise no gradients. (`sok.lookup_sparse` and the layers bring
gradients home by themselves.)
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok.base.custom_gradient import custom_gradient
from sok.base.types import TensorLike
from sok.job import context
from sok.job.agreement import agree, describe
from sok.job.transport.base import Transport, check_addable, check_has_rows, check_movable
from sok.job.transport.refusal import all_refuse

TOOLS = ("horovod", "single")

_REDUCTIONS = ("sum", "average", "max", "min")


def set_comm_tool(tool: str = "horovod") -> None:
    """Joins the other workers, if there are any; `sok.init()` does the same. A second call does nothing.

    Args:
        tool: 'horovod', or 'single' for a process that is alone. Without other processes none is needed, and Horovod
            need not be installed.

    Raises:
        ValueError: another tool; 'single', and there are several workers.
        RuntimeError, ImportError: as `sok.Init`.

    Collective.

    Example:
        >>> set_comm_tool("horovod")
        >>> rank(), num_ranks()
        (0, 1)

    Source: `set_comm_tool` of SOK v2, where a second call is an error and an unknown tool is noticed later.
    """
    if tool not in TOOLS:
        raise ValueError(f"`tool` must be 'horovod' or 'single'. Received: {tool!r}.")
    context.Init()
    if tool == "single" and context.size() > 1:
        raise ValueError(f"`tool` 'single' is for one process. This job has {context.size()} workers: give 'horovod'.")


# There is one device to a worker.
rank = global_gpu_id = context.rank
num_ranks = num_gpus = context.size
local_rank = context.local_rank


def id_in_rank() -> int:
    """Returns which of its process' devices this is: 0, there is one."""
    return 0


def num_gpu_per_rank() -> int:
    """Returns the number of devices of a process: 1."""
    return 1


def barrier() -> None:
    """Waits until all workers are here: before one reads what another writes, or around what a script times.

    Saves, restores and all other calls of sok that are collective need none around them.

    Raises:
        RuntimeError: not called eagerly, but while a function is traced or a v1 graph is built.
        tf.errors.DeadlineExceededError: the deadline of `sok.Init` has passed, and some workers did not come. The
            message names them, and where they are. tf.errors.OpError: a worker is gone.

    Collective: one. Returns at once on one worker.

    Example:
        >>> import sok
        >>> sok.barrier()
    """
    if not tf.executing_eagerly():
        raise RuntimeError(
            "sok.barrier() waits where the program calls it: call it eagerly, outside of tf.function and v1 graphs. "
            "In a step no barrier is needed: its lookups and gradients meet the other workers."
        )
    context.get_transport().barrier("sok/communication/barrier")


def alltoall(tensor: TensorLike, splits: TensorLike) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends each worker its rows and gives the rows that all workers sent here.

    Args:
        tensor: [n, ...]; the first splits[0] rows go to worker 0, then splits[1] to worker 1, ...
        splits: [R] integers, with sum n.

    Returns:
        received [m, ...], worker 0's rows first, and received_splits [R] int32.

    Raises:
        TypeError: a dtype that cannot be sent, `splits` that are no integers.
        ValueError: a scalar, or splits that do not fit.
        tf.errors.InvalidArgumentError: in a graph, where only a run shows that splits do not fit. All on all workers.

    Two collectives: the first tells all workers what one of them refuses. Differentiable in `tensor`, any number of
    times: the gradient of what arrived is sent back. That is a collective, too: all workers take it or none does.

    Example:
        >>> received, splits = alltoall(tf.constant([1, 2, 3]), [3])
        >>> received.numpy().tolist(), splits.numpy().tolist()
        ([1, 2, 3], [3])
    """
    transport, name = context.get_transport(), context.unique_collective_name("sok/communication/alltoall")
    # Here and not in the transports, so that a program that runs on one worker runs on many.
    try:
        tensor = tf.convert_to_tensor(tensor)
        check_movable(tensor.dtype, "alltoall")
        check_has_rows(tensor, "alltoall")
        splits, wrong = _checked_splits(splits, tensor, transport.size)
    except (TypeError, ValueError) as error:
        if tf.executing_eagerly():
            agree(transport, f"{name}/refused", describe(error))
        elif transport.size > 1:
            all_refuse(transport, f"{name}/refused", str(error))
        raise
    with tf.control_dependencies([agree(transport, f"{name}/refused", wrong)]):
        return _sent(transport, tensor, tf.identity(splits), name)


def _sent(transport: Transport, tensor: tf.Tensor, splits: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
    """The transport's all_to_all, whose gradient is one that sends back."""

    @custom_gradient
    def send(rows: tf.Tensor) -> Any:
        received, counts = transport.all_to_all(rows, splits, name)

        def back(gradient: Any, _: Any) -> tf.Tensor:
            own = context.unique_collective_name("sok/communication/alltoall_gradient")
            return _sent(transport, tf.convert_to_tensor(gradient), counts, own)[0]

        return (received, counts), back

    return send(tensor)


def _checked_splits(splits: Any, tensor: tf.Tensor, workers: int) -> tuple[tf.Tensor, tf.Tensor | str]:
    """The splits as int32, and for `agree` what is wrong with them where only a run shows it."""
    splits = tf.convert_to_tensor(splits)
    if not splits.dtype.is_integer:
        raise TypeError(f"alltoall: `splits` must be integers. Received: {splits.dtype.name}.")
    if not splits.shape.is_compatible_with([workers]):
        raise ValueError(
            f"alltoall: `splits` must have one value per worker, {workers}. Received: shape {splits.shape}."
        )
    text = "alltoall: `splits` must not be negative, and must sum to the number of rows of `tensor`. Received:"
    given, rows = tf.get_static_value(splits), tf.compat.dimension_value(tensor.shape[0])
    if given is not None and (min(given) < 0 or rows not in (sum(given), None)):
        raise ValueError(f"{text} {given.tolist()} for {'some' if rows is None else rows} rows.")
    splits = tf.cast(splits, tf.int32)
    if given is not None and rows is not None:
        return splits, ""
    fits = tf.logical_and(tf.reduce_all(splits >= 0), tf.equal(tf.reduce_sum(splits), tf.shape(tensor)[0]))
    return splits, tf.where(
        fits, "", tf.strings.format(f"ValueError: {text} {{}} for {{}} rows.", (splits, tf.shape(tensor)[0]))
    )


def allreduce(tensor: TensorLike, op: str = "average") -> tf.Tensor:
    """Combines the tensors of all workers, element by element.

    Args:
        tensor: dense numbers, of a shape equal on all workers.
        op: 'sum', 'average' (floating point only), 'max' or 'min'.

    Returns:
        A tensor like `tensor`, equal on all workers.

    Raises:
        ValueError: another `op`.
        TypeError: a dtype that cannot be combined so.

    Example:
        >>> float(allreduce(tf.constant(2.0), "sum"))
        2.0
    """
    if op not in _REDUCTIONS:
        raise ValueError(f"`op` must be 'sum', 'average', 'max' or 'min'. Received: {op!r}.")
    tensor, transport = tf.convert_to_tensor(tensor), context.get_transport()
    if op in ("sum", "average"):
        check_addable(tensor.dtype, "allreduce", op == "average")
    else:
        check_movable(tensor.dtype, "allreduce")
    name = context.unique_collective_name("sok/communication/allreduce")
    if op in ("sum", "average"):
        return transport.grouped_all_reduce([tensor], name, average=op == "average")[0]
    everyone = transport.all_gather(tensor[tf.newaxis], name)
    return tf.reduce_max(everyone, 0) if op == "max" else tf.reduce_min(everyone, 0)


def allgather(tensor: TensorLike) -> tf.Tensor:
    """Gives all workers' rows [m, ...], worker 0's first.

    Args:
        tensor: [n, ...], n as each worker likes, also 0.

    Example:
        >>> allgather(tf.constant([[1], [2]])).numpy().tolist()
        [[1], [2]]
    """
    tensor = tf.convert_to_tensor(tensor)
    check_movable(tensor.dtype, "allgather")
    check_has_rows(tensor, "allgather")
    name = context.unique_collective_name("sok/communication/allgather")
    return context.get_transport().all_gather(tensor, name)


def broadcast(tensor: TensorLike, root: int) -> tf.Tensor:
    """Gives worker `root`'s tensor to all; the others pass one of the same shape and dtype.

    Example:
        >>> int(broadcast(tf.constant(7), 0))
        7
    """
    tensor = tf.convert_to_tensor(tensor)
    check_movable(tensor.dtype, "broadcast")
    name = context.unique_collective_name("sok/communication/broadcast")
    return context.get_transport().broadcast(tensor, root, name)
