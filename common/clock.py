"""The seconds that parameters have been trained for. Durations are measured by monotonic clocks: a wall clock may be set."""

import os
import time

from common import tf

TELL_SECS = 0.5  # how often a worker tells the ps
MOST_AHEAD = 1.0  # seconds that may have passed since a worker last did, beyond which nobody has trained
STARTS = -1  # what a worker knows of those that came until its own first call has ended


class TrainingClock:
    """For how many seconds the parameters on the ps have been trained, by all workers together.

    The ps of the global step keeps the number. Each worker measures with a monotonic clock of its own, and tells the ps twice a
    second how far it has come; the largest number holds. Parameters that are restored begin with the seconds of their
    checkpoint. So neither an outage of a ps counts, nor updates that were rolled back, nor a wait before the first round.

    Where workers wait for each other, all of them wait while one of them is started, or started again, and prepares its graph.
    So neither a worker's first call of a session counts there, nor a call until the moment at which another worker came, or had
    ended its first call.

    Args:
      device: of the global step.

    Attributes:
      is_training: whether this worker trains, or is about to; to be set False at its end: a wait for others is no training.
      waits: whether workers wait for each other.
      has_called: whether the first call of this session has ended; to be set True then.
      variables: those on the ps; they have no values until `restart`.
      told: tensors of the same moment: the seconds that the ps has heard of, float64, and the number of their life, int64.
    """

    def __init__(self, device):
        self.is_training, self.waits, self.has_called = True, False, False
        self._last: tuple[float, int] | None = None  # at the last `tick`: the seconds, and the number of the life
        self._runs, self._ticked, self._next = False, 0.0, 0.0
        self._came = STARTS  # how often workers had come, as far as this one knows
        options = {"trainable": False, "collections": [], "use_resource": True}
        with tf.device(device), tf.control_dependencies(None):
            trained = tf.get_variable("trained", initializer=tf.zeros([], tf.float64), **options)
            when = tf.get_variable("told", initializer=tf.zeros([], tf.float64), **options)  # by the ps's wall clock; 0: never
            life = tf.get_variable("life", initializer=tf.zeros([], tf.int64), **options)  # since a `restart`
            came = tf.get_variable("came", initializer=tf.zeros([], tf.int64), **options)
            came_at = tf.get_variable("came_at", initializer=tf.zeros([], tf.float64), **options)  # by that clock, the last one
            self.variables = [trained, when, life, came, came_at]
            self._seconds, self._life = tf.placeholder(tf.float64, []), tf.placeholder(tf.int64, [])
            self._before, self._known = tf.placeholder(tf.float64, []), tf.placeholder(tf.int64, [])
            self._restart = [
                trained.assign(self._seconds, read_value=False),
                when.assign(tf.zeros([], tf.float64), read_value=False),
                life.assign(self._life, read_value=False),
                came.assign(tf.zeros([], tf.int64), read_value=False),
                came_at.assign(tf.zeros([], tf.float64), read_value=False),
            ]
            self._come = [came.assign_add(1, read_value=False), came_at.assign(tf.timestamp(), read_value=False)]
            self.told = trained.read_value(), life.read_value()
            since = tf.where_v2(when.read_value() > 0, tf.timestamp() - when.read_value(), 0.0)
            self._look = trained.read_value() + tf.clip_by_value(since, 0.0, MOST_AHEAD), life.read_value(), came.read_value()
            is_same = tf.equal(life.read_value(), self._life)  # else the parameters were restored meanwhile
            starts, others_came = tf.equal(self._known, STARTS), tf.not_equal(came.read_value(), self._known)
            since = tf.where(starts, tf.zeros([], tf.float64), tf.maximum(tf.timestamp() - came_at.read_value(), 0.0))
            seconds = tf.where(others_came, tf.minimum(self._before + since, self._seconds), self._seconds)
            with tf.control_dependencies([since, others_came]):
                present = came.assign_add(tf.cast(starts, tf.int64)).read_value()
                come = came_at.assign(tf.where(starts, tf.timestamp(), came_at.read_value()), read_value=False)
            most = tf.where(is_same, tf.maximum(trained.read_value(), seconds), trained.read_value())
            moment = tf.where(is_same, tf.timestamp(), when.read_value())
            with tf.control_dependencies([most, moment, come]):
                told = [trained.assign(most, read_value=False), when.assign(moment, read_value=False)]
            self._tell = is_same, tf.maximum(most, seconds), present, told

    def restart(self, session, seconds):
        """The chief's, when the parameters have their values: they were trained for so many seconds."""
        session.run(self._restart, {self._seconds: seconds, self._life: int.from_bytes(os.urandom(7), "big")})

    def stop(self):
        """The session of this worker is lost, or not open yet: `tick` begins anew with what the ps says."""
        self._last, self._runs, self.has_called = None, False, False

    def come(self, session):
        """To be called when this worker has a session, before others stop waiting for it."""
        session.run(self._come)

    def tick(self, session):
        """To be called before each call of a worker."""
        if not (self._runs or self.is_training):
            return
        if not self._runs:
            seconds, life, came = session.run(self._look)
            self._last, self._ticked, self._next, self._runs = (seconds, life), time.monotonic(), 0.0, True
            self._came = STARTS if self.waits else came
        now, (before, life) = time.monotonic(), self._last or (0.0, 0)
        seconds = before + now - self._ticked
        if now >= self._next or not self.is_training or self._came == STARTS:
            told = {self._seconds: seconds, self._before: before, self._life: life, self._known: self._came}
            is_same, seconds, came, _ = session.run(self._tell, told)
            self._runs, self._next = bool(is_same) and self.is_training, now + TELL_SECS
            if self._came != STARTS or self.has_called:
                self._came = came
            if not is_same:
                self._last = None
                return
        self._last, self._ticked = (seconds, life), now

    def seconds(self):
        """Returns the seconds up to now, by this worker's clock, or up to its end; 0 before its first `tick`."""
        return self._until(self._last, self._runs)

    def saved(self, life):
        """Returns the seconds to save with parameters of the life with this number, 0 if the clock is of another life.

        Where workers wait for each other, those up to the present call: it may be one that does not count.
        """
        last = self._last  # another thread may call `tick` meanwhile
        return self._until(last, self._runs and not self.waits) if last and last[1] == life else 0.0

    def _until(self, last, runs):
        return (last[0] if last else 0.0) + (time.monotonic() - self._ticked if last and runs else 0.0)
