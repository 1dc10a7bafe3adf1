"""What goes wrong under tables over a file: folders, disks that are full, damaged records, processes that died."""

import contextlib
import os
import re
import resource
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sok
from tests.messages import saying
from tests.sok.storage_cases import FILL, LITTLE, MEMORY, Twins, key_of, new_table

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="module")
def job():
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in LITTLE.items():
            monkeypatch.setenv(name, value)
        sok.Init(seed=1)
        yield


@pytest.mark.parametrize("below", ["a file", "the system's"])
def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, below):
    if below == "a file":
        (tmp_path / "file").write_text("")
        folder = tmp_path / "file" / "rows"
    else:
        folder = Path("/proc/self/rows")
    with pytest.raises(OSError, match=saying("`storage`", "unwritten", str(folder))):
        sok.EmbeddingVariable(3, 100, name="unwritten", storage=sok.Storage(memory_bytes=2**24, path=folder))


def test_a_folder_is_made_and_is_empty_when_its_tables_are_gone(tmp_path):
    folder = tmp_path / "a" / "b"
    tables = [new_table(folder), new_table(folder)]
    names = {path.name for path in folder.iterdir()}
    assert len(names) == 2 and all(name.endswith(".rows") for name in names)
    assert {name.partition("_r0.")[0] for name in names} == {table.table_name for table in tables}
    del tables
    assert not list(folder.iterdir())


@contextlib.contextmanager
def files_of_at_most(size):
    """No file of this process grows beyond `size`: what would gets EFBIG, which is what a full disk is to us."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def disk_of(size, folder):
    """A tmpfs of so many bytes."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("limit", ["of a file", "of the disk"])
def test_a_full_disk_is_an_error_before_anything_is_stored(tmp_path, limit):
    folder, size = tmp_path / "rows", 6 * 2**20
    with contextlib.ExitStack() as stack:
        if limit == "of the disk":
            stack.enter_context(disk_of(size, folder))
        storage = sok.Storage(memory_bytes=20_000_000, path=folder)
        table = sok.EmbeddingVariable(3, 400_000, name="filled", storage=storage)
        if limit == "of a file":
            stack.enter_context(files_of_at_most(size))
        with pytest.raises(tf.errors.ResourceExhaustedError, match=r"filled.*\.rows"):
            for first in range(0, 400_000, 5000):
                table.assign(np.arange(first, first + 5000), np.full([5000, 3], first, np.float32))
        assert first > 50_000 and int(table.num_rows()) == first
        keys = np.arange(first)
        np.testing.assert_array_equal(table.sparse_read(keys).numpy()[:, 1], keys // 5000 * 5000)
        stack.close() if limit == "of a file" else table.erase(keys[:5000])
        table.assign(keys[:5000], np.full([5000, 3], 7.0))
        assert table.sparse_read(keys[:5000:100]).numpy().min() == 7.0
        del table


def damage(folder, row):
    """Changes a bit of the record of a row [D], which is in the file."""
    (file,) = folder.glob("*.rows")
    data = file.read_bytes()
    places = [found.start() for found in re.finditer(re.escape(row.tobytes()), data)]
    assert places, "the row is not in the file"
    with open(file, "r+b") as out:
        for place in places:
            out.seek(place + 5)
            out.write(bytes([data[place + 5] ^ 1]))


def test_a_damaged_record_is_named_and_others_go_on(tmp_path):
    table = new_table(tmp_path, 16)
    rows = np.random.default_rng(2).normal(size=[FILL, 16]).astype(np.float32)
    table.assign(key_of(np.arange(FILL)), rows)
    table.assign(key_of(np.arange(300, FILL)), rows[300:])  # puts the first ones out
    damage(tmp_path, rows[17])
    words = saying(table.table_name, str(int(key_of(17))), ".rows", "damaged")
    for read in (
        lambda: table.sparse_read(key_of([3, 17])),
        lambda: table.sparse_read(key_of(np.arange(FILL))),
        table.export,
        lambda: sok.save(tmp_path / "saved", table),
    ):
        with pytest.raises(tf.errors.DataLossError, match=words):
            read()
    others = np.delete(np.arange(FILL), 17)
    np.testing.assert_array_equal(table.sparse_read(key_of(others)).numpy(), rows[others])
    optimizer = sok.optimizers.SGD(0.5)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, key_of(others[:50])))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    np.testing.assert_allclose(table.sparse_read(key_of(others[:50])).numpy(), rows[others[:50]] - 0.5, rtol=1e-6)
    assert int(table.erase(key_of([17]))) == 1
    assert np.isfinite(table.sparse_read(key_of(np.arange(FILL))).numpy()).all()
    table.export()


def test_a_damaged_record_keeps_no_step_from_its_end(tmp_path):
    table = new_table(tmp_path, 16, eviction=sok.Eviction(norm_below=1.0, every=2))
    rows = np.random.default_rng(2).normal(size=[FILL, 16]).astype(np.float32)
    rows[::4] *= 0.1
    table.assign(key_of(np.arange(FILL)), rows)
    table.assign(key_of(np.arange(300, FILL)), rows[300:])  # puts the first ones out
    damage(tmp_path, rows[16])  # one of the small ones

    def step(numbers):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, key_of(numbers)))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    optimizer = sok.optimizers.SGD(0.0)
    for _ in range(4):
        step([1, 2, 3])
    assert int(table.step) == 4
    stats = table.stats()
    assert (stats["rows"], stats["evicted"]) == (FILL * 3 // 4 + 1, FILL // 4 - 1)
    with pytest.raises(tf.errors.DataLossError, match=saying(table.table_name, str(int(key_of(16))), "damaged")):
        step([15, 16, 17])
    assert int(table.step) == 4
    left = np.delete(np.arange(FILL), np.arange(0, FILL, 4))
    np.testing.assert_array_equal(table.sparse_read(key_of(left)).numpy(), rows[left])
    assert int(table.erase(key_of([16]))) == 1
    step([15, 16, 17])
    assert int(table.step) == 5


def test_what_a_killed_process_left_goes_when_the_next_table_comes(forked, tmp_path):
    program = (
        "import os, signal, sys\nimport numpy as np\nimport sok\nsok.Init()\n"
        "storage = sok.Storage(memory_bytes=2**23, path=sys.argv[1])\n"
        "table = sok.EmbeddingVariable(3, 50_000, name='left', storage=storage)\n"
        "table.assign(np.arange(20_000), np.ones([20_000, 3]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    folder = tmp_path / "rows"
    living = new_table(folder)
    (folder / "notes.txt").write_text("not ours")
    ended = forked.run(program, tmp_path, str(folder))
    assert ended.status == -9, ended.stderr
    (left,) = folder.glob("left_r0.*.rows")
    table = new_table(folder)
    assert not left.exists()
    assert {path.name.partition("_r0.")[0] for path in folder.iterdir()} == {
        *(one.table_name for one in (living, table)),
        "notes.txt",
    }


def bytes_of_mappings():
    """What the tables' own mappings take of the memory, by their name in /proc/self/smaps; None: they have no name."""
    names = re.compile(r"^[0-9a-f]+-[0-9a-f]+ .*\[anon:sok:.*\]$")
    total, seen, ours = 0, False, False
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
                ours = bool(names.match(line.rstrip("\n")))
                seen |= ours
            elif ours and line.startswith("Rss:"):
                total += 1024 * int(line.split()[1])
    return total if seen else None


def test_memory_stays_within_the_budget(tmp_path):
    before = bytes_of_mappings()
    rows, memory_bytes = 200_000, 14 * 2**20
    storage = sok.Storage(memory_bytes=memory_bytes, path=tmp_path)
    table = sok.EmbeddingVariable(16, rows, name="bounded", storage=storage)
    rng, optimizer = np.random.default_rng(4), sok.optimizers.Adagrad(0.1)
    for first in range(0, rows, 20_000):
        table.assign(np.arange(first, first + 20_000), np.ones([20_000, 16]))
    for _ in range(8):
        keys = tf.constant(rng.integers(0, rows, 20_000))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, keys))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    found = bytes_of_mappings()
    if found is None:
        pytest.skip("this kernel gives mappings no names")
    assert table.stats()["bytes_in_memory"] <= memory_bytes
    assert 0.5 * memory_bytes < found - (before or 0) < 1.05 * memory_bytes
    assert rows * 128 > 1.5 * memory_bytes


def test_tables_of_a_graph_are_over_files_too(tmp_path):
    v1 = tf.compat.v1
    storage = sok.Storage(memory_bytes=MEMORY, path=tmp_path)
    with tf.Graph().as_default() as graph:
        table = sok.EmbeddingVariable(3, FILL, name="graph", initializer="ones", storage=storage)
        ids = v1.placeholder(tf.int64, [None])
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids))
        update = sok.optimizers.SGD(0.5).apply_gradients([(tf.gradients(loss, [table])[0], table)])
        rows = table.sparse_read(ids)
        with v1.Session(graph=graph) as session:
            session.run(v1.global_variables_initializer())
            for _ in range(2):
                session.run(update, {ids: np.arange(FILL)})
            np.testing.assert_array_equal(session.run(rows, {ids: np.arange(FILL)}), np.zeros([FILL, 3]))


def test_rows_are_saved_again_once_a_restore_was_refused(tmp_path):
    """A table that a restore found too small stays as it was."""
    twins = Twins(tmp_path)
    twins.train("Adagrad", np.arange(100))
    twins.save()
    small = new_table(tmp_path / "small", rows=100)
    small.assign(key_of([1, 2]), [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    with pytest.raises(tf.errors.ResourceExhaustedError, match=saying(small.table_name)):
        sok.restore(twins.saves[1], {twins.tables[1].table_name: small}, sok.optimizers.Adagrad(0.1))
    np.testing.assert_array_equal(small.sparse_read(key_of([2])), [[4.0, 5.0, 6.0]])
    assert os.listdir(tmp_path / "small") and int(small.num_rows()) == 2
    twins.check()
