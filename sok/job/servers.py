"""`Servers`: the tasks of TensorFlow's own runtime that hold the rows of tables, where workers do not."""

from __future__ import annotations

import dataclasses
import json
import os

from sok.job.transport.local import LocalTransport

JOB = "ps"  # what TensorFlow's own strategies call it


@dataclasses.dataclass(frozen=True)
class Servers:
    """The parameter servers of a program: tasks 0 to `size - 1` of the job 'ps' of its cluster.

    Example:
        >>> Servers(2).devices
        ('/job:ps/replica:0/task:0/device:CPU:0', '/job:ps/replica:0/task:1/device:CPU:0')
    """

    size: int

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ValueError(
                f"`servers` must be how many tasks the job '{JOB}' has, at least 1. Received: {self.size!r}."
            )

    @property
    def devices(self) -> tuple[str, ...]:
        """Where the shards lie, one after the other."""
        return tuple(f"/job:{JOB}/replica:0/task:{task}/device:CPU:0" for task in range(self.size))

    @classmethod
    def from_environment(cls) -> Servers:
        """Those that TF_CONFIG names. `ValueError` if it names none."""
        text = os.environ.get("TF_CONFIG", "")
        try:
            cluster = json.loads(text or "{}").get("cluster", {})
            tasks = len(cluster.get(JOB, ()))
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"TF_CONFIG is not the JSON of a cluster: {error}. Received: {text!r}.") from error
        if not tasks:
            raise ValueError(
                f"No parameter server is known: TF_CONFIG has no tasks of the job '{JOB}'. Set it, as "
                'tf.distribute does: {"cluster": {"chief": [...], "worker": [...], "ps": ["host:port", ...]}, "task": '
                "{...}}, or say how many there are: sok.enable_distributed_strategy('parameter_server', servers=2)."
            )
        return cls(tasks)


class ShardTransport(LocalTransport):
    """Of one server's shard, to what asks a table for its rank: no server takes part in collectives."""

    name = "server"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
