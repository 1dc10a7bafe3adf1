"""The device's table against its NumPy statement: what a table promises, in the emulator and on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.messages import saying
from tests.reference import optimizers
from tests.reference.initial_values import EXACT, TOLERANCE, Initializer
from tests.reference.keys import KEY_DTYPES
from tests.reference.table import Table as Judge

ADAM = [0.01, 0.9, 0.999, 1e-7]
HYPER = {"sgd": [0.1], "adagrad": [0.1, 0.1, 1e-7], "lazy_adam": ADAM, "adam": ADAM}


class Pair:
    """A table and its judge."""

    def __init__(
        self, cuda: Any, *, dim: int = 4, capacity: int = 1000, init: Initializer | None = None, **options: Any
    ):
        import sok.cuda

        init = init or Initializer()
        self.cuda, self.dim = cuda, dim
        hashed, world_size, rank = (options.get(k, d) for k, d in (("hashed", True), ("world_size", 1), ("rank", 0)))
        self.expected = Judge(dim, capacity, init, 11, hashed, world_size, rank)
        bank = init.bank if init.kind == "bank" else None
        self.table = sok.cuda.Table(
            "item", dim=dim, capacity=capacity, initializer=init.kind, a=init.a, b=init.b, seed=11, bank=bank, **options
        )

    def lookup(self, keys: Any, insert: bool) -> tuple[np.ndarray, np.ndarray]:
        found = self.table.lookup(self.cuda.put(keys), insert=insert)
        return self.cuda.get(found.rows), self.cuda.get(found.row_ids)

    def check_lookup(self, keys: Any, insert: bool, tolerance: float = 0.0) -> np.ndarray:
        rows, row_ids = self.lookup(keys, insert)
        np.testing.assert_allclose(rows, self.expected.lookup(keys, insert), rtol=0, atol=tolerance)
        return row_ids

    def contents(self) -> dict[int, np.ndarray]:
        keys, rows, _ = self.table.export()
        return dict(zip(self.cuda.get(keys).view(np.int64).tolist(), self.cuda.get(rows), strict=True))

    def check_contents(self) -> None:
        found = self.contents()
        assert list(found) == list(self.expected.rows), "keys in the order of rows, which is that of appearance"
        for key, row in self.expected.rows.items():
            np.testing.assert_array_equal(found[key], row)
        assert self.table.size() == len(self.expected.rows)


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", ["constant", "uniform", "normal", "truncated_normal", "bank"])
@pytest.mark.parametrize("dim", [1, 3, 4, 67])
def test_lookups_give_the_rows_of_the_statement(cuda, kind, dim, rng):
    bank = rng.standard_normal((5, dim), np.float32) if kind == "bank" else np.zeros((0, 0), np.float32)
    pair = Pair(cuda, dim=dim, init=Initializer(kind, -0.3, 0.4, bank))
    tolerance = 0.0 if kind in EXACT else TOLERANCE
    for keys in ([], [5], [5, 6, 5, -1, 2**63 - 1, -(2**63), 0], rng.integers(0, 50, 33)):
        keys = np.array(keys, np.int64)
        pair.check_lookup(keys, insert=False, tolerance=tolerance)
        pair.check_lookup(keys, insert=True, tolerance=tolerance)


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_keys_of_every_dtype_are_themselves(cuda, dtype):
    limits = np.iinfo(dtype)
    keys = np.array([0, limits.min, limits.max, 1, limits.max - 1], dtype)
    pair = Pair(cuda, unsigned=np.dtype(dtype).kind == "u")
    assert pair.check_lookup(keys, insert=True).tolist() == ([0, 1, 2, 3, 4] if limits.min < 0 else [0, 0, 1, 2, 3])
    found, _, _ = pair.table.export()
    words = keys.astype(np.int64 if limits.min < 0 else np.uint64).view(np.uint64)
    assert pair.cuda.get(found).tolist() == list(dict.fromkeys(words.tolist()))


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 2000])
def test_row_ids_count_first_appearances(cuda, n, rng):
    pair = Pair(cuda, dim=2, capacity=5000)
    keys = rng.integers(-(2**63), 2**63 - 1, n // 2 + 1)[rng.integers(0, n // 2 + 1, n)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys.tolist()))}
    assert pair.cuda.get(pair.table.find(pair.cuda.put(keys))).tolist() == [-1] * n
    assert pair.cuda.get(pair.table.find_or_insert(pair.cuda.put(keys))).tolist() == [numbers[k] for k in keys.tolist()]
    assert pair.cuda.get(pair.table.find(pair.cuda.put(keys))).tolist() == [numbers[k] for k in keys.tolist()]


@pytest.mark.sanitize
def test_one_key_of_many_threads_has_one_row(cuda):
    pair = Pair(cuda)
    assert set(pair.check_lookup(np.full(4000, -7), insert=True).tolist()) == {0}
    pair.check_contents()


def _dense_step(rule: str, step: int, weights: np.ndarray, slots: list[np.ndarray], grads: np.ndarray) -> np.ndarray:
    """One step of the rule on all rows; slots are replaced in place."""
    hyper = HYPER[rule]
    if rule == "sgd":
        return optimizers.sgd(weights, grads, *hyper)
    if rule == "adagrad":
        weights, slots[0] = optimizers.adagrad(weights, slots[0], grads, hyper[0], hyper[2])
    elif rule == "lazy_adam":
        touched = grads.any(axis=1)
        weights, slots[0], slots[1] = optimizers.lazy_adam(weights, *slots, grads, touched, *hyper, step)
    else:
        weights, slots[0], slots[1] = optimizers.adam(weights, *slots, grads, *hyper, step)
    return weights


@pytest.mark.sanitize
@pytest.mark.parametrize("rule", HYPER)
@pytest.mark.parametrize("hashed", [True, False])
def test_updates_are_those_of_the_rule(cuda, rule, hashed, rng):
    pair, universe = Pair(cuda, dim=5, hashed=hashed), np.arange(40) * 7
    weights = pair.expected.lookup(universe, insert=True).astype(np.float64)
    pair.check_lookup(universe, insert=True)
    slots = [np.full_like(weights, 0.1 if rule == "adagrad" else 0.0) for _ in range(2)]
    for step in (1, 2, 3, 4):
        places = rng.permutation(40)[:23]
        found, row_ids = pair.lookup(universe[places], insert=True)
        np.testing.assert_allclose(found, weights[places], rtol=1e-5, atol=1e-5)
        grads = np.zeros_like(weights)
        grads[places] = rng.standard_normal((23, 5), np.float32)
        given = pair.cuda.put(grads[places].astype(np.float32))
        pair.table.apply(rule, HYPER[rule], pair.cuda.put(row_ids), given, step=step)
        weights = _dense_step(rule, step, weights, slots, grads)
    pair.table.check()
    found = pair.contents()
    np.testing.assert_allclose([found[key] for key in universe.tolist()], weights, rtol=1e-5, atol=1e-5)


def test_slots_can_be_read_and_restored(cuda, rng):
    pair = Pair(cuda, dim=3)
    keys = np.array([9, -4, 2])
    slots = rng.standard_normal((3, 6), np.float32)
    pair.table.assign_slots("lazy_adam", HYPER["lazy_adam"], pair.cuda.put(keys), pair.cuda.put(slots))
    pair.expected.lookup(keys, insert=True)
    pair.check_contents()
    np.testing.assert_array_equal(pair.cuda.get(pair.table.export("optimizer")[2]), slots)
    with pytest.raises(ValueError, match="keeps 6 floats per row"):
        pair.table.assign_slots("lazy_adam", HYPER["lazy_adam"], pair.cuda.put(keys), pair.cuda.put(slots[:, :3]))
    with pytest.raises(ValueError, match="belongs to another rule"):
        pair.table.apply(
            "sgd", [0.1], pair.cuda.put(np.zeros(0, np.int64)), pair.cuda.put(np.zeros((0, 3), np.float32))
        )
    with pytest.raises(RuntimeError, match="no .*slot set 'other'"):
        pair.table.export("other")


def test_a_gradient_of_an_erased_row_is_dropped(cuda):
    pair = Pair(cuda, dim=2)
    row_ids = pair.check_lookup(np.array([1, 2]), insert=True)
    pair.table.erase(pair.cuda.put(np.array([2])))
    pair.expected.erase(np.array([2]))
    pair.check_lookup(np.array([3]), insert=True)  # has the number of key 2 now
    pair.table.apply("sgd", [1.0], pair.cuda.put(row_ids), pair.cuda.put(np.ones((2, 2), np.float32)))
    pair.expected.rows[1] -= np.float32(1.0)
    pair.check_contents()
    pair.table.check()


def test_a_full_table_stores_nothing(cuda):
    import sok.cuda

    pair = Pair(cuda, capacity=3)
    pair.check_lookup(np.array([1, 2]), insert=True)
    with pytest.raises(sok.cuda.TableFullError, match=saying("table 'item'", "full", "all 3 rows", "key 5 is new")):
        pair.lookup(np.array([2, 4, 5]), insert=True)
    pair.check_contents()
    pair.check_lookup(np.array([4, 1, 2, 4]), insert=True)


def test_a_budget_is_kept(cuda):
    import sok.cuda

    pair = Pair(cuda, dim=64, capacity=1 << 20, memory_bytes=5 << 20)
    pair.check_lookup(np.arange(300), insert=True)
    with pytest.raises(sok.cuda.OutOfMemoryError, match="of a budget of 5242880"):
        pair.table.reserve(1 << 20)
    assert pair.table.memory_bytes() <= 5 << 20
    pair.check_contents()


def test_keys_that_the_shard_cannot_hold_are_named(cuda):
    pair = Pair(cuda, capacity=10, hashed=False)
    rows, row_ids = pair.lookup(np.array([3, 10, -1]), insert=True)
    assert row_ids.tolist() == [3, -1, -1]
    assert not rows[1:].any()
    with pytest.raises(ValueError, match=r"key (10|-1) is outside \[0, 10\)"):
        pair.table.check()
    pair.table.check()
    shard = Pair(cuda, world_size=4, rank=1)
    assert shard.lookup(np.array([5, 6, -3]), insert=True)[1].tolist() == [0, -1, 1]
    with pytest.raises(ValueError, match="key 6 belongs to rank 2"):
        shard.table.check()


def test_gradients_that_are_not_finite_are_named(cuda):
    pair = Pair(cuda, dim=2)
    row_ids = pair.check_lookup(np.array([1, 2]), insert=True)
    grads = np.array([[1, 1], [np.nan, 1]], np.float32)
    pair.table.apply("sgd", [1.0], pair.cuda.put(row_ids), pair.cuda.put(grads), nonfinite="raise")
    with pytest.raises(
        ValueError, match=saying("gradient 1", "for row id 1", "holds NaN or infinity", "nothing was updated")
    ):
        pair.table.check()
    pair.check_contents()
    pair.table.apply("sgd", [1.0], pair.cuda.put(row_ids), pair.cuda.put(grads), nonfinite="skip")
    pair.expected.rows[1] -= np.float32(1.0)
    pair.check_contents()


def test_reading_gives_where_the_records_lie(cuda):
    pair = Pair(cuda)
    pair.check_lookup(np.array([1, 2]), insert=True)
    with pair.table.reading() as reading:
        assert reading.num_rows >= 2
        assert reading.rows.stride == 4
        assert reading.rows.slabs


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"initializer": "zeros"}, "`initializer` must be one of"),
        ({"initializer": "bank"}, "`bank` must be given"),
        ({"initializer": "bank", "bank": np.zeros((2, 3))}, r"`bank` must have shape \[P, 4\]"),
        ({"memory_bytes": 0}, "`memory_bytes` must be at least 1"),
        ({"capacity": 0}, "capacity must lie in"),
        ({"world_size": 2, "rank": 2}, "rank must lie in"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(cuda, arguments, error):
    import sok.cuda

    with pytest.raises(ValueError, match=error):
        sok.cuda.Table("item", **({"dim": 4, "capacity": 10} | arguments))


def test_fill_rows_makes_the_rows_of_a_table(cuda):
    import sok.cuda

    pair = Pair(cuda, dim=6)
    keys = np.array([3, -9, 3])
    made = sok.cuda.fill_rows(cuda.put(keys), 6, seed=11)
    np.testing.assert_array_equal(cuda.get(made), pair.lookup(keys, insert=False)[0])
