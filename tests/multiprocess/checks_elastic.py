"""`sok.elastic` with replicas on real workers, one of which is taken for lost: all go back to the last commit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import replica_pieces, replicas
from sok.job import context
from tests.multiprocess.checks_reshard import CAPACITY, DIM, contents, train
from tests.multiprocess.harness import World

GONE = "Horovod has been shut down. This was caused by an exception on one of the ranks"
_TABLES = {
    "by key": lambda size, path: {"placement": sok.row_wise()},
    "by hash": lambda size, path: {
        "placement": sok.row_wise(hash=True),
        "admission": sok.Admission(after=2),
        "eviction": sok.Eviction(older_than=6, every=2),
    },
    "filter": lambda size, path: {
        "placement": sok.row_wise(hash=True),
        "admission": sok.Admission(after=2, bloom=(1 << 16, 0.1)),
    },
    "one worker": lambda size, path: {"placement": sok.table_wise(size - 1)},
    "columns": lambda size, path: {"placement": sok.column_wise([1, 3], owners=[size - 1, 0])},
    "copies": lambda size, path: {"placement": sok.data_parallel()},
    "numbers": lambda size, path: {"placement": sok.row_wise(), "hashed": False, "num_keys": CAPACITY},
    "file": lambda size, path: {"placement": sok.row_wise(), "storage": sok.Storage(memory_bytes=1 << 21, path=path)},
}


class Case:
    """A state of all kinds of tables, and what it holds, by name of the table."""

    def __init__(self, world: World, folder: Path, name: str, kinds=("by key", "by hash", "copies"), **values):
        self.world, path = world, folder.parent / f"rows_of_{name}_{world.rank}"
        self.tables = [
            sok.EmbeddingVariable(
                DIM, CAPACITY, name=f"{name}_{kind}".replace(" ", "_"), seed=5, **_TABLES[kind](world.size, path)
            )
            for kind in kinds
        ]
        self.optimizer = sok.optimizers.LazyAdam(0.1)  # rows that are not touched stay bit by bit
        self.weights = tf.Variable([1.0, 2.0])
        tracked = [*self.tables, self.optimizer, self.weights]
        self.state = sok.elastic.State(folder, tracked, replicas=1, step=0, **values)

    def train(self, steps=1):
        for _ in range(steps):
            train(self.world, self.tables, self.optimizer, self.state.step, steps=1)
            self.weights.assign_add([1.0, 0.5])
            self.state.step += 1

    def contents(self):
        of_tables = [contents(table, self.optimizer.slot_set) for table in self.tables]
        return [*of_tables, self.weights.numpy().tolist(), int(self.optimizer.iterations), self.state.step]

    def lose(self, *ranks):
        """These are new workers, as it were, which hold nothing."""
        if self.world.rank not in ranks:
            return
        self.state._token, self.state._replicas, self.state._is_committed = "", None, False
        self.state._number = self.state._unsaved = self.state.step = 0
        self.weights.assign([-1.0, -1.0])


def check_all_go_back_to_the_last_commit_whoever_is_lost(world, tmp_path_of_rank, monkeypatch):
    monkeypatch.setattr(replica_pieces, "PIECE_BYTES", 1 << 12)  # several pieces, of which some workers have fewer
    case = Case(
        world, tmp_path_of_rank.parent / f"elastic_{world.size}", f"lost{world.size}", list(_TABLES), save_every=100
    )
    state = case.state
    state._sync()
    assert state.origin == "as made"
    for lost in range(world.size):
        case.train(3)
        for table in case.tables[:2]:
            table.erase(np.arange(10 * lost, 10 * lost + 5))
        state.commit()
        at_commit = case.contents()
        case.train(2)
        case.tables[0].erase(np.arange(100, 140))
        assert case.contents() != at_commit
        case.lose(lost)
        state._sync()
        assert state.origin == "replicas" and case.contents() == at_commit
        assert state._unsaved == lost + 1
    # The files have what has changed since the save before, wherever rows have been meanwhile.
    case.train(1)
    state.commit()
    state._save()
    links = sok.checkpoint.read_manifest(state._path).links
    assert len(links) == 2
    at_commit = case.contents()
    case.train(1)
    case.lose(*range(world.size))
    state._sync()
    assert state.origin == "files" and case.contents()[-3:] == at_commit[-3:]
    # A shard without rows has no slots when it is restored.
    assert [one[:2] for one in case.contents()[:-3]] == [one[:2] for one in at_commit[:-3]]


def check_two_neighbours_that_are_lost_at_once_take_all_back_to_the_last_save(world, tmp_path_of_rank):
    case = Case(world, tmp_path_of_rank.parent / f"neighbours_{world.size}", f"two{world.size}", save_every=3)
    state = case.state
    state._sync()
    kept = []
    for _ in range(5):
        case.train(1)
        state.commit()
        kept.append(case.contents())
    case.lose(0, 1)
    state._sync()
    assert state.origin == "files" and state.step == 3  # of the third commit of 5
    assert [one[:2] for one in case.contents()[:-3]] == [one[:2] for one in kept[2][:-3]]
    case.train(1)
    state.commit()
    at_commit = case.contents()
    case.train(1)
    case.lose(world.size - 1)
    state._sync()
    assert state.origin == "replicas" and case.contents() == at_commit


def check_a_commit_that_is_cut_off_leaves_one_for_all(world, tmp_path_of_rank, monkeypatch):
    """As if a worker were killed before some have all that they are to keep, or before some have heard that all do."""
    case = Case(world, tmp_path_of_rank.parent / f"cut_off_{world.size}", f"cut{world.size}", save_every=100)
    state = case.state
    state._sync()
    together, pass_on = replicas.together, replicas.Replicas._pass_on

    def gone():
        raise tf.errors.UnknownError(None, None, GONE)

    def cut(at, ranks):
        """At that point these get no further than to an error, and all others no further than to the next."""

        def cut_together(transport, name, part, undo=None):
            if name == f"sok/elastic/{at}" and at == "held":
                found = together(transport, name, part)  # all hold it
                return found if world.rank not in ranks else gone()
            if name in ("sok/elastic/held", "sok/elastic/kept") and at != "nothing":
                if name == "sok/elastic/kept":
                    part()
                gone()
            return together(transport, name, part)

        def cut_pass_on(self, *arguments):
            error = pass_on(self, *arguments)
            return gone() if at == "pieces" and world.rank in ranks else error

        monkeypatch.setattr(replicas, "together", cut_together)
        monkeypatch.setattr(replicas.Replicas, "_pass_on", cut_pass_on)

    last = world.size - 1
    everyone = tuple(range(world.size))
    # (where, on which ranks, who is lost) -> whether the newer one counts
    cases = [
        ("pieces", everyone, last, False),
        ("pieces", (last,), 0, False),  # some hold it all
        ("pieces", (), 0, True),  # all do, and nobody has heard so
        ("held", (0,), last, True),  # one has not heard so
        ("held", (last,), last, True),
        ("held", everyone, 0, True),
        ("held", (), 0, True),
    ]
    for at, ranks, lost, is_newer in cases:
        case.train(1)
        state.commit()
        before = case.contents()
        case.train(2)
        after = case.contents()
        cut(at, ranks)
        with pytest.raises(tf.errors.UnknownError, match="shut down"):
            state.commit()
        cut("nothing", ())
        case.lose(lost)
        state._sync()
        assert state.origin == "replicas", (at, ranks)
        assert case.contents() == (after if is_newer else before), (at, ranks, lost)


def check_an_error_of_one_worker_leaves_the_commit_before(world, tmp_path_of_rank, monkeypatch):
    case = Case(world, tmp_path_of_rank.parent / f"errors_{world.size}", f"errors{world.size}")
    state = case.state
    state._sync()
    case.train(1)
    state.commit()
    at_commit = case.contents()
    case.train(1)
    take = replica_pieces.Piece.from_bytes

    def fails(data):
        raise MemoryError("no room for it")

    if world.rank == 1:
        monkeypatch.setattr(replica_pieces.Piece, "from_bytes", fails)
    with pytest.raises(Exception, match="rank 1 of.*no room for it"):
        state.commit()
    monkeypatch.setattr(replica_pieces.Piece, "from_bytes", take)
    now = case.contents()
    state.commit()  # all changes are still known
    case.train(1)
    case.lose(world.size - 1)
    state._sync()
    assert case.contents() == now != at_commit
    # Somebody else has saved, moved or restored rows: then all are handed over anew.
    sok.save(tmp_path_of_rank.parent / f"elsewhere_{world.size}", case.tables, case.optimizer)
    case.train(1)
    few = state._replicas.bytes_sent
    state.commit()
    assert state._replicas.bytes_sent >= few
    case.tables[0].reshard(sok.row_wise(hash=True))
    case.train(1)
    state.commit()
    now = case.contents()
    case.train(1)
    case.lose(0)
    state._sync()
    assert case.contents() == now and case.tables[0].placement == sok.row_wise(hash=True)


def check_a_commit_sends_what_has_changed_alone(world, tmp_path_of_rank):
    folder = tmp_path_of_rank.parent / f"bytes_{world.size}"
    table = sok.EmbeddingVariable(16, 4000, name=f"bytes{world.size}")
    state = sok.elastic.State(folder, [table], replicas=1, step=0)
    state._sync()
    keys = np.arange(2000 * world.size)
    table.assign(keys, np.ones([len(keys), 16], np.float32))
    state.commit()
    whole = state._replicas.bytes_sent
    table.assign(keys[:10], np.ones([10, 16], np.float32))
    state.commit()
    assert 2000 * 72 <= whole <= 2000 * 80 and state._replicas.bytes_sent < 5000
    assert len(json.dumps(state._replicas.holds())) < 200 and context.get_transport().size == world.size
