"""Files of other systems, written and read by several real workers."""

import contextlib
import resource
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.compat.formats import columns
from sok.job import context

KEYS = np.arange(-3, 40, 3)
ROWS = np.arange(2 * len(KEYS), dtype=np.float32).reshape(-1, 2)


def shared(tmp_path_of_rank, name):
    return tmp_path_of_rank.parent / "formats" / name


def content(variable):
    keys, rows = (tensor.numpy() for tensor in sok.export(variable))
    return dict(zip(keys.tolist(), rows.tolist(), strict=True))


def expected(world):
    return {int(key): row.tolist() for key, row in zip(KEYS, ROWS, strict=True) if key % world.size == world.rank}


def check_saver_dumps_and_restores_on_many_workers(world, tmp_path_of_rank, monkeypatch):
    monkeypatch.setattr(columns, "PIECE_BYTES", 40)  # several rounds
    monkeypatch.setattr(columns, "READ_BYTES", 40)
    directory, saver = shared(tmp_path_of_rank, "saver"), sok.Saver()
    variable = sok.EmbeddingVariable(dim=2, capacity=40, name="saver_hashed")
    variable.assign(KEYS, ROWS)
    assert saver.dump_to_file(variable, directory).numpy() == b"OK"
    owners = [KEYS[KEYS % world.size == rank] for rank in range(world.size)]
    assert (directory / "saver_hashed_keys.file").read_bytes() == np.concatenate(owners).astype("<i8").tobytes()
    variable.erase(KEYS)
    assert saver.restore_from_file(variable, directory).numpy() == b"OK"
    assert content(variable) == expected(world)


def check_saver_in_a_session_of_many_workers(world, tmp_path_of_rank, monkeypatch):
    monkeypatch.setattr(columns, "PIECE_BYTES", 40)
    monkeypatch.setattr(columns, "READ_BYTES", 40)
    directory, saver = shared(tmp_path_of_rank, "session"), sok.Saver()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = sok.EmbeddingVariable(dim=2, capacity=-(-30 // world.size), hashed=False, name="saver_session")
        load = saver.load_embedding_values(variable, [tf.ones([10, 2]), 2 * tf.ones([20, 2])])
        dump, restore = saver.dump_to_file(variable, directory), saver.restore_from_file(variable, directory)
        erase, export = variable.erase(np.arange(30)), variable.export()
        for _ in range(2):
            assert session.run(load) == b"OK" and session.run(dump) == b"OK"
        session.run(erase)
        assert session.run(restore) == b"OK"
        keys, rows = session.run(export)
        with pytest.raises(tf.errors.InvalidArgumentError, match="nowhere/saver_session_keys.file: there is no such"):
            session.run(saver.restore_from_file(variable, directory / "nowhere"))
    rows = {int(key): row.tolist() for key, row in zip(keys, rows, strict=True) if key < 30}
    assert rows == {key: [1.0 + (key >= 10)] * 2 for key in range(world.rank, 30, world.size)}


@contextlib.contextmanager
def address_space_for(num_bytes):
    """What a machine without memory looks like: the process gets so many bytes more, and then none."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def check_a_worker_without_memory_tells_all_from_a_session(world, tmp_path_of_rank):
    dim, capacity = 2048, 300_000  # of 2.4 GB if its last row is in use
    directory, last = shared(tmp_path_of_rank, "memory"), world.size - 1
    if world.rank == 0:
        directory.mkdir(parents=True)
        (directory / "large_keys.file").write_bytes(np.array([(capacity - 1) * world.size + last], "<i8").tobytes())
        (directory / "large_values.file").write_bytes(np.ones(dim, "<f4").tobytes())
    context.get_transport().barrier("test/large")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = sok.EmbeddingVariable(dim=dim, capacity=capacity, hashed=False, name="large")
        restore, size = sok.Saver().restore_from_file(variable, directory), variable.size()
        with address_space_for(600 << 20) if world.rank == last else contextlib.nullcontext():
            with pytest.raises(tf.errors.InvalidArgumentError, match=f"rank {last} of {world.size}.*has no memory"):
                session.run(restore)
            assert session.run(size) == 0


def check_files_that_one_worker_misses_are_an_error_on_all(world, tmp_path_of_rank):
    directory = shared(tmp_path_of_rank, f"of_rank_{world.rank}")
    directory.mkdir(parents=True)
    (directory / "partial_keys.file").write_bytes(KEYS[:4].astype("<i8").tobytes())
    if world.rank != world.size - 1:  # the last worker misses a file
        (directory / "partial_values.file").write_bytes(ROWS[:4].tobytes())
    variable = sok.EmbeddingVariable(dim=2, capacity=40, name="partial")
    with pytest.raises(FileNotFoundError, match=f"of_rank_{world.size - 1}/partial_values.file: there is no such"):
        sok.Saver().restore_from_file(variable, directory)
    assert content(variable) == {}
    (tmp_path_of_rank / "taken").write_bytes(b"")
    with pytest.raises(OSError, match="files_of_rank_0/taken/.*cannot be written"):
        sok.dump(tmp_path_of_rank / "taken", sok.Variable(ROWS, name="unwritten"))


def check_dump_and_load_with_slots_on_many_workers(world, tmp_path_of_rank):
    def train(variables, optimizer):
        with tf.GradientTape() as tape:
            read = [sok.all2all_dense_embedding(variable, KEYS[1:]) for variable in variables]
            loss = tf.add_n([tf.reduce_sum(rows**2) for rows in read])
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def make():
        return [
            sok.DynamicVariable(2, initializer="1", name="dumped_dynamic"),
            sok.Variable(np.ones([50, 2]), name="dumped_static"),
            sok.Variable(np.ones([50, 2]), name="dumped_at_0", mode="localized:0"),
        ]

    directory = shared(tmp_path_of_rank, "dump")
    for rule in (tf_keras.optimizers.legacy.SGD(0.1, momentum=0.5), tf_keras.optimizers.legacy.Adagrad(0.1)):
        first, optimizer = make(), sok.OptimizerWrapper(rule)
        train(first, optimizer)
        sok.dump(directory, first, optimizer)
        second, other = make(), sok.OptimizerWrapper(type(rule).from_config(rule.get_config()))
        for old, new in zip(first, second, strict=True):
            new._handle_name = old.name
        sok.load(directory, second, other)
        for variables, trainer in ((first, optimizer), (second, other)):
            train(variables, trainer)
        for old, new in zip(first, second, strict=True):
            assert content(new) == content(old)
    order = [key for rank in range(world.size) for key in range(rank, 50, world.size)]
    assert (directory / "dumped_static_0-key").read_bytes()[296:] == np.array(order, "<i8").tobytes()


def check_npy_files_on_many_workers(world, tmp_path_of_rank, monkeypatch):
    monkeypatch.setattr(columns, "PIECE_BYTES", 40)
    monkeypatch.setattr(columns, "READ_BYTES", 40)
    keys, values = (shared(tmp_path_of_rank, name) for name in ("k.npy", "v.npy"))
    variable = sok.EmbeddingVariable(dim=2, capacity=40, name="npy_many")
    sok.load_npy(variable, KEYS, ROWS)
    assert content(variable) == expected(world)
    sok.save_npy(variable, keys, values)
    assert dict(zip(np.load(keys).tolist(), np.load(values).tolist(), strict=True)) == dict(
        zip(KEYS.tolist(), ROWS.tolist(), strict=True)
    )
