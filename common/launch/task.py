"""A task of the cluster as the launcher sees it: its process, state, log and last words."""

import contextlib
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.core import RAN_OUT, killed_by, last_error, of_memory, task_status
from common.launch.fork_server import EARLY, LEFT


@dataclass
class Task:
    """A task of the cluster, with its process and log; with `is_shown` it writes to the terminal instead."""

    job: str
    index: int
    command: list
    run_dir: str
    environ: dict = field(default_factory=dict)  # additional variables
    is_shown: bool = False
    restarts: int = 0
    restarted: list = field(default_factory=list)  # times of its recent restarts, as time.monotonic()
    starts_at: float | None = None  # time of a pending start
    started: float = -math.inf  # time of its last start, as time.monotonic()
    status: int | None = None  # exit status, None while it runs
    heard: float = math.inf  # time of the last heartbeat, as time.monotonic(); inf before the first
    progress: Any = None  # a `task_status.TaskProgress`, None for a program that reports none
    progressed: float = math.inf  # time of the last known progress
    last_line: str = ""  # error line reported at its end
    why_killed: str = ""  # reason why this process killed it
    ran_out: bool = False  # whether the kernel killed it because memory ran out
    is_asked: bool = False  # whether it has reported a request to end
    has_left: bool = False  # whether the worker has left for good, or the place is still free
    is_leaving: bool = False  # whether it was asked to leave, by this process or another
    stands_in: bool = False  # whether its process only leaves, in place of one that died while leaving
    born: float | None = None  # time of its process's first heartbeat, as time.monotonic()
    seconds: float = 0.0  # total lifetime of its ended processes
    log_begins: int = 0  # offset in the log of the output since its last start

    @property
    def name(self):
        return f"{self.job} {self.index}"

    @property
    def is_running(self):
        return self.status is None

    @property
    def log(self):
        return Path(self.run_dir, "logs", f"{self.job}-{self.index}.log")

    def start(self, server):
        """Starts the process."""
        self.status, self.starts_at, self.heard, self.progress, self.progressed = None, None, math.inf, None, math.inf
        self.why_killed, self.ran_out, self.last_line, self.started = "", False, "", time.monotonic()
        self.is_asked, self.is_leaving, self.has_left, self.born = False, self.stands_in, False, None
        with contextlib.suppress(OSError):
            self.log_begins = self.log.stat().st_size
        environ = self.environ | {task_status.STANDS_IN: "1"} if self.stands_in else self.environ
        server.start(self.name, self.command, None if self.is_shown else str(self.log), environ)

    def end(self, status):
        """Records the exit status of the process."""
        self.has_left = status == LEFT
        self.stands_in = self.stands_in and not self.has_left
        self.status = 0 if self.has_left else status
        self.seconds, self.born = self.lived(), None

    def lived(self):
        """Returns the total lifetime of its processes so far, in seconds."""
        return self.seconds + (0 if self.born is None else time.monotonic() - self.born)

    def hear(self, text):
        """Records a heartbeat or message of the task; returns the text for the user, or ""."""
        now = time.monotonic()
        self.heard = now
        self.born = self.born or now
        if text.startswith(task_status.PROGRESS):
            known, told = self.progress, task_status.read_progress(text)
            if known is None or told.number >= known.number:  # two threads of a task report, maybe out of order
                self.progress = told
                if known is None or told.number > known.number:
                    self.progressed = now
        elif text.startswith(task_status.LAST):
            self.last_line = text.removeprefix(task_status.LAST)
        else:
            return text
        return ""

    def last_words(self):
        """Returns the error line reported at its end, or else the last error in its log."""
        if self.last_line:
            return self.last_line.partition(": ")[2]
        if self.is_shown:
            return "its output is above"
        return last_error(self._printed(), Path(self.command[1]).name)

    def _printed(self):
        if self.is_shown:
            return ""
        with contextlib.suppress(OSError), open(self.log, errors="replace") as file:
            file.seek(self.log_begins)
            return file.read()
        return ""

    def how(self):
        """Describes a failure of the task, for messages."""
        if self.why_killed:
            return f"{self.why_killed} and was killed"
        if self.ran_out:
            return RAN_OUT
        if self.status == EARLY:
            return "ended with exit status 0 before its work was done"
        status = self.status or 0
        return of_memory(self._printed()) or (killed_by(-status) if status < 0 else f"failed ({status})")
