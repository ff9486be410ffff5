"""Real clusters: ps and workers as processes on this machine, started, interrupted and killed as a user would."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time

import pytest
from runs import (
    ENDLESS,
    HOGWILD,
    ROOT,
    SECONDS,
    accuracy_of_saved_model,
    finish,
    is_training,
    processes,
    read_until,
    result_of,
    run,
    start,
    updates_in_metrics,
    wait_until_gone,
)

from common import data, launch, tf

pytestmark = pytest.mark.cluster

DOWNPOUR = ROOT / "DOWNPOUR" / "downpour.py"
DYNAMIC_SGD = ROOT / "Dynamic-SGD" / "dynamic_sgd.py"
DC_ASGD = ROOT / "DC-ASGD" / "dc_asgd.py"
AEASGD = ROOT / "AEASGD" / "aeasgd.py"
SEMI_SYNCHRONOUS = ROOT / "Semi-Synchronous-SGD" / "semi_synchronous_sgd.py"

MODEL = """
import keras
from keras import layers

def cnn():
    return keras.Sequential([
        keras.Input((8, 8, 1)), layers.Conv2D(8, 3, use_bias=False), layers.BatchNormalization(momentum=0.9), layers.ReLU(),
        layers.Flatten(), layers.Dropout(0.2), layers.Dense(3),
    ])

def large():
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(4000), layers.Dense(5000), layers.Dense(3)])
"""

DATA = """
import numpy as np

def load():
    '''Three classes: the bright row is above, in the middle, below.'''
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 800)
    x = rng.normal(0, 0.3, (800, 8, 8, 1))
    x[np.arange(800), 2 * y + 1] += 1
    return (x[:600], y[:600]), (x[600:], y[600:])
"""

OWN_SCRIPT = """
import sys

import numpy

sys.path.append({folder!r})
from hogwild import hogwild

from common.main import main

main(hogwild, epochs=60, batch_size=32, learning_rate=0.1)
"""


def test_one_ps_and_two_workers_learn_the_digits(run_dir):
    from common.data import load

    output = run(run_dir)
    result = result_of(run_dir)
    assert result["test_accuracy"] >= 0.95
    assert result["samples_per_second"] > 0 and 0 < result["train_seconds"] < result["wall_seconds"]
    assert (result["scheme"], result["num_ps"], result["num_workers"], result["restarts"]) == ("HogWild", 1, 2, 0)
    assert result["flags_of_scheme"] == {"overlap": False}  # none of TensorFlow's either
    # 60 epochs of 1,438 samples in batches of 32; a worker may be in the middle of a call, 10 rounds, at the last one
    assert 2697 <= result["global_steps"] < 2697 + 2 * 10
    # no update is lost or counted twice
    assert updates_in_metrics(run_dir) == result["global_steps"] == result["samples"] / 32
    assert accuracy_of_saved_model(run_dir, load("digits")) == pytest.approx(result["test_accuracy"])
    for name in ("curve.png", "model.keras"):
        assert (run_dir / name).stat().st_size > 0 and str(run_dir / name) in output
    for name in ("logs/ps-0.log", "logs/worker-0.log", "logs/worker-1.log", "checkpoints/checkpoint"):
        assert (run_dir / name).exists()
    assert list(run_dir.glob("tensorboard/worker-*/events*"))
    assert processes(run_dir) == []


@pytest.mark.parametrize("flags", [[], ["--locked", "--num_threads=3"]])
def test_threads_that_share_memory_learn_the_digits(run_dir, flags):
    finish(start(run_dir, *flags, script=HOGWILD.with_name("hogwild_threads.py")))
    result = result_of(run_dir)
    assert result["test_accuracy"] >= 0.95
    assert updates_in_metrics(run_dir) == result["samples"] / 32 >= 2697
    assert (run_dir / "model.keras").stat().st_size > 0


def test_two_runs_at_once(run_dir, tmp_path):
    other_dir = run_dir / "another"
    one, other = start(run_dir, "--launch", "--epochs=20"), start(other_dir, "--launch", "--epochs=20")
    finish(one)
    finish(other)
    for folder in (run_dir, other_dir):
        assert updates_in_metrics(folder) == result_of(folder)["global_steps"]


def test_overlap(run_dir):
    run(run_dir, "--overlap", "--num_ps=2")
    result = result_of(run_dir)
    assert result["test_accuracy"] >= 0.95
    assert result["flags_of_scheme"] == {"overlap": True}
    assert updates_in_metrics(run_dir) == result["global_steps"] == result["samples"] / 32


def test_windows_and_steps(run_dir):
    run(run_dir, "--window=10", "--steps=200", "--learning_rate=0.01")
    result = result_of(run_dir)
    assert 200 <= result["global_steps"] < 200 + 2 * 10
    assert result["samples"] == result["global_steps"] * 32 * 10
    assert result["window"] == 10


def test_more_ps_than_parameters(run_dir):
    run(run_dir, "--num_ps=3", "--data=linear", "--model=linear", "--epochs=20")
    result = result_of(run_dir)
    assert "test_accuracy" not in result
    assert result["test_loss"] == pytest.approx(0.01, rel=0.3)  # the variance of the noise


def test_each_task_started_on_its_own(run_dir):
    """Without a launcher, each told in another way who it is; all end by themselves, also the ps."""
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(launch.reserved_port()).getsockname()[1] for _ in range(3)]
        ps, *workers = (f"127.0.0.1:{port}" for port in ports)
        cluster = {"cluster": {"ps": [ps], "worker": workers}, "task": {"type": "worker", "index": 1}}
        reuse = {"TF_GRPC_REUSE_PORT": "true"}  # lets the test hold the ports
        variables = {"JOB_NAME": "ps", "TASK_INDEX": "0", "PS_HOSTS": ps, "WORKER_HOSTS": ",".join(workers)}
        tasks = [
            start(run_dir, environ={**reuse, "TF_CONFIG": json.dumps(cluster)}),
            start(run_dir, "--job_name=worker", "--task_index=0", f"--ps_hosts={ps}", f"--worker_hosts={','.join(workers)}",
                  environ=reuse),
            start(run_dir, environ={**reuse, **variables}),
        ]  # fmt: skip
        outputs = [finish(task) for task in tasks]
    assert result_of(run_dir)["test_accuracy"] >= 0.95
    assert str(run_dir / "model.keras") in outputs[1]


def test_port_that_is_taken(run_dir):
    """The ps and the worker each print a line for the user who started them by hand."""
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as other:
        ports = [taken.getsockname()[1] for taken in (one, other)]
        hosts = [f"--{job}_hosts=localhost:{port}" for job, port in zip(("ps", "worker"), ports, strict=True)]
        tasks = [start(run_dir, f"--job_name={job}", "--task_index=0", *hosts) for job in ("ps", "worker")]
        outputs = [finish(task, status=2) for task in tasks]
    for job, output in zip(("ps", "worker"), outputs, strict=True):
        assert f"hogwild.py: {job} 0 cannot listen at localhost:" in output and "Traceback" not in output


def test_a_process_on_its_own(run_dir):
    output = finish(start(run_dir))
    result = result_of(run_dir)
    assert result["test_accuracy"] >= 0.95
    assert (result["num_ps"], result["num_workers"], result["staleness_max"]) == (0, 1, 0)
    assert result["global_steps"] == 2697 and result["samples"] == 2697 * 32
    assert "I0000" not in output and "WARNING" not in output


def test_own_model_and_data(run_dir, tmp_path):
    from common.data import load

    (tmp_path / "m.py").write_text(MODEL)
    (tmp_path / "d.py").write_text(DATA)
    data = f"{tmp_path}/d.py:load"
    run(run_dir, f"--model={tmp_path}/m.py:cnn", f"--data={data}", "--epochs=10")
    result = result_of(run_dir)
    assert result["test_accuracy"] >= 0.95
    assert accuracy_of_saved_model(run_dir, load(data)) == pytest.approx(result["test_accuracy"])


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
    """The run says what it minimizes; the saved model is compiled, and `evaluate` gives what the run has reported."""
    import keras

    from common.data import load

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
    x, y, weights = load(f"{spec}:load").test
    model = keras.models.load_model(run_dir / "model.keras")
    expected = model.evaluate(x, y, sample_weight=weights, batch_size=500, verbose=0, return_dict=True)
    found = {name.removeprefix("test_"): value for name, value in result.items() if name.startswith("test_")}
    assert found == pytest.approx(expected, rel=1e-4) and len(found) == 5
    assert sum(result["samples_per_worker"]) == result["samples"] and len(result["samples_per_worker"]) == 2
    output = run(run_dir, *arguments, f"--model={spec}:wider", "--epochs=30", "--resume", status=2)
    assert "--resume: this is another model than before: where it had kernel [65, 16], there is now kernel [65, 17]" in output
    run(run_dir, *arguments, f"--model={spec}:build", "--epochs=21", "--resume")


def test_twenty_million_parameters(run_dir, tmp_path):
    (tmp_path / "m.py").write_text(MODEL)
    (tmp_path / "d.py").write_text(DATA)
    run(run_dir, f"--model={tmp_path}/m.py:large", f"--data={tmp_path}/d.py:load", "--steps=4", "--num_ps=2",
        "--learning_rate=0.001")  # fmt: skip
    assert result_of(run_dir)["global_steps"] >= 4
    checkpoint = sum(path.stat().st_size for path in run_dir.glob("checkpoints/model.ckpt-0.data-*"))
    assert checkpoint > 80e6  # 20 million float32
    assert max(path.stat().st_size for path in run_dir.rglob("events*")) < 10e6  # the graph holds no values


def test_ctrl_c_saves_and_resume_goes_on_with_another_number_of_ps(run_dir, tmp_path):
    """Also in a user's script that imports numpy, whose threads are older than tensorflow's."""
    script = tmp_path / "mine.py"
    script.write_text(OWN_SCRIPT.format(folder=str(HOGWILD.parent)))
    process = start(run_dir, "--launch", *ENDLESS, "--checkpoint_secs=1000", script=script)
    read_until(process, lambda line: is_training(line) and max(map(float, re.findall(r"test accuracy (\d\.\d+)", line))) > 0.6)
    process.send_signal(signal.SIGINT)
    output = finish(process, status=130)
    assert f"a checkpoint is saved, and so is the model: --resume --run_dir={run_dir}" in output
    assert accuracy_of_saved_model(run_dir, data.load("digits")) > 0.5
    assert processes(run_dir) == []
    checkpoint = tf.train.latest_checkpoint(run_dir / "checkpoints")
    saved = int(tf.train.load_variable(checkpoint, "global_step"))
    assert saved > 0 and checkpoint.endswith(f"model.ckpt-{saved}")
    run(run_dir, f"--steps={saved + 100}", "--resume", "--num_ps=2", "--num_workers=3", script=script)
    result = result_of(run_dir)
    assert saved + 100 <= result["global_steps"] < saved + 100 + 3 * 10
    assert result["samples"] == result["global_steps"] * 32  # those of both runs


def test_ctrl_c_while_starting(run_dir):
    process = start(run_dir, "--launch")
    read_until(process, lambda line: "--num_ps=1" in line)
    process.send_signal(signal.SIGINT)
    finish(process, status=130)
    assert processes(run_dir) == []


def test_tasks_die_with_their_launcher(run_dir):
    process = start(run_dir, "--launch", *ENDLESS)
    read_until(process, is_training)
    tasks = set(processes(run_dir)) - {process.pid}
    assert len(tasks) == 4  # the ps, two workers, and the process that starts them
    process.kill()
    process.communicate(timeout=SECONDS)
    assert wait_until_gone(tasks) == []


@pytest.mark.parametrize("job, index", [("ps", 0), ("worker", 0)])
def test_a_killed_task_is_restarted(run_dir, job, index):
    process = start(run_dir, "--launch", "--epochs=150", "--checkpoint_secs=1")
    read_until(process, is_training)
    (victim,) = processes(run_dir, f"--job_name={job}", f"--task_index={index}")
    os.kill(victim, signal.SIGKILL)
    assert "killed by SIGKILL; restart 1 of 3" in read_until(process, lambda line: line.startswith(f"{job} {index}"))
    finish(process)
    result = result_of(run_dir)
    assert result["restarts"] == 1
    assert result["samples"] == result["global_steps"] * 32  # also those of a worker before it was killed
    assert result["test_accuracy"] >= 0.95
    assert processes(run_dir) == []


def test_a_stopped_task_is_noticed_and_the_other_goes_on_meanwhile(run_dir):
    process = start(run_dir, "--launch", "--epochs=400", "--checkpoint_secs=1", "--hang_secs=5")
    read_until(process, is_training)
    (victim,) = processes(run_dir, "--job_name=worker", "--task_index=1")
    os.kill(victim, signal.SIGSTOP)
    stopped = time.time()
    said = read_until(process, lambda line: line.startswith("worker 1"))
    noticed = time.time()
    assert re.fullmatch(r"worker 1 gave no sign of life for 5 s while [a-z ]+ and was killed; restart 1 of 3\n", said)
    finish(process)
    result = result_of(run_dir)
    assert (result["restarts"], processes(run_dir)) == (1, [])
    assert result["test_accuracy"] >= 0.95
    lines = [json.loads(line) for line in (run_dir / "metrics" / "worker-0.jsonl").read_text().splitlines()]
    meanwhile = [line["samples"] for line in lines if "samples" in line and stopped + 1 < line["time"] < noticed]
    assert len(meanwhile) >= 2 and meanwhile[-1] > meanwhile[0]


LEARNERS = ["DOWNPOUR-Easy", "DOWNPOUR", "AGN", "Dynamic-SGD", "Ringmaster-ASGD", "DC-ASGD", "AEASGD", "AEAMSGD"]
LEARNERS.append("Asynchronous-DiLoCo")


@pytest.mark.parametrize("folder", LEARNERS)
def test_every_scheme_learns_the_digits_with_its_defaults(run_dir, folder):
    command = ["bash", str(ROOT / folder / "run.sh"), f"--run_dir={run_dir}"]
    output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS)
    assert output.returncode == 0, output.stdout
    result = result_of(run_dir)
    assert result["scheme"] == folder
    assert result["test_accuracy"] >= 0.95
    gradients = result["samples"] / 32 / result["window"]
    assert updates_in_metrics(run_dir) == result["global_steps"] == gradients - result["gradients_dropped"]
    assert processes(run_dir) == []
    if folder == "Ringmaster-ASGD":
        assert result["staleness_max"] < 10
    else:
        assert result["gradients_dropped"] == 0


def slots_of(run_dir):
    """The sums of squares that Adagrad keeps on the ps, from the newest checkpoint; nothing of another optimizer."""
    checkpoint = tf.train.latest_checkpoint(run_dir / "checkpoints")
    names = [name for name, _ in tf.train.list_variables(checkpoint) if name.endswith("/Adagrad")]
    return [tf.train.load_variable(checkpoint, name) for name in names]


@pytest.mark.parametrize(
    "script, flags",
    [(DOWNPOUR, []), (DYNAMIC_SGD, ["--local_optimizer=momentum", "--local_learning_rate=0.01", "--epochs=200"]), (AEASGD, [])],
)
def test_interrupted_and_resumed_is_as_good_as_unbroken(run_dir, script, flags):
    """Ctrl-C in the middle, then on with another number of ps and workers."""
    flags = ["--epochs=300", "--checkpoint_secs=1000", *flags]
    process = start(run_dir, "--launch", *flags, script=script)
    read_until(process, is_training)
    process.send_signal(signal.SIGINT)
    finish(process, status=130)
    slots = slots_of(run_dir)
    run(run_dir, "--resume", "--num_ps=2", "--num_workers=3", *flags, script=script)
    result = result_of(run_dir)
    assert result["test_accuracy"] >= 0.95
    assert result["samples"] / 32 / result["window"] == result["global_steps"]  # those of both runs
    assert '"restored from model.ckpt-' in (run_dir / "metrics" / "worker-0.jsonl").read_text()  # it did not begin anew
    assert len(slots) == (script == DOWNPOUR)
    for before, after in zip(slots, slots_of(run_dir), strict=True):
        assert (after >= before).all() and (after > before).any()  # nor did Adagrad


def test_a_worker_killed_amid_indivisible_pushes_locks_nobody_out(run_dir):
    flags = ["--num_ps=2", "--num_workers=3", "--seconds=12", "--epochs=1000000", "--checkpoint_secs=1"]
    process = start(run_dir, "--launch", *flags, script=DYNAMIC_SGD)
    read_until(process, is_training)
    (victim,) = processes(run_dir, "--job_name=worker", "--task_index=1")
    os.kill(victim, signal.SIGKILL)
    read_until(process, lambda line: line.startswith("worker 1"))
    finish(process)
    assert result_of(run_dir)["test_accuracy"] >= 0.95


def test_elastic_averaging_of_an_own_model(run_dir, tmp_path):
    (tmp_path / "m.py").write_text(MODEL)
    (tmp_path / "d.py").write_text(DATA)
    own = [f"--model={tmp_path / 'm.py'}:cnn", f"--data={tmp_path / 'd.py'}:load", "--epochs=120"]
    run(run_dir, "--num_ps=2", "--num_workers=4", *own, script=AEASGD)
    assert result_of(run_dir)["test_accuracy"] >= 0.9


def test_adaptive_delay_compensation_on_two_ps_and_three_workers(run_dir):
    # Twice the default: a worker that starts last by a second has its share of the samples to catch up with.
    run(run_dir, "--adaptive", "--num_ps=2", "--num_workers=3", "--epochs=120", script=DC_ASGD)
    result = result_of(run_dir)
    assert result["test_accuracy"] >= 0.95
    assert (result["num_ps"], result["num_workers"]) == (2, 3)
    assert updates_in_metrics(run_dir) == result["global_steps"]


def test_intervals_of_downpour(run_dir):
    # A tenth of the default: with it a worker that begins when the other has nearly ended does harm, see DOWNPOUR/README.md.
    run(run_dir, "--n_push=4", "--n_fetch=6", "--learning_rate=0.01", script=DOWNPOUR)
    result = result_of(run_dir)
    assert result["window"] == 4
    assert result["test_accuracy"] >= 0.95
    assert updates_in_metrics(run_dir) == result["global_steps"] == result["samples"] / 32 / 4


LATE = """
import pathlib, sys, time
from common import data

here, is_late = pathlib.Path(__file__).parent, "--task_index=1" in sys.argv

def after_five_seconds():
    time.sleep(5 if is_late else 0)
    if is_late:
        (here / "came").write_text(str(time.time()))
    return data.digits()

def after_step_100():
    while is_late and not any(int(p.stem.rpartition("-")[2]) >= 100 for p in here.glob("run/checkpoints/*.index")):
        time.sleep(0.05)
    return data.digits()
"""


@pytest.mark.parametrize("script", [HOGWILD, SEMI_SYNCHRONOUS])
def test_workers_begin_together(run_dir, tmp_path, script):
    """However late one is, none trains before it has come."""
    (tmp_path / "late.py").write_text(LATE)
    run(run_dir, f"--data={tmp_path / 'late.py'}:after_five_seconds", "--epochs=30", script=script)
    lines = (run_dir / "metrics" / "worker-0.jsonl").read_text().splitlines()
    trained = [line for line in map(json.loads, lines) if "samples" in line]
    assert trained[0]["time"] > float((tmp_path / "came").read_text())


def test_start_without_those_that_are_late(run_dir, tmp_path):
    """And the summary says what came of it. Worker 1 comes when worker 0 has done all."""
    (tmp_path / "late.py").write_text(LATE)
    late = f"--data={tmp_path / 'late.py'}:after_step_100"
    output = run(run_dir, late, "--steps=100", "--start_secs=0.1", "--checkpoint_secs=0.5")
    assert "1 of 2 workers have not come within --start_secs=0.1: the others begin" in output
    assert "the workers' samples differ much" in output
    assert result_of(run_dir)["samples_per_worker"][1] == 0


def test_warm_start(run_dir):
    """The first 1,500 of 6,000 updates are worker 0's alone."""
    run(run_dir, "--warm_start_steps=1500", "--steps=6000", script=DOWNPOUR)
    alone = [
        line["staleness"]
        for line in map(json.loads, (run_dir / "metrics" / "worker-0.jsonl").read_text().splitlines())
        if "staleness" in line and line["global_step"] <= 1500
    ]
    assert alone and all(list(staleness) == ["0"] for staleness in alone)
    lines = [json.loads(line) for line in (run_dir / "metrics" / "worker-1.jsonl").read_text().splitlines()]
    total = result_of(run_dir)["global_steps"]
    assert 0 < sum(sum(line["staleness"].values()) for line in lines) <= total - 1500


@pytest.mark.parametrize("end", [["--steps=100"], ["--seconds=2", "--epochs=1000000"]])
def test_end_before_the_end_of_the_warm_start(run_dir, end):
    """The others do nothing, and wait for nothing."""
    run(run_dir, "--warm_start_steps=1000000", *end, script=DOWNPOUR)
    assert result_of(run_dir)["staleness_max"] == 0
    assert "staleness" not in (run_dir / "metrics" / "worker-1.jsonl").read_text()


def test_resuming_what_another_scheme_has_left(run_dir):
    """One line says what is missing, and nothing is lost."""
    run(run_dir, "--steps=20", script=AEASGD)
    before = {path: path.read_bytes() for path in run_dir.glob("checkpoints/model*")}
    output = run(run_dir, "--resume", status=2, script=DOWNPOUR)
    last = output.splitlines()[-1]
    assert last.startswith("downpour.py: the checkpoint in") and "'parameters/Adagrad'" in last
    output = run(run_dir, "--resume", "--model=linear", status=2, script=AEASGD)
    assert "another model" in output.splitlines()[-1]
    assert {path: path.read_bytes() for path in run_dir.glob("checkpoints/model*")} == before
