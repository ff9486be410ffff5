"""Multiple-Machines/slurm.sbatch under a real Slurm of three nodes, which are hosts on this machine."""

import contextlib
import os
import signal
import subprocess
import time

import machines
import pytest
from runs import ROOT, SECONDS, metrics_of, processes, result_of, updates_of, wait_until_gone

pytestmark = pytest.mark.cluster
SBATCH = str(ROOT / "Multiple-Machines" / "slurm.sbatch")
CONF = """
ClusterName=tests
SlurmctldHost=host1
SlurmUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=host[1-3] CPUs=4 Sockets=1 CoresPerSocket=4 ThreadsPerCore=1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Its three nodes, and a folder for the outputs of jobs."""

    def __init__(self, hosts, folder):
        self._hosts, self.folder = hosts, folder

    def run(self, *words, **environ):
        """Runs one of Slurm's commands on the first node; returns what it prints."""
        command = self._hosts[0].command(*map(str, words))
        environ = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **environ}
        done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, *arguments, options=(), **environ):
        """Submits slurm.sbatch; returns the number of the job."""
        output = self.run("sbatch", f"--output={self.folder}/%j.out", *options, SBATCH, *arguments, **environ)
        return int(output.split()[-1])

    def output(self, job):
        """The output of a job so far."""
        path = self.folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def state(self, job):
        """RUNNING, COMPLETED and so on."""
        shown = self.run("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def wait(self, job, is_it, what):
        """Waits until `is_it()`, while the job has not failed."""

        def is_it_while_the_job_has_not_failed():
            assert self.state(job) not in ("FAILED", "TIMEOUT", "NODE_FAIL"), self.output(job)
            return is_it()

        self.wait_until(is_it_while_the_job_has_not_failed, job, what)

    def wait_until(self, is_it, job, what="it does not end"):
        """Waits until `is_it()`."""
        deadline = time.monotonic() + SECONDS
        while not is_it():
            assert time.monotonic() < deadline, f"{what}: {self.state(job)}\n{self.output(job)}"
            time.sleep(0.1)

    def wait_for_end(self, job, state="COMPLETED"):
        """Waits until a job is in this state."""
        self.wait(job, lambda: self.state(job) == state, f"it is not {state}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Slurm's daemons: the controller on the first host, and one for each node. They end with the tests."""
    machines.need("slurmctld", "slurmd", "sbatch", "srun", "scancel")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "slurm.conf").write_text(CONF.format(folder=folder))
    environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(machines.hosts.Hosts(3))
        for host, daemon in [(hosts[0], ("slurmctld", "-D", "-i")), *((host, ("slurmd", "-D")) for host in hosts)]:
            process = subprocess.Popen(
                host.command(*daemon),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
        slurm = Slurm(hosts, folder)
        deadline = time.monotonic() + SECONDS
        while (
            "idle 3"
            not in subprocess.run(
                hosts[0].command("sinfo", "-h", "-o", "%T %D"), env=environ, capture_output=True, text=True
            ).stdout
        ):
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.1)
        yield slurm
        slurm.run("scancel", "--state=RUNNING")
        slurm.run("scancel", "--state=PENDING")


def test_a_task_on_each_node(slurm, tmp_path):
    job = slurm.submit("HogWild", f"--run_dir={tmp_path / 'run'}", options=["--nodes=3"])
    slurm.wait_for_end(job)
    result = result_of(tmp_path / "run")
    assert (result["num_ps"], result["num_workers"]) == (1, 2)
    assert result["test_accuracy"] >= 0.95


def test_several_tasks_on_a_node(slurm, tmp_path):
    """Four tasks on three nodes, two of them ps; and flags of the scheme."""
    flags = ["SAGN", "--window=20", "--epochs=120", f"--run_dir={tmp_path / 'run'}"]
    job = slurm.submit(*flags, options=["--ntasks=4", "--nodes=3"], NUM_PS="2")
    slurm.wait_for_end(job)
    result = result_of(tmp_path / "run")
    assert (result["num_ps"], result["num_workers"], result["window"]) == (2, 2, 20)
    assert result["test_accuracy"] >= 0.95


def newest_checkpoint(run_dir):
    """The global step of a run's newest checkpoint, 0 if there is none."""
    steps = [int(path.name.partition("-")[2].partition(".")[0]) for path in run_dir.glob("checkpoints/*.index")]
    return max(steps, default=0)


def test_scancel_and_resume(slurm, tmp_path):
    """The chief saves a checkpoint when the job is cancelled, from which another job goes on."""
    run_dir = tmp_path / "run"
    job = slurm.submit("HogWild", f"--run_dir={run_dir}", "--epochs=1e9", "--checkpoint_secs=600")
    slurm.wait(job, lambda: "samples/s" in slurm.output(job), "no worker trains")
    assert newest_checkpoint(run_dir) == 0
    pids = processes(run_dir)
    slurm.run("scancel", job)
    slurm.wait_for_end(job, "CANCELLED")
    assert wait_until_gone(pids, SECONDS) == []
    saved = newest_checkpoint(run_dir)
    assert saved > 0, slurm.output(job)
    assert "asked to end: waits until the workers have left" in slurm.output(job)

    job = slurm.submit("HogWild", f"--run_dir={run_dir}", "--resume", f"--steps={saved + 500}")
    slurm.wait_for_end(job)
    result = result_of(run_dir)
    assert saved + 500 <= result["global_steps"] < saved + 600
    assert result["test_accuracy"] >= 0.95


def test_requeue_resumes(slurm, tmp_path):
    """A job that Slurm puts back into its queue, as after the loss of a node, goes on from its checkpoint."""
    run_dir = tmp_path / "run"
    job = slurm.submit("HogWild", f"--run_dir={run_dir}", "--epochs=1e9", "--seconds=6", "--checkpoint_secs=600")
    slurm.wait(job, lambda: "samples/s" in slurm.output(job), "no worker trains")
    slurm.run("scontrol", "requeue", job)
    slurm.wait(job, lambda: slurm.state(job) in ("PENDING", "RUNNING") and newest_checkpoint(run_dir) > 0, "nothing is saved")
    saved = newest_checkpoint(run_dir)
    slurm.wait_for_end(job)
    assert result_of(run_dir)["global_steps"] > saved > 0


def test_task_that_is_killed(slurm, tmp_path):
    """All tasks are started again, and go on from the newest checkpoint."""
    run_dir = tmp_path / "run"
    job = slurm.submit("HogWild", f"--run_dir={run_dir}", "--epochs=1e9", "--seconds=5", "--checkpoint_secs=1")
    slurm.wait(job, lambda: newest_checkpoint(run_dir) > 0, "no checkpoint")
    some = min(processes(run_dir, str(ROOT / "HogWild" / "hogwild.py")))
    os.kill(some, signal.SIGKILL)
    slurm.wait_for_end(job)
    assert "a task ended with 137; restart 1 of 3" in slurm.output(job)
    assert result_of(run_dir)["test_accuracy"] >= 0.95


STOP = """
from pathlib import Path


def stop(step, metrics):
    return Path(__file__).with_name("stop").exists()
"""


def test_a_second_job_joins_and_leaves(slurm, tmp_path):
    """It is cancelled, and its worker leaves; the first job goes on, loses no update and completes. Then nobody can join."""
    run_dir = tmp_path / "run"
    (tmp_path / "callback.py").write_text(STOP)
    flags = ["--epochs=1e9", "--delays=10,10", "--evaluation_secs=0.2", f"--callback={tmp_path}/callback.py:stop"]
    options = ["--ntasks=2", "--nodes=1", "--nodelist=host1"]
    first = slurm.submit("HogWild", f"--run_dir={run_dir}", *flags, options=options, PLACES="host[2-3]")
    slurm.wait(first, lambda: updates_of(run_dir, 0), "no worker trains")
    options = ["--ntasks=1", "--nodes=1", "--nodelist=host3", f"--export=ALL,JOIN={run_dir}"]
    second = slurm.submit(options=options)
    slurm.wait(second, lambda: updates_of(run_dir, 2), "no worker joins")
    slurm.run("scancel", second)
    slurm.wait_for_end(second, "CANCELLED")
    slurm.wait(first, lambda: "left" in metrics_of(run_dir, 2)[-1], "it does not leave")
    before = updates_of(run_dir, 0)
    slurm.wait(first, lambda: updates_of(run_dir, 0) > before, "the first job does not go on")
    (tmp_path / "stop").touch()
    slurm.wait_for_end(first)
    result = result_of(run_dir)
    assert [left["worker"] for left in result["left"]] == [2] and result["num_workers"] == 2
    assert updates_of(run_dir, 0) + updates_of(run_dir, 2) == result["global_steps"]
    third = slurm.submit(options=options)
    slurm.wait_until(lambda: slurm.state(third) == "FAILED", third)
    assert f"slurm.sbatch: JOIN={run_dir}: the run is over" in slurm.output(third)


@pytest.mark.parametrize(
    "arguments, environ, line",
    [
        (["NoSuch"], {}, "slurm.sbatch: there is no "),
        ([], {}, "slurm.sbatch: the scheme is missing"),
        (["HogWild"], {"NUM_PS": "3"}, "slurm.sbatch: NUM_PS=3 of --ntasks=3 leaves no worker"),
        ([], {"JOIN": "none"}, "none: no run with PLACES began there"),
        (["HogWild"], {"JOIN": "none"}, "slurm.sbatch: JOIN=none: scheme and flags are those of that run: leave HogWild out"),
        (["HogWild", "--window=0"], {}, "hogwild.py: --window must be at least 1, not 0"),
    ],
)
def test_bad_input(slurm, arguments, environ, line):
    job = slurm.submit(*arguments, **environ)
    slurm.wait_until(lambda: slurm.state(job) == "FAILED", job)
    assert line in slurm.output(job) and "Traceback" not in slurm.output(job)
    assert "restart" not in slurm.output(job)
