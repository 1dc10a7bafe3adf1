"""python -m tests.kills: kills saves, restores after each, and looks whether it is the newest complete checkpoint.

First at every step that a save takes on the disk, one after the other: of each worker in turn, and of writes also in
the middle. Then at random times. Workers are forked (loading TensorFlow each time would take seconds): this process
runs no op, so it has no threads that a fork would lose. When one of several workers is killed the others are not: they
must notice, and end.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

STEPS_SOURCE = Path(__file__).with_name("steps.cc")


def with_steps_preloaded() -> None:
    """Starts this program again with tests/kills/steps.cc in it, if it is not yet."""
    if hasattr(ctypes.CDLL(None), "sok_kill_at"):
        return
    folder = tempfile.mkdtemp(prefix="sok_steps_")
    library = os.path.join(folder, "steps.so")
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", STEPS_SOURCE, "-o", library, "-ldl"], check=True)
    os.environ["LD_PRELOAD"] = library
    os.execv(sys.executable, [sys.executable, "-m", "tests.kills", *sys.argv[1:]])


class Killing:
    """The kills of one folder, one after the other, and what has been seen."""

    def __init__(self, folder: str, workers: int, how: dict[str, Any], policies: bool) -> None:
        self._folder, self._size, self._how, self._policies = folder, workers, how, policies
        self.number = 0  # of the newest complete save
        self.kills = self.interrupted = self.newer = self.restored = self.listed = 0

    def points(self) -> list[tuple[int, int, bool]]:
        """Where a save that replaces another can be killed: worker, step, and whether half of a write is done."""
        from tests.kills.workers import Kill

        said = self._checked(*self._workers(Kill(), saves=2).finish(), killed=None)
        points = []
        for rank, of_rank in enumerate(said):
            steps = next(n for what, n in of_rank if what == b"S")
            points += [(rank, step, False) for step in range(1, steps + 1)]
            points += [(rank, step, True) for what, step in of_rank if what == b"W"]
        return points

    def kill_at(self, rank: int, step: int, torn: bool) -> None:
        """Kills one worker at a step."""
        from tests.kills.workers import Kill

        self._checked(*self._workers(Kill(rank, step, torn), saves=2).finish(), killed=rank)

    def kill_in_time(self, rng: random.Random, seconds: float) -> float:
        """Kills one worker, somewhere in its first, second or third save; how long a save took."""
        from tests.kills.workers import Kill

        workers, victim = self._workers(Kill(), saves=None), rng.randrange(self._size)
        said: list[tuple[bytes, int]] = []
        begun: list[float] = []
        while len(begun) < rng.choice((1, 2, 3)) and (record := workers.next_record(victim)) is not None:
            said.append(record)
            begun += [time.monotonic()] if record[0] == b"B" else []
        seconds = begun[1] - begun[0] if len(begun) > 1 else seconds
        time.sleep(rng.uniform(0, seconds))
        workers.kill(victim)
        rest, ends = workers.finish()
        rest[victim] = said + rest[victim]
        self._checked(rest, ends, killed=victim)
        return seconds

    def _workers(self, kill: Any, saves: int | None) -> Any:
        from tests.kills.workers import Workers

        return Workers(self._size, self._folder, self.number + 1, kill, self._how, saves, self._policies)

    def _checked(self, said: list, ends: list[int], killed: int | None) -> list:
        """Compares what the workers have restored with what was complete before, and notes what is complete now."""
        text = f"{said}, {ends} after save {self.number}"
        for rank, end in enumerate(ends):
            was_killed = os.WIFSIGNALED(end) and os.WTERMSIG(end) == 9
            ended_by_itself = os.WIFEXITED(end) and os.WEXITSTATUS(end) in ((0,) if killed is None else (0, 2))
            assert ended_by_itself or (rank == killed and was_killed), f"worker {rank} ended with {end}: {text}"
        restored = {n for of_rank in said for what, n in of_rank if what == b"R"}
        assert len(restored) <= 1, text
        self.listed += bool(restored) or self.number > 0
        if restored:
            (found,) = restored
            self.restored += 1
            # Newer than the last that said it was done: killed between the rename and saying so.
            assert self.number <= found <= self._begun, (
                f"restored save {found}, not {self.number}..{self._begun}: {text}"
            )
            self.newer += found > self.number
        else:
            assert self.number == 0, text
        done = [max((n for what, n in of_rank if what == b"D"), default=0) for of_rank in said]
        begun = [max((n for what, n in of_rank if what == b"B"), default=0) for of_rank in said]
        self.number = max(self.number, *restored, *done) if restored else max(self.number, *done)
        self._begun = max(self.number, *begun)
        if killed is not None:
            self.kills += 1
            self.interrupted += self._begun > self.number
        return said

    _begun = 0


def stray_files(folder: str) -> set[str]:
    """What is in the folder and in no manifest, but for the name of who saves there."""
    manifest = json.loads(Path(folder, "manifest.json").read_text())
    listed = {"manifest.json", "writer.json"}

    def look(value: Any) -> None:
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else []:
            look(part)
            listed.update([part] if isinstance(part, str) else [])

    look(manifest)
    return set(os.listdir(folder)) - listed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__.split("\n\n")[0])
    parser.add_argument("--workers", type=int, default=1, help="(default 1)")
    parser.add_argument("--steps", type=int, help="of the steps of a save, how many are tried (default: all)")
    parser.add_argument("--kills", type=int, default=100, help="kills at random times (default 100)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--incremental", action="store_true", help="incremental saves")
    parser.add_argument("--asynchronous", action="store_true", help="asynchronous saves")
    parser.add_argument("--versions", action="store_true", help="saves by version, of tables over files")
    parser.add_argument("--policies", action="store_true", help="of a table whose rows are counted, come and go")
    options = parser.parse_args()
    with_steps_preloaded()

    from sok.base import _ops

    _ops.lib()
    warnings.simplefilter("ignore")
    how = {name: True for name in ("incremental", "asynchronous", "versions") if getattr(options, name)}
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="sok_kills_") as parent:
        folder = os.path.join(parent, "saves")
        killing = Killing(folder, options.workers, how, options.policies)
        points = killing.points()
        tried = points if options.steps is None else sorted(rng.sample(points, min(options.steps, len(points))))
        for point in tried:
            killing.kill_at(*point)
        by_step, interrupted = killing.kills, killing.interrupted
        print(f"{by_step} kills at steps, of {len(points)}: {interrupted} before the save had ended", flush=True)
        seconds = 0.05
        for _ in range(options.kills):
            seconds = killing.kill_in_time(rng, seconds)
        killing.points()
        assert not stray_files(folder), f"left by killed saves: {stray_files(folder)}"
        print(
            f"{killing.kills - by_step} kills at random times: {killing.interrupted - interrupted} before the save had "
            f"ended\n{killing.newer} times it was complete all the same; {killing.number} saves"
        )
        print(f"recovered {killing.restored} of {killing.listed} listed checkpoints, each row compared")


if __name__ == "__main__":
    main()
