"""What a rank does that cannot go on while its peers may be in collectives that it does not know."""

from __future__ import annotations

import sys
import threading

import tensorflow as tf

from sok.transport.base import Transport

# How long a rank waits for its peers to refuse what it has refused.
_SECONDS = 30.0


def all_refuse(transport: Transport, name: str, text: str) -> None:
    """Returns if all ranks call this. If one of them does not in time, ends the job, and says why.

    Args:
        transport: to the other ranks.
        name: of the collective by which they find one another.
        text: what this rank has refused, for people.

    Works while a function is traced.
    """

    def ask() -> None:
        with tf.init_scope():
            transport.barrier(name)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SECONDS)
    if asking.is_alive():
        sys.stderr.write(
            f"sok: rank {transport.rank} could not trace a function: {text}\n"
            f"sok: rank {transport.rank}: its peers could, and would wait in it for this worker. The job ends here.\n"
        )
        sys.stderr.flush()
        transport.abort()
