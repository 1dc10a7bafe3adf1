"""`sok inspect` of what is no bare checkpoint, and `sok profile plot`."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

import sok
from sok.tools import cli
from tests.messages import saying

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def manager(tmp_path):
    table = sok.EmbeddingVariable(2, 10, name="managed")
    table.assign([3, 4], [[1.0, 2.0], [3.0, 4.0]])
    checkpoint = tf.train.Checkpoint(table=table, weight=tf.Variable([1.0, 2.0]))
    manager = sok.CheckpointManager(checkpoint, tmp_path / "kept", max_to_keep=2)
    for _ in range(3):
        manager.save()
    return manager


def test_a_manager_s_folder_says_which_checkpoints_it_has(manager, capsys):
    assert cli.main(["inspect", manager.directory + "/"]) == 0
    said = capsys.readouterr().out
    first, *lines = said.splitlines()
    assert first.startswith(f"{manager.directory}: checkpoints of dense variables") and first.endswith("2 kept")
    assert lines[0].startswith("ckpt-2: dense variables ") and lines[3].startswith(
        "ckpt-3, the newest: dense variables "
    )
    assert re.match(r"    table 'managed\w*': 2 rows of dim 2", lines[2]) and "ckpt-3.sok: " in lines[4]
    assert cli.main(["inspect", manager.latest_checkpoint]) == 0  # one of them
    assert capsys.readouterr().out.count("table 'managed") == 1
    assert cli.main(["inspect", manager.directory, "--json"]) == 0
    old, new = json.loads(capsys.readouterr().out)
    assert (old["newest"], new["newest"], new["path"]) == (False, True, manager.latest_checkpoint)
    assert new["bytes"] > 0 and new["tables"]["tables"][0]["name"].startswith("managed")
    assert cli.main(["inspect", manager.directory, "--plot"]) == 1
    assert ".sok" in capsys.readouterr().err


def test_verify_reads_all_checkpoints_of_a_manager_s_folder(manager, capsys):
    def said():
        status = cli.main(["verify", manager.directory + "/"])
        out = capsys.readouterr()
        return status, out.out, out.err.splitlines()

    kept = Path(manager.directory)
    status, out, _ = said()
    first, old, new = out.splitlines()
    assert status == 0 and first == f"{kept}: whole: 2 checkpoints"
    assert old.startswith("ckpt-2: ") and re.match(r"ckpt-3: \d+ B of variables, 1 table, 1 file, ", new)
    assert cli.main(["verify", manager.latest_checkpoint]) == 0  # one of them
    assert "whole: 1 checkpoint\nckpt-3: " in capsys.readouterr().out

    (shard,) = kept.glob("ckpt-2.sok/*.shard")
    shard.write_bytes(shard.read_bytes()[:-5])
    shutil.move(kept / "ckpt-3.sok", kept / "elsewhere")
    (data,) = kept.glob("ckpt-3.data-*")
    whole = data.read_bytes()
    data.write_bytes(b"x" + whole[1:])
    status, out, errors = said()
    assert (status, out) == (1, "")
    assert errors[0].startswith(f"{shard}: at offset") and "Checksum" in errors[2] and len(errors) == 3
    assert errors[1] == f"{kept}/ckpt-3.sok: not there: the rows of the checkpoint's tables are missing."
    data.write_bytes(whole[:3])
    assert any("'weight/.ATTRIBUTES/VARIABLE_VALUE': Read less" in line for line in said()[2])
    (kept / "ckpt-3.index").unlink()
    (kept / "ckpt-2.sok" / "manifest.json").write_text("{")
    status, _, errors = said()
    assert status == 1 and "ckpt-2.sok/manifest.json" in errors[0]
    assert errors[1].startswith(f"{kept}/ckpt-3.index: ") and len(errors) == 2
    (kept / "checkpoint").write_text("")
    assert "lists no checkpoint" in said()[2][0]


def test_checkpoints_without_tables_or_without_files_are_said(tmp_path, capsys):
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(weight=tf.Variable(1.0)), tmp_path, 2)
    gone, path = Path(manager.save()), manager.save()
    for file in tmp_path.glob(f"{gone.name}.*"):
        file.unlink()
    assert cli.main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "ckpt-1: its files are gone, no tables"
    assert lines[2].startswith("ckpt-2, the newest: dense variables ") and lines[2].endswith(", no tables")
    code = f"import sys; from sok.tools import cli; cli.main(['inspect', {path!r}])"
    code += "; assert 'tensorflow' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "no tables" in done.stdout, done.stderr


@pytest.mark.parametrize("native", [False, True])
def test_an_export_says_its_signatures_and_tables(native, tmp_path, capsys):
    table = sok.EmbeddingVariable(2, 10, name="exported")
    table.assign([3], [[1.0, 2.0]])
    path = str(tmp_path / "1")
    spec = tf.TensorSpec([None, 3], tf.int64, "ids")
    sok.export_saved_model(table.sparse_read, path, signatures=spec, native=native)
    capsys.readouterr()
    assert cli.main(["inspect", path]) == 0
    first, signature, rows = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path}: {'native export' if native else 'export to stock TensorFlow'} by sok ")
    assert signature == "signature 'serving_default': ids int64 [None, 3] -> output_0 float32 [None, 3, 2]"
    assert rows.startswith(f"table '{table.table_name}': 1 rows of dim 2 as float32, ")
    assert cli.main(["inspect", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["export"]["tables"][0]["num_rows"] == 1


def test_models_of_others_and_damaged_ones_are_said(tmp_path, capsys):
    module = tf.Module()
    module.f = tf.function(lambda x: {"y": x + 1}, input_signature=[tf.TensorSpec(None, tf.float32, "x")])
    tf.saved_model.save(module, tmp_path / "other", signatures=module.f)
    assert cli.main(["inspect", str(tmp_path / "other")]) == 0
    first, signature = capsys.readouterr().out.splitlines()
    assert "says nothing of tables" in first
    assert signature == "signature 'serving_default': x float32 of unknown rank -> y float32 of unknown rank"
    (tmp_path / "saved_model.pb").write_bytes(b"no model")
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert "not a SavedModel" in capsys.readouterr().err


@pytest.fixture
def trace(tmp_path):
    table, optimizer = sok.EmbeddingVariable(2, 10, name="drawn"), sok.optimizers.SGD(0.1)
    path = tmp_path / "steps.json"
    with sok.profile(path):
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(
                    sok.lookup_sparse(table, tf.ragged.constant([[1, 2]], dtype=tf.int64), combiners="sum")
                )
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    exchange = {"cat": "sok", "name": "exchange", "pid": 0, "tid": 1, "id2": {"local": "0x1"}, "args": {"step": 1}}
    exchange["args"]["collective"] = "sok/drawn/keys/0"  # as several workers have them
    told = json.loads(path.read_text())
    told["traceEvents"] += [{**exchange, "ph": "b", "ts": 1.0}, {**exchange, "ph": "e", "ts": 9.0}]
    path.write_text(json.dumps(told))
    return path


def test_profiles_are_drawn(trace, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["profile", "plot", str(trace)]) == 0
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    assert "drawn: steps.png" in capsys.readouterr().err
    assert cli.main(["profile", "plot", str(trace), "--output", "a.svg", "--first", "1", "--steps", "1"]) == 0
    assert "drawn/keys" in (tmp_path / "a.svg").read_text() and "update" in (tmp_path / "a.svg").read_text()
    assert cli.main(["profile", "plot", str(trace), "--first", "7"]) == 1
    assert "no spans of steps 7 to 8" in capsys.readouterr().err
    (tmp_path / "no.json").write_text("[]")
    assert cli.main(["profile", "plot", "no.json"]) == 1
    assert "no trace of sok.profile" in capsys.readouterr().err


def test_profile_alone_says_what_it_can_do(capsys):
    with pytest.raises(SystemExit):
        cli.main(["profile"])
    assert "required: COMMAND" in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(trace, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["profile", "plot", str(trace)]) == 1
    assert re.search(saying("matplotlib", "sok[plot]"), capsys.readouterr().err)
