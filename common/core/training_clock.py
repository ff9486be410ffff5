"""The seconds that parameters have been trained for. Durations are measured by monotonic clocks: a wall clock may be set."""

import contextlib
import os
import threading
import time
from typing import Any

from common import tf

TELL_SECS = 0.5  # how often a worker tells the ps
# By so much more than the time since the last call may another worker have said it by the wall clock of a ps; more than that
# tells that this clock was set meanwhile, so nobody knows, and the call does not count.
SLACK_SECS = 2.0
SAY_SECS = 0.2  # how often a worker says that it prepares, where others wait for it


class TrainingClock:
    """For how many seconds the parameters on the ps have been trained, by all workers together.

    The ps of the global step keeps the number. Each worker measures with a monotonic clock of its own, and tells the ps twice a
    second how far it has come; the largest number holds. Parameters that are restored begin with the seconds of their
    checkpoint. So neither an outage of a ps counts, nor updates that were rolled back, nor a wait before the first round.

    What comes before the first call of a session does not count. Nor does a call if TensorFlow prepares its graph in it, as it
    does in the first one of its kind. Where workers wait for each other, the time in which another worker does so, or starts
    again, does not count either: of such a call only what comes after the last moment at which another worker has said so, by
    the wall clock of the ps. If that is set meanwhile, the call does not count.

    Args:
      device: of the global step.

    Attributes:
      is_training: whether this worker trains, or is about to; to be set False at its end: a wait for others is no training.
      waits: whether workers wait for each other.
      variables: those on the ps; they have no values until `restart`.
      told: tensors of the same moment: the seconds that the ps has heard of, float64, and the number of their life, int64.
    """

    def __init__(self, device):
        self.is_training, self.waits = True, False
        # At the last `tick`: the seconds, the number of the life, and this worker's clock. Another thread reads it as a whole.
        self._last: tuple[float, int, float] | None = None
        self._runs, self._next = False, 0.0
        self._known = 0  # how often others had said that they prepare
        self._prepared: set = set()  # kinds of calls
        self._is_in_call, self._prepares, self._has_prepared = False, threading.Event(), False
        self._session: Any = None
        self._saying: Any = None
        options = {"trainable": False, "collections": [], "use_resource": True}
        with tf.device(device), tf.control_dependencies(None):
            trained = tf.get_variable("trained", initializer=tf.zeros([], tf.float64), **options)
            life = tf.get_variable("life", initializer=tf.zeros([], tf.int64), **options)  # since a `restart`
            said = tf.get_variable("said", initializer=tf.zeros([], tf.int64), **options)  # how often one said that it prepares
            said_at = tf.get_variable("said_at", initializer=tf.zeros([], tf.float64), **options)  # by the ps's wall clock
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
            was_set = since > self._seconds - self._before + SLACK_SECS  # it was said in this call, or just before
            counted = tf.where(was_set, self._before, counted)
            seconds = tf.where(tf.equal(said.read_value(), self._known_there), self._seconds, counted)
            most = tf.where(is_same, tf.maximum(trained.read_value(), seconds), trained.read_value())
            with tf.control_dependencies([most]):
                told = trained.assign(most, read_value=False)
            self._tell = is_same, tf.maximum(most, seconds), said.read_value(), told

    def restart(self, session, seconds):
        """The chief's, when the parameters have their values: they were trained for so many seconds."""
        session.run(self._restart, {self._seconds: seconds, self._life: int.from_bytes(os.urandom(7), "big")})

    def stop(self):
        """The session of this worker is lost, or not open yet: `tick` begins anew with what the ps says."""
        self._last, self._runs = None, False
        self._prepared.clear()
        if self._is_in_call:  # which is made once more, in another session
            self._prepares.set()

    def come(self, session):
        """To be called when this worker has a session, where workers wait for each other, and others still wait for it."""
        self._session = session
        session.run(self._say)
        if self._saying is None:
            self._saying = threading.Thread(target=self._say_often, daemon=True)
            self._saying.start()

    def _say_often(self):
        pause = threading.Event()
        while self._prepares.wait():
            with contextlib.suppress(tf.errors.OpError, RuntimeError):  # the session has failed; the next one is to come
                self._session.run(self._say)
            pause.wait(SAY_SECS)

    @contextlib.contextmanager
    def call(self, kind):
        """A context for a call; calls of the same kind have the same graph."""
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
            # The number of others is of a moment in this call: taken for one before it, the clock of all would run fast.
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
        """Returns the seconds up to now, by this worker's clock, or up to its end; 0 before its first `tick`."""
        return self._until(self._last, self._runs and self._counts())

    def saved(self, life):
        """Returns the seconds to save with parameters of the life with this number, 0 if the clock is of another life.

        Where workers wait for each other, those up to the present call: it may be one that does not count.
        """
        last = self._last
        return self._until(last, self._runs and self._counts() and not self.waits) if last and last[1] == life else 0.0

    def _until(self, last, runs):
        return (last[0] if last else 0.0) + (time.monotonic() - last[2] if last and runs else 0.0)
