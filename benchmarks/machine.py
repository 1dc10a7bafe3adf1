"""What the machine is, what is installed, and how busy others keep it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# What decides which kernels run, of the many flags a processor has.
_ISA = ("avx2", "fma", "avx512f", "avx512dq", "avx512vl", "amx_tile", "asimd", "sve")
_PACKAGES = ("tensorflow", "tensorflow-cpu", "tf_keras", "keras", "numpy", "horovod")


def describe() -> dict[str, Any]:
    """Processor, cores, caches, memory, instruction sets, kernel."""
    cpuinfo = _read("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", cpuinfo)
    flags = re.search(r"(?:flags|Features)\s*:\s*(.*)", cpuinfo)
    has = set(flags.group(1).split()) if flags else set()
    return {
        "cpu": model.group(1).strip() if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "caches": caches(),
        "memory_gib": round(memory_bytes("MemTotal") / 2**30, 1),
        "memory_available_gib": round(memory_bytes("MemAvailable") / 2**30, 1),
        "huge_pages": (re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled")) or ["", ""])[1],
        "isa": [name for name in _ISA if name in has],
        "sok_isa": os.environ.get("SOK_ISA", "chosen at run time"),
        "kernel": platform.release(),
        "virtual": "hypervisor" in has,
    }


def caches() -> dict[str, int]:
    """Bytes of each cache of the first core, 'L1d', 'L2', ...; shared ones whole."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind, size = _read(index / "type").strip(), _read(index / "size").strip()
        if kind == "Instruction" or not size:
            continue
        factor = {"K": 2**10, "M": 2**20, "G": 2**30}.get(size[-1])
        name = f"L{_read(index / 'level').strip()}" + ("d" if kind == "Data" else "")
        found[name] = int(size[:-1]) * factor if factor else int(size)
    return found


def versions() -> dict[str, str]:
    """Versions of what is measured in this environment."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["sok"] = sok_version()
    return found


def sok_version() -> str:
    """The commit of the sources, with '+' if they differ from it; else the version of the package."""
    try:
        git = ["git", "-C", str(ROOT)]
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
        return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        text = _read(ROOT / "sok" / "__init__.py")
        version = re.search(r'__version__ = "(.*)"', text)
        return version.group(1) if version else "unknown"


def memory_bytes(field: str) -> int:
    """A line of /proc/meminfo, in bytes; 0 if there is none."""
    found = re.search(rf"^{field}:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def rss_bytes() -> int:
    """Memory of this process that is its own and in use."""
    found = re.search(r"^RssAnon:\s*(\d+) kB", _read("/proc/self/status"), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


class CpuClock(NamedTuple):
    """Seconds of processor time of the whole machine so far, and when that was."""

    busy: float
    wall: float

    @staticmethod
    def read() -> CpuClock:
        fields = [int(x) for x in _read("/proc/stat").partition("\n")[0].split()[1:9]]
        idle = fields[3] + fields[4]
        return CpuClock((sum(fields) - idle) / os.sysconf("SC_CLK_TCK"), time.perf_counter())


def load_of_others(before: CpuClock, after: CpuClock, own_seconds: float) -> float:
    """How many processors were kept busy by processes other than the one that used `own_seconds`."""
    wall = max(1e-9, after.wall - before.wall)
    return max(0.0, (after.busy - before.busy - own_seconds) / wall)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
