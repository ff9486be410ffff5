"""The limits of this machine: memory, open files, processes. A run that needs more is refused before a task starts.

Imports no tensorflow. Every estimate is a lower bound, so no feasible run is refused.
"""

import os
import resource
from pathlib import Path

from common.core.flags import UserError

# Measured on two cores: 103 threads in a ps, 106 to 109 in a worker, independent of the number of tasks.
THREADS_OF_A_TASK = 100
FILES_OF_A_TASK = 32  # beside ports and connections; measured: 10 to 15


def memory():
    """Returns the bytes of memory available to all processes together: those of the machine, or the limit of a cgroup."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_of_cgroups("memory", "memory.max", "memory.limit_in_bytes")])


def as_bytes(count):
    """A number of bytes as text: `25.6 TB`."""
    count, units = count / 1e3, ["kB", "MB", "GB", "TB", "PB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:,.1f} {units[0]}"


def check_tasks(num_ps, num_workers):
    """Raises a `UserError` if the limits on open files or processes are too low for so many tasks.

    A task inherits the reserved ports of all tasks from the process that starts it, and connects to each task of the other job.
    """
    count = num_ps + num_workers
    need, has = count + max(num_ps, num_workers) + FILES_OF_A_TASK, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if has != resource.RLIM_INFINITY and need > has:
        raise UserError(
            f"{count:,} tasks need {need:,} open files each, but `ulimit -n` allows {has:,}: choose fewer --num_ps or "
            f"--num_workers, or raise the limit, ulimit -n {need}"
        )
    check_threads(f"{count:,} tasks need some", THREADS_OF_A_TASK * count, "--num_ps or --num_workers")


def check_threads(what, need, flags):
    """Raises a `UserError` if this machine's limits allow fewer threads; `what` needs them, `flags` are those to lower."""
    has, of = _processes()
    if need > has:
        raise UserError(f"{what} {need:,} threads, but {of} allows {has:,}: choose fewer {flags}, or raise the limit")


def _processes():
    """Returns the maximum number of processes, threads included, and the name of the limit."""
    limits = [(number, "the cgroup's pids.max") for number in _of_cgroups("pids", "pids.max", "pids.max")]
    if os.geteuid():  # root may have any number
        limits.append((resource.getrlimit(resource.RLIMIT_NPROC)[0], "`ulimit -u`"))
    for name in "pid_max", "threads-max":
        limits += [(number, f"kernel.{name}") for number in _numbers_in(Path("/proc/sys/kernel", name))]
    return min(((number, of) for number, of in limits if number >= 0), default=(float("inf"), ""))


def _of_cgroups(controller, name, name_of_1):
    """Yields the limits of this process's cgroups, from the file `name` (version 2) or `name_of_1` (version 1)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # no Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root, file = (Path("/sys/fs/cgroup", controller), name_of_1) if controllers else (Path("/sys/fs/cgroup"), name)
        folder = root / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each.is_relative_to(root):
                yield from _numbers_in(each / file)


def _numbers_in(path):
    """Returns the number in a file as a list; empty if the file does not exist or holds no number, such as `max`."""
    try:
        return [int(path.read_text())]
    except (OSError, ValueError):
        return []
