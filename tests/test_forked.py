"""Commands that stand where `python` would (tests/forked.py): what goes in, what comes out, what is left: nothing."""

import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

from tests.forked import MARK
from tests.multiprocess.harness import processes_of


def test_a_command_is_the_program_to_whoever_starts_it(forked, tmp_path):
    (tmp_path / "beside.py").write_text("WORD = 'beside'")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, beside\n"
        "print(sys.argv[1:], os.getcwd(), os.environ['MINE'], 'HOME' in os.environ, beside.WORD)\n"
        "print(sys.stdin.read().upper())\nif __name__ == '__main__': sys.exit('the end')"
    )
    done = subprocess.run(
        forked.command(str(program), "a", "b c"),
        input="word",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"MINE": "so"},
        timeout=120,
    )
    assert done.stdout == f"['a', 'b c'] {tmp_path} so False beside\nWORD\n"
    assert (done.returncode, done.stderr) == (1, "the end\n")


def test_modules_and_texts_are_programs(forked):
    said = subprocess.run(forked.command("-m", "json.tool"), input="[1]", capture_output=True, text=True, timeout=120)
    assert (said.returncode, said.stdout) == (0, "[\n    1\n]\n")
    text = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run(forked.command("-c", text), timeout=120).returncode == -signal.SIGKILL


def test_signals_reach_the_program_and_it_ends_with_who_asked(forked):
    text = (
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: exit(5))\n"
        "print('on', flush=True)\ntime.sleep(300)"
    )
    mark = uuid.uuid4().hex
    for number, status in (signal.SIGTERM, 5), (signal.SIGKILL, -signal.SIGKILL):
        asked = subprocess.Popen(forked.command("-c", text), stdout=subprocess.PIPE, env={**os.environ, MARK: mark})
        assert asked.stdout.readline() == b"on\n"
        assert len(processes_of(mark)) == 2  # the program, too, has the mark that jobs are found by
        asked.send_signal(number)
        assert asked.wait(120) == status
        asked.stdout.close()
        until = time.monotonic() + 60
        while processes_of(mark) and time.monotonic() < until:
            time.sleep(0.02)
        assert processes_of(mark) == []


def test_a_program_and_who_asked_may_end_in_one_moment(forked):
    text = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    asked = subprocess.Popen(forked.command("-c", text), stdout=subprocess.PIPE)
    program = int(asked.stdout.readline())
    os.kill(forked.pid, signal.SIGSTOP)  # so that it learns of both at once
    os.kill(program, signal.SIGKILL)
    until = time.monotonic() + 60
    while Path(f"/proc/{program}/stat").read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.01)
    asked.kill()
    asked.wait(60)
    asked.stdout.close()
    os.kill(forked.pid, signal.SIGCONT)
    assert subprocess.run(forked.command("-c", "exit(3)"), timeout=120).returncode == 3
