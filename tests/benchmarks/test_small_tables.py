"""That benchmarks/small_tables.py measures what it says."""

import numpy as np

import sok
from benchmarks import small_tables


def test_the_two_ways_are_a_table_and_a_variable_that_train_alike():
    sok.Init(seed=1)
    rng = np.random.default_rng(0)
    sizes, start = [12, 20], rng.normal(size=[2 * 4, 1]).astype("float32")
    losses = {}
    for way, dense_size in ("tables", 0), ("variables", 12):
        model = small_tables.model_of(sizes, 4, dense_size, "Adagrad")
        small, large = (layer for layer in model.layers if hasattr(layer, "input_dim"))
        assert isinstance(small, sok.Embedding) == (way == "tables") and isinstance(large, sok.Embedding)
        for layer, n in (small, 12), (large, 20):
            layer.set_weights([np.arange(4 * n, dtype="float32").reshape(n, 4) / 100])
        model.layers[-1].set_weights([start, np.zeros(1, "float32")])
        step = small_tables.stepper(model)
        batches = small_tables.batches_of(sizes, 1) + small_tables.batches_of(sizes, 2)[:1]  # any size
        losses[way] = [float(step(*batch)["loss"]) for batch in batches]
        assert step.experimental_get_tracing_count() <= 2  # two where the first makes variables
    np.testing.assert_allclose(losses["tables"], losses["variables"], rtol=1e-4)


def test_ways_take_turns_and_each_is_first_as_often():
    order = []
    steps = {"a": lambda batch: order.append("a"), "b": lambda batch: order.append("b")}
    taken = small_tables.in_turns(steps, [(1,), (2,)], windows=4, length=3)
    assert order == [*"aabb", *"aaabbb", *"bbbaaa", *"aaabbb", *"bbbaaa"]
    assert {way: of.shape for way, of in taken.items()} == {"a": (4,), "b": (4,)} and min(taken["a"]) >= 0


def test_the_break_even_ends_where_variables_take_longer():
    assert small_tables.break_even([16, 64, 256], [0.5, 1.0, 1.1]) == 64
    assert small_tables.break_even([16, 64, 256], [0.5, 1.2, 0.9]) == 16
    assert small_tables.break_even([16, 64, 256], [1.2, 0.8, 0.9]) == 0
    assert small_tables.break_even([16, 64, 256], [0.9, 0.8, 0.7]) == 256


def test_the_command_prints_a_line_for_each_size(capsys):
    options = ["--rows", "8", "--dims", "2", "--batches", "4", "6", "--windows", "2", "--steps", "2"]
    small_tables.main([*options, "--large", "100"])
    said = capsys.readouterr().out
    assert [line[:14] for line in said.splitlines() if line.startswith("| 8")] == ["| 8 | 2 | 4 | ", "| 8 | 2 | 6 | "]
    assert said.count("variables took no longer up to") == 2 and "and one of 100" in said
