"""Batches of one worker's samples, drawn inside the graph, and variables of a worker's own."""

import numpy as np

from common import tf
from common.data import check_batch


class Batches:
    """Shuffled batches of one worker's samples, drawn inside the graph: no message and no copy from Python per step.

    The samples are local variables, fed once (`init_feed_dict`). Sample number k since the start is that of place i = k mod n
    in epoch e = k div n, which is second[(first[i] + e) mod n]: two random permutations, and between them a rotation. Every
    epoch sees every sample once; the order repeats itself after n epochs.

    Args:
      x, y: arrays `[n, ...]`, `[n, ...]`.
      batch_size: samples per batch, any number; a batch may cross the end of an epoch.
      seed: of the order; equal seeds give equal orders.
      name: variable scope.
    """

    def __init__(self, x, y, batch_size, seed, name="batches"):
        self.num_samples, self.batch_size = len(x), batch_size
        self._check = lambda window: check_batch(x, y, batch_size, window)
        self.init_feed_dict = {}
        with tf.variable_scope(name):
            self._x, self._y = self._fed("x", x), self._fed("y", y)
            rng = np.random.default_rng(seed)
            self._first, self._second = (self._fed(name, rng.permutation(len(x))) for name in ("first", "second"))
            self._position = local_variable("position", tf.zeros([], tf.int64))

    def _fed(self, name, value):
        feed = tf.placeholder(value.dtype, value.shape)
        self.init_feed_dict[feed] = value
        return local_variable(name, feed)

    def next(self, window):
        """Returns the indices `[window, batch_size]` of the next samples.

        Raises:
          UserError: if they are too many for memory.
        """
        self._check(window)
        size = window * self.batch_size
        k = self._position.assign_add(size) - size + tf.range(size, dtype=tf.int64)
        place = tf.gather(self._first, k % self.num_samples) + k // self.num_samples
        indices = tf.gather(self._second, place % self.num_samples)
        return tf.reshape(indices, [window, self.batch_size])

    def samples(self, indices):
        """Returns the samples x `[batch_size, ...]` and labels y of `indices`."""
        return tf.gather(self._x, indices), tf.gather(self._y, indices)


def local_variable(name, initial_value):
    """Returns a variable of this worker's own: initialized in every session anew, in no checkpoint."""
    collections = [tf.GraphKeys.LOCAL_VARIABLES]
    return tf.get_variable(name, initializer=initial_value, trainable=False, collections=collections, use_resource=True)
