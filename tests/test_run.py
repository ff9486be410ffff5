"""common/run.py: any script as a cluster on this machine."""

import os
import signal
import subprocess
import sys

import pytest
from runs import SECONDS, processes, read_until

from common.cli import run

TASK = """
import json, os, signal, sys

config = json.loads(os.environ["TF_CONFIG"])  # as TaskSpec() does it, without the seconds for tensorflow
job, index = config["task"]["type"], config["task"]["index"]
print(job, index, len(config["cluster"]["worker"]), sys.argv[1:], flush=True)
if job == "ps" or sys.argv[1:] == ["wait"]:
    signal.pause()  # stands in for training
elif sys.argv[1:] == ["fail"] and index == 1:
    raise ValueError("it went wrong")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script in an otherwise empty folder, which is the working one. It trains nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("common.launch.supervisor.PS_SECONDS", 0)  # this ps does not end by itself
    path = tmp_path / "mine.py"
    path.write_text(TASK)
    yield path
    assert processes(path) == []


def ended(arguments, capfd):
    """Runs to the end: exit status, standard output and standard error."""
    with pytest.raises(SystemExit) as info:
        run.main([str(argument) for argument in arguments])
    return info.value.code, *capfd.readouterr()


@pytest.mark.slow
def test_each_task_knows_who_it_is(script, tmp_path, capfd):
    status, out, err = ended(["--num_workers=3", "--log_dir=here", script, "--of=its", "own"], capfd)
    assert (status, err) == (0, "")
    first, *shown = out.splitlines()
    assert "--num_ps=1 --num_workers=3, logs in here/logs" in first
    assert shown == ["worker 0 3 ['--of=its', 'own']"]
    logs = {path.name: path.read_text().splitlines()[-1:] for path in (tmp_path / "here" / "logs").iterdir()}
    logs.pop("ps-0.log")  # the run may be over before it comes to say anything
    assert logs.pop("fork-server.log") == []
    assert logs == {f"worker-{i}.log": [f"worker {i} 3 ['--of=its', 'own']"] for i in (1, 2)}


@pytest.mark.slow
def test_worker_that_fails(script, capfd):
    status, _, err = ended([script, "fail"], capfd)
    assert status == 1
    assert err.startswith("common.run: worker 1 failed (1) after 0 restarts: ValueError: it went wrong (log: runs/mine/")


@pytest.mark.slow
def test_failed_worker_is_restarted(script, capfd):
    status, out, err = ended(["--max_restarts=1", script, "fail"], capfd)
    assert status == 1 and "worker 1 failed (1); restart 1 of 1" in out and "after 1 restarts" in err


@pytest.mark.cluster
def test_ctrl_c(script):
    process = subprocess.Popen(
        [sys.executable, "-m", "common.run", str(script), "wait"], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    read_until(process, lambda line: line.startswith("worker 0"))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 130


@pytest.mark.parametrize(
    "arguments, text",
    [
        ([], "a script is missing: python -m common.run"),
        (["--num_ps=2"], "a script is missing"),
        (["nothing.py"], "there is no script nothing.py"),
        (["--num_worker=2", "mine.py"], "unknown flag --num_worker; did you mean --num_workers?"),
        (["--num_workers=0", "mine.py"], "--num_workers must be at least 1, not 0"),
        (["--gpus=some", "mine.py"], "--gpus must be all, or GPU numbers such as 0,2, not 'some'"),
        (["--log_dir=mine.py/logs", "mine.py"], "--log_dir=mine.py/logs cannot be written"),
    ],
)
def test_bad_input(script, capfd, arguments, text):
    status, out, err = ended(arguments, capfd)
    assert status == 2 and out == ""
    assert err.startswith(f"common.run: {text}") and len(err.splitlines()) == 1
