"""Several workers of a scheme in one process, whose steps the caller runs: for notebooks and tests.

The operations are those that worker processes run; only the order is the caller's choice, not the machine's. So a run
can be repeated, and can have more workers than the machine has cores.
"""

import heapq
from typing import Any, NamedTuple

import numpy as np

from common import tf
from common.center import GlobalParameters
from common.local import LocalParameters
from common.schedules import hyperparameters
from common.steps import build_steps


class Update(NamedTuple):
    """One update of the global parameters."""

    worker: int
    pulled: int  # global step of the parameters that it was computed from
    updated: int  # global step after it
    staleness: int  # updates by others in between


class Replay:
    """Workers whose steps run one at a time, in any order.

    Args:
      scheme: generator function, see `common.steps`.
      hp: the hyperparameters that it asks for, as a namespace.
      model: a `common.models.Model`.
      make_batches: function of a worker's index that returns its batches, see `common.batches.Batches`.
      num_workers: how many.
      num_ps: pieces of the global parameters.
      schedule: function of the global step, a tensor, that returns a factor of the learning rate; None for none.

    Attributes:
      updates: list of `Update`, in their order; of a synchronous scheme, of the gradients that each is made of.
      dropped: list of (worker, global step) of the gradients that came too late for their update.
      losses: list of (worker, mean loss of its window), in their order.
      graph, session: what it runs in, to look at other variables.
    """

    def __init__(self, scheme, hp, model, make_batches, num_workers=2, num_ps=1, schedule=None):
        self._model, self.graph = model, tf.Graph()
        with self.graph.as_default():
            self._center = GlobalParameters(model.initial_parameters, num_ps, schedule=schedule)
            workers = [
                LocalParameters(self._center, model, make_batches(i), f"worker_{i}", i, num_workers) for i in range(num_workers)
            ]
            self._workers, self._steps = workers, []
            for worker in workers:
                own = hyperparameters(hp, self._center, worker)
                self._steps.append(build_steps(scheme, self._center, worker, own))
            self._fetches = [[step.fetches() for step in steps] for steps in self._steps]
            self._value = self._center.read()[0]
            self._step = self._center.step.read_value()
            self._initializers = tf.global_variables_initializer(), tf.local_variables_initializer()
        self._evaluations: dict[Any, Any] = {}  # by the shapes of x and y
        self._start()

    def _start(self):
        feeds = dict(self._center.init_feed_dict)
        for worker in self._workers:
            feeds.update(worker.init_feed_dict)
        self.session = tf.Session(graph=self.graph, config=_config())  # has variables and queues of its own
        for initializer in self._initializers:
            self.session.run(initializer, feeds)
        self.updates: list[Update] = []
        self.dropped: list[tuple[int, int]] = []
        self.losses: list[tuple[int, float]] = []
        num_workers = len(self._workers)
        self._next, self._known = [0] * num_workers, [0] * num_workers
        self._own = [0] * num_workers  # updates since the pull
        self._times = [(0.0, i) for i in range(num_workers)]
        self._waiting: list[int] = []
        self._global_step = 0

    def restart(self, seed_of=None):
        """Begins anew, as after it was made, in a new session; takes a fraction of the time that another `Replay` does.

        Args:
          seed_of: function of a worker's index that returns the seed of its batches from now on; None: they stay as they are.
        """
        self.session.close()
        if seed_of is not None:
            for i, worker in enumerate(self._workers):
                worker.init_feed_dict.update(worker.batches.reorder(seed_of(i)))
        self._start()

    def steps(self, worker):
        """Returns the `common.steps.Step`s of this worker's round."""
        return self._steps[worker]

    def next_step(self, worker):
        """Returns the `common.steps.Step` that `step(worker)` runs next."""
        return self._steps[worker][self._next[worker]]

    def has_to_wait(self, worker):
        """Returns whether the next step of this worker's round waits for other workers."""
        may_go_on = self.next_step(worker).may_go_on
        return may_go_on is not None and not self.session.run(may_go_on)

    def step(self, worker):
        """Runs the next step of this worker's round; returns whether it was one of local training.

        Raises:
          RuntimeError: if it has to wait for other workers.
        """
        if self.has_to_wait(worker):
            raise RuntimeError(f"worker {worker} has to wait for others")
        at = self._next[worker]
        self._next[worker] = (at + 1) % len(self._steps[worker])
        values = self.session.run(self._fetches[worker][at])
        if "pulled" in values:
            self._known[worker], self._own[worker] = int(values["pulled"]), 0
        if "loss" in values:
            self.losses.append((worker, float(values["loss"])))
        if "updated" in values:
            updated, known = int(values["updated"]), self._known[worker]
            self._global_step = int(self.session.run(self._step)) if "step_before" in values else updated
            if "step_before" not in values:
                self.updates.append(Update(worker, known, updated, updated - 1 - known - self._own[worker]))
            elif updated > values["step_before"]:
                self.updates.append(Update(worker, known, updated, updated - 1 - known))
            else:
                self.dropped.append((worker, updated))
            self._own[worker] += 1
        return "loss" in values

    def run(self, updates, duration=lambda worker: 1.0):
        """Lets all workers run at their own pace until there are so many more updates.

        Args:
          updates: number of updates, of all workers together.
          duration: function of the worker that returns how long its next local training takes; the rest takes no time.
        """
        last = self._global_step + updates
        while self._global_step < last:
            time, worker = heapq.heappop(self._times)
            trained = False
            while not trained and not self.has_to_wait(worker):
                trained = self.step(worker)
            if trained:
                heapq.heappush(self._times, (time + duration(worker), worker))
            else:
                self._waiting.append(worker)
            for each in [w for w in self._waiting if not self.has_to_wait(w)]:
                self._waiting.remove(each)
                heapq.heappush(self._times, (time, each))

    @property
    def center(self):
        """x̃, an array `[size]`."""
        return self.session.run(self._value)

    @property
    def replicas(self):
        """x of all workers, an array `[num_workers, size]`."""
        return np.array(self.session.run([worker.value for worker in self._workers]))

    def evaluate(self, x, y):
        """Returns loss and accuracy (NaN for a regression) of x̃ on samples x `[n, ...]`, y `[n, ...]`, one array each."""
        shapes = x.shape, y.shape
        if shapes not in self._evaluations:
            with self.graph.as_default():
                feeds = [tf.placeholder(array.dtype, array.shape) for array in (x, y)]
                state = [v.read_value() for v in self._workers[0].state]
                self._evaluations[shapes] = feeds, self._model.evaluate(self._value, state, *feeds)
        feeds, results = self._evaluations[shapes]
        found = self.session.run(results, dict(zip(feeds, (x, y), strict=True)))
        return float(found["loss"]), float(found.get("accuracy", np.nan))

    def close(self):
        """Closes the session."""
        self.session.close()


def _config():
    """No optimization of graphs: there is one for each step of each worker, and for most it takes longer than to run them."""
    config = tf.ConfigProto(intra_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config
