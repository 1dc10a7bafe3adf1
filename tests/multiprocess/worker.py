"""What runs on each rank: `python -m tests.multiprocess.worker FOLDER MODULE...` runs the checks of the modules."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import inspect
import json
import os
import pickle
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import Outcome, World
from tests.short_stacks import with_short_stacks

# A check takes a few seconds on two idle cores.
CHECK_SECONDS = float(os.environ.get("SOK_TEST_CHECK_SECONDS", "240"))


def checks_of(module: types.ModuleType) -> dict[str, Callable[..., Any]]:
    """The checks of a module, in the order they are written: those that SOK_TEST_CHECKS names, if it names any."""
    named = os.environ.get("SOK_TEST_CHECKS", "").split()
    found = {name: value for name, value in vars(module).items() if name.startswith("check_") and callable(value)}
    return {name: value for name, value in found.items() if not named or name in named}


def run_check(name: str, check: Callable[..., Any], world: World, folder: Path) -> Outcome:
    start = time.monotonic()
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            wanted = {"world": world, "monkeypatch": monkeypatch, "tmp_path_of_rank": folder}
            arguments = [wanted[parameter] for parameter in inspect.signature(check).parameters]
            return Outcome(name, value=check(*arguments), seconds=time.monotonic() - start)
    except BaseException:  # also SystemExit and failed asserts: the report is what counts
        return Outcome(name, error=traceback.format_exc())


class Report:
    """What this rank has said so far, on disk after each check: a job that is stopped has then said how far it came."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, outcome: Outcome) -> None:
        with self._path.open("ab") as file:
            file.write(pickle.dumps(outcome))


@contextlib.contextmanager
def deadline(seconds: float, name: str, report: Report) -> Iterator[None]:
    """Ends this process if the body takes longer, and says where it was.

    A check that failed on one rank leaves its peers in a collective that never comes. Only leaving the process gets a
    thread out of there; Horovod then ends the other ranks.
    """
    here = threading.main_thread().ident

    def give_up() -> None:
        stack = "".join(traceback.format_stack(sys._current_frames()[here]))
        report.add(Outcome(name, error=f"did not finish in {seconds:.0f} s. It was here:\n{stack}"))
        os._exit(3)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _begin_another_job() -> None:
    """Modules after the first, which is about this, find a new job: names of tables begin anew, whatever ran before."""
    import sok

    sok.shutdown()
    sok.Init(global_batch_size=24, seed=3)


def _world() -> World:
    if "TF_CONFIG" in os.environ:  # tests/multiprocess/clusters.py
        config = json.loads(os.environ["TF_CONFIG"])
        return World(config["task"]["index"], len(config["cluster"]["worker"]))
    return World(int(os.environ.get("HOROVOD_RANK", "0")), int(os.environ.get("HOROVOD_SIZE", "1")))


def _without_graph_optimizer() -> None:
    """Steps as they are built: what TensorFlow makes of them is looked at on two workers and on four."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def main(folder: str, modules: list[str]) -> int:
    world = _world()
    faulthandler.enable()  # a crash says where, in the job's output
    with_short_stacks()
    if world.size in (1, 3):
        _without_graph_optimizer()
    report = Report(Path(folder) / f"{world.rank}.pickle")
    own_folder = Path(folder) / f"files_of_rank_{world.rank}"
    own_folder.mkdir()
    for number, module_name in enumerate(modules):
        module = importlib.import_module(module_name)
        if not number:
            gc.freeze()  # the libraries: half a million objects, of which no collection finds any to free
            gc.set_threshold(10_000)  # tracing makes many, and nearly all that are left are looked at again and again
        with pytest.MonkeyPatch.context() as monkeypatch:
            for name, value in getattr(module, "ENVIRONMENT", {}).items():  # of the module's job
                monkeypatch.setenv(name, value)
            if number:
                _begin_another_job()
        for name, check in checks_of(module).items():
            with deadline(CHECK_SECONDS, name, report):
                outcome = run_check(name, check, world, own_folder)
            report.add(outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
