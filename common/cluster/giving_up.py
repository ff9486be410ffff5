"""In clusters started by hand, tasks give up an unreachable task after `--give_up_secs`."""

import sys
import threading
import time

from common import tf
from common.cluster import membership
from common.core import signals, task_status

LOOK_SECS = 1.0


class GiveUpHook(tf.train.SessionRunHook):
    """Gives up tasks that this one waits for and cannot reach for `--give_up_secs`.

    A task is away while this one waits for it and its address accepts no connection. The timer restarts when the set of absent
    tasks or the global step changes: with a new step, training goes on, and only the connection between the two may be down.

    After its training the chief needs no other worker for the result; any other waiting task exits with status 1.

    Args:
      task: a `common.cluster.TaskSpecDef` of a worker.
      server: its `tf.train.Server`.
      settings: all flags.
      step: the global step.
      rendezvous: its `membership.Rendezvous`.
    """

    def __init__(self, task, server, settings, step, rendezvous):
        self._task, self._server, self._settings = task, server, settings
        self._step, self._rendezvous, self._session = step, rendezvous, None
        threading.Thread(target=self._run, daemon=True).start()

    def after_create_session(self, session, coord):
        """Keeps the session, to read the step in it."""
        self._session = session

    def _run(self):
        secs, since, known, pause = self._settings.give_up_secs, 0.0, None, threading.Event()
        while not pause.wait(min(LOOK_SECS, secs / 4)):
            away = task_status.away()
            if self._session is None and self._task.is_master() and not self._is_ps(away):
                away = []  # workers that have not started yet have --start_secs
            seen = away, self._read(away)
            if not away or seen != known:
                since, known = time.monotonic(), seen
            elif time.monotonic() - since >= secs:
                self._give_up(away)
                known = None

    def _is_ps(self, away):
        return any(name.startswith("ps ") for name in away)

    def _read(self, away):
        if not away or self._is_ps(away) or self._session is None:
            return None
        try:
            return int(self._session.run(self._step))
        except (tf.errors.OpError, RuntimeError):
            return None  # the session has failed or was closed

    def _give_up(self, names):
        secs, workers = self._settings.give_up_secs, {int(name[7:]) for name in names if name.startswith("worker ")}
        who = f"{', '.join(map(task_status.with_address, names))} could not be reached for --give_up_secs={secs:g}"
        if self._rendezvous.is_gathering and workers:
            task_status.tell(f"{who}: the result is without {'it' if len(workers) == 1 else 'them'}")
            self._rendezvous.give_up(workers)
            return
        how = "restart all tasks with --resume, which continues from the newest checkpoint"
        print(f"{self._settings.run.scheme}: {who}: {how}", file=sys.stderr, flush=True)
        what = self._task, self._server, sorted(workers)
        saying = threading.Thread(target=membership.say_done, args=what, daemon=True)
        saying.start()
        saying.join(membership.LEFT_SECONDS)  # the ps themselves may be unreachable
        signals.exit_at_once(1)
