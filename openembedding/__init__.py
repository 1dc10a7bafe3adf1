"""`sok` under the names that scripts for 4paradigm's OpenEmbedding import: `import openembedding.tensorflow as embed`.

The workers hold the rows, or servers do, where `flags` name a master. The package of OpenEmbedding itself has this name
too: an environment holds one of them. docs/migrating.md says what differs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

from openembedding.servers import Master, Server

__all__ = ["Flags", "Master", "Server", "flags"]


@dataclasses.dataclass
class Flags:
    """What OpenEmbedding reads when its context begins. `sok.Init` needs none of it.

    `master_endpoint` is where servers tell of themselves; `wait_num_servers` how many to wait for (-1: one, if there is
    a master). Without both the workers hold the rows.
    """

    config: str = ""
    master_endpoint: str = ""
    bind_ip: str = ""
    num_workers: int = 1
    wait_num_servers: int = -1

    @property
    def name_servers(self) -> bool:
        """Whether servers apart from the worker are to hold the tables."""
        return bool(self.master_endpoint) or self.wait_num_servers >= 0


flags = Flags()


def refused(name: str, instead: str) -> Any:
    """What stands for a name of OpenEmbedding that is not there: a call of it says what to do instead."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not there: {instead}")

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__doc__ = f"Refused: {instead}"
    return refuse
