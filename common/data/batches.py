"""Batches of one worker's samples, drawn inside the graph, and local variables."""

import itertools
import os
import sys

import numpy as np

from common import tf
from common.core import open_own
from common.data.datasets import check_batch
from common.data.mapped_rows import Rows
from common.data.nested_arrays import arrays_in, mapped


class Position:
    """The number of samples that a worker has drawn, kept in a file of the run's folder, so that it survives the process.

    It counts the samples of completed calls. A restarted worker draws the samples of its interrupted call again. The whole
    numbers `order` identify the order of the samples, such as its seed; in another order the position is 0.
    """

    def __init__(self, path, *order):
        self._descriptor = open_own(path, os.O_RDWR)
        numbers = np.array([*order, 0], np.int64)
        kept = os.pread(self._descriptor, numbers.nbytes, 0)
        is_same = len(kept) == numbers.nbytes and kept[:-8] == numbers.tobytes()[:-8]
        value = int(np.frombuffer(kept[-8:], np.int64)[0]) if is_same else 0
        self.value = value if 0 <= value < 2**62 else 0  # else the file is damaged: no run gets that far
        self._place = numbers.nbytes - 8
        os.pwrite(self._descriptor, numbers[:-1].tobytes() + np.int64(self.value).tobytes(), 0)

    def add(self, count):
        """Adds `count` drawn samples. Takes a microsecond."""
        self.value += count
        os.pwrite(self._descriptor, self.value.to_bytes(8, sys.byteorder), self._place)

    def start(self):
        """Returns the current value as a tensor (int64), read when the tensor is computed."""
        return tf.ensure_shape(tf.numpy_function(lambda: np.int64(self.value), [], tf.int64), [])


class Batches:
    """Shuffled batches of one worker's samples, drawn inside the graph: no message and no copy from Python per step.

    The samples are local variables, fed once (`init_feed_dict`), or stay in their file (`Stored`). Sample number k since the
    start has place i = k mod n in epoch e = k div n, and is second[(first[i] + e) mod n]: two random permutations with a
    rotation between them. Every epoch has every sample once; the order repeats after n epochs.

    Args:
      x, y: arrays `[n, ...]`, or `common.data.Rows`, or several in a tuple or dict.
      batch_size: samples per batch, any number; a batch may cross the end of an epoch.
      seed: of the order; equal seeds give equal orders.
      name: variable scope.
      weights: of the samples, arrays `[n]`, or None.
      position: the `Position` at which every session begins; None for 0.

    Attributes:
      arrays: (x, y) or (x, y, weights).
      order: first and second, as above.
      index_type: of the indices that `next` returns.
    """

    def __init__(self, x, y, batch_size, seed, name="batches", weights=None, position=None):
        self.num_samples, self.batch_size = len(arrays_in(x)[0]), batch_size
        self._check = lambda window: check_batch(x, y, batch_size, window)
        self.arrays = (x, y) if weights is None else (x, y, weights)
        self.order, self.index_type = order_of(self.num_samples, seed), tf.int64
        self.init_feed_dict: dict = {}
        with tf.variable_scope(name):
            names = "x", "y", "weights"
            self._samples = tuple(fed(name, part, self.init_feed_dict) for name, part in zip(names, self.arrays))
            feeds: dict = {}
            self._first, self._second = (fed(name, order, feeds) for name, order in zip(("first", "second"), self.order))
            self._order_feeds = tuple(feeds)
            self.init_feed_dict.update(feeds)
            self._position = local_variable("position", position.start() if position else tf.zeros([], tf.int64))

    def begin_call(self):
        """Called in each session call before its rounds draw; adds what they need first. Here: nothing."""

    def next(self, window, most=None):
        """Returns the indices `[window, batch_size]` of the next samples, or raises `UserError` if memory cannot hold them.

        Args:
          window: a number of steps, or an int32 scalar of at most `most`.
          most: a number; None if `window` is a number.
        """
        self._check(window if most is None else most)
        k = self.next_numbers(window, most)
        place = tf.gather(self._first, k % self.num_samples) + k // self.num_samples
        return tf.reshape(tf.gather(self._second, place % self.num_samples), [window, self.batch_size])

    def next_numbers(self, window, most=None):
        """Returns the numbers since the start `[window × batch_size]` of the next samples."""
        size = (window if most is None else tf.cast(window, tf.int64)) * self.batch_size
        return self._position.assign_add(size) - size + tf.range(size, dtype=tf.int64)

    def reorder(self, seed):
        """Switches to the order of another seed, from the next initialization of the variables on."""
        self.order = order_of(self.num_samples, seed)
        self.init_feed_dict.update(zip(self._order_feeds, self.order, strict=True))

    def numbers(self, k):
        """Returns the indices of the samples with these numbers since the start, an array as `k` is."""
        first, second = self.order
        return second[(first[k % self.num_samples] + k // self.num_samples) % self.num_samples]

    def batch(self, k):
        """Returns the indices `[batch_size]` of batch number k, from 0 on, the same at every call."""
        places = tf.range(k * self.batch_size, (k + 1) * self.batch_size) % self.num_samples
        return tf.gather(self._second, places)

    def samples(self, indices):
        """Returns the samples x `[batch_size, ...]` and labels y of `indices`, and their weights, if they have some."""
        return gathered(self._samples, indices)


def gathered(kept, indices):
    """Returns the samples at these indices in a structure of local variables and `Stored`, as `fed` makes them."""

    def taken(array):
        return array.gather(indices) if isinstance(array, Stored) else tf.gather(array, indices)

    return tf.nest.map_structure(taken, kept)


def order_of(num_samples, seed):
    """Returns the two permutations, arrays `[num_samples]`, of the order of a worker's samples, see `Batches`."""
    rng = np.random.default_rng(seed)
    return rng.permutation(num_samples), rng.permutation(num_samples)


def fed(name, part, feeds):
    """Returns an array, or several in a tuple or dict, as local variables that are fed at their initialization.

    As constants they would enlarge the graph, and travel with it. `common.data.Rows` are returned as `Stored`. Adds the feeds,
    {placeholder: array}, to the dict `feeds`.
    """
    names = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1)))

    def variable(array):
        if isinstance(array, Rows):
            return Stored(next(names), array, feeds)
        feed = tf.placeholder(array.dtype, array.shape)
        feeds[feed] = array
        return local_variable(next(names), feed)

    return mapped(variable, part)


class Stored:
    """Samples in a file, `common.data.Rows`, for the graph: a batch is read, and converted to its type, when it is drawn.

    If the file has TensorFlow's memory layout, its pages are the memory of a local variable, which must not be assigned: it is
    as fast as any other, and shared by all workers of a machine. Otherwise NumPy reads the rows, and a step of a small model
    takes up to 1.4 times as long.
    """

    def __init__(self, name, rows, feeds):
        self.shape, self._rows, self._place = rows.shape, rows, rows.in_place()
        with tf.device("/device:CPU:0"):
            self._chosen = None if rows.chosen is None else fed(f"{name}_chosen", rows.chosen, feeds)
            if self._place:
                every = self._place[0]
                tensor = tf.numpy_function(lambda: every, [], every.dtype)  # shares the memory
                tensor.set_shape(every.shape)
                self._variable = local_variable(name, tensor)

    def gather(self, indices):
        """Returns the samples at these indices, an integer tensor of any shape."""
        with tf.device("/device:CPU:0"):
            if not self._place:
                samples = tf.numpy_function(self._rows.__getitem__, [indices], self._rows.dtype, stateful=False)
                samples.set_shape(indices.shape.concatenate(self.shape[1:]))
                return samples
            _, first, step = self._place
            indices = indices if self._chosen is None else tf.gather(self._chosen, indices)
            # From the value, as a gather from the variable would first copy the shared memory.
            samples = tf.gather(self._variable.read_value(), first + step * indices)
            return tf.cast(samples, self._rows.dtype)

    def __getitem__(self, part):
        """Returns the samples of a slice, whose start and stop are numbers or tensors."""
        return self.gather(tf.range(part.start, tf.minimum(part.stop, self.shape[0])))


def local_variable(name, initial_value):
    """Returns a local variable of this worker: initialized in every session, saved in no checkpoint."""
    collections = [tf.GraphKeys.LOCAL_VARIABLES]
    return tf.get_variable(name, initializer=initial_value, trainable=False, collections=collections, use_resource=True)


def make_local(next_creator, **arguments):
    """For `tf.variable_creator_scope`: makes variables local to this worker."""
    return next_creator(**{**arguments, "collections": [tf.GraphKeys.LOCAL_VARIABLES]})


def assign_part(vector, value, part):
    """Returns the operation that writes a slice of a variable `[size]` in place."""
    ends = {"begin": [part.start], "end": [part.stop], "strides": [1]}
    return tf.raw_ops.ResourceStridedSliceAssign(ref=vector.handle, value=value, **ends)
