"""How workers talk to each other: `base` is the interface, `local` one process, `horovod` many."""

from sok.job.transport.base import Transport

__all__ = ["Transport"]
