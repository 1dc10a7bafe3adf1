"""Tables on parameter servers: real ones, which share one cluster for all checks; and what is refused without any."""

import json
from pathlib import Path

import pytest

import sok
from sok.tools.cli import main
from tests.messages import saying

CHECKS = (
    "one_worker_trains_as_without_servers",
    "tables_have_policies_and_files",
    "checkpoints_by_version_leave_rows_in_the_files_of_servers",
    "rows_are_written_read_and_erased",
    "others_ask_for_what_is_on_servers",
    "lookups_run_ahead",
    "combinations_that_are_impossible_are_refused",
    "workers_train_while_one_is_killed",
    "checkpoints_go_to_tables_of_workers_and_back",
    "workers_of_v1_share_the_tables_of_servers",
)


@pytest.fixture(scope="module")
def told(forked, tmp_path_factory):
    """Of each check None, or what it raised."""
    folder = tmp_path_factory.mktemp("servers")
    script = Path(__file__).with_name("parameter_servers_script.py")
    done = forked.run(script, folder / "run", str(folder), environment={"TF_CPP_MIN_LOG_LEVEL": "2"}, deadline=180)
    assert done.status == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_servers(told, check):
    assert told[check] is None, told[check]


def test_all_checks_ran(told):
    assert set(told) == set(CHECKS)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, ["No parameter server is known", "servers=2"]),
        ('{"cluster": {"worker": ["a:1"]}}', ["No parameter server is known"]),
        ("{", ["TF_CONFIG is not the JSON of a cluster"]),
    ],
)
def test_servers_come_from_the_environment(monkeypatch, config, words):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(ValueError, match=saying(*words)):
        sok.enable_distributed_strategy("parameter_server")


def test_servers_are_a_number_and_of_one_strategy():
    with pytest.raises(ValueError, match=saying("`servers`", "at least 1", "0")):
        sok.enable_distributed_strategy("parameter_server", servers=0)
    with pytest.raises(ValueError, match=saying("`servers`", "'parameter_server'", "'localized'")):
        sok.enable_distributed_strategy("localized", servers=2)
    sok.enable_distributed_strategy("parameter_server", servers=2)
    with pytest.raises(ValueError, match="The strategy 'parameter_server' is enabled"):
        sok.enable_distributed_strategy("localized")
    assert sok.size() == 1


@pytest.mark.parametrize(
    ("arguments", "config", "words"),
    [
        ((), None, "give --cluster, or set TF_CONFIG"),
        (("--cluster", "{"), None, "--cluster is not the JSON of a cluster"),
        (("--cluster", '{"ps": ["127.0.0.1:1"]}', "--task", "1"), None, "--cluster has no task 1 of job 'ps'"),
        ((), '{"cluster": {"ps": ["127.0.0.1:1"]}, "task": {"type": "worker"}}', "TF_CONFIG has no task 0 of job"),
    ],
)
def test_the_command_says_what_is_wrong_with_a_cluster(monkeypatch, capsys, arguments, config, words):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("TF_CONFIG", config)
    assert main(["parameter-server", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_name_that_is_no_host_ends_the_command_with_words(forked, tmp_path):
    done = forked.run(
        "import sys; from sok.tools import parameter_server as p; sys.exit(p.run({'ps': ['127.0.0.1:none']}, 'ps', 0))",
        tmp_path,
        deadline=60,
    )
    assert done.status == 1 and "sok parameter-server: 127.0.0.1:none" in done.stderr
