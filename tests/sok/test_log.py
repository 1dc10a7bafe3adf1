"""What sok says of its work, and to whom."""

import logging

import pytest
import tensorflow as tf

import sok
from sok.base import log
from tests.messages import saying


@pytest.fixture
def alone(monkeypatch):
    """Called in a test, makes it a program that has set up no logging: pytest has, when the test begins."""
    return lambda: monkeypatch.setattr(logging.getLogger(), "handlers", [])


def test_it_is_quiet_until_asked(alone, capsys, tmp_path):
    alone()
    sok.shutdown()
    sok.Init(seed=3)
    table = sok.EmbeddingVariable(2, 10, name="logged")
    sok.save(tmp_path, table)
    assert capsys.readouterr() == ("", "")


def test_what_holds_a_job_up_reaches_standard_error_line_by_line(alone, capsys):
    alone()
    log.logger.warning("%s wait\nfor %d s", "some", 60)
    assert capsys.readouterr().err == "sok: rank 0: some wait\nsok: rank 0: for 60 s\n"


def test_a_level_is_enough_to_hear_more(alone, capsys, tmp_path, monkeypatch):
    alone()
    sok.shutdown()
    monkeypatch.setattr(log.logger, "level", logging.INFO)
    monkeypatch.setattr(log.logger, "_cache", {})
    sok.Init(global_batch_size=8, seed=3)
    table = sok.EmbeddingVariable(2, 10, name="logged")
    sok.save(tmp_path / "c", table)
    sok.restore(tmp_path / "c", table)
    sok.shutdown()
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sok: rank 0: ")]
    for line, parts in zip(
        said,
        (["job begins", "seed 3", "8"], ["Saved", "c"], ["Restored", "c"], ["has ended", "seed 3"]),
        strict=True,
    ):
        assert all(part in line for part in parts), line


def test_exports_are_told(caplog, tmp_path):
    table = sok.EmbeddingVariable(2, 10, name="logged")
    with caplog.at_level(logging.INFO, "sok"):
        spec = tf.TensorSpec([None, 1], tf.int64, "ids")
        sok.export_saved_model(table.sparse_read, tmp_path / "e", signatures=spec)
    assert f"Exported 1 tables to {tmp_path / 'e'}." in caplog.messages


def test_handlers_of_the_program_get_the_rank_and_take_the_words_over(alone, capsys, monkeypatch):
    alone()
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    monkeypatch.setattr(log._with_rank, "rank", 5)
    log.logger.addHandler(handler)
    try:
        log.logger.warning("all of %s", "it")
    finally:
        log.logger.removeHandler(handler)
    (record,) = records
    assert logging.Formatter("%(name)s %(rank)d %(message)s").format(record) == "sok 5 all of it"
    assert capsys.readouterr().err == ""
    logging.getLogger().addHandler(handler)  # the root's, too
    log.logger.warning("again")
    assert len(records) == 2 and capsys.readouterr().err == ""


def test_a_barrier_is_for_scripts_alone():
    sok.barrier()
    with pytest.raises(RuntimeError, match=saying("sok.barrier", "eagerly", "tf.function")):
        tf.function(sok.barrier)()
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="eagerly"):
        sok.barrier()
