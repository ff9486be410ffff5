"""Bad input, from the command line to the exit: one clear line on standard error, exit status 2, nothing started."""

import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]

# What says that a process is a task of a cluster, or was started by a launcher
CLUSTER_VARIABLES = {"TF_CONFIG", "JOB_NAME", "TASK_INDEX", "PS_HOSTS", "WORKER_HOSTS", "MASTER_HOST", "LAUNCHER_PID"}

USER_FILE = """
import keras, numpy as np

def four_outputs():
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(4)])

def data(n, value=0.5):
    return (np.full([n, 2], value), np.arange(n) % 2), (np.full([4, 2], 0.5), np.arange(4) % 2)

def with_nan():
    return data(20, np.nan)

def no_samples():
    return data(0)

def two_samples():
    return data(2)
"""


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str
    files: set  # what it left in its folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function that runs a command in a folder of its own, and asserts that no process is left."""
    clean = {name: value for name, value in os.environ.items() if name not in CLUSTER_VARIABLES}
    clean.pop("TF_CPP_MIN_LOG_LEVEL", None)  # a user has not set it
    if sys.prefix != sys.base_prefix:
        clean["VIRTUAL_ENV"] = sys.prefix  # the environment of this test, for run.sh

    def run(*command, **environ):
        folder = tmp_path_factory.mktemp("bad_input")
        (folder / "m.py").write_text(USER_FILE)
        (folder / "file").touch()
        before = {path.name for path in folder.iterdir()}
        ended = subprocess.run(
            command, cwd=folder, env=clean | environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
        )
        left = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if works_in(pid, folder)]
        assert left == []
        after = {path.name for path in folder.iterdir()} - {"__pycache__"}
        return Ended(ended.returncode, ended.stdout, ended.stderr, after - before)

    return run


def works_in(pid, folder):
    """Whether process `pid` was started in `folder`; as its tasks are, too."""
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")) == folder
    except OSError:  # it has ended, or is not ours
        return False


RUN_SH = ["bash", str(CHECKOUT / "HogWild" / "run.sh")]
SCRIPT = [sys.executable, str(CHECKOUT / "HogWild" / "hogwild.py")]


def refused(ended, *texts, script="hogwild.py"):
    """Asserts that the command ended as bad input should."""
    lines = ended.err.splitlines()
    assert len(lines) == 1, ended.err
    assert lines[0].startswith(f"{script}: ")
    for text in texts:
        assert text in lines[0]
    assert ended.status == 2
    assert ended.out == ""
    assert ended.files == set()


def cluster(**task):
    return json.dumps({"cluster": {"ps": ["127.0.0.1:2222"], "worker": ["127.0.0.1:2223"]}, "task": task})


# Noticed before there is anything to clean up, and but for a task of TF_CONFIG before tensorflow is imported
AT_ONCE = [
    (["--windw=3"], {}, ["unknown flag --windw; did you mean --window?"]),
    (["--num_workers=0"], {}, ["--num_workers must be at least 1, not 0"]),
    (["--window=0"], {}, ["--window must be at least 1, not 0"]),
    (["--batch_size=abc"], {}, ["--batch_size must be a whole number, not 'abc'"]),
    (["train"], {}, ["unexpected argument 'train'"]),
    (["--run_dir=file/run"], {}, ["--run_dir=file/run cannot be written"]),
    (["--run_dir=/proc/run"], {}, ["--run_dir=/proc/run cannot be written"]),
    (["--run_dir=" + "x" * 300], {}, ["cannot be written"]),
    (["--resume"], {}, ["--resume needs --run_dir=FOLDER"]),
    (["--resume", "--run_dir=nothing"], {}, ["--resume: there is no checkpoint in nothing/checkpoints"]),
    ([], {"TF_CONFIG": "{cluster: ps}"}, ["TF_CONFIG is not JSON"]),
    ([], {"TF_CONFIG": cluster(type="worker", index=1)}, ["TF_CONFIG", "worker 1", "the cluster has 1"]),
    ([], {"TF_CONFIG": cluster(type="evaluator", index=0)}, ["an evaluator, which hogwild.py does not have"]),
    (["--job_name=worker"], {}, ["--job_name=worker", "--task_index, --ps_hosts, --worker_hosts is missing"]),
    (
        ["--job_name=worker", "--task_index=0", "--ps_hosts=127.0.0.1:2222"],
        {},
        ["--job_name=worker names a task of a cluster, but --worker_hosts is missing"],
    ),
    ([], {"JOB_NAME": "ps", "TASK_INDEX": "0", "PS_HOSTS": "127.0.0.1:2222"}, ["JOB_NAME=ps", "WORKER_HOSTS is missing"]),
]


@pytest.mark.parametrize("command", [RUN_SH, SCRIPT], ids=["run.sh", "hogwild.py"])
@pytest.mark.parametrize("arguments, environ, texts", AT_ONCE, ids=lambda value: " ".join(value)[:40])
def test_noticed_at_once(run, command, arguments, environ, texts):
    refused(run(*command, *arguments, **environ), *texts)


DIFFERENT = "Synchronous-SGD-different-learning-rates/synchronous_sgd_different_learning_rates.py"

# Of a scheme's own flags
OWN = [
    ("AEASGD/aeasgd.py", "--beta=2.5", "--beta must be at most the number of workers, 2, not 2.5"),
    ("AEASGD/aeasgd.py", "--local_optimizer=lion", "<sgd|momentum|adagrad|adam>"),
    ("AEAMSGD/aeamsgd.py", "--momentum=1", "--momentum must be less than 1, not 1"),
    ("DC-ASGD/dc_asgd.py", "--mean_square_decay=1", "--mean_square_decay must be less than 1, not 1"),
    ("DOWNPOUR/downpour.py", "--n_fetch=0", "--n_fetch must be at least 1, not 0"),
    ("DOWNPOUR/downpour.py", "--n_fetsch=2", "unknown flag --n_fetsch; did you mean --n_fetch?"),
    ("AGN/agn.py", "--local_momentum=-1", "--local_momentum must be at least 0, not -1"),
    ("SAGN/sagn.py", "--delays=1,2,3", "--delays names 3 workers, but there are 2"),
    ("Synchronous-SGD/synchronous_sgd.py", "--backup_workers=2", "must be less than the number of workers, 2, not 2"),
    ("Synchronous-SGD/all_reduce.py", "--window=2", "--window means nothing to all_reduce.py"),
    (DIFFERENT, "--learning_rates=0.1,0.1,0.1", "--learning_rates has 3 for 2 workers: give one for each"),
    ("Semi-Synchronous-SGD/semi_synchronous_sgd.py", "--staleness=-1", "--staleness must be at least 0, not -1"),
]


@pytest.mark.parametrize("script, argument, text", OWN, ids=[argument for _, argument, _ in OWN])
def test_own_flags_of_a_scheme(run, script, argument, text):
    refused(run(sys.executable, str(CHECKOUT / script), "--launch", argument), text, script=Path(script).name)


def test_a_warm_start_is_for_clusters(run):
    command = sys.executable, str(CHECKOUT / "HogWild" / "hogwild_threads.py"), "--warm_start_steps=5"
    refused(run(*command), "--warm_start_steps means nothing to hogwild_threads.py", script="hogwild_threads.py")


def test_number_of_workers_of_one_process(run):
    """It would be ignored."""
    refused(run(*SCRIPT, "--num_workers=2"), "--num_workers is for --launch", "bash HogWild/run.sh")


# Noticed by a process that imports tensorflow, as seconds of processor time
LATER = {
    "no file": (["--model=missing.py:f"], ["--model=missing.py:f: there is no file missing.py"]),
    "no function": (["--model=m.py:nope"], ["--model=m.py:nope: m.py has no function 'nope'"]),
    "outputs": (["--model=m.py:four_outputs"], ["outputs of shape [4]", "classes 0 to 9", "expected [10] logits"]),
    "NaN": (["--data=m.py:with_nan"], ["--data=m.py:with_nan: x_train holds 40 values that are NaN"]),
    "no samples": (["--data=m.py:no_samples"], ["--data=m.py:no_samples: x_train has no samples"]),
    "few samples": (["--data=m.py:two_samples", "--num_workers=3"], ["2 training samples are too few for 3 workers"]),
}


# As these, but of a process on its own
ALONE = {
    "alone": [*SCRIPT, "--run_dir=run", "--data=m.py:with_nan"],
    "no mistake": [*SCRIPT, "--check", "--data=m.py:two_samples"],
}


@pytest.fixture(scope="module")
def later(run):
    """How each of the commands ended. Two run at a time, as much of their time is one processor's."""
    commands = {name: [*RUN_SH, *arguments] for name, (arguments, _) in LATER.items()} | ALONE
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(commands, pool.map(lambda command: run(*command), commands.values())))


@pytest.mark.parametrize("name", LATER)
def test_noticed_when_data_and_model_are_looked_at(later, name):
    refused(later[name], *LATER[name][1])


def test_process_on_its_own_looks_at_its_data(later):
    """When the folder of the run is there already: its log needs a place."""
    ended = later["alone"]
    refused(ended._replace(files=ended.files - {"run"}), "--data=m.py:with_nan: x_train holds 40 values that are NaN")


def test_no_mistake(later):
    """So that what the tests above see is the mistake, and nothing else."""
    ended = later["no mistake"]
    assert (ended.status, ended.out, ended.files) == (0, "", set())
