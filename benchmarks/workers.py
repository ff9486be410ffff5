"""How many workers can each scheme use before it breaks, and which learning rate helps? `bash benchmarks/workers.sh`.

Every scheme trains the digits for the same virtual time with 1 to 1,000 virtual workers (`Simulation/`): with the learning rate
of its folder, and with the best rate that a search in steps of half a power of ten finds. The search takes one seed; the two
rates are then tried with five. Writes `workers.json` and `workers.png` beside this file. If schemes are named, only these run
anew; the figures of the others stay.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import compare
import numpy as np

from common.core import counted, plots

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "Simulation"))

WORKERS = [1, 10, 100, 1000]
SEEDS = range(5)
# A local step of 10 ms, machines and steps that differ by a fifth, a ping of 2 ms, a ps with a card of 10 Gbit/s.
CLUSTER = {"step_ms": 10, "machine_cv": 0.2, "step_cv": 0.2, "latency_ms": 1, "ps_mbit": 10_000}
BETTER = 0.01  # how much more accuracy another rate must reach to count as better
LEARNS = 0.3  # accuracy of a run that has learned something; guessing gives 0.1


SCHEMES = {  # folder: the default learning rate of its script
    "HogWild": 0.1,
    "Dynamic-SGD": 0.1,
    "Ringmaster-ASGD": 0.1,
    "DC-ASGD": 0.1,
    "Semi-Synchronous-SGD": 0.1,
    "Synchronous-SGD": 0.2,
    "Synchronous-SGD-different-learning-rates": 0.1,
    "DOWNPOUR-Easy": 0.1,
    "DOWNPOUR": 0.1,
    "AGN": 0.1,
    "AEASGD": 0.1,
    "AEAMSGD": 0.001,
    "SAGN": 0.005,
    "Local-SGD": 0.2,
    "DiLoCo": 0.7,
    "Streaming-DiLoCo": 0.7,
    "Asynchronous-DiLoCo": 0.7,
    "SparseLoCo": 1.0,
}


def flags_of(name, rate, num_workers):
    """Returns the flags that give a scheme a learning rate.

    Where each worker has its own, every other one has a tenth of the others', and their sum is 1.1 times `rate`, as of the
    folder's two.
    """
    if name != "Synchronous-SGD-different-learning-rates":
        return {"learning_rate": rate}
    shares = [(1, 0.1)[i % 2] for i in range(num_workers)]
    return {"learning_rates": [1.1 * rate * share / sum(shares) for share in shares]}


def main():
    """Runs all, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1, help="virtual seconds of each run (default: 1)")
    parser.add_argument("--most", type=int, default=WORKERS[-1], help="largest number of workers (default: 1000)")
    parser.add_argument("schemes", nargs="*", help="folders (default: all)")
    options = parser.parse_args()
    names = options.schemes or list(SCHEMES)
    if unknown := [name for name in names if name not in SCHEMES]:
        parser.error(f"there is no scheme {unknown[0]}: choose from {', '.join(SCHEMES)}")
    if not 0 < options.seconds < math.inf or options.most < 1:
        parser.error("--seconds must be a number greater than 0, and --most at least 1")
    workers = [n for n in WORKERS if n <= options.most]
    report: dict[str, Any] = {
        "command": "bash benchmarks/workers.sh",
        "cluster": CLUSTER,
        "seconds": options.seconds,
        "workers": workers,
        "schemes": {},
    }
    if options.schemes and (HERE / "workers.json").exists():
        before = json.loads((HERE / "workers.json").read_text())
        if any(before[name] != report[name] for name in ("cluster", "seconds", "workers")):
            parser.error("workers.json has another cluster, other numbers of workers or --seconds: run all, without naming any")
        report["schemes"] = before["schemes"]
    # A process for each scheme: TensorFlow keeps what it has compiled.
    with multiprocessing.get_context("spawn").Pool(maxtasksperchild=1) as pool:
        todo = [(name, workers, options.seconds) for name in names]
        for name, found in counted(pool.imap_unordered(of_scheme, todo, chunksize=1), "schemes", len(todo)):
            known = {**report["schemes"], name: found}
            report["schemes"] = {name: known[name] for name in SCHEMES if name in known}
            (HERE / "workers.json").write_text(json.dumps(report) + "\n")
            print(table({**report, "schemes": {name: found}}).splitlines()[-1], flush=True)
    draw(report, HERE / "workers.png")
    print(f"\n{table(report)}")


def of_scheme(what):
    """Returns the name and [{learning rate: [accuracy of each seed]}] for each number of workers; None for a loss that is not
    finite. A rate that was tried in the search alone has the accuracy of the first seed only.

    The search tries the folder's rate, and climbs from the best rate of fewer workers, in steps of half a power of ten. Where
    that one learns nothing, it first goes down until one does.

    Args:
      what: (name of the scheme, numbers of workers, virtual seconds).
    """
    name, workers, seconds = what
    usual = SCHEMES[name]
    found, best = [], 0

    def rate(step, n):
        return flags_of(name, usual * 10 ** (step / 2), n)

    for n in workers:
        accuracies: dict[int, float | None] = {}

        def value(step, n=n, accuracies=accuracies):
            if step not in accuracies:
                accuracies[step] = accuracy(name, n, seconds, SEEDS[0], rate(step, n))
            return accuracies[step] or 0.0

        value(0)
        best = next((lower for lower in range(best, best - 9, -1) if value(lower) > LEARNS), best)
        for direction in (-1, 1):
            while value(best + direction) > value(best):
                best += direction
        if value(0) >= value(best) - BETTER:
            best = 0
        of_seeds = {step: [value] for step, value in sorted(accuracies.items())}
        for step in {0, best}:
            of_seeds[step] += [accuracy(name, n, seconds, seed, rate(step, n)) for seed in SEEDS[1:]]
        found.append({f"{usual * 10 ** (step / 2):.2g}": values for step, values in of_seeds.items()})
    return name, found


def accuracy(name, num_workers, seconds, seed, flags):
    """Returns the test accuracy after so many virtual seconds; None if the loss was not finite.

    Raises:
      TrainingFailed: if there was no update.
    """
    import simulate

    from common.core import TrainingFailed

    try:
        run = simulate.simulate(
            name, num_workers=num_workers, seconds=seconds, seed=seed, epochs=1e6, evaluation_secs=seconds, **CLUSTER, **flags
        )
    except TrainingFailed as error:
        if "the loss is" in str(error):
            return None
        raise
    return run.result["test_accuracy"]


def chosen(name, accuracies):
    """Returns the rate of the folder and the best one, each with the accuracies of all seeds: (rate, [seeds]) twice.

    The best is better than the folder's by at least `BETTER`, in the median; otherwise it is the folder's. The accuracy is 0
    where the loss was not finite.
    """
    usual = f"{SCHEMES[name]:.2g}"
    known = {rate: [value or 0.0 for value in values] for rate, values in accuracies.items()}
    medians = {rate: np.median(values) for rate, values in known.items() if len(values) == len(known[usual])}
    best = max(medians, key=medians.__getitem__)
    if medians[usual] >= medians[best] - BETTER:
        best = usual
    return (usual, known[usual]), (best, known[best])


def table(report):
    """Returns a Markdown table: the accuracy with the rate of the folder, and with the best one if that is another."""
    titles = " | ".join(f"{n:,} worker{'s' * (n > 1)}" for n in report["workers"])
    lines = [f"| scheme | its rate | {titles} |", "|---" + "|---:" * (len(report["workers"]) + 1) + "|"]
    for name, found in report["schemes"].items():
        cells = []
        for accuracies in found:
            (usual, own), (rate, best) = chosen(name, accuracies)
            shown = plots.median_and_range(own)
            cells.append(shown if rate == usual else f"{shown}; {plots.median_and_range(best)} with {rate}")
        lines.append(f"| {name} | {SCHEMES[name]:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(report, path):
    """Draws a panel for each scheme: accuracy against the number of workers, median and range of the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 13), layout="constrained")
    panels(figure, report)
    FigureCanvasAgg(figure).print_png(path)


def panels(figure, report):
    """Draws the same into a figure of Matplotlib."""
    from matplotlib import patheffects

    names, workers = list(report["schemes"]), report["workers"]
    halo = {"path_effects": [patheffects.withStroke(linewidth=3, foreground="white")], "zorder": 4}  # legible over a line
    rows = -(-len(names) // 4)
    grid = list(figure.subplots(rows, 4, sharex=True, sharey=True, squeeze=False).flat)
    for axes, name in zip(grid, names, strict=False):
        pairs = [chosen(name, found) for found in report["schemes"][name]]
        best, usual = (np.transpose([pair[which][1] for pair in pairs]) for which in (1, 0))
        plots.spread(axes, workers, best, marker="o", color="tab:orange", label="best rate")
        plots.spread(axes, workers, usual, marker="o", color="tab:blue", label="the folder's rate")
        for n, ((own, _), (rate, values)) in zip(workers, pairs, strict=True):
            if rate != own:
                above = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 9}
                axes.annotate(rate, (n, np.median(values)), **above, **halo)
        title = name.replace("SGD-different", "SGD\ndifferent").replace("-learning-rates", " learning rates")
        axes.set_title(f"{title}, η = {SCHEMES[name]:g}", fontsize=10)
        axes.set(xscale="log", xlim=(0.4, 3 * workers[-1]), ylim=(-0.03, 1.12))
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    for axes in grid[len(names) :]:
        axes.set_visible(False)
    for axes in grid[max(0, len(names) - 4) : len(names)]:  # the lowest of each column
        axes.tick_params(labelbottom=True)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    figure.supxlabel("workers")
    for axes in grid[::4]:
        axes.set_ylabel(f"test accuracy\nafter {report['seconds']:g} virtual second{'s' * (report['seconds'] != 1)}")


if __name__ == "__main__":
    compare.interruptible(main)
