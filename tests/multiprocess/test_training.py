"""N ranks train to what one rank trains to on the concatenated batch: losses, dense weights, rows and slots."""

import numpy as np
import pytest

from tests.multiprocess import checks_distributed, checks_fit, checks_lookup, checks_loops, checks_optimizers, training
from tests.multiprocess.worker import checks_of

pytestmark = pytest.mark.multiprocess

# float32 sums in another order differ by 1e-7; twenty steps of Adam, which divides by a root, spread that.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def merged(shards):
    """The shards of all ranks as one: table -> key -> row, slots and stamp."""
    tables = {}
    for shard in shards:
        for name, rows in shard.items():
            assert not rows.keys() & tables.setdefault(name, {}).keys(), "a key has one owner"
            tables[name].update(rows)
    return tables


def assert_same_training(results, expected):
    losses = expected["losses"]
    assert len(losses) in (training.STEPS, training.STEPS // training.STEPS_AT_ONCE)
    assert np.mean(losses[-len(losses) // 4 :]) < np.mean(losses[: len(losses) // 4]), "nothing was learned"
    assert_same_values(results, expected)


def assert_same_values(results, expected):
    for result in results:
        np.testing.assert_allclose(result["losses"], expected["losses"], **TOLERANCE)
        np.testing.assert_allclose(result["dense"], expected["dense"], **TOLERANCE)
        np.testing.assert_array_equal(result["dense"], results[0]["dense"])
    tables = merged(result["tables"] for result in results)
    assert tables.keys() == expected["tables"].keys()
    for name, rows in expected["tables"].items():
        assert tables[name].keys() == rows.keys()
        keys = sorted(rows)
        actual, wanted = (np.stack([table[key] for key in keys]) for table in (tables[name], rows))
        np.testing.assert_allclose(actual, wanted, err_msg=name, **TOLERANCE)


@pytest.mark.parametrize(
    "ranks, check",
    [(ranks, check) for ranks in (2, 3, 4) for check in checks_of(checks_loops)]
    + [(ranks, check) for ranks in (2, 3) for check in checks_of(checks_fit)],
)
def test_n_ranks_train_like_one(job, ranks, check):
    assert_same_training(job(ranks).values(check), job(1).values(check)[0])


@pytest.mark.parametrize(
    "check", [name for name in checks_of(checks_optimizers) if name.startswith("check_optimizers")]
)
def test_two_ranks_train_to_the_rows_of_one_with_every_optimizer(job, check):
    (alone,) = job(1).values(check)
    assert alone
    for found in job(2).values(check):
        assert found.keys() == alone.keys()
        for case, tables in alone.items():
            for actual, expected in zip(found[case], tables, strict=True):
                np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, err_msg=case)


@pytest.mark.parametrize(
    "check",
    ["check_compiled_loop", "check_compiled_loop_with_uneven_batches", "check_v1_session_with_optimizers_of_ours"],
)
def test_all_modes_train_alike(job, check):
    eager, other = (job(1).values(name)[0] for name in ("check_eager_loop", check))
    assert_same_training([other], eager)


def test_the_judge_of_training_sees_differences():
    row = np.ones(3)
    losses = np.linspace(1.0, 0.5, training.STEPS)
    expected = {"losses": losses, "dense": row, "tables": {"t": {1: row, 2: row}}}
    halves = [{**expected, "tables": {"t": {key: row}}} for key in (1, 2)]
    assert_same_training(halves, expected)
    for wrong in (
        [halves[0], {**halves[1], "dense": row + 1e-4}],
        [halves[0], {**halves[1], "losses": losses + 1e-4}],
        [halves[0], {**halves[1], "tables": {"t": {2: row + 1e-4}}}],
        [halves[0], {**halves[1], "tables": {"t": {3: row}}}],
        [halves[0], halves[0]],
    ):
        with pytest.raises(AssertionError):
            assert_same_training(wrong, expected)


@pytest.mark.parametrize("ranks", [2])
def test_n_ranks_fit_dense_models_like_one(job, ranks):
    check = "check_fit_trains_dense_models_as_one_rank_does"
    (expected,) = job(1).values(check)
    assert expected
    for result in job(ranks).values(check):
        for name, values in expected.items():
            for kind in ("weights", "losses"):
                np.testing.assert_allclose(result[name][kind], values[kind], err_msg=f"{name} {kind}", **TOLERANCE)


@pytest.mark.parametrize("ranks", [2])
def test_n_ranks_train_v1_models_like_one(job, ranks):
    check = "check_v1_optimizers_reduce_once_wherever_gradients_come_from"
    (expected,) = job(1).values(check)
    for result in job(ranks).values(check):
        for way, weight in expected.items():
            np.testing.assert_allclose(result[way], weight, err_msg=way, **TOLERANCE)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("check", checks_of(checks_lookup))
def test_n_ranks_look_up_what_one_does(job, ranks, check):
    (expected,) = job(1).values(check)
    for result in job(ranks).values(check):
        if expected is None:
            assert result is None
        else:
            assert set(result) == set(expected)
            np.testing.assert_array_equal(result["rows"], expected["rows"])
            for key, row in expected.get("by_key", {}).items():
                np.testing.assert_array_equal(result["by_key"][key], row)


def test_modules_of_checks_have_checks():
    assert all(checks_of(module) for module in (checks_distributed, checks_fit, checks_lookup, checks_loops))
