"""Local steps in a loop; and a number of them by the speed of each worker: dynamic local updates.

Liu et al. 2024, arXiv:2401.09135.
"""

import time

from common import tf
from common.core import UserError
from common.data import local_variable
from common.scheme.steps import Step

FADE = 0.9  # decay of a worker's speed measurements per local training
ODD = 1000.0  # a training this many times longer than earlier ones indicates an adjusted clock


class Dynamic:
    """Worker i makes H_i = max(1, ⌊H v_i / max_j v_j⌋) local steps, so that all come back after about the same time.

    v_i, local steps per second, is a moving average of the worker's own measurements. The ps of the global step keeps the last
    report of each worker. Until a worker's first training, H_i = H. The push of `center.exact` counts the local steps, since
    they no longer follow from the number of updates.

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
        """Returns the operation that removes the speed of a worker that leaves for good."""
        with tf.device(self._center.step.device):
            key = tf.constant([self._local.index], tf.int64)
            return tf.raw_ops.LookupTableRemoveV2(table_handle=self._speeds(), keys=key)

    @property
    def steps(self):
        """H_i from the last `choose`, an int32 scalar, for `local.train`."""
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
        """Begins a training of `steps` steps, with a share of the delay for H steps; returns the time after it."""
        began = tf.timestamp()
        with tf.control_dependencies([began]):
            slept = [tf.py_func(lambda n: time.sleep(delay * n / self.most), [steps], [])] if delay else []
        with tf.control_dependencies(slept):
            return tf.identity(began)

    def end(self, steps, began, after):
        """Ends a training after these operations; returns operations that record the worker's speed."""
        with tf.control_dependencies(after):
            seconds = tf.cast(tf.timestamp() - began, tf.float32)
            # The clock may have been adjusted: then assume the earlier speed.
            before = tf.cast(steps, tf.float32) * tf.math.divide_no_nan(self._seconds.read_value(), self._steps.read_value())
            is_odd = tf.logical_or(seconds < 0, tf.logical_and(before > 0, seconds > ODD * before))
            seconds = tf.where(is_odd, before, seconds)
        noted = []
        for faded, new in (self._steps, tf.cast(steps, tf.float32)), (self._seconds, seconds):
            noted.append(faded.assign(FADE * faded.read_value() + new, read_value=False))
        return [*noted, *(v.assign_add(tf.cast(steps, tf.int64), read_value=False) for v in (self.made, self._uncounted))]

    def take(self):
        """Returns the number of local steps since the last call, and the operation that resets it."""
        new = self._uncounted.read_value()
        with tf.control_dependencies([new]):
            return tf.identity(new), self._uncounted.assign(tf.zeros([], tf.int64), read_value=False)

    def check_round(self, name, words):
        """Raises a `UserError` if an update does not count its local steps."""
        if words.count("count") != words.count("change"):
            raise UserError(f"{name}: center.dynamic needs center.exact, whose push counts the local steps")


def loop_of(step, window, total, begun):
    """Runs local steps in a loop; returns the sum of losses, `total` plus that of gradients, and a tensor made after them.

    Args:
      step: function of the number of a local step that returns its loss, gradient and change.
      window: number of local steps.
      begun: operations that must end before; the loop's body has no other dependency on operations outside of it.
    """

    def next_step(t, total, loss):
        step_loss, g, changed = step(t)
        with tf.control_dependencies([changed]):
            return t + 1, total + g, loss + step_loss

    with tf.control_dependencies(begun):
        zero = tf.constant(0)
    done, total, loss = tf.while_loop(lambda t, *_: t < window, next_step, (zero, total, 0.0), parallel_iterations=1)
    return loss, total, done
