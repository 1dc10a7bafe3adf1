"""That benchmarks/policies.py measures what it says."""

import numpy as np

import sok
from benchmarks import policies


def test_the_two_tables_hold_the_same_rows_and_train_alike():
    sok.Init(seed=1)
    tables = [policies.table_of(500, 4, name, **of) for name, of in (("a", {}), ("b", {"eviction": policies._NEVER}))]
    assert [int(table.size()) for table in tables] == [500, 500]
    assert tables[1].history([7919 * 3])[0].numpy().tolist() == [1] and not tables[0].options.keeps_history
    (keys,) = policies.keys_of(500, 1.05, 0)[0]
    assert set(keys.numpy() // 7919) <= set(range(500)) and np.bincount(keys.numpy() // 7919)[:3].min() > 1000
    before = tables[0].sparse_read(keys[:5]).numpy()
    for table in tables:
        policies.trains(table)(keys)
    assert (tables[0].sparse_read(keys[:5]).numpy() != before).any()
    assert int(tables[0].step) == int(tables[1].step) == 1 and int(tables[1].size()) == 500


def test_it_prints_a_line_of_each_case_and_what_went(capsys, monkeypatch):
    monkeypatch.setattr(policies, "_KEYS", 64)
    policies.main(["--rows", "80000", "--dims", "2", "--windows", "2", "--steps", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("| lookup", "| training step")) for line in lines) == 4
    went = [int(line.split(", ")[-1].split()[0].replace(",", "")) for line in lines if line.startswith("a pass")]
    assert went[:2] == [0, 0] and 8_000 <= went[2] < 20_000
