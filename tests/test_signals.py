"""core/signals.py: what ends a run: Ctrl-C, a closed terminal; and what does not: signals that are ignored from the start."""

import contextlib
import errno
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import runs
from runs import HOGWILD, ROOT, SECONDS, on_a_terminal, processes, wait_until_gone

from common import tf
from common.core import signals
from common.launch import launcher
from common.training.interruption import Interruption

IGNORABLE = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def program(code, ignores=()):
    """The output of a program that was started to ignore these signals."""

    def ignore():
        for number in ignores:
            signal.signal(number, signal.SIG_IGN)

    code = f"import os, signal, sys\nfrom common.core import signals\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, preexec_fn=ignore, timeout=SECONDS
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.slow
def test_all_three_signals_are_heeded():
    assert program("print([number.name for number in signals.heeded()])") == ["['SIGINT', 'SIGTERM', 'SIGHUP']"]


HEARING = """
heard = []
end, told = os.pipe()
def hear(number):
    heard.append(signal.Signals(number).name)
    os.write(told, b".")
signals.prepare_for_a_closed_terminal()
signals.hear_signals(signals.INTERRUPTING_SIGNALS, hear)
for number in {ignored} + {others}:
    os.kill(os.getpid(), number)
    if number in {others}:
        os.read(end, 1)
print(heard)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", IGNORABLE)
def test_what_a_program_was_started_to_ignore_it_ignores(number):
    """SIGHUP by `nohup`, SIGINT by a script that starts it with `&`. The others end it."""
    others = [int(other) for other in IGNORABLE if other != number]
    (line,) = program(HEARING.format(ignored=[int(number)], others=others), [number])
    assert line == str([signal.Signals(other).name for other in others])


@pytest.mark.slow
def test_hang_up_interrupts_a_program_once():
    """The shell and the system may both send it, and what is done at the end is not to be interrupted again."""
    code = """
signals.prepare_for_a_closed_terminal()
try:
    os.kill(os.getpid(), signal.SIGHUP)
    signal.pause()
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGHUP)
    print("interrupted")
"""
    assert program(code) == ["interrupted"]


@pytest.mark.slow
def test_hang_up_that_is_ignored_interrupts_no_program():
    code = "signals.prepare_for_a_closed_terminal(); os.kill(os.getpid(), signal.SIGHUP); print('goes on')"
    assert program(code, [signal.SIGHUP]) == ["goes on"]


def test_stream_that_outlives_its_terminal():
    screen, terminal = pty.openpty()
    stream = signals.lasting(sys.__stderr__, terminal)
    print("one line", file=stream)
    assert os.read(screen, 100) == b"one line\r\n" and stream.isatty()
    os.close(screen)
    with pytest.raises(OSError) as info:
        os.write(terminal, b"to nobody")
    assert info.value.errno == errno.EIO
    for _ in range(2):
        print("to nobody", file=stream, flush=True)
    os.close(terminal)
    with pytest.raises(OSError):  # of a descriptor that is not there: other errors are told
        print("to nobody", file=stream)


def test_stream_to_a_file_stays_as_it_is(tmp_path):
    with open(tmp_path / "log", "w") as file:
        assert signals.lasting(file, file.fileno()) is file


@pytest.fixture
def interruption(monkeypatch):
    """An `Interruption` that has heard nothing yet, and the list of statuses with which it ended the process at once."""
    ends: list[int] = []
    monkeypatch.setattr(signals, "hear_signals", lambda *_: None)
    monkeypatch.setattr(signals, "exit_at_once", ends.append)
    return Interruption(), ends


def test_hang_up_is_never_impatience(interruption):
    """It is sent twice, or after Ctrl-C: the checkpoint is saved."""
    heard, ends = interruption
    heard.training_begins()
    for number in (signal.SIGHUP, signal.SIGHUP):
        heard._hear(number)
    assert heard.requested and ends == []
    heard._hear(signal.SIGINT)
    assert ends == [130]


def test_hang_up_with_nothing_to_save_ends_at_once(interruption):
    heard, ends = interruption
    heard._hear(signal.SIGHUP)
    assert ends == [130]


TASK = """
import json, os, signal, sys
from pathlib import Path

task = json.loads(os.environ["TF_CONFIG"])["task"]
name = Path(sys.argv[1], f"{task['type']}-{task['index']}")

def save(*_):
    name.with_suffix(".saved").touch()
    sys.exit(0)

if task["type"] == "worker":
    signal.signal(signal.SIGTERM, save)
open(name, "w").close()  # waits until the test reads
while True:
    signal.pause()
"""


@pytest.mark.slow
def test_closed_terminal_of_tasks_that_train_nothing(tmp_path):
    """The launcher was started to ignore Ctrl-C and SIGTERM; the tasks are asked by SIGTERM all the same, and can heed it."""
    script = tmp_path / "mine.py"
    script.write_text(TASK)
    pipes = [tmp_path / name for name in ("ps-0", "worker-0", "worker-1")]
    for pipe in pipes:
        os.mkfifo(pipe)
    command = [sys.executable, "-m", "common.run", f"--log_dir={tmp_path / 'run'}", str(script), str(tmp_path)]
    with on_a_terminal(command, ignores=[signal.SIGINT, signal.SIGTERM]) as (process, screen, close):
        for pipe in pipes:
            pipe.read_bytes()  # it has begun
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        close()
        assert process.wait(SECONDS) == 130
    assert {path.name for path in tmp_path.glob("*.saved")} == {"worker-0.saved", "worker-1.saved"}
    assert wait_until_gone(processes(tmp_path)) == []


def wait_for_training(process, screen, run_dir):
    """Reads the screen until the chief has written how fast it is."""
    shown, metrics = b"", run_dir / "metrics" / "worker-0.jsonl"
    while not (metrics.exists() and "samples_per_second" in metrics.read_text()):
        try:
            shown += os.read(screen, 100_000)
        except OSError:
            pytest.fail(f"the run ended with {process.wait()} before it trained: {shown.decode()[-2000:]}")


def saved_step(run_dir):
    return int(tf.train.load_variable(tf.train.latest_checkpoint(run_dir / "checkpoints"), "global_step"))


ENDLESS = [*runs.ENDLESS, "--checkpoint_secs=1000"]


@pytest.mark.cluster
@pytest.mark.parametrize("how", ["--launch", "--nolaunch"])
def test_closed_terminal_ends_a_run_as_ctrl_c_does(run_dir, how):
    """A cluster, and a process on its own: with a checkpoint, and whatever was written to the terminal meanwhile."""
    command = [sys.executable, str(HOGWILD), how, f"--run_dir={run_dir}", *ENDLESS]
    with on_a_terminal(command) as (process, screen, close):
        wait_for_training(process, screen, run_dir)
        close()
        assert process.wait(SECONDS) == 130
    assert processes(run_dir) == []
    assert saved_step(run_dir) > 0
    assert not any("Traceback" in path.read_text() for path in run_dir.glob("logs/*"))


@pytest.mark.cluster
@pytest.mark.parametrize(
    "how, terminal",
    [("--launch", {"controls": False}), ("--nolaunch", {"ignores": [signal.SIGINT, signal.SIGHUP]})],
    ids=["setsid", "nohup"],
)
def test_run_that_a_closed_terminal_is_not_to_end(run_dir, how, terminal):
    """An ignored Ctrl-C does not end it either. It trains on and writes nowhere, until it is asked to end in another way."""
    command = [sys.executable, str(HOGWILD), how, f"--run_dir={run_dir}", *ENDLESS]
    with on_a_terminal(command, **terminal) as (process, screen, close):
        wait_for_training(process, screen, run_dir)
        close()
        for number in terminal.get("ignores", []):
            process.send_signal(number)
        metrics = run_dir / "metrics" / "worker-0.jsonl"
        lines = metrics.read_text().count("\n")
        while metrics.read_text().count("\n") < lines + 10:  # some seconds, in which progress is shown many times
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 130
    assert saved_step(run_dir) > 0 and processes(run_dir) == []


@pytest.mark.cluster
def test_closed_terminal_of_tasks_that_were_started_by_hand(run_dir, monkeypatch):
    """All in one terminal: the ps waits until the chief has saved."""
    monkeypatch.setenv("TF_GRPC_REUSE_PORT", "true")  # lets the test hold the ports
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(launcher.reserved_port()).getsockname()[1] for _ in range(3)]
        _close_on_tasks(run_dir, *(f"localhost:{port}" for port in ports))
    assert Path(f"{run_dir}.statuses").read_text().split() == ["130"] * 3
    assert processes(run_dir) == [] and saved_step(run_dir) > 0


def _close_on_tasks(run_dir, ps, *workers):
    hosts = [f"--ps_hosts={ps}", f"--worker_hosts={','.join(workers)}"]
    tasks = [f"--job_name={job} --task_index={index}" for job, index in (("ps", 0), ("worker", 1), ("worker", 0))]
    alike = [sys.executable, str(HOGWILD), f"--run_dir={run_dir}", *hosts, *ENDLESS]
    script = "\n".join(f"{' '.join(alike)} {task} & pids[{i}]=$!" for i, task in enumerate(tasks))
    # As a shell with jobs it passes the signal on, which the system sends to the shell alone; and notes how they ended.
    noting = f'for pid in "${{pids[@]}}"; do wait $pid; echo $?; done >{run_dir}.statuses'
    script += f"""\ntrap 'kill -HUP "${{pids[@]}}"; {noting}; exit 0' HUP\nwait"""
    with on_a_terminal(["bash", "-c", script]) as (process, screen, close):
        wait_for_training(process, screen, run_dir)
        close()
        assert process.wait(SECONDS) == 0


CLOSED = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]
SAY_WHICH = """import os, common, sys
assert os.open("/", os.O_RDONLY) == 3  # no file has the number of a standard stream
streams = sys.stdin, sys.stdout, sys.stderr
assert [stream.fileno() for stream in streams] == [0, 1, 2] and all(os.get_inheritable(i) for i in range(3))
print("to nobody", flush=True)
print("to nobody", file=sys.stderr, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("closed", CLOSED)
def test_closed_standard_streams_are_open_to_nobody(closed, tmp_path):
    (tmp_path / "which.py").write_text(SAY_WHICH)
    command = f'exec 3>&- 4>&-; "$0" which.py {closed}'
    ended = subprocess.run(
        ["bash", "-c", command, sys.executable], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS
    )
    assert (ended.returncode, ended.stderr.replace("to nobody\n", "")) == (0, "")


@pytest.mark.cluster
def test_run_whose_standard_streams_are_closed(tmp_path):
    command = ["bash", "-c", f'"$0" "$@" {CLOSED[-1]}', sys.executable, str(HOGWILD), "--launch", "--steps=20", "--run_dir=run"]
    ended = subprocess.run(command, cwd=tmp_path, timeout=SECONDS)
    assert ended.returncode == 0 and (tmp_path / "run" / "result.json").exists()
