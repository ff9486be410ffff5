"""Measures how fast schemes train when the machines are far from each other: `bash Multiple-Machines/slow_links.sh`, as root.

A ps and two workers train the digits, each on a host of its own (`hosts.py`): with a network as fast as this machine makes it,
with links that carry 10 MB/s, and with links on which every packet takes 20 ms. Figures are medians of --rounds runs in turn.
Time counts from the first update, see `first_update`: before it the workers prepare their graphs, whatever the link.
Writes `slow_links.json` and `slow_links.png` beside this file. With `--overlap` it measures only what that flag of HogWild and
DOWNPOUR does where every packet takes 20 ms, and writes no file.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import hosts

from common.core import read_metrics

HERE = Path(__file__).resolve().parent
NETWORKS = {"fast": {}, "10 MB/s": {"bytes_per_second": 10e6}, "20 ms": {"delay": 0.02}}
SCHEMES = {
    "HogWild": "HogWild/hogwild.py",
    "DOWNPOUR, window 10": "DOWNPOUR/downpour.py --window=10",
    "DOWNPOUR, window 100": "DOWNPOUR/downpour.py --window=100",
    "AEASGD, window 10": "AEASGD/aeasgd.py --window=10",
    "DiLoCo, window 100": "DiLoCo/diloco.py --window=100",
    "Synchronous-SGD, through the ps": "Synchronous-SGD/synchronous_sgd.py",
}
CAN_OVERLAP = {"HogWild": "HogWild/hogwild.py", "DOWNPOUR": "DOWNPOUR/downpour.py"}
ACCURACY = 0.95
COLORS = "tab:blue", "tab:orange", "black"  # of the networks


def main():
    """Runs all, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each scheme on each network (default: 3)")
    parser.add_argument("--seconds", type=float, default=15, help="of training in each (default: 15)")
    parser.add_argument("--overlap", action="store_true", help="only: what --overlap does on the links of 20 ms")
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("--rounds must be at least 1, and --seconds greater than 0")
    problem = hosts.why_not()
    if problem:
        parser.error(problem)
    os.chdir(HERE.parent)
    if options.overlap:
        print(f"\n{overlap(options.rounds, options.seconds)}")
        return
    runs: dict[str, dict[str, list]] = {network: {scheme: [] for scheme in SCHEMES} for network in NETWORKS}
    for seed in range(options.rounds):
        for network, properties in NETWORKS.items():
            with hosts.Hosts(3, **properties) as three:
                for scheme, script in SCHEMES.items():
                    run = one_run(three, script, options.seconds, seed)
                    runs[network][scheme].append(run)
                    print(
                        f"{network}, {scheme}: {run['samples_per_second']:,.0f} samples/s, {ACCURACY} {took(run)}", flush=True
                    )
    report = {
        "command": "bash Multiple-Machines/slow_links.sh",
        "cores": os.cpu_count(),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "networks": {network: {scheme: median(of_one) for scheme, of_one in of.items()} for network, of in runs.items()},
    }
    (HERE / "slow_links.json").write_text(json.dumps(report) + "\n")
    chart(report, HERE / "slow_links.png")
    print(f"\n{table(report)}")


def overlap(rounds, seconds):
    """Runs schemes with and without `--overlap` in turn on links of 20 ms; returns a Markdown table of medians."""
    lines = ["| | samples/s | with --overlap | times | test accuracy | with --overlap |", "|---|---:|---:|---:|---:|---:|"]
    runs: dict[str, list] = {script + flag: [] for script in CAN_OVERLAP.values() for flag in ("", " --overlap")}
    with hosts.Hosts(3, **NETWORKS["20 ms"]) as three:
        for seed in range(rounds):
            for script, of_one in runs.items():
                # An evaluation takes messages, too, and a worker waits for them.
                of_one.append(one_run(three, script, seconds, seed, evaluation_secs=5))
                print(f"{script}: {of_one[-1]['samples_per_second']:,.0f} samples/s", flush=True)
    for scheme, script in CAN_OVERLAP.items():
        speeds, accuracies = (
            [statistics.median(run[what] for run in runs[script + flag]) for flag in ("", " --overlap")]
            for what in ("samples_per_second", "accuracy")
        )
        figures = [*(f"{speed:,.0f}" for speed in speeds), f"{speeds[1] / speeds[0]:.2f}", *(f"{a:.3f}" for a in accuracies)]
        lines.append(f"| {scheme} | {' | '.join(figures)} |")
    return "\n".join(lines)


def one_run(three, script, seconds, seed, evaluation_secs=0.1):
    """Trains on three hosts.

    Returns samples per second, seconds until the accuracy (None: never), the curve of it, and what it is at the end.
    """
    words = script.split()
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--run_dir={folder}/run", f"--seconds={seconds}", f"--seed={seed}", "--epochs=1e9"]
        hosts.train(three, words[0], *words[1:], *flags, f"--evaluation_secs={evaluation_secs}")
        result = json.loads(Path(folder, "run", "result.json").read_text())
        curve = curve_of(read_metrics(f"{folder}/run"))
    speed, final = result["samples_per_second"], result["test_accuracy"]
    return {"samples_per_second": speed, "seconds": reached(curve), "curve": curve, "accuracy": final}


def curve_of(lines):
    """Returns the seconds since `first_update` and the test accuracy of each evaluation; of those before it the last, at 0."""
    began = first_update(lines)
    evaluations = [(line["time"] - began, line["test_accuracy"]) for line in lines if line.get("test_accuracy") is not None]
    before = [(0.0, accuracy) for moment, accuracy in evaluations if moment <= 0]
    return before[-1:] + [(moment, accuracy) for moment, accuracy in evaluations if moment > 0]


def first_update(lines):
    """Returns when the round began that made a run's first update, as the lines of the metrics tell it.

    A worker writes its first line when its first call ends. The call has prepared a graph, and then made some rounds. They are
    taken to last as long as those that were timed later.
    """
    moments = []
    for worker in {line["worker"] for line in lines}:
        own = [line for line in lines if line["worker"] == worker and line.get("staleness")]
        timed = [sum(parts.values()) for line in own for parts in line.get("timed_rounds") or []]
        if own:
            rounds = sum(own[0]["staleness"].values())
            moments.append(own[0]["time"] - rounds * (statistics.median(timed) if timed else 0.0))
    return min(moments)


def reached(curve):
    """Returns the seconds after which a curve first has the accuracy; None: never."""
    return next((moment for moment, accuracy in curve if accuracy >= ACCURACY), None)


def median(runs):
    """Returns the medians of some runs, and the curve of the one that is the median in time."""
    order = sorted(runs, key=lambda run: (run["seconds"] is None, run["seconds"]))
    middle = order[len(order) // 2]
    return {
        "samples_per_second": round(statistics.median(run["samples_per_second"] for run in runs)),
        "seconds": None if middle["seconds"] is None else round(middle["seconds"], 2),
        "curve": [(round(moment, 2), round(accuracy, 4)) for moment, accuracy in middle["curve"]],
    }


def took(run):
    """Says when a run had the accuracy."""
    return "never" if run["seconds"] is None else f"after {run['seconds']:.1f} s"


def table(report):
    """Returns a Markdown table: samples per second, and seconds until the accuracy, of each scheme on each network."""
    networks = report["networks"]
    titles = [f"{name}: {what}" for name in networks for what in ("samples/s", f"seconds until {ACCURACY:.0%}")]
    lines = [f"| | {' | '.join(titles)} |", "|---" + "|---:" * len(titles) + "|"]
    for scheme in next(iter(networks.values())):
        figures = []
        for of in networks.values():
            seconds = of[scheme]["seconds"]
            figures += [
                f"{of[scheme]['samples_per_second']:,}",
                f"not in {report['seconds']:g}" if seconds is None else f"{seconds:.1f}",
            ]
        lines.append(f"| {scheme} | {' | '.join(figures)} |")
    return "\n".join(lines)


def chart(report, path):
    """Draws what `panels` draws."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.6), layout="constrained")
    panels(figure, report)
    FigureCanvasAgg(figure).print_png(path)


def panels(figure, report):
    """Draws into a figure of Matplotlib a panel for each scheme: test accuracy against time, a line for each network.

    A dot is where a line first has the accuracy.
    """
    networks = report["networks"]
    schemes = list(next(iter(networks.values())))
    rows = -(-len(schemes) // 3)
    grid = figure.subplots(rows, min(3, len(schemes)), sharex=True, sharey=True, squeeze=False)
    for axes, scheme in zip(grid.flat, schemes, strict=False):
        for (network, of), color in zip(networks.items(), COLORS):
            curve = of[scheme]["curve"]
            axes.plot(*zip(*curve, strict=True), label=network, color=color, linewidth=1.4)
            if (moment := reached(curve)) is not None:
                axes.plot(moment, dict(curve)[moment], "o", color=color, markersize=5, zorder=3)
        axes.axhline(ACCURACY, color="0.5", linewidth=0.8, linestyle=":")
        axes.set_xscale("symlog", linthresh=1)  # linear in the first second, which begins at 0
        ticks = [tick for tick in (0, 0.5, 1, 2, 5, 10, 20, 50) if tick <= report["seconds"]]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set(xlim=(0, report["seconds"]), ylim=(0, 1), title=scheme)
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(schemes) :]:
        axes.set_visible(False)
    figure.supxlabel("seconds since the first update began")
    for axes in grid[:, 0]:
        axes.set_ylabel("test accuracy")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(networks))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
