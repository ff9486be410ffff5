"""The seconds of training of the parameters, measured by monotonic clocks, as a wall clock may be set."""

import contextlib
import os
import threading
import time
from typing import Any

from common import tf

TELL_SECS = 0.5  # period at which a worker reports to the ps
# Tolerance for the age of another worker's notice, by the wall clock of the ps, beyond the time since the last call. A larger
# age means that this clock was set meanwhile, so the call does not count.
SLACK_SECS = 2.0
SAY_SECS = 0.2  # period at which a preparing worker notifies the others, if they wait for it


class TrainingClock:
    """The seconds of training of the parameters on the ps, by all workers together.

    The ps of the global step keeps the number. Each worker measures with its own monotonic clock, and reports its seconds to
    the ps twice a second; the maximum counts. Restored parameters start at the seconds of their checkpoint. So outages of a ps,
    updates that were rolled back, and the wait before the first round do not count.

    The time before the first call of a session does not count. Nor does the first call of each kind, in which TensorFlow
    prepares the graph. If workers wait for each other, the time in which another worker prepares or restarts does not count
    either: such a call counts only from the last notice of another worker on, by the wall clock of the ps. If that clock is
    set meanwhile, the call does not count.

    Args:
      device: of the global step.

    Attributes:
      is_training: whether this worker trains, or is about to; set to False at its end, as a wait for others is no training.
      waits: whether workers wait for each other.
      variables: the variables on the ps, uninitialized until `restart`.
      told: a consistent pair of tensors: the seconds reported to the ps, float64, and the id of their life, int64.
    """

    def __init__(self, device):
        self.is_training, self.waits = True, False
        # At the last `tick`: seconds, id of the life, this worker's clock. A tuple, as another thread reads it.
        self._last: tuple[float, int, float] | None = None
        self._runs, self._next = False, 0.0
        self._known = 0  # number of notices seen that a worker prepares
        self._prepared: set = set()  # kinds of calls
        self._is_in_call, self._prepares, self._has_prepared = False, threading.Event(), False
        self._session: Any = None
        self._saying: Any = None
        options = {"trainable": False, "collections": [], "use_resource": True}
        with tf.device(device), tf.control_dependencies(None):
            trained = tf.get_variable("trained", initializer=tf.zeros([], tf.float64), **options)
            life = tf.get_variable("life", initializer=tf.zeros([], tf.int64), **options)  # random, new at each `restart`
            said = tf.get_variable("said", initializer=tf.zeros([], tf.int64), **options)  # count of notices of preparation
            said_at = tf.get_variable("said_at", initializer=tf.zeros([], tf.float64), **options)  # by the ps wall clock
            self.variables = [trained, life, said, said_at]
            self._seconds, self._life = tf.placeholder(tf.float64, []), tf.placeholder(tf.int64, [])
            self._before, self._known_there = tf.placeholder(tf.float64, []), tf.placeholder(tf.int64, [])
            values = self._seconds, self._life, tf.zeros([], tf.int64), tf.zeros([], tf.float64)
            pairs = zip(self.variables, values, strict=True)
            self._restart = [variable.assign(value, read_value=False) for variable, value in pairs]
            self._say = [said.assign_add(1, read_value=False), said_at.assign(tf.timestamp(), read_value=False)]
            self.told = trained.read_value(), life.read_value()
            self._look = trained.read_value(), life.read_value(), said.read_value()
            is_same = tf.equal(life.read_value(), self._life)  # else the parameters were restored meanwhile
            since = tf.maximum(tf.timestamp() - said_at.read_value(), 0.0)
            counted = tf.minimum(self._before + since, self._seconds)
            was_set = since > self._seconds - self._before + SLACK_SECS  # else the notice came in this call, or just before
            counted = tf.where(was_set, self._before, counted)
            seconds = tf.where(tf.equal(said.read_value(), self._known_there), self._seconds, counted)
            most = tf.where(is_same, tf.maximum(trained.read_value(), seconds), trained.read_value())
            with tf.control_dependencies([most]):
                told = trained.assign(most, read_value=False)
            self._tell = is_same, tf.maximum(most, seconds), said.read_value(), told

    def restart(self, session, seconds):
        """Called by the chief after the parameters got their values, with their seconds of training."""
        self.stop()
        life = int.from_bytes(os.urandom(7), "big")
        session.run(self._restart, {self._seconds: seconds, self._life: life})
        self._last = seconds, life, time.monotonic()

    def stop(self):
        """Called when a new session begins, as the earlier one is lost: the next `tick` starts from the ps's values."""
        self._last, self._runs = None, False
        self._prepared.clear()
        if self._is_in_call:  # the call is repeated in another session
            self._prepares.set()

    def come(self, session):
        """To be called when this worker has a session, if workers wait for each other, while the others still wait for it."""
        self._session = session
        session.run(self._say)
        if self._saying is None:
            self._saying = threading.Thread(target=self._say_often, daemon=True)
            self._saying.start()

    def _say_often(self):
        pause = threading.Event()
        while self._prepares.wait():
            with contextlib.suppress(tf.errors.OpError, RuntimeError):  # the session has failed; a new one will follow
                self._session.run(self._say)
            pause.wait(SAY_SECS)

    @contextlib.contextmanager
    def call(self, kind):
        """A context for a session call; calls of the same kind run the same graph."""
        self._is_in_call = True
        if kind not in self._prepared:
            self._prepared.add(kind)
            self._prepares.set()
        try:
            yield
        finally:
            self._has_prepared |= self._prepares.is_set()
            self._is_in_call = False
            self._prepares.clear()

    def tick(self, session):
        """To be called before each call of a worker."""
        if not (self._runs or self.is_training):
            return
        if not self._runs:
            seconds, life, self._known = session.run(self._look)
            self._last, self._next, self._runs = (seconds, life, time.monotonic()), 0.0, True
        now, (before, life, ticked) = time.monotonic(), self._last or (0.0, 0, 0.0)
        seconds = before + now - ticked if self._counts() else before
        if now >= self._next or not self.is_training or self._has_prepared:
            told = {self._seconds: seconds, self._before: before, self._life: life, self._known_there: self._known}
            is_same, most, known, _ = session.run(self._tell, told)
            # A larger number from another worker is of a moment within this call, so the clock is read after it; with a time
            # before the call, the common clock would run fast.
            now, seconds = time.monotonic() if most > seconds else now, most
            self._known = known if self.waits else self._known
            self._runs, self._next, self._has_prepared = bool(is_same) and self.is_training, now + TELL_SECS, False
            if not is_same:
                self._last = None
                return
        self._last = seconds, life, now

    def _counts(self):
        """Whether the time since the last `tick` counts."""
        return bool(self._prepared) and not self._has_prepared and not self._prepares.is_set()

    def seconds(self):
        """Returns the seconds of training up to now, or to this worker's end; 0 before its first `tick`."""
        return self._until(self._last, self._runs and self._counts())

    def saved(self, life):
        """Returns the seconds to save with the parameters of this life; 0 if the clock belongs to another life.

        If workers wait for each other, the present call is left out, as it may not count.
        """
        last = self._last
        return self._until(last, self._runs and self._counts() and not self.waits) if last and last[1] == life else 0.0

    def _until(self, last, runs):
        return (last[0] if last else 0.0) + (time.monotonic() - last[2] if last and runs else 0.0)
