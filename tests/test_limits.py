"""common/core/limits.py: what is refused since this machine has not enough of it."""

import resource
from pathlib import Path

import pytest

from common.core import limits


@pytest.fixture
def allowed(monkeypatch):
    """A function that says how many open files and processes there may be; of the system's other limits nothing is seen."""

    def allowed(files=10**9, processes=10**9, user=1000, found=lambda path: []):
        limits_of = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_NPROC: processes}
        monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (limits_of[kind], limits_of[kind]))
        monkeypatch.setattr(limits.os, "geteuid", lambda: user)
        monkeypatch.setattr(limits, "_numbers_in", found)

    return allowed


def test_open_files(allowed, user_error):
    allowed(files=1024)
    limits.check_tasks(2, 400)
    with user_error(
        "500,002 tasks need 1,000,034 open files each, but `ulimit -n` allows 1,024: choose fewer --num_ps or --num_workers, "
        "or raise the limit, ulimit -n 1000034"
    ):
        limits.check_tasks(500_000, 2)
    allowed(files=resource.RLIM_INFINITY, processes=resource.RLIM_INFINITY)
    limits.check_tasks(500_000, 2)


def test_processes(allowed, user_error):
    allowed(processes=4000)
    limits.check_tasks(1, 39)
    with user_error("41 tasks need some 4,100 threads, but `ulimit -u` allows 4,000: choose fewer --num_ps or --num_workers"):
        limits.check_tasks(1, 40)
    allowed(processes=4000, user=0)  # to which that limit does not apply
    limits.check_tasks(1, 40)


@pytest.mark.parametrize("name, of", [("pid_max", "kernel.pid_max"), ("threads-max", "kernel.threads-max")])
def test_processes_of_the_system(allowed, user_error, name, of):
    allowed(found=lambda path: [32_768] if path == Path("/proc/sys/kernel", name) else [])
    limits.check_tasks(7, 320)
    with user_error(f"328 tasks need some 32,800 threads, but {of} allows 32,768"):
        limits.check_tasks(8, 320)


def test_threads_of_one_process(allowed, user_error):
    allowed(processes=4000)
    limits.check_threads("--num_threads=4000 needs", 4000, "of them")
    with user_error("--num_threads=4001 needs 4,001 threads, but `ulimit -u` allows 4,000: choose fewer of them, or raise"):
        limits.check_threads("--num_threads=4001 needs", 4001, "of them")


def test_few_tasks_on_this_machine():
    """As it is; a machine that could not have three could not run the tests."""
    limits.check_tasks(1, 2)


@pytest.fixture
def cgroups(monkeypatch, tmp_path):
    """A function that makes the cgroups of this process: what /proc/self/cgroup says, and files by their path."""

    def cgroups(said, files):
        (tmp_path / "cgroup").write_text(said)
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        places = {"/proc/self/cgroup": tmp_path / "cgroup", "/sys/fs/cgroup": tmp_path}
        monkeypatch.setattr(limits, "Path", lambda first, *rest: Path(places[first] if first in places else first, *rest))

    return cgroups


def test_memory_of_the_machine(cgroups):
    cgroups("0::/job\n", {"job/memory.max": "max\n"})
    (total,) = [line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:")]
    assert limits.memory() == 1024 * int(total)


@pytest.mark.parametrize(
    "said, files",
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "1000000\n", "memory.max": "2000000\n"}),
        ("0::/a/b\n", {"memory.max": "1000000\n"}),  # as in a container, whose own cgroup is mounted as the root
        ("5:pids:/\n4:cpu,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "1000000\n"}),  # version 1
        ("4:memory:/elsewhere\n", {"memory/memory.limit_in_bytes": "1000000\n"}),
    ],
)
def test_memory_of_a_cgroup(cgroups, said, files):
    cgroups(said, files)
    assert limits.memory() == 1_000_000


def test_processes_of_a_cgroup(cgroups, user_error):
    cgroups("0::/a\n", {"a/pids.max": "500\n", "pids.max": "max\n"})
    limits.check_tasks(1, 4)
    with user_error("6 tasks need some 600 threads, but the cgroup's pids.max allows 500"):
        limits.check_tasks(1, 5)


def test_numbers_of_bytes():
    for count, text in (
        (24, "0.0 kB"),
        (1_500, "1.5 kB"),
        (1_500_000, "1.5 MB"),
        (2.5e10, "25.0 GB"),
        (1e12, "1.0 TB"),
        (1e18, "1,000.0 PB"),
    ):
        assert limits.as_bytes(count) == text
