"""Staged inputs of v1 sessions on several ranks: lookups that begin ahead give, to the bit, what others do."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from tensorflow.python.ops import embedding_ops

import sok
from sok.base import log
from tests.sok.staged_cases import DIM, IDS, RATE, asynchronous, batches_of, deeprec, same, samples, train


def check_staged_lookups_ahead_are_those_in_their_step(world):
    with deeprec():
        inside = {optimizer: train("staged", world.rank, 0, optimizer) for optimizer in ("adagrad", "adam")}
        for optimizer, capacity, options in (
            ("adagrad", 1, {}),
            ("adam", 2, {}),
            ("adagrad", 3, {"rows": True}),
        ):
            with sok.trace() as trace:
                ahead = train("staged", world.rank, capacity, optimizer, **options)
            same(ahead, inside[optimizer])
            keys = {n: c["collectives"] for n, c in trace.by_name.items() if "/keys/" in n}
            if world.size > 1:
                assert all("/ahead" in name for name in keys) and len(keys) == 2
                # Each batch begins once, and at the end one without samples, and one that says that none follows.
                assert set(keys.values()) <= {10 + 1 + i for i in range(capacity + 2)}, keys
            assert len(ahead["losses"]) == 10


def check_staged_lookups_count_their_ids(world):
    found = []
    with deeprec():
        for capacity in (0, 2):
            with tf.Graph().as_default():
                ids = tf.staged(batches_of(*samples(world.rank, 32))[0])
                table = tf.get_embedding_variable("staged_seen", DIM)
                rows, seen, counts = tf.reduce_sum(tf.nn.embedding_lookup(table, ids)), table.ids_seen, []
                hooks = [tf.make_prefetch_hook()]
                with tf.train.MonitoredTrainingSession(config=asynchronous(capacity), hooks=hooks) as session:
                    for _ in range(4):
                        session.run(rows)
                        counts.append(int(session.run(seen)))
            found.append(counts)
    assert found == [[8 * IDS * (i + 1) for i in range(4)]] * 2, found


def check_staged_workers_without_batches_take_part(world):
    """Rows and losses of each step, as NumPy has them of all batches of all ranks."""
    counts = [80 - 24 * rank for rank in range(world.size)]
    with deeprec():
        ahead = train("staged_uneven", world.rank, 2, "sgd", counts[world.rank])
    losses, rows, dense = _trained_by_numpy(counts)
    mine = [one[world.rank] for one in losses]
    np.testing.assert_allclose(ahead["losses"], mine, 2e-5)
    for mine, table in zip(ahead["rows"], rows, strict=True):  # of each table those that this rank has
        assert set(table) >= set(mine)
        np.testing.assert_allclose([mine[key] for key in mine], [table[key] for key in mine], 2e-5)
    np.testing.assert_allclose(ahead["dense"], dense, 2e-5)


def _trained_by_numpy(counts):
    data = [samples(rank, count) for rank, count in enumerate(counts)]
    tables = [{}, {}]
    weight = np.ones([2 * DIM * IDS, 1])
    losses = []
    for begin in range(0, max(counts), 8):
        step = [(ids[begin : begin + 8], labels[begin : begin + 8]) for ids, labels in data]
        having = sum(bool(len(ids)) for ids, _ in step)
        of_ranks, grad_weight, grads = [], 0.0, [{}, {}]
        for ids, labels in step:
            if not len(ids):
                of_ranks.append(np.nan)
                continue
            x = np.stack(
                [np.concatenate([t.setdefault(i, np.ones(DIM)) for t in tables for i in row.tolist()]) for row in ids]
            )
            error = x @ weight - labels
            of_ranks.append(np.mean(error**2))
            upstream = 2 * error / len(ids) / having
            grad_weight = grad_weight + x.T @ upstream
            of_rows = (upstream @ weight.T).reshape([len(ids), 2, IDS, DIM])
            for s, row in enumerate(ids):
                for t in range(2):
                    for place, key in enumerate(row.tolist()):
                        grads[t][key] = grads[t].get(key, 0.0) + of_rows[s, t, place]
        losses.append(of_ranks)
        weight = weight - RATE * grad_weight
        for table, of_table in zip(tables, grads, strict=True):
            for key, grad in of_table.items():
                table[key] = table[key] - RATE * grad
    return losses, tables, weight


def check_staged_batches_of_a_fixed_size_must_be_as_many(world):
    if world.size == 1:
        return
    for is_ragged in False, True:
        _fixed_and_uneven(world, is_ragged)


def _fixed_and_uneven(world, is_ragged):
    with deeprec(), tf.Graph().as_default():
        ids, _ = samples(world.rank, 24 - 8 * (world.rank == 1))
        data = tf.data.Dataset.from_tensor_slices(ids).batch(8, drop_remainder=True)
        if is_ragged:
            data = data.map(lambda ids: tf2.RaggedTensor.from_tensor(ids))
        staged = tf.staged(tf.data.make_one_shot_iterator(data).get_next())
        table = tf.get_embedding_variable("staged_fixed", DIM)
        if is_ragged:
            (rows,) = sok.group_embedding_lookup_sparse([table], [staged], combiners="sum")
        else:
            rows = tf.nn.embedding_lookup(table, staged)
        found, steps = tf.reduce_sum(rows), 0
        with tf.train.MonitoredTrainingSession(config=asynchronous(1), hooks=[tf.make_prefetch_hook()]) as session:
            session.run(found)
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"rank 1: the data of this worker .* fixed"):
                while steps < 10:
                    steps += 1
                    session.run(found)
        assert steps == 2


def check_staged_batches_of_a_fixed_size_end_together(world):
    with deeprec(), tf.Graph().as_default():
        ids, _ = samples(world.rank, 24)
        data = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(ids).batch(8, drop_remainder=True))
        table = tf.get_embedding_variable("staged_fixed", DIM)
        found, steps = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.staged(data.get_next()))), 0
        with tf.train.MonitoredTrainingSession(config=asynchronous(2), hooks=[tf.make_prefetch_hook()]) as session:
            while not session.should_stop():
                session.run(found)
                steps += 1
        assert steps == 3


def check_staged_errors_are_raised_in_their_step_on_all(world):
    with deeprec():
        for what, words in ("id", "-5"), ("data", "cannot read this"), ("text", "could not correctly convert"):
            with tf.Graph().as_default():
                ids, labels = samples(world.rank, 64)
                if what == "id" and world.rank == world.size - 1:
                    ids[35] = -5
                batch = batches_of(ids, labels)[0]
                if what == "data":
                    batch = tf.reshape(tf.numpy_function(_failing(world.rank == 0), [batch], tf.int64), [-1, IDS])
                table = sok.EmbeddingVariable(DIM, 50, name="staged_errors", hashed=False)
                if what == "text":  # ids are calculated of the batch
                    texts = ids.astype(str).astype(object)
                    texts[35] = "no number" if world.rank == world.size - 1 else "1"
                    batch = batches_of(texts, labels)[0]
                staged = tf.staged(batch)
                staged = tf.strings.to_number(staged, tf.int64) if what == "text" else staged
                staged = tf.RaggedTensor.from_tensor(staged)
                found = sok.group_embedding_lookup_sparse([table], [staged], combiners="sum")
                steps = 0
                options = {"config": asynchronous(2), "hooks": [tf.make_prefetch_hook()]}
                with (
                    pytest.raises(tf.errors.OpError, match=words) as raised,
                    tf.train.MonitoredTrainingSession(**options) as session,
                ):
                    while not session.should_stop():
                        session.run(found)
                        steps += 1
                assert steps == 4, (what, steps, raised.value)


def _failing(fails):
    calls = iter(range(100))

    def read(ids):
        if next(calls) == 4 and fails:
            raise ValueError("cannot read this")
        return ids

    return read


def check_staged_loops_may_stop_early(world):
    with deeprec():
        for _ in range(2):  # what was begun and not used meets nothing of the next
            found = train("staged_early", world.rank, 3, hooks=[tf.train.StopAtStepHook(num_steps=4)])
            assert len(found["losses"]) == 4


def check_staged_stale_rows_are_as_old_as_asked(world):
    """Each step adds 1 to the one row that is looked up."""
    seen = []
    with deeprec(), tf.Graph().as_default():
        data = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(np.full([12, 1], 7)).batch(1))
        table = tf.get_embedding_variable("staged_stale", 1, initializer=tf.zeros_initializer())
        rows = tf.nn.embedding_lookup(table, tf.staged(data.get_next(), stale=2))
        own = sok.DistributedOptimizer(tf.train.GradientDescentOptimizer(1.0))
        update = own.minimize(-tf.reduce_sum(rows))
        with tf.train.MonitoredTrainingSession(config=asynchronous(2), hooks=[tf.make_prefetch_hook()]) as session:
            while not session.should_stop():
                seen.append(float(session.run([rows, update])[0].ravel()[0]))
    ages = [step - value for step, value in enumerate(seen)]
    assert len(seen) == 12 and all(0 <= age <= (2 if world.size > 1 else 0) for age in ages), ages
    if world.size > 1:
        assert max(ages) > 0


def check_staged_sessions_save_and_go_on(world, tmp_path_of_rank):
    """Saves take no notice of what has begun; the session that comes after has its rows, slots and steps."""
    found = []
    with deeprec():
        for capacity in (0, 2):
            folder = str(tmp_path_of_rank.parent / "shared" / f"staged_{capacity}")
            for count in (40, 64):  # 5 steps, then 8
                hooks = [sok.hooks.CheckpointSaverHook(folder, save_steps=2)]
                found.append(train("staged_saved", world.rank, capacity, "adam", count, hooks))
    same(found[2:], found[:2])
    assert len(found[1]["losses"]) == 8 and found[1]["losses"][0] != found[0]["losses"][0]


def check_staged_lookups_that_cannot_be_cut_are_made_in_their_step(world, monkeypatch):
    def look_up(tables, ids):
        first = tf.nn.embedding_lookup(tables[0], ids)
        chosen = tf.cast(tf.abs(first[:, 0, 0]) * 1e3, tf.int64) % 40
        return tf.concat([first[:, 0], tf.nn.embedding_lookup(tables[1], chosen)], 1)

    found, said = [], []
    monkeypatch.setattr(log.logger, "warning", lambda text, *values: said.append(text % values))
    with deeprec():
        for capacity in (0, 2):
            found.append(train("staged_stays", world.rank, capacity, "adagrad", 40, look_up=look_up))
    same(*found)
    why = "its ids do not come from the batch of one stage alone, by ops without a state"
    text = f"The lookup of table 'staged_stays_1' is made in its step, not ahead of it: {why}."
    assert said == ([text] if world.size > 1 and world.rank == 0 else [])


def check_staged_lookups_are_exported(world, tmp_path_of_rank):
    path = str(tmp_path_of_rank.parent / "shared" / "of_staged")
    with deeprec(), tf.Graph().as_default():
        ids = tf.staged(batches_of(*samples(world.rank, 24))[0])
        table = tf.get_embedding_variable("staged_export", DIM, capacity=100)
        summed = tf.reduce_sum(tf.nn.embedding_lookup(table, ids), 1)
        with tf.Session(config=asynchronous(1)) as session:
            for _ in range(3):
                session.run(summed)
            asked = samples(0, 8)[0]
            expected = session.run(summed, {ids: asked})
            sok.export_saved_model(session, path, signatures={"serving_default": ({"ids": ids}, {"y": summed})})
    found = tf2.saved_model.load(path).signatures["serving_default"](ids=tf2.constant(asked))["y"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def check_staged_lookups_are_cut_wherever_they_are_made(world):
    """Layers, groups, columns, the functions of tf.nn: all begin ahead, and give what they give in their step."""

    def look_up(tables, ids):
        sparse = tf.sparse.from_dense(ids)
        ragged = tf2.RaggedTensor.from_tensor(ids)
        column = tf.feature_column.categorical_column_with_embedding("ids", capacity=100)
        of_column = tf.feature_column.embedding_column(column, 3, initializer="ones")
        column = tf.feature_column.sequence_categorical_column_with_embedding("ids", capacity=100)
        sequence = tf.feature_column.embedding_column(column, 2, initializer="ones")
        layer = sok.DistributedEmbedding("mean", 100, 5, 1, IDS, name="staged_layer", embedding_initializer="ones")
        sparse_ids = tf.SparseTensor(sparse.indices, tf.cast(sparse.values, tf.int64), sparse.dense_shape)
        weights = tf.SparseTensor(sparse.indices, tf.cast(sparse.values, tf.float32) / 40, sparse.dense_shape)
        return tf.concat(
            [
                tf.nn.embedding_lookup_sparse(tables[0], sparse_ids, weights, combiner="sum"),
                tf.nn.safe_embedding_lookup_sparse(tables[1], sparse_ids, combiner="mean"),
                tf.nn.fused_embedding_lookup_sparse(tables[0], sparse_ids, combiner="mean"),
                embedding_ops.fused_safe_embedding_lookup_sparse(tables[1], sparse_ids, combiner="sqrtn"),
                tf.contrib.layers.safe_embedding_lookup_sparse(tables[0], sparse_ids),
                tf.reshape(tf.contrib.feature_column.sequence_input_layer({"ids": sparse_ids}, [sequence])[0], [-1, 6]),
                tf.reshape(
                    tf.contrib.layers.sequence_input_from_feature_columns({"ids": sparse_ids}, [sequence]), [-1, 6]
                ),
                tf.contrib.layers.input_from_feature_columns({"ids": sparse_ids}, [of_column]),
                *sok.group_embedding_lookup_sparse(tables, [ragged, ragged], combiners=["sum", "mean"]),
                tf.reshape(layer(ids, training=True), [-1, 5]),
                tf.feature_column.input_layer({"ids": sparse_ids}, [of_column]),
            ],
            1,
        )

    with deeprec():
        inside = train("staged_entries", world.rank, 0, "adam", 40, look_up=look_up)
        with sok.trace() as trace:
            ahead = train("staged_entries", world.rank, 2, "adam", 40, look_up=look_up)
    same(ahead, inside)
    keys = [name for name in trace.by_name if "/keys/" in name]
    assert all("/ahead" in name for name in keys) and (len(keys) == 11 or world.size == 1), keys


def check_staged_runs_may_be_given_ids(world):
    """All of a batch, a part of it, or what is made of it: rows are those of what is given, between other steps."""
    found = []
    with deeprec():
        for capacity in (0, 2):
            with tf.Graph().as_default():
                ids, labels = tf.staged(batches_of(*samples(world.rank, 80)))
                halves = ids // 2
                table = tf.get_embedding_variable("staged_given", DIM, initializer=tf.ones_initializer())
                rows = tf.nn.embedding_lookup(table, halves)
                loss = tf.reduce_mean(tf.square(tf.reduce_sum(rows, [1, 2])[:, None] - labels))
                own = sok.DistributedOptimizer(tf.train.AdagradOptimizer(0.1))
                update = own.minimize(loss, tf.train.get_or_create_global_step())
                given, of_given = samples(world.rank, 8, seed=7)
                feeds = ({ids: given, labels: of_given}, {}, {ids: given}, {halves: given}, {labels: of_given}, {})
                hooks = [tf.make_prefetch_hook()]
                with tf.train.MonitoredTrainingSession(config=asynchronous(capacity), hooks=hooks) as session:
                    for feed in feeds:
                        found.append(session.run([rows, loss], feed))
                        session.run(update)
    same(found[: len(feeds)], found[len(feeds) :])


def check_staged_averages_of_chained_stages(world):
    counts, found = [80 - 24 * rank for rank in range(world.size)], []
    with deeprec():
        for is_chained in (False, True):
            with tf.Graph().as_default():
                ids, labels = tf.staged(batches_of(*samples(world.rank, counts[world.rank])))
                if is_chained:
                    ids, labels = tf.staged((ids, labels))
                table = tf.get_embedding_variable("staged_chained", DIM, initializer=tf.ones_initializer())
                rows = tf.nn.embedding_lookup(table, ids)
                loss = tf.reduce_mean(tf.square(tf.reduce_sum(rows, [1, 2])[:, None] - labels))
                weight = sok.deeprec.batch_weight()
                own = sok.DistributedOptimizer(tf.train.AdagradOptimizer(0.1))
                update = own.minimize(loss * weight, tf.train.get_or_create_global_step())
                hooks = [tf.make_prefetch_hook()]
                with tf.train.MonitoredTrainingSession(config=asynchronous(1), hooks=hooks) as session:
                    while not session.should_stop():
                        found.append(session.run([loss, weight, update])[:2])
    assert len(found) == 20
    same(found[:10], found[10:])
    if world.rank:
        assert found[9][1] == 0.0


def check_staged_sessions_side_by_side_are_refused(world):
    with deeprec(), tf.Graph().as_default():
        table = tf.get_embedding_variable("staged_side", DIM)
        rows = tf.nn.embedding_lookup(table, tf.staged(batches_of(*samples(world.rank, 80))[0]))
        with tf.Session(config=asynchronous(1)) as first, tf.Session(config=asynchronous(1)) as second:
            first.run(rows)
            if world.size > 1:
                with pytest.raises(RuntimeError, match="Another session of this graph begins the lookups of stage"):
                    second.run(rows)
        with tf.Session(config=asynchronous(1)) as third:
            third.run(rows)
