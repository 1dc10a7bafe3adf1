"""The files from which a job on a cluster starts: what can be seen of them without a cluster."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "clusters"


@pytest.fixture
def echoing(tmp_path):
    """A PATH whose launchers print their arguments, and whose scontrol two names."""
    for name, does in {
        "horovodrun": 'echo "$@"',
        "mpirun": 'echo "$@"',
        "scontrol": "printf 'n1\\nn2\\n'",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)

    def run(script, **environment):
        environment |= {"PATH": f"{tmp_path}:/usr/bin:/bin", "FOLDER": "/m"}
        done = subprocess.run(["bash", FOLDER / script], env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_scripts_count_the_workers_of_all_hosts(echoing):
    train = FOLDER / "train.py"
    said = echoing("run_horovodrun.sh", HOSTS="a:2,b:3", INTERFACE="eth7")
    assert said == f"--gloo -np 5 --network-interface eth7 -H a:2,b:3 python {train} /m"
    assert echoing("run_horovodrun.sh", HOSTS="a:1") == f"--gloo -np 1 -H a:1 python {train} /m"
    said = echoing("run_mpirun.sh", HOSTS="a:2,b:2", INTERFACE="eth7")
    assert said.startswith("-np 4 -H a:2,b:2 ") and "btl_tcp_if_include eth7" in said and said.endswith(f"{train} /m")


def test_slurm_starts_as_many_workers_as_it_was_asked_for(echoing):
    of_slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "4", "SLURM_SUBMIT_DIR": str(FOLDER)}
    assert echoing("slurm.sbatch", **of_slurm) == f"--gloo -np 8 -H n1:4,n2:4 python {FOLDER}/train.py /m"


def test_the_kubernetes_job_has_as_many_slots_as_workers():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((FOLDER / "mpijob.yaml").read_text())["spec"]
    launcher, worker = (job["mpiReplicaSpecs"][what] for what in ("Launcher", "Worker"))
    (script,) = launcher["template"]["spec"]["containers"][0]["args"]
    assert int(re.search(r"-np (\d+)", script).group(1)) == job["slotsPerWorker"] * worker["replicas"]
    subprocess.run(["bash", "-n", "-c", script], check=True, timeout=30)


@pytest.mark.parametrize("name", ["run_ray.py", "run_spark.py"])
def test_programs_of_ray_and_spark_call_what_horovod_has(name):
    """Neither Ray nor Spark need be here: the names and arguments are looked up in Horovod's sources."""
    horovod = pytest.importorskip("horovod")
    calls = [node for node in ast.walk(ast.parse((FOLDER / name).read_text())) if isinstance(node, ast.Call)]
    runner = Path(horovod.__file__).parent / name.removeprefix("run_").removesuffix(".py") / "runner.py"
    defined = {
        node.name: {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
        for node in ast.walk(ast.parse(runner.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    seen = set()
    for call in calls:
        called = ast.unparse(call.func)
        function = {"RayExecutor": "__init__"}.get(called, called.rpartition(".")[2])
        if called in ("RayExecutor", "RayExecutor.create_settings", "horovod.spark.run", "executor.run"):
            seen.add(called)
            arguments = {keyword.arg for keyword in call.keywords}
            assert function in defined and arguments <= defined[function] | {
                "num_workers",
                "cpus_per_worker",
                "use_gpu",
            }
    assert seen >= ({"RayExecutor", "executor.run"} if "ray" in name else {"horovod.spark.run"})


def test_the_program_that_they_start_goes_on_where_it_ended(example, tmp_path):
    losses = []
    for _ in range(2):
        status, out, err = example("clusters/train.py", tmp_path)
        assert status == 0, out + err
        losses.append(float(re.search(r"1 workers: loss ([\d.]+)", out).group(1)))
    assert losses[1] < losses[0]
    assert {path.name for path in (tmp_path / "checkpoints").glob("*.sok")} == {"ckpt-1.sok", "ckpt-2.sok"}
