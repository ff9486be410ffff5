"""Seconds, samples and megabytes until a test accuracy, for each scheme: `bash benchmarks/time_to_accuracy.sh`.

Two workers train a transformer on text, until half of the next characters are right. Each scheme runs once for each seed, most
with the flags that were best for it in the table of Language-Model/README.md; figures are medians. Time counts from the first
evaluation of worker 0, with which its training begins. Megabytes are what went through the run's network since then, which is
the run's own, as the kernel counts it: all messages, those of the evaluation too. Writes `time_to_accuracy.json` and
`time_to_accuracy.png` beside this file.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import compare
import memory
import numpy as np

from common.core import counted, read_metrics
from common.launch import sandbox

HERE = Path(__file__).resolve().parent
FLAGS = "--data=text --model=transformer --batch_size=8 --epochs=6 --learning_rate_schedule=cosine --evaluation_secs=0.5"
SCHEMES = {  # the script, and its flags
    "HogWild": "HogWild/hogwild.py --learning_rate=0.5 --warmup_steps=50",
    "DC-ASGD": "DC-ASGD/dc_asgd.py --learning_rate=0.3 --warmup_steps=50",
    "Dynamic-SGD": "Dynamic-SGD/dynamic_sgd.py --learning_rate=1 --warmup_steps=50",
    "Ringmaster-ASGD": "Ringmaster-ASGD/ringmaster_asgd.py --learning_rate=0.5 --warmup_steps=50",
    "Semi-Synchronous-SGD": "Semi-Synchronous-SGD/semi_synchronous_sgd.py --learning_rate=0.5 --warmup_steps=50",
    "DOWNPOUR-Easy": "DOWNPOUR-Easy/downpour_easy.py --window=5 --learning_rate=0.1 --warmup_steps=50",
    "DOWNPOUR": "DOWNPOUR/downpour.py --window=5 --learning_rate=0.2 --warmup_steps=50",
    "AGN": "AGN/agn.py --window=5 --learning_rate=2 --warmup_steps=50",
    "AEASGD": "AEASGD/aeasgd.py --window=10 --local_optimizer=adam --learning_rate=0.006 --warmup_steps=50",
    "AEAMSGD": "AEAMSGD/aeamsgd.py --window=10 --learning_rate=0.1 --warmup_steps=50",
    "SAGN": "SAGN/sagn.py --window=1 --learning_rate=0.006 --warmup_steps=50",
    "Synchronous-SGD, by all-reduce": "Synchronous-SGD/all_reduce.py --learning_rate=1 --warmup_steps=50",
    "Synchronous-SGD, through the ps": "Synchronous-SGD/synchronous_sgd.py --learning_rate=1 --warmup_steps=50",
    "Synchronous-SGD, different learning rates": (
        "Synchronous-SGD-different-learning-rates/synchronous_sgd_different_learning_rates.py --learning_rates=0.8,0.2 "
        "--warmup_steps=50"
    ),
    "Local-SGD": "Local-SGD/local_sgd.py --window=10 --learning_rate=1 --slow_momentum=0.5 --warmup_steps=10",
    "DiLoCo": "DiLoCo/diloco.py --window=10 --local_learning_rate=0.006 --learning_rate=1 --momentum=0 --warmup_steps=10",
    "Streaming-DiLoCo": (
        "Streaming-DiLoCo/streaming_diloco.py --window=5 --local_learning_rate=0.006 --learning_rate=1 --momentum=0 "
        "--warmup_steps=20"
    ),
    "Asynchronous-DiLoCo": (
        "Asynchronous-DiLoCo/asynchronous_diloco.py --window=10 --local_learning_rate=0.006 --learning_rate=1 --momentum=0 "
        "--warmup_steps=20"
    ),
    "SparseLoCo": "SparseLoCo/sparseloco.py --window=10 --local_learning_rate=0.006 --top=256 --warmup_steps=10",
}
COLUMNS = ("seconds", "samples", "megabytes")
BEHIND_TEXT = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}


def main():
    """Runs all, and writes what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each scheme (default: 3)")
    parser.add_argument("--accuracy", type=float, default=0.5, help="on the test set (default: 0.5)")
    options = parser.parse_args()
    if options.seeds < 1 or not 0 < options.accuracy < 1:
        parser.error("--seeds must be at least 1, and --accuracy between 0 and 1")
    problem = sandbox.why_no_own_network()
    if problem:
        parser.error(f"the megabytes cannot be counted, as a run has no network of its own here: {problem}")
    os.chdir(HERE.parent)
    curves: dict[str, list] = {name: [] for name in SCHEMES}
    # In turn, so that whatever else the machine does meets all.
    for seed, name in counted([(seed, name) for seed in range(options.seeds) for name in SCHEMES], "runs"):
        curves[name].append(one_run(SCHEMES[name], seed))
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
        command = [sys.executable, *script.split(), "--launch", *FLAGS.split(), f"--seed={seed}", f"--run_dir={run_dir}"]
        with compare.started(command) as process:
            task = None
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
    """Draws a panel for each scheme, the fastest first: its runs in color, the median runs of all others in gray."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def order(name):
        seconds = report["schemes"][name]["seconds"]
        return seconds is None, seconds

    median = {name: of_median(of_one, report["accuracy"]) for name, of_one in curves.items()}
    columns = 5
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(13, 2.3 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    panels = grid.flat
    last = max(curve[-1, 0] for of_one in curves.values() for curve in of_one)
    for name, axes in zip(sorted(curves, key=order), panels):  # noqa: B905
        for other, curve in median.items():
            if other != name:
                axes.plot(curve[:, 0], curve[:, 3], color="0.85", linewidth=0.7)
        for curve in curves[name]:
            axes.plot(curve[:, 0], curve[:, 3], color="C0", linewidth=1.2)
        axes.axhline(report["accuracy"], color="0.3", linewidth=0.8, linestyle=":")
        of_one = report["schemes"][name]
        is_known = of_one["seconds"] is not None
        said = f"{of_one['seconds']:.1f} s, {of_one['megabytes']:,.0f} MB" if is_known else "never"
        axes.set_title(name, fontsize=8.5)
        axes.text(0.97, 0.05, said, transform=axes.transAxes, ha="right", fontsize=8)
        if is_known and of_one["reached"] < report["seeds"]:
            said = f"{of_one['reached']} of {report['seeds']} runs reached it"
            axes.text(0.97, 0.13, said, transform=axes.transAxes, ha="right", fontsize=8, bbox=BEHIND_TEXT)
        axes.grid(alpha=0.3)
        axes.set(xlim=(0, last), ylim=(0, None))
    for axes in panels:  # those that are left
        axes.set_visible(False)
    figure.supxlabel("seconds of training", fontsize=10)
    for axes in grid[:, 0]:
        axes.set_ylabel("test accuracy", fontsize=10)
    FigureCanvasAgg(figure).print_png(path)


def of_median(curves, accuracy):
    """Returns the run that is the median in the time until that accuracy."""
    times = [reached_at(curve, accuracy) for curve in curves]
    order = sorted(range(len(curves)), key=lambda k: times[k][0] if times[k] is not None else float("inf"))
    return curves[order[len(order) // 2]]


if __name__ == "__main__":
    compare.interruptible(main)
