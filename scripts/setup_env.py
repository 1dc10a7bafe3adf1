"""Makes .venv ready for work: packages, Horovod, the native library, sok itself. Steps that are done are not repeated.

Standard library only: it runs on the system's Python, before anything is installed. Needs no root.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
# Inside the environment, so that whoever deletes it also makes the steps run again.
STAMPS = VENV / ".setup"
LOGS = ROOT / "build" / "setup"
REQUIREMENTS = ["runtime", "rules", "serve", "redis", "build", "horovod", "examples", "dev"]
FREE_DISK_BYTES = 5e9  # the environment takes 2.6 GB, pip's downloads and the builds the rest

# What a log says -> what to do about it.
HINTS = [
    (r"No space left on device", "The disk is full. About 5 GB are needed here and in ~/.cache/pip."),
    (
        r"name resolution|Connection (refused|reset)|timed? ?out|ProxyError|SSLError|NewConnectionError|"
        r"Could not find a version",
        "A package could not be downloaded. Check the network; behind a proxy set HTTPS_PROXY, with a mirror "
        "PIP_INDEX_URL.",
    ),
    (
        r"Killed|internal compiler error|cannot allocate memory|bad_alloc",
        "The compiler ran out of memory. Compile one file at a time: SOK_BUILD_JOBS=1 make setup",
    ),
]


class StepFailed(Exception):
    """A step failed; the text says how."""


@dataclass
class Step:
    """One thing to do: `command`, or nothing if it was done before with the same `inputs`."""

    name: str
    title: str
    command: list[str]
    inputs: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    is_done: Callable[[], bool] | None = None  # asked instead of the stamp
    advice: str = ""
    # Incremental by itself (make), so it runs each time and only speaks if that took long or failed.
    always: bool = False
    stamps: Path = STAMPS
    logs: Path = LOGS

    @property
    def stamp(self) -> Path:
        return self.stamps / f"{self.name}.stamp"

    @property
    def log(self) -> Path:
        return self.logs / f"{self.name}.log"

    def fingerprint(self) -> str:
        return hashlib.sha256("\0".join([*self.command, *self.inputs]).encode()).hexdigest()

    def needs_running(self) -> bool:
        if self.is_done is not None:
            return not self.is_done()
        if self.always:
            return True
        return not self.stamp.exists() or self.stamp.read_text() != self.fingerprint()


def main() -> int:
    started = time.monotonic()
    problems = missing_prerequisites()
    if problems:
        print("This machine lacks something that sok needs:\n", file=sys.stderr)
        print("\n".join(f"  - {problem}" for problem in problems), file=sys.stderr)
        packages = apt_packages(problems)
        if packages:
            print(f"\nWhat to do:  sudo apt-get install {' '.join(packages)}", file=sys.stderr)
        return 1

    steps = all_steps()
    num_run = 0
    for number, step in enumerate(steps, 1):
        # The self-test judges the work of the other steps.
        is_due = step.needs_running() or (step.name == "doctor" and num_run > 0)
        try:
            if is_due:
                num_run += run_step(step, f"[{number}/{len(steps)}] {step.title}")
        except StepFailed as failure:
            explain(failure, number, len(steps), step)
            return 1
    if num_run:
        print(f"Ready in {elapsed(started)}. Activate it with:  . .venv/bin/activate")
    else:
        print("Everything is set up in .venv")
    return 0


def missing_prerequisites(
    which: Callable[[str], object] = shutil.which,
    find_module: Callable[[str], object] = importlib.util.find_spec,
    venv_python: Path = VENV_PYTHON,
    disk_bytes: float = FREE_DISK_BYTES,
) -> list[str]:
    """What the machine lacks, in words; apt package names in parentheses, for `apt_packages`."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    problems = []
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        problems.append(f"Python 3.10 to 3.13; this is {version}: name another with PYTHON=... make setup")
    # Debian ships venv without the pip that it installs; both are in one package.
    if find_module("venv") is None or find_module("ensurepip") is None:
        problems.append(f"Python's venv module (apt: python{version}-venv)")
    if which("g++") is None:
        problems.append("a C++17 compiler, g++ (apt: g++)")
    if which("make") is None:
        problems.append("make (apt: make)")
    free = shutil.disk_usage(ROOT).free
    if not venv_python.exists() and free < disk_bytes:
        needed = f"about {disk_bytes / 1e9:.0f} GB are needed"
        problems.append(f"disk space: {free / 1e9:.1f} GB are free under {ROOT}, {needed}")
    return problems


def apt_packages(problems: Iterable[str]) -> list[str]:
    return [found.group(1) for problem in problems if (found := re.search(r"\(apt: (\S+)\)", problem))]


def all_steps(environment: Mapping[str, str] = os.environ) -> list[Step]:
    python = str(VENV_PYTHON)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    requirement_files = [ROOT / "requirements" / f"{name}.txt" for name in REQUIREMENTS]
    pinned = contents([*requirement_files, ROOT / "requirements" / "constraints.txt"])
    compiler = output_of(["g++", "--version"]).partition("\n")[0]
    steps = [
        Step(
            "venv",
            "virtual environment .venv",
            [sys.executable, "-m", "venv", "--clear", str(VENV)],
            # Not a stamp: an environment that someone made by hand is as good.
            is_done=venv_works,
        ),
        Step(
            "packages",
            "TensorFlow and the other pinned packages (about 700 MB to download)",
            # Without bytecode: what is imported is compiled then.
            [*pip, "install", "--no-compile", *(part for path in requirement_files for part in ("-r", str(path)))],
            inputs=[pinned],
        ),
    ]
    if environment.get("SOK_WITH_HOROVOD", "1") != "0":
        settings = sorted(f"{key}={value}" for key, value in environment.items() if key.startswith("HOROVOD_WITH"))
        steps.append(
            Step(
                "horovod",
                "Horovod with Gloo, compiled from source (1 to 3 minutes)",
                ["bash", "scripts/build_horovod.sh"],
                inputs=[contents([ROOT / "scripts/build_horovod.sh"]), pinned, compiler, *settings],
                env={"PYTHON": python},
                advice="To go on with one worker only, without Horovod:  SOK_WITH_HOROVOD=0 make setup",
            )
        )
    steps += [
        Step(
            "native",
            "native library",
            ["bash", "scripts/build_native.sh"],
            env={"PYTHON": python},
            always=True,
        ),
        Step(
            "sok",
            "sok itself, editable",
            [*pip, "install", "--no-build-isolation", "--no-deps", "-e", str(ROOT)],
            inputs=[contents([ROOT / name for name in ("setup.py", "pyproject.toml")])],
            # The step before has built the library, and shown its progress.
            env={"SOK_SKIP_NATIVE_BUILD": "1"},
        ),
        Step(
            "doctor",
            "self-test (sok doctor)",
            [python, "-m", "sok", "doctor"],
            advice="Each line that says FAIL is followed by its remedy.",
        ),
    ]
    return steps


def venv_works() -> bool:
    """True if .venv's Python runs, is a supported one, and was made at this place (scripts name their place)."""
    pip_script = VENV / "bin" / "pip"
    if not VENV_PYTHON.exists() or not pip_script.exists():
        return False
    if str(VENV) not in "".join(pip_script.read_text(errors="replace").splitlines(keepends=True)[:3]):
        return False
    wanted = sys.version_info[:2] if os.environ.get("PYTHON") else None
    try:
        found = output_of([str(VENV_PYTHON), "-c", "import sys; print(*sys.version_info[:2])"]).split()
    except (OSError, subprocess.CalledProcessError):
        return False
    version = (int(found[0]), int(found[1]))
    return (3, 10) <= version <= (3, 13) and wanted in (None, version)


def run_step(step: Step, title: str) -> bool:
    """Runs the step with its output in a log, and says where it is every few seconds.

    Returns:
        Whether it did something worth a line (a build that finds nothing to do did not).
    """
    step.log.parent.mkdir(parents=True, exist_ok=True)
    step.stamp.unlink(missing_ok=True)
    started = time.monotonic()
    progress = Progress(title, step.log, quiet_s=3.0 if step.always else 0.0)
    with step.log.open("wb") as log:
        environment = {**os.environ, **step.env, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    progress.tick()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            progress.end("interrupted")
            raise
    if code:
        progress.end("FAILED")
        raise StepFailed(f"exit status {code} after {elapsed(started)}")
    progress.end("done")
    step.stamp.parent.mkdir(parents=True, exist_ok=True)
    step.stamp.write_text(step.fingerprint())
    return progress.has_spoken


class Progress:
    """One line that moves on a terminal; on anything else (a CI log), a line every 15 seconds."""

    def __init__(self, title: str, log_path: Path, quiet_s: float) -> None:
        self._title, self._log_path, self._quiet_s = title, log_path, quiet_s
        self._started = self._last = time.monotonic()
        self._is_terminal = sys.stdout.isatty()
        self.has_spoken = False
        if quiet_s == 0.0:
            self._begin()

    def _begin(self) -> None:
        self.has_spoken = True
        if not self._is_terminal:
            print(f"{self._title} ...", flush=True)

    def tick(self) -> None:
        now = time.monotonic()
        if not self.has_spoken:
            if now - self._started < self._quiet_s:
                return
            self._begin()
        if self._is_terminal:
            line = f"{self._title}  {elapsed(self._started)}  {latest_news(self._log_path)}"
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{line[:width]}", end="", flush=True)
        elif now - self._last >= 15:
            self._last = now
            print(f"      {elapsed(self._started)}  {latest_news(self._log_path)[:100]}", flush=True)

    def end(self, word: str) -> None:
        if word != "done":
            self.has_spoken = True
        if not self.has_spoken:
            return
        start = "\r\033[K" if self._is_terminal else ""
        print(f"{start}{self._title}: {word} ({elapsed(self._started)})", flush=True)


def explain(failure: StepFailed, number: int, total: int, step: Step) -> None:
    """Says what failed, the end of its log, and what to do."""
    text = step.log.read_text(errors="replace")
    tail = "\n".join(f"  | {line}" for line in text.splitlines()[-25:])
    advice = [hint for pattern, hint in HINTS if re.search(pattern, text, re.IGNORECASE)]
    if step.advice:
        advice.append(step.advice)
    advice.append("Then run the same command again: what is done is not repeated.")
    print(f"\nStep {number} of {total} failed: {step.title} ({failure}).", file=sys.stderr)
    print(f"The end of its log, {step.log}:\n{tail}\nWhat to do:", file=sys.stderr)
    print("\n".join(f"  - {line}" for line in advice), file=sys.stderr)


def latest_news(path: Path) -> str:
    """The end of a log in a few words: what make builds now, or else the last line."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        text = file.read().decode(errors="replace")
    # A compiler's warnings and command lines are long and say nothing about how far it is.
    if targets := re.findall(r"(\[ *\d+%\]) \w+ .*?([^/\s]+)$", text, re.MULTILINE):
        return " ".join(targets[-1])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def contents(paths: Iterable[Path]) -> str:
    return "\0".join(path.read_text() for path in paths)


def output_of(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def elapsed(started: float) -> str:
    seconds = int(time.monotonic() - started)
    return f"{seconds // 60}:{seconds % 60:02d}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
