"""Calls every native op with numbers that nobody means; run by test_hostile_numbers.py in a process of its own.

Calls that work are recorded, then made again and again, each time with one argument changed. An op may refuse or
accept; what it may not do is end the process. Before each call its description goes to the standard output, so that the
last line names the culprit.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from sok.base import _ops
from tests.ops.tables import NativeTable
from tests.ops.worlds import World
from tests.reference.exchange import all_to_all
from tests.sok import own_rules

NUMBERS = [-(2**63), -1, 0, 3, 2**31 - 1, 2**31, 2**60, 2**61, 2**63 - 1]
BIAS = {
    np.dtype(t): (lo, -1, 0, hi) for t, lo, hi in [(np.int32, -(2**31), 2**31 - 1), (np.int64, -(2**63), 2**63 - 1)]
}
MORE_MEMORY = 3 << 30  # what an op may ask for in vain beyond it, the process does not get
SKIPPED = {"sok_profile", "sok_trace_collective", "sok_trace_collective_done", "sok_trace_read"}  # take no numbers

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Recorder:
    """The library, and a list of what was asked of it."""

    def __init__(self, library: Any):
        self._library, self.calls = library, list[Call]()

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._library, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return op(*args, **kwargs)

        return call


def i64(*x: int) -> tf.Tensor:
    return tf.constant(x, tf.int64, shape=(len(x),))


def f32(*x: float) -> tf.Tensor:
    return tf.constant(x, tf.float32, shape=(len(x),))


def make_calls(lib: Any, folder: Path) -> None:
    """At least one call that works of each op that takes numbers."""
    table, other = NativeTable(dim=3, capacity=50), NativeTable(dim=3, capacity=50)
    identity = NativeTable(dim=3, capacity=50, hashed=False)
    grads = tf.ones([2, 3])
    ids = [table.lookup([1, 2])[1], identity.lookup([1, 2])[1]]
    attrs = {"table_of": [0, 0], "dims": [3], "combiners": ["sum", "mean"]}
    splits, none = i64(0, 1, 2), f32()
    pair = ([table.keys([1, 2]), table.keys([3, 1])], [splits, splits], [none, f32(1, 2)])
    lib.sok_group_lookup([table.handle], *pair, True, **attrs)
    lib.sok_group_lookup_grad([grads, grads], [ids[0], ids[0]], [splits, splits], [none, f32(1, 2)], M=1, **attrs)
    lib.sok_group_lookup_grad_weights([table.handle], [grads, grads], *pair, **attrs)
    for rule, hyper in [("sgd", [0.1]), ("adagrad", [0.1, 0.1, 1e-7]), ("adam", [0.1, 0.9, 0.99, 1e-7])]:
        for one, rows in zip([table, identity], ids, strict=True):
            one.apply(rows, grads, hyper=hyper, rule=rule, slot_set=rule)
    own_rules.by_key()._compile()
    lib.sok_group_try(
        [table.handle], [ids[0]], [grads], 1, [0.1], rule=own_rules.by_key.rule, slot_set="own", distinct=[False]
    )
    table.assign([1, 5], grads)
    lib.sok_table_try_assign(table.handle, table.keys([1, 6]), grads)
    lib.sok_table_try_reserve(table.handle, tf.constant(5, tf.int64))
    lib.sok_table_reserve(identity.handle, tf.constant(5, tf.int64), keys_only=False)
    evicts = {"evict_older_than": 3, "evict_norm_below": 0.1, "evict_max_rows": 70_000, "evict_protect": [3]}
    counted = NativeTable(dim=3, admit_after=2, **evicts)
    counted.lookup([1, 2])
    lib.sok_table_history(counted.handle, i64(1, 9))
    lib.sok_table_stats(counted.handle)
    lib.sok_table_storage(counted.handle)
    lib.sok_table_counted(counted.handle)
    NativeTable(dim=3, admit_after=2, admit_cells=8, admit_hashes=2).lookup([1, 2])
    full = NativeTable(dim=3, admit_after=2, admit_shared_rows=4096, evict_max_rows=4096, evict_when_full=True)
    full.lookup([1, 2])
    NativeTable(dim=3, admit_after=2, admit_reads_constant=True, admit_constant=1.0).lookup([1, 2])
    lib.sok_table_take_evicted(full.handle, key_dtype=tf.int64, dim=3)
    for one in (table, counted):
        lib.sok_table_set_step(one.handle, tf.constant(7, tf.int64))
    lib.sok_tables_count_step([table.handle, identity.handle, counted.handle])
    lib.sok_table_step(table.handle)
    lib.sok_table_ids(table.handle)
    lib.sok_count_ids([table.handle], [np.array([1], np.int64)])
    moved, others = NativeTable(dim=3), NativeTable(dim=3)
    moved.apply(moved.lookup([1, 2])[1], grads, hyper=[0.1, 0.1, 1e-7], rule="adagrad", slot_set="adagrad")
    sets, _ = lib.sok_table_sets(moved.handle)
    values, changed = lib.sok_table_read_keys(moved.handle, i64(1, 2))
    lib.sok_table_take_sets(others.handle, sets, "", "a move")
    lib.sok_table_store_keys(others.handle, sets, i64(1, 2), values, changed, i64())
    lib.sok_table_note_erased(others.handle, i64(9))
    lib.sok_table_save_begin(moved.handle, snapshot="")
    lib.sok_table_save_end(moved.handle, "a save")
    moved.apply(moved.lookup([1, 2])[1], grads, hyper=[0.1, 0.1, 1e-7], rule="adagrad", slot_set="adagrad")
    lib.sok_table_save_begin(moved.handle, snapshot="")
    lib.sok_table_read_changes(moved.handle, key_dtype=tf.int64)
    lib.sok_table_erased_keys(moved.handle, key_dtype=tf.int64)
    lib.sok_table_succeed(others.handle, moved.handle, i64(0, 0, 0))
    table.erase([5])
    table.size()
    table.export()
    table.slots("adam")
    lib.sok_table_keys(table.handle, key_dtype=tf.int64)
    lib.sok_table_slot_sets(table.handle)
    slots = {"slot_set": "restored", "rule": "lazy_adam", "slot_inits": [0.0]}
    lib.sok_table_restore(table.handle, i64(1, 9), grads, tf.ones([2, 6]), **slots)
    lib.sok_table_scatter(table.handle, ids[0], lib.sok_table_gather(table.handle, ids[0], dim=3), dim=3)
    lib.sok_table_changes(table.handle)
    with contextlib.suppress(tf.errors.FailedPreconditionError):  # it is in memory
        lib.sok_table_keep_versions(table.handle)
    lib.sok_table_save_begin(table.handle, snapshot="all")
    for shard, snapshot in [("a", True), ("b", False)]:
        lib.sok_table_save(table.handle, str(folder / shard), "g", snapshot=snapshot)
    lib.sok_table_save_end(table.handle, "g")
    lib.sok_table_load(other.handle, str(folder / "a"), ["adam"], ["adam"], [])
    lib.sok_shard_verify(str(folder / "a"))
    head = {"world_size": 1, "rank": 0, "owner": -1, "hashed": True, "passes": 1}
    lib.sok_shards_compact([str(folder / "a")], i64(0), "g2", str(folder / "c"), **head)
    lib.sok_table_swap(table.handle, other.handle)
    lib.sok_unique(i64(4, 4, 5), out_idx=tf.int64, with_counts=True)
    lib.sok_sum_duplicates(i64(1, 1), grads)
    lib.sok_checksums([grads, ids[0]])
    lib.sok_check_same(tf.constant([True, True]), problem="no", names=["a", "b"])
    told = dict(workers=2, size=2, problem="no", names=["a"])
    lib.sok_check_reduced(f32(2, 6), f32(1, 3), may_be_silent=True, **told)
    lib.sok_check_reduced(f32(6), f32(3), may_be_silent=False, **told)
    lib.sok_unsorted_segment_sum(grads, i64(0, 1), tf.constant(2, tf.int64))
    lib.sok_unsorted_segment_sum(tf.cast(grads, tf.half), i64(0, 1), tf.constant(2, tf.int64))
    combined = (i64(0, 1), splits, f32(1, 2))
    lib.sok_combine(grads, *combined, combiner="mean")
    lib.sok_combine_grad_rows(grads, *combined, tf.constant(2, tf.int64), combiner="mean")
    lib.sok_combine_grad_weights(grads, grads, *combined, combiner="mean")
    lib.sok_sparse_to_csr(i64(1, 0), i64(1, 2), none, tf.constant(2, tf.int64))
    lib.sok_sparse_to_csr(
        tf.constant([[1, 0, 2], [0, 1, 0]], tf.int64),
        i64(1, 2),
        none,
        tf.constant(4, tf.int64),
        slot_num=2,
        wants_order=False,
    )
    variable = tf.Variable(tf.ones([4, 3]))
    pool = {"names": ["v"], "num_rows": [4], "dims": [3], "variable_of": [0], "combiners": ["sum"]}
    lib.sok_variable_pool([variable.handle], [i64(1, 2)], [splits], **pool)
    lib.sok_variable_pool_grad([grads], [i64(1, 2)], [splits], M=1, **pool)
    lib.sok_tensor_pool([tf.ones([4, 3])], [i64(1, 2)], [splits], **pool)
    lib.sok_check_ids(i64(1, 2), splits, variable="v", num_rows=4)
    lib.sok_report_ids(splits, [i64(1, 2)], [splits], names=["v"], num_rows=[4])
    for bad in (splits, i64(), i64(5), i64(-3, 9, 2), i64(-(2**63), 7), i64(0, 2**62)):
        lib.sok_slot_keys(i64(1, 2**62, -(2**63)), bad, slot_num=2**62)
    lib.sok_check_input(splits, True, tf.constant(1, tf.int64), problem="uneven")
    lib.sok_validate_csr(table.handle, i64(1, 2), splits, slot_num=1, max_nnz=2, max_feature_num=3)
    for type_ in ("float16", "bfloat16"):
        words, sizes = lib.sok_exchange_narrow(f32(*[0.0] * 20), tf.constant([20]), type=type_)
        lib.sok_exchange_widen(words, sizes, tf.constant([20]), type=type_)
    call = tf.constant(0, tf.int64)
    lib.sok_to_device([i64(1, 2), f32(1)])
    lib.sok_exchange_refuse(call, True, Tword=tf.int64, world_size=2, text="no")
    world = World(2)
    features = [[(0, [1, 2, 3], None, None, "rows"), (0, [4, 5], [0, 1, 2], None, "sum")]] * 2
    world.lookup(features)
    world.route(0, features[0], rows_alone=True)
    routed = world.route(0, features[0])
    served = world.serve_all([routed, world.route(1, features[1])], tables=(0, 0))[0]
    words = all_to_all([routed.words.numpy()] * 2, [routed.splits.numpy()] * 2)
    ahead = lib.sok_exchange_peek(
        world.handles(0), words[0][0], words[1][0], 0, True, dims=[3], **world.attributes((0, 0))
    )
    stored = NativeTable(dim=3, capacity=50, storage_memory_bytes=1 << 24, storage_path=str(folder / "rows"))
    stored.lookup(np.arange(40))
    lib.sok_read_ahead([table.handle, stored.handle], [table.keys([1]), stored.keys([2, 3])], batches=2)
    lib.sok_exchange_read_ahead(
        world.handles(0), words[0][0], words[1][0], 0, True, dims=[3], batches=2, **world.attributes((0, 0))
    )
    now = (served.answers, served.answer_splits, served.counts)
    repair = lib.sok_exchange_repair(world.handles(0), *now, *ahead, table_of=[0, 0], dims=[3])
    lib.sok_exchange_repair(world.handles(0), *now, *now[:2], table_of=[0, 0], dims=[3])
    lib.sok_exchange_mend(*ahead, *repair)
    changed = np.zeros(16 + 2 + 3, np.float32)
    changed[2], changed[16:18] = 1, np.array([16, 3], np.int32).view(np.float32)
    lib.sok_exchange_mend(tf.zeros([22]), tf.constant([22]), changed, tf.constant([21]))
    lib.sok_table_rows_ahead(table.handle)
    packed = tf.zeros_like(served.answers)
    lib.sok_exchange_sum_grad(packed, served.counts, served.piece_splits, served.row_ids, table_of=[0, 0], dims=[3])
    sent = (packed, served.answer_splits, served.counts)
    lib.sok_exchange_to_copies(*sent, rank=0, table_of=[0, 0], copy_of=[0], dims=[3])
    home = ([tf.ones([3, 3]), grads], routed.asked, routed.index, routed.splits_home, [none, none], routed.scales)
    lib.sok_exchange_combine_grad(*home, combiners=["rows", "sum"], dims=[3, 3])
    asked = tf.reduce_sum(routed.asked)
    checked = lib.sok_exchange_check(tf.zeros([asked]), routed.asked, routed.asked)
    lib.sok_exchange_combine(*checked, *home[2:4], [none, none], routed.scales, combiners=["rows", "sum"], dims=[3, 3])
    one = ([routed.index[1]], [routed.splits_home[1]], [f32(1, 1)], [none])
    answers = tf.zeros([64])
    lib.sok_exchange_combine_grad_weights(grads, answers, *one, combiners=["sum"], dims=[3])
    offers = tf.expand_dims(lib.sok_shared_offer(rank=0, size=1), 0)
    lib.sok_shared_can_read(offers, rank=0)
    lib.sok_mail_connect(offers, tf.constant([True]))
    lib.sok_shared_all_to_all(f32(1, 2), tf.constant([2]), [], rank=0, collective="c", in_graph=False)
    how = dict(rank=0, collective="d", in_graph=False)
    lib.sok_shared_all_reduce([f32(1, 2), f32(), tf.ones([2, 3])], [], average=True, **how)
    lib.sok_shared_all_reduce([i64(1, 2)], [], average=False, **how)


def numbers_of(value: Any) -> Iterator[Any]:
    """The same with other numbers in it, or nothing that an op's author would expect."""
    if isinstance(value, bool | str | bytes | tf.DType | Path):
        return
    if isinstance(value, int):
        yield from NUMBERS
    elif isinstance(value, float):
        yield from (float("nan"), float("inf"), -1.0)
    elif isinstance(value, list | tuple):
        for i, one in enumerate(value):
            for other in numbers_of(one):
                yield [*value[:i], other, *value[i + 1 :]]
        yield []
        yield [*value, *value[:1]]
    elif isinstance(value, np.ndarray) or tf.is_tensor(value):
        if value.dtype in (tf.resource, tf.string):
            return
        array = np.asarray(value)
        for number in BIAS.get(array.dtype, (float("nan"), float("inf")) if array.dtype.kind == "f" else ()):
            yield tf.constant(np.full_like(array, number))
            if array.size > 1:
                for at in (0, -1):
                    changed = array.copy()
                    changed.flat[at] = number
                    yield tf.constant(changed)
        yield tf.constant(array.reshape(-1)[:-1])
        yield tf.constant(array[None])
        yield tf.constant(np.concatenate([array.reshape(-1), array.reshape(-1)]))


def changed_calls(calls: list[Call]) -> Iterator[Call]:
    for name, args, kwargs in calls:
        for i, value in enumerate(args):
            for other in numbers_of(value):
                yield name, (*args[:i], other, *args[i + 1 :]), kwargs
        for key, value in kwargs.items():
            for other in numbers_of(value):
                yield name, args, {**kwargs, key: other}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        library = _ops.lib()
        recorder = Recorder(library)
        with _ops.substituted(recorder):
            make_calls(recorder, Path(folder))
        called = {name for name, _, _ in recorder.calls}
        there = {name for name in dir(library) if name.startswith("sok_") and not name.endswith("_eager_fallback")}
        assert not there - called - SKIPPED, f"no call of {sorted(there - called - SKIPPED)}"
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + MORE_MEMORY, used + MORE_MEMORY))
        refused = accepted = 0
        for name, args, kwargs in changed_calls(recorder.calls):
            sys.stdout.write(f"{name} {args} {kwargs}".replace("\n", " ") + "\n")
            sys.stdout.flush()
            try:
                getattr(library, name)(*args, **kwargs)
                accepted += 1
            except (tf.errors.OpError, ValueError, TypeError, OverflowError):
                refused += 1
    print(f"survived: {refused} calls were refused, {accepted} accepted")


if __name__ == "__main__":
    main()
