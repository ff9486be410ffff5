"""Several workers of a scheme in one process, stepped by the caller: for notebooks and tests.

The operations are those of worker processes; only their order is the caller's choice, not the machine's. So a run can be
repeated exactly, with more workers than a laptop has cores.
"""

from typing import NamedTuple

import numpy as np

from common import tf
from common.data import arrays_in, mapped
from common.simulation.engine import Engine
from common.simulation.versions import Versions


class Update(NamedTuple):
    """One update of the global parameters."""

    worker: int
    pulled: int  # global step of the parameters behind it
    updated: int  # global step after it
    staleness: int  # updates by others in between


class _Begun(NamedTuple):
    """A step of a round that is counted, but has not run."""

    number: int
    worker: int
    known: int  # global step of the x̃ that its worker knows
    own: int  # number of the worker's own updates that this x̃ lacks
    updated: int  # of an update, the global step after it; else -1


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
        self._versions = Versions(num_workers, self._engine.waiting)
        self._turns, self._next = self._versions.turns, [0] * num_workers
        self._begun: list[_Begun] = []
        self.time, self._ready = 0.0, [0.0] * num_workers  # of `run`; the end of each worker's last local training

    def restart(self, seed_of=None):
        """Returns to the initial state, in a fraction of the time of a new `Replay`. `session` may be another one then.

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
        trains = self._begin(worker)
        self._do()
        return trains

    def take(self, order):
        """Runs steps of workers in this order, as `step` does, in one session call.

        A worker that has to wait is skipped.

        Returns:
          The workers of the steps that were taken.
        """
        taken = []
        for worker in order:
            if not self.has_to_wait(worker):
                self._begin(worker)
                taken.append(worker)
        self._do()
        return taken

    def _begin(self, worker):
        """Counts this worker's next step in turns and versions; returns whether it is one of local training."""
        number, versions = self._next[worker], self._versions
        action = self.actions[number]
        self._next[worker] = (number + 1) % len(self.steps)
        if action.waits:
            self._turns.pass_by(worker)
        if action.ticks:
            self._turns.tick(worker)
        if action.reads:
            (versions.read_ahead if action.ahead else versions.read)(worker)
        known, own = versions.known[worker], versions.own[worker]
        updated = versions.update(worker, action.fragment)[1] if action.writes else -1
        self._begun.append(_Begun(number, worker, known, own, updated))
        return action.local_steps > 0

    def _do(self):
        """Runs all steps that have begun, in one session call, and records the results.

        Raises:
          RuntimeError: if the operations disagree with the count of global steps.
        """
        begun, self._begun = self._begun, []
        outcomes = self._engine.run([each.number for each in begun], [each.worker for each in begun])
        columns = (column.tolist() for column in outcomes)
        for (number, worker, known, own, expected), pulled, updated, step_before, loss in zip(begun, *columns, strict=True):
            action = self.actions[number]
            if updated != expected or action.reads and pulled != known:
                raise RuntimeError(
                    f"a fault of the replay: its count and the scheme's operations disagree on the global step, in step "
                    f"{number} of a round of worker {worker}: expected {expected} after {known}, found {updated} after {pulled}"
                )
            if action.local_steps:
                self.losses.append((worker, loss))
            if action.writes and updated == step_before:
                self.dropped.append((worker, updated))
            elif action.writes:
                self.updates.append(Update(worker, known, updated, updated - 1 - known - own))

    def run(self, updates, duration=lambda worker: 1.0):
        """Runs all workers at their own pace for a number of updates, in one session call.

        The worker whose local training ends first goes next, of several the one with the least index. It takes all steps
        until it has begun to train again, or has to wait.

        Args:
          updates: number of updates, of all workers together.
          duration: function of a worker's index that returns the time of its next local training; the rest takes none.
        """
        last, workers = self._versions.updates + updates, range(self._shards.num_workers)
        while self._versions.updates < last:
            free = [worker for worker in workers if not self.has_to_wait(worker)]
            self.time, worker = min((max(self.time, self._ready[each]), each) for each in free)
            trains = False
            while not trains and not self.has_to_wait(worker):
                trains = self._begin(worker)
            if trains:
                self._ready[worker] = self.time + duration(worker)
        self._do()

    @property
    def center(self):
        """x̃, an array `[size]`."""
        return self._engine.center

    @property
    def average(self):
        """The moving average of x̃, an array `[size]`; x̃ itself without `hp.ema`."""
        return self._engine.average

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
