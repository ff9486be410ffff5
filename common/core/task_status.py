"""Messages from a task to its launcher: lines for the user, activity, waits, heartbeats."""

import contextlib
import json
import os
import socket
import threading
import time
import warnings
from typing import Any, NamedTuple

# Environment variables of a task: its parent process, its own name, and the pipe to the launcher.
VARIABLES = ("LAUNCHER_PID", "LAUNCHER_KEY", "LAUNCHER_WORDS")
# Optional ones: a file with data, a path for the findings of the input check, its log.
MORE_VARIABLES = ("LAUNCHER_DATA", "LAUNCHER_FOUND", "LAUNCHER_LOG")

STANDS_IN = "STANDS_IN"  # environment variable of a worker that leaves at once, in place of a lost one

LAST = "\f"  # prefix of the message of `say_last`
PROGRESS = "\v"  # prefix of a progress report
ASKED = "\a"  # message: asked to end by SIGTERM, and not a worker that can leave
LEAVING = "\x0e"  # message: asked to leave, and about to
LEFT = 101  # exit status of a forked task that leaves, see `status_of_leaving`
# Activities of a task that run the user's functions; the input check may have timed them before.
LOADING, BUILDING = "loading the data", "building the model"
CONVERTING = "converting the data"  # part of loading; a colon and its progress follow
CHECKED = "ending the check"


class TaskProgress(NamedTuple):
    """A task's report of its progress."""

    number: int  # counts the calls of `doing`
    what: str  # the activity, as in "while loading the data"
    waits: bool  # whether it may be waiting for other tasks
    longest: float | None  # longest duration in seconds of consecutive repetitions; None for the first time


# The fields of `TaskProgress`, start time, function of the awaited tasks; replaced as a whole, as another thread reads it.
_progress: tuple = (0, "", False, None, 0.0, None)
is_done = False
is_fork = False  # whether the fork server started this process; it reports the exit status to the launcher


def doing(what, waits=False, whom=None):
    """Sets this task's activity; the launcher kills a task that hangs in one activity for too long (supervisor.py).

    Repeating the same activity, such as a call of the main loop, costs less than a microsecond.

    Args:
      what: the activity, as in "while loading the data".
      waits: whether its duration depends on other tasks.
      whom: if it needs the ps, a function that returns the other tasks for which it waits now, as ["worker 3"]. Called in a
        thread of its own, only after `WAIT_SECONDS` and if all ps are reachable.
    """
    global _progress
    number, before, _, longest, began, _ = _progress
    now = time.monotonic()
    longest = max(now - began, longest or 0) if what == before else None
    _progress = number + 1, what, waits, longest, now, whom
    if _wait.said:
        _wait.is_over(number + 1)
    if what != before:
        say_progress()


def present():
    """Returns this task's activity."""
    return _progress[1]


@contextlib.contextmanager
def meanwhile(what, waits=False, whom=None):
    """A context with another activity of this task; afterwards the previous one is restored."""
    _, before, waited, _, _, for_whom = _progress
    doing(what, waits, whom)
    try:
        yield
    finally:
        doing(before, waited, for_whom)


WAIT_SECONDS = 5  # a longer wait is reported


def nobody():
    """The tasks, beside the ps, awaited by a task that needs only the ps: none."""
    return []


class _Wait:
    """Reports the tasks for which this task waits, after `WAIT_SECONDS`, and the end of the wait.

    Attributes:
      said: the last report: (number of the activity, awaited tasks, start time); None if that wait is over.
    """

    def __init__(self):
        self.said: Any = None
        self._lock, self._inquiry, self._next = threading.Lock(), None, 0.0
        self._name, self._hosts = "", {}
        self._is_looked_at = False  # whether a thread calls `look`

    def say_waits_of(self, name, hosts):
        """From now on reports the long waits of this task, named as "worker 0".

        Args:
          hosts: the addresses of all tasks, {job: list of host:port}.
        """
        self._name = name
        self._hosts = {f"{job} {i}": host for job, of_job in hosts.items() for i, host in enumerate(of_job)}
        if not self._is_looked_at:  # under a launcher, the heartbeat thread does it
            self._is_looked_at = True
            threading.Thread(target=self._look_often, daemon=True).start()

    def _look_often(self):
        while True:
            self.look()
            time.sleep(1)

    def look(self):
        """Starts an inquiry if one is due; returns at once. To be called about once a second, by one thread."""
        self._is_looked_at = True
        number, _, _, _, began, whom = _progress
        now = time.monotonic()
        if whom is None or not self._hosts or now < max(began + WAIT_SECONDS, self._next):
            return
        if self._inquiry and self._inquiry.is_alive():
            return
        self._next = now + WAIT_SECONDS
        self._inquiry = threading.Thread(target=self.inquire, args=(number, began, whom), daemon=True)
        self._inquiry.start()

    def inquire(self, number, began, whom):
        """Determines the tasks for which this one waits, and reports them if they have changed."""
        names = self.unreachable("ps ") or [self.with_address(name) for name in whom()]
        who = ", ".join(names[:4]) + (f" and {len(names) - 4} others" if names[4:] else "")
        with self._lock:
            if number != _progress[0] or (self.said and self.said[1] == who):
                return
            if self.said and not who:
                self._say_over()
            if who:
                since = time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - began)))
                self.said = number, who, began
                tell_and_log(f"{self._name} has waited {time.monotonic() - began:.0f} s, since {since}, for {who}")

    def is_over(self, number):
        """Called when the task begins the activity of this number."""
        with self._lock:
            if self.said and self.said[0] < number:
                self._say_over()

    def _say_over(self):
        _, who, began = self.said
        self.said = None
        tell_and_log(f"{self._name} no longer waits for {who}: it took {time.monotonic() - began:.0f} s")

    def away(self):
        """Returns the unreachable tasks for which this one waits, as ["worker 3"]; empty before `WAIT_SECONDS`.

        May take seconds.
        """
        *_, began, whom = _progress
        if whom is None or time.monotonic() < began + WAIT_SECONDS:
            return []

        def found(names):
            return [name for name in names if name in self._hosts and _why_unreachable(self._hosts[name])]

        return found(name for name in self._hosts if name.startswith("ps ")) or found(whom())

    def with_address(self, name):
        """Returns "worker 3 at host:port" of "worker 3"."""
        return f"{name} at {self._hosts[name]}" if name in self._hosts else name

    def unreachable(self, job):
        """Returns the tasks of a job that accept no connection, with their addresses and the reasons."""
        found = []
        for name, address in self._hosts.items():
            if name.startswith(job) and (why := _why_unreachable(address)):
                found.append(f"{self.with_address(name)} ({why})")
        return found

    def workers_away(self):
        """Returns the workers that accept no connection, for a task that waits for all workers."""
        return self.unreachable("worker ")


_wait = _Wait()
say_waits_of, look_for_waits = _wait.say_waits_of, _wait.look
away, with_address, workers_away = _wait.away, _wait.with_address, _wait.workers_away


def _why_unreachable(address):
    """Returns the reason why host:port does not answer; an empty text if it does."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2):
            return ""
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        return getattr(error, "strerror", None) or str(error) or type(error).__name__


def tell_and_log(line):
    """Shows a line to the user, see `tell`, and prints it into the log of this task, if it has one."""
    if os.environ.get("LAUNCHER_LOG"):
        print_at_once(line)  # log first, so that any line on the terminal is already in the log
    tell(line)


def read_progress(text):
    """Returns the `TaskProgress` in `text`, a message that begins with `PROGRESS`."""
    return TaskProgress(*json.loads(text.removeprefix(PROGRESS)))


def say_progress():
    """Reports this task's activity to the launcher."""
    say(PROGRESS + json.dumps(_progress[:4]))


def work_is_done():
    """Notes that this task of a scheme has finished, so that its exit status is its own.

    A task that exits with 0 before, because a function of the user's ended the process, counts as failed.
    """
    global is_done
    is_done = True


def status_of_leaving():
    """Returns the exit status of a worker that leaves for good: 0, or `LEFT` in a fork.

    `LEFT` distinguishes it, for the launcher, from a worker that has finished.
    """
    return LEFT if is_fork else 0


def say_asked():
    """Tells the launcher that this task was asked to end by another process, with SIGTERM."""
    say(ASKED)


def say_leaving():
    """Tells the launcher that this worker was asked to leave, and is leaving."""
    say(LEAVING)


def say_last(text):
    """Sends this task's last message to its launcher, if there is one."""
    say(LAST + text)


def print_at_once(line):
    """Prints a line in one write: `print` writes the newline separately, and another thread's line may come between."""
    print(f"{line}\n", end="", flush=True)


def tell(line):
    """Shows a line to the user, through the launcher of this task, or directly without one."""
    if os.environ.get("LAUNCHER_WORDS"):
        say(line)
    else:
        print_at_once(line)


def tell_warnings():
    """From now on shows each Python warning once to the user, see `tell`."""
    told = set()

    def show(message, category, filename, lineno, file=None, line=None):
        text = f"{category.__name__}: {' '.join(str(message).split())} ({os.path.basename(filename)}, line {lineno})"
        if text not in told:
            told.add(text)
            tell(text)

    warnings.showwarning = show


def say(text=""):
    """Sends a line to this task's launcher, if there is one, for its user. Without text: a heartbeat."""
    words, key = os.environ.get("LAUNCHER_WORDS"), os.environ.get("LAUNCHER_KEY")
    if words and key:
        write(int(words), key, text)


def write(words, key, text):
    """Writes a line of the task `key` into the pipe to the launcher."""
    line = f"{key}\t{text}".replace("\n", " ").encode(errors="replace")[:2000]  # short enough for an atomic write
    with contextlib.suppress(OSError):  # the pipe is full, as a stopped launcher reads nothing
        os.write(words, line + b"\n")
