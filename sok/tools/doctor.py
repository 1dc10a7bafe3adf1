"""`sok doctor`: says whether sok works on this machine, and what to do where it does not."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from sok.tools import _cuda_checks, _machine_checks
from sok.tools._finding import FAIL, OK, Finding

Check = Callable[[], list[Finding]]


def main(checks: list[Check], as_json: bool = False) -> int:
    """Prints the findings of `checks` and returns the exit status.

    Args:
        checks: what is asked one after the other, such as `all_checks()`.
        as_json: print one JSON object (`usable`, `checks`) instead of a line per check.

    Returns:
        0 if sok is usable (there may be warnings), else 1.
    """
    # This is a program of its own here, so it may choose what TensorFlow logs; importing sok never does.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

    findings: list[Finding] = []
    for check in checks:
        found = run_check(check)
        findings += found
        if not as_json:
            for finding in found:
                print(finding.line(), flush=True)

    usable = all(finding.status != FAIL for finding in findings)
    if as_json:
        print(json.dumps({"usable": usable, "checks": [finding.as_dict() for finding in findings]}, indent=2))
    else:
        print("\nsok is usable." if usable else "\nsok is NOT usable: see the lines that say FAIL.")
    return 0 if usable else 1


def measure(path: str | None) -> int:
    """Measures the machine for `sok plan`, writes it and says what was found. Collective, where workers were started.

    Args:
        path: the file; None: where `sok plan` looks.

    Returns:
        The exit status: 0, or 1 if the file cannot be written.
    """
    import sok
    from sok.planning import machine, measuring

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sok.Init()
    (memory,) = _machine_checks.check_memory()
    there = min(memory.details["available_bytes"], memory.details.get("container_limit_bytes", 2**63))
    found = measuring.measure(there)
    if sok.rank():
        return 0
    target = machine.measured_path() if path is None else path
    try:
        machine.save(found, target)
    except OSError as error:
        print(f"sok doctor: {target} cannot be written: {error}", file=sys.stderr)
        return 1
    for name, value in found.as_dict().items():
        if name not in ("measured", "name", "source"):
            print(f"{name:<20} {_spoken(value)}")
    print(f"\n{found.name}. {found.source}\nWritten to {target}.")
    return 0


def _spoken(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_spoken(part)}" for name, part in value.items())
    return f"{value:.3g}"


def all_checks(with_horovod: bool = False) -> list[Check]:
    """The checks in the order in which they make sense: nothing after a missing TensorFlow can succeed.

    Args:
        with_horovod: also start two Horovod workers on this machine and let them train a table together.
    """
    checks: list[Check] = [
        _machine_checks.check_python,
        _machine_checks.check_cpu,
        _machine_checks.check_memory,
        _machine_checks.check_huge_pages,
        _machine_checks.check_tensorflow,
        _machine_checks.check_horovod,
        _machine_checks.check_job,
        _machine_checks.check_native_library,
        _machine_checks.check_devices,
        _cuda_checks.check_cuda,
        check_self_test,
    ]
    if with_horovod:
        checks.append(_machine_checks.check_horovod_workers)
    return checks


def run_check(check: Check) -> list[Finding]:
    """Runs one check; what it raises becomes a finding, because the other checks still have something to say."""
    try:
        with _captured_stderr():
            return check()
    except Exception as error:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        text = f"{type(error).__name__}: {error}"
        return [Finding(name, FAIL, text, remedy="Repair first what the lines above name.")]


def check_self_test(learning_rate: float = 0.1) -> list[Finding]:
    """Trains a small table for a few steps and compares it with the same steps in NumPy, which take a rate of 0.1."""
    from sok.tools import _self_test

    started = time.monotonic()
    cluster = os.environ.pop("TF_CONFIG", None)  # this process is alone
    try:
        worst = _self_test.train_and_compare(learning_rate)
    finally:
        os.environ.update({} if cluster is None else {"TF_CONFIG": cluster})
    seconds = time.monotonic() - started
    if worst > _self_test.TOLERANCE:
        text = f"a trained table differs from NumPy by {worst:.2g} (at most {_self_test.TOLERANCE:.0e} is rounding)"
        remedy = "Build the native library anew: make clean native"
        return [Finding("self test", FAIL, text, remedy, {"difference": worst})]
    text = f"a small table trains as NumPy says (difference {worst:.1e}, {seconds:.1f} s)"
    return [Finding("self test", OK, text, details={"difference": worst, "seconds": round(seconds, 2)})]


@contextlib.contextmanager
def _captured_stderr() -> Iterator[None]:
    """Keeps what C++ code writes to stderr away from the report, unless the check fails: then it is printed."""
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        except BaseException:
            captured.seek(0)
            os.write(saved, captured.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
