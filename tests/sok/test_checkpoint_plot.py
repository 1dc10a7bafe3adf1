"""`sok inspect --plot`: the numbers are those of the tables, and the picture shows them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.base.errors import CheckpointError
from sok.checkpoint.manifest import read_manifest
from sok.tools import cli, picture, sampling
from tests.sok.storage_cases import LITTLE, MEMORY


@pytest.fixture
def saved(tmp_path, rng):
    """A checkpoint with a table of 1,000 rows that Adam has trained, and one that nobody has."""
    sok.Init()
    trained = sok.EmbeddingVariable(3, 2000, name="trained", initializer="zeros")
    fresh = sok.EmbeddingVariable(2, 10, name="fresh")
    optimizer = sok.optimizers.LazyAdam(0.1)
    keys = np.arange(1000)
    trained.assign(keys, rng.normal(size=(1000, 3)))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(trained.sparse_read(keys[:500]) ** 2)
    optimizer.apply_gradients([(tape.gradient(loss, trained), trained)])
    path = str(tmp_path / "checkpoint")
    sok.save(path, [trained, fresh], optimizer)
    return path, trained


def table_of(path, name):
    return next(table for table in read_manifest(path).tables if table.name.startswith(name))


def test_a_small_table_is_read_whole(saved):
    path, trained = saved
    weights, m, v = sampling.sample(path, table_of(path, "trained"))
    assert [found.of for found in (weights, m, v)] == [3000] * 3
    assert (weights.title, m.title.split(": ")[1], v.title.split(": ")[1]) == ("weights", "m", "v")
    np.testing.assert_array_equal(np.sort(weights.values), np.sort(trained.export()[1].numpy().ravel()))
    # One step of Adam: m = 0.1 g, v = 0.001 g^2 of the half of the rows that had a gradient.
    assert np.count_nonzero(m.values) == np.count_nonzero(v.values) == 1500
    np.testing.assert_allclose(m.values**2, 10 * v.values, rtol=1e-3, atol=1e-9)
    assert sampling.sample(path, table_of(path, "fresh"))[0].values.size == 0


def test_a_sample_has_all_elements_of_rows_and_no_more_than_asked_for(saved):
    path, trained = saved
    table = table_of(path, "trained")
    (weights, *_) = sampling.sample(path, table, max_values=700)
    assert 300 <= len(weights.values) <= 700
    all_rows = trained.export()[1].numpy()
    elements = {j for value in weights.values for j in np.flatnonzero((all_rows == value).any(0))}
    assert elements == {0, 1, 2}


def test_blocks_are_chosen_over_the_whole_table(tmp_path):
    sok.Init()
    table = sok.EmbeddingVariable(64, 100_000, name="blocks")
    keys = np.arange(100_000)
    table.assign(keys, np.repeat(keys[:, None], 64, 1))
    path = str(tmp_path / "checkpoint")
    sok.save(path, table)
    (weights,) = sampling.sample(path, table_of(path, "blocks"), max_values=10_000, max_blocks=3)
    assert len(weights.values) <= 10_000 and weights.of == 6_400_000
    parts, _ = np.histogram(weights.values, 10, (0, 100_000))
    assert parts[0] > 0 and parts[-1] > 0 and (parts == 0).any()  # first, middle and last block


def test_damaged_shards_are_refused_with_name_and_offset(saved):
    path, _ = saved
    table = table_of(path, "trained")
    name = f"{path}/{table.files[0].name}"
    whole = Path(name).read_bytes()
    for content, text in [
        (whole[:100], "at offset .*: (not a block|the file ends)"),
        (b"????" + whole[4:], "at offset 0: .*block"),
        (b"", "at offset 0: .*end block"),
    ]:
        with open(name, "wb") as file:
            file.write(content)
        with pytest.raises(CheckpointError, match=f"{name}: {text}"):
            sampling.sample(path, table)
    payload = whole.index(b"SBLK\x02") + 24  # of the block of rows, which begins with their number
    with open(name, "wb") as file:
        file.write(whole[:payload] + (7).to_bytes(8, "little") + whole[payload + 8 :])
    with pytest.raises(CheckpointError, match="block .*fit the table"):
        sampling.sample(path, table)


@pytest.mark.parametrize(
    ("values", "is_log", "low", "high"),
    [
        (np.arange(-1000, 1001), False, -998, 998),
        (np.zeros(5), False, -0.5, 0.5),
        (np.full(5, -4.0), False, -6, -2),
        (np.append(np.zeros(2000), 3.0), False, 0, 3),
        (10.0 ** np.linspace(-9, 0, 1001), True, 10**-8.991, 10**-0.009),
        (np.linspace(1, 50, 1001), False, 1.049, 49.951),
    ],
)
def test_the_axis_fits_the_numbers(values, is_log, low, high):
    edges, actual = picture.bins_of(values.astype(np.float32))
    assert actual == is_log and (np.diff(edges) > 0).all()
    np.testing.assert_allclose(edges[[0, -1]], [low, high], rtol=1e-3)


def test_what_is_not_finite_is_counted_and_does_not_spoil_the_picture(saved, tmp_path):
    values = np.array([0.0, 1.0, 2.0, np.nan, np.inf], np.float32)
    text = picture.described(sampling.Sample("weights", values, 10), np.array([0.5, 2.0]))
    assert (
        "5 of 10; mean 1" in text
        and "33.3% zeros" in text
        and "2 NaN or infinite" in text
        and "33.3% not shown" in text
    )


def test_the_command_draws_a_picture_without_tensorflow(saved, tmp_path, capsys):
    path, _ = saved
    target = tmp_path / "values.png"
    words = ["inspect", path, "--plot", str(target)]
    code = f"import sys; sys.modules['tensorflow'] = None; from sok.tools import cli; sys.exit(cli.main({words!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "table 'trained" in done.stdout and f"drawn: {target}" in done.stderr
    assert target.read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_name_of_its_own_and_needs_matplotlib(saved, tmp_path, monkeypatch, capsys):
    path, _ = saved
    monkeypatch.chdir(tmp_path)
    assert cli.main(["inspect", path, "--plot"]) == 0
    assert (tmp_path / "checkpoint.png").exists()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["inspect", path, "--plot"]) == 1
    assert "pip install 'sok[plot]'" in capsys.readouterr().err
    assert cli.main(["inspect", str(tmp_path / "absent"), "--plot"]) == 1


@pytest.mark.parametrize("policies", [{}, {"eviction": sok.Eviction(older_than=50)}])
def test_of_a_version_the_numbers_are_those_in_the_log(tmp_path, monkeypatch, policies):
    for name, value in LITTLE.items():
        monkeypatch.setenv(name, value)
    sok.Init()
    storage = sok.Storage(memory_bytes=MEMORY, path=tmp_path / "rows")
    table = sok.EmbeddingVariable(4, 6000, name="in_log", seed=3, storage=storage, **policies)
    optimizer = sok.optimizers.LazyAdam(0.1)
    for step in range(4):
        ids = tf.range(100 * step, 100 * step + 1000)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    folders = [str(tmp_path / name) for name in ("version", "rows_in_shards")]
    for folder, versions in zip(folders, (True, False), strict=True):
        sok.save(folder, table, optimizer, versions=versions)
    found, expected = (sampling.sample(folder, table_of(folder, "in_log")) for folder in folders)
    assert [one.title for one in found] == [one.title for one in expected] and len(found) == (5 if policies else 3)
    for one, other in zip(found, expected, strict=True):
        assert one.of == other.of and one.of in (1300, 1300 * 4)
        np.testing.assert_array_equal(np.sort(one.values), np.sort(other.values))
    if policies:
        count, last = found[1:3]
        assert (count.title, last.title) == ("history: count", "history: last")
        assert set(count.values) == {1, 2, 3, 4} and set(last.values) == {1, 2, 3, 4}
    (some, *_) = sampling.sample(folders[0], table_of(folders[0], "in_log"), max_values=500)
    assert 400 <= len(some.values) <= 500 and set(some.values) <= set(expected[0].values)
    assert cli.main(["inspect", folders[0], "--plot", str(tmp_path / "picture.png")]) == 0
