"""What is done with a table of any kind; each says with NumPy what must come of it. On any number of workers."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.job import context
from sok.lookup.lookup import lookup_rows
from tests.matrix.case import Case, Trained
from tests.matrix.kinds import DIM, NUM_ROWS, OVER_A_FILE, WITH_POLICIES, Kind
from tests.matrix.refusals import refusal_of
from tests.placements import ALL_PLACEMENTS
from tests.reference import combine as reference

v1 = tf.compat.v1


def look_up(case: Case) -> None:
    it = case.fresh()
    keys = case.kind.pool()[:6]
    rows = np.arange(18, dtype=np.float32).reshape(6, DIM) - 8
    it.made.table.assign(keys, rows)
    it.judge.store(keys, rows)
    asked = np.concatenate([keys[::-1], keys[:2], case.kind.pool()[6:8]])  # two have no row yet
    np.testing.assert_array_equal(it.made.rows(asked, training=True), it.judge.of(asked).astype(np.float32))
    it.judge.look_up(asked)
    case.check(it.made, it.judge)
    assert it.made.rows(asked[:0]).shape == (0, DIM)
    assert it.made.table.table_name in repr(it.made.table)


def look_up_in_a_group(case: Case) -> None:
    it, other = case.fresh(), sok.EmbeddingVariable(2, 50, name=f"{case.name}_beside", seed=1)
    plain = tf.Variable(np.arange(20, dtype=np.float32).reshape(10, 2))
    keys, splits = case.kind.pool()[[3, 1, 3, 0, 5]], np.array([0, 2, 2, 5])
    weights = np.array([0.5, 2, 1, 1, 0.25], np.float32)
    ids = tf.RaggedTensor.from_row_splits(keys, splits)
    small = tf.RaggedTensor.from_row_splits(np.array([1, 2, 3, 4, 5], np.int64), splits)
    pooled, again, beside, dense = sok.group_embedding_lookup_sparse(
        [it.made.table, it.made.table, other, plain],
        [ids, ids, small, small],
        ["mean", "sum", "sum", "sqrtn"],
        sp_weights=[tf.RaggedTensor.from_row_splits(weights, splits), None, None, None],
    )
    rows, places = it.judge.of(keys).astype(np.float32), np.arange(5)
    np.testing.assert_allclose(pooled, reference.combine(rows, places, splits, weights, "mean"), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(again, reference.combine(rows, places, splits, None, "sum"), rtol=1e-5, atol=1e-6)
    of_other = lookup_rows(other, small.values, training=False).numpy()
    np.testing.assert_allclose(beside, reference.combine(of_other, places, splits, None, "sum"), rtol=1e-5, atol=1e-6)
    of_plain = plain.numpy()[small.values]
    np.testing.assert_allclose(dense, reference.combine(of_plain, places, splits, None, "sqrtn"), rtol=1e-5)


def train(case: Case) -> None:
    it = case.trained(steps=4)
    case.check(it.made, it.judge)


def train_in_a_function(case: Case) -> None:
    it = case.fresh()

    @tf.function(input_signature=[tf.TensorSpec([None], it.made.key_dtype)])
    def step(keys: tf.Tensor) -> None:
        case.step(it, keys)

    case.train(it, 4, lambda it, keys: step(keys))
    case.check(it.made, it.judge)


def refuse_what_does_not_fit(case: Case) -> None:
    it = case.trained(steps=1)
    if case.kind.hashed:
        # More than fit on each worker, also by hash: where one is full, the others keep the rows that they have made.
        keys = tf.cast(tf.range(2 * NUM_ROWS * case.world) + 50, it.made.key_dtype)
        error, said = tf.errors.ResourceExhaustedError, [str(case.kind.capacity)]
    else:
        beyond = case.kind.capacity * case.kind.placed.num_shards(case.world)
        keys = tf.constant([1, beyond], it.made.key_dtype)
        error, said = tf.errors.InvalidArgumentError, [str(int(keys[1]))]
    with pytest.raises(error) as raised:
        it.made.rows(keys)
    for words in (it.made.table.table_name, *said):
        assert words in str(raised.value)
    case.go_on(it.made, it.optimizer, it.judge, steps=1)


def save_and_restore(case: Case) -> None:
    it = case.trained()
    sok.save(case.folder, it.made.table, it.optimizer)
    other, optimizer = case.make("_other"), case.rule.make()
    sok.restore(case.folder, {it.made.table.table_name: other.table}, optimizer)
    case.go_on(other, optimizer, it.judge)


def restore_rows_alone(case: Case) -> None:
    it = case.trained()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the step count is not there, which nobody asks for
        sok.save(case.folder, it.made.table)
    other, optimizer = case.make("_other"), case.rule.make()
    sok.restore(case.folder, {it.made.table.table_name: other.table}, slots=False)
    it.judge.restart()
    case.go_on(other, optimizer, it.judge)


def restore_at_other_numbers_of_workers(case: Case) -> None:
    """All of them save and one restores; that one goes on, saves, and all of them restore."""
    it, rank = case.trained(), sok.rank()
    sok.save(case.folder / "of_all", it.made.table, it.optimizer)
    with case.alone():
        # All ranks make what has a name, or names of later ones would differ.
        single, optimizer = case.make("_single"), case.rule.make()
        getattr(optimizer, "embedding_optimizer", None)
        if rank == 0:
            sok.restore(case.folder / "of_all", {it.made.table.table_name: single.table}, optimizer)
            case.check(single, it.judge)
            sok.save(case.folder / "of_one", single.table, optimizer)
    context.get_transport().barrier(f"{case.name}/saved")
    other, optimizer = case.make("_other"), case.rule.make()
    sok.restore(case.folder / "of_one", {single.table.table_name: other.table}, optimizer)
    case.go_on(other, optimizer, it.judge)


def erase_one(it: Trained) -> None:
    gone = np.array([min(it.judge.seen or it.judge.counts)]).astype(it.judge.keys.dtype)
    it.made.table.erase(gone)
    it.judge.forget(gone)


def save_increments(case: Case) -> None:
    it = case.trained()
    for _ in range(3):
        sok.save(case.folder, it.made.table, it.optimizer, incremental=True)
        erase_one(it)
        case.train(it, 1)
    sok.save(case.folder, it.made.table, it.optimizer, incremental=True)
    assert len(sok.checkpoint.read_manifest(case.folder).links) == 4
    for _ in range(2):
        other, optimizer = case.make("_other"), case.rule.make()
        sok.restore(case.folder, {it.made.table.table_name: other.table}, optimizer)
        case.check(other, it.judge)
        if sok.rank() == 0:
            sok.compact(case.folder)
        context.get_transport().barrier(f"{case.name}/compacted")
    case.go_on(other, optimizer, it.judge)


def reshard(case: Case) -> None:
    """To some other placements and back; what has changed since a save comes along."""
    it, home = case.trained(), case
    sok.save(case.folder, it.made.table, it.optimizer)
    others = [name for name in ALL_PLACEMENTS if name != case.kind.placement]
    for name in [*np.random.default_rng(len(case.name) + ord(case.rule_name[-1])).permutation(others)[:2], None]:
        erase_one(it)
        case.train(it, 1)
        kind = home.kind if name is None else dataclasses.replace(case.kind, placement=str(name))
        placement = kind.placed
        if refused_by(kind, case.rule.by_row):
            with pytest.raises(ValueError, match="placement|cuts"):
                it.made.table.reshard(placement)
            case.check(it.made, it.judge)
            continue
        it.made.table.reshard(placement)
        assert it.made.table.placement == placement
        case = dataclasses.replace(case, kind=kind)
        case.go_on(it.made, it.optimizer, it.judge, steps=1)
    sok.save(case.folder, it.made.table, it.optimizer, incremental=True)
    assert len(sok.checkpoint.read_manifest(case.folder).links) == 2  # it is by changes still
    other, optimizer = case.make("_other"), case.rule.make()
    sok.restore(case.folder, {it.made.table.table_name: other.table}, optimizer)
    case.go_on(other, optimizer, it.judge)


def refused_by(kind: Kind, by_row: bool) -> bool:
    """Whether a table of that kind cannot be, or cannot be trained so."""
    if refusal_of(kind) is not None:
        return True
    return kind.placed.cuts_rows and (by_row or kind.maker == WITH_POLICIES)


def save_while_training(case: Case) -> None:
    it = case.trained()
    saving = sok.save(case.folder, it.made.table, it.optimizer, asynchronous=True)
    beside = copy.deepcopy(it.judge)
    case.train(it, 3)
    case.check(it.made, it.judge)
    saving.result()
    other, optimizer = case.make("_other"), case.rule.make()
    sok.restore(case.folder, {it.made.table.table_name: other.table}, optimizer)
    case.go_on(other, optimizer, beside)


def save_by_version(case: Case) -> None:
    it = case.trained()
    saving = sok.save(case.folder, it.made.table, it.optimizer, asynchronous=True, versions=True)
    beside = copy.deepcopy(it.judge)
    case.train(it, 3)
    erase_one(it)
    case.check(it.made, it.judge)
    saving.result()
    other, optimizer = case.make("_other"), case.rule.make()
    sok.restore(case.folder, {it.made.table.table_name: other.table}, optimizer)
    case.go_on(other, optimizer, beside)


def manage_checkpoints(case: Case) -> None:
    it = case.trained()
    step = tf.Variable(3)
    checkpoint = tf.train.Checkpoint(table=it.made.table, step=step, **_tracked(it.optimizer))
    path = sok.CheckpointManager(checkpoint, case.folder, max_to_keep=2).save()
    other, optimizer, step = case.make("_other"), case.rule.make(), tf.Variable(0)
    tracked = _tracked(optimizer)
    checkpoint = tf.train.Checkpoint(table=other.table, step=step, **tracked)
    assert sok.CheckpointManager(checkpoint, case.folder, max_to_keep=2).restore_or_initialize() == path
    assert int(step) == 3
    case.check(other, it.judge)
    if tracked:
        case.go_on(other, optimizer, it.judge)


def save_with_tensorflow(case: Case) -> None:
    it = case.trained()
    other, optimizer = case.make("_other"), case.rule.make()
    checkpoint = tf.train.Checkpoint(table=it.made.table, **_tracked(it.optimizer))
    path = str(case.folder / f"ckpt_of_{sok.rank()}")
    if case.world > 1:  # one worker of several cannot save what the others hold
        with pytest.warns(UserWarning, match=f"{it.made.table.table_name}.*not saved"):
            checkpoint.write(path)
        return
    path = checkpoint.write(path)
    tf.train.Checkpoint(table=other.table, **_tracked(optimizer)).restore(path)
    case.check(other, it.judge)
    if _tracked(optimizer):
        case.go_on(other, optimizer, it.judge)


def _tracked(optimizer: object) -> dict:
    """What a checkpoint of TensorFlow can hold."""
    return {"optimizer": optimizer} if isinstance(optimizer, tf.__internal__.tracking.Trackable) else {}


def follow(case: Case) -> None:
    it, served = case.fresh(), case.make("_served")
    follower = sok.follow(case.folder, {it.made.table.table_name: served.table}, slots=True)
    for _ in range(3):
        case.train(it, 1)
        erase_one(it)
        sok.save(case.folder, it.made.table, it.optimizer, incremental=True)
        assert follower.poll()
        case.check(served, it.judge)
    assert not follower.poll()


def export_for_serving(case: Case) -> None:
    _export(case, native=False)


def export_for_serving_natively(case: Case) -> None:
    _export(case, native=True)


def _export(case: Case, native: bool) -> None:
    it = case.trained()

    class Model(tf.Module):
        def __call__(self, ids: tf.Tensor) -> tf.Tensor:
            return it.made.rows(ids, training=False)

    path = str(case.folder / "1")
    spec = tf.TensorSpec([None], it.made.key_dtype, "ids")
    (table,) = sok.export_saved_model(Model(), path, signatures=spec, native=native).tables
    assert table.name == it.made.table.table_name
    if sok.rank() == 0:
        served = tf.saved_model.load(path).signatures["serving_default"]
        rows = served(ids=tf.constant(it.judge.keys))["output_0"]
        np.testing.assert_allclose(rows, it.judge.rows, rtol=1e-4, atol=2e-5)
    case.go_on(it.made, it.optimizer, it.judge, steps=1)


def dump_and_load(case: Case) -> None:
    it = case.trained()
    if case.rule_name == "Nadam":  # of which SOK has no names
        with pytest.raises(ValueError, match="no names for the state of Nadam"):
            sok.dump(case.folder, it.made.table, it.optimizer)
        sok.dump(case.folder, it.made.table)
        it.made.table.assign(it.judge.keys, np.zeros([len(it.judge.keys), DIM], np.float32))
        sok.load(case.folder, it.made.table)
        return case.check(it.made, it.judge, exactly=False)
    sok.dump(case.folder, it.made.table, it.optimizer)
    before = copy.deepcopy(it.judge)
    case.train(it, 2)
    sok.load(case.folder, it.made.table, it.optimizer)
    before.steps = it.judge.steps  # which is not in the files
    case.check(it.made, before, exactly=False)
    case.train(Trained(it.made, it.optimizer, before), 1)
    case.check(it.made, before, exactly=False)


def write_and_read_npy(case: Case) -> None:
    it, other = case.trained(), case.make("_other")
    files = case.folder / "keys.npy", case.folder / "rows.npy"
    sok.save_npy(it.made.table, *files)
    sok.load_npy(other.table, *files)
    case.check(other, it.judge)


def write_and_read_files_of_sok_v1(case: Case) -> None:
    it = case.trained()
    sok.Saver().dump_to_file(it.made.table, case.folder)
    it.made.table.assign(it.judge.keys, np.zeros([len(it.judge.keys), DIM], np.float32))
    sok.Saver().restore_from_file(it.made.table, case.folder)
    case.check(it.made, it.judge, exactly=False)


def assign_and_export(case: Case) -> None:
    it, other = case.trained(), case.make("_other")
    keys, rows = case.contents(it.made)
    sok.assign(other.table, keys.astype(other.table.key_dtype.as_numpy_dtype), rows)
    case.check(other, it.judge)
    keys, rows = sok.export(other.table)
    assert keys.dtype == other.key_dtype and rows.shape == (len(keys), other.table.local_dim)
    np.testing.assert_array_equal(keys, np.sort(keys))


def erase(case: Case) -> None:
    it = case.trained()
    gone = case.kind.pool()[[0, 1, 4, -1]]
    expected = len(it.judge.seen & {int(key) for key in gone})
    count = it.made.table.erase(gone)
    count = context.get_transport().grouped_all_reduce([count], "matrix/erased", average=False)[0]
    assert int(count) == expected * case.num_holders(0) > 0
    it.judge.forget(gone)
    case.check(it.made, it.judge)
    rows = lookup_rows(it.made.table, tf.cast(gone, it.made.table.key_dtype), training=False)
    np.testing.assert_allclose(rows, it.judge.of(gone), rtol=1e-6)
    case.go_on(it.made, it.optimizer, it.judge)


def reserve(case: Case) -> None:
    it = case.trained(steps=1)
    it.made.table.reserve(case.kind.capacity)
    case.go_on(it.made, it.optimizer, it.judge)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        it.made.table.reserve(case.kind.capacity + 1)
    for words in (it.made.table.table_name, str(case.kind.capacity), str(case.kind.capacity + 1)):
        assert words in str(raised.value)
    case.check(it.made, it.judge)


def copy_and_pickle(case: Case) -> None:
    it = case.trained(steps=1)
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError) as raised:
            make(it.made.table)
        assert it.made.table.table_name in str(raised.value) and "sok.save" in str(raised.value)
    if it.made.copies is not None:
        configured = it.made.copies
        twin = type(configured).from_config(configured.get_config())
        assert twin.get_config() == configured.get_config()
        assert copy.copy(configured).get_config() == configured.get_config()
    case.check(it.made, it.judge)


def get_and_set_weights(case: Case) -> None:
    it, other = case.trained(), case.make("_other")
    for made in (it.made, other):
        made.rows(case.kind.pool()[:1], training=False)  # Keras builds a layer when it is called
    other.layer.set_weights(it.made.layer.get_weights())
    case.check(other, it.judge)


def use_in_a_v1_graph(case: Case) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        made, optimizer = case.make(), RULES_OF_SESSIONS.get(case.rule_name, case.rule.make)()
        keys = v1.placeholder(made.key_dtype, [None])
        rows = made.rows(keys)
        asked = lookup_rows(made.table, tf.constant(case.kind.pool(), made.table.key_dtype), training=False)
        gradient = tf.gradients(tf.reduce_sum(tf.square(rows - 1.0)) / 2, [made.table])
        update = optimizer.apply_gradients([(gradient[0], made.table)])
        session.run(v1.global_variables_initializer())
        judge = case.judge(made, session.run(asked))

        def step() -> None:
            batches = case.batches(judge.steps)
            before, _ = session.run([rows, update], {keys: batches[sok.rank()]})
            np.testing.assert_allclose(before, judge.of(batches[sok.rank()]), rtol=1e-4, atol=2e-5)
            judge.train(batches)

        for _ in range(3):
            step()
        np.testing.assert_allclose(session.run(asked), judge.rows, rtol=1e-4, atol=2e-5)
        sok.save(case.folder, made.table, optimizer, session=session)
        kept = copy.deepcopy(judge)
        step()
        sok.restore(case.folder, made.table, optimizer, session=session)
        judge = kept
        step()
        np.testing.assert_allclose(session.run(asked), judge.rows, rtol=1e-4, atol=2e-5)


# Keras 3's optimizers do not work in sessions: there users have those of v1.
RULES_OF_SESSIONS = {
    "wrapped Adam": lambda: sok.OptimizerWrapper(v1.train.AdamOptimizer(0.1, epsilon=1e-7)),
    "wrapped momentum": lambda: sok.OptimizerWrapper(v1.train.MomentumOptimizer(0.1, 0.9)),
    "distributed Adam": lambda: sok.DistributedOptimizer(v1.train.AdamOptimizer(0.1, epsilon=1e-7)),
}


@dataclasses.dataclass(frozen=True)
class Operation:
    run: Callable[[Case], None]
    trains: bool = True  # so that it is worth running with every rule
    applies: Callable[[Kind], bool] = lambda kind: True

    @property
    def name(self) -> str:
        return self.run.__name__


OPERATIONS = [
    Operation(look_up, trains=False),
    Operation(look_up_in_a_group, trains=False),
    Operation(train),
    Operation(train_in_a_function),
    Operation(refuse_what_does_not_fit, applies=lambda kind: kind.maker != WITH_POLICIES),  # candidates fit
    Operation(save_and_restore),
    Operation(restore_rows_alone),
    Operation(restore_at_other_numbers_of_workers),
    Operation(save_increments),
    Operation(reshard),
    Operation(save_while_training),
    Operation(save_by_version, applies=lambda kind: kind.maker == OVER_A_FILE),  # of others it is that
    Operation(manage_checkpoints),
    Operation(save_with_tensorflow),
    Operation(follow),
    Operation(export_for_serving),
    Operation(export_for_serving_natively),
    Operation(dump_and_load, applies=lambda kind: kind.maker != WITH_POLICIES),  # SOK's files have no histories
    Operation(write_and_read_npy),
    Operation(write_and_read_files_of_sok_v1),
    Operation(assign_and_export),
    Operation(erase),
    Operation(reserve),
    Operation(copy_and_pickle),
    Operation(get_and_set_weights, applies=lambda kind: "layer" in kind.maker or "All2All" in kind.maker),
    Operation(use_in_a_v1_graph),
]
