"""Listeners to the chief's measurements: a user's callback, and early stopping by patience."""

import contextlib
import io
import math
import queue
import threading
import time

from common.core import doing, tell
from common.data import one_line

BEHIND = 100  # queued calls from which on a warning is shown


class Patience:
    """Early stopping: ends training after `patience` evaluations without a smaller validation loss.

    Evaluations of the same parameters count once, so none count while the workers wait for each other at the start.

    Args:
      patience: number of evaluations.
      stop: function that requests the end of training.
    """

    def __init__(self, patience, stop):
        self._patience, self._stop = patience, stop
        self._best, self._without, self._step = math.inf, 0, None

    def __call__(self, step, values):
        """Handles the measurements at a global step, {name: value}."""
        loss = values.get("validation_loss")
        if loss is None or step == self._step or self._without >= self._patience:
            return
        self._step, self._without = step, 0 if loss < self._best else self._without + 1
        self._best = min(self._best, loss) if math.isfinite(loss) else self._best
        if self._without >= self._patience:
            tell(f"no smaller validation loss than {self._best:.4f} in {self._patience} evaluations: training ends")
            self._stop()


class Callback:
    """Calls a user's function(step, metrics) in a thread of its own, so training never waits for it.

    Its output is shown to the user. If it raises, the first error is shown, and training and calls go on. If it returns True,
    training ends.

    Args:
      flag: name of the function in messages, "--callback=FILE.py:FUNCTION".
      function: function of the global step, a whole number, and the measurements there, {name: value}.
      stop: function that requests the end of training.
      most_secs: timeout of one call at the end of the run.
    """

    def __init__(self, flag, function, stop, most_secs=60):
        self._flag, self._function, self._stop, self._most_secs = flag, function, stop, most_secs
        self._calls: queue.Queue = queue.Queue()
        self._has_failed = self._is_behind = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __call__(self, step, values):
        """Queues a call of the function; it runs after the earlier calls have returned. May be called from any thread."""
        self._calls.put((step, values))
        if self._calls.qsize() > BEHIND and not self._is_behind:
            self._is_behind = True
            tell(f"{self._flag} is slow: {BEHIND} calls wait for it, and the end of the run will, too")

    def _run(self):
        while (call := self._calls.get()) is not None:
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    ends = self._function(*call)
                if ends is True:
                    self._stop()
            except (Exception, SystemExit) as error:
                if not self._has_failed:
                    said = f"{self._flag} raised {one_line(error)}"
                    tell(f"{said}; training goes on, and its later errors are not shown")
                self._has_failed = True
            for line in printed.getvalue().splitlines():
                tell(line)

    def close(self):
        """Waits for all queued calls; if one takes longer than `most_secs`, drops the rest with a warning."""
        self._calls.put(None)
        waiting, began = self._calls.qsize(), time.monotonic()
        while self._thread.is_alive():
            doing(f"waiting for {self._flag}")
            self._thread.join(0.1)
            if self._calls.qsize() != waiting:
                waiting, began = self._calls.qsize(), time.monotonic()
            elif time.monotonic() >= began + self._most_secs:
                tell(f"{self._flag} has not returned within {self._most_secs:g} s: the run ends without it")
                return
