"""Fits the numbers of the virtual cluster to real runs of the same scheme, and says how well they fit.

A run's metrics have how long the parts of some rounds took, how many samples each worker made in which time, and the staleness
of each update. From these come the time of a local step, how much it varies, and what a message costs: its latency or, where
that is known, what its bytes take. What the flags say of links is taken as it is.
"""

import collections
import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.flags import UserError
from common.plots import read_metrics

FEW = 10  # with fewer local trainings that were timed, --step_cv is 0
MOST_CV = 10.0  # see --step_cv
ROUNDS = 300  # of a worker, which the clock simulates to find the latency
HALVINGS = 20


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
    """What was found, as `common.virtual_time.Costs` has it: seconds, and bytes per second each way; None if not looked for."""

    step: float
    step_cv: float
    latency: float | None = None
    bandwidth: float | None = None

    def costs(self, costs):
        """Returns the `common.virtual_time.Costs` with what was found in them."""
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
      UserError: if there is no run, it is none of a scheme with real workers, or it has measured too little.
    """

    def error(text):
        return UserError(f"--calibrate={path}: {text}")

    try:
        result = json.loads(Path(path, "result.json").read_text()) if path else None
    except (OSError, ValueError):
        result = None
    if not isinstance(result, dict):
        raise error("expected the folder of a run that has come to its end, with a result.json")
    if result.get("simulated"):
        raise error("it is a simulated run; expected a real one")
    if missing := {"delays", "flags_of_scheme"} - set(result):
        what = f"its result.json has no `{min(missing)}`"
        raise error(f"{what}: it is of an older version, or of a script with a main loop of its own")
    if "all-reduce" in (result.get("parts") or {}):
        raise error("its workers average by an all-reduce, which cannot be simulated")
    lines = read_metrics(path)
    if result.get("restarts") or sum("parameters" in line for line in lines) > 1:
        raise error("tasks were started again, or it was resumed; expected a run that went through")
    try:
        return _measured(str(path), result, lines, error)
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        raise error("its result.json or its metrics are damaged") from None


def _measured(path, result, lines, error):
    per_gradient = result["batch_size"] * result["window"]
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
        samples = seconds = 0.0
        for line in own[begun + 1 :]:
            counts = {int(k): int(n) for k, n in line["staleness"].items()}
            staleness.update(counts)
            if rate := line.get("samples_per_second"):
                made = per_gradient * (sum(counts.values()) + line.get("gradients_dropped", 0))
                samples, seconds = samples + made, seconds + made / rate
        if not seconds:
            raise error(f"worker {i} has timed no round, or is too short: let it train for longer")
        rates.append(samples / seconds)
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
    for name in ("scheme", "num_ps", "data", "batch_size", "window"):
        was, now = measured.result.get(name), getattr(settings, name)
        if was != now:
            what = f"it is a run of {was}" if name == "scheme" else f"it was made with --{name}={was}"
            raise UserError(f"--calibrate={measured.path}: {what}, not {now}")
    try:
        before = json.loads(Path(measured.path, "model.json").read_text())["variables"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"--calibrate={measured.path}: its model.json is missing or damaged") from None
    if before != variables:
        raise UserError(f"--calibrate={measured.path}: it trained another model than --model={settings.model}")
    for name in ("latency_ms", "mbit", "mbit_up"):
        count, n = len(getattr(settings, name) or []), measured.result["num_workers"]
        if count > 1 and n != settings.num_workers:
            raise UserError(f"--calibrate={measured.path}: it has {n} workers, and --{name} has {count}: give one for all")


def fit(runs, clocks, windows, local_steps, most_bytes=None):
    """Returns the `Fit` that suits some runs best.

    Args:
      runs: `Measured` of each.
      clocks: of each, a function of a `Fit` that returns the `common.virtual_time.VirtualTime` of its workers.
      windows: local trainings of a round, each of which takes the run's delay longer.
      local_steps: of a round, of all its trainings.
      most_bytes: of the largest message of a round, if the latency is known and the bandwidth is to be found; else None.
    """
    own = [_trainings(run, i, windows) for run in runs for i in range(run.result["num_workers"])]
    mean, freedom = float(np.mean(np.concatenate(own))), sum(len(each) - 1 for each in own)
    cv = 0.0
    if freedom >= FEW and mean > 0:
        deviation = math.sqrt(sum(float(np.sum((each - each.mean()) ** 2)) for each in own) / freedom)
        cv = min(deviation / mean * math.sqrt(local_steps), MOST_CV)

    def found(seconds):
        """Of so many seconds that the largest message takes: by its latency, or by its bytes."""
        if most_bytes is None:
            return Fit(mean / local_steps, cv, latency=seconds)
        return Fit(mean / local_steps, cv, bandwidth=most_bytes / seconds if seconds else math.inf)

    def is_too_fast(seconds):
        """Whether the clocks are faster than the runs were, in their geometric mean."""
        logarithms = 0.0
        for run, clock in zip(runs, clocks, strict=True):
            simulated = simulate(run, clock(found(seconds)), local_steps).rounds_per_second
            if not simulated:
                return False
            logarithms += math.log(simulated / rounds_per_second(run, local_steps))
        return logarithms > 0

    if not is_too_fast(0.0):
        return found(0.0)
    low, high = 0.0, max(_round_seconds(run, local_steps) for run in runs)  # of which a message is only a part
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_fast(middle) else (low, middle)
    return found((low + high) / 2)


def _trainings(run, worker, windows):
    """Returns the seconds of the local trainings of a worker's rounds that were timed, without the delay that it was given."""
    seconds = [timed.get("train", 0.0) + timed.get("input", 0.0) for timed in run.timed[worker]]
    return np.maximum(np.array(seconds) - windows * run.delays[worker], 0.0)


def rounds_per_second(run, local_steps):
    """Returns how many rounds all workers of a `Measured` made in a second."""
    return sum(run.samples_per_second) / (run.result["batch_size"] * local_steps)


def _round_seconds(run, local_steps):
    """Returns the seconds of a round of the slowest worker."""
    return run.result["batch_size"] * local_steps / min(run.samples_per_second)


def simulate(run, clock, local_steps):
    """Returns the `Simulated` of a `common.virtual_time.VirtualTime`, after about `ROUNDS` rounds of each worker of a run."""
    schedule = clock.run(until=ROUNDS * _round_seconds(run, local_steps))
    rounds = float(np.sum(schedule.steps == 0))
    return Simulated(rounds / clock.now if rounds else 0.0, collections.Counter(schedule.staleness().tolist()))


def distance(one, other):
    """Returns the total variation between two distributions, `Counter`s: 0 if they are equal, 1 if they share nothing."""
    if not one or not other:
        return math.nan
    return sum(abs(one[k] / one.total() - other[k] / other.total()) for k in one | other) / 2


def mean_of(counts):
    """Returns the mean of a distribution, a `Counter`."""
    return sum(k * n for k, n in counts.items()) / counts.total() if counts else math.nan


def report(run, clock, found, local_steps):
    """Returns how well a run and its virtual time agree, as result.json says it.

    Args:
      run: `Measured`.
      clock: function of a `Fit`, see `fit`.
      found: the `Fit`.
      local_steps: of a round.
    """
    simulated = simulate(run, clock(found), local_steps)
    numbers = {
        "rounds_per_second": rounds_per_second(run, local_steps),
        "simulated_rounds_per_second": simulated.rounds_per_second,
        "staleness_mean": mean_of(run.staleness),
        "simulated_staleness_mean": mean_of(simulated.staleness),
        "staleness_distance": distance(run.staleness, simulated.staleness),
    }
    known = {name: None if math.isnan(value) else value for name, value in numbers.items()}
    return {"path": run.path, "num_workers": run.result["num_workers"], **known}
