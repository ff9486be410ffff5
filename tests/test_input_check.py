"""common/launch/input_check.py: a task looks at data and model before any other starts, and its end is told in one line."""

import os
import signal
import subprocess
import sys

import pytest
from runs import HOGWILD, SECONDS, processes, wait_until_gone

from common.core.exit_reasons import RAN_OUT
from common.core.flags import Settings, UserError
from common.core.run_facts import RunFacts
from common.launch import input_check, supervisor, warm

pytestmark = pytest.mark.cluster


@pytest.fixture
def check(tmp_path, monkeypatch, user_error, capsys):
    """A function that lets a script, this code, look at the input. Returns what was noted, or the error, and what was shown."""
    begin = """
import ctypes, os, pathlib, signal, sys, time
from common.core import task_status
if sys.argv[-1] != "--check":
    sys.exit("not a check")
"""

    def check(code, hang_secs=60):
        (tmp_path / "scheme.py").write_text(begin + code)
        problem = {"data": "d.py:f", "model": "m.py:f", "num_workers": 2, "batch_size": 32, "window": 1}
        settings = Settings(run=RunFacts("scheme"), hang_secs=hang_secs, loss=None, warmup_steps=0, **problem)
        try:
            with warm.WarmProcess() as process:
                return input_check.check_input(tmp_path / "scheme.py", [], settings, process), capsys.readouterr().out
        except UserError as error:
            assert "\n" not in str(error)
            return str(error), capsys.readouterr().out

    return check


LOADS, BUILDS = "task_status.doing(task_status.LOADING)\n", "task_status.doing(task_status.BUILDING)\n"


def test_check_says_how_long_each_part_took(check):
    found = "pathlib.Path(os.environ['LAUNCHER_FOUND']).write_text('[1]')\n"
    ends = "task_status.doing(task_status.CHECKED)\ntask_status.work_is_done()"
    (seconds, known), _ = check(f"{LOADS}time.sleep(0.2)\n{BUILDS}{found}{ends}")
    assert known == [1]
    # How long exactly is up to when this process hears of it: on a busy machine 0.2 s may look shorter.
    assert seconds["loading the data"] > 0 and seconds["building the model"] >= 0


@pytest.mark.parametrize(
    "code, words",
    [
        (f"{LOADS}ctypes.string_at(0)", "--data=d.py:f: was killed by SIGSEGV while loading the data"),
        (f"{LOADS}{BUILDS}os.abort()", "--model=m.py:f: was killed by SIGABRT while building the model"),
        (f"{LOADS}os.kill(os.getpid(), 9)", "--data=d.py:f: was killed by SIGKILL while loading the data"),
        (
            f"{LOADS}task_status.doing('converting the data: 50%, 9 s left')\nos.kill(os.getpid(), 9)",
            "--data=d.py:f: was killed by SIGKILL while converting the data",
        ),
        (f"{LOADS}sys.exit(130)", "--data=d.py:f: it raised KeyboardInterrupt"),
        (f"{LOADS}sys.exit(0)", "--data=d.py:f: it exited with status 0 instead of returning"),
        (f"{LOADS}os._exit(5)", "--data=d.py:f: it exited with status 5 instead of returning"),
        (f"{LOADS}raise MemoryError", "--data=d.py:f: ran out of memory (MemoryError) while loading the data"),
        (f"{LOADS}print('scheme.py: no', file=sys.stderr); sys.exit(2)", "no"),
        ("raise ImportError('libthis.so')", "ImportError: libthis.so"),
        ("sys.exit(0)", "the check of data and model: it exited with status 0 instead of returning"),
    ],
)
def test_check_that_fails(check, code, words):
    assert check(code)[0] == words


def test_check_that_the_kernel_kills_for_want_of_memory(check, monkeypatch):
    """As a container with too little memory does, when the data are larger than that."""
    for after, number, how in (7, 9, "was killed by SIGKILL"), (8, 9, RAN_OUT), (8, 11, "was killed by SIGSEGV"):
        counts = iter([7, after])
        monkeypatch.setattr(supervisor, "count_oom_kills", lambda counts=counts: next(counts))
        assert check(f"{LOADS}os.kill(os.getpid(), {number})")[0] == f"--data=d.py:f: {how} while loading the data"


def test_check_that_hangs_is_said_and_ended_with_its_children(check, tmp_path, monkeypatch):
    monkeypatch.setattr(input_check, "CHECK_SECONDS", 0.1)
    hangs = f"pid = os.fork()\nif pid: open({str(tmp_path / 'pid')!r}, 'w').write(str(pid))\n{LOADS}signal.pause()"
    error, out = check(hangs, hang_secs=3)
    assert error == "--data=d.py:f did not finish within 3 s; if it needs longer, give a larger --hang_secs"
    assert out.startswith("checking the data and the model before the tasks start; it is ") and out.count("\n") == 1
    assert wait_until_gone([int((tmp_path / "pid").read_text())]) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_check_ends_with_its_launcher(run_dir, tmp_path, number):
    """The same with Ctrl-C, which reaches the launcher alone."""
    (tmp_path / "d.py").write_text(f"import time\n\n\ndef load():\n    open('{tmp_path}/begun', 'w')\n    time.sleep(1e6)\n")
    os.mkfifo(tmp_path / "begun")
    command = [sys.executable, str(HOGWILD), "--launch", f"--data={tmp_path}/d.py:load", f"--run_dir={run_dir}"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (tmp_path / "begun").read_bytes()
    checking = processes(run_dir, "--check")
    process.send_signal(number)
    process.wait(SECONDS)
    assert len(checking) == 1 and wait_until_gone(checking) == []
