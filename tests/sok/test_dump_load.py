"""`sok.dump` and `sok.load` of SOK v2: the bytes that they write, slots, and what they read back."""

import os
import struct

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from hypothesis import given, settings
from hypothesis import strategies as st

import sok
from sok.compat.formats import columns
from tests.sok.threads_world import checked, run_world

KEYS = np.array([5, -3, 2**40], np.int64)
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)
legacy = tf_keras.optimizers.legacy


def header(kind, code, slot=""):
    """As SOK writes it: blank table name, kind, slot name to the right, dtype."""
    return b" " * 256 + struct.pack(">I", kind) + slot.rjust(32).encode() + struct.pack(">I", code)


def put(directory, name, keys, rows, code=1, **slots):
    """Files as SOK writes them. Slots as `Adam_m=array`."""
    directory.mkdir(exist_ok=True)
    (directory / f"{name}-key").write_bytes(header(0, code) + np.asarray(keys).tobytes())
    (directory / f"{name}-weight").write_bytes(header(1, 5) + np.asarray(rows, np.float32).tobytes())
    for slot, values in slots.items():
        content = header(2, 5, slot.partition("_")[2]) + np.asarray(values, np.float32).tobytes()
        (directory / f"{name}-{slot.replace('_', '-', 1)}").write_bytes(content)


def content(variable):
    keys, rows = (tensor.numpy() for tensor in sok.export(variable))
    return dict(zip(keys.tolist(), rows.tolist(), strict=True))


def train(variable, optimizer, keys, steps=2):
    for step in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.all2all_dense_embedding(variable, keys) ** 2) * (step + 1)
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])


def test_a_dump_of_a_dynamic_variable_is_two_files_of_these_bytes(tmp_path):
    variable = sok.DynamicVariable(2, name="golden")
    variable.assign(KEYS, ROWS)
    assert sok.dump(str(tmp_path / "made"), variable) is None
    assert sorted(os.listdir(tmp_path / "made")) == ["golden_0-key", "golden_0-weight"]
    key_file, weight_file = ((tmp_path / "made" / f"golden_0-{what}").read_bytes() for what in ("key", "weight"))
    assert key_file == header(0, 1) + struct.pack("<3q", -3, 5, 2**40)  # sorted
    assert weight_file == header(1, 5) + struct.pack("<6f", 2, 3, 0, 1, 4, 5)


@pytest.mark.parametrize("key_type, code, letter", [("int32", 0, "i"), ("uint32", 2, "I"), ("uint64", 3, "Q")])
def test_keys_are_dumped_in_the_key_type(tmp_path, key_type, code, letter):
    variable = sok.DynamicVariable(1, name=f"typed_{key_type}", key_type=key_type)
    variable.assign([7, 2], [[1.0], [2.0]])
    sok.dump(tmp_path, [variable])
    assert (tmp_path / f"typed_{key_type}_0-key").read_bytes() == header(0, code) + struct.pack(f"<2{letter}", 2, 7)
    variable.erase([7, 2])
    sok.load(tmp_path, variable)
    assert content(variable) == {2: [2.0], 7: [1.0]}


def test_a_dump_of_a_static_variable_has_all_rows_worker_by_worker(tmp_path):
    matrix = np.arange(10, dtype=np.float32).reshape(5, 2)

    def program(transport):
        sok.dump(tmp_path, (sok.Variable(matrix, name="spread"), sok.Variable(matrix, name="at/1", mode="localized:1")))

    with pytest.MonkeyPatch.context() as patch:
        checked(run_world(2, program, patch))
    assert (tmp_path / "spread_0-key").read_bytes() == header(0, 1) + struct.pack("<5q", 0, 2, 4, 1, 3)
    assert (tmp_path / "spread_0-weight").read_bytes() == header(1, 5) + matrix[[0, 2, 4, 1, 3]].tobytes()
    assert (tmp_path / "at_1_0-key").read_bytes() == header(0, 3) + struct.pack("<5Q", *range(5))
    assert (tmp_path / "at_1_0-weight").read_bytes() == header(1, 5) + matrix.tobytes()


def test_workers_take_turns_with_pieces_as_in_sok(tmp_path):
    def program(transport):
        variable = sok.DynamicVariable(2, name="pieces")
        variable.assign(np.arange(12), np.ones([12, 2]))
        if transport.rank == 1:
            variable.erase([5, 7, 9, 11])
        sok.dump(tmp_path, variable)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "PIECE_BYTES", 3 * 2 * 4 + 7)
        patch.setattr(columns, "READ_BYTES", 3 * 2 * 4 + 7)
        checked(run_world(2, program, patch))
    keys = np.frombuffer((tmp_path / "pieces_0-key").read_bytes()[296:], "<i8")
    # Worker 0 has six rows, two pieces of three; worker 1 two, which are one piece.
    assert keys.tolist() == [0, 2, 4, 1, 3, 6, 8, 10]


# SOK's files of one table after two steps, from its optimizer's own slots.
OPTIMIZERS = {
    "SGD": (lambda: legacy.SGD(0.1), []),
    "momentum": (lambda: legacy.SGD(0.1, momentum=0.9), ["SGD-momentum"]),
    "Adagrad": (lambda: legacy.Adagrad(0.1), ["Adagrad-accumulator"]),
    "Adam": (lambda: legacy.Adam(0.1), ["Adam-m", "Adam-v"]),
    "amsgrad": (lambda: legacy.Adam(0.1, amsgrad=True), ["Adam-m", "Adam-v", "Adam-vhat"]),
    "Adamax": (lambda: legacy.Adamax(0.1), ["Adam-m", "Adam-v"]),  # SOK calls it so
    "Adadelta": (lambda: legacy.Adadelta(0.1), ["Adadelta-accum_grad", "Adadelta-accum_var"]),
    "Ftrl": (lambda: legacy.Ftrl(0.1), ["Ftrl-accumulator", "Ftrl-linear"]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_are_those_of_the_stock_optimizer(tmp_path, name):
    make, files = OPTIMIZERS[name]
    matrix = np.random.default_rng(1).normal(size=[4, 3]).astype(np.float32)
    variable, optimizer = sok.Variable(matrix, name=f"slots_{name}"), sok.OptimizerWrapper(make())
    train(variable, optimizer, list(range(4)))
    sok.dump(tmp_path, variable, [optimizer])
    stem = f"slots_{name}_0"
    assert sorted(os.listdir(tmp_path)) == sorted([f"{stem}-key", f"{stem}-weight", *(f"{stem}-{f}" for f in files)])

    twin, stock = tf.Variable(matrix), make()
    for step in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(twin, [0, 1, 2, 3]) ** 2) * (step + 1)
        stock.apply_gradients([(tape.gradient(loss, twin), twin)])
    for file in files:
        found = (tmp_path / f"{stem}-{file}").read_bytes()
        slot = file.partition("-")[2]
        assert found[:296] == header(2, 5, slot)
        expected = stock.get_slot(twin, slot).numpy()
        np.testing.assert_allclose(
            np.frombuffer(found[296:], "<f4").reshape(4, 3), expected, rtol=1e-4, atol=1e-7
        )  # float32 betas there


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_training_goes_on_after_a_load_as_if_nothing_had_happened(tmp_path, name, kind):
    stock = OPTIMIZERS[name][0]

    def make(suffix):
        # Rows beyond those trained, so that slots of rows without a step are there too.
        if kind == "static":
            return sok.Variable(np.ones([6, 3], np.float32), name=f"on_{name}")
        return sok.DynamicVariable(3, name=f"on_{name}", initializer="1")

    first, optimizer = make("a"), sok.OptimizerWrapper(stock())
    sok.all2all_dense_embedding(first, [4, 5])
    train(first, optimizer, [0, 1, 2])
    sok.dump(tmp_path, first, optimizer)
    second, other = make("b"), sok.OptimizerWrapper(stock())
    second._handle_name = first.name
    if hasattr(other.optimizer, "iterations"):
        other.embedding_optimizer.iterations.assign(2)
    sok.load(tmp_path, second, other)
    assert content(second) == content(first)
    for copies in getattr(other.embedding_optimizer, "_of_tables", {}).values():
        copies._copy.iterations.assign(2)
    for variable, trainer in ((first, optimizer), (second, other)):
        train(variable, trainer, [1, 2, 5])
    np.testing.assert_array_equal(sok.export(second)[1], sok.export(first)[1])


def test_without_a_step_there_are_no_slots_to_dump(tmp_path):
    variable = sok.Variable(ROWS, name="unstepped")
    sok.dump(tmp_path, variable, sok.OptimizerWrapper(legacy.Adamax(0.1)))
    assert sorted(os.listdir(tmp_path)) == ["unstepped_0-key", "unstepped_0-weight"]
    with pytest.raises(FileNotFoundError, match="unstepped_0-Adam-m"):
        sok.load(tmp_path, variable, sok.OptimizerWrapper(legacy.Adamax(0.1)))


def test_slots_of_an_earlier_dump_do_not_stay_beside_new_rows(tmp_path):
    put(tmp_path, "again_0", [0, 1, 2], ROWS, Adam_m=ROWS, Adagrad_accumulator=ROWS)
    put(tmp_path, "again_0_1", [0, 1, 2], ROWS, Adam_m=ROWS)
    for name in ("again_0-weight-old", "again_0-Adam-v"):
        (tmp_path / name).write_text("somebody's own, and no slots\n" * 20)
    sok.dump(tmp_path, sok.Variable(ROWS, name="again"))
    assert (tmp_path / "again_0-weight-old").exists() and (tmp_path / "again_0-Adam-v").exists()
    for name in ("again_0-weight-old", "again_0-Adam-v"):
        (tmp_path / name).unlink()
    left = ["again_0-key", "again_0-weight", "again_0_1-Adam-m", "again_0_1-key", "again_0_1-weight"]
    assert sorted(os.listdir(tmp_path)) == left


def test_workers_that_dump_with_other_optimizers_say_so_on_all(tmp_path):
    def program(transport):
        variable = sok.Variable(ROWS, name="unequal")
        with pytest.raises(ValueError, match="same on all workers.*SGD.*rank 1.*none"):
            sok.dump(tmp_path, variable, sok.SGD(0.1) if transport.rank == 0 else None)

    with pytest.MonkeyPatch.context() as patch:
        checked(run_world(2, program, patch))
    assert os.listdir(tmp_path) == []


def test_slots_of_some_tables_only_are_refused(tmp_path):
    trained, other = sok.Variable(ROWS, name="trained"), sok.Variable(ROWS, name="other")
    optimizer = sok.OptimizerWrapper(legacy.SGD(0.1, momentum=0.5))
    train(trained, optimizer, [0])
    with pytest.raises(ValueError, match="some of the tables, .*not for other"):
        sok.dump(tmp_path, [trained, other], optimizer)
    assert os.listdir(tmp_path) == []


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_what_some_workers_dump_others_load(data, tmp_path_factory):
    dumping, loading = data.draw(st.integers(1, 4), "dumping"), data.draw(st.integers(1, 4), "loading")
    keys = np.array(sorted(data.draw(st.sets(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))), np.int64)
    modes = st.sampled_from([None, "localized:0"])
    mode_before, mode_after = data.draw(modes, "mode before"), data.draw(modes, "mode after")
    rows = np.random.default_rng(1).normal(size=[len(keys), 3]).astype(np.float32)
    matrix = np.random.default_rng(2).normal(size=[7, 2]).astype(np.float32)
    directory = str(tmp_path_factory.mktemp("moved"))

    def make(mode, matrix):
        return [sok.DynamicVariable(3, name="moved", mode=mode), sok.Variable(matrix, name="matrix", mode=mode)]

    def dump(transport):
        variables = make(mode_before, matrix)
        variables[0].assign(keys, rows)
        sok.dump(directory, variables)

    def load(transport):
        variables = make(mode_after, matrix * 0)
        sok.load(directory, variables)
        return [content(variable) for variable in variables]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sok.compat.v2.mode.context, "size", lambda: patch_size[0])
        piece = data.draw(st.sampled_from([1, 50, 2**20]), "piece")
        patch.setattr(columns, "PIECE_BYTES", piece)
        patch.setattr(columns, "READ_BYTES", piece)
        patch_size = [dumping]
        checked(run_world(dumping, dump, patch))
        patch_size = [loading]
        parts = checked(run_world(loading, load, patch))
    for place, expected in enumerate(
        [dict(zip(keys.tolist(), rows.tolist(), strict=True)), dict(enumerate(matrix.tolist()))]
    ):
        assert {key: row for part in parts for key, row in part[place].items()} == expected


def test_rows_of_a_dynamic_variable_that_are_not_in_the_files_stay(tmp_path):
    put(tmp_path, "stays_0", [1, 2], [[1, 1], [2, 2]])
    variable = sok.DynamicVariable(2, name="stays")
    variable.assign([2, 3], [[9, 9], [3, 3]])
    sok.load(tmp_path, variable)
    assert content(variable) == {1: [1, 1], 2: [2, 2], 3: [3, 3]}


def test_a_static_variable_takes_all_its_rows_or_none(tmp_path):
    put(tmp_path, "all_0", [0, 1], ROWS[:2])
    variable = sok.Variable(ROWS, name="all")
    with pytest.raises(ValueError, match="all_0-key, .*2 keys.*'all' has 3 rows"):
        sok.load(tmp_path, variable)
    put(tmp_path, "all_0", [0, 1, 3], ROWS)
    with pytest.raises(ValueError, match="all_0-key, byte 312: holds key 3.*below 3"):
        sok.load(tmp_path, variable)


def test_a_bad_file_of_one_table_leaves_all_as_they_were(tmp_path):
    put(tmp_path, "good_0", [1, 2, 3], ROWS)
    put(tmp_path, "bad_0", [1, 2, 2], ROWS)
    put(tmp_path, "large_0", [1, 2, 3], ROWS)

    def program(transport):
        good, bad = sok.DynamicVariable(2, name="good"), sok.DynamicVariable(2, name="bad")
        with pytest.raises(ValueError, match="bad_0-key, byte 304 and .*byte 312: hold key 2 more than once"):
            sok.load(tmp_path, [good, bad])
        with pytest.raises(FileNotFoundError, match="none_0-key"):
            sok.load(tmp_path, [good, sok.DynamicVariable(2, name="none")])
        with pytest.raises(tf.errors.ResourceExhaustedError, match="rank 1 of 2: .*of at most 1 rows, and 2 new"):
            sok.load(tmp_path, [sok.DynamicVariable(2, name="large", max_capacity=1)])
        return content(good), content(bad)

    with pytest.MonkeyPatch.context() as patch:
        assert checked(run_world(2, program, patch)) == [({}, {})] * 2


def test_what_cannot_be_dumped_is_said_on_all_workers_and_nothing_is_written(tmp_path):
    def program(transport):
        empty, variable = sok.DynamicVariable(2, name="empty"), sok.Variable(ROWS, name="full")
        narrow = sok.DynamicVariable(2, name="narrow", key_type="int32")
        narrow.assign([2**40 + 1], [[1.0, 1.0]])  # on worker 1 of 2
        for variables, error, message in (
            ([variable, empty], ValueError, "table 'empty' has no rows"),
            (narrow, tf.errors.InvalidArgumentError, "rank 1 of 2: .*key_type int32 does not hold"),
            ([variable, variable], ValueError, "share .*full_0-key"),
            ([], ValueError, "at least one variable"),
        ):
            with pytest.raises(error, match=message):
                sok.dump(tmp_path, variables)
        with pytest.raises(TypeError, match="take a sok.Variable"):
            sok.dump(tmp_path, tf.Variable([1.0]))
        with pytest.raises(TypeError, match="`optimizer` .*trains"):
            sok.dump(tmp_path, variable, legacy.SGD(0.1))
        with pytest.raises(ValueError, match="`optimizer` must be one optimizer. Received: 2"):
            sok.dump(tmp_path, variable, [None, None])

    with pytest.MonkeyPatch.context() as patch:
        checked(run_world(2, program, patch))
    assert os.listdir(tmp_path) == []


def test_optimizers_that_sok_has_no_name_for_are_refused(tmp_path):
    variable = sok.Variable(ROWS, name="nameless")
    with pytest.raises(ValueError, match="no names .*RMSprop"):
        sok.dump(tmp_path, variable, sok.OptimizerWrapper(legacy.RMSprop(0.1)))


def test_in_graphs_it_is_refused(tmp_path):
    variable = sok.Variable(ROWS, name="eager_only")
    for function in (sok.dump, sok.load):
        with pytest.raises(RuntimeError, match="works when executing eagerly"):
            tf.function(lambda function=function: function(tmp_path, variable))()


@pytest.mark.parametrize("rule", ["Adagrad", "LazyAdam", "Adam"])
def test_our_own_optimizers_go_on_as_well(tmp_path, rule):
    def make():
        return sok.DynamicVariable(2, name=f"own_{rule}", initializer="1"), getattr(sok.optimizers, rule)(0.1)

    first, optimizer = make()
    sok.all2all_dense_embedding(first, [7, 8])
    train(first, optimizer, [1, 2])
    train(first, optimizer, [2, 3])
    sok.dump(tmp_path, first, optimizer)
    second, other = make()
    second._handle_name = first.name
    sok.load(tmp_path, second, other)
    other.iterations.assign(optimizer.iterations)
    assert content(second) == content(first)
    for variable, trainer in ((first, optimizer), (second, other)):
        train(variable, trainer, [3, 7])
    # Exact Adam moves the rows outside the batch too, by what the slots say.
    np.testing.assert_allclose(sok.export(second)[1], sok.export(first)[1], rtol=1e-6)


def test_a_distributed_optimizer_is_taken_for_what_trains_its_tables(tmp_path):
    variable = sok.Variable(ROWS + 1, name="distributed")
    optimizer = sok.DistributedOptimizer(legacy.Adagrad(0.1))
    train(variable, optimizer, [0, 1])
    sok.dump(tmp_path, variable, optimizer)
    found = np.fromfile(tmp_path / "distributed_0-Adagrad-accumulator", "<f4", offset=296).reshape(3, 2)
    assert (found[:2] > 0.1).all() and (found[2] == np.float32(0.1)).all()
