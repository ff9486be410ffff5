"""Listeners to the chief's measurements: a function of the user's own, and the end of training when nothing improves."""

import contextlib
import io
import math
import queue
import threading
import time

from common.core import doing, tell
from common.data import datasets

BEHIND = 100  # calls that wait, from which on a line says so


class Patience:
    """Asks for the end of training when so many evaluations in turn have brought no smaller validation loss.

    Evaluations of the same parameters count once: none count while the workers wait for each other at the start.

    Args:
      patience: how many.
      stop: function that asks for the end.
    """

    def __init__(self, patience, stop):
        self._patience, self._stop = patience, stop
        self._best, self._without, self._step = math.inf, 0, None

    def __call__(self, step, values):
        """Looks at what was measured at a global step, {name: value}."""
        loss = values.get("validation_loss")
        if loss is None or step == self._step or self._without >= self._patience:
            return
        self._step, self._without = step, 0 if loss < self._best else self._without + 1
        self._best = min(self._best, loss) if math.isfinite(loss) else self._best
        if self._without >= self._patience:
            tell(f"no smaller validation loss than {self._best:.4f} in {self._patience} evaluations: training ends")
            self._stop()


class Callback:
    """Calls a function of the user's own, function(step, metrics), in a thread of its own: training never waits for it.

    The user sees its output. If it raises, a line says so, the first time, and training goes on; so do the calls. If
    it returns True, training ends.

    Args:
      flag: what the function is called in lines, "--callback=FILE.py:FUNCTION".
      function: of the global step, a whole number, and what was measured there, {name: value}.
      stop: function that asks for the end of training.
      most_secs: for how long the end of the run waits for one call.
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
                    said = f"{self._flag} raised {datasets.one_line(error)}"
                    tell(f"{said}; training goes on, and its later errors are not shown")
                self._has_failed = True
            for line in printed.getvalue().splitlines():
                tell(line)

    def close(self):
        """Waits until all calls are made; if one takes longer than `most_secs`, the rest are left out, and a line says so."""
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
