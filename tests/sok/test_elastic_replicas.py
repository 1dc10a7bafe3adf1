"""Copies of a worker's rows, kept by increments, beside what a dictionary says; who keeps whose; what is refused."""

import collections
import itertools

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.base import _ops
from sok.checkpoint import replica_pieces
from sok.checkpoint.elastic_hello import newest
from sok.checkpoint.replica_pieces import Piece, Reading
from sok.checkpoint.replicas import Replica, keepers
from sok.job import context
from sok.table.counted import with_counted

KEYS = 60
POLICIES = {"admission": sok.Admission(after=2), "eviction": sok.Eviction(older_than=4, every=2)}
_RULES = {
    "SGD": lambda: sok.optimizers.SGD(0.1),
    "Adam": lambda: sok.optimizers.Adam(0.1),  # moves rows that no step touches, too
    "RowWiseAdagrad": lambda: sok.optimizers.RowWiseAdagrad(0.1),
}


@pytest.fixture(autouse=True)
def _job():
    sok.shutdown()
    yield
    sok.shutdown()


class Stated:
    """The slow statement: a table as a dictionary, copied whole at each commit."""

    def __init__(self, table, slot_set):
        self.table, self.slot_set, self.at_commit = table, slot_set, {}

    def rows(self, handle):
        keys, rows = _ops.lib().sok_table_export(handle, key_dtype=self.table.key_dtype, dim=self.table.dim)
        found = {key: [row] for key, row in zip(keys.numpy().tolist(), rows.numpy(), strict=True)}
        names = [name.decode() for name in _ops.lib().sok_table_slot_sets(handle)[0].numpy()]
        if self.slot_set in names:
            keys, slots, _ = _ops.lib().sok_table_slots(handle, key_dtype=self.table.key_dtype, slot_set=self.slot_set)
            for key, its in zip(keys.numpy().tolist(), slots.numpy(), strict=True):
                found[key].append(its)
        if self.table.options.keeps_history:
            ids = tf.range(KEYS, dtype=self.table.key_dtype)
            found["history"] = [tensor.numpy() for tensor in _ops.lib().sok_table_history(handle, ids)]
        found["step"] = [np.array(int(_ops.lib().sok_table_step(handle)))]
        return found

    def commit(self):
        self.at_commit = self.rows(self.table.handle)

    def check(self, replica):
        kept = self.rows(replica.shards[0].handle)
        assert kept.keys() == self.at_commit.keys()
        for key, parts in self.at_commit.items():
            for mine, its in zip(parts, kept[key], strict=True):
                # Adam settles rows that were not sent in pieces: that rounds otherwise (docs/design/checkpoint.md).
                np.testing.assert_allclose(its, mine, rtol=1e-4, atol=1e-6, err_msg=str(key))


def hand_over(tables, replica, is_whole, name):
    """As a commit does it, through bytes."""
    for table in tables:
        _ops.lib().sok_table_save_begin(table.handle, snapshot="")
    readings = [Reading.of(place, table, is_whole) for place, table in enumerate(tables)]
    for reading in readings:
        pieces = list(reading.pieces())
        assert len(pieces) == reading.num_pieces
        for piece in pieces:
            replica.take(Piece.from_bytes(piece.to_bytes()), name)
    for table in tables:
        _ops.lib().sok_table_save_end(table.handle, name)


@pytest.mark.parametrize("rule", _RULES)
@pytest.mark.parametrize(
    "options",
    [{}, POLICIES, {"key_dtype": "uint64"}, {"key_dtype": "int32", "hashed": False, "num_keys": KEYS}],
    ids=["plain", "policies", "uint64", "row numbers"],
)
def test_a_replica_holds_what_its_table_held_at_the_commit(rule, options, monkeypatch):
    monkeypatch.setattr(replica_pieces, "PIECE_BYTES", 200)  # several pieces of each, of keys that are gone, too
    table = sok.EmbeddingVariable(dim=3, capacity=KEYS, name="kept", seed=1, **options)
    optimizer = _RULES[rule]()
    stated, rng = Stated(table, optimizer.slot_set), np.random.default_rng(len(rule) + len(options))
    tables = list(with_counted({"kept": table}).values())
    replica = Replica([table], 0, 1)
    assert len(replica.tables) == len(tables) == (2 if "admission" in options else 1)
    for commit in range(8):
        for _ in range(rng.integers(0, 4)):
            keys = tf.constant(rng.integers(0, KEYS, 12), table.key_dtype)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, keys) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
            if rng.random() < 0.5 and not options.get("num_keys"):
                table.erase(rng.integers(0, KEYS, 40).astype(table.key_dtype.as_numpy_dtype))
            if commit:  # nothing of what is not committed shows
                stated.check(replica)
        stated.commit()
        hand_over(tables, replica, commit == 0, f"commit {commit}")
        stated.check(replica)


def test_a_save_from_a_replica_is_one_of_the_table(tmp_path):
    table, optimizer = (
        sok.EmbeddingVariable(dim=2, capacity=KEYS, name="saved", seed=3, **POLICIES),
        sok.optimizers.Adam(0.1),
    )

    def train(*keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant(keys, tf.int64)) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    for _ in range(3):
        train(1, 2, 3)
    sok.save(tmp_path / "both", [table], optimizer)
    replica, tables = Replica([table], 0, 1), list(with_counted({"saved": table}).values())
    hand_over(tables, replica, True, "first")
    train(2, 4)
    hand_over(tables, replica, False, "second")
    sok.save(tmp_path / "table", [table], optimizer)
    train(1, 2)  # the replica knows nothing of it
    sok.save(tmp_path / "both", replica.as_tables(), optimizer, incremental=True)
    links = sok.checkpoint.read_manifest(tmp_path / "both").links
    assert [sum(file.rows for file in link.table("saved").files) for link in links] == [3, 1]
    found = []
    for folder in ("table", "both"):
        again = sok.EmbeddingVariable(dim=2, capacity=KEYS, name="again", seed=3, **POLICIES)
        sok.restore(tmp_path / folder, {"saved": again})
        keys, rows = (tensor.numpy() for tensor in again.export())
        counts, last = (tensor.numpy() for tensor in again.history(np.arange(6)))
        order = np.argsort(keys)
        found.append([keys[order], rows[order], counts, last, int(again.step)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert found[0][0].tolist() == [1, 2, 3] and found[0][4] == 4 and found[0][2].tolist() == [0, 3, 4, 3, 1, 0]


def test_rows_are_kept_on_another_host_as_often_as_that_can_be():
    for sizes in itertools.product(range(4), repeat=3):
        hosts = [host for host, size in zip("abc", sizes, strict=True) for _ in range(size)]
        if len(hosts) < 2:
            continue
        for order in (hosts, hosts[::-1], hosts[1::2] + hosts[::2]):
            found = keepers(order)
            assert sorted(found) == list(range(len(order))) and all(rank != its for rank, its in enumerate(found))
            stay = sum(order[rank] == order[its] for rank, its in enumerate(found))
            most = max(collections.Counter(order).values())
            assert stay == max(0, 2 * most - len(order)) or (most == len(order) and stay == most)


def test_the_newest_commit_of_which_all_rows_are_there_is_gone_on_from():
    def of(number, token, own, kept, size=3):
        return [number, token, size, [own, kept]]

    assert newest([]) is None and newest([[], []]) is None
    assert newest([[of(7, "a", 0, 2)], [of(7, "a", 2, 1)]]).workers == (0, 1, 1)
    assert newest([[of(7, "a", 0, 2)], [], [of(7, "a", 2, 1)]]).workers == (0, 2, 2)
    assert newest([[of(7, "a", 0, 2)], [of(8, "b", 2, 1)]]) is None
    assert newest([[of(7, "a", 0, 2)]]) is None  # two neighbours are gone
    both = [[of(7, "a", 0, 2), of(8, "b", 0, 2)], [of(7, "a", 2, 1)]]
    assert newest(both).number == 7  # not all of the newer one is there
    both[1] = [of(8, "b", 2, 1)]  # who has heard that all hold it has forgotten the other
    assert newest(both).number == 8
    assert newest([[of(7, "a", 0, 1, size=2)], [of(7, "b", 1, 0, size=2)]]).number == 7  # one worker has all of "a"
    assert newest([[of(7, "a", 0, 2)], [of(7, "b", 2, 1)]]) is None  # of two attempts


def make(path, **values):
    table = sok.EmbeddingVariable(dim=2, capacity=100, name="table", initializer="ones")
    return sok.elastic.State(path, [table, sok.optimizers.SGD(0.1), tf.Variable([1.0])], step=0, **values), table


def test_what_cannot_be_is_refused(tmp_path):
    for replicas in (2, -1, True, None):
        with pytest.raises(ValueError, match="`replicas` must be 0 or 1"):
            make(tmp_path, replicas=replicas)
    with pytest.raises(ValueError, match=r"`save_every` is for replicas=1.*Received: 5"):
        make(tmp_path, save_every=5)
    with pytest.raises(ValueError, match="`save_every` must be a whole number"):
        make(tmp_path, replicas=1, save_every=0)
    with pytest.raises(ValueError, match="'origin' for itself"):
        make(tmp_path, origin=3)


def test_one_worker_saves_each_commit_and_what_is_there_in_the_end(tmp_path, monkeypatch):
    state, table = make(tmp_path, replicas=1, save_every=5)
    monkeypatch.setattr(context, "are_changes", lambda: False)
    saved = []

    @sok.elastic.run
    def train(state):
        while state.step < 3:
            state.step += 1
            table.assign(tf.constant([state.step], tf.int64), tf.ones([1, 2]))
            if state.step < 3:
                state.commit()
            saved.append(len(sok.checkpoint.read_manifest(tmp_path).links))

    train(state)
    assert saved == [2, 3, 3] and state.origin == "as made"
    sok.shutdown()
    state, table = make(tmp_path, replicas=1)
    assert sok.elastic.run(lambda state: (state.step, state.origin))(state) == (3, "files")
    assert sorted(table.export()[0].numpy().tolist()) == [1, 2, 3]
