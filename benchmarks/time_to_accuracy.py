"""Seconds, samples and megabytes until a test accuracy of 95 %, for each scheme: `bash benchmarks/time_to_accuracy.sh`.

Each scheme runs with its own defaults, once for each seed, and evaluates about ten times a second; figures are medians. Time
counts from the first evaluation of worker 0, with which its training begins. Megabytes are what went through the run's network
since then, which is the run's own, as the kernel counts it: all messages, those of the evaluation too. Writes
`time_to_accuracy.json` and `time_to_accuracy.png` beside this file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import compare
import memory
import numpy as np

from common import isolation
from common.plots import read_metrics

HERE = Path(__file__).resolve().parent
SCHEMES = {
    "HogWild": "HogWild/hogwild.py",
    "DC-ASGD": "DC-ASGD/dc_asgd.py",
    "Dynamic-SGD": "Dynamic-SGD/dynamic_sgd.py",
    "Ringmaster-ASGD": "Ringmaster-ASGD/ringmaster_asgd.py",
    "Semi-Synchronous-SGD": "Semi-Synchronous-SGD/semi_synchronous_sgd.py",
    "DOWNPOUR-Easy": "DOWNPOUR-Easy/downpour_easy.py",
    "DOWNPOUR": "DOWNPOUR/downpour.py",
    "AGN": "AGN/agn.py",
    "AEASGD": "AEASGD/aeasgd.py",
    "AEAMSGD": "AEAMSGD/aeamsgd.py",
    "SAGN": "SAGN/sagn.py",
    "Synchronous-SGD, by all-reduce": "Synchronous-SGD/all_reduce.py",
    "Synchronous-SGD, through the ps": "Synchronous-SGD/synchronous_sgd.py",
    "Synchronous-SGD, different learning rates": (
        "Synchronous-SGD-different-learning-rates/synchronous_sgd_different_learning_rates.py"
    ),
    "Local-SGD": "Local-SGD/local_sgd.py",
    "DiLoCo": "DiLoCo/diloco.py",
    "Streaming-DiLoCo": "Streaming-DiLoCo/streaming_diloco.py",
    "Asynchronous-DiLoCo": "Asynchronous-DiLoCo/asynchronous_diloco.py",
    "SparseLoCo": "SparseLoCo/sparseloco.py",
}
COLUMNS = ("seconds", "samples", "megabytes")


def main():
    """Runs all, and writes what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="runs of each scheme (default: 5)")
    parser.add_argument("--accuracy", type=float, default=0.95, help="on the test set (default: 0.95)")
    options = parser.parse_args()
    if options.seeds < 1 or not 0 < options.accuracy < 1:
        parser.error("--seeds must be at least 1, and --accuracy between 0 and 1")
    problem = isolation.why_no_own_network()
    if problem:
        parser.error(f"the megabytes cannot be counted, as a run has no network of its own here: {problem}")
    os.chdir(HERE.parent)
    curves: dict[str, list] = {name: [] for name in SCHEMES}
    for seed in range(options.seeds):  # in turn, so that whatever else the machine does meets all
        for name, script in SCHEMES.items():
            curves[name].append(one_run(script, seed))
            reached = reached_at(curves[name][-1], options.accuracy)
            figures = ["never"] if reached is None else [f"{v:,.2f} {c}" for c, v in zip(COLUMNS, reached, strict=True)]
            print(f"{name}, seed {seed}: {', '.join(figures)}", flush=True)
    report = {
        "command": "bash benchmarks/time_to_accuracy.sh",
        "cores": os.cpu_count(),
        "accuracy": options.accuracy,
        "seeds": options.seeds,
        "schemes": {name: summary(of_one, options.accuracy) for name, of_one in curves.items()},
    }
    (HERE / "time_to_accuracy.json").write_text(json.dumps(report, indent=2) + "\n")
    chart(curves, report, HERE / "time_to_accuracy.png")
    print(f"\n{table(report)}")


def one_run(script, seed):
    """Returns the evaluations of a run as an array `[n, 4]`: seconds, samples and megabytes since its first one, accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir, counted = f"{folder}/run", []
        command = [sys.executable, script, "--launch", f"--seed={seed}", "--evaluation_secs=0.02", f"--run_dir={run_dir}"]
        process, task = subprocess.Popen(command, stdout=subprocess.DEVNULL), None
        while process.poll() is None:
            time.sleep(0.01)  # how often the bytes are counted
            task = task or memory.tasks_of(run_dir).get("ps 0")
            received = task and received_by_loopback(task)
            if received is not None:
                counted.append((time.time(), received))
        if process.returncode:
            sys.exit(f"{' '.join(command)} ended with exit status {process.returncode}")
        result = json.loads(Path(run_dir, "result.json").read_text())
        evaluations = [line for line in read_metrics(run_dir) if line.get("test_accuracy") is not None]
    times = np.array([line["time"] for line in evaluations])
    samples = np.array([line["global_step"] for line in evaluations]) * result["samples"] / result["global_steps"]
    megabytes = np.interp(times, *np.array(counted).T) / 1e6
    accuracies = [line["test_accuracy"] for line in evaluations]
    return np.column_stack([times - times[0], samples, megabytes - megabytes[0], accuracies])


def received_by_loopback(pid):
    """Returns the bytes that went through the loopback interface of a process's network, None if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:")), None)


def reached_at(curve, accuracy):
    """Returns where a run first had that accuracy, between two evaluations; None if never.

    Args:
      curve: an evaluation a row, `[n, columns + 1]`, the accuracy last; the result has the other columns, as the seconds.
    """
    above = np.flatnonzero(curve[:, -1] >= accuracy)
    if not len(above):
        return None
    after = curve[above[0]]
    if above[0] == 0:
        return after[:-1]
    before = curve[above[0] - 1]
    share = (accuracy - before[-1]) / (after[-1] - before[-1])
    return (before + share * (after - before))[:-1]


def summary(curves, accuracy):
    """Returns the medians of what the runs of a scheme took, None if most never had that accuracy, and how many did."""
    reached = [reached_at(curve, accuracy) for curve in curves]
    known = [values for values in reached if values is not None]
    medians = [
        statistics.median(float(values[i]) if values is not None else float("inf") for values in reached) for i in range(3)
    ]
    return {
        "reached": len(known),
        **{name: round(value, 3) if value < float("inf") else None for name, value in zip(COLUMNS, medians)},
    }


def table(report):
    """Returns a Markdown table of the report, the fastest first."""
    lines = [
        f"| until {100 * report['accuracy']:g} % on the test set | seconds | samples | megabytes sent | reached by |",
        "|---|---:|---:|---:|---:|",
    ]
    schemes = report["schemes"].items()
    for name, of_one in sorted(schemes, key=lambda item: (item[1]["seconds"] is None, item[1]["seconds"])):
        figures = ["never"] * 3
        if of_one["seconds"] is not None:
            figures = [f"{of_one['seconds']:.2f}", f"{of_one['samples']:,.0f}", f"{of_one['megabytes']:,.1f}"]
        lines.append(f"| {name} | {' | '.join(figures)} | {of_one['reached']} of {report['seeds']} |")
    return "\n".join(lines)


def chart(curves, report, path):
    """Draws the accuracy of each scheme against time and against bytes: of the seed that was the median in time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for i, (name, of_one) in enumerate(curves.items()):
        times = [reached_at(curve, report["accuracy"]) for curve in of_one]
        order = sorted(range(len(of_one)), key=lambda k: times[k][0] if times[k] is not None else float("inf"))
        curve = of_one[order[len(order) // 2]]
        style = {"color": f"C{i % 10}", "linestyle": "-" if i < 10 else "--", "label": name, "linewidth": 1.2}
        for axes, column in zip(panels, (0, 2), strict=True):
            axes.plot(curve[:, column], curve[:, 3], **style)
    for axes, title in zip(panels, ("seconds of training", "megabytes sent"), strict=True):
        axes.set(xlabel=title, xscale="log", ylim=(0.5, 1))
        axes.axhline(report["accuracy"], color="0.5", linewidth=0.8, linestyle=":")
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="test accuracy", xlim=(0.02, None))
    panels[1].set(xlim=(1, None))
    panels[1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    FigureCanvasAgg(figure).print_png(path)


if __name__ == "__main__":
    compare.interruptible(main)
