"""Several workers of a scheme in one process, stepped by the caller: for notebooks and tests.

The operations are those of worker processes; only their order is the caller's choice, not the machine's. So a run can be
repeated exactly, with more workers than a laptop has cores.
"""

import heapq
from typing import NamedTuple

import numpy as np

from common import tf
from common.data import arrays_in, mapped
from common.simulation.engine import Engine
from common.simulation.virtual_time import Turns


class Update(NamedTuple):
    """One update of the global parameters."""

    worker: int
    pulled: int  # global step of the parameters behind it
    updated: int  # global step after it
    staleness: int  # updates by others in between


class Replay:
    """Workers whose steps run one at a time, in any order: a `common.simulation.Engine` with a call per step.

    Args:
      scheme: generator function, see `common.scheme.steps`.
      hp: the scheme's hyperparameters, a namespace.
      model: a `common.models.Model`.
      make_batches: function of a worker's index that returns its batches, a `common.data.Batches`.
      num_workers: number of workers.
      num_ps: pieces of the global parameters.
      schedule: a `common.scheme.Schedule` of the learning rate; None for none.
      compression: a `common.scheme.Compression` of messages; None for none.

    Attributes:
      updates: list of `Update`, in order; in a synchronous scheme, one per gradient of each update.
      dropped: list of (worker, global step), one per gradient dropped as stale.
      losses: list of (worker, mean loss of its window), in order.
      time: end of the last step of `run`, in the unit of its durations; 0 at first.
      steps, actions: the `common.scheme.Step`s of a round, and the `common.simulation.Action`s.
      graph, session: of TensorFlow, for access to other variables.
    """

    def __init__(self, scheme, hp, model, make_batches, num_workers=2, num_ps=1, schedule=None, compression=None):
        with tf.Graph().as_default():
            self._shards = _Shards([make_batches(i) for i in range(num_workers)])
        options = {"schedule": schedule, "compression": compression, "optimize": False}
        self._engine = engine = Engine(scheme, hp, model, self._shards, num_ps, **options)
        self.graph, self.steps, self.actions = engine.graph, engine.steps, engine.actions
        self._start()

    def _start(self):
        num_workers, self.session = self._shards.num_workers, self._engine.session
        self.updates: list[Update] = []
        self.dropped: list[tuple[int, int]] = []
        self.losses: list[tuple[int, float]] = []
        self._turns, self._is_together = Turns(num_workers, self._engine.waiting), self._engine.waiting.quorum is not None
        self._next, self._known = [0] * num_workers, [0] * num_workers
        self._own = [0] * num_workers  # the worker's own updates that x lacks
        self._own_since = [0] * num_workers  # the same since the last prefetch
        self._read = [0] * num_workers  # global step at the start of each worker's pull
        self._times = [(0.0, i) for i in range(num_workers)]
        self._waiting: list[int] = []
        self._global_step, self.time = 0, 0.0

    def restart(self, seed_of=None):
        """Returns to the initial state, in a new session and a fraction of the time of a new `Replay`.

        Args:
          seed_of: function of a worker's index that returns the seed of its batches from now on; None keeps their order.
        """
        self._shards.restart(seed_of)
        self._engine.restart()
        self._start()

    def next_step(self, worker):
        """Returns the number of the step of its round that `step(worker)` runs next."""
        return self._next[worker]

    def has_to_wait(self, worker):
        """Returns whether the next step of this worker's round waits for other workers."""
        return self.actions[self._next[worker]].waits and not self._turns.may_go_on(worker)

    def step(self, worker):
        """Runs the next step of this worker's round; returns whether it was one of local training.

        Raises:
          RuntimeError: if the worker has to wait for others.
        """
        if self.has_to_wait(worker):
            raise RuntimeError(f"worker {worker} has to wait for others")
        at = self._begin(worker)
        self._do([at], [worker])
        return self.actions[at].local_steps > 0

    def take(self, order):
        """Runs steps of workers in this order, as `step` does, in one session call.

        A worker that has to wait is skipped.

        Returns:
          The workers of the steps that were taken.
        """
        steps, taken = [], []
        for worker in order:
            if not self.has_to_wait(worker):
                steps.append(self._begin(worker))
                taken.append(worker)
        self._do(steps, taken)
        return taken

    def _begin(self, worker):
        """Records this worker's next step in clocks and global step. Returns the step's number."""
        at, action = self._next[worker], self.actions[self._next[worker]]
        self._next[worker] = (at + 1) % len(self.steps)
        if action.waits:
            self._turns.pass_by(worker)
        if action.ticks:
            self._turns.tick(worker)
        if action.reads:
            self._read[worker] = self._global_step
        if action.writes:
            given = self._turns.give(worker, action.fragment)[1] if self._is_together else self._is_fresh(worker)
            self._global_step += given
        return at

    def _is_fresh(self, worker):
        threshold = self._engine.waiting.threshold
        return threshold is None or self._global_step - self._read[worker] < threshold

    def _do(self, steps, workers):
        """Runs steps of workers, and records the results."""
        columns = (column.tolist() for column in self._engine.run(steps, workers))
        for at, worker, pulled, updated, step_before, loss in zip(steps, workers, *columns, strict=True):
            action = self.actions[at]
            if action.reads:
                self._known[worker], self._own[worker] = pulled, self._own_since[worker] if action.ahead else 0
                if action.ahead:
                    self._own_since[worker] = 0
            if action.local_steps:
                self.losses.append((worker, loss))
            if action.writes:
                self._update(worker, updated, step_before)

    def _update(self, worker, updated, step_before):
        known = self._known[worker]
        if updated == step_before:
            self.dropped.append((worker, updated))
        elif self._is_together:
            self.updates.append(Update(worker, known, updated, updated - 1 - known))
        else:
            self.updates.append(Update(worker, known, updated, updated - 1 - known - self._own[worker]))
            self._own[worker] += 1
            self._own_since[worker] += 1

    def run(self, updates, duration=lambda worker: 1.0):
        """Runs all workers at their own pace for a number of updates, in one session call.

        Args:
          updates: number of updates, of all workers together.
          duration: function of a worker's index that returns the time of its next local training; the rest takes none.
        """
        last, steps, workers = self._global_step + updates, [], []
        while self._global_step < last:
            self.time, worker = heapq.heappop(self._times)
            trained = False
            while not trained and not self.has_to_wait(worker):
                steps.append(self._begin(worker))
                workers.append(worker)
                trained = self.actions[steps[-1]].local_steps > 0
            if trained:
                heapq.heappush(self._times, (self.time + duration(worker), worker))
            else:
                self._waiting.append(worker)
            for each in [w for w in self._waiting if not self.has_to_wait(w)]:
                self._waiting.remove(each)
                heapq.heappush(self._times, (self.time, each))
        self._do(steps, workers)

    @property
    def center(self):
        """x̃, an array `[size]`."""
        return self._engine.center

    @property
    def replicas(self):
        """x of all workers, an array `[num_workers, size]`."""
        return self._engine.replicas

    def table(self, layer):
        """Returns the table of a `common.Embedding` with a number of rows, by the layer's name: an array `[rows, width]`."""
        return self._engine.table(layer)

    def evaluate(self, x, y):
        """Returns loss and accuracy (NaN for a regression) of x̃ on samples x `[n, ...]`, y `[n, ...]`, one array each."""
        found = self._engine.evaluate(x, y)
        return found["loss"], found.get("accuracy", np.nan)

    def close(self):
        """Closes the session."""
        self._engine.close()


class _Shards:
    """The samples of several `common.data.Batches`, concatenated, in the form that an `Engine` draws from."""

    def __init__(self, batches):
        self._batches, self.num_workers, self.batch_size = batches, len(batches), batches[0].batch_size
        apart: dict = {}  # shared arrays are kept once
        for each in batches:
            apart.setdefault(_key(each), each)
        places, begun = {}, 0
        for key, each in apart.items():
            places[key] = begun
            begun += each.num_samples
        self._offsets = [places[_key(each)] for each in batches]
        self.counts = np.array([each.num_samples for each in batches])
        parts = zip(*(each.arrays for each in apart.values()), strict=True)
        self.samples = tuple(_joined(part) for part in parts)
        self._positions = [0] * self.num_workers

    def restart(self, seed_of):
        """Moves all workers to their first sample; with `seed_of`, in the order of new seeds."""
        self._positions = [0] * self.num_workers
        for i, each in enumerate(self._batches if seed_of else []):
            each.reorder(seed_of(i))

    def take(self, workers, sizes):
        """Returns the indices of the samples that workers draw next, and the start of each draw in them."""
        drawn = [np.zeros(0, np.int32)]
        for worker, size in zip(workers, sizes, strict=True):
            k = self._positions[worker] + np.arange(size)
            drawn.append(self._offsets[worker] + self._batches[worker].numbers(k))
            self._positions[worker] += size
        return np.concatenate(drawn).astype(np.int32), np.cumsum(sizes) - sizes


def _key(batches):
    """Returns the identities of the arrays behind some batches."""
    return tuple(id(array) for part in batches.arrays for array in arrays_in(part))


def _joined(parts):
    """Concatenates the arrays of several workers, in tuples or dicts of equal structure."""
    flat = [np.concatenate([array[:] for array in arrays]) for arrays in zip(*map(arrays_in, parts), strict=True)]
    joined = iter(flat)
    return mapped(lambda array: next(joined), parts[0])
