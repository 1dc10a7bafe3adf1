"""Saves of what has changed alone, and what becomes of the chain."""

import dataclasses
import json
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import sok
from sok.checkpoint import CheckpointError, manifest, native, read_manifest, saving, verify
from sok.lookup.lookup import lookup_rows
from sok.tools import cli
from tests.sok.checkpoint_cases import DIM, RULES, assert_same_training, contents, files_of, new_table, train
from tests.sok.threads_world import checked, run_world


def rows_of_links(folder):
    return [sum(file.rows for file in link.files) for link in read_manifest(folder).links]


def assert_same_contents(found, expected, exact=True):
    """Rows and slots; those of an exact Adam within the rounding of one more settling per link."""
    assert found.keys() == expected.keys()
    if exact:
        assert found == expected
        return
    for key, row in expected.items():
        for mine, its in zip(found[key], row, strict=True):
            np.testing.assert_allclose(np.frombuffer(mine, "f4"), np.frombuffer(its, "f4"), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("hashed", [True, False])
def test_a_chain_is_restored_as_the_table_was_and_trains_on_alike(tmp_path, rule, hashed):
    table, other = new_table(hashed=hashed), new_table(hashed=hashed)
    optimizer, fresh = RULES[rule](), RULES[rule]()
    table.assign(np.arange(100), np.ones([100, DIM]))
    for step in range(0, 15, 3):
        train(table, optimizer, range(step, step + 3))
        table.erase([step, 90 + step])
        sok.save(tmp_path, [table], optimizer, incremental=True)
    counts = rows_of_links(tmp_path)
    assert len(counts) == 5 and counts[0] >= 90 and max(counts[1:]) < 40
    sok.restore(tmp_path, {table.table_name: other}, fresh)
    assert_same_contents(contents(other), contents(table), exact=rule != "Adam")
    assert int(fresh.iterations) == 15
    assert verify(tmp_path) == []
    assert_same_training(table, optimizer, other, fresh, range(15, 35))


def test_a_delta_holds_what_changed_and_nothing_else(tmp_path):
    table = new_table()
    table.assign(np.arange(10), np.ones([10, DIM]))
    sok.save(tmp_path, table)
    sok.save(tmp_path, table, incremental=True)
    table.assign([3], np.zeros([1, DIM]))
    table.restore_rows([4], np.zeros([1, DIM]))
    lookup_rows(table, tf.constant([50], tf.int64))  # a new row, as a lookup for training makes it
    table.erase([5, 6])
    table.assign([6], np.full([1, DIM], 6.0))
    sok.save(tmp_path, table, incremental=True)
    assert rows_of_links(tmp_path) == [10, 0, 4]  # 3, 4, 6 and 50
    assert [file.erased for link in read_manifest(tmp_path).links for file in link.files] == [0, 0, 1]
    assert read_manifest(tmp_path).tables[0].rows == 10
    other = new_table()
    sok.restore(tmp_path, {table.table_name: other})
    assert contents(other) == contents(table) and sorted(contents(other)) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 50]


def test_a_full_save_ends_the_chain_and_its_files_go(tmp_path):
    table = new_table()
    for _ in range(3):
        sok.save(tmp_path, table, incremental=True)
    assert len(files_of(tmp_path)) == 4
    sok.save(tmp_path, table)
    assert len(files_of(tmp_path)) == 2 and len(read_manifest(tmp_path).links) == 1
    assert json.loads((tmp_path / "manifest.json").read_text())["version"] == 1  # an older sok reads it


def test_an_older_sok_would_refuse_a_chain(tmp_path):
    table = new_table()
    for _ in range(2):
        sok.save(tmp_path, table, incremental=True)
    assert json.loads((tmp_path / "manifest.json").read_text())["version"] == 2
    (newest,) = read_manifest(tmp_path).files
    assert int.from_bytes((tmp_path / newest.name).read_bytes()[24:28], "little") == 2


def test_a_failed_save_forgets_no_change(tmp_path, monkeypatch):
    table = new_table()
    table.assign(np.arange(4), np.ones([4, DIM]))
    sok.save(tmp_path, table)
    table.assign([1], np.zeros([1, DIM]))
    table.erase([2])
    with monkeypatch.context() as patch:
        patch.setattr(saving.manifests, "write_manifest", lambda *_: (_ for _ in ()).throw(OSError(5, "gone")))
        with pytest.raises(OSError, match="gone"):
            sok.save(tmp_path, table, incremental=True)
    assert rows_of_links(tmp_path) == [4] and len(files_of(tmp_path)) == 2
    table.assign([3], np.zeros([1, DIM]))
    sok.save(tmp_path, table, incremental=True)
    assert rows_of_links(tmp_path) == [4, 2] and read_manifest(tmp_path).files[0].erased == 1
    other = new_table()
    sok.restore(tmp_path, {table.table_name: other})
    assert contents(other) == contents(table)


def test_a_first_save_that_fails_leaves_nothing_to_count_from(tmp_path, monkeypatch):
    table = new_table()
    with monkeypatch.context() as patch:
        patch.setattr(native.EagerCalls, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            sok.save(tmp_path, table, incremental=True)
    assert not native.EagerCalls().changes(table)["on"]
    table.assign([1], np.ones([1, DIM]))
    sok.save(tmp_path, table, incremental=True)
    assert rows_of_links(tmp_path) == [1]


def test_a_restored_chain_goes_on(tmp_path):
    table, optimizer = new_table(), RULES["Adam"]()
    train(table, optimizer, range(5))
    sok.save(tmp_path, [table], optimizer)
    train(table, optimizer, range(5, 8))
    sok.save(tmp_path, [table], optimizer, incremental=True)
    sok.restore(tmp_path, [table], optimizer)
    train(table, optimizer, range(8, 11))
    sok.save(tmp_path, [table], optimizer, incremental=True)
    assert len(rows_of_links(tmp_path)) == 3 and rows_of_links(tmp_path)[2] < int(table.size())
    other, fresh = new_table(), RULES["Adam"]()
    sok.restore(tmp_path, {table.table_name: other}, fresh)
    assert_same_contents(contents(other), contents(table), exact=False)
    assert_same_training(table, optimizer, other, fresh, range(11, 31))


def all_rows_because(reason):
    return pytest.warns(UserWarning, match=f"all rows are written into .*not changes alone: .*{reason}")


def test_what_was_saved_elsewhere_meanwhile_makes_it_a_full_save(tmp_path):
    table = new_table()
    table.assign([1, 2], np.ones([2, DIM]))
    sok.save(tmp_path / "a", table)
    sok.save(tmp_path / "b", table)
    table.assign([1], np.zeros([1, DIM]))
    with all_rows_because("saved or restored as g000001-.*there lies g000001-"):
        sok.save(tmp_path / "a", table, incremental=True)
    assert rows_of_links(tmp_path / "a") == [2]


def test_a_foreign_save_in_between_makes_it_a_full_save(tmp_path):
    table, other = new_table(), new_table()
    sok.save(tmp_path, {table.table_name: table}[table.table_name])
    (tmp_path / "aside").mkdir()
    foreign = sok.EmbeddingVariable(DIM, 200, name="foreign", seed=5)
    sok.save(tmp_path, foreign)
    with all_rows_because(r"it holds the tables \['foreign"):
        sok.save(tmp_path, table, incremental=True)
    assert len(rows_of_links(tmp_path)) == 1
    with all_rows_because("it holds the tables"):
        sok.save(tmp_path, [table, other], incremental=True)
    sok.save(tmp_path, [other, table], incremental=True)  # their order does not matter
    assert len(rows_of_links(tmp_path)) == 2


def test_a_table_that_was_not_saved_or_restored_as_a_whole_makes_it_a_full_save(tmp_path):
    table, optimizer = new_table(), RULES["Adagrad"]()
    train(table, optimizer, range(2))
    sok.save(tmp_path, table, optimizer)
    sok.restore(tmp_path, table, slots=False)
    with all_rows_because("neither saved .*nor restored"):
        sok.save(tmp_path, table, incremental=True)
    assert rows_of_links(tmp_path) == [int(table.size())]


def test_a_lost_file_of_the_chain_makes_it_a_full_save(tmp_path):
    table = new_table()
    sok.save(tmp_path, table)
    (tmp_path / read_manifest(tmp_path).files[0].name).unlink()
    with all_rows_because("g000001-.*shard .*another size"):
        sok.save(tmp_path, table, incremental=True)
    assert verify(tmp_path) == []


def test_a_warning_that_is_an_error_saves_nothing(tmp_path):
    table = new_table()
    sok.save(tmp_path / "a", table)
    sok.save(tmp_path / "b", table)
    old = read_manifest(tmp_path / "a")
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="not changes alone"):
        warnings.simplefilter("error")
        sok.save(tmp_path / "a", table, incremental=True)
    assert read_manifest(tmp_path / "a") == old


def test_another_program_that_saves_meanwhile_is_noticed(tmp_path, monkeypatch):
    table, other = new_table(), new_table()
    sok.save(tmp_path, table)
    save_changes = native.EagerCalls.save_changes

    def slow(self, table, path, generation):
        summary = save_changes(self, table, path, generation)
        sok.save(tmp_path, other)
        return summary

    monkeypatch.setattr(native.EagerCalls, "save_changes", slow)
    with pytest.raises(RuntimeError, match="writer.json: .*later save .*this job"):
        sok.save(tmp_path, table, incremental=True)
    assert read_manifest(tmp_path).tables[0].name == other.table_name and verify(tmp_path) == []


def test_a_chain_ends_at_its_longest_and_a_save_sums_the_manifest_twice(tmp_path, monkeypatch):
    table = new_table()
    summed = mock.Mock(side_effect=manifest.checksum)
    monkeypatch.setattr(manifest, "checksum", summed)
    lengths, sums = [], []
    for value in range(5):
        summed.reset_mock()
        table.assign([value], np.ones([1, DIM]))
        sok.save(tmp_path, table, incremental=True, max_chain=2)
        sums.append(summed.call_count)  # what is written, and what lies there then; the next save knows it
        lengths.append(len(read_manifest(tmp_path).links))
    assert lengths == [1, 2, 1, 2, 1] and sums[1:] == [2] * 4
    assert len(rows_of_links(tmp_path)) == 1 and rows_of_links(tmp_path) == [5]
    with pytest.raises(ValueError, match="`max_chain` .*at least 1.*: 0"):
        sok.save(tmp_path, table, incremental=True, max_chain=0)


# Damage.


@pytest.fixture
def chain(tmp_path):
    table = new_table()
    for value in range(3):
        table.assign(np.arange(value, 10), np.full([10 - value, DIM], value))
        table.erase([100 + value])
        sok.save(tmp_path, table, incremental=True)
    return tmp_path, table


@pytest.mark.parametrize("number", range(3))
def test_damage_in_any_link_changes_no_table(chain, number):
    folder, table = chain
    name = read_manifest(folder).links[number].files[0].name
    data = bytearray((folder / name).read_bytes())
    data[-40] ^= 1
    (folder / name).write_bytes(data)
    table.assign([77], np.ones([1, DIM]))
    before = contents(table)
    with pytest.raises(tf.errors.DataLossError, match=f"{name}: at offset"):
        sok.restore(folder, table)
    assert contents(table) == before
    assert [name in line for line in verify(folder)] == [True]
    with pytest.raises(tf.errors.DataLossError, match=f"{name}: at offset"):
        sok.compact(folder)
    assert len(files_of(folder)) == 4 and len(read_manifest(folder).links) == 3


def test_links_that_change_places_are_noticed(chain):
    folder, table = chain
    files = [folder / link.files[0].name for link in read_manifest(folder).links]
    files[1].write_bytes(files[2].read_bytes())
    with pytest.raises(CheckpointError, match="not the file .*manifest .*generation"):
        sok.restore(folder, table)


def test_a_save_that_comes_twice_is_refused(chain):
    folder, _ = chain
    whole = read_manifest(folder)
    made = dataclasses.replace(whole, before=(*whole.before, whole.before[-1]))
    with pytest.raises(CheckpointError, match="twice in the chain"):
        manifest.from_bytes(manifest.to_bytes(made), "crafted")


def test_a_delta_in_the_place_of_all_rows_is_noticed(chain):
    folder, table = chain
    whole = read_manifest(folder)
    manifest.write_manifest(folder, dataclasses.replace(whole, before=whole.before[1:]))
    assert any("delta is True instead of False" in line for line in verify(folder))
    before = contents(table)
    with pytest.raises(CheckpointError, match="delta is True"):
        sok.restore(folder, table)
    assert contents(table) == before
    with pytest.raises(tf.errors.DataLossError, match="delta, where all rows"):
        sok.compact(folder)


# Compacting.


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("max_keys", [8 << 20, 7])
def test_compacting_changes_nothing_but_the_number_of_files(tmp_path, monkeypatch, rule, max_keys):
    from sok.checkpoint import compacting

    monkeypatch.setattr(compacting, "MAX_KEYS", max_keys)
    table, other, optimizer, fresh = new_table(), new_table(), RULES[rule](), RULES[rule]()
    table.assign(np.arange(100), np.ones([100, DIM]))
    for step in range(0, 12, 3):
        sok.save(tmp_path, [table], optimizer, incremental=True)
        train(table, optimizer, range(step, step + 3))
        table.erase([step])
    sok.save(tmp_path, [table], optimizer, incremental=True)
    newest = read_manifest(tmp_path).generation
    sok.compact(tmp_path)
    made = read_manifest(tmp_path)
    assert len(made.links) == 1 and made.same_as == newest and len(files_of(tmp_path)) == 2
    assert made.tables[0].rows == int(table.size()) and verify(tmp_path) == []
    sok.restore(tmp_path, {table.table_name: other}, fresh)
    assert_same_contents(contents(other), contents(table), exact=rule != "Adam")
    # The job goes on with deltas to what was compacted.
    train(table, optimizer, range(12, 15))
    sok.save(tmp_path, [table], optimizer, incremental=True)
    assert len(rows_of_links(tmp_path)) == 2
    sok.restore(tmp_path, {table.table_name: other}, fresh)
    assert_same_training(table, optimizer, other, fresh, range(15, 35))


def test_a_full_checkpoint_needs_no_compacting(tmp_path):
    sok.save(tmp_path, new_table())
    before = read_manifest(tmp_path)
    sok.compact(tmp_path)
    assert read_manifest(tmp_path) == before
    with pytest.raises(FileNotFoundError, match="no checkpoint here"):
        sok.compact(tmp_path / "none")


def test_a_save_during_compacting_is_not_lost(chain, monkeypatch):
    folder, table = chain
    compact_shards = native.compact_shards

    def slow(*args, **kwargs):
        sok.save(folder, table)
        return compact_shards(*args, **kwargs)

    monkeypatch.setattr(native, "compact_shards", slow)
    with pytest.raises((RuntimeError, tf.errors.NotFoundError)):
        sok.compact(folder)
    assert verify(folder) == [] and len(read_manifest(folder).links) == 1
    assert read_manifest(folder).same_as is None


def test_the_command_line_shows_checks_and_compacts_chains(chain, capsys):
    folder, table = chain
    assert cli.main(["inspect", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("    full  g000001-") and "10 rows" in lines[1]
    assert lines[3].startswith("    delta g000003-") and "8 rows changed, 0 keys erased" in lines[3]
    assert cli.main(["verify", str(folder)]) == 0
    assert "whole: 1 table, 3 files, 2 deltas" in capsys.readouterr().out
    assert cli.main(["compact", str(folder)]) == 0
    assert "3 saves of" in capsys.readouterr().out
    assert cli.main(["compact", str(folder)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert cli.main(["compact", str(folder / "none")]) == 1
    before = contents(table)
    sok.restore(folder, table)
    assert contents(table) == before


# Laws.

KEYS = st.lists(st.integers(0, 30), max_size=12)
STEPS = st.lists(
    st.tuples(st.sampled_from(["assign", "erase", "train", "save", "full", "compact", "restore"]), KEYS), max_size=14
)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS, rule=st.sampled_from(["Adagrad", "Adam"]), before=st.integers(1, 3), after=st.integers(1, 3))
def test_any_chain_from_any_number_of_workers_is_restored_by_any_other(steps, rule, before, after):
    """`before` workers do the steps and save; `after` workers restore, change something and save; one reads."""

    def table_of(transport):
        return sok.EmbeddingVariable(DIM, 200, name="item", seed=5)

    def optimizer():
        made = RULES[rule]()
        made._slot_set = rule  # as in another process
        return made

    def program(transport):
        table, trained = table_of(transport), optimizer()
        for number, (what, keys) in enumerate([*steps, ("save", [])]):
            mine = np.array(sorted({key for key in keys if key % transport.size == transport.rank}), np.int64)
            if what == "assign":
                table.assign(mine, np.full([len(mine), DIM], number))
            elif what == "erase":
                table.erase(mine)
            elif what == "train":
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.square(table.sparse_read(mine) - 1.0))
                trained.apply_gradients([(tape.gradient(loss, table), table)])
            elif what == "save":
                sok.save(folder, [table], trained, incremental=True)
            elif what == "full":
                sok.save(folder, [table], trained)
            elif what == "compact" and transport.rank == 0 and Path(folder, "manifest.json").exists():
                sok.compact(folder)
            elif what == "restore" and Path(folder, "manifest.json").exists():
                sok.restore(folder, [table], trained)
            transport.broadcast_numpy(np.zeros(1), f"step {number}")
        return contents(table)

    def go_on(transport):
        table, trained = table_of(transport), optimizer()
        sok.restore(folder, [table], trained)
        shard = contents(table)
        if transport.rank == 0:
            table.erase([0])
        sok.save(folder, [table], trained, incremental=True)
        return shard, contents(table)

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        expected = {k: row for shard in checked(run_world(before, program, patch)) for k, row in shard.items()}
        shards = checked(run_world(after, go_on, patch))
        found = {k: row for shard, _ in shards for k, row in shard.items()}
        assert_rows(found, expected)
        later = {k: row for _, shard in shards for k, row in shard.items()}
        ((alone, _),) = checked(run_world(1, go_on, patch))
        assert_rows(alone, later)
        sok.compact(folder)
        ((compacted, _),) = checked(run_world(1, go_on, patch))
        assert_rows(compacted, {k: row for k, row in later.items() if k != 0})


def assert_rows(found, expected):
    """The same rows; slots that one side has not made yet are not compared."""
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        for mine, its in zip(found[key], row, strict=False):
            np.testing.assert_allclose(np.frombuffer(mine, "f4"), np.frombuffer(its, "f4"), rtol=1e-5, atol=1e-6)
