"""Synchronization of workers without polling: a lock, and a clock and a token queue ("bell") for each worker, on a ps.

All of it lies in resources of the ps that need no initialization, belong to no checkpoint and live as long as the ps.
"""

import contextlib
from typing import Any

from common import tf

FINISHED = 2**61  # clock of a finished worker, for which no other waits; the sum of two fits in 64 bits
AWAY = FINISHED + 1  # clock of an unoccupied place, if workers come and go


class Lock:
    """A lock on a device, held for one run of the graph: it is released even if the run fails or the worker dies.

    Args:
      device: device of the lock.
      name: the same for all workers that share it.
    """

    def __init__(self, device, name):
        self.device, self._name, self._mutex = device, name, None

    def make(self):
        """Makes the mutex outside of conditions and loops, as `held` may be called in one."""
        with tf.device(self.device), tf.control_dependencies(None):
            self._mutex = tf.raw_ops.MutexV2(container="", shared_name=self._name)

    @contextlib.contextmanager
    def held(self, after):
        """A context whose operations run under the lock, which is taken after the operations `after`.

        Yields a list. The lock is released after the operations that the caller adds to it; the release is appended to it.
        """
        if self._mutex is None:
            self.make()
        with tf.device(self.device), tf.control_dependencies(after):
            lock = tf.raw_ops.MutexLock(mutex=self._mutex)
        done: list[Any] = []
        with tf.control_dependencies([lock.op]):
            yield done
        with tf.device(self.device), tf.control_dependencies(done):
            done.append(tf.raw_ops.ConsumeMutexLock(mutex_lock=lock))


class Clocks:
    """A clock for each worker; a worker that is too far ahead waits for the stragglers.

    Worker i may proceed while c_i − low ≤ s, where low is the least of all clocks: stale synchronous parallel (Ho et al. 2013).
    With a `quorum` of N workers, low is the N-th largest clock: the others proceed as soon as N workers have come that far. If
    workers come and go, the number of backup workers stays fixed; at least one gradient is required.

    A blocked worker dequeues from its own queue, its bell. The worker that raises `low` enqueues one token for each worker that
    it unblocks. `wait` dequeues one token for each time that its worker got too far ahead.

    Args:
      num_workers: number of clocks. All start at 0, also those of workers that have not begun yet.
      lock: a `Lock`; the clocks lie on its device.
      staleness: s, the number of ticks that a worker may be ahead; may be infinite.
      quorum: N; all workers by default.
      name: the same for all workers that share the clocks.
      begin: if workers come and go, the number of workers at the start of the run; no worker waits for the others before they
        have joined. None: all of them.
    """

    is_virtual = False  # True in `common.simulation`, where no worker enters or leaves

    def __init__(self, num_workers, lock, staleness=0, quorum=None, name="clocks", begin=None):
        self.lock, self._num_workers, self._quorum = lock, num_workers, quorum or num_workers
        self._staleness = int(min(staleness, FINISHED))
        with tf.device(lock.device), tf.control_dependencies(None):
            self._clocks, self._owed, self._pulled, self._released, self._goes = (
                tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.int64, shared_name=f"{name}_{column}")
                for column in ("clock", "owed", "pulled", "released", "goes")
            )
            self._bells = [tf.queue.FIFOQueue(-1, tf.int64, [[]], shared_name=f"{name}_bell_{i}") for i in range(num_workers)]
            # Constants made here carry no control dependencies; each lookup has its own.
            self._workers, self._zero = tf.range(num_workers, dtype=tf.int64), tf.zeros([], tf.int64)
            self._unknown, self._first = tf.constant(-1, tf.int64), None
            if begin is not None:
                self._first = tf.constant([0] * begin + [AWAY] * (num_workers - begin), tf.int64)
            self._keys = [tf.constant([i], tf.int64) for i in range(num_workers)]

    def read(self, left=None):
        """Returns all clocks, an int64 tensor `[num_workers]`.

        Args:
          left: booleans `[num_workers]`: the workers that have left for good, unknown to this ps; None for no worker.
        """
        if self._first is None:
            return self._find(self._clocks, self._workers)
        with tf.device(self.lock.device):
            found = self._find(self._clocks, self._workers, self._unknown)
            first = self._first
            if left is not None:
                first = tf.where(left, tf.fill(left.shape, tf.constant(AWAY, tf.int64)), first)
            return tf.where(found < 0, first, found)

    def low(self, clocks):
        """Returns low, the clock with which the others are compared, a scalar."""
        if self._quorum == self._num_workers:
            return tf.reduce_min(clocks)
        if self._first is None:
            return tf.sort(clocks, direction="DESCENDING")[self._quorum - 1]
        here = tf.reduce_sum(tf.cast(clocks < FINISHED, tf.int32))
        return tf.sort(clocks)[tf.minimum(self._num_workers - self._quorum, tf.maximum(here - 1, 0))]

    def pulled(self, worker):
        """Returns the value of `low` when this worker last passed `wait`, or entered."""
        return self._of(self._pulled, worker)

    def may_go_on(self, worker):
        """Returns whether this worker may proceed, a boolean scalar."""
        with tf.device(self.lock.device):
            clocks = self.read()
            is_released = self._of(self._released, worker) > 0
            return tf.logical_or(is_released, clocks[worker] - self.low(clocks) <= self._staleness)

    def behind(self, worker):
        """Returns the workers for which this one waits now, booleans `[num_workers]`."""
        with tf.device(self.lock.device):
            clocks = self.read()
            return tf.logical_and(~self.may_go_on(worker), clocks <= self.low(clocks))

    def wait(self, worker):
        """Operations that block until this worker may proceed."""
        with tf.device(self.lock.device):
            owed = self._of(self._owed, worker) * (1 - self._of(self._released, worker))
            taken = self._bells[worker].dequeue_many(tf.cast(owed, tf.int32))
            with tf.control_dependencies([taken]):
                return [self._insert(self._owed, worker, 0), self._insert(self._pulled, worker, self.low(self.read()))]

    def tick(self, worker, after=()):
        """Operations that advance this worker's clock by one, after the operations `after`."""
        with self.lock.held(after) as done, tf.device(self.lock.device):
            clocks = self.read()
            done += self.change(clocks, self.with_clock(clocks, worker, clocks[worker] + 1), worker)
        return done

    def with_clock(self, clocks, worker, value):
        """Returns `clocks` with that of this worker at `value`."""
        return tf.where(tf.equal(tf.range(self._num_workers), worker), tf.fill([self._num_workers], value), clocks)

    def change(self, before, after, worker=None):
        """Operations that set the clocks, and ring for the workers that this unblocks. To be run under the lock.

        Args:
          before, after: all clocks.
          worker: the worker whose clock has advanced; it has to wait if it is too far ahead now.
        """
        with tf.device(self.lock.device), tf.control_dependencies([before]):  # the lookup comes before the change
            was_ahead, is_ahead = (clocks - self.low(clocks) > self._staleness for clocks in (before, after))
            done = [tf.raw_ops.LookupTableInsertV2(table_handle=self._clocks, keys=self._workers, values=after)]
            if worker is not None:
                more = tf.cast(is_ahead[worker] & ~was_ahead[worker], tf.int64)
                done.append(self._insert(self._owed, worker, self._of(self._owed, worker) + more))
            tokens = tf.cast(was_ahead & ~is_ahead, tf.int32)
            with tf.control_dependencies(done):
                return [*done, *(self._ring(other, tokens[other]) for other in range(self._num_workers))]

    def _ring(self, worker, tokens):
        return self._bells[worker].enqueue_many([tf.zeros([tokens], tf.int64)])

    def enter(self, worker, left=None):
        """Operations for the start of a worker's session: it continues with its previous clock.

        A new worker, or one that had left, starts at the clock of the slowest other worker. `left`: see `read`.
        """
        with self.lock.held([]) as done, tf.device(self.lock.device):
            clocks = self.read(left)
            low = self.low(clocks)
            back = tf.where(low >= FINISHED, tf.zeros_like(low), low)
            clock = tf.where(clocks[worker] >= FINISHED, back, clocks[worker])
            done += self.begin(worker, clocks, self.with_clock(clocks, worker, clock))
        return done

    def begin(self, worker, before, after):
        """Operations that set the clocks when a worker enters, and reset its other state."""
        changed = self.change(before, after)
        low = self.low(after)
        with tf.control_dependencies(changed):
            bell = self._bells[worker]
            emptied = bell.dequeue_many(bell.size())
        with tf.control_dependencies([emptied]):
            owed = self._insert(self._owed, worker, after[worker] - low > self._staleness)
        anew = [self._insert(self._released, worker, 0), self._insert(self._pulled, worker, low)]
        anew += [] if self._first is None else [self._insert(self._goes, worker, 0)]
        return [*changed, owed, *anew]

    def go(self, worker):
        """Operations that announce that this worker leaves for good. It no longer waits for others."""
        return [self._insert(column, worker, 1) for column in (self._goes, self._released)]

    def goes(self, worker):
        """Returns whether this worker has announced that it leaves, a boolean scalar."""
        return self._of(self._goes, worker) > 0

    def has_left(self, worker):
        """Returns whether no worker waits for this one any more, a boolean scalar."""
        return self.read()[worker] >= FINISHED

    def leave(self, worker):
        """Operations that let the others proceed without this worker."""
        with self.lock.held([]) as done, tf.device(self.lock.device):
            clocks = self.read()
            done += self.change(clocks, self.with_clock(clocks, worker, tf.constant(FINISHED, tf.int64)))
        return done

    def release(self, worker):
        """Operations that unblock this worker until it enters again, so that it can stop."""
        with self.lock.held([]) as done, tf.device(self.lock.device):
            released = self._insert(self._released, worker, 1)
            with tf.control_dependencies([released]):
                done += [released, self._ring(worker, 1)]
        return done

    def _find(self, table, keys, default=None):
        default = self._zero if default is None else default
        with tf.device(self.lock.device):
            return tf.raw_ops.LookupTableFindV2(table_handle=table, keys=keys, default_value=default)

    def _of(self, table, worker):
        return self._find(table, self._keys[worker])[0]

    def _insert(self, table, worker, value):
        values = tf.reshape(tf.cast(value, tf.int64), [1])
        return tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=self._keys[worker], values=values)
