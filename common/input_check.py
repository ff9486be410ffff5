"""One process looks at data and model before any task starts, and is itself watched: a user's function may hang, or die."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import progress, words
from common.deaths import NOTHING, count_oom_kills, killed_by, last_error, of_memory
from common.flags import FITTING, KNOWN, UserError

CHECK_SECONDS = 5  # after which the user is told that the input is being looked at


def check_input(script, arguments, settings, shared=None):
    """Lets one process look at data and model before any task starts. For the built-in ones nothing can be wrong.

    Args:
      script, arguments, settings: as `common.launch.launch` gets them.
      shared: descriptor of an empty file, in which it leaves large arrays to the tasks, see `common.data.share`.

    Returns:
      Seconds that it took for each, {`words.LOADING` or `BUILDING`: seconds}, empty for the built-in ones; and what the tasks
      need not find out about the data again, see `common.streams.load`, or None.

    Raises:
      UserError: if they cannot be trained, or do not come within `--hang_secs`.
    """
    is_small = settings.num_workers <= 100 and settings.batch_size * settings.window <= 2**20
    has_flags = settings.loss is not None or settings.warmup_steps > 0
    is_known = settings.model in FITTING.get(settings.data, ()) and all(getattr(settings, k) in KNOWN[k] for k in KNOWN)
    if is_small and is_known and not has_flags:
        return {}, None
    with contextlib.ExitStack() as stack:
        heard, said = os.pipe()
        stack.callback(os.close, heard)
        errors = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
        found = Path(stack.enter_context(tempfile.TemporaryDirectory()), "data.json")
        oom_kills = count_oom_kills()
        checking = subprocess.Popen(
            [sys.executable, str(script), *arguments, "--check"],
            stderr=errors,
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                "LAUNCHER_PID": str(os.getpid()),  # with which it dies
                "LAUNCHER_KEY": "check",
                "LAUNCHER_WORDS": str(said),
                "LAUNCHER_DATA": "" if shared is None else str(shared),
                "LAUNCHER_FOUND": str(found),
            },
            pass_fds=[said] if shared is None else [said, shared],
            start_new_session=True,  # so that Ctrl-C reaches this process alone
        )
        stack.callback(_kill_session, checking)

        def hear_end():
            checking.wait()
            with contextlib.suppress(OSError):  # the listener may have gone
                os.write(said, b"\n")  # after all that it has said itself
            os.close(said)

        threading.Thread(target=hear_end, daemon=True).start()
        what, seconds = _watch_check(heard, settings)
        if what == words.CHECKED and checking.returncode == 0:
            return seconds, json.loads(found.read_text()) if found.exists() else None
        errors.seek(0)
        raise UserError(_why_check_failed(what, checking.returncode, errors.read(), script.name, settings, oom_kills))


def _kill_session(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _flag_of(what, settings):
    """Returns the flag, with its value, whose function is called while a task does this; None for other things."""
    return {words.LOADING: f"--data={settings.data}", words.BUILDING: f"--model={settings.model}"}.get(what)


def _watch_check(heard, settings):
    """Reads what the checking process says until it has ended; returns what it did last, and how long each thing took."""
    seconds: dict[str, float] = {}
    what, rest, is_told = "starting", b"", False
    start = began = time.monotonic()
    while True:
        flag = _flag_of(what, settings)
        # Only the user's function may hang; importing tensorflow, or downloading, may take its time.
        limit = settings.hang_secs if flag and flag.rpartition(":")[1] else 10 * settings.hang_secs
        soon = began + limit if is_told else min(began + limit, start + CHECK_SECONDS)
        if not select.select([heard], [], [], max(0, soon - time.monotonic()))[0]:
            if not is_told and time.monotonic() >= start + CHECK_SECONDS:
                is_told = True
                progress.say(f"checking the data and the model before the tasks start; it is {what}")
            elif time.monotonic() >= began + limit:
                raise UserError(
                    f"{flag or 'the check of data and model'} did not come to an end within {limit:g} s; if it needs more, "
                    "give a larger --hang_secs"
                )
            continue
        *lines, rest = (rest + os.read(heard, 10000)).split(b"\n")
        for line in lines:
            if not line:  # it has ended
                return what, seconds
            text = line.decode(errors="replace").partition("\t")[2]
            if text.startswith(words.PROGRESS):
                seconds[what] = time.monotonic() - began
                what, began = words.read_progress(text).what, time.monotonic()


def _why_check_failed(what, status, text, script_name, settings, oom_kills):
    """One line on how the process ended that looked at data and model, doing `what`, with `text` on its standard error.

    `oom_kills` is what `count_oom_kills` returned when it began.
    """
    said = last_error(text, script_name)
    if status == 2 and f"{script_name}: " in text:
        return said
    flag = _flag_of(what, settings) or "the check of data and model"
    if (how := of_memory(text)) or status < 0:
        return f"{flag}: {how or killed_by(-status, oom_kills)} while {what}"
    if status == 130:  # no Ctrl-C reaches it
        return f"{flag}: it raised KeyboardInterrupt"
    if status == 0 or said == NOTHING:
        return f"{flag}: it ended the program, with exit status {status}, in place of returning"
    return said
