"""What a job says of itself: hints, scalars, traces of lookups, barriers."""

import logging
import re
import time

import tensorflow as tf

import sok
from sok.base import log
from sok.lookup import advice
from tests.messages import saying


def tables_of(kind, count):
    return [sok.EmbeddingVariable(2, 100, name=f"words_{kind}_{i}") for i in range(count)]


def a_step(tables, ids, together=False):
    """Looks each table up by itself, or all by one lookup, and brings their gradients home."""
    with tf.GradientTape() as tape:
        if together:
            outputs = sok.group_embedding_lookup(tables, [ids] * len(tables))
        else:
            outputs = [sok.group_embedding_lookup([table], [ids])[0] for table in tables]
        loss = tf.add_n([tf.reduce_sum(output) for output in outputs])
    return [slices.values for slices in tape.gradient(loss, tables)]


def _heard(monkeypatch):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    assert advice.FEW > 3
    monkeypatch.setattr(advice, "FEW", 2)  # few lookups are soon traced
    monkeypatch.setattr(advice, "_has_spoken", False)
    monkeypatch.setattr(log.logger, "handlers", [handler])
    return records


def check_few_lookups_and_grouped_ones_bring_no_hint(world, monkeypatch):
    records, ids = _heard(monkeypatch), tf.constant([1, 2, 3], tf.int64)
    few, many = tables_of("few", 2), tables_of("grouped", 3)
    for _ in range(3):  # an evaluation first, without gradients
        for table in few:
            table.sparse_read(ids)
    for _ in range(3):
        a_step(few, ids)
    a_step(many, ids, together=True)
    tf.function(lambda: (a_step(few, ids), a_step(many, ids, together=True)))()
    tf.function(lambda: a_step(few, ids))()
    assert not records


def _check_many(world, monkeypatch, kind):
    records, ids = _heard(monkeypatch), tf.constant([1, 2, 3], tf.int64)
    many = tables_of(kind, 4)
    run = (lambda: a_step(many, ids)) if kind == "eager" else tf.function(lambda: a_step(many, ids))
    for _ in range(2):
        run()
    if world.size == 1 or world.rank > 0:
        assert not records
        return
    (record,) = records
    assert record.rank == 0 and record.levelno == logging.WARNING
    names = ", ".join(f"'{table.table_name}'" for table in many)
    remedies = ("slot_num", "group_embedding_lookup_sparse", "group_embedding_column_scope", "sok.trace")
    parts = (f"{len(many)} lookups", names, f"{world.size} workers", *remedies)
    assert re.match(saying(*parts), record.getMessage())


def check_many_eager_lookups_of_a_step_bring_one_hint(world, monkeypatch):
    _check_many(world, monkeypatch, "eager")


def check_many_lookups_of_a_function_bring_one_hint(world, monkeypatch):
    _check_many(world, monkeypatch, "function")


def check_a_trace_names_the_lookups_with_their_time(world):
    first, second = tables_of("traced", 2)
    ids = tf.constant([1, 2, 3], tf.int64)
    with sok.trace() as t:
        a_step([first, second], ids)
        a_step([first, second], ids, together=True)
    if world.size == 1:
        assert t.by_lookup == {}
        return
    names = [first.table_name, second.table_name, f"{first.table_name}+1"]
    assert sorted(t.by_lookup) == sorted(names)
    for name, one in t.by_lookup.items():
        assert (one["calls"], one["collectives"]) == (1, 3), name
        assert one["seconds"] > 0 and one["bytes"] > 0, name
    assert all(f"lookup '{name}': 1 calls" in str(t) for name in names)


def check_scalars_of_a_shard_take_no_collective(world, tmp_path_of_rank):
    (table,) = tables_of("scalars", 1)
    folder = tmp_path_of_rank / "scalars"
    scalars = sok.callbacks.TableScalars(folder, tables=table)
    for _ in range(2):
        a_step([table], tf.constant([[0, 1, 2, 3, 4, 5]], tf.int64))
    with sok.trace() as t:
        told = scalars.write(2)
    assert t.collectives == 0
    of_shard = len(range(world.rank, 6, world.size))
    assert told[f"tables/{table.table_name}/rows"] == of_shard
    assert told[f"tables/{table.table_name}/new_ids"] == of_shard / 12
    assert [path.name for path in folder.iterdir()] == [f"rank{world.rank}"]
    assert ("exchange/bytes_per_step" in told) is ("exchange/seconds_per_step" in told) is (world.size > 1)
    if world.size > 1:
        assert told["exchange/bytes_per_step"] > 0 and told["exchange/seconds_per_step"] > 0


def check_nobody_passes_a_barrier_before_all_are_there(world, tmp_path_of_rank):
    file = tmp_path_of_rank.parent / "come"
    if world.rank == world.size - 1:
        time.sleep(0.3)
        file.write_text("all")
    with sok.trace() as t:
        sok.barrier()
    assert file.read_text() == "all"
    assert t.collectives == (world.size > 1)
