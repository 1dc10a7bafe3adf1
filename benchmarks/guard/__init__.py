"""A guard against slower code that needs no clock: instructions of some kernels against a recorded baseline.

    python -m benchmarks.guard            compare; exit status 1 if a kernel runs more than 10 % more instructions
    python -m benchmarks.guard --update   record what is counted now as the baseline

callgrind counts, so the result is the same on a busy machine. It knows no AVX-512; the generic and the AVX2 kernels are
counted, chosen by SOK_ISA. A count depends on the compiler: the baseline holds one set for each compiler that was used.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.workloads import ROOT

KERNELS = ("find", "insert", "erase", "pool", "update", "route", "combine")
SLACK = 0.10
BASELINE = Path(__file__).resolve().parent / "baseline.json"
# The native library's build has compiled the kernels already, for the same flags.
_NATIVE, _OWN = ROOT / "build" / "native", ROOT / "build" / "guard"

Counts = dict[str, dict[str, int]]  # ISA -> kernel -> instructions


@dataclasses.dataclass(frozen=True)
class Line:
    """What became of one kernel."""

    name: str
    now: int
    before: int | None

    @property
    def change(self) -> float:
        return 0.0 if not self.before else self.now / self.before - 1.0

    @property
    def is_worse(self) -> bool:
        return self.before is not None and self.now - self.before > SLACK * self.before

    def text(self) -> str:
        if self.before is None:
            return f"{self.name:<16} {self.now:>12,}  no baseline"
        # A big gain that is not recorded is slack for a later loss.
        word = "WORSE" if self.is_worse else "better: record it" if self.change < -SLACK else "ok"
        return f"{self.name:<16} {self.now:>12,}  {self.change:+7.1%} of {self.before:,}  {word}"


def compare(now: Counts, before: Mapping[str, Mapping[str, int]]) -> list[Line]:
    """One line for each kernel and ISA."""
    return [
        Line(f"{kernel}, {isa}", count, before.get(isa, {}).get(kernel))
        for isa, kernels in now.items()
        for kernel, count in kernels.items()
    ]


def compiler() -> str:
    """What the baseline is filed under: counts of another compiler or processor family say nothing."""
    version = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, check=True).stdout.strip()
    return f"{platform.machine()}, g++ {version.partition('.')[0]}"


def isas() -> list[str]:
    """The kernels that this processor can run and callgrind can follow."""
    if platform.machine() != "x86_64":
        return ["generic"]
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return ["generic", "avx2"] if re.search(r"\bavx2\b", flags) else ["generic"]


def build() -> Path:
    """Builds the kernels; gives the folder of the build. Raises RuntimeError with the end of the log."""
    cmake = str(beside) if (beside := Path(sys.executable).parent / "cmake").exists() else shutil.which("cmake")
    if cmake is None:
        raise RuntimeError("cmake was not found; make setup brings it")
    jobs = os.environ.get("SOK_BUILD_JOBS") or str(os.cpu_count() or 1)
    folder, options = (_NATIVE, []) if (_NATIVE / "CMakeCache.txt").exists() else (_OWN, ["-DSOK_OPS=OFF"])
    commands = [
        [cmake, "-S", str(ROOT), "-B", str(folder), *options, "-DSOK_BENCHMARKS=ON"],
        [cmake, "--build", str(folder), "--target", "sok_guard", "-j", jobs],
    ]
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    for command in commands:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-3000:])
    return folder


def check_vectors(objects: Path) -> None:
    """Raises RuntimeError if the compiler has left initial values to scalar code.

    No test sees that: the bits are the same.
    """
    disassembler = shutil.which("objdump")
    found = sorted(objects.rglob("row_kernels_avx2.cc.o"))
    if disassembler is None or not found:
        return
    code = subprocess.run([disassembler, "-d", str(found[0])], capture_output=True, text=True, check=True).stdout
    if "vpmuludq" not in code:
        raise RuntimeError(f"{found[0].name} multiplies no vectors (vpmuludq): FillUniform is scalar code.")


def collected(report: str) -> int:
    """The count in what callgrind says. Raises RuntimeError if there is none."""
    found = re.search(r"Collected\s*:\s*(\d+)", report)
    if found is None or int(found.group(1)) == 0:
        raise RuntimeError(f"callgrind counted nothing:\n{report[-2000:]}")
    return int(found.group(1))


def count(program: Path, valgrind: str) -> Counts:
    """Runs every kernel under callgrind, as many at once as there are processors."""
    command = [valgrind, "--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=Counted", str(program)]

    def of(isa: str, kernel: str) -> int:
        environment = {**os.environ, "SOK_ISA": isa}
        done = subprocess.run([*command, kernel], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{kernel} under valgrind: {(done.stdout + done.stderr)[-2000:]}")
        return collected(done.stderr)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {isa: {kernel: pool.submit(of, isa, kernel) for kernel in KERNELS} for isa in isas()}
        return {isa: {kernel: one.result() for kernel, one in kernels.items()} for isa, kernels in running.items()}


def read_baseline(path: Path) -> dict[str, Counts]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_baseline(path: Path, name: str, counts: Counts) -> None:
    """Replaces the counts of one compiler."""
    path.write_text(
        json.dumps({**read_baseline(path), name: counts}, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def judge(name: str, counts: Counts, baseline: Mapping[str, Counts]) -> int:
    """Prints a line for each kernel; gives the exit status."""
    lines = compare(counts, baseline.get(name, {}))
    print(f"instructions, {name}:")
    for line in lines:
        print("  " + line.text())
    if name not in baseline:
        known = "; ".join(sorted(baseline)) or "none"
        print(f"SKIPPED: no baseline for {name} (there are: {known}). Record one: python -m benchmarks.guard --update")
        return 0
    missing = [line.name for line in lines if line.before is None]
    worse = [line.name for line in lines if line.is_worse]
    if worse or missing:
        print(f"FAILED: {'; '.join([*worse, *(f'{one} has no baseline' for one in missing)])}.")
        print("If that is meant, record it and say why in the commit: python -m benchmarks.guard --update")
        return 1
    return 0


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--update"]):
        print(__doc__)
        return 2
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        print("SKIPPED: instructions were NOT compared with the baseline, because valgrind is not installed.")
        print("What to do:  sudo apt-get install valgrind")
        return 0
    try:
        folder = build()
        check_vectors(folder)
        counts = count(folder / "benchmarks" / "guard" / "sok_guard", valgrind)
    except RuntimeError as error:
        print(f"FAILED: {error}")
        return 1
    if arguments:
        write_baseline(BASELINE, compiler(), counts)
        print(f"recorded in {BASELINE.relative_to(ROOT)}")
    return judge(compiler(), counts, read_baseline(BASELINE))
