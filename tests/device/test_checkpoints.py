"""Tables on a GPU saved by changes and in the background: the tests of the CPU, run there, and what differs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

import sok
from tests.sok import test_checkpoint_asynchronous as asynchronous
from tests.sok import test_checkpoint_feed as feed
from tests.sok import test_checkpoint_incremental as incremental
from tests.sok.checkpoint_cases import new_table

from .conftest import GPU

ROOT = Path(__file__).resolve().parents[2]

held = asynchronous.held

test_chains = incremental.test_a_chain_is_restored_as_the_table_was_and_trains_on_alike
test_deltas = incremental.test_a_delta_holds_what_changed_and_nothing_else
test_failed_saves = incremental.test_a_failed_save_forgets_no_change
test_failed_first_saves = incremental.test_a_first_save_that_fails_leaves_nothing_to_count_from
test_restored_chains = incremental.test_a_restored_chain_goes_on
test_tables_restored_in_part = incremental.test_a_table_that_was_not_saved_or_restored_as_a_whole_makes_it_a_full_save
test_saves_beside_training = asynchronous.test_a_save_holds_what_the_tables_held_when_it_began
test_deltas_beside_training = asynchronous.test_deltas_can_be_written_in_the_background
test_errors_beside_training = asynchronous.test_an_error_is_raised_by_result_and_nothing_is_forgotten
test_whatever_is_done_beside = asynchronous.test_whatever_is_done_during_a_save_is_not_in_it
test_pieces = feed.test_pieces_say_what_each_save_has_changed


@pytest.fixture(autouse=True)
def on_the_gpu():
    sok.Init()
    with tf.device(GPU):
        yield


def test_tables_of_these_tests_are_there():
    assert new_table().handle.device.endswith("GPU:0")


def test_a_save_that_is_killed_leaves_the_newest_complete_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.device.checkpoint_killed_script", str(tmp_path), "3", "1", "both"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kills, interrupted = map(int, re.match(r"(\d+) kills, (\d+) during a save", done.stdout).groups())
    assert kills == 3 and interrupted > 0
