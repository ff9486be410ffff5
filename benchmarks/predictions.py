"""Compares what the simulator predicts with what real runs do: `bash benchmarks/predictions.sh`, as root.

A ps and workers train the digits, each on a host of its own (`Multiple-Machines/hosts.py`), with links on which every packet
takes 20 ms, and with --delays that leave the two cores room. The simulator is calibrated on the runs of one and of two workers.
Then it predicts the run of four. Writes `predictions.json` beside this file.
"""

import argparse
import collections
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import compare

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "Multiple-Machines"), str(HERE.parent / "Simulation")]
import calibrate  # noqa: E402
import hosts  # noqa: E402
import simulate  # noqa: E402

from common.plots import read_metrics  # noqa: E402

DELAY = 0.02  # seconds of each packet
KNOWN, PREDICTED = (1, 2), 4  # workers of the runs that are known, and of the run that is predicted
ACCURACY = 0.95
EVALUATION_SECS = 0.25
SCHEMES = {
    "HogWild": ("HogWild", {}, [40, 50, 60, 80]),
    "DOWNPOUR, window 10": ("DOWNPOUR", {"window": 10}, [40, 50, 60, 80]),
    "AEASGD": ("AEASGD", {}, [40, 50, 60, 80]),
    "Synchronous-SGD, a straggler": ("Synchronous-SGD", {}, [40, 40, 40, 160]),
    "Semi-Synchronous-SGD": ("Semi-Synchronous-SGD", {}, [40, 50, 60, 80]),
}
# What is compared, how far off it may be, and whether that is a share of what was measured.
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
        parser.error(f"there is no {unknown[0]}: choose of {'; '.join(SCHEMES)}")
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("--rounds must be at least 1, and --seconds greater than 0")
    if problem := hosts.why_not():
        parser.error(problem)
    os.chdir(HERE.parent)
    found: dict[str, list] = {name: [] for name in names}
    for seed in range(options.rounds):
        for name in names:
            found[name].append(one_round(name, options.seconds, seed))
            print(f"{name}, seed {seed}: {as_text(found[name][-1])}", flush=True)
    report = {
        "command": "bash benchmarks/predictions.sh",
        "cores": os.cpu_count(),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "schemes": found,
    }
    (HERE / "predictions.json").write_text(json.dumps(report) + "\n")
    print(f"\n{table(report)}")


def one_round(name, seconds, seed):
    """Returns what was measured with four workers, and what was predicted from the runs with fewer: two dicts of `FIGURES`."""
    scheme, flags, delays = SCHEMES[name]
    common = {"seed": seed, "seconds": seconds, "epochs": 1e6, "evaluation_secs": EVALUATION_SECS, **flags}
    with tempfile.TemporaryDirectory() as folder:
        for n in (*KNOWN, PREDICTED):
            real(scheme, Path(folder, str(n)), n, {**common, "delays": delays[:n]})
        paths = [f"{folder}/{n}" for n in KNOWN]
        run = simulate.simulate(scheme, num_workers=PREDICTED, delays=delays, calibrate=paths, **common)
        result = json.loads(Path(folder, str(PREDICTED), "result.json").read_text())
        lines = read_metrics(f"{folder}/{PREDICTED}")
    measured = figures(result, lines)
    predicted = figures(run.result, run.lines)
    one, other = (collections.Counter({int(k): n for k, n in each.pop("staleness").items()}) for each in (measured, predicted))
    predicted["distance"] = calibrate.distance(one, other)
    fit = {key: run.calibration[key] for key in ("step", "step_cv", "latency")}
    histograms = {"measured": sorted(one.items()), "predicted": sorted(other.items())}
    return {"measured": measured, "predicted": predicted, "fit": fit, "staleness": histograms}


def real(scheme, path, num_workers, flags):
    """Trains with a ps and so many workers, each on a host of its own."""
    script = next(Path(scheme).glob(f"{scheme.lower().replace('-', '_')}.py"))
    words = [f"--{k}={','.join(map(str, v)) if isinstance(v, list) else v}" for k, v in flags.items()]
    with hosts.Hosts(num_workers + 1, delay=DELAY) as some:
        with hosts.cluster(some, str(script), *words, f"--run_dir={path}") as tasks:
            outputs = [task.communicate()[0] for task in tasks]
    if any(task.returncode for task in tasks):
        sys.exit(f"{script} failed:\n" + "\n".join(outputs))


def figures(result, lines):
    """Returns those of `FIGURES` that one run has by itself, and the number of updates by their staleness."""
    curve = [(line["time"], line["test_accuracy"]) for line in lines if line.get("test_accuracy") is not None]
    reached = next((time - curve[0][0] for time, accuracy in curve if accuracy >= ACCURACY), None)
    staleness: collections.Counter[int] = collections.Counter()
    for of_line in [line.get("staleness") or {} for line in lines] if "staleness" not in result else [result["staleness"]]:
        staleness.update({int(k): n for k, n in of_line.items()})
    return {
        "samples_per_second": result["samples_per_second"],
        "staleness_mean": calibrate.mean_of(staleness),
        "seconds": reached,
        "staleness": dict(staleness),
    }


def as_text(one):
    """Says what was predicted and measured in a round."""
    parts = []
    for key, (title, _) in FIGURES.items():
        measured, predicted = one["measured"].get(key), one["predicted"].get(key)
        parts.append(f"{title} {number(predicted)}" + (f" for {number(measured)}" if key != "distance" else ""))
    return ", ".join(parts)


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
            pairs = [(p, one["measured"][key]) for p, one in zip(predicted, rounds, strict=True)]
            if any(value is None for pair in pairs for value in pair):
                cells.append("not reached")
                continue
            p, m = (statistics.median(column) for column in zip(*pairs, strict=True))
            close = abs(p - m) <= most * m + 1e-9
            cells.append(f"{number(p)} / {number(m)}{'' if close else ' (!)'}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    compare.interruptible(main)
