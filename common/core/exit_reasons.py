"""The reason why a process ended, in one line: its last error, the signal that killed it, or lack of memory."""

import contextlib
import math
import re
import signal
from pathlib import Path

NOTHING = "it printed nothing"
RAN_OUT = "ran out of memory and was killed by the kernel"
# Prefix of log lines of TensorFlow's C++ code that are no errors, such as the absence of a GPU
_REPORT = re.compile(r"[IW]\d{4} |E\d{4} .* failed call to cuInit")
_FATAL = re.compile(r"F\d{4} ")  # prefix of its fatal errors


def last_error(text, script_name):
    """The last line of a script's output that reports a `UserError`; else the last that looks like an error; else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _REPORT.match(line)]
    for looks_right in (lambda line: line.startswith(f"{script_name}: "), lambda line: "Error" in line, _FATAL.match, bool):
        found = [line for line in lines if looks_right(line)]
        if found:
            return found[-1].removeprefix(f"{script_name}: ")
    return NOTHING


# Messages of Python, C++, the dynamic linker and TensorFlow if memory runs out or a limit (`ulimit -v`) is too small
_NO_MEMORY = re.compile(
    r"MemoryError|std::bad_alloc|[Cc]annot allocate memory|failed to map segment|OOM when allocating|Out of memory"
)
_NO_THREAD = re.compile(r"pthread_create\(\) failed|pthread_create failed|can't start new thread")


def of_memory(text):
    """Returns a text on lack of memory (or of threads) if a process's output reports it, else None."""
    if found := _NO_MEMORY.findall(text):
        return f"ran out of memory ({found[-1]})"
    if found := _NO_THREAD.findall(text):
        return f"could not start a thread ({found[-1]}): out of memory or of processes (ulimit -v, ulimit -u)"
    return None


def killed_by(number, oom_kills=math.inf):
    """Returns a text on the signal that killed a process, or `RAN_OUT` if the kernel killed it for lack of memory.

    The latter if it was SIGKILL and `count_oom_kills` has grown since it returned `oom_kills`.
    """
    if number == signal.SIGKILL and count_oom_kills() > oom_kills:
        return RAN_OUT
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:  # a signal without a name
        return f"was killed by signal {number}"


def count_oom_kills():
    """Returns the number of processes killed by the kernel for lack of memory: on this machine, and in this control group."""
    paths, total = ["/proc/vmstat"], 0
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                paths += [f"/sys/fs/cgroup{group}/memory.events", "/sys/fs/cgroup/memory.events"]
            elif "memory" in controllers.split(","):
                paths += [f"/sys/fs/cgroup/memory{group}/memory.oom_control", "/sys/fs/cgroup/memory/memory.oom_control"]
    for path in paths:
        with contextlib.suppress(OSError):
            total += sum(int(count) for count in re.findall(r"^oom_kill (\d+)$", Path(path).read_text(), re.M))
    return total
