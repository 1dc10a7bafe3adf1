"""Workers that meet by TF_CONFIG pass the checks of those that Horovod joins, and train as one under a strategy."""

import importlib
import queue
import re
import time
from pathlib import Path

import pytest

import sok
from sok.job.transport import cluster, collectives
from tests.multiprocess import checks_strategy, clusters
from tests.multiprocess.harness import World
from tests.multiprocess.test_training import assert_same_values
from tests.multiprocess.worker import checks_of

pytestmark = pytest.mark.multiprocess

# Of each module the checks that run here: every method of the transport, eagerly and in functions, and what goes
# through it: lookups, groups, gradients, optimizers, saves. Not what needs a v1 graph, or Horovod itself.
CHECKS = {
    "cluster": (),
    "transport": (),
    "lookup": (
        *("check_rows_are_those_of_one_rank", "check_gradients_reach_the_owners_summed_over_ranks"),
        *("check_pooling_is_that_of_tf_nn", "check_all_keys_on_one_owner", "check_nobody_has_keys"),
        *("check_all_key_dtypes", "check_a_bad_key_on_one_rank_raises_on_all"),
        *("check_a_full_shard_raises_on_all_and_changes_nothing", "check_lookups_in_loops_and_inner_functions"),
    ),
    "group": (
        "check_what_python_refuses_on_one_rank_raises_on_all",
        "check_an_owner_that_cannot_answer_is_heard_by_all",
    ),
    "distributed": (
        "check_tape_averages_and_sums_dense_gradients",
        "check_a_gradient_that_only_some_ranks_have_is_an_error_on_all",
    ),
    "checkpoint": ("check_what_many_saved_one_restores",),
    "strategy": (),
}
NOT_HERE = {
    "check_collectives_work_in_v1_graphs",
    "check_one_worker_says_for_all_how_they_send",
    "check_what_is_large_goes_through_shared_memory",
}
PROGRAM = Path(__file__).with_name("program_that_loses_a_worker.py")


def checks():
    found = []
    for name, wanted in CHECKS.items():
        module = importlib.import_module(f"tests.multiprocess.checks_{name}")
        found += [check for check in checks_of(module) if check not in NOT_HERE and (not wanted or check in wanted)]
    return found


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    modules = [f"tests.multiprocess.checks_{name}" for name in CHECKS]
    return clusters.run_checks(modules, 2, tmp_path_factory.mktemp("cluster"), 600.0, checks())


def test_the_workers_of_a_cluster_end_by_themselves(job):
    assert not job.timed_out and job.returncode == 0, job.output[-3000:]


@pytest.mark.parametrize("check", checks())
def test_check_passes_on_all_workers_of_a_cluster(job, check):
    job.values(check)


@pytest.mark.parametrize("check", [name for name in checks_of(checks_strategy) if name.startswith("check_strategy")])
def test_two_workers_of_a_strategy_train_like_one_without(job, check):
    sok.shutdown()
    sok.Init(seed=3)
    found = job.values(check)
    assert_same_values(found, getattr(checks_strategy, check)(World(0, 1)))


def test_a_worker_that_is_killed_ends_a_cluster_at_once():
    job = clusters.run([str(PROGRAM), "kill"], ranks=2, deadline=120)
    assert not job.timed_out and "trained to the end" not in job.output
    assert "sok: rank 0: a peer stopped" in job.output and "this worker cannot go on without it" in job.output
    assert time.time() - float(re.search(r"lost at ([\d.]+)", job.output).group(1)) < 30


def test_a_worker_that_does_not_come_ends_a_cluster_with_words():
    job = clusters.run([str(PROGRAM), "leave"], ranks=2, deadline=120, SOK_TEST_DEADLINE="6", SOK_TEST_ALONE="12")
    assert not job.timed_out and job.returncode != 0, job.output
    assert re.search(r"'sok/lost/\w+/0' .* \d+ s: rank 0 came, rank 1 did not", job.output), job.output
    assert re.search(r"rank 1 is in no collective; its last .*loses_a_worker.*evaluate_alone", job.output), job.output
    assert "The job ends here: sok.Init(deadline=6)" in job.output


def test_a_worker_that_never_calls_init_ends_the_wait_of_the_others_with_words(monkeypatch):
    told = queue.SimpleQueue()
    monkeypatch.setattr(cluster, "abort", told.put)
    with collectives.told_if_some_do_not_come(0.01):
        assert "not all workers have called it" in told.get(timeout=30)
    for seconds in (0, 1):
        with collectives.told_if_some_do_not_come(seconds):
            pass
    time.sleep(1.5)
    assert told.empty()


@pytest.mark.parametrize(
    "text, told",
    [
        ("{", "TF_CONFIG must be JSON"),
        ("[1]", "TF_CONFIG must be JSON"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}', "there is no worker 2"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "chief"}}', "'chief' is not in the cluster"),
    ],
)
def test_a_tf_config_that_makes_no_sense_says_so(monkeypatch, text, told):
    monkeypatch.setenv("TF_CONFIG", text)
    sok.shutdown()
    with pytest.raises(ValueError, match=f"TF_CONFIG must be JSON.*{told}" if told[0] != "T" else told):
        sok.Init()


def test_the_chief_is_the_first_rank_and_hosts_count_their_own():
    text = '{"cluster": {"chief": ["a:1"], "worker": ["b:1", "a:2"]}, "task": {"type": "worker", "index": 1}}'
    found = cluster.of_environment(text)
    assert (found.rank, found.size, found.local_rank) == (2, 3, 1)
    assert cluster.of_environment(text.replace('"worker", "index"', '"chief", "index"').replace("1}", "0}")).rank == 0


@pytest.mark.parametrize(
    "cluster_of, task",
    [('{"worker": ["a:1"]}', "worker"), ('{"ps": ["a:1"], "worker": ["b:1", "c:1"]}', "worker"), ("{}", "worker")]
    + [('{"worker": ["a:1", "b:1"]}', "evaluator")],
)
def test_who_is_alone_in_tf_config_meets_nobody(cluster_of, task):
    text = f'{{"cluster": {cluster_of}, "task": {{"type": "{task}", "index": 0}}}}'
    assert cluster.of_environment(text) is None
