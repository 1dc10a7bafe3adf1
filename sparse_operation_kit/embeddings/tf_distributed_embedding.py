"""`TFDistributedEmbedding`, where SOK 1.1 has it: so that scripts which only import it run."""

from __future__ import annotations

from typing import Any


class TFDistributedEmbedding:
    """Not offered: SOK's layer for comparisons keeps the whole table on each replica of a `tf.distribute` strategy."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "TFDistributedEmbedding works under tf.distribute strategies, which sok does not. Use "
            "sok.All2AllDenseEmbedding or sok.DistributedEmbedding under Horovod."
        )
