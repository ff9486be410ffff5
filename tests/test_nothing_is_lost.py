"""The cost when the chief dies, or a ps while the chief is away: nothing, or the steps after the last checkpoint."""

import json
import os
import re
import shutil
import signal

import pytest
from runs import ROOT, finish, is_training, processes, read_until, result_of, run, start

from common import tf
from common.checkpoints import checkpoints_in

pytestmark = pytest.mark.cluster

BACKUP = ["--num_workers=3", "--checkpoint_secs=1", "--max_restarts=5"]


def kill(run_dir, job, index, number=signal.SIGKILL):
    (victim,) = processes(run_dir, f"--job_name={job}", f"--task_index={index}")
    os.kill(victim, number)


def step_in(line):
    """The global step that a line of progress shows."""
    return int(line.split()[1].replace(",", "")) if line.startswith("step ") else -1


def newest_step(run_dir):
    paths = checkpoints_in(str(run_dir / "checkpoints"))
    return int(paths[-1].rpartition("-")[2]) if paths else -1


def begins_of(run_dir):
    """With which parameters the chief has begun, each time: (what, global step)."""
    lines = map(json.loads, (run_dir / "metrics" / "worker-0.jsonl").read_text().splitlines())
    return [(line["parameters"], line["global_step"]) for line in lines if "parameters" in line]


def test_a_chief_that_comes_back_goes_on_with_what_the_others_have_trained(run_dir):
    """It is stopped until the others have reached the last step, and then killed: the result is theirs."""
    process = start(run_dir, "--launch", "--epochs=200", "--hang_secs=200", *BACKUP)
    read_until(process, is_training)
    kill(run_dir, "worker", 0, signal.SIGSTOP)
    reached = step_in(read_until(process, lambda line: is_training(line) and step_in(line) >= 200 * 1438 // 32))
    kill(run_dir, "worker", 0)
    finish(process)
    new, (what, step) = begins_of(run_dir)
    assert (new, what) == (("new", 0), "found on the ps") and step >= reached
    result = result_of(run_dir)
    assert result["global_steps"] >= reached and result["samples"] == 32 * result["global_steps"]
    assert newest_step(run_dir) == result["global_steps"]
    assert result["test_accuracy"] >= 0.95


def test_others_save_while_the_chief_is_away(run_dir):
    """The chief is stopped, and then a ps is killed: what is restored is of after the stop. Its logs are deleted, too."""
    process = start(run_dir, "--launch", "--epochs=400", "--num_ps=2", "--hang_secs=200", *BACKUP)
    read_until(process, is_training)
    shutil.rmtree(run_dir / "logs")
    kill(run_dir, "worker", 0, signal.SIGSTOP)
    stopped = step_in(read_until(process, is_training))
    read_until(process, lambda line: newest_step(run_dir) > stopped)
    kill(run_dir, "ps", 1)
    read_until(process, lambda line: line.startswith("ps 1 was killed"))
    kill(run_dir, "worker", 0)
    finish(process)
    assert (run_dir / "logs" / "worker-1.log").exists()  # though nobody started this task again
    (_, first), (what, step) = begins_of(run_dir)
    assert first == 0 and re.fullmatch(rf"restored from model.ckpt-{step}", what) and step > stopped
    assert result_of(run_dir)["test_accuracy"] >= 0.95


def test_a_run_that_diverges_at_once_leaves_a_checkpoint_to_go_on_with(run_dir):
    """Other workers may be faster than the chief, but not before it has saved."""
    flags = ["--data=linear", "--model=linear", "--num_workers=3"]
    output = run(run_dir, *flags, "--learning_rate=1000", "--steps=10000", status=1)
    assert "--resume" in output.splitlines()[-1]
    assert 0 in [int(path.rpartition("-")[2]) for path in checkpoints_in(str(run_dir / "checkpoints"))]
    run(run_dir, *flags, "--learning_rate=0.1", "--steps=300", "--resume")
    assert result_of(run_dir)["test_loss"] < 1


def test_seconds_and_epochs_are_those_of_all_runs(run_dir):
    """A resumed run has had its seconds; with batches of twice the size, an epoch takes half as many updates."""
    flags = ["--num_workers=1", "--epochs=10"]
    run(run_dir, *flags)
    before = result_of(run_dir)
    run(run_dir, *flags, "--epochs=20", "--batch_size=64", "--resume")
    after = result_of(run_dir)
    assert before["global_steps"] == 450 and before["samples"] == 450 * 32
    assert after["samples"] == pytest.approx(20 * 1438, abs=64)
    assert after["samples"] == 450 * 32 + (after["global_steps"] - 450) * 64

    seconds = float(tf.train.load_variable(str(run_dir / "checkpoints"), "seconds"))
    output = run(run_dir, "--num_workers=1", "--epochs=1000", f"--seconds={seconds}", "--resume")
    assert "nothing was left to do" in output
    assert result_of(run_dir)["global_steps"] == after["global_steps"]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("script", "launched"),
    [
        ("Distributed-Setup/distributed_setup.py", True),
        ("Distributed-Setup/distributed_setup_supervisor.py", True),
        ("Non-Distributed-Setup/non_distributed_setup.py", False),
        ("Multiple-GPUs-Single-Machine/mirrored_strategy.py", False),
    ],
)
def test_scripts_with_a_main_loop_of_their_own_count_all_runs(run_dir, script, launched):
    """Samples, epochs and seconds, with batches of another size in the second run."""

    def train(*flags):
        how = ["--launch"] if launched else []
        finish(start(run_dir, *how, "--data=linear", "--model=linear", *flags, script=ROOT / script))
        return result_of(run_dir)

    devices = 2 if script.startswith("Multiple") else 1
    before = train("--steps=100", "--batch_size=10")
    assert (before["global_steps"], before["samples"]) == (100, 100 * 10 * devices)
    after = train("--epochs=10", "--batch_size=20", "--resume")  # of 800 samples
    assert after["samples"] == (100 * 10 + (after["global_steps"] - 100) * 20) * devices
    assert after["samples"] == pytest.approx(8000, abs=20 * devices)
    again = train("--epochs=100000", "--seconds=0.01", "--batch_size=20", "--resume")
    assert again["samples"] == after["samples"]
