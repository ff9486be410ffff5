"""Compares what the simulator predicts with what real runs do: `bash benchmarks/predictions.sh`, as root.

A ps and workers train the digits, each on a host of its own (`Multiple-Machines/hosts.py`), with links on which every packet
takes 20 ms, and with --delays that leave the cores room. The simulator knows these 20 ms, and is calibrated on the runs of one
and of two workers. Then it predicts the run of four, of which it knows when each worker began. Writes `predictions.json`
beside this file.
"""

import argparse
import collections
import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import compare

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "Multiple-Machines"), str(HERE.parent / "Simulation")]
import calibrate  # noqa: E402
import hosts  # noqa: E402
import numpy as np  # noqa: E402
import simulate  # noqa: E402
import time_to_accuracy  # noqa: E402

from common.cli import api, script_of  # noqa: E402
from common.core import counted, read_metrics  # noqa: E402

DELAY = 0.02  # seconds of each packet
KNOWN, PREDICTED = (1, 2), 4  # workers of the runs that are known, and of the run that is predicted
ACCURACY = 0.95
EVALUATION_SECS = 0.1  # a real run pauses ten times as long as an evaluation takes, so it makes about two a second
SCHEMES: dict[str, tuple[str, dict, list]] = {
    "HogWild": ("HogWild", {}, [40, 50, 60, 80]),
    "DOWNPOUR, window 10": ("DOWNPOUR", {"window": 10}, [40, 50, 60, 80]),
    "AEASGD": ("AEASGD", {}, [40, 50, 60, 80]),
    "Synchronous-SGD, a straggler": ("Synchronous-SGD", {}, [40, 40, 40, 100]),
    "Semi-Synchronous-SGD": ("Semi-Synchronous-SGD", {}, [40, 50, 60, 80]),
}
# What is compared, and how far off it may be: the total variation at most that, all else by that share of what was measured.
FIGURES = {
    "samples_per_second": ("samples/s", 0.15),
    "staleness_mean": ("mean staleness", 0.15),
    "distance": ("total variation of the staleness", 0.1),
    "seconds": (f"seconds until {ACCURACY:.0%}", 0.25),
}


def main():
    """Runs all, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each scheme (default: 3)")
    parser.add_argument("--seconds", type=float, default=30, help="of training in each (default: 30)")
    parser.add_argument("schemes", nargs="*", help=f"some of: {'; '.join(SCHEMES)} (default: all)")
    options = parser.parse_args()
    names = options.schemes or list(SCHEMES)
    if unknown := [name for name in names if name not in SCHEMES]:
        parser.error(f"there is no scheme {unknown[0]}: choose from {'; '.join(SCHEMES)}")
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("--rounds must be at least 1, and --seconds greater than 0")
    if problem := hosts.why_not():
        parser.error(problem)
    os.chdir(HERE.parent)
    found: dict[str, list] = {name: [] for name in names}
    for seed, name in counted([(seed, name) for seed in range(options.rounds) for name in names], "runs"):
        found[name].append(one_round(name, options.seconds, seed))
        print(f"{name}, seed {seed}: {as_text(found[name][-1])}", flush=True)
        report = {
            "command": "bash benchmarks/predictions.sh",
            "cores": os.cpu_count(),
            "rounds": options.rounds,
            "seconds": options.seconds,
            "schemes": {each: rounds for each, rounds in found.items() if rounds},
        }
        (HERE / "predictions.json").write_text(json.dumps(report) + "\n")
    print(f"\n{table(report)}")


def one_round(name, seconds, seed):
    """Returns what was measured with four workers, and what was predicted from the runs with fewer."""
    scheme, flags, delays = SCHEMES[name]
    common = {"seed": seed, "seconds": seconds, "epochs": 1e6, "evaluation_secs": EVALUATION_SECS, **flags}
    with tempfile.TemporaryDirectory() as folder:
        paths = {n: f"{folder}/{n}" for n in (*KNOWN, PREDICTED)}
        for n, path in paths.items():
            words = api.as_arguments({**common, "delays": delays[:n]})
            with hosts.Hosts(n + 1, delay=DELAY) as some:
                hosts.train(some, str(script_of(scheme)), *words, f"--run_dir={path}")
        real, lines = calibrate.read(paths[PREDICTED]), read_metrics(paths[PREDICTED])
        trained = [line for line in lines if "samples" in line]
        known = {"calibrate": [paths[n] for n in KNOWN], "latency_ms": 1000 * DELAY, "start_at": begun(real, trained)}
        run = simulate.simulate(scheme, num_workers=PREDICTED, delays=delays, **known, **common)
    # The line of an evaluation has the step of its parameters, but the time of its end. The lines of training tell when that
    # step was. A real run has made some updates before all its workers train: from then on it is measured, and so is the other.
    first_step = at(trained, max(line["time"] for line in trained) - real.result["train_seconds"])
    start = when(run.lines, first_step)
    since = int(np.searchsorted(run.schedule.times, start))
    stale = {"measured": real.staleness, "predicted": collections.Counter(run.staleness(since).tolist())}
    samples = float(np.interp(start, *columns(run.lines[1:], "time", "samples")))
    speeds = real.result["samples_per_second"], (run.result["samples"] - samples) / (run.clock.now - start)
    figures: dict[str, dict] = {}
    both = ("measured", speeds[0], lines, trained), ("predicted", speeds[1], evaluated_as(lines, run.lines), run.lines)
    for kind, speed, curve, clock in both:
        step = reached_at(curve)
        figures[kind] = {
            "samples_per_second": speed,
            "staleness_mean": calibrate.mean_of(stale[kind]),
            "seconds": None if step is None else when(clock, step) - when(clock, first_step),
            "updates": step,
        }
    figures["predicted"]["distance"] = calibrate.distance(*stale.values())
    histograms = {kind: sorted(counts.items()) for kind, counts in stale.items()}
    return {**figures, "fit": run.calibration, "staleness": histograms}


def begun(real, trained):
    """Returns when each worker made its first step, in seconds since the first of all did.

    The first line of a worker has all that it made until then. A scheme learns otherwise where one worker begins alone.
    """
    found = []
    for worker, speed in enumerate(real.samples_per_second):
        line = min((line for line in trained if line["worker"] == worker), key=lambda line: line["time"])
        found.append(line["time"] - line["samples"] / speed)
    return [start - min(found) for start in found]


def evaluated_as(measured, predicted):
    """Returns predicted lines at the global steps at which a real run evaluated: else one might see what the other one missed.

    Args:
      measured, predicted: lines of both runs; the predicted one evaluated more often.
    """
    steps, accuracies = columns([line for line in predicted if "test_accuracy" in line], "global_step", "test_accuracy")
    seen = [line for line in measured if line.get("test_accuracy") is not None and line["global_step"] <= steps[-1]]
    return [line | {"test_accuracy": float(np.interp(line["global_step"], steps, accuracies))} for line in seen]


def columns(lines, *names):
    """Returns the values of lines, an array of each name, in the order of time."""
    known = [[line[name] for name in names] for line in sorted(lines, key=lambda line: line["time"])]
    return np.array(known, float).T


def at(lines, time):
    """Returns the global step at a time, between two lines."""
    return float(np.interp(time, *columns(lines, "time", "global_step")))


def when(lines, step):
    """Returns the time of a global step, between two lines."""
    times, steps = columns(lines, "time", "global_step")
    return float(np.interp(step, np.maximum.accumulate(steps), times))


def reached_at(lines):
    """Returns the global step at which the accuracy was reached first, between two evaluations; None if never."""
    evaluated = [line for line in lines if line.get("test_accuracy") is not None]
    reached = time_to_accuracy.reached_at(columns(evaluated, "global_step", "test_accuracy").T, ACCURACY)
    return None if reached is None else float(reached[0])


def as_text(one):
    """Says what was predicted and measured in a round."""
    parts = []
    for key, (title, _) in FIGURES.items():
        measured, predicted = one["measured"].get(key), one["predicted"].get(key)
        parts.append(f"{title} {number(predicted)}" + (f" for {number(measured)}" if key != "distance" else ""))
    return ", ".join(parts)


def median(values):
    """Returns the median; None if at least half are, which counts as infinite."""
    middle = statistics.median(math.inf if value is None else value for value in values)
    return middle if math.isfinite(middle) else None


def number(value):
    """Returns a number as text; a dash for None."""
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def table(report):
    """Returns a Markdown table: the medians of what was predicted and measured, (!) where they are too far apart."""
    titles = [title for title, _ in FIGURES.values()]
    lines = [f"| predicted / measured, 4 workers | {' | '.join(titles)} |", "|---" + "|---:" * len(titles) + "|"]
    for name, rounds in report["schemes"].items():
        cells = []
        for key, (_, most) in FIGURES.items():
            predicted = [one["predicted"][key] for one in rounds]
            if key == "distance":
                value = statistics.median(predicted)
                cells.append(f"{value:.2f}{'' if value <= most else ' (!)'}")
                continue
            p, m = (median(values) for values in (predicted, [one["measured"][key] for one in rounds]))
            close = p == m or None not in (p, m) and abs(p - m) <= most * m + 1e-9
            cells.append(f"{number(p)} / {number(m)}{'' if close else ' (!)'}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    compare.interruptible(main)
