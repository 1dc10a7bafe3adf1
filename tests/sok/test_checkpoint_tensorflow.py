"""Tables beside the checkpoints of `tf.train.Checkpoint` and its managers, with one worker."""

import shutil
import warnings

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import CheckpointError, tf_checkpoints
from tests.messages import saying
from tests.sok.checkpoint_cases import DIM, RULES, assert_same_training, contents, new_table, train


def trackables(rule="Adam"):
    return tf.train.Checkpoint(table=new_table(), optimizer=RULES[rule](), weight=tf.Variable(0.0))


def folders(path):
    return sorted(entry.name for entry in path.iterdir() if entry.suffix == ".sok")


@pytest.mark.parametrize("rule", RULES)
def test_a_restored_model_trains_on_as_if_nothing_had_happened(tmp_path, rule):
    saved, other = trackables(rule), trackables(rule)
    saved.weight.assign(3.0)
    train(saved.table, saved.optimizer, range(15))
    path = saved.save(str(tmp_path / "model"))
    assert folders(tmp_path) == ["model-1.sok"]
    other.restore(path).assert_consumed()
    assert (float(other.weight), int(other.optimizer.iterations)) == (3.0, 15)
    assert contents(other.table) == contents(saved.table) != {}
    assert_same_training(saved.table, saved.optimizer, other.table, other.optimizer, range(15, 25))


def test_a_table_with_slots_of_its_own_takes_the_saved_ones_over(tmp_path):
    saved, other = trackables(), trackables()
    train(saved.table, saved.optimizer, range(15))
    train(other.table, other.optimizer, range(3))
    other.restore(saved.save(str(tmp_path / "model"))).assert_consumed()
    assert contents(other.table) == contents(saved.table)
    assert_same_training(saved.table, saved.optimizer, other.table, other.optimizer, range(15, 25))


@pytest.mark.parametrize("rule", ["Adagrad", "Adam"])
def test_a_table_that_is_made_after_the_restore_gets_its_rows_then(tmp_path, rule):
    saved = trackables(rule)
    train(saved.table, saved.optimizer, range(15))
    path = saved.save(str(tmp_path / "model"))
    late = tf.train.Checkpoint(weight=tf.Variable(0.0))
    status = late.restore(path)
    with pytest.raises(AssertionError):
        status.assert_consumed()

    @tf.function
    def make():  # in a function, as lazy layers do
        if not hasattr(late, "table"):
            late.table = new_table()
        return late.table.size()

    assert int(make()) == int(saved.table.size())
    late.optimizer = RULES[rule]()
    status.assert_consumed()
    assert_same_training(saved.table, saved.optimizer, late.table, late.optimizer, range(15, 25))


def test_an_optimizer_that_is_not_in_the_checkpoint_counts_on(tmp_path):
    saved, optimizer = tf.train.Checkpoint(table=new_table()), RULES["Adam"]()
    train(saved.table, optimizer, range(15))
    path = saved.write(str(tmp_path / "model"))
    other, fresh = tf.train.Checkpoint(table=new_table()), RULES["Adam"]()
    other.read(path)
    assert_same_training(saved.table, optimizer, other.table, fresh, range(15, 25))


def test_two_tables_are_told_apart_by_where_they_are_in_the_checkpoint(tmp_path):
    first, second = new_table(), new_table()
    first.assign([1], np.full([1, DIM], 1.0))
    second.assign([2], np.full([1, DIM], 2.0))
    path = tf.train.Checkpoint(a=first, b=[second]).save(str(tmp_path / "model"))
    a, b = new_table(), new_table()
    tf.train.Checkpoint(b=[b], a=a).restore(path).assert_consumed()
    assert (contents(a), contents(b)) == (contents(first), contents(second))


def test_two_optimizers_that_took_one_name_over_do_not_share_slots(tmp_path):
    saved = tf.train.Checkpoint(a=new_table(), b=new_table(), optimizer=RULES["Adam"]())
    for table in (saved.a, saved.b):
        train(table, saved.optimizer, range(3))
    other = tf.train.Checkpoint(a=new_table(), b=new_table())
    other.restore(saved.save(str(tmp_path / "model")))
    mine, yours = RULES["Adam"](), RULES["Adam"]()
    train(other.a, mine, range(3, 5))
    train(other.b, yours, range(3, 5))
    assert mine.slot_set == yours.slot_set
    before = contents(other.a)
    with pytest.raises(ValueError, match=saying("Two optimizers named 'Adam", "' would share", "slots")):
        train(other.a, yours, range(5, 6))
    assert contents(other.a) == before


def test_a_restore_inside_a_function_works(tmp_path):
    saved = trackables()
    train(saved.table, saved.optimizer, range(3))
    prefix = str(tmp_path / "in_function")
    tf.function(lambda: saved.write(prefix))()
    assert folders(tmp_path) == ["in_function.sok"]
    other = trackables()
    other.read(prefix).assert_consumed()
    assert contents(other.table) == contents(saved.table)


def test_tables_of_checkpoints_that_a_manager_deletes_go_with_the_next_save(tmp_path):
    saved = trackables()
    manager = tf.train.CheckpointManager(saved, str(tmp_path), max_to_keep=2)
    (tmp_path / "ckpt-0.sok").mkdir()  # not of ours
    (tmp_path / "other-1.sok").mkdir()
    for _ in range(4):
        path = manager.save()
        train(saved.table, saved.optimizer, range(1))
    assert path.endswith("ckpt-4")
    assert folders(tmp_path) == ["ckpt-0.sok", "ckpt-2.sok", "ckpt-3.sok", "ckpt-4.sok", "other-1.sok"]
    manager.save()
    assert folders(tmp_path) == ["ckpt-0.sok", "ckpt-3.sok", "ckpt-4.sok", "ckpt-5.sok", "other-1.sok"]
    expected = contents(saved.table)
    train(saved.table, saved.optimizer, range(1, 3))
    assert manager.restore_or_initialize().endswith("ckpt-5")
    assert contents(saved.table) == expected


def test_tables_of_checkpoints_that_a_manager_keeps_for_good_stay(tmp_path):
    saved = trackables()
    manager = sok.CheckpointManager(saved, tmp_path, max_to_keep=1, keep_checkpoint_every_n_hours=1e-9)
    for number in (np.int64(3), 4, 5):
        manager.save(number)
    left = sorted(path.stem for path in tmp_path.glob("ckpt-*.index"))
    assert len(left) > 1 and folders(tmp_path) == [f"{name}.sok" for name in left]


def test_remote_file_systems_are_refused_by_name(tmp_path):
    for prefix in ("gs://bucket/ckpt-1", "file:///tmp/ckpt-1"):
        with pytest.raises(ValueError, match=f"{prefix}: .*folders"):
            tf_checkpoints.folder_of(prefix)


def test_a_checkpoint_without_tables_restores_the_rest_and_says_so(tmp_path):
    saved = trackables()
    saved.weight.assign(3.0)
    path = saved.save(str(tmp_path / "model"))
    shutil.rmtree(path + ".sok")
    saved.weight.assign(0.0)
    saved.table.assign([1], np.ones([1, DIM]))
    with pytest.warns(UserWarning, match=f"No rows .*'{saved.table.table_name}'"):
        saved.restore(path).assert_consumed()
    assert float(saved.weight) == 3.0
    assert sorted(contents(saved.table)) == [1]


def test_what_is_damaged_is_an_error_and_changes_no_table(tmp_path):
    saved = trackables()
    train(saved.table, saved.optimizer, range(3))
    path = saved.save(str(tmp_path / "model"))
    before = contents(saved.table)
    (shard,) = (tmp_path / "model-1.sok").glob("*.shard")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9])
    with pytest.raises((tf.errors.OpError, ValueError), match=str(shard)):
        saved.restore(path)
    shard.write_bytes(whole)
    objects = tmp_path / "model-1.sok" / "objects.json"
    for text in ("{", "[]", '{"format": "?", "tables": {}}', '{"format": 1, "tables": {"a": 1}}'):
        objects.write_text(text)
        with pytest.raises(CheckpointError, match=f"{objects}: damaged"):
            saved.restore(path)
    objects.unlink()  # by name, then
    saved.restore(path)
    assert contents(saved.table) == before


def test_asynchronous_checkpoints_are_refused(tmp_path):
    saved = trackables()
    options = tf.train.CheckpointOptions(enable_async=True)
    with pytest.raises(ValueError, match="Asynchronous .*embedding table"):
        saved.save(str(tmp_path / "model"), options)
    assert folders(tmp_path) == []


def test_no_warning_where_rows_are_saved(tmp_path):
    saved = trackables()
    train(saved.table, saved.optimizer, range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        path = saved.save(str(tmp_path / "model"))
        saved.restore(path).assert_consumed()


def test_another_process_goes_on(forked, tmp_path):
    program = """
import sys
import tensorflow as tf
from tests.sok.checkpoint_cases import RULES, new_table, train
c = tf.train.Checkpoint(table=new_table(), optimizer=RULES["Adam"]())
manager = tf.train.CheckpointManager(c, sys.argv[1], 1)
manager.restore_or_initialize()
begin = int(c.optimizer.iterations)
print(train(c.table, c.optimizer, range(begin, begin + 10)))
manager.save()
"""
    losses = []
    for _ in range(2):
        ended = forked.run(program, tmp_path, str(tmp_path / "saves"))
        assert ended.status == 0, ended.stderr[-3000:]
        losses += eval(ended.stdout)
    np.testing.assert_allclose(losses, train(new_table(), RULES["Adam"](), range(20)), rtol=1e-6)


def test_sok_save_and_the_folder_beside_are_one_format(tmp_path):
    saved = trackables()
    train(saved.table, saved.optimizer, range(3))
    path = saved.save(str(tmp_path / "model"))
    other = new_table()
    sok.restore(path + ".sok", {saved.table.table_name: other})
    assert contents(other) == contents(saved.table)


def test_checkpoints_of_v1_graphs_leave_rows_out_and_say_so(tmp_path):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        checkpoint = tf.train.Checkpoint(table=sok.EmbeddingVariable(DIM, 10, name="of_graph"))
        session.run(tf.compat.v1.global_variables_initializer())
        with pytest.warns(UserWarning, match="rows .*'of_graph' .*not saved"):
            path = checkpoint.save(str(tmp_path / "model"))
        with pytest.warns(UserWarning, match="No rows .*'of_graph'"):
            checkpoint.restore(path).initialize_or_restore(session)
    assert folders(tmp_path) == []


class V1Model(tf.train.Checkpoint):
    """A table and a dense weight, which an optimizer of TF 1 trains."""

    def __init__(self, given=False):
        tables_own = sok.optimizers.LazyAdam(0.02, name="given") if given else None
        super().__init__(
            table=new_table(),
            weight=tf.Variable([1.0, 2.0]),
            optimizer=sok.DistributedOptimizer(tf.compat.v1.train.AdamOptimizer(0.1), tables_own),
        )

    def step(self, number):
        with tf.GradientTape() as tape:
            rows = tf.reduce_sum(sok.all2all_dense_embedding(self.table, tf.constant([number % 5, 7], tf.int64)))
            loss = tf.reduce_sum(tf.square(self.weight)) + tf.square(rows - 1.0)
        variables = [self.weight, self.table]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return float(loss)


@pytest.mark.parametrize("given", [False, True], ids=["matching", "given"])
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_an_optimizer_of_tf_1_goes_on_with_slots_and_powers(tmp_path, given, stepped):
    saved, other = V1Model(given), V1Model(given)
    for number in range(4):
        saved.step(number)
    if given:
        saved.optimizer.embedding_optimizer.learning_rate = 0.005
    path = saved.save(str(tmp_path / "model"))
    if stepped:
        other.step(0)
    status = other.restore(path)
    losses = [saved.step(number) for number in range(4, 8)]
    np.testing.assert_allclose([other.step(number) for number in range(4, 8)], losses, rtol=1e-6)
    status.assert_consumed()  # what was made late, too
    for name in ("m", "v"):
        expected = saved.optimizer.get_slot(saved.weight, name)
        np.testing.assert_array_equal(other.optimizer.get_slot(other.weight, name), expected)
        expected = saved.optimizer.get_slot(saved.table, name)
        np.testing.assert_allclose(other.optimizer.get_slot(other.table, name), expected, rtol=1e-6)


def test_the_inner_optimizer_alone_is_that_of_a_model_without_sok(tmp_path):
    saved = V1Model()
    for number in range(3):
        saved.step(number)
    path = tf.train.Checkpoint(weight=saved.weight, optimizer=saved.optimizer.inner).save(str(tmp_path / "dense"))
    plain = tf.train.Checkpoint(weight=tf.Variable([0.0, 0.0]), optimizer=tf.compat.v1.train.AdamOptimizer(0.1))
    plain.restore(path)
    gradient = tf.constant([0.5, -2.0])
    plain.optimizer.apply_gradients([(gradient, plain.weight)])
    saved.optimizer.apply_gradients([(gradient, saved.weight)])
    np.testing.assert_array_equal(plain.weight, saved.weight)


def test_an_optimizer_of_tf_1_in_a_graph_goes_on(tmp_path):
    v1 = tf.compat.v1
    path, found = None, []
    for restores in (False, True):
        with tf.Graph().as_default(), v1.Session() as session:
            table = sok.EmbeddingVariable(DIM, 10, name="of_v1_optimizer", initializer="ones")
            weight = tf.Variable([1.0, 2.0])
            optimizer = sok.DistributedOptimizer(v1.train.AdamOptimizer(0.1))
            rows = tf.reduce_sum(sok.all2all_dense_embedding(table, tf.constant([3], tf.int64)))
            loss = tf.reduce_sum(tf.square(weight)) + tf.square(rows)
            train = optimizer.minimize(loss, var_list=[weight, table])
            checkpoint = tf.train.Checkpoint(weight=weight, optimizer=optimizer)
            session.run(v1.global_variables_initializer())
            if restores:
                checkpoint.restore(path).assert_consumed().run_restore_ops(session)
                sok.restore(tmp_path / "rows", table, session=session)
            else:
                for _ in range(3):
                    session.run(train)
                path = checkpoint.save(str(tmp_path / "model"))
                sok.save(tmp_path / "rows", table, session=session)
            for _ in range(2):
                session.run(train)
            steps = optimizer.embedding_optimizer.iterations
            found.append([session.run([weight, *(optimizer.get_slot(weight, n) for n in ("m", "v")), steps, loss])])
    np.testing.assert_equal(found[1], found[0])
    assert found[0][0][3] == 5
