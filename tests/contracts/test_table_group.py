"""Many tables at once beside each by itself: a group promises what its tables do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.messages import saying

DIMS = [4, 1, 8, 4]
HYPER = {"sgd": [0.1], "adagrad": [0.1, 0.1, 1e-7], "adam": [0.01, 0.9, 0.999, 1e-7]}


class Pair:
    """A group, and tables like its own that are used one by one."""

    def __init__(self, cuda: Any, capacity: int = 300):
        import sok.cuda

        self.cuda = cuda
        self.tables, self.single = (
            [sok.cuda.Table(f"t{i}", dim=d, capacity=capacity, seed=i, hashed=i != 1) for i, d in enumerate(DIMS)]
            for _ in range(2)
        )
        self.group = sok.cuda.TableGroup(self.tables)

    def same_contents(self, slot_set: str | None) -> None:
        for mine, alone in zip(self.tables, self.single, strict=True):
            for a, b in zip(mine.export(slot_set), alone.export(slot_set), strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    np.testing.assert_array_equal(self.cuda.get(a), self.cuda.get(b))


@pytest.mark.sanitize
@pytest.mark.parametrize("rule", sorted(HYPER))
def test_steps_of_a_group_are_those_of_its_tables(cuda, rule, rng):
    import sok.cuda

    pair = Pair(cuda)
    table_of = [0, 2, 0, 1, 3]
    for step in range(1, 5):
        keys = [cuda.put(rng.integers(0, 300, rng.integers(0, 40))) for _ in table_of]
        found = pair.group.lookup(keys, insert=step != 4, table_of=table_of)
        alone = [pair.single[t].lookup(k, insert=step != 4) for t, k in zip(table_of, keys, strict=True)]
        for mine, theirs in zip(found, alone, strict=True):
            np.testing.assert_array_equal(cuda.get(mine.row_ids), cuda.get(theirs.row_ids))
            np.testing.assert_array_equal(cuda.get(mine.rows), cuda.get(theirs.rows))
        shapes = [(len(k), DIMS[t]) for t, k in zip(table_of, keys, strict=True)]
        grads = [cuda.put(rng.integers(-3, 4, shape).astype(np.float32)) for shape in shapes]
        addends = [sok.cuda.Addends(f.row_ids, g, t) for t, f, g in zip(table_of, found, grads, strict=True)]
        pair.group.apply(rule, HYPER[rule], pair.group.sum_rows(addends), step=step)
        for t, table in enumerate(pair.single):
            mine = [sok.cuda.Addends(a.row_ids, a.grad) for a in addends if a.table == t]
            sums = sok.cuda.sum_rows(mine, [table.capacity])
            table.apply(rule, HYPER[rule], sums.row_ids, sums.sums, step=step, num_grads=sums.num_sums)
        pair.same_contents("optimizer")


def test_rows_are_read_by_row_ids_of_a_table_that_erased(cuda):
    import sok.cuda

    pair = Pair(cuda)
    keys = [cuda.put(np.array([5, 6, 5])) for _ in DIMS]
    pair.group.find_or_insert(keys)
    for table in pair.tables:
        table.erase(keys[0])
    found = pair.group.lookup(keys, insert=True)
    assert all((cuda.get(f.row_ids) >> 32 == 1).all() for f in found)
    with pair.group.reading() as readings:
        features = [sok.cuda.Feature(r, f.row_ids, dim=d) for r, f, d in zip(readings, found, DIMS, strict=True)]
        pooled = sok.cuda.combine_group(features)
    for rows, f in zip(pooled, found, strict=True):
        np.testing.assert_array_equal(cuda.get(rows), cuda.get(f.rows))


def test_a_full_table_stores_nothing_in_any(cuda):
    import sok.cuda

    pair = Pair(cuda, capacity=3)
    keys = [cuda.put(np.arange(n)) for n in (3, 2, 4, 1)]
    with pytest.raises(sok.cuda.TableFullError, match=saying("table 't2'", "3 rows", "key 3")):
        pair.group.find_or_insert(keys)
    assert [table.size() for table in pair.tables] == [0] * 4
    assert [cuda.get(ids).tolist() for ids in pair.group.find(keys)] == [[-1] * n for n in (3, 2, 4, 1)]


def test_a_refused_gradient_changes_no_table(cuda):
    import sok.cuda

    pair = Pair(cuda)
    keys = [cuda.put(np.array([1, 2])) for _ in DIMS]
    found = pair.group.lookup(keys, insert=True)
    grads = [np.ones((2, d), np.float32) for d in DIMS]
    grads[3][1, 0] = np.nan
    given = [sok.cuda.TableGrads(f.row_ids, cuda.put(g)) for f, g in zip(found, grads, strict=True)]
    pair.group.apply("sgd", [0.1], given, nonfinite="raise")
    for before, after in zip(found, pair.group.lookup(keys, insert=False), strict=True):
        np.testing.assert_array_equal(cuda.get(before.rows), cuda.get(after.rows))
    for table in pair.tables[:3]:
        table.check()
    with pytest.raises(ValueError, match=saying("table 't3'", "gradient 1", "for row id 1", "holds NaN")):
        pair.tables[3].check()


def test_an_id_that_no_lookup_gave_is_told(cuda):
    import sok.cuda

    pair = Pair(cuda)
    sums = pair.group.sum_rows(
        [sok.cuda.Addends(cuda.put(np.array([700, -1])), cuda.put(np.ones((2, 8), np.float32)), 2)]
    )
    assert [int(cuda.get(s.num_grads)[0]) for s in sums] == [0, 0, 1, 0]
    pair.group.apply("sgd", [0.1], sums)
    with pytest.raises(ValueError, match=saying("table 't2'", "row id 700", "which this shard does not have")):
        pair.tables[2].check()


def test_misuse_of_a_group_is_named(cuda):
    import sok.cuda

    pair = Pair(cuda)
    with pytest.raises(ValueError, match=saying("`tables`", "at least one table", "none of them twice")):
        sok.cuda.TableGroup([pair.tables[0]] * 2)
    with pytest.raises(ValueError, match=saying("`keys`", "4", "Received: 1")):
        pair.group.find([cuda.put(np.array([1]))])
    with pytest.raises(ValueError, match=saying("must lie in [0, 4)", "Received: 4")):
        pair.group.find([cuda.put(np.array([1]))], [4])
    with pytest.raises(ValueError, match=saying("`grads`", "of 4 tables", "Received: 0")):
        pair.group.apply("sgd", [0.1], [])
    with pytest.raises(ValueError, match=saying("`addends[0].grad`", "[?, 8] float32")):
        pair.group.sum_rows([sok.cuda.Addends(cuda.put(np.array([1])), cuda.put(np.ones((1, 4), np.float32)), 2)])
    with pytest.raises(ValueError, match="belongs to another rule"):
        pair.tables[0].apply("sgd", [0.1], cuda.put(np.zeros(0, np.int64)), cuda.put(np.zeros((0, 4), np.float32)))
        empty = [
            sok.cuda.TableGrads(cuda.put(np.zeros(0, np.int64)), cuda.put(np.zeros((0, d), np.float32))) for d in DIMS
        ]
        pair.group.apply("adagrad", HYPER["adagrad"], empty)
