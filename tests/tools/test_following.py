"""`sok follow`: a process beside a server, which makes versions of what a job saves."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf

import sok
from sok.tools import cli
from sok.tools.serving.metrics import Metrics


class Model(tf.Module):
    def __init__(self, name):
        super().__init__()
        self.table = sok.EmbeddingVariable(2, 50, name=name, initializer="zeros")
        self.bias = tf.Variable([0.5])

    def __call__(self, ids):
        return sok.lookup_sparse(self.table, ids, combiners="sum") + self.bias


def exported(model, folder):
    spec = tf.TensorSpec([None, None], tf.int64, "ids")
    sok.export_saved_model(model, f"{folder}/1", signatures=spec, native=True)
    return folder


def publish(model, publisher, value):
    model.table.assign([3], [[value, value]])
    model.bias.assign([value])
    publisher.publish()


def answer(path):
    served = tf.saved_model.load(path).signatures["serving_default"]
    return served(ids=tf.constant([[3], [4]], tf.int64))["output_0"].numpy().tolist()


def test_one_look_makes_the_next_version_and_says_so(tmp_path, capsys):
    model, feed, exports = Model("looked_at"), tmp_path / "feed", exported(Model("looked_at_0"), tmp_path / "exports")
    assert cli.main(["follow", str(feed), str(exports), "--once"]) == 0  # nothing is saved yet
    assert capsys.readouterr().out == ""
    model = Model("looked_at")
    exports = exported(model, tmp_path / "others")
    publisher = sok.Publisher(feed, model)
    publish(model, publisher, 2.0)
    assert cli.main(["follow", str(feed), str(exports), "--once"]) == 0
    words = capsys.readouterr().out
    assert words.startswith(f"{exports}/2 holds g000001-") and words.endswith(" s ago\n")
    assert answer(f"{exports}/2") == [[4.0, 4.0], [2.0, 2.0]]
    assert cli.main(["follow", str(feed), str(exports), "--once"]) == 0
    assert capsys.readouterr().out == "" and sorted(os.listdir(exports)) == ["1", "2"]


def test_what_goes_wrong_is_told_in_words(tmp_path, capsys):
    model = Model("told_wrong")
    publish(model, sok.Publisher(tmp_path / "feed", model), 1.0)
    (tmp_path / "exports").mkdir()
    assert cli.main(["follow", str(tmp_path / "feed"), str(tmp_path / "exports"), "--once"]) == 1
    assert "no version to begin with" in capsys.readouterr().err
    assert cli.main(["follow", "feed", "exports", "--poll-seconds", "0"]) == 2
    assert cli.main(["follow", "feed", "exports", "--max-to-keep", "0"]) == 2
    assert "`max_to_keep`" in capsys.readouterr().err


def test_a_process_follows_until_it_is_ended_and_outlives_a_look_that_fails(tmp_path):
    model = Model("followed_by_a_process")
    feed, exports = tmp_path / "feed", exported(model, tmp_path / "exports")
    publisher = sok.Publisher(feed, model)
    command = [sys.executable, "-m", "sok", "follow", str(feed), str(exports), "--poll-seconds", "0.1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        publish(model, publisher, 3.0)
        assert process.stdout.readline().startswith(f"{exports}/2 holds ")
        manifest = feed / "manifest.json"
        whole = manifest.read_bytes()
        manifest.write_bytes(whole[:-3] + b"}\n")
        said = next(line for line in process.stderr if line.startswith("sok follow: "))
        assert "manifest.json" in said
        manifest.write_bytes(whole)
        publish(model, publisher, 5.0)
        assert process.stdout.readline().startswith(f"{exports}/3 holds ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
    assert answer(f"{exports}/3") == [[10.0, 10.0], [5.0, 5.0]]


def test_metrics_tell_when_the_save_of_a_version_was_made():
    metrics = Metrics()
    metrics.loaded("ctr", 2, 0.1, saved=time.time() - 5)
    metrics.loaded("ctr", 1, 0.1)
    lines = [line for line in metrics.text().decode().splitlines() if line.startswith("sok_serve_saved")]
    (line,) = lines
    assert line.startswith('sok_serve_saved_timestamp_seconds{model="ctr",version="2"} ')
    assert np.isclose(float(line.rpartition(" ")[2]), time.time() - 5, atol=5)
    metrics.freed("ctr", 1)
    metrics.freed("ctr", 2)
    assert b'version="' not in metrics.text()
