"""The cost when the chief dies, or a ps while the chief is away: nothing, or the steps after the last checkpoint."""

import json
import os
import re
import signal
import time

import pytest
from runs import ROOT, delete, finish, is_training, processes, read_until, result_of, run, start

from common import launch, tf
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


@pytest.mark.parametrize("index", [0, 1])
def test_a_worker_that_comes_back_after_the_last_second_trains_no_more(run_dir, index):
    """The chief, or another: it is stopped until the others have ended and wait for it, and then killed."""
    problem = ["--data=linear", "--model=linear"]  # whose graph is soon prepared
    process = start(run_dir, "--launch", "--epochs=1e6", "--seconds=10", "--hang_secs=200", *problem, *BACKUP)
    metrics = run_dir / "metrics" / f"worker-{index}.jsonl"
    read_until(process, lambda line: is_training(line) and '"samples"' in metrics.read_text())
    kill(run_dir, "worker", index, signal.SIGSTOP)
    read_until(process, lambda line: re.match(rf"worker {1 - index} has waited .*for worker {index}\b", line))
    kill(run_dir, "worker", index)
    finish(process)
    result = result_of(run_dir)
    assert [samples == 0 for samples in result["samples_per_worker"]] == [i == index for i in range(3)]
    assert result["restarts"] == 1 and result["samples"] == 32 * result["global_steps"]
    assert newest_step(run_dir) == result["global_steps"]


def test_others_save_while_the_chief_is_away(run_dir):
    """The chief is stopped, and then a ps is killed: what is restored is of after the stop. Its logs are deleted, too."""
    process = start(run_dir, "--launch", "--epochs=400", "--num_ps=2", "--hang_secs=200", *BACKUP)
    read_until(process, is_training)
    delete(run_dir / "logs")
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
    assert "nothing was left to do" in run(run_dir, "--num_workers=1", "--steps=400", "--resume")
    assert result_of(run_dir)["global_steps"] == after["global_steps"]


OWN_LOOPS = pytest.mark.parametrize(
    ("script", "launched"),
    [
        ("Distributed-Setup/distributed_setup.py", True),
        ("Distributed-Setup/distributed_setup_supervisor.py", True),
        ("Non-Distributed-Setup/non_distributed_setup.py", False),
        ("Multiple-GPUs-Single-Machine/mirrored_strategy.py", False),
    ],
)


@OWN_LOOPS
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


@OWN_LOOPS
def test_a_list_of_checkpoints_from_elsewhere_harms_nothing(run_dir, tmp_path, script, launched):
    """Nothing reads or removes what it names elsewhere: these scripts let TensorFlow itself keep the list."""

    def train(*flags):
        how = ["--launch"] if launched else []
        finish(start(run_dir, *how, "--data=linear", "--model=linear", *flags, script=ROOT / script))
        return result_of(run_dir)["global_steps"]

    assert train("--steps=20") == 20
    (tmp_path / "other").mkdir()
    kinds = "index", "data-00000-of-00001"
    theirs = [tmp_path / "other" / f"model.ckpt-{step}.{kind}" for step in range(6) for kind in kinds]
    for path in theirs:
        path.write_text("precious")
    names = [str(tmp_path / "other" / name) for name in ("*", "model.ckpt-5")]
    listed = "".join(f'all_model_checkpoint_paths: "{name}"\n' for name in names)
    (run_dir / "checkpoints" / "checkpoint").write_text(f'model_checkpoint_path: "{names[-1]}"\n{listed}')
    assert train("--steps=40", "--resume") == 40
    assert [path.read_text() for path in theirs] == ["precious"] * 12
    lines = [json.loads(line) for line in (run_dir / "metrics" / "worker-0.jsonl").read_text().splitlines()]
    steps = [line["global_step"] for line in lines]
    assert steps == sorted(steps)  # it went on from its own checkpoint


@pytest.mark.parametrize("script", ["distributed_setup", "distributed_setup_supervisor", "hogwild"])
def test_each_call_of_a_main_loop_is_told(run_dir, parse, monkeypatch, script):
    """To the launcher, which takes a worker for hanging that does the same for longer than ten times --hang_secs."""
    told = {}

    class Task(launch.Task):
        def hear(self, text):
            more = super().hear(text)
            if self.job == "worker" and self.progress:
                told[self.progress.what] = self.progress.number
            return more

    monkeypatch.setattr(launch, "Task", Task)
    flags = ["--data=linear", "--model=linear", "--steps=2000", "--num_workers=1", "--rounds_per_call=1"]
    flags = flags if script == "hogwild" else flags[:-1]
    settings = parse(*flags, f"--run_dir={run_dir}", epochs=1, batch_size=32, learning_rate=0.1)
    settings = settings.but(scheme="scheme", num_evaluators=0, pace="own", began=time.time())
    (path,) = ROOT.glob(f"*/{script}.py")
    assert launch.launch(path, flags, settings) == 0
    assert told["writing the result"] - told["starting"] > 2000 and told["running a call"] > told["starting"]


def test_a_damaged_checkpoint_of_a_main_loop_of_ones_own_is_one_line(run_dir):
    script, flags = ROOT / "Non-Distributed-Setup" / "non_distributed_setup.py", ["--data=linear", "--model=linear"]
    finish(start(run_dir, *flags, "--steps=10", script=script))
    (path,) = (run_dir / "checkpoints").glob("*.data-*")
    os.truncate(path, path.stat().st_size // 2)
    output = finish(start(run_dir, *flags, "--steps=20", "--resume", script=script), status=2)
    assert output.splitlines()[-1].startswith(f"{script.name}: all checkpoints in {run_dir}/checkpoints are damaged, ckpt-1: ")
