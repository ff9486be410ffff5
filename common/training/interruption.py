"""Interruption of a worker by a signal: a stop after the present call, or departure for good."""

import functools
import math
import os
import signal
import threading
import time
from typing import Any

from common import tf
from common.cluster import membership
from common.core import STANDS_IN, run_folder, say_asked, say_leaving, signals, status_of_leaving, tell
from common.scheme import BIASED, PARTS
from common.training.result import REPORT, STAY


class Interruption(tf.train.SessionRunHook):
    """Handles Ctrl-C, SIGTERM and SIGHUP: a request to stop after the present call, or exit if there is nothing to save.

    To be created in the main thread; `common.cli` blocks the signals before tensorflow starts threads: `signals.hear_signals`.

    It is the first hook, to notice a new session early: another worker may train long before the chief has called all of its
    hooks, including the one for the first checkpoint.

    Args:
      leaver: a `Leaver`, for a worker that SIGTERM asks to leave. None if SIGTERM is like any other signal.
      waits_for_others: whether workers wait for each other. If true, SIGTERM waits for the session, even before there is one,
        unless training has ended for this worker; until it has left, it waits for the others as before.

    Attributes:
      requested: whether the worker should stop.
      leaves: whether it then leaves for good.
      report: its final report to the chief, once submitted.
    """

    def __init__(self, leaver=None, waits_for_others=False):
        self.requested = self.leaves = False
        self.report: Any = None
        self.release = lambda: None  # called on a request; may wait for a session
        self._is_training = self._has_ended = False
        self._leaver, self._is_left_to_it, self._waits_for_others = leaver, False, waits_for_others
        signals.hear_signals(signals.INTERRUPTING_SIGNALS, self._hear)

    def _hear(self, number):
        if number == signal.SIGHUP and self.requested:
            return  # the shell and the system may both send it: that is no second request
        leaves = number == signal.SIGTERM and self._leaver is not None
        if number == signal.SIGTERM and not leaves:
            say_asked()
        if self.requested or not (self._is_training or leaves):
            signals.exit_at_once(130)
        is_by_session = self._is_training or self._waits_for_others and not self._has_ended
        self.leaves, self._is_left_to_it = leaves, leaves and not is_by_session
        self.requested = True
        if leaves:
            say_leaving()
        if not leaves or self._is_left_to_it:
            react = functools.partial(self._leaver, self.report) if self._is_left_to_it else self.release
            threading.Thread(target=react, daemon=True).start()  # a thread, so that a second signal is handled

    def training_begins(self):
        """Marks the start of training: from now on there is something to save."""
        self._is_training = not self._has_ended

    def after_create_session(self, session, coord):
        """Marks the start of training, before all other hooks."""
        if self._is_left_to_it:
            threading.Event().wait()  # the leaver ends this process
        self.training_begins()

    def training_ends(self):
        """Marks the end of training: all is saved, and a signal should end the wait for others at once."""
        self._is_training, self._has_ended = False, True


class Leaver:
    """Function of a report that ends a worker for good; called in a thread, while the worker does not train.

    Args:
      task: a `common.cluster.TaskSpecDef` of a worker.
      settings: all flags.

    Attributes:
      server: an event, set once the task's server runs.
    """

    def __init__(self, task, settings):
        self._task, self._settings, self.server = task, settings, threading.Event()

    def __call__(self, report=None):
        task, settings = self._task, self._settings
        if report is None:  # the worker has not trained yet
            report = [task.shard_index, *[0.0] * (len(REPORT) - 1), *[math.nan] * len(PARTS), 0.0, 0.0]
        report = [*report[: -len(STAY)], time.monotonic() - settings.run.began, time.time()]
        run_folder.write_left(settings.run_dir, task.shard_index, report)
        self.server.wait()
        membership.say_gone(task, task.start_server(), report)
        say_left(task.shard_index, settings, report)
        signals.exit_at_once(status_of_leaving())


def say_left(index, settings, report):
    """Tells the user that this worker leaves for good."""
    rest = ""
    if settings.compress in BIASED:
        rest = f"; its error feedback of --compress={settings.compress} is lost"
    updates = int(report[REPORT.index("updates")])
    how = f"has left after {updates:,} updates, as it was asked to (SIGTERM)"
    how = "was lost" if os.environ.get(STANDS_IN) else how
    samples = "the others train its samples" if settings.max_workers else "its share of the samples is no longer used"
    tell(f"worker {index} {how}: it is neither restarted nor waited for, and {samples}{rest}")
