"""Clusters for notebooks: what they start ends with them; kernels that share one agree on its addresses."""

import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import runs

from common.cli.notebook import LocalCluster

MULTIPLE_WORKERS = runs.ROOT / "Basics-Tutorial" / "Multiple-Workers"
KERNEL = """
import sys
from common.cli.notebook import LocalCluster, shared_cluster

{code}
print({printed}, flush=True)
sys.stdin.read()  # until the test closes it
"""


class Kernel:
    """A process that runs `code`, as a notebook's kernel would, prints `printed`, and lives until `end`."""

    def __init__(self, code, printed):
        self.process = subprocess.Popen(
            [sys.executable, "-c", KERNEL.format(code=code, printed=printed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def printed(self):
        assert self.process.stdout
        return json.loads(self.process.stdout.readline().replace("'", '"'))

    def end(self):
        self.process.communicate(timeout=runs.SECONDS)


@pytest.fixture
def kernel():
    """The class `Kernel`; what is left of them is killed after the test."""
    kernels = []

    def kernel(*arguments):
        kernels.append(Kernel(*arguments))
        return kernels[-1]

    yield kernel
    for each in kernels:
        each.process.kill()
        each.process.communicate()


def can_bind(address):
    """Whether another program could take this port."""
    with socket.socket() as other:
        try:
            other.bind(("", int(address.rpartition(":")[2])))
        except OSError:
            return False
    return True


def listens(address):
    """Whether somebody listens at this address."""
    host, port = address.split(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


def test_addresses_are_reserved_until_closed():
    local = LocalCluster(ps=1, worker=2)
    addresses = [address for job in ("ps", "worker") for address in local.hosts[job]]
    assert len(set(addresses)) == 3
    assert not any(can_bind(address) for address in addresses)
    assert local.target("worker", 1) == f"grpc://{local.hosts['worker'][1]}"
    task = local.task("worker", 1)
    assert (task.type, task.index, task.num_ps, task.num_workers) == ("worker", 1, 1, 2)
    local.close()
    assert all(can_bind(address) for address in addresses)


@pytest.mark.parametrize("how", ["exit", "kill"])
@pytest.mark.cluster
def test_what_was_started_ends_with_the_kernel(kernel, how):
    mine = kernel("local = LocalCluster(ps=1, worker=1)", "[local.start('ps', 0).pid, local.start('worker', 0).pid]")
    pids = mine.printed()
    assert all(psutil.Process(pid).ppid() == mine.process.pid for pid in pids)
    if how == "kill":
        mine.process.kill()
    else:
        mine.end()
    assert runs.wait_until_gone(pids) == []


@pytest.mark.slow
def test_close_ends_what_was_started():
    local = LocalCluster(ps=1, worker=1)
    process = local.start("ps", 0)
    local.close()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_kernels_agree_whoever_comes_first(kernel, tmp_path):
    code = f"local = shared_cluster({str(tmp_path / 'cluster.json')!r}, ps=1, worker=2)"
    together = [kernel(code, "local.hosts") for _ in range(6)]
    hosts = [each.printed() for each in together]
    assert all(each == hosts[0] for each in hosts)
    assert len({address for job in hosts[0].values() for address in job}) == 3


@pytest.mark.slow
def test_addresses_hold_as_long_as_one_lives(kernel, tmp_path):
    code = f"local = shared_cluster({str(tmp_path / 'cluster.json')!r}, ps=1)"
    first, second = kernel(code, "local.hosts"), kernel(code, "local.hosts")
    hosts = first.printed()
    assert second.printed() == hosts
    first.process.kill()  # the first has found the ports, and is gone
    first.process.wait()
    assert not can_bind(hosts["ps"][0])
    assert kernel(code, "local.hosts").printed() == hosts


@pytest.mark.slow
def test_new_addresses_when_all_have_ended(kernel, tmp_path):
    path = tmp_path / "cluster.json"
    mine = kernel(f"local = shared_cluster({str(path)!r}, ps=1)", "local.hosts")
    hosts = mine.printed()
    with socket.socket() as another:  # somebody else takes the port when it is free again
        mine.end()
        another.bind(("", int(hosts["ps"][0].rpartition(":")[2])))
        assert kernel(f"local = shared_cluster({str(path)!r}, ps=1)", "local.hosts").printed() != hosts


@pytest.mark.slow
def test_closing_gives_the_addresses_up(kernel, tmp_path):
    path = tmp_path / "cluster.json"
    kernel(f"local = shared_cluster({str(path)!r}, ps=1)\nhosts = local.hosts\nlocal.close()", "hosts").printed()
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.cluster
@pytest.mark.notebook
def test_three_notebooks_at_the_same_time(tmp_path):
    """Run All in three kernels, started in any order: cells run to the end, outputs that are checked are the committed ones."""
    order = ["Worker-1", "Worker-2", "Parameter-Server"]
    random.shuffle(order)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval-lax", "--nbval-current-env"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    running = [
        subprocess.Popen(
            [*command, str(MULTIPLE_WORKERS / f"{name}.ipynb")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for name in order
    ]
    try:
        said = [each.communicate(timeout=runs.SECONDS)[0] for each in running]
    finally:
        for each in running:
            each.kill()
            each.wait()
    assert [each.returncode for each in running] == [0, 0, 0], f"started as {order}:\n" + "\n".join(said)
    hosts = json.loads(Path(MULTIPLE_WORKERS, "cluster.json").read_text())
    assert not any(listens(address) for job in hosts.values() for address in job)
    left = [p for p in psutil.process_iter(["cmdline", "cwd"]) if p.info["cwd"] == str(MULTIPLE_WORKERS)]  # kernels, and the ps
    assert not left
