"""One scheme in the simulator until a target: under the conditions of this comparison, with the best of several learning rates.

`PROBLEM` says what is learned, and until when; `CONDITIONS` say on which machines and links; `of_row` measures a row of the
table under all of them, and on the problems of `OTHERS` with equal machines.
"""

import contextlib
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent / "Simulation"))

WORKERS = 8
BATCH = 16
# A local step of 10 ms that varies by a tenth, a ping of 2 ms, a ps with a card of 10 Gbit/s.
CLUSTER = {"step_ms": 10, "step_cv": 0.1, "latency_ms": 1, "ps_mbit": 10_000}


class Condition(NamedTuple):
    """Machines, links and samples under which all schemes are compared.

    Attributes:
      text: what it is.
      flags: of the simulator, besides `CLUSTER`.
      slow: how many times as long the last worker takes for a step.
      non_iid: α of `common.simulation.shards_of`.
    """

    text: str
    flags: dict
    slow: float = 1.0
    non_iid: float | None = None


CONDITIONS = {
    "all equal": Condition("equal machines, fast links", {}),
    "one slow": Condition("one of the workers takes ten times as long for a step", {}, slow=10.0),
    "random": Condition("each step takes a random time (gamma distribution, deviation as large as the mean)", {"step_cv": 1}),
    "slow links": Condition("workers have links of 10 Mbit/s, and a message takes 20 ms", {"latency_ms": 20, "mbit": 10}),
    "non-IID shards": Condition("each worker has samples of only a few classes (Dirichlet, α = 1)", {}, non_iid=1.0),
}


class Problem(NamedTuple):
    """What is learned.

    Attributes:
      text: what has to be reached.
      flags: of the simulator.
      metric: of the test set, as `common.training.measured` calls it; a loss, or a share of what is right.
      target: what it has to come to: a loss this or less, a share this or more.
      samples: of all workers together, after which a run ends without the target.
      every: samples of all workers between two evaluations; if a fiftieth of those until then is more, that.
      times: the rates of `ROWS` with which a search begins are for `PROBLEM`; here they are so many times as large.
    """

    text: str
    flags: dict
    metric: str
    target: float
    samples: int = 120_000
    every: int = 1280
    times: float = 1.0

    @property
    def sign(self):
        """1 if more of the metric is better, or -1."""
        return -1 if self.metric == "test_loss" else 1


PROBLEM = Problem(
    text="75% test accuracy",
    flags={"data": "mnist1d", "model": "cnn1d"},
    metric="test_accuracy",
    target=0.75,
)
# Measured with equal machines alone.
OTHERS = {
    "quadratic": Problem(
        text="loss 0.013 (best: 0.01)",
        flags={"data": "quadratic", "model": "dense"},
        metric="test_loss",
        target=0.013,
        samples=400_000,
        times=4,
    ),
    "text": Problem(
        text="loss 2.42 per character",
        flags={"data": "text", "model": "linear"},
        metric="test_loss",
        target=2.42,
        times=32,
    ),
}


class Row(NamedTuple):
    """A row of the table: a scheme and its flags.

    Attributes:
      folder: of the scheme.
      rate: the flag whose value is searched for.
      first: its value with which the search begins, see `Problem.times`.
      flags: others than their defaults.
    """

    folder: str
    rate: str = "learning_rate"
    first: float = 0.05
    flags: dict = {}


LOCAL = "local_learning_rate"
ROWS = {
    "HogWild": Row("HogWild"),
    "Dynamic-SGD": Row("Dynamic-SGD", first=0.4),
    "Ringmaster-ASGD": Row("Ringmaster-ASGD"),
    "DC-ASGD": Row("DC-ASGD"),
    "Semi-Synchronous-SGD": Row("Semi-Synchronous-SGD"),
    "Synchronous-SGD": Row("Synchronous-SGD", first=0.4),
    "Synchronous-SGD, 1 backup worker": Row("Synchronous-SGD", first=0.4, flags={"backup_workers": 1}),
    "Synchronous-SGD-different-learning-rates": Row("Synchronous-SGD-different-learning-rates", first=0.4),
    "DOWNPOUR-Easy": Row("DOWNPOUR-Easy"),
    "DOWNPOUR": Row("DOWNPOUR"),
    "AGN": Row("AGN"),
    "AEASGD": Row("AEASGD"),
    "AEAMSGD": Row("AEAMSGD", first=0.001),
    "SAGN": Row("SAGN", first=0.01),
    "Local-SGD": Row("Local-SGD", first=0.2),
    "DiLoCo": Row("DiLoCo", LOCAL, 0.004),
    "DiLoCo, H = 50": Row("DiLoCo", LOCAL, 0.004, {"window": 50}),
    "Streaming-DiLoCo": Row("Streaming-DiLoCo", LOCAL, 0.004),
    "SparseLoCo": Row("SparseLoCo", LOCAL, 0.004),
    "Asynchronous-DiLoCo": Row("Asynchronous-DiLoCo", LOCAL, 0.004),
}


class Reached(NamedTuple):
    """What came of a run: where it had its target, None if never; the best that was measured; the mean staleness.

    The best is the problem's metric times its sign, so more is better.
    """

    seconds: float | None
    samples: float | None
    megabytes: float | None
    best: float
    staleness: float | None

    @property
    def order(self):
        """A key by which runs are compared, the better one first: those that reached the target by their time."""
        return (1, -self.best) if self.seconds is None else (0, self.seconds)


class Trial:
    """A scheme with fixed flags in one graph, in which one run after the other is made.

    Args:
      row: `Row`.
      problem: `Problem`.
      num_workers: how many.
      rate: the value of the row's flag.
    """

    def __init__(self, row, problem, num_workers, rate):
        import simulate

        from common.cli import api
        from common.data import datasets

        self._problem, self._num_workers = problem, num_workers
        flags = {**problem.flags, **CLUSTER, **row.flags, "num_workers": num_workers, "batch_size": BATCH}
        if row.folder == "Synchronous-SGD-different-learning-rates":  # every other worker has a tenth; their sum is the rate
            shares = np.resize([1.0, 0.1], num_workers)
            flags["learning_rates"] = (rate * shares / shares.sum()).tolist()
        else:
            flags[row.rate] = rate
        scheme, self._settings = simulate.parse([row.folder, *api.as_arguments(flags)])
        self._costs_of = simulate.costs_of
        self._dataset = datasets.load(self._settings.data, 0)
        run = simulate.Run(scheme, self._settings)
        self.engine, self.size = run.engine, run.model.size
        self._beginnings: dict[int, Any] = {}
        # If all wait for all, the order of arrival changes no update: it is trained once, and the clock tells the time of each.
        self._all_wait = self.engine.waiting.quorum == num_workers
        self._measured: dict[tuple, list[float]] = {}
        local = np.array([action.local_steps for action in self.engine.actions])
        self._samples = local * BATCH  # of each step of a round
        self._bytes = np.array([action.up + action.down for action in self.engine.actions])
        of_update = self._samples.sum() * (self.engine.waiting.quorum or 1) / sum(a.writes for a in self.engine.actions)
        self._updates = max(1, round(problem.every / of_update))  # between two evaluations

    def run(self, condition, seed, most=math.inf):
        """Trains until the target; returns what was `Reached`.

        Args:
          condition: `Condition`.
          seed: of the model, the order of the samples and the times.
          most: virtual seconds after which to give up.
        """
        problem, clock = self._problem, self.clock(condition, seed)
        key = (seed, condition.non_iid)
        known = self._measured.get(key)
        most = math.inf if self._all_wait and not known else most  # so that what is known is whole
        if known is None:
            self.engine.restart(self._shards(condition, seed), self._beginning(seed))
        rows = [(0.0, 0.0, 0.0, known[0] if known else self._measure())]
        stale, count = 0.0, 0
        while math.isfinite(rows[-1][3]) and rows[-1][3] < problem.sign * problem.target:
            if rows[-1][1] >= problem.samples or clock.now > most:
                break
            part = clock.run(clock.updates + max(self._updates, clock.updates // 50))
            value = known[len(rows)] if known else self._train(part)
            stales = part.staleness()
            stale, count = stale + float(stales.sum()), count + len(stales)
            samples, sent = (float(of_step[part.steps].sum()) for of_step in (self._samples, self._bytes))
            rows.append((clock.now, rows[-1][1] + samples, rows[-1][2] + sent / 1e6, value))
        if self._all_wait and known is None:
            self._measured[key] = [row[3] for row in rows]
        finite = [row[3] for row in rows if math.isfinite(row[3])]
        best, staleness = max(finite), stale / count if count else None
        at = crossing(rows, problem)
        return Reached(None, None, None, best, staleness) if at is None or at[0] > most else Reached(*at, best, staleness)

    def _train(self, part):
        """Makes the steps of a schedule; returns the metric after them, NaN if a loss was not finite."""
        losses = self.engine.run(part.steps, part.workers).losses
        return self._measure() if np.all(np.isfinite(losses[self._samples[part.steps] > 0])) else math.nan

    def clock(self, condition, seed=0, spans_until=0.0):
        """Returns the `common.simulation.VirtualTime` of a condition."""
        from common.simulation import VirtualTime

        costs = self._costs_of(self._settings.but(**as_lists(condition.flags)))
        step = np.full(self._num_workers, costs.step)
        step[-1] *= condition.slow
        costs = dataclasses.replace(costs, step=step)
        return VirtualTime(self.engine.actions, self._num_workers, costs, self.engine.waiting, seed, spans_until)

    def _shards(self, condition, seed):
        from common.simulation import shards_of

        return shards_of(self._dataset, self._num_workers, BATCH, seed, condition.non_iid)

    def _beginning(self, seed):
        from common.models import keras_model

        if seed not in self._beginnings:
            built = keras_model.build(self._settings.model, self._dataset, seed, self._settings.loss)
            self._beginnings[seed] = built.initial_parameters
        return self._beginnings[seed]

    def _measure(self):
        from common.training import measured

        return self._problem.sign * measured(self.engine.evaluate(*self._dataset.test))[self._problem.metric]

    def state(self):
        """Returns how many numbers a worker keeps, and the ps keep, in multiples of the model.

        The gradient counts, and in a cluster the ps keep what `center.exact` remembers of x̃ for each worker.
        """
        from common import tf

        def multiples(variables):
            floats = [v for v in variables if v.dtype.base_dtype.is_floating]
            return round(sum(v.shape.num_elements() for v in floats) / self.size, 2)

        keys = tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.GLOBAL_VARIABLES
        local, of_ps = (self.engine.graph.get_collection(key) for key in keys)
        remembered = [v for v in local if "/pulled_value_" in v.name]
        own = [v for v in local if all(v is not each for each in remembered) and not v.name.startswith("samples/")]
        return {"worker": multiples(own), "ps": multiples(of_ps) + self._num_workers * multiples(remembered)}

    def close(self):
        """Closes the session."""
        self.engine.close()


def as_lists(flags):
    """Returns flags with those that are one for each worker as lists, as `common.core.flags` parses them."""
    return {name: [float(value)] if name in ("latency_ms", "mbit") else value for name, value in flags.items()}


def crossing(rows, problem) -> tuple[float, float, float] | None:
    """Returns (seconds, samples, megabytes) where the metric first came to the target, between two evaluations.

    Args:
      rows: (seconds, samples, megabytes, metric times its sign), of an evaluation each; only the last may have come there.
      problem: `Problem`.
    """
    after, target = rows[-1], problem.sign * problem.target
    if not after[3] >= target:
        return None
    before = rows[-2] if len(rows) > 1 else after
    share = (target - before[3]) / (after[3] - before[3]) if len(rows) > 1 else 1.0
    seconds, samples, sent = (b + share * (a - b) for b, a in zip(before[:3], after[:3], strict=True))
    return seconds, samples, sent


def climb(first, try_rate):
    """Returns {rate: Reached} of the rates that were tried: `first`, and in steps of two as long as it becomes better.

    Args:
      first: where to begin.
      try_rate: function of a rate and the virtual seconds after which to give up, returns `Reached`.
    """
    tried = {first: try_rate(first, math.inf)}
    best = first
    for factor in (2.0, 0.5):
        while (rate := best * factor) not in tried:
            most = tried[best].seconds
            tried[rate] = try_rate(rate, math.inf if most is None else most)
            if tried[rate].order >= tried[best].order:
                break
            best = rate
    return tried


def best_of(tried):
    """Returns the rate that was best, of {rate: Reached}."""
    return min(tried, key=lambda rate: tried[rate].order)


def of_row(name, conditions, seeds, others=(), search=True):
    """Returns what is known of a row of the table, and what it needs until the target under conditions, to be written as JSON.

    Args:
      name: of `ROWS`.
      conditions: names of `CONDITIONS`.
      seeds: how many; the search for the best rate takes the first one alone. If no rate reaches the target with it, that is
        the only one.
      others: names of `OTHERS`.
      search: whether to search for the best rate, under each condition; else the first one is taken.
    """
    row = ROWS[name]
    with contextlib.closing(Trials(row, PROBLEM)) as trials:
        first, found = row.first, {}
        for what in conditions:
            found[what] = trials.found(CONDITIONS[what], first, seeds, search)
            first = found[what]["rate"] if what == "all equal" else first
        about = trials.about(first)
    of_others = {}
    for what in others:
        problem = OTHERS[what]
        with contextlib.closing(Trials(row, problem)) as trials:
            of_others[what] = trials.found(CONDITIONS["all equal"], row.first * problem.times, seeds, search)
    return {"folder": row.folder, "flags": row.flags, "rate_flag": row.rate, **about, "found": found, "others": of_others}


class Trials:
    """The `Trial`s of a row and a problem, one for each rate."""

    def __init__(self, row, problem):
        self._row, self._problem = row, problem
        self._trials: dict[float, Trial] = {}

    def _of(self, rate):
        if rate not in self._trials:
            self._trials[rate] = Trial(self._row, self._problem, WORKERS, rate)
        return self._trials[rate]

    def found(self, condition, first, seeds, search):
        """Returns the best rate, which ones were tried, and the runs with the best, see `of_row`."""

        def attempt(rate, most):
            return self._of(rate).run(condition, 0, most)

        tried = climb(first, attempt) if search else {first: attempt(first, math.inf)}
        rate = best_of(tried)
        more = range(1, seeds if tried[rate].seconds is not None else 1)  # no more if no rate reaches it
        runs = [tried[rate], *(self._of(rate).run(condition, seed) for seed in more)]
        return {
            "rate": rate,
            "tried": {f"{each:g}": self._as_json(reached) for each, reached in sorted(tried.items())},
            "runs": [self._as_json(each) for each in runs],
        }

    def _as_json(self, reached):
        """Returns what was `Reached` as a dict of short numbers, the best one as the problem's metric has it."""
        whole = reached._replace(best=self._problem.sign * reached.best)._asdict()
        return {name: None if value is None else float(f"{value:.5g}") for name, value in whole.items()}

    def about(self, rate):
        """Returns what is known of the scheme without training: what it does, sends, waits for and keeps."""
        trial = self._of(rate)
        return {
            "parameters": trial.size,
            "actions": [action._asdict() for action in trial.engine.actions],
            "waiting": {k: None if v is None or math.isinf(v) else v for k, v in trial.engine.waiting._asdict().items()},
            "state": trial.state(),
        }

    def close(self):
        """Closes their sessions."""
        for each in self._trials.values():
            each.close()
