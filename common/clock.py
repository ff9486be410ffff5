"""The seconds that parameters have been trained for. Durations are measured by monotonic clocks: a wall clock may be set."""

import os
import time

from common import tf

TELL_SECS = 0.5  # how often a worker tells the ps
MOST_AHEAD = 1.0  # seconds that may have passed since a worker last did, beyond which nobody has trained


class TrainingClock:
    """For how many seconds the parameters on the ps have been trained, by all workers together.

    The ps of the global step keeps the number. Each worker measures with a monotonic clock of its own, and tells the ps twice a
    second how far it has come; the largest number holds. Parameters that are restored begin with the seconds of their
    checkpoint. So neither an outage of a ps counts, nor updates that were rolled back, nor a wait before the first round.

    Args:
      device: of the global step.

    Attributes:
      is_training: whether this worker trains, or is about to; to be set False at its end: a wait for others is no training.
      variables: those on the ps; they have no values until `restart`.
      told: tensors of the same moment: the seconds that the ps has heard of, float64, and the number of their life, int64.
    """

    def __init__(self, device):
        self.is_training = True
        self._mine: tuple[float, int] | None = None  # when this worker's clock showed zero seconds, and the number of the life
        self._next = 0.0
        options = {"trainable": False, "collections": [], "use_resource": True}
        with tf.device(device), tf.control_dependencies(None):
            trained = tf.get_variable("trained", initializer=tf.zeros([], tf.float64), **options)
            when = tf.get_variable("told", initializer=tf.zeros([], tf.float64), **options)  # by the ps's wall clock; 0: never
            life = tf.get_variable("life", initializer=tf.zeros([], tf.int64), **options)  # since a `restart`
            self.variables = [trained, when, life]
            self._seconds, self._life = tf.placeholder(tf.float64, []), tf.placeholder(tf.int64, [])
            self._restart = [
                trained.assign(self._seconds, read_value=False),
                when.assign(tf.zeros([], tf.float64), read_value=False),
                life.assign(self._life, read_value=False),
            ]
            self.told = trained.read_value(), life.read_value()
            since = tf.where_v2(when.read_value() > 0, tf.timestamp() - when.read_value(), 0.0)
            self._look = trained.read_value() + tf.clip_by_value(since, 0.0, MOST_AHEAD), life.read_value()
            is_same = tf.equal(life.read_value(), self._life)  # else the parameters were restored meanwhile
            most = tf.where(is_same, tf.maximum(trained.read_value(), self._seconds), trained.read_value())
            moment = tf.where(is_same, tf.timestamp(), when.read_value())
            with tf.control_dependencies([most, moment]):
                told = [trained.assign(most, read_value=False), when.assign(moment, read_value=False)]
            self._tell = is_same, most, told

    def restart(self, session, seconds):
        """The chief's, when the parameters have their values: they were trained for so many seconds."""
        session.run(self._restart, {self._seconds: seconds, self._life: int.from_bytes(os.urandom(7), "big")})

    def stop(self):
        """The session of this worker is lost, or not open yet: `tick` begins anew with what the ps says."""
        self._mine = None

    def tick(self, session):
        """To be called before each call of a worker."""
        if self._mine is None and not self.is_training:
            return
        if self._mine is None:
            seconds, life = session.run(self._look)
            self._mine, self._next = (time.monotonic() - seconds, life), 0.0
        now = time.monotonic()
        if now >= self._next or not self.is_training:
            (began, life), self._next = self._mine, now + TELL_SECS
            is_same, most, _ = session.run(self._tell, {self._seconds: now - began, self._life: life})
            self._mine = (now - max(most, now - began), life) if is_same and self.is_training else None

    def seconds(self, life=None):
        """Returns the seconds up to now, by this worker's clock; 0 if it does not train.

        Args:
          life: if given, 0 for parameters of another life than the one with this number.
        """
        mine = self._mine  # a thread may save meanwhile
        return 0.0 if mine is None or life not in (None, mine[1]) else time.monotonic() - mine[0]
