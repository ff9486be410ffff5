"""Checks data and model in one supervised task before the others start: a user's function may hang or crash."""

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

from common.core import FITTING, KNOWN, NOTHING, RunFacts, UserError, last_error, of_memory, progress, task_status
from common.launch.fork_server import EARLY, ForkServer
from common.launch.supervisor import Supervisor
from common.launch.task import Task

CHECK_SECONDS = 5  # delay before the user is told about the check


def check_input(script, arguments, settings, process, shared=None):
    """Checks data and model in one task before any other starts. Built-in ones need no check.

    Args:
      script, arguments, settings: as in `launcher.launch`.
      process: the `warm.WarmProcess` of the run.
      shared: descriptor of an empty file for large arrays shared with the tasks, see `common.data.datasets.share`.

    Returns:
      Seconds of each stage, {`task_status.LOADING` or `BUILDING`: seconds}, empty for the built-in ones; and facts about the
      data for the tasks, see `common.data.sources.load`, or None.

    Raises:
      UserError: if data and model cannot be trained, or do not load within `--hang_secs`.
    """
    is_small = settings.num_workers <= 100 and settings.batch_size * settings.window <= 2**20
    has_flags = settings.loss is not None or settings.warmup_steps > 0
    is_known = settings.model in FITTING.get(settings.data, ()) and all(getattr(settings, k) in KNOWN[k] for k in KNOWN)
    if is_small and is_known and not has_flags:
        return {}, None
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
        found = Path(stack.enter_context(tempfile.TemporaryDirectory()), "data.json")
        command = [sys.executable, str(script), *arguments, "--check"]
        task = Task("check", 0, command, "", {"LAUNCHER_FOUND": str(found)}, is_shown=True)
        # In the machine's own network: data may have to be downloaded.
        shown = stack.enter_context(progress.busy("importing TensorFlow, to check the data and the model"))
        with ForkServer({}, None, is_isolated=False, shared=shared, process=process, errors=errors.fileno()) as server:
            check = _Check(task, server, settings, shown)
            check.run()
        if check.has_passed():
            return check.seconds, json.loads(found.read_text()) if found.exists() else None
        errors.seek(0)
        raise UserError(check.why_failed(errors.read(), script.name))


class _Check(Supervisor):
    """Supervises the task that checks data and model."""

    def __init__(self, task, server, settings, shown):
        alone = settings.but(run=RunFacts(settings.run.scheme))
        super().__init__([task], server, alone, progress.say, ends_with_chief=False)
        self._task, self._began, self._is_told, self._shown = task, time.monotonic(), False, shown
        self.seconds: dict[str, float] = {}
        self._doing, self._since = "starting", self._began

    def run(self):
        """Waits for the task to end. Ctrl-C raises KeyboardInterrupt here: there is nothing to save."""
        self._server.listen(lambda *end: self._events.put(end), self._hear)
        self._task.start(self._server)
        self._next_end()

    def _hear(self, name, text):
        super()._hear(name, text)
        now, progress = time.monotonic(), self._task.progress
        if progress:
            self._shown(f"checking the data and the model: {progress.what}")
        if progress and (stage := progress.what.partition(":")[0]) != self._doing:
            self.seconds[self._doing] = now - self._since
            self._doing, self._since = stage, now

    def _look(self, last_look):
        super()._look(last_look)
        if not self._is_told and time.monotonic() >= self._began + CHECK_SECONDS:
            self._is_told = True
            self._say(f"checking the data and the model before the tasks start; it is {self._doing}")

    def _flag(self):
        """Returns the flag, with its value, whose function is running; "" at other stages."""
        flags = dict.fromkeys((task_status.LOADING, task_status.CONVERTING), f"--data={self._settings.data}")
        flags[task_status.BUILDING] = f"--model={self._settings.model}"
        return flags.get(self._doing, "")

    def _limit(self, progress):
        # Only a user's function is likely to hang; a download may be slow.
        return self._settings.hang_secs * (1 if ":" in self._flag() else 10)

    def has_passed(self):
        return self._doing == task_status.CHECKED and self._task.status == 0

    def why_failed(self, printed, script_name):
        """Returns one line on the failure, from the exit status and this standard error."""
        status, said = self._task.status, last_error(printed, script_name)
        flag = self._flag() or "the check of data and model"
        if self._task.why_killed:
            limit = self._limit(self._task.progress)
            return f"{flag} did not finish within {limit:g} s; if it needs longer, give a larger --hang_secs"
        if status == 2 and f"{script_name}: " in printed:
            return said
        if (how := of_memory(printed)) or status < 0:
            return f"{flag}: {how or self._task.how()} while {self._doing}"
        if status == 130:  # no Ctrl-C reaches it
            return f"{flag}: it raised KeyboardInterrupt"
        if status in (0, EARLY) or said == NOTHING:
            return f"{flag}: it exited with status {status % EARLY} instead of returning"
        return said
