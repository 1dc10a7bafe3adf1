"""The check of `sok doctor` that compares what sok was built for with the CUDA driver and the GPUs that are there."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

from sok.base import _ops
from sok.tools._finding import FAIL, OK, Finding

# The oldest driver release for each major version of the toolkit (NVIDIA's notes on minor version compatibility).
DRIVER_RELEASES = {12: 525, 13: 580}
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclasses.dataclass(frozen=True)
class Driver:
    """What the driver's library says: the CUDA version it supports, and the GPUs with their compute capabilities."""

    version: tuple[int, int]
    gpus: tuple[tuple[str, tuple[int, int]], ...]


def check_cuda() -> list[Finding]:
    """Nothing to say where sok was built without CUDA."""
    info = _ops.build_info() or {}
    if info.get("cuda", "none") == "none":
        return []
    return [what_will_run(info["cuda"], str(info.get("cuda_architectures", "")), find_driver())]


def what_will_run(toolkit: str, architectures: str, driver: Driver | None) -> Finding:
    """Judges a build by the toolkit `13.0.88` for architectures `80-real 90`."""
    built = tuple(int(part) for part in toolkit.split(".")[:2])
    machine_code, intermediate = _codes(architectures)
    codes = ", ".join(f"sm_{major}{minor}" for major, minor in machine_code) or "none"
    text = f"built with CUDA {built[0]}.{built[1]} for {codes}"
    text += "".join(f", and newer by {major}.{minor}" for major, minor in intermediate[-1:])
    details: dict[str, Any] = {"toolkit": toolkit, "architectures": architectures}
    if driver is None:
        return Finding("cuda", OK, f"{text}; no driver here, so no table can be on a GPU", details=details)
    version = f"{driver.version[0]}.{driver.version[1]}"
    details |= {"driver": version, "gpus": [f"{name} {major}.{minor}" for name, (major, minor) in driver.gpus]}
    text += f"; the driver supports CUDA {version}"
    release = DRIVER_RELEASES.get(built[0])
    if driver.version[0] < built[0]:
        needs = f"release {release} or later" if release else f"a release that supports CUDA {built[0]}.0"
        remedy = f"Install a driver of {needs}, or build sok with the CUDA {driver.version[0]}.x toolkit (docs/gpu.md)."
        text += f": no kernel of sok will run, though TensorFlow may. It needs a driver of {needs}"
        return Finding("cuda", FAIL, text, remedy, details)
    for name, capability in driver.gpus:
        trouble = _trouble(capability, machine_code, intermediate, built, driver.version)
        if not trouble:
            continue
        remedy = f"Build sok for it: CUDAARCHS={capability[0]}{capability[1]} make native"
        return Finding("cuda", FAIL, f"{text}: no kernel of sok will run on {name}: {trouble}", remedy, details)
    return Finding("cuda", OK, text + "".join(f"; {name} runs it" for name, _ in driver.gpus[:1]), details=details)


def _trouble(
    capability: tuple[int, int],
    machine_code: list[tuple[int, int]],
    intermediate: list[tuple[int, int]],
    built: tuple[int, ...],
    driver: tuple[int, int],
) -> str:
    if any(code[0] == capability[0] and code[1] <= capability[1] for code in machine_code):
        return ""
    if not any(code <= capability for code in intermediate):
        return f"it has compute capability {capability[0]}.{capability[1]}, for which there is no code"
    if driver < built:
        return f"there is no machine code for it, and this driver cannot compile what CUDA {built[0]}.{built[1]} left"
    return ""


def _codes(architectures: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Machine and intermediate code of CMake's list: `80-real` is the first, `90` both, `90-virtual` the second."""
    machine_code, intermediate = [], []
    for entry in architectures.split():
        number, _, kind = entry.partition("-")
        digits = "".join(c for c in number if c.isdigit())
        if not digits:
            continue
        code = (int(digits) // 10, int(digits) % 10)
        if kind != "virtual":
            machine_code.append(code)
        if kind != "real":
            intermediate.append(code)
    return sorted(machine_code), sorted(intermediate)


def find_driver(library: str = "libcuda.so.1") -> Driver | None:
    """The driver, or None where there is none or it has no GPU. Makes no context."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return None
    number = ctypes.c_int()

    def ask(function: str, *arguments: Any) -> int:
        return int(getattr(cuda, function)(ctypes.byref(number), *arguments))

    if cuda.cuInit(0) != 0 or ask("cuDriverGetVersion") != 0:
        return None
    version = (number.value // 1000, number.value % 1000 // 10)
    if ask("cuDeviceGetCount") != 0 or number.value == 0:
        return None
    gpus = []
    for device in range(number.value):
        name = ctypes.create_string_buffer(256)
        cuda.cuDeviceGetName(name, 256, device)
        capability = []
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
            ask("cuDeviceGetAttribute", attribute, device)
            capability.append(number.value)
        gpus.append((name.value.decode(), (capability[0], capability[1])))
    return Driver(version, tuple(gpus))
