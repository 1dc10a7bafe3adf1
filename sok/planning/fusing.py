"""Tables of one width on one rank become one table, and what is theirs stays theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from sok.base.types import DTypeLike

# Two tables are one only if they agree on these: the table made of them has one of each.
_SHARED = ("trainable", "dtype", "embeddings_regularizer", "activity_regularizer", "embeddings_constraint")


class ConcatInitializer:
    """Fills a table made of several, each part by its own initializer in its own shape.

    Args:
        initializers: of each member, as its layer has it or as its configuration says it.
        sizes: rows of each member.
    """

    def __init__(self, initializers: Sequence[Any], sizes: Sequence[int]) -> None:
        self.initializers, self.sizes = list(initializers), list(sizes)

    def __repr__(self) -> str:
        return f"ConcatInitializer({self.initializers}, {self.sizes})"

    def __call__(self, shape: Sequence[int], dtype: DTypeLike | None = None, **arguments: Any) -> Any:
        import tensorflow as tf

        makers = [one if callable(one) else tf.keras.initializers.get(one) for one in self.initializers]
        parts = [
            make([rows, *shape[1:]], dtype=dtype, **arguments) for make, rows in zip(makers, self.sizes, strict=True)
        ]
        return tf.concat(parts, axis=0)

    def get_config(self) -> dict[str, Any]:
        """What Keras writes into configurations."""
        return {"initializers": self.initializers, "sizes": self.sizes}


@dataclasses.dataclass
class Fused:
    """The tables of one rank after fusing: of each new table its configuration, its members, and where they begin."""

    configs: list[dict[str, Any]]
    members: list[list[int]]
    starts: list[list[int]]
    """Of each new table the first row of each member, and the number of rows."""

    def place_of(self, table: int) -> tuple[int, int]:
        """Which new table a table is in, and from which row."""
        for place, (members, starts) in enumerate(zip(self.members, self.starts, strict=True)):
            if table in members:
                return place, starts[members.index(table)]
        raise KeyError(table)


def fuse(configs: Sequence[dict[str, Any]], is_plain: Callable[[type], bool] = lambda _: False) -> Fused:
    """Stacks tables that agree on everything that one table has one of; tables on the host are left alone.

    Args:
        configs: of a rank's tables, with 'layer_type' and 'cpu_offload'.
        is_plain: whether layers of a class are the same as all others of which it says so.
    """
    found = Fused([], [], [])
    traits: list[Any] = []
    for table, config in enumerate(configs):
        layer = "plain" if is_plain(config["layer_type"]) else config["layer_type"]
        trait = [config["output_dim"], config.get("combiner"), layer, *(config.get(name) for name in _SHARED)]
        fits = [not config["cpu_offload"] and other == trait for other in traits]
        if True in fits:
            place = fits.index(True)
            found.members[place].append(table)
            found.starts[place].append(found.starts[place][-1] + config["input_dim"])
        else:
            traits.append(None if config["cpu_offload"] else trait)
            found.members.append([table])
            found.starts.append([0, config["input_dim"]])
    for members, starts in zip(found.members, found.starts, strict=True):
        config = configs[members[0]] | {"input_dim": starts[-1]}
        if len(members) > 1 and "embeddings_initializer" in config:
            own = [configs[table].get("embeddings_initializer") for table in members]
            config["embeddings_initializer"] = ConcatInitializer(own, [configs[t]["input_dim"] for t in members])
        found.configs.append(config)
    return found
