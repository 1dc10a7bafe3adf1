"""What a rank does that cannot go on while its peers may be in collectives that it does not know."""

from __future__ import annotations

import contextlib
import os
import threading

from sok.base import log
from sok.base.graph_ops import run_now
from sok.job.transport.base import Transport


def all_refuse(transport: Transport, name: str, text: str) -> None:
    """Returns if all ranks call this. If one of them does not in time, ends the job, and says why.

    Args:
        transport: to the other ranks.
        name: of the collective by which they find one another.
        text: what this rank has refused, for people.

    Works while a function is traced, or a v1 graph built. SOK_REFUSAL_SECONDS in the environment (30 unless it is set)
    says how long a rank waits for its peers to refuse what it has refused.
    """

    def ask() -> None:
        # Whatever it is, the job has ended, before or now. What this rank refuses it raises anyhow.
        with contextlib.suppress(Exception):
            run_now(lambda: transport.barrier(name))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(float(os.environ.get("SOK_REFUSAL_SECONDS", "30")))
    if asking.is_alive():
        log.logger.error(
            "This worker could not build a function or graph: %s\n"
            "Its peers could, and would wait in it for this worker. The job ends here.",
            text,
        )
        transport.abort()
