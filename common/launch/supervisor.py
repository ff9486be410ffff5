"""Supervises the tasks of a run: reads their messages, kills hung tasks, restarts dead ones, stops them all.

Imports no tensorflow: only the tasks do.
"""

import contextlib
import functools
import math
import os
import queue
import signal
import time
from pathlib import Path
from typing import Any

from common.core import (
    TrainingFailed,
    UserError,
    check_locks,
    count_oom_kills,
    has_checkpoint,
    killed_by,
    last_error,
    of_memory,
    signals,
    task_status,
)
from common.launch import control

STOP_SECONDS = 60  # grace period to save a checkpoint, before a task is killed
WRITE_SECONDS = 5  # to write a checkpoint already in memory, after the death of a ps
PS_SECONDS = 10  # for a ps to notice that all workers are done
CHIEF_SECONDS = 5  # for a chief to exit after it has dismissed the others
FAILED_FOR_GOOD = 3  # exit status of a task that a restart cannot help


class StarterEnded(TrainingFailed):
    """The process that starts the tasks has ended, and all tasks with it."""


HOUR = 3600  # time window for counting restarts, in seconds
MOST_PAUSE = 30  # limit of the backoff before a restart, in seconds
SERVER_SECS = 10  # minimum heartbeat timeout of the fork server, in seconds


class Supervisor:
    """Supervises the tasks of a run from start to end.

    A task is killed if it sends no heartbeat for `hang_secs`, or makes no progress: if an activity takes longer than both
    `hang_secs` and ten times its longest duration so far, here or in the input check; without an earlier duration the limit is
    ten times `hang_secs`. A task that may be waiting for others, as in a synchronous scheme, is exempt while one of them makes
    progress.
    If all workers wait, the run has failed.

    Args:
      tasks: every `Task`.
      server: the `ForkServer` that starts them.
      settings: `max_restarts`, of each task within an hour; `hang_secs`, None for programs without heartbeat; of `run` the
        `pace`: with "ring" one restart restarts all; and `num_evaluators`, see `ends_with_chief`.
      say: function that shows a line to the user.
      check_secs: as `check_input` returns it.
      ends_with_chief: whether worker 0 ends the training of all others; the run then waits only for the evaluators.
    """

    def __init__(self, tasks, server, settings, say, check_secs=None, ends_with_chief=True):
        self._tasks, self._server, self._settings, self._say = {task.name: task for task in tasks}, server, settings, say
        # Ends of tasks, (name, status), and functions for the main thread; `put` is reentrant, as needed in a signal handler.
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._workers = [task for task in tasks if task.job == "worker"]
        self._chief = (self._workers or tasks)[0]  # a check has no worker
        self._evaluators = self._workers[len(self._workers) - settings.run.num_evaluators :]
        self._check_secs, self._ends_with_chief = check_secs or {}, ends_with_chief
        self._looked, self._oom_kills, self._is_stopping = time.monotonic(), count_oom_kills(), False
        self._is_interrupted, self._in_ring = False, settings.run.pace == "ring"
        self.code: Any = None  # from `control.code_of`, in an elastic run

    def run(self):
        """Runs all tasks and returns the exit status of the run; remaining tasks then end with the server.

        Raises:
          StarterEnded: if the server has ended before the run.
          TrainingFailed: if a task has failed for good.
          UserError: if a task has failed by a user's mistake.
        """
        before = {number: signal.signal(number, self._interrupt) for number in signals.heeded()}
        self._server.listen(lambda *end: self._events.put(end), self._hear)
        try:
            for task in self._tasks.values():
                if not task.has_left:
                    task.start(self._server)
            return self._watch()
        except KeyboardInterrupt:
            self._stop_workers()
            return 130
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, number, frame):
        if number == signal.SIGHUP and self._is_interrupted:
            return  # the shell and the system may both send it: that is no second request
        self._is_interrupted = True
        self._events.put(_stop)  # an exception here could strike between the start of a task and its bookkeeping

    def _hear(self, name, text):
        task = self._tasks[name]
        if text == task_status.ASKED:
            task.is_asked = True
            self._events.put(functools.partial(self._heed, task))
        elif text == task_status.LEAVING:
            task.is_leaving = True
        elif text := task.hear(text):
            self._events.put(functools.partial(self._say, text))  # a terminal may block its writer

    def _next_end(self, deadline=math.inf):
        """Waits for a task to end, and handles all other events meanwhile; returns the task, or None after `deadline`.

        Raises KeyboardInterrupt on Ctrl-C.
        """
        while True:
            now = time.monotonic()
            if now - self._looked >= 1:
                looked, self._looked = self._looked, now
                self._look(looked)
            for task in self._starting():
                if task.starts_at <= now:
                    task.start(self._server)
            soon = min([deadline, self._looked + 1, *(task.starts_at for task in self._starting())])
            try:
                event = self._events.get(timeout=max(0, soon - now))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    return None
                continue
            if callable(event):
                event()
                continue
            name, status = event
            if name is None:
                how = self._how_server_ended()
                raise StarterEnded(f"{STARTER} {how}{self._what_to_do()} (log: {self._server.log})")
            task = self._tasks[name]
            task.end(status)
            if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
                before, self._oom_kills = self._oom_kills, count_oom_kills()
                task.ran_out = self._oom_kills > before
            return task

    def _heed(self, task):
        """Ends the run when the chief, which saves checkpoints, was asked to end. Raises KeyboardInterrupt, as Ctrl-C does."""
        if self._is_stopping or not self._ends_with_chief or self._has_ended():
            return
        if task is self._chief:
            self._say(f"{task.name} was asked to end (SIGTERM): it writes the result, so the run stops with it")
            raise KeyboardInterrupt
        if self._settings.run.pace != "own":
            self._say(
                f"{task.name} was asked to end (SIGTERM), but the workers of {self._settings.run.scheme} wait for each other, "
                "and none can leave: it is restarted"
            )

    def hear_request(self, request):
        """Queues a `control.Request` of workers to join or leave. Called from any thread."""
        self._events.put(functools.partial(self._answer, request))

    def _answer(self, request):
        is_join = request.what == "join"
        try:
            if self._is_stopping or self._has_ended():
                raise UserError(control.ENDING["join" if is_join else "leave"])
            line = self._join(request) if is_join else self._leave(request.count)
        except UserError as error:
            request.answer(str(error), is_error=True)
        else:
            self._say(line)
            request.answer(line)

    def _join(self, request):
        """Starts workers in free places; returns a line that names them. Raises a `UserError` if that is impossible."""
        if request.hosts:
            raise UserError("the run is on one machine: `bash common/join.sh RUN COUNT` lets workers join")
        control.check_code(request, self.code)
        those = control.first(request.count, [task for task in self._workers if task.has_left], len(self._workers))
        for task in those:
            task.start(self._server)
        return control.joining(those)

    def _leave(self, count):
        """Asks the last workers to leave; returns a line that names them. Raises a `UserError` if that is impossible."""
        going = control.last(count, [task for task in self._workers[1:] if task.is_running and not task.is_leaving])
        for task in going:
            task.is_leaving = True
            self._server.signal(task.name, signal.SIGTERM)
        return control.leaving(going)

    def _what_to_do(self):
        """Returns a hint to `--resume`, for the end of a line, if there is a checkpoint."""
        return "; --resume goes on" if has_checkpoint(self._chief.run_dir) else ""

    def _starting(self):
        return [task for task in self._tasks.values() if task.starts_at is not None]

    def _how_server_ended(self):
        status, printed = self._server.status(), ""
        if status is None:
            return "has ended"
        with contextlib.suppress(OSError):
            printed = Path(self._server.log).read_text(errors="replace")
        if status < 0:
            return killed_by(-status, self._oom_kills)
        return of_memory(printed) or f"failed ({status}): {last_error(printed, '')}"

    def _look(self, last_look):
        """Kills tasks that send no heartbeat or make no progress.

        Raises:
          TrainingFailed: if the fork server hangs, if all workers wait for each other, or if a lock is gone.
        """
        if self._chief.run_dir:  # a check has none
            check_locks(self._chief.run_dir)
        now, tasks = time.monotonic(), [task for task in self._tasks.values() if task.is_running]
        if now - last_look > 2:  # this process itself was stopped, and missed heartbeats
            self._server.heard = max(now, self._server.heard)
            for task in tasks:
                task.heard, task.progressed = max(now, task.heard), max(now, task.progressed)
            return
        hang_secs = self._settings.hang_secs
        patience = max(SERVER_SECS, hang_secs or 60)
        if now - self._server.heard > patience:
            self._server.kill()
            raise StarterEnded(f"{STARTER} gave no sign of life for {patience:g} s and was killed{self._what_to_do()}")
        if not hang_secs:
            return
        for task in tasks:
            if now - task.heard > hang_secs:
                self._kill(task, f"gave no sign of life for {hang_secs:g} s{_while(task.progress)}")
        if not self._is_stopping:
            self._look_for_progress(now, [task for task in tasks if task.progress and not task.why_killed])

    def _look_for_progress(self, now, tasks):
        away = [task for task in self._tasks.values() if task.starts_at is not None or task.why_killed and task.is_running]
        if away or any(task.job == "ps" and not task.progress.waits for task in tasks):
            for task in tasks:  # any of them may have waited for a task that is not back yet
                if task.job != "ps":
                    task.progressed = now
        stalled = [task for task in tasks if now - task.progressed > self._limit(task.progress)]
        for task in stalled:
            if not task.progress.waits:
                limit = self._limit(task.progress)
                self._kill(task, f"made no progress for {limit:.0f} s{_while(task.progress)}")
        workers = [task for task in self._workers if task.is_running and task not in self._evaluators]
        if workers and all(task in stalled and task.progress.waits for task in workers):
            each = ", ".join(f"{task.name} for {now - task.progressed:.0f} s{_while(task.progress)}" for task in workers[:4])
            raise TrainingFailed(f"no worker makes progress: {each}{', ...' if workers[4:] else ''}{self._what_to_do()}")

    def _limit(self, progress):
        """Returns the time limit, in seconds, of the task's current activity."""
        hang_secs, expected = self._settings.hang_secs, progress.longest
        if expected is None and progress.what in self._check_secs:
            # The check had the cores to itself; now all tasks share them.
            expected = self._check_secs[progress.what] * max(1, len(self._tasks) / (os.cpu_count() or 1))
        return 10 * hang_secs if expected is None else max(hang_secs, 10 * expected)

    def _kill(self, task, why):
        task.why_killed = why
        task.heard = task.progressed = math.inf  # so that it is killed only once
        self._server.signal(task.name, signal.SIGKILL)

    def _watch(self):
        needed = [self._chief, *self._evaluators] if self._ends_with_chief else self._workers
        while any(task.status != 0 for task in needed):
            task = self._next_end()
            if task.status != 0 and (task in needed or not self._has_ended()):
                self._mend(task)
            elif self._may_be_asked_again(task):
                task.starts_at = time.monotonic() + CHIEF_SECONDS
            elif task.has_left and self._settings.max_workers:
                self._say(f"the place of {task.name} is free")
        for task in self._starting():
            task.starts_at = None  # not needed any more
        deadline = time.monotonic() + PS_SECONDS
        with contextlib.suppress(StarterEnded):  # no task is needed any more
            while any(task.is_running for task in self._tasks.values()):
                if self._next_end(deadline) is None:
                    break  # a ps restarted at the very end may have missed that a worker is done
        return 0

    def _may_be_asked_again(self, task):
        """Whether this worker has succeeded, but the chief was restarted meanwhile.

        The chief may have dismissed it before failing. If the ps has lost the report as well, the chief waits for a new one.
        """
        if not self._ends_with_chief or self._in_ring or self._has_ended():
            return False
        is_one = task.job == "worker" and task is not self._chief and task not in self._evaluators
        if not is_one or task.has_left or task.status != 0:
            return False
        return not self._chief.is_running or self._chief.started > task.started

    def _has_ended(self):
        return self._ends_with_chief and self._chief.status == 0

    def _mend(self, task):
        """Schedules the restart of a failed task, the first time at once.

        A worker that failed while leaving counts as gone: a stand-in process only reports that, and returns its leased samples.
        """
        self._must_be_mendable(task)
        if task.is_leaving and not task.stands_in:
            self._say(f"{task.name} {task.how()} while it was leaving; another process leaves in its place")
            task.stands_in, task.starts_at = True, time.monotonic()
            return
        task.restarts += 1
        task.restarted.append(time.monotonic())
        count = len(task.restarted)
        pause = min(2 ** (count - 2), MOST_PAUSE) if count > 1 else 0
        when = f" in {pause} s" if pause else ""
        self._say(f"{task.name} {task.how()}; restart {count} of {self._settings.max_restarts}{when}")
        self._start_again(task, time.monotonic() + pause)

    def _must_be_mendable(self, task):
        """Raises the error that ends the run, unless a restart of this task may help."""
        if task.status == 2:  # the user's mistake
            raise UserError(task.last_words())
        log = "" if task.is_shown else f" (log: {task.log})"
        if task.status == FAILED_FOR_GOOD:
            raise TrainingFailed(f"{task.last_words()}{log}")
        task.restarted = [moment for moment in task.restarted if time.monotonic() - moment < HOUR]
        has_another = task.stands_in or not task.is_leaving
        if has_another and len(task.restarted) >= self._settings.max_restarts:
            raise TrainingFailed(f"{task.name} {task.how()} after {len(task.restarted)} restarts: {task.last_words()}{log}")

    def _start_again(self, task, moment):
        """Schedules the restart of a task at this moment, and of the tasks that it depends on."""
        others = [other for other in self._tasks.values() if other is not task]
        if self._in_ring and not self._has_ended():
            # Workers in an all-reduce wait for ever for a missing one, so all of them restart.
            for other in others:
                other.starts_at = None
                self._server.signal(other.name, signal.SIGKILL)
            while any(other.is_running for other in others):
                self._next_end()
        task.starts_at = moment
        if (self._in_ring or self._ends_with_chief) and not self._has_ended():
            for other in others:
                is_asked = self._in_ring or other not in self._evaluators and not other.has_left
                if not other.is_running and other.starts_at is None and is_asked:
                    other.starts_at = moment  # it had finished, but the restarted chief needs all reports again

    def _stop_workers(self):
        """Stops the workers; the chief saves a checkpoint, for which it needs the ps. A second Ctrl-C ends them at once.

        After the death of a ps, or in a ring of a worker, the others get only the time to write a checkpoint.
        """
        self._say("stopping; Ctrl-C again stops at once")
        self._is_stopping = True
        for task in self._starting():
            task.starts_at = None
        for worker in self._workers:
            if not worker.is_asked:  # a second signal would end it at once
                self._server.signal(worker.name, self._signal_to_stop(worker))
        deadline, is_told = time.monotonic() + STOP_SECONDS, False
        with contextlib.suppress(KeyboardInterrupt, TrainingFailed):
            while any(worker.is_running for worker in self._workers):
                dead = [task for task in self._tasks.values() if self._is_missed(task)]
                if dead and not is_told:
                    self._say(f"{dead[0].name} {dead[0].how()} and is not restarted: the run ends without it")
                    deadline, is_told = time.monotonic() + WRITE_SECONDS, True
                if self._next_end(deadline) is None:
                    break

    def _is_missed(self, task):
        """Whether this task has died while the run stops, and workers may wait for it."""
        return not task.is_running and (task.status != 0 if task.job == "ps" else self._in_ring and task.status < 0)

    def _signal_to_stop(self, worker):
        """Returns the stop signal for a worker: to a scheme's worker SIGTERM would mean leaving alone, hence SIGINT."""
        is_of_scheme = self._ends_with_chief and worker not in self._evaluators
        return signal.SIGINT if is_of_scheme else signal.SIGTERM


STARTER = "the process that starts the tasks"


def _stop():
    raise KeyboardInterrupt


def _while(progress):
    return f" while {progress.what}" if progress else ""
