"""The job: who this worker is in it, and how it reaches the others."""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import os
import threading
import weakref
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from sok.base import log, names, profiling, strategies, tracing
from sok.job import dead_peers, elastic_launcher, gpus, launchers
from sok.job.job import SECONDS_TO_LEAVE, Job
from sok.job.servers import Servers
from sok.job.transport import horovod, watch
from sok.job.transport.base import Transport
from sok.job.transport.collectives import CollectivesTransport
from sok.job.transport.local import LocalTransport

# How workers tell one another of arguments that are None, or no whole numbers: as numbers that nobody passes.
_NONE, _NO_NUMBER = 1 - 2**63, -(2**63)


@dataclasses.dataclass(eq=False, repr=False)
class _Job(Job):
    is_explicit: bool = False  # made by Init, not by the first table of a single process
    seed_was_read: bool = False
    ranks_agree: bool = False
    gpu_error: RuntimeError | None = None


_SECONDS_TO_AGREE = 10.0  # to end a job in which all are as far

_job: _Job | None = None
# What sok.compat.strategy was told; until the job ends.
enabled_strategy: str | None = None
_lock = threading.RLock()
_graph_counters: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def Init(global_batch_size: int | None = None, seed: int | None = None, deadline: float | None = None) -> tf.Tensor:
    """Starts the job: call it once on every worker, before the first layer.

    Joins the other workers when this process is one of several: it was launched by `horovodrun` or `mpirun`, or
    `hvd.init()` was called before. Or TF_CONFIG names several workers, or a `tf.distribute.MultiWorkerMirroredStrategy`
    was made: then they talk by TensorFlow's collectives, without Horovod (docs/strategies.md). Otherwise this is a
    world of one worker, with or without Horovod installed.

    Args:
        global_batch_size: samples of all workers in one step: at least `size()` and divisible by it. `Init` checks it
            and remembers it, and does nothing else with it. None: not known.
        seed: of the initial values of tables. None means 0: the same model in every run, at any number of workers.
        deadline: seconds that a collective (a lookup, an update) may wait for workers that do not come, because their
            program does something else. After 60 s, or half of it, one of those that wait writes to stderr which
            workers came, and what the others do; after the deadline it ends the job on all workers. 0: wait for ever.
            None: SOK_DEADLINE of the environment, else 1800. Make it longer than the longest thing that only some
            workers do between two steps, such as an evaluation.

    Returns:
        A string tensor 'OK'. In a v1 graph `session.run` it once before training, which checks that all workers passed
        the same arguments (a second run checks nothing); everything else happened when it was built.

    Raises:
        ValueError: `global_batch_size` cannot be split over the workers; an argument is not a whole number; TF_CONFIG
            cannot be read; arguments other than those of the first call (a second call without arguments, or with the
            same, does nothing).
        tf.errors.InvalidArgumentError: workers passed different arguments. Raised on all of them.
        ImportError: several workers were launched and Horovod is not installed.
        RuntimeError: a launcher started several processes that Horovod does not see as one job; TF_CONFIG names workers
            as well; something was computed before this call met the workers of TF_CONFIG; this host has fewer GPUs than
            workers, or TensorFlow has started its GPUs already.

    On a host with GPUs each worker gets the one with its `local_rank`, whose memory grows as needed; where one GPU is
    visible already, it stays (docs/gpu.md).

    Collective. On several workers it also adds lines to the report of an exception that a dead peer caused
    (`sys.excepthook`), and with SOK_TRACE=1 in the environment a count of collectives when the process ends. With
    SOK_TRACE=FILE it starts a profile that is written then (`sok.profile`), on one worker too.

    Example:
        >>> import sok
        >>> sok.shutdown()
        >>> sok.Init(global_batch_size=64, seed=7).numpy()
        b'OK'
        >>> sok.rank(), sok.size()
        (0, 1)
        >>> sok.shutdown()

    Source: `Init` of SOK v1, which fails when called twice and draws a seed when given none.
    """
    global _job
    with _lock:
        if _job is not None and _job.is_explicit:
            _check_repeated(_job, global_batch_size, seed, deadline)
            return _check_agreement(_job)
        job, ok = _met(0 if seed is None else seed, global_batch_size, deadline)
        if job.gpu_error is not None:
            raise job.gpu_error
        job.seed = _whole_number("seed", job.seed)
        job.global_batch_size = _check_batch(job.global_batch_size, job.size)
        _check_seed_is_in_time(_job, job.seed)
        profiling.follow_environment(job.rank, job.size)
        _job = _begun(_job, job)
    log.logger.info("The job begins: %r, global_batch_size %s.", _job, _job.global_batch_size)
    if job.size > 1:
        dead_peers.explain_on_exit(job.rank, job.transport.describe_ended)
        tracing.summarize_at_exit(job.rank)
    return ok


def get_job() -> Job:
    """Returns the job of now. A single process needs no `Init` for it.

    Raises:
        RuntimeError: this process is one of several workers, and `sok.Init` has not been called.
    """
    return _get_job()


def use_servers(servers: Servers) -> None:
    """Has these hold the rows of all tables of the job. To be called before its first table.

    Raises:
        RuntimeError: this process is one of several workers of a job of `sok.Init`; there are tables already.
    """
    job = _get_job()
    if job.size > 1:
        raise RuntimeError(
            f"sok.Init has joined {job.size} workers, whose tables lie on them and which are in step. Workers of "
            "parameter servers are started one by one, without horovodrun and without sok.Init."
        )
    if job.servers != servers and job.has_tables:
        raise RuntimeError("There are tables on this worker. Enable parameter servers before the first table.")
    job.servers = servers
    strategies.is_served = True


def servers() -> Servers | None:
    """Returns those of the job of now, if there is one; it makes none."""
    return None if _job is None else _job.servers


def variables_device() -> str:
    """Returns where variables lie that all workers share: the first server; without servers each worker has its own."""
    found = servers()
    return "CPU:0" if found is None else found.devices[0]


def get_transport() -> Transport:
    """Returns how this worker reaches the others in the job of now: see `get_job`."""
    return get_job().transport


def get_seed() -> int:
    """Returns the seed of the initial values: what `Init` was given, or 0."""
    job = _get_job()
    job.seed_was_read = True
    return job.seed


def get_global_batch_size() -> int | None:
    """Returns what `Init` was given, or None."""
    return _get_job().global_batch_size


def rank() -> int:
    """Returns this worker's number, from 0 to `size() - 1`."""
    return get_transport().rank


def size() -> int:
    """Returns the number of workers."""
    return get_transport().size


def local_rank() -> int:
    """Returns this worker's number among those of its host."""
    return get_transport().local_rank


def shutdown() -> None:
    """Ends the job; `Init` may then start another. Does nothing without a job.

    Call it on all workers, and make new tables afterwards: names of tables and optimizers are free again, so that a
    second run in one process has the initial values and the names in checkpoints of the first. `export()` still reads
    the tables of this one; lookups, updates, saves and all else that is collective refuse them. Horovod keeps running
    until the process ends: it cannot be started a second time reliably, since workers that are early would find the
    addresses of the first time.
    """
    global _job, enabled_strategy
    if _job is not None:
        _job.leave()  # without the lock: who is waited for may need it
    with _lock:
        if _job is not None:
            _job.end()
            log.logger.info("The job has ended: %r.", _job)
        _job = enabled_strategy = None
        strategies.is_served = False
        names.start_anew()


def rejoin(is_agreed: bool) -> None:
    """Ends the job, and begins one with the arguments of its `Init` among the workers that there are by then.

    Of elastic jobs. Collective among those that are there.

    Args:
        is_agreed: all workers leave the job here. Else one is lost, and whoever waits for this one is not to wait on.

    Raises:
        SystemExit: with status 0: the launcher does not want this worker any more.
    """
    job = _get_job()
    cutting = threading.Timer(_SECONDS_TO_AGREE, horovod.cut)  # if a worker is lost right then
    cutting.daemon = True
    if is_agreed:
        cutting.start()
    else:
        horovod.cut()  # before anything is waited for
    job.transport.abort()
    horovod.end()  # of one worker, whose transport is another
    cutting.cancel()
    job.leave(SECONDS_TO_LEAVE)
    shutdown()
    Init(job.global_batch_size, job.seed, job.deadline)


def is_elastic() -> bool:
    """Whether `sok elastic` has started this worker, and brings it together with others when one is lost."""
    return elastic_launcher.is_there()


def are_changes() -> bool:
    """Whether the launcher of an elastic job has workers that wait, or that are to leave. False without one."""
    return elastic_launcher.is_there() and elastic_launcher.has_changes()


def unique_collective_name(base: str) -> str:
    """Returns `base` with a number that no other collective of this base has in the function under construction.

    The number depends only on the program being traced and so is equal on all ranks: each function counts by itself,
    with its loops and branches, whoever calls it and whatever else a rank has traced before. For a rank may trace a
    function anew, for a batch of another shape, while its peers use what they have traced. So two functions may have
    collectives of one name: `sok.job.transport.ordering` runs these in the order of the program. In a v1 graph,
    which has no such order, all functions count together. Eager calls run one by one and get `base` as it is.
    """
    if tf.executing_eagerly():
        return base
    with _lock:
        counters = _graph_counters.setdefault(counting_graph(), {})
        return f"{base}/{next(counters.setdefault(base, itertools.count()))}"


def counting_graph() -> Any:
    """The graph in which collectives are counted that are built now: not executing eagerly."""
    graph = ops.get_default_graph()
    is_v1 = not tf.compat.v1.executing_eagerly_outside_functions()
    while graph.building_function and (is_v1 or isinstance(graph, ControlFlowFuncGraph)) and graph.outer_graph:
        graph = graph.outer_graph
    return graph


def _size_if_any() -> int:
    return 1 if _job is None else _job.size


strategies.job_size = _size_if_any


def _get_job() -> _Job:
    global _job
    if _job is None:
        with _lock:
            if _job is None:
                if why := launchers.workers_named()[0]:
                    raise RuntimeError(
                        f"This process is one of several workers ({why}), and sok.Init has not been called. Call "
                        "sok.Init(global_batch_size=...) once on every worker, before the first layer."
                    )
                profiling.follow_environment(rank=0, size=1)
                _job = _Job(LocalTransport())
    return _job


def _met(seed: Any, global_batch_size: Any, deadline: Any) -> tuple[_Job, tf.Tensor]:
    """A job whose workers have said to each other what `Init` was given. One that is lost meanwhile ends no others."""
    while True:
        job = None
        try:
            job = _join(seed, global_batch_size, deadline)
            log.set_rank(job.rank)
            # The GPU cannot be chosen any more once something has run; so this comes first, and tells what it has to
            # say.
            try:
                gpus.bind(job.local_rank, job.size)
            except RuntimeError as error:
                job.gpu_error = error
            # What the ranks say to each other, so that all of them fail if one does; then what each says.
            return job, _check_agreement(job)
        except Exception as error:
            _forget_workers_of_strategies()
            if not (elastic_launcher.is_there() and dead_peers.is_from_dead_peer(error)):
                raise
            log.logger.warning("A worker is gone, while this one met it; the others meet again.")
            horovod.cut()
            if job is not None:
                job.transport.shutdown()
                job.transport.abort()
            horovod.end()


def _join(seed: Any, global_batch_size: Any, deadline: Any) -> _Job:
    seconds = watch.checked_deadline(deadline)
    # That of an elastic job says it only when asked, and says another thing each time.
    launcher = "" if elastic_launcher.is_there() else launchers.of_many()
    transport: Transport = LocalTransport()
    engine = launchers.workers_named()[1]
    if engine == CollectivesTransport.name:
        _abandon_at_exit()
        transport = CollectivesTransport(seconds)
    elif engine or horovod.running_size() > 0 or "HOROVOD_SIZE" in os.environ:
        _abandon_at_exit()
        found = horovod.HorovodTransport(seconds)
        if launcher and launcher != f"{launcher.partition('=')[0]}={found.size}":
            raise RuntimeError(
                f"The launcher says {launcher}, but Horovod sees {found.size} worker(s). A Horovod that was built "
                "without MPI does not understand mpirun: use `horovodrun --gloo -np N ...`."
            )
        # horovodrun -np 1: Horovod is there for the user's own calls; we need no collectives.
        transport = found if found.size > 1 else transport
    job = _Job(transport, seed, global_batch_size, seconds, is_explicit=True)
    if isinstance(transport, CollectivesTransport):
        strategies.workers = lambda: transport.size
        job.at_end(_forget_workers_of_strategies)
    return job


def _forget_workers_of_strategies() -> None:
    strategies.workers = None


def _abandon_at_exit() -> None:
    atexit.unregister(_abandon)
    atexit.register(_abandon)  # first, to be done last: when peers know of this worker's end


def _abandon() -> None:
    """At the end of the program: what waits beside it for a peer that does not come is dropped. Its thread must end."""
    job = _job
    if job is None or job.has_ended or not (left := job.leave(0)):
        return
    if any(beside.is_in_task for beside in left) and dead_peers.own_end()[0] == dead_peers.WELL:
        log.logger.warning(
            "The program ends, and this worker has begun a batch of sok.ahead that others have not. It is dropped."
        )
    job.transport.abort()
    job.leave(SECONDS_TO_LEAVE)


def _begun(before: _Job | None, job: _Job) -> _Job:
    """The job that `Init` has made; if a first table has begun one of this process alone, that one goes on."""
    if before is None or job.size > 1:
        if before is not None:
            before.end()
        return job
    before.seed, before.global_batch_size, before.deadline = job.seed, job.global_batch_size, job.deadline
    before.is_explicit, before.ranks_agree = True, job.ranks_agree
    return before


def _is_whole_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and int(value) == value and -(2**63) <= value < 2**63
    except (TypeError, ValueError, OverflowError):
        return False


def _whole_number(argument: str, value: Any) -> int:
    if not _is_whole_number(value):
        raise ValueError(f"`{argument}` must be a whole number of 64 bits. Received: {value!r}.")
    return int(value)


def _check_batch(global_batch_size: Any, size: int) -> int | None:
    if global_batch_size is None:
        return None
    batch = _whole_number("global_batch_size", global_batch_size)
    if batch < size:
        raise ValueError(f"`global_batch_size` must be at least the number of workers, {size}. Received: {batch}.")
    if batch % size:
        raise ValueError(f"`global_batch_size` must be divisible by the number of workers, {size}. Received: {batch}.")
    return batch


def _check_repeated(job: _Job, global_batch_size: Any, seed: Any, deadline: Any) -> None:
    for argument, before, now in (
        ("global_batch_size", job.global_batch_size, global_batch_size),
        ("seed", job.seed, seed),
        ("deadline", job.deadline, None if deadline is None else watch.checked_deadline(deadline)),
    ):
        if now is not None and now != before:
            raise ValueError(
                f"sok.Init was called before with {argument}={before}. Received: {argument}={now!r}. "
                "Call sok.shutdown() first to start anew."
            )


def _check_seed_is_in_time(implicit: _Job | None, seed: int) -> None:
    if implicit is not None and implicit.seed_was_read and implicit.seed != seed:
        raise ValueError(
            "sok.Init(seed=...) must be called before the first table: there are tables made with seed "
            f"{implicit.seed}. Received: seed={seed}."
        )


def _check_agreement(job: _Job) -> tf.Tensor:
    """Gives 'OK' if all ranks passed the same arguments to Init, else raises on all of them. Asks once per job."""
    with tf.init_scope():
        if job.size == 1 or job.ranks_agree:
            return tf.constant("OK")
        if tf.executing_eagerly():
            ok = _gather_and_compare(job)
            job.ranks_agree = True
            return ok

        # In a v1 graph the session decides whether and how often this runs.
        def has_to_ask() -> bool:
            return not job.ranks_agree

        def ask() -> tf.Tensor:
            with tf.control_dependencies([_gather_and_compare(job)]):
                return tf.numpy_function(note_agreement, [], tf.string)

        def note_agreement() -> bytes:
            job.ranks_agree = True
            return b"OK"

        return tf.cond(tf.numpy_function(has_to_ask, [], tf.bool), ask, lambda: tf.constant("OK"))


def _gather_and_compare(job: _Job) -> tf.Tensor:
    words = [_word(job.global_batch_size, none=_NONE), _word(job.seed, none=0), int(job.gpu_error is None)]
    everyone = job.transport.all_gather(tf.constant([words], tf.int64), unique_collective_name("sok/init"))
    if tf.executing_eagerly():
        if differences := _differences(everyone.numpy()):
            raise tf.errors.InvalidArgumentError(None, None, differences)
        return tf.constant("OK")
    differences = tf.reshape(tf.numpy_function(_differences, [everyone], tf.string), [])
    with tf.control_dependencies([tf.debugging.Assert(tf.equal(differences, ""), [differences])]):
        return tf.constant("OK")


def _differences(everyone: np.ndarray) -> str:
    """What workers have passed to Init that must be the same, in words; empty if it is. `everyone`: their words [R, 3].

    >>> _differences(np.array([[64, 7, 1], [64, 8, 1], [64, 8, 1]]))
    'sok.Init: all workers must pass the same `seed`. Received: 7 on rank 0, 8 on ranks 1, 2.'
    """
    said = []
    for place, what in enumerate(("global_batch_size", "seed", "gpu")):
        ranks: dict[int, list[int]] = {}
        for rank, value in enumerate(everyone[:, place].tolist()):
            ranks.setdefault(value, []).append(rank)
        if len(ranks) == 1:
            continue
        if what == "gpu":
            said.append(f"{watch.ranks_named(ranks[0])} found no GPU to use, {watch.ranks_named(ranks[1])} did.")
            continue
        values = ", ".join(f"{_spoken(value)} on {watch.ranks_named(its)}" for value, its in ranks.items())
        said.append(f"all workers must pass the same `{what}`. Received: {values}.")
    return f"sok.Init: {' Also, '.join(said)}" if said else ""


def _spoken(word: int) -> str:
    return {_NONE: "None", _NO_NUMBER: "no whole number"}.get(word, str(word))


def _word(argument: Any, none: int) -> int:
    # What is no number fails its own check afterwards, on the rank that passed it; the others must not wait for that.
    return none if argument is None else int(argument) if _is_whole_number(argument) else _NO_NUMBER
