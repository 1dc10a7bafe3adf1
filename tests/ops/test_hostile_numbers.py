"""No number that comes to a native op may end the process."""

from pathlib import Path

import pytest
import tensorflow as tf

from tests.ops.tables import NativeTable


def test_no_number_ends_the_process(forked, tmp_path):
    child = forked.run(Path(__file__).with_name("hostile_calls.py"), tmp_path, deadline=280)
    last = child.stdout.splitlines()[-1:]
    assert child.status == 0, f"status {child.status} of {last}\n{child.stderr[-3000:]}"
    refused, accepted = (int(word) for word in last[0].split() if word.isdigit())
    assert refused > 1000 and accepted > 100, last


def test_a_table_that_is_gone_is_not_found():
    table = NativeTable(shared_name="a table that will be gone")
    tf.raw_ops.DestroyResourceOp(resource=table.handle)
    with pytest.raises(tf.errors.NotFoundError, match="does not exist"):
        table.size()
