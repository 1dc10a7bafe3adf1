"""Whatever happens while a checkpoint is written, the newest complete one can be restored."""

import contextlib
import os
import re
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import read_manifest, verify
from tests.sok.checkpoint_cases import contents, new_table

KILLS = int(os.environ.get("SOK_TEST_KILLS", "12"))


@pytest.mark.parametrize("mode", ["full", "incremental", "asynchronous", "both"])
def test_a_save_that_is_killed_leaves_the_newest_complete_checkpoint(forked, tmp_path, mode):
    wanted = KILLS if mode == "full" else max(4, KILLS // 3)
    script = Path(__file__).with_name("checkpoint_killed_script.py")
    arguments = (str(tmp_path / "saves"), str(wanted), "1", mode)
    done = forked.run(
        script, tmp_path, *arguments, environment={"CUDA_VISIBLE_DEVICES": "-1"}, deadline=60 + 10 * KILLS
    )
    assert done.status == 0, done.stderr[-4000:]
    kills, interrupted = map(int, re.match(r"(\d+) kills, (\d+) during a save", done.stdout).groups())
    assert kills == wanted and interrupted > 0


@contextlib.contextmanager
def files_of_at_most(num_bytes):
    """What a full disk looks like to who writes a file: after so many bytes there is no room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old_handler)


@pytest.mark.parametrize("room", [0, 10, 100, 5000, 19_000])
def test_a_full_disk_is_an_error_and_leaves_the_old_checkpoint(tmp_path, room):
    table = new_table(capacity=2000)
    table.assign([1], np.ones([1, 3]))
    sok.save(tmp_path, table)
    old, files = contents(table), sorted(tmp_path.iterdir())
    table.assign(np.arange(1000), np.ones([1000, 3]))
    said = "cannot write at offset|(File too large|No space left on device): .*writer.json"
    with files_of_at_most(room), pytest.raises((tf.errors.ResourceExhaustedError, OSError), match=said):
        sok.save(tmp_path, table)
    assert sorted(tmp_path.iterdir()) == files
    assert verify(tmp_path) == []
    sok.restore(tmp_path, table)
    assert contents(table) == old


def test_a_disk_that_fills_up_at_the_manifest_leaves_the_old_checkpoint(tmp_path):
    table = new_table(name="a long name that is in the manifest and not in the lease" * 10)
    sok.save(tmp_path, table)
    old = read_manifest(tmp_path)
    with files_of_at_most(1100), pytest.raises(OSError, match="File too large"):
        sok.save(tmp_path, table)
    assert read_manifest(tmp_path) == old and verify(tmp_path) == []
    assert not [path for path in tmp_path.iterdir() if path.name.endswith("shard.tmp")]
