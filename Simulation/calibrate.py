"""Fits the numbers of the virtual cluster to real runs of the same scheme, and says how well they fit.

A run's metrics have how long the parts of some rounds took, how many samples each worker made in which time, and the staleness
of each update. From these come the time of a local step, how much it varies, and the latency of a message, in which all is that
a message costs besides the bytes that a link with a limit carries: what the flags say of that is taken as it is.
"""

import collections
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.flags import UserError
from common.plots import read_metrics

FEW = 10  # local trainings whose times are too few to say how much they vary
ROUNDS = 300  # of a worker, which the clock simulates to find the latency
HALVINGS = 20
MOST_LATENCY = 10.0  # seconds
MOST_CV = 10.0  # as --step_cv may have


class Measured(NamedTuple):
    """What a real run has measured.

    Attributes:
      path: its folder.
      result: what its result.json says.
      trainings: seconds of local trainings, without --delays: a list of arrays, one of each worker.
      round_seconds: seconds of a round of each worker, over all of the run.
      staleness: number of updates by their staleness.
    """

    path: str
    result: dict
    trainings: list
    round_seconds: list
    staleness: Any


class Fit(NamedTuple):
    """What was found, in seconds: see `common.virtual_time.Costs`."""

    step: float
    step_cv: float
    latency: float


def read(path, local_steps):
    """Returns what a run in a folder has `Measured`; `local_steps` are those of a round.

    Raises:
      UserError: if there is no run, or it has measured too little.
    """
    try:
        result = json.loads(Path(path, "result.json").read_text())
        workers, delays = range(result["num_workers"]), result["delays"]
        by_worker = [[line for line in read_metrics(path) if line["worker"] == i] for i in workers]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"--calibrate={path}: expected the folder of a run of a scheme that has come to its end") from None
    trainings, seconds = [], []
    staleness: collections.Counter[int] = collections.Counter()
    for i, lines in enumerate(by_worker):
        rounds = [timed for line in lines for timed in line.get("timed_rounds", [])]
        of_speed = [line for line in lines if line.get("samples_per_second")][1:]  # the first one has the beginning in it
        if not rounds or not of_speed:
            raise UserError(f"--calibrate={path}: worker {i} has timed no round, or is too short: let it train for longer")
        delay = delays[i] / 1000 if i < len(delays) else 0.0
        trainings.append(np.array([max(timed.get("train", 0.0) + timed.get("input", 0.0) - delay, 0.0) for timed in rounds]))
        # Each line is of about as long a time.
        samples = float(np.mean([line["samples_per_second"] for line in of_speed]))
        seconds.append(result["batch_size"] * local_steps / samples)
        for line in lines:
            staleness.update({int(k): n for k, n in (line.get("staleness") or {}).items()})
    return Measured(str(path), result, trainings, seconds, staleness)


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
            flag = "it is a run of" if name == "scheme" else f"it was made with --{name}="
            raise UserError(f"--calibrate={measured.path}: {flag}{' ' * (name == 'scheme')}{was}, and this is {now}")
    try:
        before = json.loads(Path(measured.path, "model.json").read_text())["variables"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"--calibrate={measured.path}: model.json is missing or damaged, which says what the run trained"
        ) from None
    if before != variables:
        raise UserError(f"--calibrate={measured.path}: it trained another model than --model={settings.model}")


def fit(runs, clocks, local_steps):
    """Returns the `Fit` that suits some runs best.

    Args:
      runs: `Measured` of each.
      clocks: of each, a function of a `Fit` that returns the `common.virtual_time.VirtualTime` of its workers.
      local_steps: of a round.
    """
    trainings = np.concatenate([of_worker for run in runs for of_worker in run.trainings])
    mean = float(np.mean(trainings))
    varies = len(trainings) >= FEW and mean > 0
    found = Fit(
        mean / local_steps, min(float(np.std(trainings)) / mean * math.sqrt(local_steps), MOST_CV) if varies else 0.0, 0.0
    )

    def is_too_fast(latency):
        """Whether the clocks are faster than the runs were, in their geometric mean."""
        simulated = [compare(run, clock(found._replace(latency=latency))) for run, clock in zip(runs, clocks, strict=True)]
        return sum(math.log(one.speed / speed(run)) for one, run in zip(simulated, runs, strict=True)) > 0

    low, high = 0.0, MOST_LATENCY
    if not is_too_fast(low):
        return found
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_fast(middle) else (low, middle)
    return found._replace(latency=(low + high) / 2)


class Simulated(NamedTuple):
    """What virtual time says of a run: rounds per second of all workers, and the number of updates by their staleness."""

    speed: float
    staleness: Any


def speed(run):
    """Returns the rounds per second of all workers of a run."""
    return sum(1 / seconds for seconds in run.round_seconds)


def compare(run, clock):
    """Returns the `Simulated` of a `common.virtual_time.VirtualTime`, after about `ROUNDS` rounds of each worker of a run."""
    schedule = clock.run(until=ROUNDS * max(run.round_seconds))
    made = (schedule.pulled >= 0) & (schedule.updated > schedule.pulled)
    stale = (schedule.updated - 1 - schedule.pulled)[made]
    return Simulated(float(np.sum(schedule.steps == 0)) / clock.now, collections.Counter(stale.tolist()))


def distance(one, other):
    """Returns the total variation between two distributions, `Counter`s: 0 if they are equal, 1 if they share nothing."""
    if not one or not other:
        return math.nan
    return sum(abs(one[k] / one.total() - other[k] / other.total()) for k in one | other) / 2


def mean_of(counts):
    """Returns the mean of a distribution, a `Counter`."""
    return sum(k * n for k, n in counts.items()) / counts.total() if counts else math.nan


def report(run, clock, found):
    """Returns how well a run and its virtual time agree, as result.json says it; the arguments are those of `fit`."""
    simulated = compare(run, clock(found))
    return {
        "run": run.path,
        "num_workers": run.result["num_workers"],
        "rounds_per_second": speed(run),
        "simulated_rounds_per_second": simulated.speed,
        "staleness_mean": mean_of(run.staleness),
        "simulated_staleness_mean": mean_of(simulated.staleness),
        "staleness_distance": distance(run.staleness, simulated.staleness),
    }
