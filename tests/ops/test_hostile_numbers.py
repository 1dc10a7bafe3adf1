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


def test_what_an_envelope_says_of_this_rank_must_be_so(lib):
    x, splits = tf.ones([3]), tf.constant([3])
    envelope, size = lib.sok_shared_post(x, splits, [], rank=0, collective="c")
    for count in (2, 4, 1 << 20, 1 << 62):
        envelope = tf.concat([[tf.constant(count, tf.int64)], envelope[1:]], 0)
        with pytest.raises(tf.errors.InvalidArgumentError, match="rank 0 .*.c.*no envelope"):
            lib.sok_shared_collect(envelope, size, x, splits, [], rank=0, collective="c")
