"""`sok inspect` and `sok verify`."""

import json
import subprocess
import sys

import numpy as np
import pytest

import sok
from sok.checkpoint import read_manifest
from sok.tools import cli, sampling
from tests.sok.checkpoint_cases import RULES, new_table, train


@pytest.fixture
def saved(tmp_path):
    table, optimizer = new_table(), RULES["Adam"]()
    table.assign(np.arange(5), np.ones([5, 3]))
    train(table, optimizer, range(2))
    sok.save(tmp_path, table, optimizer)
    return tmp_path, table, optimizer


def test_inspect_says_what_is_there(saved, capsys):
    folder, table, optimizer = saved
    assert cli.main(["inspect", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "by 1 worker with sok" in said
    assert f"table '{table.table_name}': {int(table.size())} rows of dim 3, hashed int64 keys, capacity 200" in said
    assert f"slots '{optimizer.slot_set}': adam, 2 vectors per row, 2 calls" in said
    assert f"optimizer '{optimizer.slot_set}': adam, 2 steps, learning rate 0.01" in said
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"][0]["dim"] == 3


def test_inspect_tells_numbers_of_a_row_from_vectors(tmp_path, capsys):
    table, optimizer = new_table(), sok.optimizers.RowWiseAdam(0.1)
    train(table, optimizer, range(2))
    sok.save(tmp_path, table, optimizer)
    assert cli.main(["inspect", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"slots '{optimizer.slot_set}': rowwise_adam, 1 vector and 1 number (v) per row" in said
    (saved,) = read_manifest(str(tmp_path)).tables
    samples = {found.title.split(": ")[-1]: found for found in sampling.sample(str(tmp_path), saved)}
    rows = int(table.size())
    assert {title: found.of for title, found in samples.items()} == {"weights": 3 * rows, "m": 3 * rows, "v": rows}
    np.testing.assert_array_equal(np.sort(samples["v"].values), np.sort(optimizer.get_slot(table, "v").numpy().ravel()))
    assert cli.main(["verify", str(tmp_path)]) == 0


def test_inspect_and_find_load_no_tensorflow(saved):
    code = f"import sys; from sok.tools import cli; cli.main(['inspect', {str(saved[0])!r}])"
    code += f"; assert cli.main(['find', '3', {str(saved[0])!r}]) == 0"
    code += "; assert 'tensorflow' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "2 vectors per row" in done.stdout, done.stderr


def test_verify_says_whether_it_is_whole(saved, capsys):
    folder = saved[0]
    assert cli.main(["verify", str(folder)]) == 0
    assert ": whole: 1 table, 1 file, " in capsys.readouterr().out
    (file,) = folder.glob("*.shard")
    file.write_bytes(file.read_bytes()[:-5])
    assert cli.main(["verify", str(folder)]) == 1
    assert capsys.readouterr().err.startswith(f"{file}: at offset")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_folder_without_a_checkpoint_is_said(command, tmp_path, capsys):
    assert cli.main([command, str(tmp_path)]) == 1
    assert "no checkpoint here" in capsys.readouterr().err
