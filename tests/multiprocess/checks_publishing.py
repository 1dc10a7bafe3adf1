"""Two workers publish what they train; who follows has all of it, of one step."""

import numpy as np
import tensorflow as tf

import sok
from sok.checkpoint import publishing, read_manifest
from sok.job import agreement, context
from sok.lookup.lookup import lookup_rows
from tests.multiprocess.training import shared_folder
from tests.sok.feed_cases import Served, assert_same_export, export

STEPS, KEYS = 6, 40
PLACEMENTS = {"by_key": None, "by_hash": sok.row_wise(hash=True), "in_columns": sok.column_wise(2)}


def made(name, **placement):
    return sok.EmbeddingVariable(4, 200, name=name, seed=5, initializer="normal", **placement)


def tables_of(name):
    tables = {kind: made(f"{name}_{kind}", placement=one) for kind, one in PLACEMENTS.items() if one is not None}
    return {"by_key": made(f"{name}_by_key"), **tables}


def train(tables, optimizer, step):
    """A step of keys that this rank has, some of which the other has, too; then some keys leave."""
    for table in tables.values():
        keys = tf.constant((np.arange(8) * (1 + context.rank()) + 5 * step) % KEYS, tf.int64)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(lookup_rows(table, keys) - 1.0))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        if step % 2:
            table.erase([step, step + 1])


def check_an_export_follows_what_all_workers_publish(world, tmp_path_of_rank):
    """One process makes the versions; each is what all workers together would export."""
    sok.Init()
    folder = shared_folder(tmp_path_of_rank)
    tables, optimizer = tables_of("published"), sok.optimizers.Adagrad(0.1)
    model = Served(*tables.values())
    publisher = sok.Publisher(folder / "feed", model, max_chain=4)
    export(model, folder / "exports" / "1")
    follower = sok.follow_export(folder / "feed", folder / "exports", max_to_keep=None)
    for step in range(STEPS):
        train(tables, optimizer, step)
        model.shift.assign(step + 10.0 * world.rank)
        publisher.publish()
        if step % 3 == 1:  # else the follower is behind
            continue
        export(model, folder / f"fresh{step}")
        if world.rank == 0:
            assert_same_export(follower.poll(), folder / f"fresh{step}")
            assert follower.poll() is None
        sok.barrier()
    return [link.world_size for link in read_manifest(folder / "feed").links]


def check_workers_that_follow_have_what_workers_publish(world, tmp_path_of_rank):
    sok.Init()
    folder = shared_folder(tmp_path_of_rank) / "followed"
    trained, served, optimizer = tables_of("followed"), tables_of("follows"), sok.optimizers.Adagrad(0.1)
    weight, there = tf.Variable(0.0), tf.Variable(-1.0)
    publisher = sok.Publisher(folder, list(trained.values()), dense={"weight": weight}, every_steps=2)
    follower = sok.follow(
        folder, {table.table_name: served[kind] for kind, table in trained.items()}, dense={"weight": there}
    )
    published = []
    for step in range(STEPS):
        train(trained, optimizer, step)
        weight.assign(step + 10.0 * world.rank)
        published.append(publisher.step())
        if published[-1]:
            assert follower.poll() and not follower.poll()
            assert float(there) == step and 0 <= follower.lag < 600
            for kind, table in trained.items():
                assert rows(served[kind]) == rows(table), kind
    return published


def rows(table):
    keys, values = (t.numpy() for t in table.export())
    return dict(zip(keys.tolist(), values.tolist(), strict=True))


def check_workers_agree_when_seconds_are_over(world, tmp_path_of_rank, monkeypatch):
    """Each has a clock of its own, of which worker 0's counts."""
    sok.Init()

    class Clock:
        now = 100.0 * world.rank

        @classmethod
        def monotonic(cls):
            return cls.now

    monkeypatch.setattr(publishing, "time", Clock)
    table = made("by_seconds")
    publisher = sok.Publisher(shared_folder(tmp_path_of_rank) / "s", table, every_seconds=10, dense=False)
    said = []
    for step in range(100):
        Clock.now += (0.3 if step < 50 else 1.0) * (1 + 3 * world.rank)
        said.append(publisher.step())
    assert 4 <= sum(said) <= 7  # one is late, as steps take longer in the middle
    assert agreement.together(context.get_transport(), "test/said", lambda: said) == [said] * world.size


def check_workers_that_publish_otherwise_are_told(world, tmp_path_of_rank):
    sok.Init()
    table = made("otherwise")
    folder, weight = shared_folder(tmp_path_of_rank) / "otherwise", tf.Variable(1.0)
    for make in (
        lambda: sok.Publisher(folder, table, every_steps=1 + world.rank, dense=False),
        lambda: sok.Publisher(folder, table, dense={f"of_{world.rank}": weight}).publish(),
        lambda: sok.Publisher(folder, table, dense=False, max_chain=1 + world.rank).publish(),
    ):
        try:
            make()
        except ValueError as error:
            assert world.size > 1 and "sok." in str(error)
        else:
            assert world.size == 1
