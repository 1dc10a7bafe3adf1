"""The checks of `sok doctor` that look at the machine and at what is installed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from sok.base import _ops
from sok.tools._finding import FAIL, OK, WARN, Finding

SUPPORTED_TENSORFLOW = "2.21"
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
LOW_MEMORY_BYTES = 2 << 30  # TensorFlow, Keras and a small table stay under it
HOROVOD_TIMEOUT_S = 120

# Asked in a process of its own: a Horovod that was built for another TensorFlow may crash instead of raising.
HOROVOD_QUESTION = """
import json
import horovod.tensorflow as hvd
from tensorflow.python.framework import kernels
found = kernels.get_registered_kernels_for_op("HorovodAlltoall").kernel
print(json.dumps({
    "gloo": bool(hvd.gloo_built()), "mpi": bool(hvd.mpi_built()), "nccl": bool(hvd.nccl_built()),
    "cuda": bool(hvd.cuda_built()), "alltoall on GPUs": any("GPU" in kernel.device_type for kernel in found),
}))
"""


def check_python(info: tuple[int, ...] = sys.version_info[:3]) -> list[Finding]:
    version = ".".join(map(str, info))
    details = {"version": version, "executable": sys.executable}
    if not (3, 10) <= info[:2] <= (3, 13):
        remedy = "Make an environment with one of these, which TensorFlow supports."
        return [Finding("python", FAIL, f"{version}; sok needs 3.10 to 3.13", remedy, details)]
    return [Finding("python", OK, f"{version} ({sys.executable})", details=details)]


def check_cpu() -> list[Finding]:
    flags, model = _cpu_flags()
    wanted = ("avx2", "fma", "avx512f")
    has = {name: name in flags for name in wanted}
    # The affinity mask, because a container may own fewer cores than the machine has.
    cores = len(os.sched_getaffinity(0))
    text = f"{model}, {cores} cores; " + ", ".join(f"{name} {'yes' if has[name] else 'no'}" for name in wanted)
    details = {"model": model, "cores": cores, **has}
    if platform.machine() == "x86_64" and not has["avx2"]:
        return [Finding("cpu", WARN, text, "A processor without AVX2 works, but slowly.", details)]
    return [Finding("cpu", OK, text, details=details)]


def check_memory(cgroup: Path = CGROUP_MEMORY) -> list[Finding]:
    lines = (line.split() for line in _read("/proc/meminfo").splitlines())
    sizes = {words[0]: int(words[1]) << 10 for words in lines if len(words) >= 2}
    total, available = sizes["MemTotal:"], sizes["MemAvailable:"]
    limit = _read(cgroup).strip()
    details = {"total_bytes": total, "available_bytes": available}
    text = f"{available / 2**30:.1f} GiB available of {total / 2**30:.1f} GiB"
    if limit.isdigit() and int(limit) < total:
        details["container_limit_bytes"] = int(limit)
        text += f", container limit {int(limit) / 2**30:.1f} GiB"
        available = min(available, int(limit))
    if available < LOW_MEMORY_BYTES:
        return [Finding("memory", WARN, text, "Close something, or use smaller tables.", details)]
    return [Finding("memory", OK, text, details=details)]


def check_huge_pages(setting: Path = HUGE_PAGES) -> list[Finding]:
    chosen = _read(setting).partition("[")[2].partition("]")[0] or "unknown"
    details = {"transparent_huge_pages": chosen}
    if chosen == "never":
        remedy = f"echo madvise | sudo tee {setting}"
        text = "off: lookups in large tables wait longer for memory"
        return [Finding("huge pages", WARN, text, remedy, details)]
    return [Finding("huge pages", OK, chosen, details=details)]


def check_tensorflow() -> list[Finding]:
    try:
        import tensorflow as tf
    except ImportError as error:
        remedy = f"pip install 'tensorflow=={SUPPORTED_TENSORFLOW}.*'"
        return [Finding("tensorflow", FAIL, f"cannot be imported: {error}", remedy)]

    versions = {name: _version(name) for name in ("keras", "tf_keras", "numpy")}
    details: dict[str, Any] = {"version": tf.__version__, "git_version": tf.version.GIT_VERSION, **versions}
    if tf.__version__.split(".")[:2] == SUPPORTED_TENSORFLOW.split("."):
        findings = [Finding("tensorflow", OK, f"{tf.__version__} ({tf.version.GIT_VERSION})", details=details)]
    else:
        text = f"{tf.__version__}; sok is tested with {SUPPORTED_TENSORFLOW}"
        remedy = f"pip install 'tensorflow=={SUPPORTED_TENSORFLOW}.*'"
        findings = [Finding("tensorflow", WARN, text, remedy, details)]

    legacy = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    text = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
    text += f"; tf.keras is {'tf_keras' if legacy else 'Keras 3'}"
    if legacy and versions["tf_keras"] is None:
        remedy = f"pip install 'tf_keras=={SUPPORTED_TENSORFLOW}.*', or unset TF_USE_LEGACY_KERAS"
        return [*findings, Finding("keras", FAIL, text, remedy, versions)]
    return [*findings, Finding("keras", OK, text, details=versions)]


def check_horovod(distribution: str = "horovod", question: str = HOROVOD_QUESTION) -> list[Finding]:
    version = _version(distribution)
    if version is None:
        remedy = "For several workers: scripts/build_horovod.sh, or make setup (docs/install.md)"
        return [Finding("horovod", WARN, "not installed: one worker only", remedy, {"version": None})]

    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, timeout=HOROVOD_TIMEOUT_S)
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]
        text = f"{version} does not load into this TensorFlow: {reason}"
        remedy = "Build it anew: PYTHON=$(command -v python) scripts/build_horovod.sh"
        return [Finding("horovod", WARN, text, remedy, {"version": version})]
    built = json.loads(answer.stdout.strip().splitlines()[-1])
    names = ", ".join(name for name, has in built.items() if has) or "nothing"
    details = {"version": version, "built_with": built}
    if not (built["gloo"] or built["mpi"]):
        remedy = "Build it with Gloo: PYTHON=$(command -v python) scripts/build_horovod.sh"
        text = f"{version}, built without Gloo and MPI: workers cannot meet"
        return [Finding("horovod", WARN, text, remedy, details)]
    way = "on the device" if built["alltoall on GPUs"] else "through the memory of the host"
    text = f"{version}, built with {names}; rows of GPUs travel {way}"
    return [Finding("horovod", OK, text, details={**details, "rows_of_gpus": way})]


def check_job() -> list[Finding]:
    """How a program that is started here, as this one was, would meet other workers."""
    from sok.job import launchers

    try:
        who, engine = launchers.workers_named()
    except (RuntimeError, ValueError) as error:
        return [Finding("job", FAIL, str(error), "Say the workers once: by horovodrun, or by TF_CONFIG.")]
    text = f"{who}: sok.Init would meet them by {engine}" if who else "one worker: nothing here names others"
    return [Finding("job", OK, text, details={"workers": who, "engine": engine})]


def check_native_library() -> list[Finding]:
    info = _ops.build_info() or {}
    details = {"path": str(_ops.library_path()), **info}
    try:
        _ops.lib()
    except _ops.NativeLibraryError as error:
        # The message is whole in itself: it ends with the remedy.
        return [Finding("native library", FAIL, str(error), details=details)]
    text = (
        f"loads; built for TensorFlow {info.get('tensorflow_version', '?')} from {info.get('git_version', '?')} "
        f"by {info.get('compiler', '?')} on {info.get('date', '?')}"
    )
    return [Finding("native library", OK, text, details=details)]


def check_devices() -> list[Finding]:
    import tensorflow as tf

    names = {kind: [device.name for device in tf.config.list_physical_devices(kind)] for kind in ("CPU", "GPU")}
    return [where_tables_are(names, (_ops.build_info() or {}).get("cuda", "none"))]


def where_tables_are(names: dict[str, list[str]], cuda: str) -> Finding:
    text = f"{len(names['CPU'])} CPU, {len(names['GPU'])} GPU"
    details = {**names, "cuda": cuda}
    if not names["GPU"]:
        return Finding("devices", OK, text, details=details)
    if cuda == "none":
        remedy = "For tables on the GPU build with the CUDA toolkit: SOK_CUDA=ON make native (docs/gpu.md)"
        text += "; tables stay on the CPU: sok was built without CUDA"
        return Finding("devices", WARN, text, remedy, details)
    return Finding("devices", OK, f"{text}; tables on the GPU by kernels of CUDA {cuda}", details=details)


def check_horovod_workers() -> list[Finding]:
    launcher = Path(sys.executable).parent / "horovodrun"
    command = str(launcher) if launcher.exists() else shutil.which("horovodrun")
    if command is None:
        remedy = "scripts/build_horovod.sh, or make setup (docs/install.md)"
        return [Finding("two workers", FAIL, "horovodrun was not found", remedy)]
    try:
        answer = subprocess.run(
            [command, "-np", "2", sys.executable, "-m", "sok.tools._self_test"],
            capture_output=True,
            text=True,
            timeout=HOROVOD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        text = f"two Horovod workers did not finish within {HOROVOD_TIMEOUT_S} s"
        remedy = "See whether a firewall closes ports on the loopback interface; HOROVOD_GLOO_IFACE=lo may help."
        return [Finding("two workers", FAIL, text, remedy)]
    if answer.returncode:
        lines = (answer.stdout + answer.stderr).strip().splitlines()[-8:]
        text = "two Horovod workers failed:\n" + "\n".join(f"{'':<23}{line}" for line in lines)
        remedy = f"Run it by hand: horovodrun -np 2 {sys.executable} -m sok.tools._self_test"
        return [Finding("two workers", FAIL, text, remedy)]
    return [Finding("two workers", OK, "two Horovod workers train a table as NumPy says")]


def _cpu_flags() -> tuple[set[str], str]:
    flags: set[str] = set()
    model = platform.processor() or platform.machine()
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = set(value.split())
        elif key.strip() == "model name":
            model = value.strip()
    return flags, model


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
