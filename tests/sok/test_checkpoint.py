"""`sok.save` and `sok.restore` of one worker."""

import dataclasses
import errno
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import CheckpointError, manifest, read_manifest, verify
from sok.table import state as table_state
from tests.sok.checkpoint_cases import DIM, RULES, assert_same_training, contents, files_of, new_table, train


def shards(folder):
    return sorted(path for path in folder.iterdir() if path.suffix == ".shard")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("hashed", [True, False])
def test_a_restored_model_trains_on_as_if_nothing_had_happened(tmp_path, rule, hashed):
    table, other = new_table(hashed=hashed), new_table(hashed=hashed)
    optimizer, fresh = RULES[rule](), RULES[rule]()
    table.assign(np.arange(100), np.ones([100, DIM]))
    train(table, optimizer, range(15))
    sok.save(tmp_path, [table], optimizer)
    sok.restore(tmp_path, {table.table_name: other}, fresh)
    assert contents(other) == contents(table)
    assert len(contents(other)) >= 100 and len(contents(other)[0]) == 2  # the row, and the slots of one set
    assert int(fresh.iterations) == 15
    assert_same_training(table, optimizer, other, fresh, range(15, 35))


@pytest.mark.parametrize("dtype", [tf.int64, tf.int32, tf.uint32, tf.uint64])
def test_all_keys_of_all_dtypes_come_back(tmp_path, dtype):
    table = new_table(key_dtype=dtype)
    keys = np.array([dtype.min, dtype.max, 5, 1, 77], dtype.as_numpy_dtype)
    table.assign(keys, np.arange(15.0).reshape(5, 3))
    sok.save(tmp_path, table)
    other = new_table(key_dtype=dtype)
    sok.restore(tmp_path, {table.table_name: other})
    np.testing.assert_array_equal(other.sparse_read(keys), np.arange(15.0).reshape(5, 3))
    assert int(other.size()) == len(set(keys.tolist()))


def test_a_restored_table_holds_nothing_else(tmp_path):
    table = new_table()
    table.assign([1, 2], np.ones([2, DIM]))
    sok.save(tmp_path, table)
    table.assign([2, 3], np.zeros([2, DIM]))
    train(table, RULES["Adam"](), range(3))
    sok.restore(tmp_path, table)
    assert sorted(contents(table)) == [1, 2]
    assert table_state.slot_sets(table) == []
    assert table.sparse_read([2]).numpy().tolist() == [[1.0] * DIM]


def test_gradients_from_before_are_ignored(tmp_path):
    table, optimizer = new_table(), RULES["SGD"]()
    table.assign([1], np.ones([1, DIM]))
    sok.save(tmp_path, table)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(table.sparse_read([1])))
    gradient = tape.gradient(loss, table)
    sok.restore(tmp_path, table)
    optimizer.apply_gradients([(gradient, table)])
    assert table.sparse_read([1]).numpy().tolist() == [[1.0] * DIM]


def test_a_second_save_takes_the_place_of_the_first(tmp_path):
    table = new_table()
    for value in (1.0, 2.0):
        table.assign([1], np.full([1, DIM], value))
        sok.save(tmp_path, table)
    assert read_manifest(tmp_path).generation.startswith("g000002-")
    assert len(files_of(tmp_path)) == 2  # one shard and the manifest
    table.erase([1])
    sok.restore(tmp_path, table)
    assert table.sparse_read([1]).numpy().tolist() == [[2.0] * DIM]


def test_what_interrupted_saves_have_left_goes_and_other_files_stay(tmp_path):
    table = new_table()
    left = ["g000009-0badcafe-t0000-r0000.shard", "g000001-0badcafe-t0000-r0003.shard.tmp"]
    for name in [*left, "notes.txt"]:
        (tmp_path / name).write_text("x")
    sok.save(tmp_path, table)
    names = {path.name for path in tmp_path.iterdir()}
    assert "notes.txt" in names and not names & set(left)


def test_rows_alone_are_restored_on_demand(tmp_path):
    table, other, optimizer = new_table(), new_table(), RULES["Adagrad"]()
    train(table, optimizer, range(5))
    sok.save(tmp_path, table, optimizer)
    sok.restore(tmp_path, {table.table_name: other}, slots=False)
    assert {key: row[0] for key, row in contents(table).items()} == {k: row[0] for k, row in contents(other).items()}
    assert table_state.slot_sets(other) == []


def test_other_capacities_and_kinds_take_what_fits(tmp_path):
    table = new_table(capacity=200)
    table.assign(np.arange(50), np.ones([50, DIM]))
    sok.save(tmp_path, table)
    for other in (new_table(capacity=50), new_table(capacity=50, hashed=False), new_table(owner=0)):
        sok.restore(tmp_path, {table.table_name: other})
        assert contents(other) == contents(table)


def test_learning_rates_and_step_counts_come_back(tmp_path):
    table, optimizer, other = new_table(), sok.optimizers.Adam(0.5), sok.optimizers.Adam(0.25)
    train(table, optimizer, range(4))
    sok.save(tmp_path, table, [optimizer])
    sok.restore(tmp_path, table, other)
    assert (int(other.iterations), float(other.learning_rate)) == (4, 0.5)


def test_a_compiled_model_is_saved_with_the_optimizer_of_its_tables(tmp_path):
    first = keras.Sequential(
        [
            keras.Input([2], dtype="int64"),
            sok.DistributedEmbedding("sum", 100, 4, 2, 1),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    first.compile(sok.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    keys, labels = np.arange(16).reshape(8, 2), np.ones([8, 1], np.float32)
    first.fit(keys, labels, verbose=0)
    sok.save(tmp_path, first)
    (saved,) = read_manifest(tmp_path).tables
    assert saved.rows == 16 and [s.num_slots for s in saved.slot_sets] == [2]
    (state,) = read_manifest(tmp_path).optimizers
    assert state.iterations == int(first.optimizer.iterations)
    table = first.layers[0].embedding_variable
    before = contents(table)
    first.fit(keys, labels, verbose=0)
    assert contents(table) != before
    sok.restore(tmp_path, first)
    assert contents(table) == before
    assert int(first.optimizer.iterations) == state.iterations


def test_layers_and_lists_are_taken_apart(tmp_path):
    layer = sok.DistributedEmbedding("sum", 100, 4, 2, 1)
    layer(np.array([[1, 2]]))
    table = new_table()
    sok.save(tmp_path, [layer, (table,), table])
    assert len(read_manifest(tmp_path).tables) == 2


def test_other_seeds_are_told(tmp_path):
    table, other = new_table(), sok.EmbeddingVariable(DIM, 10, seed=6)
    sok.save(tmp_path, table)
    with pytest.warns(UserWarning, match="another seed or initializer"):
        sok.restore(tmp_path, {table.table_name: other})
    assert other.seed != table.seed and contents(other) == contents(table)


def test_optimizers_that_have_trained_tables_need_not_be_given(tmp_path):
    table, optimizer = new_table(), RULES["Adam"]()
    train(table, optimizer, range(1))
    sok.save(tmp_path, table)
    (state,) = read_manifest(tmp_path).optimizers
    assert (state.slot_set, state.iterations) == (optimizer.slot_set, 1)
    train(table, optimizer, range(3))
    sok.restore(tmp_path, table)
    assert int(optimizer.iterations) == 1


def test_a_step_count_that_is_left_out_is_told(tmp_path):
    table, optimizer, other = new_table(), RULES["Adam"](), sok.optimizers.SGD(0.1)
    train(table, optimizer, range(1))
    with pytest.warns(UserWarning, match=f"the step count of {optimizer.slot_set} is not saved"):
        sok.save(tmp_path, table, [other])
    assert [state.slot_set for state in read_manifest(tmp_path).optimizers] == [other.slot_set]


def model_with_table(trainable=True):
    layer = sok.DistributedEmbedding("sum", 100, 4, 2, 1, trainable=trainable)
    return keras.Sequential([keras.Input([2], dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])


def test_a_model_whose_tables_nobody_trains_is_saved(tmp_path):
    model = model_with_table(trainable=False)
    model.compile(sok.DistributedOptimizer(keras.optimizers.Adafactor(0.01)), "mse")
    keys, labels = np.arange(16).reshape(8, 2), np.ones([8, 1], np.float32)
    model.fit(keys, labels, verbose=0)
    sok.save(tmp_path, model)
    assert read_manifest(tmp_path).optimizers == ()
    sok.restore(tmp_path, model)


@pytest.mark.parametrize("trained", [True, False])
def test_a_loss_scale_hides_no_step_count(tmp_path, trained):
    model = model_with_table()
    optimizer = sok.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0), "mse")
    keys, labels = np.arange(16).reshape(8, 2), np.ones([8, 1], np.float32)
    if trained:
        model.fit(keys, labels, verbose=0, batch_size=4)
    sok.save(tmp_path, model)
    (state,) = read_manifest(tmp_path).optimizers
    assert (state.rule, state.iterations) == ("adam", 2 if trained else 0)


def test_two_optimizers_do_not_share_what_a_file_holds_of_one(tmp_path):
    table, first = new_table(), sok.optimizers.Adam(0.5, name="of_the_file")
    train(table, first, range(3))
    tf.train.Checkpoint(table=table).save(str(tmp_path / "model"))
    with tf.Graph().as_default():  # names are counted per graph: as in the program that wrote the file
        name = sok.optimizers.Adam(name="of_the_file").slot_set
    second, third = sok.optimizers.Adam(0.5), sok.optimizers.Adam(0.5)
    other = new_table()
    third._slot_set = name
    tf.train.Checkpoint(table=other).restore(tf.train.latest_checkpoint(str(tmp_path)))
    train(other, second, range(1))
    assert (second.slot_set, int(second.iterations)) == (name, 4)
    with pytest.raises(ValueError, match="'of_the_file' .*share .*slots"):
        train(other, third, range(1))


# Misuse.


def saved_table(folder, **settings):
    table = new_table(**settings)
    table.assign([1, 2], np.ones([2, DIM]))
    sok.save(folder, table)
    return table


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: sok.EmbeddingVariable(4, 10, seed=5), "has dim 4; 'item.*' in .* has 3"),
        (lambda: new_table(key_dtype=tf.uint32), "has key dtype uint32; 'item.*' in .* has int64"),
    ],
)
def test_tables_of_another_shape_are_refused(tmp_path, make, text):
    table = saved_table(tmp_path)
    with pytest.raises(ValueError, match=text):
        sok.restore(tmp_path, {table.table_name: make()})


def test_a_table_without_room_is_refused_and_left_alone(tmp_path):
    table, small = saved_table(tmp_path), new_table(capacity=1)
    small.assign([7], np.ones([1, DIM]))
    with pytest.raises(tf.errors.ResourceExhaustedError, match="all 1 rows are in use"):
        sok.restore(tmp_path, {table.table_name: small})
    assert list(contents(small)) == [7]


def test_keys_that_are_no_row_numbers_are_refused(tmp_path):
    table = new_table()
    table.assign([-1], np.ones([1, DIM]))
    sok.save(tmp_path, table)
    (file,) = shards(tmp_path)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"^{file}: .*key -1 is outside"):
        sok.restore(tmp_path, {table.table_name: new_table(hashed=False)})


def test_another_rule_is_refused_by_name(tmp_path):
    table, optimizer = new_table(), RULES["Adagrad"]()
    train(table, optimizer, range(2))
    sok.save(tmp_path, table, optimizer)
    with pytest.raises(ValueError, match="has rule 'lazy_adam'; 'Adagrad.*' in .* has 'adagrad'"):
        sok.restore(tmp_path, table, RULES["LazyAdam"]())
    other, sgd = new_table(), sok.optimizers.SGD(0.1, name=optimizer.slot_set)
    sgd._slot_set = optimizer.slot_set  # as in another process
    train(other, sgd, range(1))
    with pytest.raises(ValueError, match="'sgd'.*'adagrad'.*rows alone"):
        sok.restore(tmp_path, {table.table_name: other})
    sok.restore(tmp_path, {table.table_name: other}, slots=False)


def test_unknown_tables_and_optimizers_are_refused(tmp_path):
    table = saved_table(tmp_path)
    with pytest.raises(ValueError, match=rf"holds no table 'item.*'. It holds: '{table.table_name}'"):
        sok.restore(tmp_path, new_table())
    with pytest.raises(ValueError, match="step count .*'Adam.*none; give"):
        sok.restore(tmp_path, table, RULES["Adam"]())


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda path, t: sok.save(path, 3), TypeError, "embedding variables, .*a model"),
        (lambda path, t: sok.save(path, []), ValueError, "holds no embedding table"),
        (lambda path, t: sok.save(path, keras.Sequential()), ValueError, "holds no embedding table"),
        (lambda path, t: sok.save(path, t, keras.optimizers.SGD()), TypeError, "keep no slots in tables"),
        (lambda path, t: sok.save(path, t, 2 * [RULES["SGD"]()]), ValueError, "names one twice"),
        (lambda path, t: sok.save(path, t, session=3), ValueError, "`session` .*v1 graph"),
        (lambda path, t: sok.restore(path, {"a": 3}), TypeError, "must give an EmbeddingVariable"),
        (lambda path, t: sok.restore(path, {}), ValueError, "is empty"),
        (lambda path, t: sok.restore(path, {"a": t, "b": t}), ValueError, "names one table twice"),
        (lambda path, t: sok.restore(path / "none", t), FileNotFoundError, "no checkpoint here"),
        (lambda path, t: tf.function(lambda: sok.save(path, t))(), RuntimeError, "outside of tf.function"),
    ],
)
def test_misuse_is_told(tmp_path, call, error, text):
    with pytest.raises(error, match=text):
        call(tmp_path, new_table())


# Files.


def test_a_damaged_file_changes_no_table(tmp_path):
    tables = [new_table(), new_table()]
    for table in tables:
        table.assign([1, 2], np.ones([2, DIM]))
    sok.save(tmp_path, tables)
    for table in tables:
        table.assign([3], np.ones([1, DIM]))
    before = [contents(table) for table in tables]
    last = shards(tmp_path)[-1]
    data = bytearray(last.read_bytes())
    data[150] ^= 1
    last.write_bytes(data)
    with pytest.raises(tf.errors.DataLossError, match=f"{last.name}: at offset .*: wrong checksum"):
        sok.restore(tmp_path, tables)
    assert [contents(table) for table in tables] == before
    assert [last.name in line for line in verify(tmp_path)] == [True]


def test_a_missing_file_is_named(tmp_path):
    table = saved_table(tmp_path)
    (file,) = shards(tmp_path)
    file.unlink()
    with pytest.raises(tf.errors.NotFoundError, match=file.name):
        sok.restore(tmp_path, table)
    assert file.name in verify(tmp_path)[0]


def test_a_file_of_another_save_is_noticed(tmp_path):
    table = saved_table(tmp_path / "a")
    sok.save(tmp_path / "b", table)
    (file,), (foreign,) = shards(tmp_path / "a"), shards(tmp_path / "b")
    file.write_bytes(foreign.read_bytes())
    with pytest.raises(CheckpointError, match=f"{file.name}.*manifest .*generation"):
        sok.restore(tmp_path / "a", table)


def test_all_folders_that_a_save_makes_reach_the_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def recorded(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    folder = tmp_path / "a" / "b" / "c"
    sok.save(folder, new_table())
    made_in = [str(parent) for parent in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")]
    assert [path for path in synced if path in made_in] == made_in
    synced.clear()
    sok.save(folder, new_table())
    assert not set(synced) & set(made_in)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="file"):
        sok.save(tmp_path / "file", new_table())


def test_a_damaged_checkpoint_is_not_replaced(tmp_path):
    table = saved_table(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"dim": 3', '"dim": 4'))
    with pytest.raises(CheckpointError, match="wrong checksum.*sok.save replaces checkpoints, but not"):
        sok.save(tmp_path, table)


def test_names_may_hold_any_character(tmp_path):
    for number, name in enumerate(["tab\tin the middle", 'quote " and \\', "line\nend", "ü/é"]):
        table = sok.EmbeddingVariable(DIM, 10, name=name)
        table.assign([1], np.full([1, DIM], 5.0))
        sok.save(tmp_path / str(number), [table])
        table.erase([1])
        sok.restore(tmp_path / str(number), [table])
        assert table.sparse_read([1]).numpy().tolist() == [[5.0] * DIM]


def test_slots_that_the_manifest_does_not_know_are_noticed(tmp_path):
    table, optimizer = new_table(), RULES["Adagrad"]()
    train(table, optimizer, range(1))
    sok.save(tmp_path, [table], optimizer)
    changed = read_manifest(tmp_path)
    manifest.write_manifest(
        tmp_path,
        dataclasses.replace(changed, tables=(dataclasses.replace(changed.tables[0], slot_sets=()),)),
    )
    with pytest.raises(CheckpointError, match="slot set '.*'adagrad'.*manifest"):
        sok.restore(tmp_path, [table])
    assert len(verify(tmp_path)) == 1


def test_a_manifest_that_may_not_be_on_the_disk_yet_leaves_the_old_files(tmp_path, monkeypatch):
    table = new_table()
    table.assign([1], np.full([1, DIM], 1.0))
    sok.save(tmp_path, [table])
    old = read_manifest(tmp_path).tables[0].files[0].name
    table.assign([1], np.full([1, DIM], 2.0))

    def fail(folder):
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(manifest, "sync_folder", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        sok.save(tmp_path, [table])
    assert (tmp_path / old).exists()
    monkeypatch.undo()
    sok.restore(tmp_path, [table])
    assert table.sparse_read([1]).numpy().tolist() == [[2.0] * DIM]
    sok.save(tmp_path, [table])
    assert not (tmp_path / old).exists()
