"""Real clusters, started and looked at as a user would: what their tests share."""

import contextlib
import fcntl
import functools
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
HOGWILD = ROOT / "HogWild" / "hogwild.py"
# Flags of a run that its test ends. The graph of ten rounds a call, which it would have otherwise, takes seconds to build: a
# long run builds them twice, the second time in a loop.
ENDLESS = ["--epochs=1e6", "--rounds_per_call=2"]
SECONDS = 240  # no run here takes a quarter of it; a run that hangs is to fail, not to stall the tests


@functools.cache
def may_mount():
    """Whether this system lets us have mounts of our own."""
    command = ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs none /mnt"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


needs_mounts = pytest.mark.skipif(not may_mount(), reason="this system allows no mounts of one's own")


def processes(folder, *words):
    """Process ids of all that have this folder, and these words, on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            arguments = path.read_bytes().decode(errors="replace").replace("\0", " ").split()  # a fork has set its title
            is_here = any(argument.endswith(str(folder)) or f"{folder}/" in argument for argument in arguments)
            if is_here and all(word in arguments for word in words):
                found.append(int(path.parent.name))
    return found


def send(run_dir, job, index, number):
    """Sends a signal to a task of a run."""
    (task,) = processes(run_dir, f"--job_name={job}", f"--task_index={index}")
    os.kill(task, number)


def listening_ports(pid="self"):
    """Returns the TCP ports on which anybody listens in the network of a process, by default of this one."""
    ports = set()
    for name in "tcp", "tcp6":
        for line in Path(f"/proc/{pid}/net", name).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


def wait_until_gone(pids, seconds=20):
    """Waits for processes that are not our children; returns those that are still there."""
    descriptors = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptors[os.pidfd_open(pid)] = pid
    while descriptors:
        ready, _, _ = select.select(list(descriptors), [], [], seconds)
        if not ready:
            break
        for descriptor in ready:
            os.close(descriptor)
            del descriptors[descriptor]
    return list(descriptors.values())


def start(run_dir, *arguments, script=HOGWILD, environ=None):
    """Starts the launcher (or, with --job_name in environ or arguments, one task)."""
    return subprocess.Popen(
        [sys.executable, str(script), *arguments, f"--run_dir={run_dir}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **(environ or {})},
    )


@contextlib.contextmanager
def on_a_terminal(command, controls=True, ignores=()):
    """Starts a command in a session of its own on a terminal; gives the process, the descriptor from which to read
    what it shows, and a function that closes the terminal.

    Args:
      controls: whether the terminal is the one of the session, which then gets SIGHUP.
      ignores: signals that the command is started to ignore.
    """
    screen, terminal = pty.openpty()

    def prepare():
        if controls:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        for number in ignores:
            signal.signal(number, signal.SIG_IGN)

    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True, preexec_fn=prepare
    )
    os.close(terminal)
    with contextlib.ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        closing = stack.enter_context(contextlib.ExitStack())
        closing.callback(os.close, screen)
        yield process, screen, closing.close


def finish(process, status=0):
    """Waits for the end and returns what was printed since the last read line."""
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == status, output
    return output


def run(run_dir, *arguments, status=0, script=HOGWILD):
    """A launched run from start to end: its output."""
    return finish(start(run_dir, "--launch", *arguments, script=script), status)


def read_until(process, is_it):
    """Reads the output line by line, up to and including the first that `is_it`."""
    for line in process.stdout:
        if is_it(line):
            return line
    pytest.fail(f"the run ended with {process.wait()} before it said so")


def wait_until(process, holds):
    """Returns when `holds()`, which is asked again and again as what it looks at are files; fails if the run ends before."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before"
        time.sleep(0.05)


def metrics_of(run_dir, worker):
    """Returns the lines of metrics of a worker that there are by now, as dicts."""
    with contextlib.suppress(FileNotFoundError):
        lines = (run_dir / "metrics" / f"worker-{worker}.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    return []


def updates_of(run_dir, worker):
    """Returns how many updates a worker has noted in its metrics by now."""
    return sum(sum(line.get("staleness", {}).values()) for line in metrics_of(run_dir, worker))


def is_training(line):
    """Whether a line of progress is from after the first rounds."""
    return line.startswith("step ") and "loss" in line and "samples/s" in line


def flip(path):
    """Changes one bit amid a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def delete(folder):
    """Deletes a folder with all that is in it at once, so that nobody makes a file in it again meanwhile."""
    shutil.rmtree(folder.rename(f"{folder}.deleted"))


def result_of(run_dir):
    return json.loads((run_dir / "result.json").read_text())


def updates_in_metrics(run_dir):
    lines = [json.loads(line) for path in run_dir.glob("metrics/*.jsonl") for line in path.read_text().splitlines()]
    return sum(sum(line["staleness"].values()) for line in lines if "staleness" in line)


def accuracy_of_saved_model(run_dir, data):
    import keras

    model = keras.models.load_model(run_dir / "model.keras")
    return float(np.mean(model.predict(data.x_test, verbose=0).argmax(axis=1) == data.y_test))
