"""Times on the device, and how they compare with its memory."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Time:
    """Milliseconds of one call on the device, median and quartiles; and how long the host takes to give it its work."""

    ms: float
    low_ms: float
    high_ms: float
    host_ms: float


FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU there is
# Keeps the device busy for so many nanoseconds.
SPIN = """
extern "C" __global__ void spin(unsigned long long nanoseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}
"""


class Device:
    """Where the arrays are: CuPy's current device, or in the emulator the host, where figures mean nothing."""

    def __init__(self, emulate: bool):
        self.emulate = emulate
        if emulate:
            self.xp: Any = np
        else:
            import cupy

            self.xp = cupy
            # A stream that PyTorch can be given, too: of the legacy one its events would see nothing.
            cupy.cuda.Stream(non_blocking=True).use()
            self._spin = cupy.RawKernel(SPIN, "spin")
            self._flushed = cupy.empty(FLUSH_BYTES, np.uint8)

    @property
    def name(self) -> str:
        if self.emulate:
            return "emulator (figures mean nothing)"
        properties = self.xp.cuda.runtime.getDeviceProperties(self.xp.cuda.runtime.getDevice())
        version = self.xp.cuda.runtime.runtimeGetVersion()
        return (
            f"{properties['name'].decode()}, CUDA {version // 1000}.{version % 1000 // 10}, CuPy {self.xp.__version__}"
        )

    def put(self, x: np.ndarray) -> Any:
        return self.xp.asarray(x)

    def release(self) -> None:
        """Gives back memory that CuPy keeps for arrays to come, which tables cannot use."""
        if not self.emulate:
            self.synchronize()
            self.xp.get_default_memory_pool().free_all_blocks()

    def synchronize(self) -> None:
        if not self.emulate:
            self.xp.cuda.get_current_stream().synchronize()

    def time(
        self, run: Callable[[], Any], repeats: int = 20, warmup: int = 3, before: Callable[[], Any] | None = None
    ) -> Time:
        """Times calls one by one with events on the stream.

        The device is kept busy while the host gives it the call's work, so that what Python takes for that is told
        apart (`host_ms`); a call that waits for the device pays for it. Before each call the L2 cache is filled with
        something else, or small cases would time the cache.
        """
        if self.emulate:
            repeats, warmup = 2, 1
        host = 0.0
        before = before or (lambda: None)
        for _ in range(warmup):
            before()
            start = time.perf_counter()
            run()
            host = time.perf_counter() - start
            self.synchronize()
        taken = []
        for _ in range(repeats):
            before()
            if self.emulate:
                start = time.perf_counter()
                run()
                taken.append(1e3 * (time.perf_counter() - start))
                continue
            begin, end = self.xp.cuda.Event(), self.xp.cuda.Event()
            self._flushed.fill(0)
            self._spin((1,), (1,), (np.uint64(2e9 * host + 2e5),))
            begin.record()
            run()
            end.record()
            end.synchronize()
            taken.append(self.xp.cuda.get_elapsed_time(begin, end))
        quartiles = statistics.quantiles(taken, n=4, method="inclusive")
        return Time(statistics.median(taken), quartiles[0], quartiles[2], 1e3 * host)

    def copy_bandwidth(self) -> float:
        """Bytes a second that a copy inside the device's memory reads and writes, of a buffer that no cache holds."""
        size = (1 << 16) if self.emulate else (1 << 30)
        source, to = self.xp.ones(size, np.uint8), self.xp.empty(size, np.uint8)

        def copy() -> None:
            to[...] = source

        return 2 * size / (self.time(copy).ms / 1e3)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
      name: what is measured, with its sizes.
      items, unit: how many keys or rows a call has.
      floor_bytes: the fewest bytes that a call must move, and `floor` how they are counted.
      run: one call.
      rivals: name to call, of others that do the same.
      goal: what is to be reached, in words.
      before: called before each call, outside the time.
    """

    name: str
    items: int
    unit: str
    floor_bytes: float
    floor: str
    run: Callable[[], Any]
    rivals: dict[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    goal: str = ""
    before: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    case: Case
    time: Time
    rivals: dict[str, Time]
    fraction: float  # of the copy bandwidth, counting the floor's bytes


def measure(device: Device, case: Case, bandwidth: float) -> Result:
    time_taken = device.time(case.run, before=case.before)
    rivals = {name: device.time(run) for name, run in case.rivals.items()}
    fraction = case.floor_bytes / (time_taken.ms / 1e3) / bandwidth
    # Not what the case holds: its memory is for those that come.
    return Result(dataclasses.replace(case, run=lambda: None, rivals={}, before=None), time_taken, rivals, fraction)


def line(result: Result) -> str:
    """One line of the table."""
    case, taken = result.case, result.time
    rate = case.items / (taken.ms / 1e3) / 1e9
    text = (
        f"{case.name:58} {taken.ms:9.4f} ms ({taken.low_ms:.4f} - {taken.high_ms:.4f}), host {taken.host_ms:.3f}  "
        f"{rate:7.3f} G {case.unit}/s  {100 * result.fraction:5.1f} % of copy"
    )
    for name, rival in result.rivals.items():
        text += f"  {name} {rival.ms:.4f} ms = {rival.ms / taken.ms:.2f} x"
    return text + (f"  [{case.goal}]" if case.goal else "")
