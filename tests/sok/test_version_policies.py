"""Checkpoints by version of tables with admission and eviction: what an ordinary save of the same step restores to."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint.manifest import read_manifest
from sok.checkpoint.native import EagerCalls
from tests.sok.storage_cases import LITTLE
from tests.sok.version_policy_cases import POLICIES, assert_goes_on_alike, batch, holds, make, train


@pytest.fixture(autouse=True)
def few_rows_in_memory(monkeypatch):
    for name, value in LITTLE.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("kind", "rule"), list(zip(POLICIES, ["Adam", "Adagrad"] * 3, strict=False)))
def test_every_listed_version_is_what_an_ordinary_save_of_its_step_is(tmp_path, kind, rule):
    table, optimizer = make(kind, f"by_version_{kind}_{rule}", tmp_path / "rows", rule)
    checkpoint = tf.train.Checkpoint(table=table, optimizer=optimizer)
    manager = sok.CheckpointManager(checkpoint, tmp_path / "saves", max_to_keep=2, mode="versions")
    listed, held = {}, {}
    for step in (6, 12, 18):
        train(table, optimizer, range(step - 6, step))
        sok.save(tmp_path / f"ordinary_{step}", table, optimizer)
        held[step] = holds(table)
        listed[manager.save()] = step
    train(table, optimizer, range(18, 24))  # beside the last save
    manager.wait()
    assert manager.checkpoints == list(listed)[1:]
    came = set(table.export()[0].numpy()) - set(held[18]["table"])
    left = set(held[18]["table"]) - set(table.export()[0].numpy())
    assert came and left and int(table.stats()["evicted"]) > len(left)
    for path in manager.checkpoints:
        step = listed[path]
        ways = {"version": f"{path}.sok", "ordinary": tmp_path / f"ordinary_{step}"}
        after = {}
        for way, folder in ways.items():
            other, fresh = make(kind, f"{way}_{step}_{kind}_{rule}", tmp_path / way, rule)
            sok.restore(folder, {table.table_name: other}, fresh)
            assert holds(other) == held[step]
            train(other, fresh, range(step, step + 5))
            after[way] = holds(other)
        assert_goes_on_alike(after["version"], after["ordinary"], "GPU" not in table.handle.device)
    manager.restore(manager.checkpoints[0])  # into the table itself, which goes on to be saved so
    assert holds(table) == held[12]
    train(table, optimizer, range(12, 15))
    now = holds(table)
    path = manager.save()
    train(table, optimizer, range(15, 18))
    assert manager.restore_or_initialize() == path
    assert holds(table) == now
    sok.checkpoint.verify(f"{path}.sok")


def rows_of(table):
    keys, rows = (t.numpy().tolist() for t in table.export())
    return dict(zip(keys, rows, strict=True))


def test_a_version_goes_to_tables_without_policies_and_to_others(tmp_path):
    table, optimizer = make("counted", "with_policies", tmp_path / "rows")
    train(table, optimizer, range(9))
    sok.save(tmp_path / "version", table, optimizer, versions=True)
    sok.save(tmp_path / "ordinary", table, optimizer)
    found = []
    for way in ("version", "ordinary"):
        plain = sok.EmbeddingVariable(3, 20_000, name=f"plain_{way}", seed=9)
        sok.restore(tmp_path / way, {table.table_name: plain})
        other, fresh = make("chance", f"other_{way}", tmp_path / way)
        sok.restore(tmp_path / way, {table.table_name: other}, fresh)
        train(other, fresh, range(9, 14))
        found.append((rows_of(plain), holds(other)))
    assert found[0][0] == found[1][0]
    assert_goes_on_alike(found[0][1], found[1][1], "GPU" not in table.handle.device)


def test_rows_that_were_only_counted_are_written_and_no_others(tmp_path, monkeypatch):
    for name in LITTLE:
        monkeypatch.delenv(name)
    table, optimizer = make("counted", "sized", tmp_path / "rows")
    train(table, optimizer, range(9))
    sok.save(tmp_path / "version", table, optimizer, versions=True)
    before = table.stats()["bytes_written"]
    table.sparse_read(np.arange(1_000))  # counts nothing
    sok.save(tmp_path / "again", table, optimizer, versions=True)
    assert table.stats()["bytes_written"] == before
    sok.group_embedding_lookup([table], [tf.constant(batch(8)[:20])])
    sok.save(tmp_path / "counted", table, optimizer, versions=True)
    assert table.stats()["bytes_written"] - before == 4096  # one block
    rows, candidates = (sum(file.rows for file in saved.files) for saved in read_manifest(tmp_path / "counted").tables)
    size, waiting = (sum(file.bytes for file in saved.files) for saved in read_manifest(tmp_path / "counted").tables)
    assert rows == table.stats()["rows"] and size < 1000 + rows / 4
    assert candidates == table.stats()["candidates"] > 100 and waiting < 1000 + 17 * candidates


def test_tables_keep_versions_before_and_after_they_have_rows(tmp_path):
    table, optimizer = make("filter", "late", tmp_path / "rows")
    train(table, optimizer, range(8))
    sok.save(tmp_path / "ordinary", table, optimizer)
    held = holds(table)
    sok.save(tmp_path / "version", table, optimizer, versions=True)  # its rows are written anew
    train(table, optimizer, range(8, 12))
    sok.restore(tmp_path / "version", table, optimizer)
    assert holds(table) == held
    with pytest.raises(tf.errors.FailedPreconditionError, match="its rows are in memory"):
        EagerCalls().keep_versions(make("counted", "in_memory")[0])


def test_erased_keys_leave_a_version_with_their_histories(tmp_path):
    table, optimizer = make("counted", "forgotten", tmp_path / "rows")
    train(table, optimizer, range(9))
    sok.save(tmp_path / "version", table, optimizer, versions=True)
    (waiting, *_), (present, *_) = holds(table)["table/sok.candidates"], holds(table)["table"]
    report = sok.erase([table], [waiting, present], checkpoints=[tmp_path / "version"])
    assert report.is_complete and not report.nowhere, str(report)
    held = holds(table)
    assert present not in held["table"] and waiting not in held["table/sok.candidates"]
    train(table, optimizer, range(9, 12))
    sok.restore(tmp_path / "version", table, optimizer)
    assert holds(table) == held
