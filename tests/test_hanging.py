"""Tasks that live, but get nothing done, or end too early; and the process that starts them, stopped."""

import os
import re
import signal
from pathlib import Path

import pytest
from runs import ENDLESS, finish, is_training, processes, read_until, result_of, start, wait_until_gone

DATA = """
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


@pytest.mark.cluster
def test_a_worker_that_hangs_and_one_that_ends_too_early(run_dir, tmp_path):
    """Each life is a restart, and the third does the work."""
    (tmp_path / "d.py").write_text(DATA)
    arguments = ["--launch", f"--data={tmp_path}/d.py:load", "--model=linear", "--steps=200", "--hang_secs=10"]
    output = finish(start(run_dir, *arguments))
    hung, exited = [line for line in output.splitlines() if "restart " in line]
    # More than 10 s where the check of the data took more than one.
    words = r"worker 1 made no progress for \d\d+ s while loading the data and was killed; restart 1 of 3"
    assert re.fullmatch(words, hung)
    assert exited == "worker 1 ended with exit status 0 before its work was done; restart 2 of 3 in 1 s"
    assert (result_of(run_dir)["restarts"], processes(run_dir)) == (2, [])


@pytest.mark.cluster
def test_the_process_that_starts_the_tasks_is_stopped(run_dir):
    process = start(run_dir, "--launch", *ENDLESS, "--hang_secs=10")
    read_until(process, is_training)
    (pid, *_) = processes(run_dir, "--job_name=ps")
    starter = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(starter, signal.SIGSTOP)
    last = finish(process, 1).splitlines()[-1]
    assert last == (
        "hogwild.py: the process that starts the tasks gave no sign of life for 10 s and was killed; --resume goes on"
    )
    assert wait_until_gone(processes(run_dir)) == []
