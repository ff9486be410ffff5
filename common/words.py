"""What a task tells the launcher that has started it: lines for the user, what it is doing, signs of life."""

import contextlib
import json
import os
import time
from typing import NamedTuple

# A task's environment has these: the process that has started it, its own name, and the pipe to the launcher.
VARIABLES = ("LAUNCHER_PID", "LAUNCHER_KEY", "LAUNCHER_WORDS")

LAST = "\f"  # begins what a task says with `say_last`
PROGRESS = "\v"  # begins what it says of its progress
# What a task does while it runs the user's functions; the check of the input may have timed these before.
LOADING, BUILDING = "loading the data", "building the model"
CHECKED = "ending the check"


class Progress(NamedTuple):
    """What a task tells of its progress."""

    number: int  # counts the calls of `doing`
    what: str  # what the task does, as in "while loading the data"
    waits: bool  # whether it may be waiting for other tasks
    longest: float | None  # seconds that this took at most, if it has done the same again and again; None for the first time


_progress: tuple = (0, "", False, None, 0.0)  # as `Progress`, and when that began; replaced as a whole: another thread reads it
is_done = False


def doing(what, waits=False):
    """Notes what this task does from now on; the launcher kills one that does the same for too long, see `common.launch.Run`.

    Costs less than a microsecond if it is the same as before, once more: a call of the main loop, say.

    Args:
      what: as in "while loading the data".
      waits: whether it may take as long as other tasks take.
    """
    global _progress
    number, before, _, longest, began = _progress
    now = time.monotonic()
    longest = max(now - began, longest or 0) if what == before else None
    _progress = number + 1, what, waits, longest, now
    if what != before:
        say_progress()


@contextlib.contextmanager
def meanwhile(what, waits=False):
    """A context in which this task does something else than what it does before and after."""
    _, before, waited, *_ = _progress
    doing(what, waits)
    try:
        yield
    finally:
        doing(before, waited)


def read_progress(text):
    """Returns the `Progress` that a task has told in `text`, which begins with `PROGRESS`."""
    return Progress(*json.loads(text.removeprefix(PROGRESS)))


def say_progress():
    """Tells what this task is doing."""
    say(PROGRESS + json.dumps(_progress[:4]))


def work_is_done():
    """Notes that this task, of a scheme, now ends with its exit status. One that exits with 0 and has not said so, because a
    function of the user's has ended it, counts as failed."""
    global is_done
    is_done = True


def say_last(text):
    """Tells the launcher that has started this task, if one has, what the task ends with."""
    say(LAST + text)


def tell(line):
    """Shows a line to the user: of the launcher that has started this task, or of this process."""
    if os.environ.get("LAUNCHER_WORDS"):
        say(line)
    else:
        print(line, flush=True)


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
