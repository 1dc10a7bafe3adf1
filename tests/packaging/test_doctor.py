"""`sok doctor`: what it finds, what it advises, and its exit status."""

import json
import os
import subprocess
import sys

import pytest

from sok.base import _ops
from sok.tools import _cuda_checks, _machine_checks, _self_test, cli, doctor
from sok.tools._finding import FAIL, OK, WARN, Finding

INSTALLED = "numpy"  # a package that is there whether Horovod is or not


def run_doctor(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sok", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_doctor_says_usable_in_json_with_exit_status_0():
    answer = run_doctor("--json")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    report = json.loads(answer.stdout)
    assert report["usable"] is True
    checks = {check["name"]: check for check in report["checks"]}
    assert set(checks) == {
        *(
            "python",
            "cpu",
            "memory",
            "huge pages",
            "tensorflow",
            "keras",
            "horovod",
            "job",
            "native library",
            "devices",
        ),
        *(["cuda"] if (_ops.build_info() or {}).get("cuda", "none") != "none" else []),
        "self test",
    }
    assert checks["self test"]["status"] == OK
    assert checks["self test"]["details"]["difference"] <= _self_test.TOLERANCE
    assert checks["native library"]["details"]["path"] == str(_ops.library_path())


@pytest.mark.multiprocess
def test_two_horovod_workers_pass_the_self_test():
    (finding,) = _machine_checks.check_horovod_workers()
    assert finding.status == OK, finding.text


@pytest.mark.parametrize(
    ("status", "exit_status", "last_line"),
    [(OK, 0, "sok is usable."), (WARN, 0, "sok is usable."), (FAIL, 1, "sok is NOT usable")],
)
def test_exit_status_is_0_unless_a_check_failed(capsys, status, exit_status, last_line):
    finding = Finding("weather", status, "it rains", remedy="Take an umbrella.")
    assert doctor.main([lambda: [finding]]) == exit_status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [status, "weather", "it", "rains"]
    assert lines[1].strip() == "-> Take an umbrella."
    assert lines[-1].startswith(last_line)


def test_json_of_a_failure_is_one_object_and_exit_status_1(capsys):
    finding = Finding("weather", FAIL, "it rains", details={"mm": 3})
    assert doctor.main([lambda: [finding]], as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["usable"] is False
    assert report["checks"] == [
        {"name": "weather", "status": FAIL, "text": "it rains", "remedy": "", "details": {"mm": 3}}
    ]


def test_check_that_raises_is_a_failure_and_the_others_still_run(capfd):
    def check_something_else():
        os.write(2, b"noise from C++\n")
        raise RuntimeError("out of order")

    assert doctor.main([check_something_else, lambda: [Finding("weather", OK, "the sun shines")]]) == 1
    out, err = capfd.readouterr()
    assert "something else   RuntimeError: out of order" in out
    assert "the sun shines" in out
    assert "noise from C++" in err, "what a failing check wrote must not be lost"


def test_noise_of_a_check_that_succeeds_is_kept_back(capfd):
    def check_noisy():
        os.write(2, b"noise from C++\n")
        return [Finding("noisy", OK, "fine")]

    assert doctor.run_check(check_noisy)[0].status == OK
    assert capfd.readouterr().err == ""


def test_missing_library_fails_with_the_remedy(tmp_path):
    code = "from sok.tools import _machine_checks as c, doctor; raise SystemExit(doctor.main([c.check_native_library]))"
    environment = {**os.environ, "SOK_NATIVE_DIR": str(tmp_path)}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1
    assert answer.stdout.startswith(FAIL) and "pip install" in answer.stdout


def test_self_test_sees_a_wrong_optimizer():
    (finding,) = doctor.check_self_test(learning_rate=0.1001)
    assert finding.status == FAIL
    assert "differs from NumPy" in finding.text
    assert "make clean native" in finding.remedy


def test_huge_pages_that_are_off_get_a_command(tmp_path):
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    (finding,) = _machine_checks.check_huge_pages(setting)
    assert finding.status == WARN
    assert "sudo tee" in finding.remedy
    setting.write_text("always [madvise] never\n")
    assert _machine_checks.check_huge_pages(setting)[0].status == OK


def test_memory_limit_of_a_container_counts(tmp_path):
    limit = tmp_path / "memory.max"
    limit.write_text(str(512 << 20))
    (finding,) = _machine_checks.check_memory(limit)
    assert finding.status == WARN
    assert "container limit 0.5 GiB" in finding.text
    limit.write_text("max\n")
    assert "container limit" not in _machine_checks.check_memory(limit)[0].text


@pytest.mark.parametrize("version, status", [((3, 9, 2), FAIL), ((3, 10, 0), OK), ((3, 13, 9), OK), ((3, 14, 0), FAIL)])
def test_pythons_that_tensorflow_does_not_support_fail(version, status):
    assert _machine_checks.check_python(version)[0].status == status


def test_missing_horovod_is_a_warning():
    (finding,) = _machine_checks.check_horovod("no-such-package")
    assert finding.status == WARN
    assert "one worker only" in finding.text


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("raise ImportError('undefined symbol: xyz')", "ImportError: undefined symbol: xyz"),
        ("import os; os.abort()", "exit status -6"),
    ],
)
def test_horovod_that_does_not_load_is_a_warning_with_the_reason(question, expected):
    (finding,) = _machine_checks.check_horovod(INSTALLED, question)
    assert finding.status == WARN
    assert expected in finding.text
    assert "build_horovod.sh" in finding.remedy


def test_horovod_without_a_controller_is_a_warning():
    answer = 'print(\'{"gloo": false, "mpi": false, "nccl": false, "cuda": false}\')'
    (finding,) = _machine_checks.check_horovod(INSTALLED, answer)
    assert finding.status == WARN
    assert "workers cannot meet" in finding.text


@pytest.mark.parametrize("on_gpus, way", [("true", "on the device"), ("false", "through the memory of the host")])
def test_horovod_says_how_rows_of_gpus_travel(on_gpus, way):
    answer = f'print(\'{{"gloo": true, "mpi": false, "alltoall on GPUs": {on_gpus}}}\')'
    (finding,) = _machine_checks.check_horovod(INSTALLED, answer)
    assert finding.status == OK and f"rows of GPUs travel {way}" in finding.text


@pytest.mark.parametrize(
    "cuda, status, text",
    [("none", WARN, "1 GPU; tables stay on the CPU"), ("13.0.48", OK, "1 GPU; tables on the GPU by kernels of CUDA")],
)
def test_devices_say_where_tables_are(cuda, status, text):
    finding = _machine_checks.where_tables_are({"CPU": ["/physical_device:CPU:0"], "GPU": ["GPU:0"]}, cuda)
    assert finding.status == status and text in finding.text


@pytest.mark.parametrize(
    "toolkit, architectures, version, capability, status, text",
    [
        ("13.0.88", "80-real 90", (13, 0), (9, 0), OK, "built with CUDA 13.0 for sm_80, sm_90, and newer by 9.0"),
        ("13.0.88", "80-real 90", (12, 8), (9, 0), FAIL, "It needs a driver of release 580 or later"),
        ("12.9.41", "80-real 90", (12, 2), (9, 0), OK, "H200 runs it"),
        ("12.9.41", "80-real 90", (11, 8), (8, 0), FAIL, "It needs a driver of release 525 or later"),
        ("14.1.0", "90", (13, 0), (9, 0), FAIL, "It needs a driver of a release that supports CUDA 14.0"),
        ("13.0.88", "80-real 90", (13, 0), (8, 6), OK, "H200 runs it"),  # machine code of 8.0
        ("13.0.88", "80-real 90", (13, 0), (7, 5), FAIL, "it has compute capability 7.5, for which there is no code"),
        ("13.0.88", "80-real 90", (13, 0), (10, 0), OK, "H200 runs it"),  # compiled from that of 9.0
        ("13.1.10", "80-real 90", (13, 0), (10, 0), FAIL, "this driver cannot compile what CUDA 13.1 left"),
        ("13.0.88", "90-real", (13, 0), (10, 0), FAIL, "for which there is no code"),
        ("13.0.88", "90a-virtual native", (13, 0), (9, 0), OK, "for none, and newer by 9.0"),
    ],
)
def test_cuda_says_in_words_what_will_not_run(toolkit, architectures, version, capability, status, text):
    finding = _cuda_checks.what_will_run(toolkit, architectures, _cuda_checks.Driver(version, (("H200", capability),)))
    assert finding.status == status and text in finding.text
    assert bool(finding.remedy) == (status == FAIL)


def test_cuda_without_a_driver_is_no_failure():
    finding = _cuda_checks.what_will_run("13.0.88", "90", None)
    assert finding.status == OK and "no driver here" in finding.text


def test_the_driver_is_asked_for_its_version_and_its_gpus(tmp_path):
    source = tmp_path / "cuda.c"
    source.write_text("""
        #include <string.h>
        int cuInit(unsigned flags) { return 0; }
        int cuDriverGetVersion(int* version) { return *version = 12080, 0; }
        int cuDeviceGetCount(int* count) { return *count = 2, 0; }
        int cuDeviceGetName(char* name, int n, int device) { return strcpy(name, device ? "B" : "A"), 0; }
        int cuDeviceGetAttribute(int* value, int what, int device) {
          return *value = what == 75 ? 8 + device : what == 76 ? 6 - 6 * device : -1, 0;
        }
    """)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    found = _cuda_checks.find_driver(str(library))
    assert found == _cuda_checks.Driver((12, 8), (("A", (8, 6)), ("B", (9, 0))))
    assert _cuda_checks.find_driver(str(tmp_path / "none.so")) is None


def test_command_without_a_name_prints_help_and_fails(capsys):
    assert cli.main([]) == 2
    assert "doctor" in capsys.readouterr().err


def test_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["surgeon"])
    assert caught.value.code == 2
    assert "surgeon" in capsys.readouterr().err
