"""The cluster of a `tf.distribute.MultiWorkerMirroredStrategy`: which workers TF_CONFIG names, and who they are."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context as eager

from sok.job.transport import links

_JOBS = ("chief", "worker")  # in the order of ranks

# One that sok has made: it must live as long as its collectives.
_strategy: tf.distribute.Strategy | None = None


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Workers of one job, and which of them this process is.

    Args:
        addresses: 'host:port' of each worker; the chief, where there is one, first.
        rank: this process' place in them.
    """

    addresses: tuple[str, ...]
    rank: int

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.addresses)

    @property
    def local_rank(self) -> int:
        """This worker's number among those whose addresses name the same host."""
        hosts = [address.rpartition(":")[0] for address in self.addresses]
        return hosts[: self.rank].count(hosts[self.rank])


def of_environment(text: str | None = None) -> Cluster | None:
    """The cluster that TF_CONFIG says this process trains in; None if it names no other worker.

    A process that only evaluates, and a cluster with parameter servers, are none of it.

    Args:
        text: instead of TF_CONFIG of the environment.

    Raises:
        ValueError: TF_CONFIG cannot be read, or does not name a task of its cluster.

    Example:
        >>> of_environment('{"cluster": {"worker": ["a:1", "a:2"]}, "task": {"type": "worker", "index": 1}}')
        Cluster(addresses=('a:1', 'a:2'), rank=1)
    """
    text = os.environ.get("TF_CONFIG", "") if text is None else text
    if not text.strip():
        return None
    try:
        config = json.loads(text)
        jobs, task = config.get("cluster") or {}, config.get("task") or {}
        cluster = _cluster(jobs, task.get("type"), int(task.get("index", 0)))
    except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise ValueError(
            "TF_CONFIG must be JSON such as "
            '{"cluster": {"worker": ["host1:port", "host2:port"]}, "task": {"type": "worker", "index": 0}}, '
            f"whose task is one of the cluster. Received: {text!r} ({error})."
        ) from error
    return cluster


def running() -> Cluster | None:
    """The cluster whose workers a `MultiWorkerMirroredStrategy` of this process has met; None if there is none."""
    server = eager.context()._collective_ops_server_def
    if server is None:
        return None
    jobs = {job.name: [job.tasks[index] for index in sorted(job.tasks)] for job in server.cluster.job}
    return _cluster(jobs, server.job_name, server.task_index)


def _cluster(jobs: Mapping[str, Sequence[str]], task_type: str | None, index: int) -> Cluster | None:
    if sum(map(len, jobs.values())) < 2 or "ps" in jobs or task_type == "evaluator":
        return None  # whatever else one task alone is called
    if task_type not in jobs or task_type not in _JOBS:
        raise ValueError(f"task {task_type!r} is not in the cluster")
    addresses = [address for job in _JOBS for address in jobs.get(job, ())]
    before = 0 if task_type == "chief" else len(jobs.get("chief", ()))
    if not 0 <= index < len(jobs[task_type]):
        raise ValueError(f"there is no {task_type} {index}")
    return Cluster(tuple(addresses), before + index) if len(addresses) > 1 else None


def meet() -> Cluster:
    """Meets the workers that TF_CONFIG names, by a strategy like that of a user, if no strategy has."""
    global _strategy
    if (met := running()) is not None:
        return met
    try:
        wait_longer()
        _strategy = tf.distribute.MultiWorkerMirroredStrategy()
    except RuntimeError as error:
        raise RuntimeError(
            "TF_CONFIG names several workers, and TensorFlow cannot meet them any more: something was computed before. "
            "Call sok.Init, or make the tf.distribute.MultiWorkerMirroredStrategy, first in the program. TensorFlow "
            f"says: {error}"
        ) from error
    met = running()
    assert met is not None
    return met


def wait_longer(seconds: float = links.SECONDS) -> None:
    """Has TensorFlow take a worker for lost that is silent for so long, in place of its own 10 s.

    A process that is not scheduled, or holds Python's lock, is silent. To be called before the strategy is made.
    """
    found = of_environment()
    if found is None or eager.context().coordination_service is not None:
        return
    jobs = tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec().as_dict()
    leader = next(job for job in _JOBS if jobs.get(job))
    eager.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{leader}/replica:0/task:0",
        heartbeat_timeout_in_ms=int(1000 * seconds),
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=job, num_tasks=len(jobs[job])) for job in _JOBS if jobs.get(job)
        ],
    )


def abort(text: str) -> None:
    """Ends all collectives of this process, those of strategies too, with an error of these words."""
    eager.context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, text)
