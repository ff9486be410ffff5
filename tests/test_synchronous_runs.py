"""Real clusters whose workers wait for each other: they learn, they are exact, and they end, also if one is slow or dies."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from runs import ROOT, SECONDS, finish, is_training, processes, read_until, result_of, run, start, updates_in_metrics

from common import launch, tf

pytestmark = pytest.mark.cluster

SYNCHRONOUS = ROOT / "Synchronous-SGD" / "synchronous_sgd.py"
ALL_REDUCE = ROOT / "Synchronous-SGD" / "all_reduce.py"
SEMI_SYNCHRONOUS = ROOT / "Semi-Synchronous-SGD" / "semi_synchronous_sgd.py"
STREAMING = ROOT / "Streaming-DiLoCo" / "streaming_diloco.py"
SLOW = ["--num_workers=3", "--delays=0,2,5"]  # three workers of different speed


def updates_of_each(run_dir):
    """How many updates each worker contributed to."""
    updates = []
    for path in sorted(run_dir.glob("metrics/*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        updates.append(sum(sum(line["staleness"].values()) for line in lines if "staleness" in line))
    return updates


@pytest.mark.parametrize(
    "folder, flags",
    [
        ("Synchronous-SGD", []),
        ("Synchronous-SGD", ["--by=all_reduce"]),
        ("Synchronous-SGD", ["--by=sync_replicas_optimizer"]),
        ("Synchronous-SGD-different-learning-rates", []),
        ("SAGN", []),
        ("Local-SGD", []),
        ("DiLoCo", []),
        ("Streaming-DiLoCo", []),
        ("SparseLoCo", []),
        ("Write-Your-Own-Scheme", []),
        ("Semi-Synchronous-SGD", []),
    ],
)
def test_each_learns_the_digits_with_its_defaults(run_dir, folder, flags):
    command = ["bash", str(ROOT / folder / "run.sh"), *flags, f"--run_dir={run_dir}"]
    output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS)
    assert output.returncode == 0, output.stdout
    result = result_of(run_dir)
    assert result["scheme"] in (folder, "SyncReplicasOptimizer")
    assert result["test_accuracy"] >= 0.95
    if "--by=sync_replicas_optimizer" not in flags:  # whose workers do not contribute alike
        assert result["gradients_dropped"] == 0
        gradients = 1 if folder == "Semi-Synchronous-SGD" else 2
        assert updates_in_metrics(run_dir) == gradients * result["global_steps"] == result["samples"] / 32 / result["window"]
    assert processes(run_dir) == []


@pytest.mark.parametrize("script", [SYNCHRONOUS, ALL_REDUCE])
def test_early_stopping_and_a_callback(run_dir, tmp_path, script):
    """All workers end together, what was measured reaches a function, and what that prints is shown."""
    (tmp_path / "own.py").write_text("def show(step, metrics):\n    print('at', step, sorted(metrics))\n")
    flags = ["--validation=0.2", "--patience=2", "--epochs=1000000", "--learning_rate=0.5", "--evaluation_secs=0.1"]
    output = run(run_dir, *flags, f"--callback={tmp_path}/own.py:show", script=script)
    assert "in 2 evaluations: training ends" in output
    result = result_of(run_dir)
    assert result["validation_loss"] > 0 and result["test_accuracy"] > 0.9
    assert np.ptp(updates_of_each(run_dir)) <= 1  # of the last one some may have come to the ps
    names = "['test_accuracy', 'test_loss', 'validation_accuracy', 'validation_loss']"
    assert f"at {result['global_steps']} {names}" in output


@pytest.mark.parametrize("script", [SYNCHRONOUS, ALL_REDUCE])
def test_every_worker_contributes_once_to_every_update(run_dir, script):
    run(run_dir, *SLOW, "--steps=500", script=script)
    assert updates_of_each(run_dir) == [500, 500, 500]
    result = result_of(run_dir)
    assert (result["global_steps"], result["samples"], result["gradients_dropped"]) == (500, 3 * 500 * 32, 0)


def test_a_backup_worker_is_not_waited_for(run_dir):
    """On two ps; what comes late is dropped, not applied late, and the last step is not overshot."""
    flags = ["--num_workers=3", "--num_ps=2", "--delays=0,0,500", "--rounds_per_call=1", "--backup_workers=1", "--steps=300"]
    run(run_dir, *flags, script=SYNCHRONOUS)
    result, updates = result_of(run_dir), updates_of_each(run_dir)
    assert result["global_steps"] == 300
    assert sum(updates) == 2 * 300  # the first two of three
    assert updates[2] < min(updates[:2]) and result["gradients_dropped"] > 0


def test_through_the_ps_and_by_all_reduce_come_to_the_same(run_dir):
    import keras

    weights = []
    for script in SYNCHRONOUS, ALL_REDUCE:
        run(run_dir / script.stem, "--steps=200", script=script)
        weights.append(
            np.concatenate([w.ravel() for w in keras.models.load_model(run_dir / script.stem / "model.keras").get_weights()])
        )
    assert np.abs(weights[0] - weights[1]).max() < 1e-5 * np.abs(weights[0]).max()


@pytest.mark.parametrize(
    "script, job, index",
    [
        (SYNCHRONOUS, "worker", 0),
        (SYNCHRONOUS, "ps", 0),
        (ALL_REDUCE, "worker", 1),
        (SEMI_SYNCHRONOUS, "worker", 1),
        (STREAMING, "worker", 1),
    ],
)
def test_a_killed_task_comes_back_and_the_run_ends(run_dir, script, job, index):
    steps = 4500 if script == SEMI_SYNCHRONOUS else 1500
    process = start(run_dir, "--launch", *SLOW, f"--steps={steps}", "--checkpoint_secs=1", script=script)
    read_until(process, is_training)
    (victim,) = processes(run_dir, f"--job_name={job}", f"--task_index={index}")
    os.kill(victim, signal.SIGKILL)
    assert "killed by SIGKILL; restart 1 of 3" in read_until(process, lambda line: line.startswith(f"{job} {index}"))
    finish(process)
    result = result_of(run_dir)
    assert result["restarts"] == 1
    assert result["global_steps"] >= steps
    assert result["test_accuracy"] >= 0.95
    assert processes(run_dir) == []


@pytest.mark.parametrize("script", [SYNCHRONOUS, ALL_REDUCE])
def test_a_task_that_may_not_be_restarted_ends_the_run(run_dir, script):
    process = start(run_dir, "--launch", *SLOW, "--epochs=1000000", "--max_restarts=0", script=script)
    read_until(process, is_training)
    (victim,) = processes(run_dir, "--job_name=worker", "--task_index=2")
    os.kill(victim, signal.SIGKILL)
    last = finish(process, status=1).splitlines()[-1]
    assert "worker 2 was killed by SIGKILL after 0 restarts" in last and "worker-2.log" in last
    assert processes(run_dir) == []


@pytest.mark.parametrize("script", [SYNCHRONOUS, ALL_REDUCE])
def test_ctrl_c_reaches_those_who_wait_and_resume_goes_on(run_dir, script):
    process = start(run_dir, "--launch", *SLOW, "--epochs=1000000", "--checkpoint_secs=1000", script=script)
    read_until(process, is_training)
    process.send_signal(signal.SIGINT)
    output = finish(process, status=130)
    assert f"--resume --run_dir={run_dir}" in output
    saved = int(tf.train.load_variable(str(run_dir / "checkpoints"), "global_step"))
    run(run_dir, "--resume", "--num_ps=2", "--steps=1500", script=script)
    result = result_of(run_dir)
    assert result["global_steps"] == 1500
    assert result["samples"] == (saved * 3 + (1500 - saved) * 2) * 32  # of three workers, and then of two
    assert f'"restored from model.ckpt-{saved}"' in (run_dir / "metrics" / "worker-0.jsonl").read_text()


def test_the_hook_in_a_program_of_ones_own(tmp_path):
    """Three workers of different speed: the bound holds and is reached; one that has ended, or died, never holds the others."""
    staleness, steps = 3, [400, 100, 60]
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(launch.reserved_port()).getsockname()[1] for _ in range(4)]
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
