"""Samples of workers that come and go: each leases pieces of the epochs from a ledger on a ps, and returns the rest.

Samples are numbered from 0 on, in the common training order of all workers: number k is in epoch k div n. A piece is a range of
numbers. As long as no worker and no ps is killed, each number is trained exactly once. The pieces of a killed worker are
returned whole and trained again: each number at least once.
"""

from typing import Any

import numpy as np

from common import tf
from common.core import MOST_PLACES as MOST
from common.core import Lock
from common.data.batches import Batches, local_variable

_MOST_OF_PIECE = 2**14  # samples; bounded, as a worker copies the rest of its pieces in each round
_KEPT = 4  # pieces of a worker in the ledger: two leases of two pieces, as a call draws from no others
_ROOM = 2 * _KEPT * MOST  # capacity for returned pieces


class Ledger:
    """The sample numbers leased by each worker, and those returned; saved in checkpoints.

    All state lies on one ps, and changes under one lock. A lease has two pieces, `[4]`: the first was returned by another
    worker, the second is new; either may be empty.
    """

    def __init__(self, device):
        self._device, self._lock = device, Lock(device, "leases")

        def variable(name, shape):
            return tf.get_variable(name, initializer=tf.zeros(shape, tf.int64), trainable=False, use_resource=True)

        with tf.device(device), tf.control_dependencies(None), tf.variable_scope("leases"):
            self._next, self._count = variable("next", []), variable("count", [])
            self._held, self._returned = variable("held", [MOST, 2 * _KEPT]), variable("returned", [_ROOM, 2])
            self._lock.make()

    def lease(self, worker, need, size, after=()):
        """Returns a lease of at least `need` numbers, a tensor `[4]`; its new piece has `size` numbers, or none."""
        with self._lock.held(after) as done, tf.device(self._device):
            count, start = self._count.read_value(), self._next.read_value()
            has = tf.cast(count > 0, tf.int64)
            old = has * tf.gather(self._returned.read_value(), tf.maximum(count - 1, 0))
            need = tf.cast(old[1] - old[0] < need, tf.int64)
            lease = tf.concat([old, need * tf.stack([start, start + size])], axis=0)
            row = tf.concat([self._held.read_value()[worker, 4:], lease], axis=0)
            with tf.control_dependencies([row, lease]):
                done += [
                    self._count.assign_sub(has, read_value=False),
                    self._next.assign_add(need * size, read_value=False),
                    self._hold(worker, row),
                ]
        with tf.control_dependencies(done):
            return tf.identity(lease)

    def begin(self, worker=None):
        """Operations that return all pieces of this worker; of all workers for None."""
        with self._lock.held([]) as done, tf.device(self._device):
            held = self._held.read_value()
            done += self._give_back(held if worker is None else held[worker], worker)
        return done

    def leave(self, worker, left):
        """Operations that return the last `left` numbers leased by this worker, the untrained ones."""
        with self._lock.held([]) as done, tf.device(self._device):
            # Oldest first, so the untrained numbers are at the end.
            pieces = tf.reshape(self._held.read_value()[worker], [-1, 2])
            sizes = pieces[:, 1] - pieces[:, 0]
            left = left - tf.cumsum(sizes, exclusive=True, reverse=True)  # of this piece and those before it
            # May be fewer than `left`, if a restarted chief has returned this worker's pieces.
            of_each = tf.clip_by_value(left, 0, sizes)
            done += self._give_back(tf.stack([pieces[:, 1] - of_each, pieces[:, 1]], axis=1), worker)
        return done

    def _hold(self, worker, row):
        return tf.raw_ops.ResourceScatterUpdate(resource=self._held.handle, indices=[worker], updates=[row])

    def _give_back(self, pieces, worker):
        """Operations that store the nonempty ones of these pieces as returned, and empty those of this worker, or of all."""
        pieces, count = tf.reshape(pieces, [-1, 2]), self._count.read_value()
        some = tf.boolean_mask(pieces, pieces[:, 1] > pieces[:, 0])[: _ROOM - count]
        more = tf.shape(some, out_type=tf.int64)[0]
        noted = tf.raw_ops.ResourceScatterUpdate(resource=self._returned.handle, indices=count + tf.range(more), updates=some)
        with tf.control_dependencies([noted]):
            added = self._count.assign_add(more, read_value=False)
        with tf.control_dependencies([added]):
            none = tf.zeros(self._held.shape, tf.int64)
            return [noted, added, self._held.assign(none, read_value=False) if worker is None else self._hold(worker, none[0])]


class LeasedBatches(Batches):
    """Batches of the samples whose numbers this worker has leased, out of the whole training set; else as `Batches`.

    Args:
      seed: of the order; the same for all workers.
      ledger: a `Ledger`.
      worker: index of this worker.
      num_workers: expected number of workers, by which the pieces are kept small relative to an epoch.

    Attributes:
      begin, leave: operations; the former for the start of a session, the latter for a worker that leaves for good.
    """

    def __init__(self, x, y, batch_size, seed, ledger, worker, num_workers=1, weights=None, name="batches"):
        super().__init__(x, y, batch_size, seed, name, weights)
        self._ledger, self._worker = ledger, worker
        self._drawn = self._drawn_at_most = 0  # per call, counted while it is built
        self._leased: list[Any] = []
        self._size = max(1, min(self.num_samples // (4 * num_workers), _MOST_OF_PIECE))
        with tf.variable_scope(name):
            # Leased, untrained numbers. `none` is no constant, as that would fix the variable's shape to [0].
            none = tf.placeholder_with_default(tf.zeros([0], tf.int64), [None])
            self._pool = local_variable("pool", none)
            most = tf.numpy_function(lambda: np.int64(self._drawn_at_most), [], tf.int64)  # known when all calls are built
            self._most = local_variable("most_of_a_call", tf.ensure_shape(most, []))
        self.begin = ledger.begin(None if worker == 0 else worker)
        self.leave = ledger.leave(worker, tf.size(self._pool.read_value(), out_type=tf.int64))

    def begin_call(self):
        """Leases more, if less is left than a call may draw; draws of this call, built afterwards, depend on the lease.

        Done once per call, as it takes a round trip to the ledger. So a call draws only from the last two leases, which the
        ledger keeps.
        """
        self._drawn = 0
        pool, most = self._pool.read_value(), self._most.read_value()

        def leased():
            a, b, c, d = tf.unstack(self._ledger.lease(self._worker, most, tf.maximum(most, self._size), [pool, most]))
            return tf.concat([pool, tf.range(a, b), tf.range(c, d)], axis=0)

        pool = tf.cond(tf.size(pool, out_type=tf.int64) < most, leased, lambda: tf.identity(pool))
        self._leased = [self._pool.assign(pool, read_value=False)]

    def next_numbers(self, window, most=None):
        """Returns the numbers `[window × batch_size]` of the next samples of this call."""
        self._drawn += (window if most is None else most) * self.batch_size
        self._drawn_at_most = max(self._drawn_at_most, self._drawn)
        with tf.control_dependencies(self._leased):
            pool, need = self._pool.read_value(), tf.cast(window, tf.int64) * self.batch_size
        with tf.control_dependencies([self._pool.assign(pool[need:], read_value=False)]):
            return tf.identity(pool[:need])
