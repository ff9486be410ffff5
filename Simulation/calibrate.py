"""Fits the numbers of the virtual cluster to real runs of the same scheme, and says how well they fit.

A run's metrics have how long the parts of some rounds took, how many samples each worker made in which time, and the staleness
of each update. From these come the time of a local step, how much it varies, and what a message costs: its latency or, where
that is known, what its bytes take. The links are as the flags say.
"""

import collections
import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.core import UserError, read_metrics

FEW = 10  # with fewer local trainings that were timed, --step_cv is 0
MOST_CV = 10.0  # see --step_cv
ROUNDS = 300  # of a worker, which the clock simulates to find the latency
HALVINGS = 20
COMPRESSION = {"compress": "none", "compress_pull": "none", "topk": None}  # flags, with what runs had that do not say it


class Measured(NamedTuple):
    """What a real run has measured, from when all its workers train.

    Attributes:
      path: its folder.
      result: what its result.json says.
      timed: the rounds that were timed, {part: seconds}: a list of each worker.
      delays: seconds that each worker's local trainings took longer by --delays.
      samples_per_second: of each worker.
      staleness: number of updates by their staleness, a `Counter`.
    """

    path: str
    result: dict
    timed: list
    delays: list
    samples_per_second: list
    staleness: Any


class Fit(NamedTuple):
    """What was found, as `common.simulation.Costs` has it: seconds, bytes per second each way; None if it was not fitted."""

    step: float
    step_cv: float
    latency: float | None = None
    bandwidth: float | None = None

    def costs(self, costs):
        """Returns the `common.simulation.Costs` with what was found in them."""
        found = {"step": self.step, "step_cv": self.step_cv}
        if self.latency is not None:
            found["latency"] = self.latency
        if self.bandwidth is not None:
            found |= {"bandwidth_up": self.bandwidth, "bandwidth_down": self.bandwidth}
        return dataclasses.replace(costs, **found)


class Simulated(NamedTuple):
    """What virtual time says of a run: rounds per second of all workers, and the number of updates by their staleness."""

    rounds_per_second: float
    staleness: Any


def read(path):
    """Returns what a run in a folder has `Measured`.

    Raises:
      UserError: if there is no run, if it is not a real run of a scheme, or if it measured too little.
    """

    def error(text):
        return UserError(f"--calibrate={path}: {text}")

    try:
        result = json.loads(Path(path, "result.json").read_text()) if path else None
    except (OSError, ValueError):
        result = None
    if not isinstance(result, dict):
        raise error("expected the folder of a finished run, with a result.json")
    if result.get("simulated"):
        raise error("it is a simulated run; expected a real one")
    if missing := {"delays", "flags_of_scheme"} - {name for name, value in result.items() if value is not None}:
        what = f"its result.json has no `{min(missing)}`"
        raise error(f"{what}: it is of an older version, or of a script with a main loop of its own")
    if "all-reduce" in (result.get("parts") or {}):
        raise error("its workers average by an all-reduce, which cannot be simulated")
    damaged = error("its result.json or its metrics are damaged")
    if not isinstance(result["flags_of_scheme"], dict) or not isinstance(result.get("batch_size"), int):
        raise damaged
    lines = read_metrics(path)
    if result.get("restarts") or sum("parameters" in line for line in lines) > 1:
        raise error("tasks were restarted, or the run was resumed; expected an uninterrupted run")
    try:
        return _measured(str(path), result, lines, error)
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        raise damaged from None


def _measured(path, result, lines, error):
    by_worker: dict[int, list] = {i: [] for i in range(result["num_workers"])}
    for line in lines:
        if line["worker"] in by_worker and "samples" in line:
            by_worker[line["worker"]].append(line)
    timed, rates = [], []
    staleness: collections.Counter[int] = collections.Counter()
    for i, own in by_worker.items():
        if not own:
            raise error(f"there are no metrics of worker {i}")
        # Until the first round that counts as timed, a worker has prepared its graphs, and waited for others that did.
        begun = next((k for k, line in enumerate(own) if line.get("timed_rounds")), len(own))
        timed.append([seconds for line in own for seconds in line.get("timed_rounds") or []])
        gradients = seconds = 0.0
        for line in own[begun + 1 :]:
            counts = {int(k): int(n) for k, n in line["staleness"].items()}
            staleness.update(counts)
            if rate := line.get("samples_per_second"):
                made = sum(counts.values()) + line.get("gradients_dropped", 0)
                gradients, seconds = gradients + made, seconds + made / rate  # as weights of the rates
        if not seconds:
            raise error(f"worker {i} has timed no round, or its run is too short: train for longer")
        rates.append(gradients / seconds)
    delays = [float(delay) / 1000 for delay in result["delays"]]
    return Measured(path, result, timed, [*delays, *[0.0] * (len(rates) - len(delays))], rates, staleness)


def check(measured, settings, variables):
    """Checks that a run was made with the scheme, the model and the batches of a simulation.

    Args:
      measured: `Measured`.
      settings: all flags.
      variables: `common.models.Model.description` of the model.

    Raises:
      UserError: if not.
    """
    for name in ("scheme", "num_ps", "data", "batch_size", "window", *COMPRESSION):
        was = measured.result.get(name, COMPRESSION.get(name))
        now = settings.run.scheme if name == "scheme" else getattr(settings, name)
        if was != now:
            what = f"it is a run of {was}" if name == "scheme" else f"it was made with --{name}={was}"
            raise UserError(f"--calibrate={measured.path}: {what}, not {now}")
    try:
        before = json.loads(Path(measured.path, "model.json").read_text())["variables"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"--calibrate={measured.path}: its model.json is missing or damaged") from None
    if before != variables:
        raise UserError(f"--calibrate={measured.path}: it trained another model than --model={settings.model}")
    if unknown := [name for name in measured.result["flags_of_scheme"] if not hasattr(settings, name)]:
        raise UserError(f"--calibrate={measured.path}: its scheme had a flag --{unknown[0]}, which no longer exists")
    for name in ("latency_ms", "mbit", "mbit_up"):
        count, n = len(getattr(settings, name) or []), measured.result["num_workers"]
        if count > 1 and n != settings.num_workers:
            raise UserError(
                f"--calibrate={measured.path}: it has {n} workers, but --{name} has {count} values: give one for all"
            )


class Clock(NamedTuple):
    """The virtual time of a real run.

    Attributes:
      run: the `Measured`.
      actions: of a round, with the flags that its scheme had, `common.simulation.Action`s.
      begin: a function of a `Fit` that returns the `common.simulation.VirtualTime` of its workers.
    """

    run: Measured
    actions: list
    begin: Any

    @property
    def windows(self):
        """Local trainings of a round, each of which takes the run's delay longer."""
        return sum(action.local_steps > 0 for action in self.actions)

    @property
    def local_steps(self):
        """Of a round, of all its trainings."""
        return sum(action.local_steps for action in self.actions)

    @property
    def most_bytes(self):
        """Of the largest message of a round."""
        return max(max(action.up, action.down) for action in self.actions)

    @property
    def rounds_per_second(self):
        """How many rounds all workers of the real run made in a second."""
        return sum(self.run.samples_per_second) / (self.run.result["batch_size"] * self.local_steps)

    @property
    def round_seconds(self):
        """Seconds of a round of the slowest worker of the real run."""
        return self.run.result["batch_size"] * self.local_steps / min(self.run.samples_per_second)

    def trainings(self):
        """Returns the seconds of local training in the rounds that were timed, without --delays: an array of each worker."""
        found = []
        for timed, delay in zip(self.run.timed, self.run.delays, strict=True):
            seconds = [parts.get("train", 0.0) + parts.get("input", 0.0) for parts in timed]
            found.append(np.maximum(np.array(seconds) - self.windows * delay, 0.0))
        return found

    def simulate(self, found):
        """Returns the `Simulated` of a `Fit`, after about `ROUNDS` rounds of each worker."""
        clock = self.begin(found)
        schedule = clock.run(until=ROUNDS * self.round_seconds)
        rounds = float(np.sum(schedule.steps == 0))
        return Simulated(rounds / clock.now if rounds else 0.0, collections.Counter(schedule.staleness().tolist()))


def fit(clocks, is_latency_known=False):
    """Returns the `Fit` that suits the runs of some `Clock`s best; of the bandwidth, if the latency is known."""
    # What a local step takes, and how much it varies: in a round of n of them the variance is n times as large.
    own = [(each, clock.local_steps) for clock in clocks for each in clock.trainings()]
    step = sum(float(np.sum(each)) for each, _ in own) / sum(len(each) * n for each, n in own)
    freedom, cv = sum(len(each) - 1 for each, _ in own), 0.0
    if freedom >= FEW and step > 0:
        variance = sum(float(np.sum((each - each.mean()) ** 2)) / n for each, n in own) / freedom
        cv = min(math.sqrt(variance) / step, MOST_CV)
    most_bytes = max(clock.most_bytes for clock in clocks)

    def found(seconds):
        """Returns the `Fit` in which the largest message takes so many seconds, because of latency or of bandwidth."""
        if not is_latency_known:
            return Fit(step, cv, latency=seconds)
        return Fit(step, cv, bandwidth=most_bytes / seconds if seconds else math.inf)

    def is_too_fast(seconds):
        """Whether the simulated runs are faster than the real ones, by geometric mean."""
        logarithms = 0.0
        for clock in clocks:
            simulated = clock.simulate(found(seconds)).rounds_per_second
            if not simulated:
                return False
            logarithms += math.log(simulated / clock.rounds_per_second)
        return logarithms > 0

    if not is_too_fast(0.0):
        return found(0.0)
    low, high = 0.0, max(clock.round_seconds for clock in clocks)  # of which a message is only a part
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_fast(middle) else (low, middle)
    return found((low + high) / 2)


def distance(one, other):
    """Returns the total variation between two distributions, `Counter`s: 0 if they are equal, 1 if they share nothing."""
    if not one or not other:
        return math.nan
    return sum(abs(one[k] / one.total() - other[k] / other.total()) for k in one | other) / 2


def mean_of(counts):
    """Returns the mean of a distribution, a `Counter`."""
    return sum(k * n for k, n in counts.items()) / counts.total() if counts else math.nan


def report(clock, found):
    """Returns how well a real run and its `Clock` with a `Fit` agree, as result.json says it."""
    run, simulated = clock.run, clock.simulate(found)
    numbers = {
        "rounds_per_second": clock.rounds_per_second,
        "simulated_rounds_per_second": simulated.rounds_per_second,
        "staleness_mean": mean_of(run.staleness),
        "simulated_staleness_mean": mean_of(simulated.staleness),
        "staleness_distance": distance(run.staleness, simulated.staleness),
    }
    known = {name: None if math.isnan(value) else value for name, value in numbers.items()}
    return {"path": run.path, "num_workers": run.result["num_workers"], **known}
