"""`sok` under the names that scripts for 4paradigm's OpenEmbedding import: `import openembedding.tensorflow as embed`.

The workers hold the rows: there are no servers to start. The package of OpenEmbedding itself has this name too: an
environment holds one of them. docs/migrating.md says what differs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

__all__ = ["Flags", "Master", "Server", "flags"]


@dataclasses.dataclass
class Flags:
    """What OpenEmbedding reads when its context begins. Taken; `sok.Init` needs none of it."""

    config: str = ""
    master_endpoint: str = ""
    bind_ip: str = ""
    num_workers: int = 1
    wait_num_servers: int = -1

    def check(self) -> None:
        """`NotImplementedError` if servers apart from the workers are asked for."""
        if self.master_endpoint or self.wait_num_servers >= 0:
            raise NotImplementedError(
                "openembedding.flags ask for servers apart from the workers (master_endpoint="
                f"{self.master_endpoint!r}, wait_num_servers={self.wait_num_servers}). Here the workers hold the rows: "
                "leave both as they are, and start the program with horovodrun -np N."
            )


flags = Flags()


def refused(name: str, instead: str) -> Any:
    """What stands for a name of OpenEmbedding that is not there: a call of it says what to do instead."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not there: {instead}")

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__doc__ = f"Refused: {instead}"
    return refuse


_NO_SERVERS = (
    "the workers hold the rows, and the program needs no servers. Leave it out, and start the program with horovodrun "
    "-np N."
)
Master, Server = refused("openembedding.Master", _NO_SERVERS), refused("openembedding.Server", _NO_SERVERS)
