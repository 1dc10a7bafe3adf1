"""SOK v2's variables in everything that saves, and in what else the library asks of a table."""

import inspect

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import read_manifest
from sok.table import state as table_state
from tests.sok.checkpoint_cases import contents
from tests.sok.threads_world import checked, run_world

DIM = 2
KINDS = {
    "dynamic": lambda name: sok.DynamicVariable(DIM, name=name),
    "hybrid": lambda name: sok.DynamicVariable(DIM, name=name, var_type="hybrid", key_type=tf.int32, initializer="1"),
    "localized": lambda name: sok.DynamicVariable(DIM, name=name, mode="localized:0"),
    "static": lambda name: sok.Variable(np.zeros([100, DIM], np.float32), name=name),
    "shaped": lambda name: sok.Variable(shape=(100, DIM), initializer="ones", name=name),
}


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


def step(table, optimizer, keys):
    """Trains the rows of `keys`."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(sok.all2all_dense_embedding(table, tf.constant(keys, tf.int64)) - 3.0))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])


@pytest.fixture
def trained(make):
    table, optimizer = make("item"), sok.optimizers.Adagrad(0.5)
    step(table, optimizer, [1, 7, 7, 40])
    return table, optimizer


def test_rows_and_slots_come_back(tmp_path, trained):
    table, optimizer = trained
    before = contents(table)
    sok.save(tmp_path, table, optimizer)
    step(table, optimizer, [1, 9])
    assert contents(table) != before
    sok.restore(tmp_path, table, optimizer)
    assert contents(table) == before


@pytest.mark.parametrize("background", [False, True])
def test_increments_come_back(tmp_path, trained, background):
    table, optimizer = trained

    def save():
        work = sok.save(tmp_path, table, optimizer, incremental=True, asynchronous=background)
        if background:
            work.result()

    save()
    step(table, optimizer, [1, 9])
    save()
    assert len(read_manifest(tmp_path).links) == 2
    before = contents(table)
    step(table, optimizer, [1, 11])
    sok.restore(tmp_path, table, optimizer)
    assert contents(table) == before


def test_a_checkpoint_of_tensorflow_holds_them(tmp_path, trained):
    table, optimizer = trained
    before = contents(table)
    checkpoint = tf.train.Checkpoint(table=table, optimizer=optimizer)
    manager = sok.CheckpointManager(checkpoint, tmp_path, max_to_keep=1)
    manager.save()
    path = checkpoint.save(str(tmp_path / "plain" / "ckpt"))
    for restore in (manager.restore_or_initialize, lambda: checkpoint.restore(path)):
        step(table, optimizer, [1, 9])
        restore()
        assert contents(table) == before


@pytest.mark.filterwarnings("ignore:Table 'served.*has another seed")
def test_another_table_follows_them(tmp_path, make, trained):
    table, optimizer = trained
    sok.save(tmp_path, table, optimizer)
    served = make("served")
    follower = sok.follow(tmp_path, {table.table_name: served})
    assert follower.poll()
    step(table, optimizer, [1, 9])
    sok.save(tmp_path, table, optimizer, incremental=True)
    assert follower.poll()
    assert {key: row[0] for key, row in contents(served).items()} == {
        key: row[0] for key, row in contents(table).items()
    }


def test_files_of_other_systems_hold_them(tmp_path, trained):
    table, optimizer = trained
    keys, rows = (column.numpy().tolist() for column in sok.export(table))
    files = tmp_path / "keys.npy", tmp_path / "values.npy"
    sok.dump(str(tmp_path / "dump"), table, optimizer)
    sok.save_npy(table, *files)
    for load in (lambda: sok.load(str(tmp_path / "dump"), table, optimizer), lambda: sok.load_npy(table, *files)):
        table.assign([1], np.zeros([1, DIM], np.float32))
        load()
        found_keys, found_rows = (column.numpy().tolist() for column in sok.export(table))
        assert (found_keys, found_rows) == (keys, rows)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
@pytest.mark.filterwarnings("ignore:Table '.*has another seed")
def test_workers_save_and_another_number_of_them_restores(tmp_path, monkeypatch, before, after):
    keys = np.array([0, 1, 5, 2**40, -3])
    rows = np.arange(len(keys) * DIM, dtype=np.float32).reshape(-1, DIM)

    def tables():
        return [sok.DynamicVariable(DIM, name="all"), sok.DynamicVariable(DIM, name="one", mode="localized:0")]

    def save(transport):
        for table in (made := tables()):
            table.assign(keys, rows)
        sok.save(tmp_path, made)

    def restore(transport):
        sok.restore(tmp_path, made := tables())
        return [dict(zip(k.numpy().tolist(), r.numpy().tolist(), strict=True)) for k, r in map(sok.export, made)]

    checked(run_world(before, save, monkeypatch))
    found = checked(run_world(after, restore, monkeypatch))
    expected = dict(zip(keys.tolist(), rows.tolist(), strict=True))
    assert found[0][1] == expected and not any(one for _, one in found[1:])
    assert [set(of_rank) for of_rank, _ in found] == [{k for k in expected if k % after == r} for r in range(after)]
    assert {k: row for of_rank, _ in found for k, row in of_rank.items()} == expected


def test_a_session_saves_and_restores_them(tmp_path, make):
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        table = make("item")
        read, rows = table.num_rows(), table.export()
        fill, clear = (table.assign([1, 7], np.full([2, DIM], value, np.float32)) for value in (2.0, 0.0))
        session.run(v1.global_variables_initializer())
        session.run(fill)
        before, number = session.run(rows), session.run(read)
        sok.save(tmp_path, table, session=session)
        session.run(clear)
        sok.restore(tmp_path, table, session=session)
        assert session.run(read) == number
        after = session.run(rows)
    assert sorted(map(str, zip(*after, strict=True))) == sorted(map(str, zip(*before, strict=True)))


def test_what_sok_says_of_a_dynamic_variable_is_not_what_a_table_is_asked():
    table = sok.DynamicVariable(DIM, name="words")
    table.assign([4, 2**40], np.ones([2, DIM], np.float32))
    assert table.size.numpy().tolist() == [2, DIM]
    assert (int(table.num_rows()), int(table.total_size())) == (2, 2)
    plain = sok.EmbeddingVariable(DIM, 10, name="words")
    assert (int(plain.size()), int(plain.num_rows())) == (0, 0)


def test_only_words_that_the_library_does_not_use_mean_something_else():
    """What is a method of a table is one of its kinds too, but for those that scripts for SOK v2 use."""
    for kind in (sok.DynamicVariable, type(sok.Variable([[1.0]]))):
        for name, member in vars(kind).items():
            of_a_table = inspect.getattr_static(sok.EmbeddingVariable, name, None)
            if callable(of_a_table) and not name.startswith("__") and not callable(member):
                assert (kind, name) == (sok.DynamicVariable, "size")
    assert table_state.slot_sets(sok.DynamicVariable(DIM)) == []
