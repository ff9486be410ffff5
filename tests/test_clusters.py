"""Real clusters. A row of `RUNS` is a scheme, its options, the faults that it meets, each while it trains, and its promises.

Below them are runs with several launchers, without one, or with files and faults of their own.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from runs import (
    ENDLESS,
    HOGWILD,
    ROOT,
    SECONDS,
    accuracy_of_saved_model,
    finish,
    flip,
    is_training,
    metrics_of,
    processes,
    read_until,
    result_of,
    run,
    send,
    start,
    updates_in_metrics,
    updates_of,
    wait_until,
    wait_until_gone,
)

from common import tf
from common.core.checkpoints import checkpoints_in
from common.data import datasets
from common.launch import launcher

pytestmark = pytest.mark.cluster

# Files of a user's own, as {files}/NAME in flags.
FILES = {
    "cnn.py": """
import keras, numpy as np
from keras import layers

def cnn():
    return keras.Sequential([
        keras.Input((8, 8, 1)), layers.Conv2D(8, 3, use_bias=False), layers.BatchNormalization(momentum=0.9), layers.ReLU(),
        layers.Flatten(), layers.Dropout(0.2), layers.Dense(3),
    ])

def large():
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(2000), layers.Dense(2500), layers.Dense(3)])

def load():
    '''Three classes: the bright row is above, in the middle, below.'''
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 800)
    x = rng.normal(0, 0.3, (800, 8, 8, 1))
    x[np.arange(800), 2 * y + 1] += 1
    return (x[:600], y[:600]), (x[600:], y[600:])
""",
    "late.py": """
import pathlib, sys, time
from common.data import digits

here = pathlib.Path(__file__).parent
is_late = "--task_index=1" in sys.argv and not (here / "came").exists()

def wait_until(holds):
    while is_late and not holds():
        time.sleep(0.05)
    if is_late:
        (here / "came").write_text(str(time.time()))
    return digits()

def after_a_wait():
    return wait_until(lambda: "worker 0 has waited" in (here / "run/logs/worker-0.log").read_text())

def after_step_100():
    return wait_until(lambda: any(int(p.stem.rpartition("-")[2]) >= 100 for p in here.glob("run/checkpoints/*.index")))
""",
    "mine.py": f"""
import sys

import numpy  # whose threads are older than tensorflow's

sys.path.append({str(HOGWILD.parent)!r})
from hogwild import hogwild

from common import Scheme, main

main(Scheme(hogwild, epochs=60, batch_size=32, learning_rate=0.1))
""",
    "own.py": "def show(step, metrics):\n    print('at', step, sorted(metrics))\n",
}
DIGITS = 1438  # samples for training
SLOW = "--num_workers=3 --delays=0,2,5 "  # three workers of different speed
# With delays a worker leaves the processors to those that come back.
LONG = " ".join(ENDLESS) + " --checkpoint_secs=1000 "


class Run:
    """A run of a row: its process, what it has printed, its results."""

    def __init__(self, row, folder, files):
        self.row, self.folder, self.files, self.output = row, folder, files, ""
        self.restarts = 0  # expected of the last process
        self.saved: tuple[int, int] = (0, 0)  # step and samples of the checkpoint with which the last process began

    def begin(self, flags):
        script = self.files / self.row.script if (self.files / self.row.script).exists() else ROOT / self.row.script
        self.flags = flags.format(files=self.files, later=self.saved[0] + self.row.steps).split()
        self.is_over, self.restarts = False, 0
        self.process = start(self.folder, "--launch", *self.flags, script=script)

    def end(self, status=0, *words):
        """Waits for the end. The last lines, and thus the output, have these words."""
        self.output, self.is_over = finish(self.process, status), True
        assert all(text in self.output for text in words) and processes(self.folder) == []

    def until(self, is_it):
        return read_until(self.process, is_it)

    @property
    def checkpoint(self):
        return tf.train.latest_checkpoint(self.folder / "checkpoints")

    @property
    def result(self):
        return result_of(self.folder)

    def read_checkpoint(self):
        """Notes what is saved, before the next run begins with it."""
        step, samples = (int(tf.train.load_variable(self.checkpoint, name)) for name in ("global_step", "samples"))
        self.saved, self.slots = (step, samples), slots_of(self)

    def begins(self):
        """With which parameters the chief has begun, each time: (name, global step)."""
        return [(line["parameters"], line["global_step"]) for line in metrics_of(self.folder, 0) if "parameters" in line]

    def updates(self):
        """How many updates each worker has contributed to."""
        return [updates_of(self.folder, i) for i in range(self.result["num_workers"])]


# --- Faults, each while the run trains --------------------------------------------------------------------------------------


def step_in(line):
    """The global step that a line of progress shows."""
    return int(line.split()[1].replace(",", ""))


def killed(job, index):
    """SIGKILL: the task comes back. A chief finds the parameters on the ps; when a ps has lost them, it restores them."""

    def fault(run):
        step, before = step_in(run.until(is_training)), len(run.begins())
        send(run.folder, job, index, signal.SIGKILL)
        run.restarts += 1
        line = run.until(lambda line: line.startswith(f"{job} {index} was killed"))
        assert "killed by SIGKILL; restart 1 of " in line
        if (job, index) == ("worker", 1):
            updates = updates_of(run.folder, 1)
            return wait_until(run.process, lambda: updates_of(run.folder, 1) > updates)
        wait_until(run.process, lambda: len(run.begins()) > before)
        name, at = run.begins()[before]
        if job == "ps":
            assert name == f"restored from model.ckpt-{at}"
        else:
            assert name == "found on the ps" and at >= step

    return fault


def killed_for_good(index):
    """SIGKILL of a worker that may not be restarted once more: the run ends."""

    def fault(run):
        wait_until(run.process, lambda: processes(run.folder, "--job_name=worker", f"--task_index={index}"))
        run.until(is_training)
        send(run.folder, "worker", index, signal.SIGKILL)
        run.end(1, f"worker {index} was killed by SIGKILL after 1 restarts", f"worker-{index}.log")

    return fault


def interrupted(run):
    """Ctrl-C: the newest checkpoint has the last step, and the model is saved."""
    updates = updates_of(run.folder, 0)
    run.until(is_training)
    wait_until(run.process, lambda: updates_of(run.folder, 0) > updates)  # that line may be older than the last fault
    run.process.send_signal(signal.SIGINT)
    run.end(130)
    step = int(run.checkpoint.rpartition("-")[2])
    assert f"a checkpoint is saved, of step {step:,}, and so is the model: --resume --run_dir={run.folder}" in run.output
    assert (run.folder / "model.keras").stat().st_size > 0


def chief_asked_to_end(run):
    """SIGTERM to worker 0, which saves the checkpoints: the run stops as by Ctrl-C."""
    run.until(is_training)
    send(run.folder, "worker", 0, signal.SIGTERM)
    run.until(lambda line: line.startswith("worker 0 was asked to end (SIGTERM)"))
    run.end(130, "stopped; a checkpoint is saved")
    assert int(run.checkpoint.rpartition("-")[2]) >= metrics_of(run.folder, 0)[-1]["global_step"] > 0


def damaged(run):
    """Of the newest checkpoint a bit: the run goes on from the one before."""
    older, newest = checkpoints_in(str(run.folder / "checkpoints"))[-2:]
    flip(run.folder / "checkpoints" / f"{os.path.basename(newest)}.data-00000-of-00001")
    run.damaged, run.older = newest, older


def paused(run):
    """SIGSTOP of worker 1, for which the others wait, and SIGCONT: the launcher shows both, and the log has it."""
    run.until(is_training)
    log, over = run.folder / "logs" / "worker-0.log", "worker 0 no longer waits for worker 1"
    before = log.read_text().count(over)  # of its start
    send(run.folder, "worker", 1, signal.SIGSTOP)
    run.until(lambda line: re.match(r"worker 0 has waited \d+ s, since [\d:]+, for worker 1 at 127.0.0.1:", line))
    send(run.folder, "worker", 1, signal.SIGCONT)
    run.until(lambda line: line.startswith(f"{over} at 127.0.0.1:"))
    assert log.read_text().count(over) > before  # on a busy machine it may have been waited for without that, too


# --- Promises ---------------------------------------------------------------------------------------------------------------


def learned(run, accuracy=0.95):
    assert run.result["test_accuracy"] >= accuracy


def learned_most(run):
    learned(run, 0.9)


def counted(run):
    """No update is lost or counted twice; each is of the gradients of all workers where they train together."""
    result = run.result
    samples = result["batch_size"] * result["window"]
    gradients = result["num_workers"] if run.row.pace == "together" else 1
    assert updates_in_metrics(run.folder) == gradients * result["global_steps"] == result["samples"] / samples
    assert result["gradients_dropped"] == 0
    if run.row.pace == "together":
        assert run.updates() == [result["global_steps"]] * gradients


def counted_all_runs(run):
    """Also the updates of a worker before it was killed, and of the run before this."""
    result = run.result
    assert result["samples"] == result["global_steps"] * result["batch_size"] * result["window"]


def counted_of_each(run):
    """Those of three workers, and then of two, to the very step at which the run is to end; and of what a death has dropped."""
    step, samples = run.saved
    assert samples == step * 3 * 32
    last, dropped = step + run.row.steps, 32 * run.result["gradients_dropped"]
    assert (run.result["global_steps"], run.result["samples"]) == (last, samples + run.row.steps * 2 * 32 + dropped)


def resumed(run):
    """The run goes on with the parameters of the checkpoint; one that is damaged is passed over, and a line says so."""
    path = getattr(run, "older", None) or f"model.ckpt-{run.saved[0]}"
    assert run.begins()[-1][0] == f"restored from {os.path.basename(path)}" and run.saved[0] > 0
    lines = [line for line in run.output.splitlines() if "damaged" in line]
    assert len(lines) == hasattr(run, "older")
    assert all(line.startswith(f"the checkpoint {run.damaged} is damaged: ") for line in lines)
    assert all(line.endswith("; looking for an older one") for line in lines)


def ended_at(last):
    """The last call of a worker is not longer than ten rounds."""

    def promise(run):
        assert last <= run.result["global_steps"] < last + 10 * run.result["num_workers"]

    return promise


def ended_later(run):
    ended_at(run.saved[0] + run.row.steps)(run)


def saved_a_model(run):
    """It is as accurate as the result says."""
    path = next((flag.partition("=")[2] for flag in run.flags if flag.startswith("--data=")), "digits")
    spec = "digits" if "late.py" in path else path
    assert accuracy_of_saved_model(run.folder, datasets.load(spec)) == pytest.approx(run.result["test_accuracy"])


def wrote_all_files(run):
    for name in ("curve.png", "model.keras"):
        assert (run.folder / name).stat().st_size > 0 and str(run.folder / name) in run.output
    for name in ("logs/ps-0.log", "logs/worker-0.log", "logs/worker-1.log", "checkpoints/checkpoint"):
        assert (run.folder / name).exists()
    assert list(run.folder.glob("tensorboard/worker-*/events*"))


def told(run):
    """In result.json."""
    result = run.result
    assert result["samples_per_second"] > 0 and 0 < result["train_seconds"] < result["wall_seconds"]
    assert (result["scheme"], result["num_ps"], result["num_workers"]) == ("HogWild", 1, 2)
    assert result["flags_of_scheme"] == {"overlap": False}  # none of TensorFlow's either


def began_together(run):
    """However late one is, none trains before it has come."""
    trained = [line["time"] for line in metrics_of(run.folder, 0) if "samples" in line]
    assert trained[0] > float((run.files / "came").read_text())


def stopped_early(run):
    """By the first two evaluations in turn that are no better than the best; all workers end together; a measure reaches a
    function, and the line that this prints is shown. How much is learned by then depends on how often this machine evaluates.
    """
    losses = {line["global_step"]: line["validation_loss"] for line in metrics_of(run.folder, 0) if "validation_loss" in line}
    best, *after = losses.values()
    while len(after) > 1 and min(after[:2]) < best:
        best, after = min(best, after[0]), after[1:]
    assert f"no smaller validation loss than {best:.4f} in 2 evaluations: training ends" in run.output
    assert run.result["validation_loss"] > 0
    assert np.ptp(run.updates()) <= 1  # of the last one some may have come to the ps
    names = "['test_accuracy', 'test_loss', 'validation_accuracy', 'validation_loss']"
    assert f"at {run.result['global_steps']} {names}" in run.output


def dropped_late_gradients(run):
    """On two ps; a gradient that comes late is dropped, not applied late, and the last step is not overshot.

    The straggler is the chief, the first to begin: the others can't end the run before it is there.
    """
    updates = run.updates()
    assert run.result["global_steps"] == 300
    assert sum(updates) == 2 * 300  # the first two of three
    assert updates[0] < min(updates[1:]) and run.result["gradients_dropped"] > 0


def dropped_stale_gradients(run):
    result = run.result
    assert result["staleness_max"] < 10
    gradients = result["samples"] / result["batch_size"] / result["window"] - result["gradients_dropped"]
    assert updates_in_metrics(run.folder) == result["global_steps"] == gradients


def warmed_up(run):
    """The first 500 updates are worker 0's alone."""
    lines = [line for line in metrics_of(run.folder, 0) if "staleness" in line and line["global_step"] <= 500]
    assert lines and all(list(line["staleness"]) == ["0"] for line in lines)
    assert 0 < run.updates()[1] <= run.result["global_steps"] - 500


def waited_for_nobody(run):
    """Worker 1 comes when worker 0 has done all, and the summary says so; or a warm start never lets it begin."""
    if not any("warm" in flag for flag in run.flags):
        assert "1 of 2 workers have not started within --start_secs=0.1: the others begin" in run.output
    assert "some workers trained on far fewer samples" in run.output
    assert run.result["samples_per_worker"][1] == 0 and run.result["staleness_max"] == 0
    assert not any("staleness" in line for line in metrics_of(run.folder, 1))


def kept_adagrad(run):
    """The sums of squares on the ps go on from those of the first run."""
    for before, after in zip(run.slots, slots_of(run), strict=True):
        assert (after >= before).all() and (after > before).any()
    assert len(run.slots) == 1


def slots_of(run):
    """The sums of squares that Adagrad keeps on the ps, from the newest checkpoint; nothing of another optimizer."""
    names = [name for name, _ in tf.train.list_variables(run.checkpoint) if name.endswith("/Adagrad")]
    return [tf.train.load_variable(run.checkpoint, name) for name in names]


def wrote_large_checkpoints(run):
    """They hold 5 million float32. The graph in the files of events holds no values."""
    assert sum(path.stat().st_size for path in run.folder.glob("checkpoints/model.ckpt-0.data-*")) > 20e6
    assert max(path.stat().st_size for path in run.folder.rglob("events*")) < 2.5e6


@dataclass
class Row:
    """A run: a scheme, or the path of its script; its flags; promises; faults, one after the other; flags to go on with."""

    scheme: str
    flags: str = ""
    promises: tuple[Callable, ...] = (learned, counted)
    faults: tuple[Callable, ...] = ()
    resume: str = ""
    pace: str = "own"  # or "together", where an update is of all workers
    steps: int = 2000  # of the run that goes on, {later} in its flags

    @property
    def script(self):
        """The path of the script, which a folder's run.sh names."""
        if self.scheme.endswith(".py"):
            return self.scheme
        last = (ROOT / self.scheme / "run.sh").read_text().splitlines()[-1]
        name = re.match(r'exec "\$PYTHON" "\$here/(.*)\.py" --launch ', last)
        assert name
        return f"{self.scheme}/{name[1].replace('$by', 'synchronous_sgd')}.py"

    def __str__(self):
        more = [fault.__qualname__.partition(".")[0] for fault in self.faults]
        more = more or [flag.partition("=")[0].strip("-") for flag in self.flags.removeprefix(FEW).split()[:1]]
        return "-".join([self.scheme.rpartition("/")[2], *more])


ALL_REDUCE = "Synchronous-SGD/all_reduce.py"
CNN = "--model={files}/cnn.py:cnn --data={files}/cnn.py:load "
MOMENTUM = "--local_optimizer=momentum --local_learning_rate=0.01 "
OWN = "DOWNPOUR-Easy AEAMSGD Asynchronous-DiLoCo".split()
TOGETHER = "Synchronous-SGD-different-learning-rates SAGN Local-SGD SparseLoCo Write-Your-Own-Scheme".split()

# A smaller graph is built sooner. The first row has the defaults: 10 rounds, and 60 epochs.
FEW = "--rounds_per_call=2 --epochs=30 "
RUNS = [
    # Each scheme without a fault, if it has no row with an option or a fault, and no round in test_chaos.py
    # 60 epochs of 1,438 samples in batches of 32: 2,697 updates
    Row("HogWild", "", (learned, counted, told, saved_a_model, wrote_all_files, ended_at(2697))),
    *(Row(scheme, FEW) for scheme in OWN),
    Row("Ringmaster-ASGD", FEW, (learned, dropped_stale_gradients)),
    Row("Semi-Synchronous-SGD", FEW + "--data={files}/late.py:after_a_wait", (learned, counted, began_together)),
    *(Row(scheme, FEW, pace="together") for scheme in TOGETHER),
    Row(
        ALL_REDUCE,
        "--validation=0.2 --patience=2 --epochs=1e6 --learning_rate=0.5 --evaluation_secs=0.1 --callback={files}/own.py:show",
        (stopped_early, counted),
        pace="together",
    ),
    Row("Synchronous-SGD/sync_replicas_optimizer.py", "--epochs=40", (learned,)),  # whose workers do not contribute alike
    # Options
    Row(
        "Synchronous-SGD",
        "--backup_workers=1 --num_workers=3 --num_ps=2 --delays=50,0,0 --rounds_per_call=1 --steps=300",
        (dropped_late_gradients,),
    ),
    Row(
        "DC-ASGD",
        "--adaptive --num_ps=2 --num_workers=3 --warm_start_steps=500 --steps=2500",
        (learned, counted, warmed_up, ended_at(2500)),
    ),
    Row("DOWNPOUR", "--warm_start_steps=1000000 --steps=100", (waited_for_nobody,)),
    Row(
        "HogWild",
        "--data={files}/late.py:after_step_100 --steps=100 --start_secs=0.1 --checkpoint_secs=0.5",
        (waited_for_nobody,),
    ),
    Row(
        "HogWild",
        "--model={files}/cnn.py:large --data={files}/cnn.py:load --steps=4 --num_ps=2 --num_workers=1 --learning_rate=0.001",
        (wrote_large_checkpoints, counted),
    ),
    # Faults
    Row(
        "mine.py",
        LONG + "--delays=5,5 --checkpoint_secs=1 --data={files}/late.py:after_a_wait",
        (began_together, resumed, learned, saved_a_model, counted_all_runs, ended_later),
        (killed("worker", 0), killed("ps", 0), interrupted),
        # With delays no worker makes most of the updates, with the samples of its shard.
        "--num_ps=2 --num_workers=3 --delays=2,2,2 --steps={later}",
    ),
    Row(
        "HogWild",
        LONG + "--overlap --num_ps=2",
        (resumed, learned, counted_all_runs, ended_later),
        (interrupted,),
        "--overlap --steps={later}",
    ),
    Row(
        # With the default, ten times as much, a worker that begins when the other has nearly ended does harm: see README.md
        "DOWNPOUR",
        LONG + "--delays=5,5 --n_push=4 --n_fetch=6 --learning_rate=0.01",
        (resumed, learned, kept_adagrad, counted_all_runs),
        (chief_asked_to_end,),
        "--num_ps=2 --num_workers=3 --n_push=4 --n_fetch=6 --learning_rate=0.01 --steps={later}",
    ),
    Row(
        "Dynamic-SGD",
        LONG + "--delays=5,5,5 --checkpoint_secs=1 --num_ps=2 --num_workers=3 --max_restarts=1 " + MOMENTUM,
        (resumed, learned, counted_all_runs),
        (killed("worker", 1), killed_for_good(1)),
        MOMENTUM + "--steps={later}",
    ),
    Row(
        "AEASGD",
        LONG + "--delays=5,5,5 --checkpoint_secs=0.5 --num_ps=2 --num_workers=3 " + CNN,
        (resumed, learned_most, saved_a_model, counted_all_runs),
        (killed("worker", 1), interrupted, damaged),
        CNN + "--num_workers=2 --steps={later}",
        steps=200,
    ),
    Row(
        "Synchronous-SGD",
        LONG + SLOW + "--checkpoint_secs=1",
        (resumed, learned, counted_of_each),
        (paused, killed("worker", 0), killed("ps", 0), interrupted),
        "--num_ps=2 --steps={later}",
        steps=1000,
    ),
    Row(
        ALL_REDUCE,
        LONG + SLOW,
        (resumed, learned, counted_of_each),
        (killed("worker", 1), interrupted),
        "--num_ps=2 --steps={later}",
        steps=1000,
    ),
    Row("Streaming-DiLoCo", SLOW + "--steps=400 --checkpoint_secs=1", (learned, ended_at(400)), (killed("worker", 1),)),
]


@pytest.mark.parametrize("row", RUNS, ids=str)
def test_run_keeps_its_promises(run_dir, tmp_path, row):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    run = Run(row, run_dir, tmp_path)
    run.begin(row.flags)
    for fault in row.faults:
        fault(run)
    if not run.is_over:
        run.end()
    if row.resume:
        run.read_checkpoint()
        run.begin(f"{row.resume} --resume")
        run.end()
    for promise in row.promises:
        promise(run)
    assert run.result["restarts"] == run.restarts


# --- Several runs, and others ------------------------------------------------------------------------------------------------


WIDE = """import keras
def build():
    layers = keras.layers.Flatten(), keras.layers.Dense(4300, activation="relu"), keras.layers.Dense(10)
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])
"""


@pytest.mark.parametrize(("is_large", "steps"), [(False, 200), (True, 20)])
def test_through_the_ps_and_by_all_reduce_come_to_the_same(run_dir, tmp_path, is_large, steps):
    """With workers of different speed, each of which contributes once to each update. Both runs train at the same time, and the
    folder of one is in that of the other. The gradients of a large model go through queues of the workers."""
    import keras

    (tmp_path / "wide.py").write_text(WIDE)
    flags = [*SLOW.split(), f"--steps={steps}", *([f"--model={tmp_path}/wide.py:build"] if is_large else [])]
    folders, weights = (run_dir, run_dir / "another"), []
    scripts = ROOT / "Synchronous-SGD" / "synchronous_sgd.py", ROOT / ALL_REDUCE
    both = [start(at, "--launch", *flags, script=script) for at, script in zip(folders, scripts, strict=True)]
    for process in both:
        finish(process)
    for folder in folders:
        result = result_of(folder)
        assert (result["global_steps"], result["samples"], result["gradients_dropped"]) == (steps, 3 * steps * 32, 0)
        assert [updates_of(folder, i) for i in range(3)] == [steps] * 3
        model = keras.models.load_model(folder / "model.keras")
        weights.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    assert np.abs(weights[0] - weights[1]).max() < 1e-5 * np.abs(weights[0]).max()


@pytest.mark.parametrize(
    ("flags", "accuracy", "steps"), [([], 0.95, 2697), (["--locked", "--num_threads=3", "--steps=300"], 0.8, 300)]
)
def test_threads_that_share_memory_learn_the_digits(run_dir, flags, accuracy, steps):
    finish(start(run_dir, *flags, script=HOGWILD.with_name("hogwild_threads.py")))
    result = result_of(run_dir)
    assert result["test_accuracy"] >= accuracy
    assert updates_in_metrics(run_dir) == result["samples"] / 32 >= steps
    assert (run_dir / "model.keras").stat().st_size > 0


def test_a_process_on_its_own(run_dir):
    output = finish(start(run_dir))
    result = result_of(run_dir)
    assert result["test_accuracy"] >= 0.95
    assert (result["num_ps"], result["num_workers"], result["staleness_max"]) == (0, 1, 0)
    assert result["global_steps"] == 2697 and result["samples"] == 2697 * 32
    assert "I0000" not in output and "WARNING" not in output


def test_tasks_that_are_started_by_hand(run_dir):
    """Each is told in another way who it is, and says for whom it waits: for a ps that was not started, then for the chief, and
    the chief for a worker that has not come. All end by themselves, also the ps."""
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(launcher.reserved_port()).getsockname()[1] for _ in range(4)]
        ps, *workers = (f"127.0.0.1:{port}" for port in ports)
        flags = f"--ps_hosts={ps}", f"--worker_hosts={','.join(workers)}"
        variables = {"JOB_NAME": "ps", "TASK_INDEX": "0", "PS_HOSTS": ps, "WORKER_HOSTS": ",".join(workers)}
        cluster = {"cluster": {"ps": [ps], "worker": workers}, "task": {"type": "worker", "index": 1}}

        def begin(*flags, **variables):
            environ = {"TF_GRPC_REUSE_PORT": "true"} | variables  # lets the test hold the ports
            return start(run_dir, "--start_secs=300", "--epochs=20", *flags, environ=environ)

        one = begin(TF_CONFIG=json.dumps(cluster))
        read_until(one, lambda line: re.match(rf"worker 1 has waited \d+ s, since [\d:]+, for ps 0 at {ps} \(Connection", line))
        tasks = [begin(**variables)]
        read_until(one, lambda line: re.match(rf"worker 1 has waited .* for worker 0 at {workers[0]}$", line))
        chief = begin(*flags, "--job_name=worker", "--task_index=0")
        read_until(chief, lambda line: re.match(rf"worker 0 has waited .* for worker 2 at {workers[2]}$", line))
        tasks += [begin(*flags, "--job_name=worker", "--task_index=2")]
        output = finish(chief)
        assert f"worker 0 no longer waits for worker 2 at {workers[2]}: it took " in output
        assert f"worker 1 no longer waits for worker 0 at {workers[0]}: it took " in finish(one)
        for task in tasks:
            finish(task)
    assert result_of(run_dir)["test_accuracy"] >= 0.9
    assert str(run_dir / "model.keras") in output


def test_port_that_is_taken(run_dir):
    """The ps and the worker each print a line for the user who started them by hand."""
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as other:
        ports = [taken.getsockname()[1] for taken in (one, other)]
        hosts = [f"--{job}_hosts=localhost:{port}" for job, port in zip(("ps", "worker"), ports, strict=True)]
        tasks = [start(run_dir, f"--job_name={job}", "--task_index=0", *hosts) for job in ("ps", "worker")]
        outputs = [finish(task, status=2) for task in tasks]
    for job, output in zip(("ps", "worker"), outputs, strict=True):
        assert f"hogwild.py: {job} 0 cannot listen at localhost:" in output and "Traceback" not in output


TWO_OUTPUTS = """
import keras
import numpy as np
from keras import layers

def build(units=16):
    image, hint = keras.Input((8, 8, 1), name="image"), keras.Input((1,), name="hint")
    x = layers.Dense(units, activation="relu")(layers.Concatenate()([layers.Flatten()(layers.Rescaling(0.005)(image)), hint]))
    row, size = layers.Dense(3, activation="softmax", name="row")(x), layers.Dense(1, name="size", kernel_regularizer="l2")(x)
    model = keras.Model({"image": image, "hint": hint}, {"row": row, "size": size})
    loss = {"row": "sparse_categorical_crossentropy", "size": "mse"}
    metrics = {"row": ["accuracy"], "size": ["mae"]}
    model.compile("adam", loss, loss_weights={"row": 1.0, "size": 0.1}, weighted_metrics=metrics)
    return model

def wider():
    return build(units=17)

def load():
    rng = np.random.default_rng(0)
    def part(n):
        row, image, size = rng.integers(0, 3, n), rng.integers(0, 100, (n, 8, 8, 1)).astype(np.uint8), rng.random(n)
        image[np.arange(n), 2 * row + 1] += 100
        weights = {"row": rng.random(n), "size": np.ones(n)}
        return {"image": image, "hint": size[:, None]}, {"row": row, "size": 2 * size}, weights
    return part(1000), part(300)
"""


def test_own_loss_and_metrics_of_two_outputs(run_dir, tmp_path):
    """The run says what it minimizes; the saved model is compiled, and `evaluate` gives what the run has reported.

    Another model and another scheme are refused with one line, and do no harm to the checkpoints.
    """
    import keras

    (tmp_path / "m.py").write_text(TWO_OUTPUTS)
    spec = f"{tmp_path}/m.py"
    arguments = f"--data={spec}:load", "--num_ps=2", "--learning_rate=0.05"
    output = run(run_dir, *arguments, f"--model={spec}:build", "--epochs=20")
    assert (
        "minimizes sparse categorical crossentropy of row, mse of size + the losses of its layers, by SGD on the ps, SGD on "
        "the workers (the model's own Adam is not used); 1,000 samples, 500 for each of 2 workers, from "
        "arrays of 84.0 kB in memory\n"
    ) in output
    result = result_of(run_dir)
    assert result["test_row_accuracy"] >= 0.9 and f"test row accuracy {result['test_row_accuracy']:.3f}" in output
    x, y, weights = datasets.load(f"{spec}:load").test
    model = keras.models.load_model(run_dir / "model.keras")
    expected = model.evaluate(x, y, sample_weight=weights, batch_size=500, verbose=0, return_dict=True)
    found = {name.removeprefix("test_"): value for name, value in result.items() if name.startswith("test_")}
    assert found == pytest.approx(expected, rel=1e-4) and len(found) == 5
    assert sum(result["samples_per_worker"]) == result["samples"] and len(result["samples_per_worker"]) == 2

    before = {path: path.read_bytes() for path in run_dir.glob("checkpoints/model*")}
    output = run(run_dir, *arguments, f"--model={spec}:wider", "--epochs=30", "--resume", status=2)
    assert "--resume: the model has changed: it had kernel [65, 16], and now has kernel [65, 17]" in output
    output = run(run_dir, *arguments, f"--model={spec}:build", "--resume", status=2, script=ROOT / "DOWNPOUR" / "downpour.py")
    last = output.splitlines()[-1]
    assert last.startswith("downpour.py: the checkpoint in") and "'parameters/Adagrad'" in last
    assert {path: path.read_bytes() for path in run_dir.glob("checkpoints/model*")} == before


def test_ctrl_c_while_starting(run_dir):
    process = start(run_dir, "--launch")
    read_until(process, lambda line: "--num_ps=1" in line)
    process.send_signal(signal.SIGINT)
    finish(process, status=130)
    assert processes(run_dir) == []


HANGS = """
import os, pathlib, time
import numpy as np

def load():
    "Sleeps for ever in the first life of worker 1, and ends the program in its second."
    if os.environ["LAUNCHER_KEY"] == "worker 1":
        lives = pathlib.Path(__file__).with_name("lives")
        with open(lives, "a") as file:
            file.write("x")
        if lives.stat().st_size == 1:
            time.sleep(1e6)
        if lives.stat().st_size == 2:
            os._exit(0)
    x = np.linspace(-1, 1, 100, dtype=np.float32)[:, None]
    return (x, (x[:, 0] > 0).astype(int)), (x, (x[:, 0] > 0).astype(int))
"""


def test_tasks_that_get_nothing_done(run_dir, tmp_path):
    """Worker 1 hangs while it starts, ends too early, trains, and is stopped, while the other trains on; then the process that
    starts the tasks is stopped, which ends the run."""
    (tmp_path / "d.py").write_text(HANGS)
    flags = f"--data={tmp_path}/d.py:load", "--model=linear", "--hang_secs=5", "--delays=5,5"
    process = start(run_dir, "--launch", *ENDLESS, *flags)
    for pattern in (
        r"worker 1 made no progress for \d+ s while loading the data and was killed; restart 1 of 3\n",
        r"worker 1 ended with exit status 0 before its work was done; restart 2 of 3 in 1 s\n",
    ):
        assert re.fullmatch(pattern, read_until(process, lambda line: "restart " in line))
    wait_until(process, lambda: updates_of(run_dir, 1))
    send(run_dir, "worker", 1, signal.SIGSTOP)
    stopped = time.time()
    said = read_until(process, lambda line: "restart " in line)
    noticed = time.time()
    assert re.match(r"worker 1 gave no sign of life for 5 s while [a-z ]+ and was killed; restart 3 of 3", said)
    meanwhile = [m["samples"] for m in metrics_of(run_dir, 0) if "samples" in m and stopped + 1 < m["time"] < noticed]
    assert len(meanwhile) >= 2 and meanwhile[-1] > meanwhile[0]

    (pid,) = processes(run_dir, "--job_name=ps")
    starter = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    os.kill(starter, signal.SIGSTOP)
    last = finish(process, 1).splitlines()[-1]
    assert (
        last == "hogwild.py: the process that starts the tasks gave no sign of life for 10 s and was killed; --resume goes on"
    )
    assert wait_until_gone(processes(run_dir)) == []


def test_the_hook_in_a_program_of_ones_own(tmp_path):
    """Three workers of different speed: the bound holds and is reached; one that has ended, or died, never holds the others."""
    staleness, steps = 3, [400, 100, 60]
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(launcher.reserved_port()).getsockname()[1] for _ in range(4)]
        ps, *workers = (f"localhost:{port}" for port in ports)

        def begin(job, index, steps=0, milliseconds=0):
            log = tmp_path / f"{job}-{index}"
            arguments = [job, index, ps, ",".join(workers), log, staleness, steps, milliseconds]
            command = [sys.executable, str(ROOT / "tests" / "semi_sync_task.py"), *map(str, arguments)]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.kill)
            return process, log

        server, _ = begin("ps", 0)
        running = [begin("worker", i, steps[i], milliseconds) for i, milliseconds in enumerate([0, 10, 30])]
        slowest, log = running[2]
        while not (log.exists() and len(log.read_text().splitlines()) >= 20):
            assert slowest.poll() is None
            with contextlib.suppress(subprocess.TimeoutExpired):
                slowest.wait(0.1)
        slowest.kill()
        slowest.wait()
        running[2] = begin("worker", 2, steps[2], 30)
        for process, _ in running:
            assert process.wait(SECONDS) == 0
        assert server.wait(SECONDS) == 0
        ahead = [[int(line) for line in log.read_text().splitlines()] for _, log in running]
    assert [len(of_worker) >= n for of_worker, n in zip(ahead, steps, strict=True)] == [True] * 3
    assert max(ahead[0]) == staleness and max(max(of_worker) for of_worker in ahead) == staleness
    assert np.mean(ahead[2]) < np.mean(ahead[0])  # the slowest, whoever began first
