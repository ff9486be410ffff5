"""How many local steps each worker makes, by its speed: dynamic local updates (Liu et al. 2024, arXiv:2401.09135)."""

import time

from common import tf
from common.core import UserError
from common.data import local_variable
from common.scheme.steps import Step

FADE = 0.9  # of what is known of a worker's speed, with each of its trainings
ODD = 1000.0  # times as long as trainings before took one only by a clock that was set


class Dynamic:
    """Worker i makes H_i = max(1, ⌊H v_i / max_j v_j⌋) local steps, so that all come back after about the same time.

    v_i, local steps per second, is measured by the worker itself in its trainings, the last ones counting most. The ps of the
    global step keeps what each worker has told last. Until a worker has trained once, H_i = H. It is `center.exact`'s push that
    counts the local steps, since the number of updates no longer says how many there were.

    Args:
      center: the `common.scheme.GlobalParameters`.
      local: this worker's `common.scheme.LocalParameters`.
      most: H.

    Attributes:
      most: as above.
      made: local steps of this worker in this session, an int64 variable.

    Raises:
      UserError: with a schedule of the learning rate, which needs to know the number of updates beforehand.
    """

    def __init__(self, center, local, most):
        if center.schedule is not None:
            raise UserError(
                "center.dynamic: the number of updates is not known in advance, so the learning rate cannot follow a schedule"
            )
        self.most, self._center, self._local = most, center, local
        with tf.control_dependencies(None), tf.variable_scope(local.name):
            self._steps, self._seconds = (local_variable(f"timed_{name}", tf.zeros([])) for name in ("steps", "seconds"))
            self._chosen = local_variable("chosen_steps", tf.constant(most))
            self.made, self._uncounted = (local_variable(f"{name}_steps", tf.zeros([], tf.int64)) for name in ("made", "new"))
        center.count_local_steps()
        local.dynamic = self

    def _speeds(self):
        return tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.float32, shared_name="speeds")

    def leave(self):
        """The operation of a worker that leaves for good: the others go by its speed no more."""
        with tf.device(self._center.step.device):
            key = tf.constant([self._local.index], tf.int64)
            return tf.raw_ops.LookupTableRemoveV2(table_handle=self._speeds(), keys=key)

    @property
    def steps(self):
        """H_i as `choose` chose it last, an int32 scalar: for `local.train`."""
        return self._chosen.read_value()

    def choose(self):
        """H_i ← max(1, ⌊H v_i / max_j v_j⌋). One small message each way."""
        center = self._center
        speed = tf.math.divide_no_nan(self._steps.read_value(), self._seconds.read_value())
        with tf.device(center.step.device), tf.control_dependencies(None):
            speeds = self._speeds()
            key = tf.constant(self._local.index, tf.int64)
            told = tf.raw_ops.LookupTableInsertV2(table_handle=speeds, keys=key, values=speed)
            with tf.control_dependencies([told]):
                known = tf.raw_ops.LookupTableExportV2(table_handle=speeds, Tkeys=tf.int64, Tvalues=tf.float32)
            fastest = tf.reduce_max(known.values)
        share = tf.where_v2(speed > 0, tf.math.divide_no_nan(speed, fastest), 1.0)
        steps = tf.maximum(tf.cast(tf.floor(self.most * share), tf.int32), 1)
        return Step((self._chosen.assign(steps, read_value=False), told), done=((self, "choose"),))

    def begin(self, steps, delay):
        """A training of so many steps begins; its `--delays` are for H steps, and shorter for fewer. Returns the time."""
        began = tf.timestamp()
        with tf.control_dependencies([began]):
            slept = [tf.py_func(lambda n: time.sleep(delay * n / self.most), [steps], [])] if delay else []
        with tf.control_dependencies(slept):
            return tf.identity(began)

    def end(self, steps, began, after):
        """It has ended, after these operations. Returns operations that note what it tells of the worker's speed."""
        with tf.control_dependencies(after):
            seconds = tf.cast(tf.timestamp() - began, tf.float32)
            # The clock may have been set meanwhile: then it took as long as before.
            before = tf.cast(steps, tf.float32) * tf.math.divide_no_nan(self._seconds.read_value(), self._steps.read_value())
            is_odd = tf.logical_or(seconds < 0, tf.logical_and(before > 0, seconds > ODD * before))
            seconds = tf.where(is_odd, before, seconds)
        noted = []
        for faded, new in (self._steps, tf.cast(steps, tf.float32)), (self._seconds, seconds):
            noted.append(faded.assign(FADE * faded.read_value() + new, read_value=False))
        return [*noted, *(v.assign_add(tf.cast(steps, tf.int64), read_value=False) for v in (self.made, self._uncounted))]

    def take(self):
        """Returns how many local steps there were since the last call of this, and the operation that begins to count anew."""
        new = self._uncounted.read_value()
        with tf.control_dependencies([new]):
            return tf.identity(new), self._uncounted.assign(tf.zeros([], tf.int64), read_value=False)

    def check_round(self, name, words):
        """Raises a `UserError` if an update does not count the local steps that it is made of."""
        if words.count("count") != words.count("change"):
            raise UserError(f"{name}: center.dynamic needs center.exact, whose push counts the local steps")
