"""One agreement: what one rank raises is raised on all, in its own class, eagerly and in graphs."""

import pytest
import tensorflow as tf

from sok import checkpoint
from sok.base.errors import FormatError, TableFull
from sok.compat.formats import columns
from sok.job import agreement
from sok.job.transport.local import LocalTransport
from sok.saved_model import serving_file
from tests.sok.threads_world import checked, run_world


class OfNobody(Exception):
    """A class that peers do not know."""


# What one rank raises, and what all raise then.
KINDS = [
    (ValueError("bad"), ValueError),
    (TypeError("bad"), TypeError),
    (FileExistsError("bad"), FileExistsError),
    (ConnectionError("bad"), OSError),
    (NotImplementedError("bad"), NotImplementedError),
    (FormatError("bad"), FormatError),
    (TableFull("bad"), tf.errors.ResourceExhaustedError),
    (tf.errors.DataLossError(None, None, "bad [Op:Read]"), tf.errors.DataLossError),
    (OfNobody("bad"), RuntimeError),
]
by_kind = pytest.mark.parametrize("error, raised", KINDS, ids=[type(error).__name__ for error, _ in KINDS])


def fail(error):
    raise error


def text_of(error):
    return agreement.plain_text(error) if error else None


@by_kind
def test_an_error_of_one_rank_is_raised_on_all_in_its_class(monkeypatch, error, raised):
    def program(transport):
        undone, part = [], lambda: fail(error) if transport.rank == 1 else "done"
        texts = []
        for run in (
            lambda: agreement.together(transport, "sok/test/a", part, lambda: undone.append(1)),
            lambda: agreement.done_by_all(transport, "sok/test/b", part),
            lambda: agreement.agree(transport, "sok/test/c", agreement.attempt(part), lambda: undone.append(1)),
        ):
            with pytest.raises(raised) as caught:
                run()
            assert type(caught.value) is raised
            texts.append(text_of(caught.value))
        return texts, undone, transport.collectives

    told = ["rank 1 of 2: bad"] * 3, [1, 1], ["sok/test/a", "sok/test/b", "sok/test/c"]
    assert checked(run_world(2, program, monkeypatch)) == [told, told]


def test_each_rank_gets_what_it_may_have(monkeypatch):
    def program(transport):
        mine = object()
        assert agreement.done_by_all(transport, "sok/test/mine", lambda: mine) is mine
        assert bool(agreement.agree(transport, "sok/test/fine", agreement.attempt(lambda: None)))
        return agreement.together(transport, "sok/test/all", lambda: {"läuft\n": transport.rank})

    both = [{"läuft\n": 0}, {"läuft\n": 1}]
    assert checked(run_world(2, program, monkeypatch)) == [both, both]


def test_values_that_differ_are_named_with_their_ranks():
    assert agreement.check_equal([3, 3], "`n`") == 3
    with pytest.raises(ValueError, match="`n` .*0 has 3, rank 1 4"):
        agreement.check_equal([3, 4], "`n`")


@by_kind
def test_a_graph_says_what_was_raised_when_it_ran(error, raised):
    happened = []

    @tf.function
    def run(is_bad):
        def part(is_bad):
            if is_bad:
                raise error

        text = agreement.attempt(part, is_bad)
        with tf.control_dependencies([agreement.agree(LocalTransport(), "g", text, lambda: happened.append("undone"))]):
            return tf.constant("done")

    assert run(tf.constant(False)) == b"done" and not happened
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{agreement.describe(error).partition(':')[0]}: bad"):
        run(tf.constant(True))
    assert happened == ["undone"]


def test_a_damaged_file_is_one_class_under_all_its_names():
    assert issubclass(FormatError, ValueError)
    for name in (checkpoint.CheckpointError, columns.FormatError, serving_file.DamagedFileError):
        assert name is FormatError
