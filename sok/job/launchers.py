"""What says that a process is one of several workers, and by which engine they meet: launchers, or a cluster."""

from __future__ import annotations

import os

from sok.job import elastic_launcher
from sok.job.transport import cluster, horovod
from sok.job.transport.collectives import CollectivesTransport

# How launchers tell a process how many of it they started: horovodrun, Open MPI, other MPIs.
_LAUNCHER_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def of_many() -> str:
    """Which environment variable says that there are several workers, as 'NAME=N'; empty if none does."""
    for variable in _LAUNCHER_VARIABLES:
        text = os.environ.get(variable, "")
        if text.isdigit() and int(text) > 1:
            return f"{variable}={int(text)}"
    return ""


def workers_named() -> tuple[str, str]:
    """What says that this process is one of several workers, and the engine by which they meet; empty if nothing does.

    Raises:
        RuntimeError: a launcher of Horovod's and TensorFlow's own cluster both do.
        ValueError: TF_CONFIG cannot be read.
    """
    launcher = elastic_launcher.ADDRESS if elastic_launcher.is_there() else of_many()
    by_horovod = launcher or ("hvd.init() was called" if horovod.running_size() > 1 else "")
    cluster_of_many = _cluster_of_many()
    if by_horovod and cluster_of_many:
        raise RuntimeError(
            f"{by_horovod} and {cluster_of_many} both name the workers of this job, and sok cannot tell which counts. "
            "Start the workers by horovodrun and unset TF_CONFIG, or each by itself with TF_CONFIG alone."
        )
    engine = CollectivesTransport.name if cluster_of_many else horovod.HorovodTransport.name if by_horovod else ""
    return by_horovod or cluster_of_many, engine


def _cluster_of_many() -> str:
    """What says that TensorFlow's own collectives join this process to others, in words; empty if nothing does."""
    if cluster.running() is not None:
        return "tf.distribute.MultiWorkerMirroredStrategy"
    found = cluster.of_environment()
    return "" if found is None else f"TF_CONFIG of {found.size} workers"
