"""Batches of one worker's samples, drawn inside the graph, and variables of a worker's own."""

import itertools

import numpy as np

from common import tf
from common.data import arrays_in, check_batch, mapped


class Batches:
    """Shuffled batches of one worker's samples, drawn inside the graph: no message and no copy from Python per step.

    The samples are local variables, fed once (`init_feed_dict`). Sample number k since the start is that of place i = k mod n
    in epoch e = k div n, which is second[(first[i] + e) mod n]: two random permutations, and between them a rotation. Every
    epoch sees every sample once; the order repeats itself after n epochs.

    Args:
      x, y: arrays `[n, ...]`, or several in a tuple or dict.
      batch_size: samples per batch, any number; a batch may cross the end of an epoch.
      seed: of the order; equal seeds give equal orders.
      name: variable scope.
      weights: of the samples, arrays `[n]`, or None.
    """

    def __init__(self, x, y, batch_size, seed, name="batches", weights=None):
        self.num_samples, self.batch_size = len(arrays_in(x)[0]), batch_size
        self._check = lambda window: check_batch(x, y, batch_size, window)
        self.init_feed_dict: dict = {}
        with tf.variable_scope(name):
            parts = {"x": x, "y": y} if weights is None else {"x": x, "y": y, "weights": weights}
            self._samples = tuple(fed(name, part, self.init_feed_dict) for name, part in parts.items())
            rng = np.random.default_rng(seed)
            orders = {name: rng.permutation(self.num_samples) for name in ("first", "second")}
            self._first, self._second = (fed(name, order, self.init_feed_dict) for name, order in orders.items())
            self._position = local_variable("position", tf.zeros([], tf.int64))

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

    def batch(self, k):
        """Returns the indices `[batch_size]` of a batch that is always the same for the same number k, from 0 on."""
        places = tf.range(k * self.batch_size, (k + 1) * self.batch_size) % self.num_samples
        return tf.gather(self._second, places)

    def samples(self, indices):
        """Returns the samples x `[batch_size, ...]` and labels y of `indices`, and their weights, if they have some."""
        return tf.nest.map_structure(lambda variable: tf.gather(variable, indices), self._samples)


def fed(name, part, feeds):
    """Returns an array, or several in a tuple or dict, as local variables, which are fed when they are initialized.

    As constants they would be part of the graph, and travel with it.

    Args:
      name: of the variables.
      part: the arrays.
      feeds: a dict that gets what to feed.
    """
    names = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1)))

    def variable(array):
        feed = tf.placeholder(array.dtype, array.shape)
        feeds[feed] = array
        return local_variable(next(names), feed)

    return mapped(variable, part)


def local_variable(name, initial_value):
    """Returns a variable of this worker's own: initialized in every session anew, in no checkpoint."""
    collections = [tf.GraphKeys.LOCAL_VARIABLES]
    return tf.get_variable(name, initializer=initial_value, trainable=False, collections=collections, use_resource=True)
