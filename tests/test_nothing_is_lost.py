"""The cost when the chief dies, or a ps while the chief is away, and of a run that goes on with another: nothing, or the steps
after the last checkpoint."""

import os
import re
import signal
import time

import by_hand
import pytest
from runs import ENDLESS, ROOT, delete, finish, is_training, metrics_of, read_until, result_of, send, start, wait_until

from common import tf
from common.core.checkpoints import checkpoints_in, newest_good_checkpoint
from common.core.run_facts import RunFacts
from common.launch import launcher, task

pytestmark = pytest.mark.cluster

BACKUP = ["--num_workers=3", "--checkpoint_secs=1", "--max_restarts=5"]
LINEAR = ["--data=linear", "--model=linear"]  # whose graph is soon prepared


def step_in(line):
    """The global step that a line of progress shows."""
    return int(line.split()[1].replace(",", "")) if line.startswith("step ") else -1


def newest_step(run_dir):
    paths = checkpoints_in(str(run_dir / "checkpoints"))
    return int(paths[-1].rpartition("-")[2]) if paths else -1


def begins_of(run_dir):
    """With which parameters the chief has begun, each time: (what, global step)."""
    return [(line["parameters"], line["global_step"]) for line in metrics_of(run_dir, 0) if "parameters" in line]


def started_until_the_chief_waits(run_dir, *flags, **options):
    """Starts two workers on a small problem and stops worker 1; returns the run, once the chief says that it waits for it."""
    flags = *LINEAR, "--num_workers=2", "--delays=5,5", "--rounds_per_call=1", "--hang_secs=200", *flags
    process = start(run_dir, "--launch", *flags, **options)
    read_until(process, is_training)
    send(run_dir, "worker", 1, signal.SIGSTOP)
    read_until(process, lambda line: line.startswith("worker 0 has waited") and "for worker 1" in line)
    return process


def test_a_chief_that_was_away(run_dir):
    """It is stopped, and then a ps is killed: the others have saved, so the run goes on from a step after the stop.

    It is stopped again until the others have reached the last step, and then killed: the result is theirs. Logs are deleted.
    """
    flags = "--epochs=150", "--rounds_per_call=2", "--num_ps=2", "--hang_secs=200", "--delays=5,5,5"
    process = start(run_dir, "--launch", *flags, *BACKUP)
    read_until(process, is_training)
    delete(run_dir / "logs")
    send(run_dir, "worker", 0, signal.SIGSTOP)
    stopped = step_in(read_until(process, is_training))
    read_until(process, lambda line: newest_step(run_dir) > stopped)
    send(run_dir, "ps", 1, signal.SIGKILL)
    read_until(process, lambda line: line.startswith("ps 1 was killed"))
    send(run_dir, "worker", 0, signal.SIGKILL)
    wait_until(process, lambda: len(begins_of(run_dir)) == 2)
    assert (run_dir / "logs" / "worker-1.log").exists()  # though nobody started this task again

    read_until(process, is_training)
    send(run_dir, "worker", 0, signal.SIGSTOP)
    reached = step_in(read_until(process, lambda line: is_training(line) and step_in(line) >= 150 * 1438 // 32))
    send(run_dir, "worker", 0, signal.SIGKILL)
    finish(process)
    new, (restored, step), (found, last) = begins_of(run_dir)
    assert new == ("new", 0) and restored == f"restored from model.ckpt-{step}" and step > stopped
    assert found == "found on the ps" and last >= reached
    result = result_of(run_dir)
    assert result["global_steps"] >= reached and result["samples"] == 32 * result["global_steps"]
    assert newest_step(run_dir) == result["global_steps"]
    assert result["test_accuracy"] >= 0.95 and result["restarts"] == 3


def test_a_ps_that_dies_while_the_chief_waits_for_a_last_worker(run_dir):
    """The wait is one for ps 0 alone; the other ps dies, and the worker needs its parameters."""
    process = started_until_the_chief_waits(run_dir, "--num_ps=2", "--steps=1000")
    send(run_dir, "ps", 1, signal.SIGKILL)
    read_until(process, lambda line: line.startswith("ps 1 was killed by SIGKILL; restart 1 of 3"))
    send(run_dir, "worker", 1, signal.SIGCONT)
    finish(process)
    assert result_of(run_dir)["global_steps"] >= 1000


def test_a_ps_that_dies_after_the_last_second(run_dir):
    """The chief waits for a report of worker 1, and worker 1 leaves then: the chief alone trains the lost seconds again."""
    process = started_until_the_chief_waits(run_dir, *ENDLESS, "--seconds=3", "--checkpoint_secs=600")
    send(run_dir, "ps", 0, signal.SIGKILL)
    read_until(process, lambda line: line.startswith("ps 0 was killed"))
    send(run_dir, "worker", 1, signal.SIGTERM)
    send(run_dir, "worker", 1, signal.SIGCONT)
    finish(process)
    newest = newest_good_checkpoint(run_dir / "checkpoints")
    assert tf.train.load_variable(newest, "seconds") >= 3 and result_of(run_dir)["global_steps"] > 0


def test_a_ps_that_dies_while_the_chief_waits_at_a_barrier(run_dir):
    """The barrier is on ps 0; the other ps dies. Worker 1 waits for the chief to restore it, and the chief for worker 1."""
    script = ROOT / "Synchronous-SGD" / "synchronous_sgd.py"
    process = started_until_the_chief_waits(run_dir, "--num_ps=2", "--steps=1000", script=script)
    send(run_dir, "ps", 1, signal.SIGKILL)
    read_until(process, lambda line: line.startswith("ps 1 was killed"))
    send(run_dir, "worker", 1, signal.SIGCONT)
    output = finish(process)
    result = result_of(run_dir)
    assert result["global_steps"] == 1000 and result["restarts"] == 1, output


def test_an_outage_is_no_training(run_dir):
    """A ps is killed each time that training goes on, until the outages together are longer than --seconds: those are left."""
    seconds, outage, killed = 5, 0.0, None
    flags = *LINEAR, *ENDLESS, f"--seconds={seconds}", "--delays=5,5", "--checkpoint_secs=1", "--max_restarts=30"
    process = start(run_dir, "--launch", *flags)
    while outage <= seconds:
        read_until(process, is_training)
        outage += time.monotonic() - killed if killed else 0.0
        send(run_dir, "ps", 0, signal.SIGKILL)
        killed = time.monotonic()
        read_until(process, lambda line: line.startswith("ps 0 was killed"))
    output = finish(process)
    result = result_of(run_dir)
    reached = max(line["global_step"] for i in range(2) for line in metrics_of(run_dir, i))
    lost = reached - result["global_steps"]
    assert (f"{lost:,} updates were lost" in output) is (lost > 0)
    assert result["train_seconds"] > 0 and result["samples_per_second"] > 0
    assert tf.train.load_variable(checkpoints_in(str(run_dir / "checkpoints"))[-1], "seconds") >= seconds


def test_workers_that_come_back_after_the_last_second_train_no_more(run_dir):
    """The chief and another: they are stopped until worker 2 has ended and waits for them, and then killed."""
    flags = *LINEAR, *ENDLESS, "--seconds=10", "--delays=20,20,20", "--hang_secs=200"
    process = start(run_dir, "--launch", *flags, *BACKUP)
    wait_until(process, lambda: all(any("samples" in line for line in metrics_of(run_dir, i)) for i in range(3)))
    for index in 0, 1:
        send(run_dir, "worker", index, signal.SIGSTOP)
    read_until(process, lambda line: re.match(r"worker 2 has waited .*for worker 0\b", line))
    for index in 0, 1:
        send(run_dir, "worker", index, signal.SIGKILL)
    finish(process)
    result = result_of(run_dir)
    assert [samples == 0 for samples in result["samples_per_worker"]] == [True, True, False]
    assert result["restarts"] == 2 and result["samples"] == 32 * result["global_steps"]
    assert newest_step(run_dir) == result["global_steps"]


@pytest.mark.parametrize(
    ("script", "launched"),
    [
        ("HogWild/hogwild.py", True),
        ("Distributed-Setup/distributed_setup.py", True),
        ("Distributed-Setup/distributed_setup_supervisor.py", True),
        ("Non-Distributed-Setup/non_distributed_setup.py", False),
        ("Multiple-GPUs-Single-Machine/mirrored_strategy.py", False),
    ],
)
def test_runs_that_go_on_with_another_count_together(run_dir, tmp_path, parse, monkeypatch, script, launched):
    """Samples, epochs and seconds, with batches of another size, by each main loop.

    The first run tells its launcher of each call, which takes a worker for hanging that does the same for longer than ten times
    --hang_secs. The second finds a list of checkpoints that names files elsewhere: nothing reads or removes them. The third has
    had its seconds. The fourth finds damaged checkpoints, which TensorFlow itself keeps for one of these scripts.
    """
    told = {}

    class Task(task.Task):
        def hear(self, text):
            more = super().hear(text)
            if self.job == "worker" and self.progress:
                told[self.progress.what] = self.progress.number
            return more

    is_scheme, devices = script.startswith("HogWild"), 2 if script.startswith("Multiple") else 1
    alike = [*LINEAR, *["--num_workers=1"] * launched, *["--rounds_per_call=1"] * is_scheme]

    def train(*flags, status=0):
        if launched:
            process = start(run_dir, "--launch", *alike, *flags, script=ROOT / script)
        else:
            process = by_hand.start(ROOT / script, *alike, *flags, f"--run_dir={run_dir}")
        return finish(process, status), result_of(run_dir)

    first, epochs = (2000, 30) if launched else (100, 10)
    flags = f"--steps={first}", "--batch_size=10"
    if launched:
        settings = parse(*alike, *flags, f"--run_dir={run_dir}", epochs=1, batch_size=32, learning_rate=0.1)
        settings = settings.but(run=RunFacts("scheme", began=time.monotonic()))
        with monkeypatch.context() as patch:
            patch.setattr(launcher, "Task", Task)
            assert launcher.launch(ROOT / script, [*alike, *flags], settings) == 0
        assert told["writing the result"] - told["starting"] > 2000 and told["running a call"] > told["starting"]
        before = result_of(run_dir)
    else:
        _, before = train(*flags)
    assert (before["global_steps"], before["samples"]) == (first, first * 10 * devices)
    lines = len(metrics_of(run_dir, 0))

    (tmp_path / "other").mkdir()
    kinds = "index", "data-00000-of-00001"
    theirs = [tmp_path / "other" / f"model.ckpt-{step}.{kind}" for step in range(6) for kind in kinds]
    for path in theirs:
        path.write_text("precious")
    names = [str(tmp_path / "other" / name) for name in ("*", "model.ckpt-5")]
    listed = "".join(f'all_model_checkpoint_paths: "{name}"\n' for name in names)
    (run_dir / "checkpoints" / "checkpoint").write_text(f'model_checkpoint_path: "{names[-1]}"\n{listed}')
    _, after = train(f"--epochs={epochs}", "--batch_size=20", "--resume")  # of 800 samples
    assert [path.read_text() for path in theirs] == ["precious"] * 12
    assert after["samples"] == (first * 10 + (after["global_steps"] - first) * 20) * devices
    assert after["samples"] == pytest.approx(epochs * 800, abs=20 * devices)
    assert min(line["global_step"] for line in metrics_of(run_dir, 0)[lines:]) >= first  # it went on from its own checkpoint

    if is_scheme or script.startswith("Non-"):
        output, again = train("--epochs=100000", "--seconds=0.01", "--batch_size=20", "--resume")
        assert again["samples"] == after["samples"] and (not is_scheme or "nothing was left to do" in output)
    if script.startswith("Non-"):
        for path in (run_dir / "checkpoints").glob("*.data-*"):
            os.truncate(path, path.stat().st_size // 2)
        output, _ = train("--steps=9999", "--resume", status=2)
        line = f"non_distributed_setup.py: all checkpoints in {run_dir}/checkpoints are damaged, ckpt-"
        assert output.splitlines()[-1].startswith(line)
