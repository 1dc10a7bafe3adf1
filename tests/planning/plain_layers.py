"""Layers as plans see them, without Keras, and what a plan computes, in NumPy."""

from typing import Any

import numpy as np


class Embedding:
    """What a strategy asks of a layer: its configuration."""

    def __init__(self, rows: int, width: int, **others: Any) -> None:
        self.config = {"name": "table", "input_dim": rows, "output_dim": width, "combiner": "sum", **others}

    def get_config(self) -> dict[str, Any]:
        return dict(self.config)


def layers(*sizes: tuple[int, int]) -> list[Embedding]:
    return [Embedding(rows, width, name=f"table_{i}") for i, (rows, width) in enumerate(sizes)]


def looked_up(plan, tables: list[np.ndarray], ids: list[np.ndarray]) -> list[np.ndarray]:
    """What the plan's attributes, read as Merlin's wrapper reads them, make of ids [batch] of each input."""
    copied, columns, rows = plan.table_groups
    found = [tables[copied[t]][ids[i]] for t, i in zip(plan.map_groups[0], plan.input_groups[0], strict=True)]
    if columns:
        found += _of_columns(plan, [tables[t] for t in columns], [ids[i] for i in plan.input_groups[1]])
    if rows:
        found += _of_rows(plan, [tables[t] for t in rows], [ids[i] for i in plan.input_groups[2]])
    return [found[place] for place in plan.rev_group_ids]


def _of_columns(plan, tables, ids):
    answers = []
    for rank, held in enumerate(plan.table_ids):
        own = []
        for local, table in enumerate(held):
            (start, stop) = next((a, b) for r, a, b in plan.columns_of(plan.table_groups[1][table]) if r == rank)
            own.append(tables[table][:, start:stop])
            assert own[local].shape[0] == tables[table].shape[0]
        fused = [np.concatenate([own[t] for t in members]) for members in plan.local_group_list[rank]]
        for table, config in zip(fused, plan.local_configs[rank], strict=True):
            assert table.shape == (config["input_dim"], config["output_dim"])
        answers += [
            fused[place][ids[i] + offset]
            for i, place, offset in zip(
                plan.input_ids_list[rank], plan.local_maps[rank], plan.local_input_offsets[rank], strict=True
            )
        ]
    assert [answer.shape[1] for answer in answers] == plan.widths_list_flat
    found = [answers[place] for place in plan.rev_tp_ids]
    for start, stop in plan.sliced_out_ranges:
        found[start:stop] = [np.concatenate(found[start:stop], axis=1)]
    return found


def _of_rows(plan, tables, ids):
    found = [np.zeros((len(i), tables[t].shape[1])) for t, i in zip(plan.map_groups[2], ids, strict=True)]
    for configs, offsets in zip(plan.row_sliced_configs, plan.row_inputs_offsets, strict=True):
        for answer, table, i in zip(found, plan.map_groups[2], ids, strict=True):
            local, rows = i + offsets[table], configs[table]["input_dim"]
            inside = (local >= 0) & (local < rows)
            answer[inside] += tables[table][i[inside]]
    return found
