"""`sok.profile`: what is in the file, and when it refuses. Several workers: tests/multiprocess/checks_profile.py."""

import json
import os
import re
import threading
from pathlib import Path

import pytest
import tensorflow as tf

import sok
from tests.messages import saying

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3


def spans_of(path):
    events = json.loads(Path(path).read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def check_spans_of_a_thread_do_not_cross(spans):
    """Of two spans of one thread, one holds the other, or they are apart."""
    open_until = {}
    for span in spans:
        assert span["dur"] >= 0
        stack = open_until.setdefault(span["tid"], [])
        while stack and stack[-1] <= span["ts"]:
            stack.pop()
        end = span["ts"] + span["dur"]
        assert not stack or end <= stack[-1] + 1e-3, span
        stack.append(end)


@pytest.fixture
def step():
    """A training step of two tables, of which 'pooled' is pooled in one op."""
    pooled = sok.DistributedEmbedding("sum", 1000, 8, slot_num=2, max_nnz=3, name="pooled")
    single = sok.All2AllDenseEmbedding(1000, 4, slot_num=2, nnz_per_slot=1, name="single")
    optimizer = sok.optimizers.Adam(0.1)

    @tf.function
    def run(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(pooled(ids) ** 2) + tf.reduce_sum(single(ids[:, :, :1]) ** 2)
        variables = [pooled.embedding_variable, single.embedding_variable]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    run.tables = lambda: [layer.embedding_variable.table_name for layer in (pooled, single)]
    return run


def test_every_step_of_every_table_has_its_spans(step, tmp_path):
    ids = tf.reshape(tf.range(5 * 2 * 3, dtype=tf.int64), [5, 2, 3])
    step(ids)  # traced before the profile
    with sok.profile(tmp_path / "t.json") as p:
        for _ in range(STEPS):
            step(ids)
    spans = spans_of(p.path)
    pooled, single = step.tables()
    of_pooled = [(s["args"]["step"], s["name"]) for s in spans if s["args"].get("table") == pooled]
    of_single = [(s["args"]["step"], s["name"]) for s in spans if s["args"].get("table") == single]
    assert sorted(of_pooled) == sorted((n, s) for n in range(STEPS) for s in ("route", "find+combine"))
    assert of_single == [(n, "find") for n in range(STEPS)]
    updates = [(s["args"]["step"], s["args"]["table"]) for s in spans if s["name"] == "update"]
    assert updates == [(n, f"{pooled},{single}") for n in range(STEPS)]  # one for all tables of an optimizer
    backward = [s for s in spans if s["name"] == "backward"]
    assert [s["args"]["step"] for s in backward] == list(range(STEPS))
    assert all("op" in s["args"] for s in backward)
    (find, *_) = (s for s in spans if s["name"] == "find+combine")
    assert find["args"] == {"step": 0, "table": pooled, "keys": 30, "rows": 10, "bytes": 10 * 8 * 4}
    (update, *_) = (s for s in spans if s["name"] == "update")
    assert update["args"]["bytes"] == 30 * 8 * 4 + 10 * 4 * 4  # a gradient for each distinct, or for each, key
    assert p.spans == len(spans) == STEPS * 5 and p.dropped == 0
    check_spans_of_a_thread_do_not_cross(spans)


def test_times_and_threads_are_real(step, tmp_path):
    ids = tf.zeros([3, 2, 3], tf.int64)
    with sok.profile(tmp_path / "t.json") as p:
        step(ids)
    trace = json.loads(Path(p.path).read_text())
    spans = spans_of(p.path)
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {span["tid"] for span in spans} <= set(names)
    assert all(Path(f"/proc/self/task/{tid}").exists() for tid in names)
    assert {e["pid"] for e in trace["traceEvents"]} == {0}
    started = trace["otherData"]["started_at_ts"]
    assert trace["otherData"]["process_id"] == os.getpid()
    assert all(started <= span["ts"] < started + 60e6 and 0 < span["dur"] < 60e6 for span in spans)
    # A step is one thing after the other: a table's update ends last.
    ends = {
        span["name"]: span["ts"] + span["dur"] for span in spans if step.tables()[0] in span["args"].get("table", "")
    }
    assert ends["route"] < ends["find+combine"] < ends["update"]


def test_threads_of_the_caller_have_rows_of_their_own(tmp_path):
    table = sok.EmbeddingVariable(4, 100, name="threads")
    keys = tf.constant([1, 2], tf.int64)
    ids = []

    def read():
        ids.append(threading.get_native_id())
        for _ in range(20):
            table.sparse_read(keys)

    with sok.profile(tmp_path / "t.json") as p:
        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    spans = spans_of(p.path)
    assert p.spans == len(spans) == 60
    assert {span["tid"] for span in spans} == set(ids)
    check_spans_of_a_thread_do_not_cross(spans)


def test_what_does_not_fit_is_dropped_oldest_first_and_said(tmp_path):
    table = sok.EmbeddingVariable(4, 100, name="dropped")
    with pytest.warns(UserWarning, match=saying("the oldest 7 spans are not in", "max_spans = 5")):  # noqa: SIM117
        with sok.profile(tmp_path / "t.json", max_spans=5) as p:
            for n in range(12):
                table.sparse_read(tf.range(n, dtype=tf.int64))
    assert (p.spans, p.dropped) == (5, 7)
    assert [span["args"]["keys"] for span in spans_of(p.path)] == [7, 8, 9, 10, 11]
    assert json.loads(Path(p.path).read_text())["otherData"]["dropped_spans"] == 7


def test_a_v1_session_is_profiled_too(tmp_path):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.EmbeddingVariable(4, 100, name="session")
        rows = table.sparse_read(tf.constant([1, 2], tf.int64))
        with sok.profile(tmp_path / "t.json") as p:
            for _ in range(2):
                session.run(rows)
    assert [span["name"] for span in spans_of(p.path)] == ["find", "find"]


def test_a_name_with_quotes_and_letters_of_any_kind_is_legal_json(tmp_path):
    table = sok.EmbeddingVariable(4, 100, name="é/x.1")
    with sok.profile(tmp_path / "t.json") as p:
        table.sparse_read(tf.constant([1], tf.int64))
    assert spans_of(p.path)[0]["args"]["table"] == table.table_name


def test_an_exception_inside_passes_and_the_file_is_written(tmp_path):
    with pytest.raises(KeyError), sok.profile(tmp_path / "t.json") as p:
        raise KeyError("theirs")
    assert spans_of(p.path) == []


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    with pytest.raises(ValueError, match=r"^`path` must be a file.*/none/t.json': No such file or directory\.$"):
        sok.profile(tmp_path / "none" / "t.json").__enter__()
    with pytest.raises(ValueError, match="Is a directory"):
        sok.profile(tmp_path).__enter__()
    for max_spans in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="`max_spans` must"):
            sok.profile(tmp_path / "t.json", max_spans=max_spans).__enter__()


def test_a_second_profile_is_refused_and_the_first_goes_on(tmp_path):
    table = sok.EmbeddingVariable(4, 100, name="second")
    with sok.profile(tmp_path / "first.json") as p:
        with pytest.raises(RuntimeError, match="^A profile runs already, into '.*first.json'"):
            sok.profile(tmp_path / "second.json").__enter__()
        table.sparse_read(tf.constant([1], tf.int64))
    assert p.spans == 1 and not (tmp_path / "second.json").exists()
    with sok.profile(tmp_path / "second.json") as p:
        pass
    assert p.spans == 0


PROGRAM = """
import tensorflow as tf, sok
table = sok.EmbeddingVariable(4, 100, name="program")
for _ in range(3):
    table.sparse_read(tf.constant([1], tf.int64))
"""


def test_the_environment_profiles_a_whole_program(forked, tmp_path):
    path = tmp_path / "whole.json"
    ran = forked.run(PROGRAM, tmp_path, environment={"SOK_TRACE": str(path)})
    assert ran.status == 0, ran.stderr
    assert f"sok: rank 0: 3 spans, in {path}" in ran.stderr
    assert [span["name"] for span in spans_of(path)] == ["find"] * 3


def test_the_environment_s_bad_file_is_refused_by_init(forked, tmp_path):
    bad = {"SOK_TRACE": str(tmp_path / "none" / "t.json")}
    ran = forked.run("import sok; sok.Init(); print('went on')", tmp_path, environment=bad)
    assert ran.status != 0 and "went on" not in ran.stdout
    assert re.search(saying("ValueError: `path`", bad["SOK_TRACE"]), ran.stderr)


# TensorBoard.


def test_tensorflow_s_own_profiler_shows_our_ops_by_name(step, tmp_path):
    ids = tf.zeros([3, 2, 3], tf.int64)
    step(ids)
    tf.profiler.experimental.start(str(tmp_path))
    step(ids)
    tf.profiler.experimental.stop()
    (xplane,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    recorded = xplane.read_bytes()
    for op in ("Sok>TableLookup", "Sok>GroupLookup", "Sok>GroupLookupGrad", "Sok>GroupApply"):
        assert b":" + op.encode() in recorded, op
