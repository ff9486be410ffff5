"""Messages from a task to the launcher that has started it: lines for the user, what it does and waits for, signs of life."""

import contextlib
import json
import os
import socket
import threading
import time
import warnings
from typing import Any, NamedTuple

# A task's environment has these: the process that has started it, its own name, and the pipe to the launcher.
VARIABLES = ("LAUNCHER_PID", "LAUNCHER_KEY", "LAUNCHER_WORDS")
# It may also have these: a file with data, a path for what the check of the input finds out, its log.
MORE_VARIABLES = ("LAUNCHER_DATA", "LAUNCHER_FOUND", "LAUNCHER_LOG")

STANDS_IN = "STANDS_IN"  # a variable, for a worker that leaves at once, in place of one that was lost

LAST = "\f"  # begins what a task says with `say_last`
PROGRESS = "\v"  # begins what it says of its progress
ASKED = "\a"  # says that it was asked to end, by SIGTERM, and is no worker that can leave
LEAVING = "\x0e"  # says that it was asked to leave, and will
LEFT = 101  # exit status of a fork of the process that starts the tasks, see `status_of_leaving`
# What a task does while it runs the user's functions; the check of the input may have timed these before.
LOADING, BUILDING = "loading the data", "building the model"
CHECKED = "ending the check"


class TaskProgress(NamedTuple):
    """A task's report of its progress."""

    number: int  # counts the calls of `doing`
    what: str  # what the task does, as in "while loading the data"
    waits: bool  # whether it may be waiting for other tasks
    longest: float | None  # seconds that this took at most, if it has done the same again and again; None for the first time


# As `TaskProgress`, when that began, and for whom it may wait; replaced as a whole: another thread reads it.
_progress: tuple = (0, "", False, None, 0.0, None)
is_done = False
is_fork = False  # of the process that starts the tasks, which tells the launcher how this one has ended


def doing(what, waits=False, whom=None):
    """Notes what this task does from now on; the launcher kills one that does the same for too long (supervisor.py).

    Costs less than a microsecond if it is the same as before, once more: a call of the main loop, say.

    Args:
      what: as in "while loading the data".
      waits: whether it may take as long as other tasks take.
      whom: if it needs the ps, a function that returns for which other tasks it waits just now, as ["worker 3"]. Only called
        when this has taken `WAIT_SECONDS` and all ps can be reached; in a thread of its own.
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
    """Returns what this task does."""
    return _progress[1]


@contextlib.contextmanager
def meanwhile(what, waits=False, whom=None):
    """A context in which this task does something else than what it does before and after."""
    _, before, waited, _, _, for_whom = _progress
    doing(what, waits, whom)
    try:
        yield
    finally:
        doing(before, waited, for_whom)


WAIT_SECONDS = 5  # so long may a task wait without a line


def nobody():
    """The tasks for which a task waits that needs only the ps: none but these."""
    return []


class _Wait:
    """Reports for which tasks this task waits, once it has waited for `WAIT_SECONDS`, and reports when the wait is over.

    Attributes:
      said: what it has said last: the number of what the task did, for whom it waits, since when; None if that is over.
    """

    def __init__(self):
        self.said: Any = None
        self._lock, self._inquiry, self._next = threading.Lock(), None, 0.0
        self._name, self._hosts = "", {}
        self.is_looked_at = False  # whether a thread calls `look`

    def of(self, name, hosts):
        """Sets the name of this task, and the addresses of all: {"ps 0": "host:port"}."""
        self._name, self._hosts = name, hosts

    def look(self):
        """Inquires if it is time. To be called about once a second, by one thread. It returns at once."""
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
        """Finds out for which tasks this one waits, and says so if that has changed."""
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
                _tell_and_log(f"{self._name} has waited {time.monotonic() - began:.0f} s, since {since}, for {who}")

    def is_over(self, number):
        """The task now does what has this number."""
        with self._lock:
            if self.said and self.said[0] < number:
                self._say_over()

    def _say_over(self):
        _, who, began = self.said
        self.said = None
        _tell_and_log(f"{self._name} no longer waits for {who}: it took {time.monotonic() - began:.0f} s")

    def away(self):
        """Returns the tasks for which this one waits just now, and that accept no connection; it has waited for a while."""
        _, _, _, _, began, whom = _progress
        if whom is None or time.monotonic() < began + WAIT_SECONDS:
            return []

        def found(names):
            return [name for name in names if name in self._hosts and _why_unreachable(self._hosts[name])]

        return found(name for name in self._hosts if name.startswith("ps ")) or found(whom())

    def with_address(self, name):
        """Returns the name of a task with its address."""
        return f"{name} at {self._hosts[name]}" if name in self._hosts else name

    def unreachable(self, job):
        """Returns the tasks of a job that accept no connection, with their addresses and why."""
        found = []
        for name, address in self._hosts.items():
            if name.startswith(job) and (why := _why_unreachable(address)):
                found.append(f"{self.with_address(name)} ({why})")
        return found


_wait = _Wait()


def away():
    """Returns the names of tasks, as ["worker 3"], for which this one waits and that it cannot reach. Takes seconds, maybe."""
    return _wait.away()


def with_address(name):
    """Returns "worker 3 at host:port" of "worker 3"."""
    return _wait.with_address(name)


def workers_away():
    """Returns the workers that accept no connection, for a task that waits for all of them."""
    return _wait.unreachable("worker ")


def _why_unreachable(address):
    """Returns why host:port does not answer; an empty text if it does."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2):
            return ""
    except (OSError, UnicodeError) as error:  # the latter of a name that cannot be one
        return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _tell_and_log(line):
    if os.environ.get("LAUNCHER_LOG"):
        print_at_once(line)  # first: who sees the line on the terminal finds it in the log
    tell(line)


def look_for_waits():
    """See `_Wait.look`."""
    _wait.is_looked_at = True
    _wait.look()


def say_waits_of(name, hosts):
    """From now on says for whom this task, as "worker 0", waits when that takes long.

    Args:
      hosts: the addresses of all tasks, {job: list of host:port}.
    """
    _wait.of(name, {f"{job} {i}": host for job, of_job in hosts.items() for i, host in enumerate(of_job)})
    if not _wait.is_looked_at:  # by the thread that gives signs of life, where there is a launcher
        _wait.is_looked_at = True
        threading.Thread(target=_look_often, daemon=True).start()


def _look_often():
    while True:
        _wait.look()
        time.sleep(1)


def read_progress(text):
    """Returns the `TaskProgress` that a task has told in `text`, which begins with `PROGRESS`."""
    return TaskProgress(*json.loads(text.removeprefix(PROGRESS)))


def say_progress():
    """Tells what this task is doing."""
    say(PROGRESS + json.dumps(_progress[:4]))


def work_is_done():
    """Notes that this task, of a scheme, now ends with its exit status. One that exits with 0 and has not said so, because a
    function of the user's has ended it, counts as failed."""
    global is_done
    is_done = True


def status_of_leaving():
    """Returns the exit status of a worker that leaves for good: 0, which the launcher is told in another way than that of one
    that is done."""
    return LEFT if is_fork else 0


def say_asked():
    """Tells the launcher that this task was asked to end, by another than itself."""
    say(ASKED)


def say_leaving():
    """Tells the launcher that this worker was asked to leave, and has begun to."""
    say(LEAVING)


def say_last(text):
    """Sends this task's last message to the launcher that started it, if there is one."""
    say(LAST + text)


def print_at_once(line):
    """Prints a line whole: `print` writes its end by itself, and another thread's line may come in between."""
    print(f"{line}\n", end="", flush=True)


def tell(line):
    """Shows a line to the user: of the launcher that has started this task, or of this process."""
    if os.environ.get("LAUNCHER_WORDS"):
        say(line)
    else:
        print_at_once(line)


def tell_warnings():
    """From now on shows each warning of Python's, once, to the user of the launcher that has started this task."""
    told = set()

    def show(message, category, filename, lineno, file=None, line=None):
        text = f"{category.__name__}: {' '.join(str(message).split())} ({os.path.basename(filename)}, line {lineno})"
        if text not in told:
            told.add(text)
            tell(text)

    warnings.showwarning = show


def say(text=""):
    """Shows a line to the user of the launcher that has started this task, if one has. Without text, a sign of life."""
    words, key = os.environ.get("LAUNCHER_WORDS"), os.environ.get("LAUNCHER_KEY")
    if words and key:
        write(int(words), key, text)


def write(words, key, text):
    """Writes a line of the task `key` into the pipe to the launcher."""
    line = f"{key}\t{text}".replace("\n", " ").encode(errors="replace")[:2000]  # short, to be written as a whole
    with contextlib.suppress(OSError):  # a launcher that was stopped reads nothing, and the pipe is full
        os.write(words, line + b"\n")
