"""`DistEmbeddingStrategy`: plans worked out by hand, what every plan keeps, and defects that it must not have."""

import importlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from sok.planning.fusing import ConcatInitializer
from sok.planning.merlin import STRATEGIES, DistEmbeddingStrategy
from sok.planning.slicing import column_widths, even_parts, threshold_for_all_ranks
from tests.planning.plain_layers import layers, looked_up


@pytest.mark.parametrize(
    ("strategy", "held"),
    [
        # Sizes 80, 60, 50, 30, 20 of tables 0 to 4 on two ranks.
        ("basic", [[0, 2, 4], [1, 3]]),
        # To and fro: 80 | 60 50 | 30 20: each rank first takes what comes in its own direction.
        ("memory_balanced", [[0, 4, 3], [1, 2]]),
        # 80 to a; 60, 50 to b; 30 to a (80 < 110); 20 to whichever has less: both have 110, [0, 3] is before [1, 2].
        ("memory_optimized", [[1, 2], [0, 3, 4]]),
    ],
)
def test_whole_tables_go_where_the_strategy_says(strategy, held):
    plan = DistEmbeddingStrategy(layers((10, 8), (6, 10), (10, 5), (3, 10), (2, 10)), 2, strategy)
    assert plan.table_ids == held
    assert plan.input_ids_list == held
    assert plan.sliced_out_ranges == []


def test_one_table_on_four_ranks_is_cut_until_all_have_a_part():
    # 40 > 3 ranks: 20, 20; then 10, 10 and so on: at threshold 19 two halvings bring 40 below it.
    assert threshold_for_all_ranks([40], 4) == 19
    plan = DistEmbeddingStrategy(layers((4, 10)), 4)
    assert [config["output_dim"] for (config,) in plan.local_configs] == [3, 3, 2, 2]
    assert plan.columns_of(0) == [(0, 0, 3), (1, 3, 6), (2, 6, 8), (3, 8, 10)]
    assert plan.input_ids_list == [[0], [0], [0], [0]]
    assert plan.rev_tp_ids == [0, 1, 2, 3]
    assert plan.sliced_out_ranges == [[0, 4]]
    assert plan.widths_list_flat == [3, 3, 2, 2]


def test_tables_of_equal_width_become_one_and_inputs_know_where_it_begins():
    plan = DistEmbeddingStrategy(layers((5, 4), (7, 2), (9, 4)), 1, "memory_balanced", input_table_map=[2, 0, 1, 2])
    assert plan.strategy == "basic"
    assert plan.local_group_list == [[[0, 2], [1]]]
    assert plan.local_weight_offsets == [[[0, 5, 14], [0, 7]]]
    # Inputs table after table: 1 of table 0, 2 of table 1, 0 and 3 of table 2.
    assert plan.input_ids_list == [[1, 2, 0, 3]]
    assert plan.local_maps == [[0, 1, 0, 0]]
    assert plan.local_input_offsets == [[0, 0, 5, 5]]
    assert plan.rev_tp_ids == [2, 0, 1, 3]
    assert [(c["input_dim"], c["output_dim"]) for c in plan.local_configs[0]] == [(14, 4), (7, 2)]


def test_each_size_of_table_goes_its_way():
    tables = layers((2, 2), (10, 4), (50, 4), (3, 2))
    plan = DistEmbeddingStrategy(tables, 3, row_slice_threshold=200, data_parallel_threshold=6)
    assert plan.table_groups == [[0, 3], [1], [2]]
    assert plan.input_groups == [[0, 3], [1], [2]]
    assert plan.map_groups == [[0, 1], [0], [0]]
    assert plan.rev_group_ids == [0, 2, 3, 1]
    assert [config["name"] for config in plan.dp_configs] == ["table_0", "table_3"]
    assert [config["input_dim"] for (config,) in plan.row_sliced_configs] == [17, 17, 16]
    assert plan.row_inputs_offsets == [[0], [-17], [-34]]
    # The one table left on three ranks: 40, then 20 and 20, then 20, 10 and 10; so cut at 19, into four, at most three.
    assert plan.columns_of(1) == [(0, 0, 2), (1, 2, 3), (2, 3, 4)]


@pytest.mark.parametrize(
    ("limit", "on_host"),
    [
        # Sizes 40, 10, 20 in order; ascending 10, 20, 40, their sums 10, 30, 70.
        (None, [False, False, False]),
        (70, [False, False, False]),
        (69, [True, False, False]),
        (30, [True, False, False]),
        (29, [True, False, True]),
        (0, [True, True, True]),
    ],
)
def test_the_largest_tables_leave_the_gpu_and_are_never_fused(limit, on_host):
    plan = DistEmbeddingStrategy(layers((10, 4), (5, 2), (10, 2)), 1, gpu_embedding_size=limit)
    offloaded = {
        member: config["cpu_offload"]
        for config, members in zip(plan.local_configs[0], plan.local_group_list[0], strict=True)
        for member in members
    }
    assert [offloaded[i] for i in range(3)] == on_host == [plan.is_offloaded(i) for i in range(3)]
    for config, members in zip(plan.local_configs[0], plan.local_group_list[0], strict=True):
        assert len(members) == 1 or not config["cpu_offload"]


def test_the_running_sum_counts_tables_that_left():
    # 10 stays; 20 makes 30 > 25 and leaves; 21 makes 51 and leaves, though 10 + ... of those that stay would be less.
    plan = DistEmbeddingStrategy(layers((10, 1), (10, 2), (7, 3)), 1, gpu_embedding_size=25)
    assert [config["cpu_offload"] for config in plan.local_configs[0]] == [False, True, True]


def test_a_table_is_offloaded_if_one_of_its_ranks_has_no_room():
    """Tables 1 and 2 are halves on both ranks; rank 0 has table 0, too, which is copied nowhere."""
    plan = DistEmbeddingStrategy(
        layers((10, 4), (20, 4), (30, 4), (2, 4)),
        2,
        column_slice_threshold=60,
        data_parallel_threshold=8,
        gpu_embedding_size=100,
    )
    offloaded = [
        {plan.table_ids[rank][member] for member in members}
        for rank in range(2)
        for config, members in zip(plan.local_configs[rank], plan.local_group_list[rank], strict=True)
        if config["cpu_offload"]
    ]
    assert plan.table_groups[0] == [3] and not plan.is_offloaded(3)
    assert [plan.is_offloaded(t) for t in range(3)] == [any(t in of for of in offloaded) for t in range(3)]
    assert any(map(plan.is_offloaded, range(3))) and not all(map(plan.is_offloaded, range(3)))


def test_slices_that_meet_are_one_table_of_their_widths():
    # The second defect of Merlin: table 2 of 32 columns in slices of 8, two of which meet on a rank.
    sizes = [(10, 16), (500, 32), (100, 32), (100, 8), (50, 16), (50, 4), (100, 8), (100, 4)]
    plan = DistEmbeddingStrategy(layers(*sizes), 4, "memory_balanced", column_slice_threshold=800)
    assert sorted(stop - start for _, start, stop in plan.columns_of(2)) == [8, 8, 16]


def test_shared_tables_whose_slices_meet_give_their_outputs():
    # The third: an input that is not the first of its table, and a table whose slices are on one rank.
    plan = DistEmbeddingStrategy(
        layers((100, 4), (50, 4)), 2, "memory_balanced", input_table_map=[1, 0, 0], column_slice_threshold=200
    )
    tables = [np.random.default_rng(0).normal(size=size) for size in [(100, 4), (50, 4)]]
    ids = [np.array([3, 4]), np.array([5, 99]), np.array([0, 1])]
    for answer, table, i in zip(looked_up(plan, tables, ids), [1, 0, 0], ids, strict=True):
        np.testing.assert_array_equal(answer, tables[table][i])


def test_fused_tables_keep_their_initial_values():
    # The fourth: later members had the initializer of the first.
    tables = [tf.keras.layers.Embedding(3, 2, name=n, embeddings_initializer=n) for n in ("zeros", "ones")]
    (config,) = DistEmbeddingStrategy(tables, 1).local_configs[0]
    initializer = config["embeddings_initializer"]
    assert isinstance(initializer, ConcatInitializer) and initializer.sizes == [3, 3]
    np.testing.assert_array_equal(initializer([6, 2], dtype="float32"), [[0, 0]] * 3 + [[1, 1]] * 3)
    assert initializer.get_config()["sizes"] == [3, 3]
    assert repr(initializer).startswith("ConcatInitializer([")


class Doubled(tf.keras.layers.Embedding):
    """A layer that looks up otherwise."""


@pytest.mark.parametrize(
    "other",
    [
        tf.keras.layers.Embedding(3, 2, trainable=False),
        tf.keras.layers.Embedding(3, 2, dtype="float16"),
        tf.keras.layers.Embedding(3, 2, embeddings_regularizer="l2"),
        tf.keras.layers.Embedding(3, 2, embeddings_constraint="non_neg"),
        Doubled(3, 2),
    ],
    ids=["trainable", "dtype", "regularizer", "constraint", "class"],
)
def test_tables_that_differ_in_more_than_rows_are_not_fused(other):
    plain = tf.keras.layers.Embedding(3, 2)
    assert DistEmbeddingStrategy([plain, other, plain], 1).local_group_list == [[[0, 2], [1]]]


def test_tables_of_few_elements_end_the_halving():
    # Merlin's own halving does not end here: the threshold becomes -1.
    plan = DistEmbeddingStrategy(layers((1, 2)), 8)
    assert plan.columns_of(0) == [(0, 0, 1), (1, 1, 2)]
    assert plan.table_ids[2:] == [[]] * 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "`world_size` must be at least 1. Received: 0"),
        ({"world_size": 2, "strategy": "best"}, "Unsupported shard strategy best"),
        ({"world_size": 1, "strategy": "best"}, "Unsupported shard strategy best"),
        ({"world_size": 2, "input_table_map": [0, 2]}, r"`input_table_map\[1\]` must be one of the 2 tables"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DistEmbeddingStrategy(layers((4, 2), (4, 2)), **arguments)


def test_attributes_of_a_group_without_tables_are_not_there():
    plan = DistEmbeddingStrategy(layers((4, 2)), 2, data_parallel_threshold=8)
    with pytest.raises(AttributeError, match="has no attribute 'table_ids': no table is table parallel"):
        _ = plan.table_ids
    with pytest.raises(AttributeError, match="'row_inputs_offsets': no table is cut into rows"):
        _ = plan.row_inputs_offsets
    with pytest.raises(ValueError, match=r"one of the table-parallel tables \[\]: 0"):
        plan.columns_of(0)
    assert plan.row_sliced_configs == [[], []]


def test_programs_for_merlin_find_it_where_it_was():
    for module in ("distributed_embeddings", "distributed_embeddings.python.layers.dist_model_parallel"):
        assert importlib.import_module(module).DistEmbeddingStrategy is DistEmbeddingStrategy
    package = importlib.import_module("distributed_embeddings")
    assert package.dist_model_parallel.DistEmbeddingStrategy is DistEmbeddingStrategy
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


sizes = st.tuples(st.integers(1, 60), st.integers(1, 12))


@st.composite
def plans(draw):
    tables = draw(st.lists(sizes, min_size=1, max_size=7))
    inputs = draw(st.none() | st.lists(st.integers(0, len(tables) - 1), min_size=1, max_size=9))
    threshold = st.none() | st.integers(1, 400)
    return tables, DistEmbeddingStrategy(
        layers(*tables),
        draw(st.integers(1, 9)),
        draw(st.sampled_from(STRATEGIES)),
        inputs,
        *(draw(threshold) for _ in range(3)),
        gpu_embedding_size=draw(st.none() | st.integers(0, 400)),
    )


@settings(max_examples=150, deadline=None)
@given(plans())
def test_every_plan_computes_what_its_tables_say(drawn):
    of_tables, plan = drawn
    tables = [np.random.default_rng(0).normal(size=size) for size in of_tables]
    inputs = sorted(
        (i, group[m])
        for ids, maps, group in zip(plan.input_groups, plan.map_groups, plan.table_groups, strict=True)
        for i, m in zip(ids, maps, strict=True)
    )
    ids = [np.array([0, of_tables[t][0] // 2, of_tables[t][0] - 1]) for _, t in inputs]
    for answer, (_, table), i in zip(looked_up(plan, tables, ids), inputs, ids, strict=True):
        np.testing.assert_array_equal(answer, tables[table][i])


@settings(max_examples=150, deadline=None)
@given(plans())
def test_every_plan_holds_each_row_and_column_once(drawn):
    of_tables, plan = drawn
    assert sorted(t for group in plan.table_groups for t in group) == list(range(len(of_tables)))
    for table in plan.table_groups[1]:
        pieces = plan.columns_of(table)
        assert [start for _, start, _ in pieces] == [0, *(stop for _, _, stop in pieces)][:-1]
        assert pieces[-1][2] == of_tables[table][1]
        assert len({rank for rank, _, _ in pieces}) == len(pieces)
    for within, table in enumerate(plan.table_groups[2]):
        assert sum(configs[within]["input_dim"] for configs in plan.row_sliced_configs) == of_tables[table][0]


@given(st.integers(0, 1000), st.integers(1, 40))
def test_parts_add_up_and_are_even(total, parts):
    found = even_parts(total, parts)
    assert sum(found) == total and len(found) == parts
    assert max(found) - min(found) <= 1 and found == sorted(found, reverse=True)


@given(sizes, st.none() | st.integers(0, 500), st.integers(1, 20))
def test_slices_are_below_the_threshold_or_as_many_as_there_may_be(size, threshold, world_size):
    widths = column_widths(*size, threshold, world_size)
    assert sum(widths) == size[1] and min(widths) >= 1 and len(widths) <= max(1, min(world_size, size[1]))
    if threshold is not None and len(widths) < min(world_size, size[1]):
        assert size[0] * size[1] / len(widths) <= threshold
