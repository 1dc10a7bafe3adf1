"""The job of one worker, and names of collectives. Several workers: tests/multiprocess/checks_job.py."""

import importlib.util
import json
import subprocess
import sys
import threading
import types
import weakref

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.job import context, dead_peers
from sok.job.context import unique_collective_name
from sok.job.transport import refusal

LAUNCHERS = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    for variable in LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)
    sok.shutdown()
    yield
    sok.shutdown()


def test_a_single_process_needs_no_init():
    assert (sok.rank(), sok.size(), sok.local_rank()) == (0, 1, 0)
    assert context.get_seed() == 0 and context.get_global_batch_size() is None


def test_init_keeps_its_arguments_until_shutdown():
    ok = sok.Init(global_batch_size=64, seed=-5)
    assert ok.dtype == tf.string and ok.numpy() == b"OK"
    assert context.get_seed() == -5 and context.get_global_batch_size() == 64
    sok.shutdown()
    assert context.get_seed() == 0


def test_init_again_with_the_same_or_no_arguments_does_nothing():
    sok.Init(global_batch_size=64, seed=5)
    transport = context.get_transport()
    assert sok.Init(global_batch_size=64).numpy() == sok.Init(seed=5).numpy() == sok.Init().numpy() == b"OK"
    assert context.get_transport() is transport and context.get_seed() == 5


@pytest.mark.parametrize("arguments", [{"global_batch_size": 32}, {"seed": 6}])
def test_init_again_with_other_arguments_is_an_error(arguments):
    sok.Init(global_batch_size=64, seed=5)
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"called before with {name}=.*Received: {name}={arguments[name]}.*shutdown"):
        sok.Init(**arguments)


@pytest.mark.parametrize("value", ["64", 6.5, True, float("nan"), 2**63, [64]])
@pytest.mark.parametrize("argument", ["global_batch_size", "seed"])
def test_arguments_must_be_whole_numbers(argument, value):
    with pytest.raises(ValueError, match=rf"`{argument}` must be a whole number.*Received"):
        sok.Init(**{argument: value})
    assert sok.Init(seed=1).numpy() == b"OK", "a refused Init leaves no job behind"


@pytest.mark.parametrize("value", [0, -4])
def test_a_batch_smaller_than_the_world_is_refused(value):
    with pytest.raises(ValueError, match=rf"number of workers, 1.*Received: {value}"):
        sok.Init(global_batch_size=value)


def test_init_may_follow_the_first_question_but_not_the_first_table():
    assert sok.size() == 1
    sok.Init(seed=3)
    sok.shutdown()
    sok.EmbeddingVariable(2, 10, name="before_init")
    with pytest.raises(ValueError, match=r"before the first table.*Received: seed=3"):
        sok.Init(seed=3)
    assert sok.Init(global_batch_size=8).numpy() == b"OK"


def test_init_in_a_v1_graph_is_something_to_run():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        init = sok.Init(global_batch_size=8)
        assert session.run(init) == session.run(init) == b"OK"
        assert session.run(sok.Init()) == b"OK"


def test_init_inside_a_function_is_lifted_out_of_it():
    @tf.function
    def step():
        sok.Init(seed=9)
        return context.get_seed()

    assert step() == 9


@pytest.mark.parametrize("variable", LAUNCHERS)
def test_one_of_several_workers_must_call_init(monkeypatch, variable):
    monkeypatch.setenv(variable, "3")
    for question in (sok.rank, sok.size, sok.local_rank, context.get_transport, context.get_seed):
        with pytest.raises(RuntimeError, match=rf"{variable}=3.*Call sok.Init\(global_batch_size"):
            question()


@pytest.mark.parametrize("text", ["1", "", "many"])
def test_a_launcher_of_one_is_no_launcher(monkeypatch, text):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", text)
    sok.Init()
    assert sok.size() == 1


def test_without_horovod_several_workers_are_refused(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
    with pytest.raises(ImportError, match="one of several .*Horovod"):
        sok.Init()


def test_a_world_of_one_imports_no_horovod():
    code = "import sys, sok; sok.Init(); assert sok.size() == 1; assert 'horovod' not in sys.modules"
    environment = {"PATH": "", "PYTHONPATH": str(_root())}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def _root():
    return importlib.util.find_spec("sok").submodule_search_locations[0].removesuffix("/sok")


# Names.


def test_eager_names_have_no_number():
    assert unique_collective_name("sok/a") == unique_collective_name("sok/a") == "sok/a"


def test_names_in_a_graph_are_numbered_by_base():
    with tf.Graph().as_default():
        assert [unique_collective_name(base) for base in "aba"] == ["a/0", "b/0", "a/1"]


def test_each_function_counts_by_itself_with_its_loops_and_branches():
    names = {"outer": [], "inner": []}

    def note(function):
        names[function].append(unique_collective_name("n"))

    @tf.function
    def inner(x):
        note("inner")
        return x

    @tf.function
    def outer(x):
        note("outer")
        x = tf.cond(x > 0, lambda: (note("outer"), inner(x))[1], lambda: x)
        for _ in tf.range(2):
            note("outer")
            x += 1
        return inner(x)

    inner(tf.constant(1.0))
    assert names["inner"] == ["n/0"]
    # Whether inner is traced once more does not matter to the names, nor does what was traced before.
    for dtype in (tf.float32, tf.float32, tf.int32):
        names["outer"].clear()
        outer.get_concrete_function(tf.TensorSpec([], dtype))
        assert sorted(set(names["outer"])) == [f"n/{i}" for i in range(len(set(names["outer"])))]
        assert len(set(names["outer"])) >= 3
        outer = tf.function(outer.python_function)
    assert set(names["inner"]) == {"n/0"} and len(names["inner"]) > 1


def test_functions_of_a_v1_graph_count_in_that_graph():
    names = []

    def branch():
        names.append(unique_collective_name("n"))
        return tf.constant(1)

    with tf.Graph().as_default():
        tf.compat.v1.enable_control_flow_v2()
        tf.cond(tf.compat.v1.placeholder(tf.bool, []), branch, branch)
        branch()
    assert names == ["n/0", "n/1", "n/2"]


# Dead peers.


@pytest.mark.parametrize(
    "error, is_dead",
    [
        (tf.errors.UnknownError(None, None, "Horovod has been shut down. This was caused by ..."), True),
        (
            tf.errors.UnknownError(None, None, "[gloo/transport/tcp/pair.cc:589] Read error: Connection reset by peer"),
            True,
        ),
        (type("HorovodInternalError", (RuntimeError,), {})("..."), True),
        (tf.errors.UnavailableError(None, None, "Collective ops is aborted by: Socket closed"), True),
        (tf.errors.UnavailableError(None, None, "Socket closed [Op:CollectiveGatherV2]"), True),
        (tf.errors.UnavailableError(None, None, "failed to connect to all addresses: of a service of the user"), False),
        (ValueError("the worker's own mistake"), False),
        (tf.errors.InvalidArgumentError(None, None, "key 7 is out of range"), False),
    ],
)
def test_reports_of_dead_peers_are_told_from_other_errors(error, is_dead):
    assert dead_peers.is_from_dead_peer(error) is is_dead
    wrapped = RuntimeError("while training")
    wrapped.__cause__ = error
    assert dead_peers.is_from_dead_peer(wrapped) is is_dead


def test_the_hook_adds_a_line_and_calls_the_one_before(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: seen.append(error))
    monkeypatch.setattr(dead_peers, "_is_installed", False)
    monkeypatch.setattr(dead_peers, "_tell", str)
    monkeypatch.setattr(dead_peers, "_ended", dead_peers.WELL)
    assert dead_peers.own_end()[0] == dead_peers.WELL
    dead_peers.explain_on_exit(rank=2)
    dead_peers.explain_on_exit(rank=2)
    for error in (ValueError("mine"), RuntimeError("Horovod has been shut down")):
        sys.excepthook(type(error), error, None)
    assert len(seen) == 2
    assert capsys.readouterr().err == (
        "sok: rank 2: a peer stopped, or the job was ended (see above); this worker cannot go on without it.\n"
    )
    assert dead_peers.own_end()[0] == dead_peers.BY_A_PEER
    dead_peers.explain_on_exit(rank=2, tell=lambda: "rank 1 has ended.\n  Do this.")
    sys.excepthook(RuntimeError, RuntimeError("gloo: read error"), None)
    assert capsys.readouterr().err == "sok: rank 2: rank 1 has ended.\nsok: rank 2:   Do this.\n"
    sys.excepthook(ValueError, ValueError("mine"), None)
    assert dead_peers.own_end()[0] == "ValueError: mine"


def test_whether_a_callback_has_stopped_fit_is_known_while_the_model_lives(monkeypatch):
    monkeypatch.setattr(dead_peers, "_fits", weakref.WeakSet())
    assert dead_peers.own_end()[1] is None
    model = type("Model", (), {"stop_training": False})()
    dead_peers.note_fit(model)
    assert dead_peers.own_end()[1] is False
    model.stop_training = True
    assert dead_peers.own_end()[1] is True
    del model
    assert dead_peers.own_end()[1] is None


def test_words_of_different_arguments_name_ranks_and_values():
    none, no_number = context._NONE, context._NO_NUMBER
    assert context._differences(np.array([[64, 7, 1]] * 3)) == ""
    said = context._differences(np.array([[64, 7, 1], [none, 7, 1], [no_number, -1, 0], [64, 7, 1]]))
    assert said == (
        "sok.Init: all workers must pass the same `global_batch_size`. Received: 64 on ranks 0, 3, None on rank 1, no "
        "whole number on rank 2. Also, all workers must pass the same `seed`. Received: 7 on ranks 0, 1, 3, -1 on rank "
        "2. Also, rank 2 found no GPU to use, ranks 0, 1, 3 did."
    )


def test_a_refusal_after_the_end_of_the_job_leaves_no_traceback_of_its_thread(monkeypatch):
    left = []
    monkeypatch.setattr(threading, "excepthook", left.append)
    ended = types.SimpleNamespace(rank=0, barrier=lambda name: (_ for _ in ()).throw(ValueError("hvd.init()")))
    refusal.all_refuse(ended, "sok/refused", "ids are no integers")
    assert not left


@pytest.mark.parametrize(
    "cluster",
    [{"master": ["a:1"]}, {"worker": ["a:1"]}, {"chief": ["a:1"], "evaluator": ["b:1"]}, {"ps": ["a:1"], "x": ["b:1"]}],
)
def test_a_program_that_tf_config_leaves_alone_is_one_worker(monkeypatch, cluster):
    kind = next(iter(cluster))
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}}))
    sok.shutdown()
    assert sok.size() == 1
    sok.shutdown()
