"""Where Merlin's distributed-embeddings puts tables: its rules, its attributes, without its defects.

Its plans are bit for bit those of `DistEmbeddingStrategy` there, except where a plan of it computes something wrong:
outputs of shared tables whose slices meet on one rank, and what fusing makes of tables that differ in more than width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from sok.planning.fusing import fuse
from sok.planning.slicing import column_widths, even_parts, spread, threshold_for_all_ranks

STRATEGIES = ("basic", "memory_balanced", "memory_optimized")

# What there is only where some table is held table by table, and where some is cut into rows; as in Merlin.
_OF_COLUMNS = (
    *("sliced_out_ranges", "input_ids_list", "local_maps", "local_configs", "local_input_offsets"),
    *("local_weight_offsets", "local_group_list", "table_ids", "widths_list_flat", "rev_tp_ids"),
)
_OF_ROWS = ("row_inputs_offsets",)


class DistEmbeddingStrategy:
    """Decides which rank holds which columns and rows of which table, as Merlin's class of this name does.

    Each table goes one of three ways: a copy on each rank (data parallel), columns on some ranks (table parallel), rows
    on all ranks. Sizes and thresholds are numbers of elements, rows x width. Every rank computes the plan of all ranks.

    Args:
        embeddings: Keras layers, built or not, whose configuration has `input_dim` and `output_dim`.
        world_size: ranks W.
        strategy: 'basic', 'memory_balanced' or 'memory_optimized': which rank gets which slices. One rank: 'basic'.
        input_table_map: the table of each input; None: input i reads table i.
        column_slice_threshold: tables of more elements are cut into columns; None: only if there are fewer tables
            than ranks, so that all have work.
        row_slice_threshold: tables of at least so many elements are cut into rows, for all ranks. None or 0: none are.
        data_parallel_threshold: tables of at most so many elements are copied to each rank. None or 0: none are.
        gpu_embedding_size: elements that a rank holds on its GPU; the smallest tables stay there. None: all; 0: none.

    Attributes:
        table_groups: ids of the tables that are data parallel, table parallel and cut into rows. Ids within a group
            count from 0, in this order; all that follows speaks of these.
        input_groups, map_groups: inputs of each group, and the table within the group that each reads.
        rev_group_ids: brings outputs, group after group, back into the order of inputs.
        dp_configs: configurations of data-parallel tables.
        row_sliced_configs, row_inputs_offsets: of each rank: its part of each table, and what is added to ids there.
        table_ids: of each rank the tables it holds columns of.
        input_ids_list: of each rank the inputs it looks up, in order. What `dp_input=False` expects there.
        local_configs: of each rank its tables after fusing, with `cpu_offload`.
        local_maps, local_input_offsets: of each of its inputs the fused table, and what is added to its ids.
        local_group_list, local_weight_offsets: of each fused table its members, and where their rows begin.
        widths_list_flat: width of each rank's outputs, rank after rank.
        rev_tp_ids: brings these back into the order of inputs; slices of one input follow one another.
        sliced_out_ranges: then joins them, one range after the other.

    The attributes from `table_ids` on exist only where some table is table parallel, and `row_inputs_offsets` only
    where one is cut into rows.

    Raises:
        ValueError: the strategy is not one of these, the map names a table that is not there, or there is no rank.

    Not collective. The same on all ranks.

    Example:
        >>> class Layer:  # or any Keras layer with these
        ...     def __init__(self, rows, width):
        ...         self.config = {"name": "t", "input_dim": rows, "output_dim": width}
        ...     def get_config(self):
        ...         return self.config
        >>> plan = DistEmbeddingStrategy([Layer(100, 8), Layer(50, 8), Layer(10, 8)], 2, "memory_balanced")
        >>> plan.table_ids, plan.input_ids_list, plan.local_maps
        ([[0], [1, 2]], [[0], [1, 2]], [[0], [0, 0]])
    """

    def __init__(
        self,
        embeddings: Sequence[Any],
        world_size: int,
        strategy: str = "basic",
        input_table_map: Sequence[int] | None = None,
        column_slice_threshold: int | None = None,
        row_slice_threshold: int | None = None,
        data_parallel_threshold: int | None = None,
        gpu_embedding_size: int | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"`world_size` must be at least 1. Received: {world_size}.")
        if strategy not in STRATEGIES:
            raise ValueError(
                "`strategy` must be 'basic', 'memory_balanced' or 'memory_optimized'. Unsupported shard strategy "
                f"{strategy}."
            )
        self.strategy = "basic" if world_size == 1 else strategy
        self.column_slice_threshold = column_slice_threshold
        self.row_slice_threshold = row_slice_threshold
        self.gpu_embedding_size = gpu_embedding_size
        self.data_parallel_threshold = data_parallel_threshold
        self.global_configs = [layer.get_config() | {"layer_type": type(layer)} for layer in embeddings]
        table_of_input = list(range(len(self.global_configs)) if input_table_map is None else input_table_map)

        self.table_groups = self._table_groups()
        self.input_groups, self.map_groups, self.rev_group_ids = self._input_groups(table_of_input)
        copied, columns, rows = ([self.global_configs[table] for table in group] for group in self.table_groups)
        self.dp_configs = copied
        self.row_sliced_configs: list[list[Any]] = [[] for _ in range(world_size)]
        self._hosted: set[int] = set()
        if rows:
            self._cut_rows(rows, world_size)
        if columns:
            self._cut_columns(columns, world_size)

    def __getattr__(self, name: str) -> Any:
        words = {**dict.fromkeys(_OF_COLUMNS, "table parallel"), **dict.fromkeys(_OF_ROWS, "cut into rows")}
        because = f": no table is {words[name]}" if name in words else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{because}")

    def _table_groups(self) -> list[list[int]]:
        copied: list[int] = []
        columns: list[int] = []
        rows: list[int] = []
        for table, config in enumerate(self.global_configs):
            elements = _elements(config)
            if self.data_parallel_threshold and elements <= self.data_parallel_threshold:
                copied.append(table)
            elif self.row_slice_threshold and elements >= self.row_slice_threshold:
                rows.append(table)
            else:
                columns.append(table)
        return [copied, columns, rows]

    def _input_groups(self, table_of_input: Sequence[int]) -> tuple[list[list[int]], list[list[int]], list[int]]:
        place = {table: (g, i) for g, group in enumerate(self.table_groups) for i, table in enumerate(group)}
        inputs: list[list[int]] = [[], [], []]
        maps: list[list[int]] = [[], [], []]
        for i, table in enumerate(table_of_input):
            if table not in place:
                raise ValueError(
                    f"`input_table_map[{i}]` must be one of the {len(self.global_configs)} tables. Received: {table}."
                )
            group, within = place[table]
            inputs[group].append(i)
            maps[group].append(within)
        return inputs, maps, _inverse([i for group in inputs for i in group])

    def _cut_rows(self, configs: list[dict[str, Any]], world_size: int) -> None:
        parts = [even_parts(config["input_dim"], world_size) for config in configs]
        starts = [[0, *itertools.accumulate(part)] for part in parts]
        self.row_sliced_configs = [
            [config | {"input_dim": part[rank]} for config, part in zip(configs, parts, strict=True)]
            for rank in range(world_size)
        ]
        self.row_inputs_offsets = [[-start[rank] for start in starts] for rank in range(world_size)]

    def _cut_columns(self, configs: list[dict[str, Any]], world_size: int) -> None:
        threshold: float | None = self.column_slice_threshold
        if threshold is None:
            threshold = threshold_for_all_ranks([_elements(config) for config in configs], world_size)
        widths = [column_widths(c["input_dim"], c["output_dim"], threshold, world_size) for c in configs]
        slices = [(table, width) for table, of_table in enumerate(widths) for width in of_table]
        sizes = [configs[table]["input_dim"] * width for table, width in slices]
        held = spread(sizes, [table for table, _ in slices], self.strategy, world_size)

        table_of_input = self.map_groups[1]
        inputs_of: list[list[int]] = [[] for _ in configs]
        for i, table in enumerate(table_of_input):
            inputs_of[table].append(i)
        # Ranks take slices of a table from the left, whichever were meant for them by size.
        left = [list(of_table) for of_table in widths]
        self.table_ids: list[list[int]] = []
        self.input_ids_list: list[list[int]] = []
        self.local_maps: list[list[int]] = []
        self.local_configs: list[list[dict[str, Any]]] = []
        self.local_input_offsets: list[list[int]] = []
        self.local_weight_offsets: list[list[list[int]]] = []
        self.local_group_list: list[list[list[int]]] = []
        for tables in held:
            merged: dict[int, int] = {}
            for table in tables:
                merged[table] = merged.get(table, 0) + left[table].pop(0)
            own = [configs[table] | {"output_dim": width} for table, width in merged.items()]
            marked = self._offloaded(own)
            self._hosted |= {
                self.table_groups[1][table]
                for table, config in zip(merged, marked, strict=True)
                if config["cpu_offload"]
            }
            fused = fuse(marked, _is_plain)
            inputs = [(i, local) for local, table in enumerate(merged) for i in inputs_of[table]]
            places = [fused.place_of(local) for _, local in inputs]
            self.table_ids.append(list(merged))
            self.input_ids_list.append([i for i, _ in inputs])
            self.local_maps.append([place for place, _ in places])
            self.local_input_offsets.append([start for _, start in places])
            self.local_configs.append(fused.configs)
            self.local_group_list.append(fused.members)
            self.local_weight_offsets.append(fused.starts)

        self.widths_list_flat = [
            own[place]["output_dim"]
            for own, places in zip(self.local_configs, self.local_maps, strict=True)
            for place in places
        ]
        self.rev_tp_ids = _inverse([i for inputs in self.input_ids_list for i in inputs])
        holders = [sum(table in tables for tables in self.table_ids) for table in range(len(configs))]
        self.sliced_out_ranges = [
            [i, i + holders[table]] for i, table in enumerate(table_of_input) if len(widths[table]) > 1
        ]

    def _offloaded(self, configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same with `cpu_offload`: the smallest first, all from the first on whose sum is over the limit."""
        total, marked = 0, list(configs)
        for i in sorted(range(len(configs)), key=lambda i: _elements(configs[i])):
            total += _elements(configs[i])
            limit = self.gpu_embedding_size
            marked[i] = configs[i] | {"cpu_offload": limit is not None and total > limit}
        return marked

    def is_offloaded(self, table: int) -> bool:
        """Whether some rank that has columns of a table leaves them to its host.

        Args:
            table: its id among all tables.
        """
        return table in self._hosted

    def columns_of(self, table: int) -> list[tuple[int, int, int]]:
        """Who holds which columns of a table-parallel table: (rank, first column, after the last), from the left.

        Args:
            table: its id among all tables.

        Raises:
            ValueError: the table is not table parallel.
        """
        if table not in self.table_groups[1]:
            raise ValueError(f"`table` must be one of the table-parallel tables {self.table_groups[1]}: {table}.")
        within, start, found = self.table_groups[1].index(table), 0, []
        for rank, tables in enumerate(self.table_ids):
            if within in tables:
                local = tables.index(within)
                places = [i for i, members in enumerate(self.local_group_list[rank]) if local in members]
                width = self.local_configs[rank][places[0]]["output_dim"]
                found.append((rank, start, start + width))
                start += width
        return found


def _elements(config: dict[str, Any]) -> int:
    return config["input_dim"] * config["output_dim"]


def _inverse(order: Sequence[int]) -> list[int]:
    """Positions sorted by what stands there; of equals the first comes first."""
    return sorted(range(len(order)), key=lambda position: order[position])


def _is_plain(layer_type: type) -> bool:
    """Whether layers of the class look rows up as Keras' `Embedding` does, so that one may stand for another."""
    room = layer_type.__module__.partition(".")[0]
    return layer_type.__name__ == "Embedding" and room in ("keras", "tf_keras", "sok")
