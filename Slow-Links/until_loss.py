"""Seconds and megabytes until the same loss over slow links, scheme by scheme: `bash Slow-Links/run.sh`, as root.

A ps and two workers, each on a host of its own (`Multiple-Machines/hosts.py`), train a small transformer on text. Every link
carries 10 Mbit/s each way, and every packet takes 20 ms. Synchronous SGD trains for --epochs, and the loss that it comes to on
the test set is the one to reach. Figures are medians of --rounds runs in turn. Writes `until_loss.json` and `until_loss.png`
beside this file.

Time counts from the first update. Megabytes are what the interface of the ps's host has carried, both ways, by the count of the
kernel, less 4 bytes a parameter for each evaluation, which is no part of a scheme: worker 0 pulls the parameters for it.

With --simulated the same runs are made in the simulator, which needs no root: five seeds of each, which give the same figures
each time. It counts the updates and local steps until the loss, and writes `simulated.json`.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "Multiple-Machines"))
import hosts  # noqa: E402

from common.core import counted, read_metrics  # noqa: E402

BYTES_PER_SECOND, DELAY = 10e6 / 8, 0.02
PROBLEM = "--data=text --model=transformer --width=32 --batch_size=8 --learning_rate_schedule=cosine"
DILOCO = "--local_learning_rate=0.01 --warmup_steps=1"
BASELINE = "Synchronous-SGD"
# name: script and flags; times the epochs of the baseline at most; seconds between evaluations, which take messages and time
SCHEMES = {
    BASELINE: ("Synchronous-SGD/synchronous_sgd.py --learning_rate=1 --warmup_steps=50", 1, 5),
    "Local-SGD, T = 25, slow momentum": (
        "Local-SGD/local_sgd.py --window=25 --learning_rate=1 --slow_momentum=0.5 --warmup_steps=2",
        2,
        1,
    ),
    "DiLoCo, H = 50": (f"DiLoCo/diloco.py --window=50 --learning_rate=1 --momentum=0 {DILOCO}", 1, 0.5),
    "Streaming-DiLoCo, P = 2, H = 50, int4 up, int8 down": (
        "Streaming-DiLoCo/streaming_diloco.py --window=25 --overlap_steps=10 --learning_rate=1 --momentum=0 --compress=int4 "
        f"--compress_pull=int8 {DILOCO}",
        1.5,
        0.5,
    ),
    "SparseLoCo, H = 30, int8 down": (f"SparseLoCo/sparseloco.py --window=30 --top=256 --compress_pull=int8 {DILOCO}", 2, 0.5),
    "Asynchronous-DiLoCo, H = 50": (
        f"Asynchronous-DiLoCo/asynchronous_diloco.py --window=50 --learning_rate=1 --momentum=0 {DILOCO}",
        1.5,
        0.5,
    ),
}


def main():
    """Runs all, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, help="runs of each scheme, each with another seed (default: 3, or 5 simulated)")
    parser.add_argument("--epochs", type=float, default=3, help=f"of {BASELINE} (default: 3)")
    parser.add_argument("--schemes", help="names out of the table, separated by semicolons, to run no others; writes no file")
    parser.add_argument("--simulated", action="store_true", help="in the simulator: updates and local steps until the loss")
    options = parser.parse_args()
    options.rounds = options.rounds if options.rounds is not None else 5 if options.simulated else 3
    names = options.schemes.split(";") if options.schemes else list(SCHEMES)
    if options.rounds < 1 or options.epochs <= 0:
        parser.error("--rounds must be at least 1, and --epochs greater than 0")
    if unknown := [name for name in names if name not in SCHEMES]:
        parser.error(f"--schemes: there is no {unknown[0]!r}; there are {'; '.join(SCHEMES)}")
    if BASELINE not in names:
        parser.error(f"--schemes needs {BASELINE}, whose loss is the one to reach")
    problem = None if options.simulated else hosts.why_not()
    if problem:
        parser.error(problem)
    os.chdir(HERE.parent)
    if options.simulated:
        report = simulated(names, options.rounds, options.epochs)
        print(f"\n{simulated_table(report)}")
        if not options.schemes:
            (HERE / "simulated.json").write_text(json.dumps(report, indent=1) + "\n")
        return
    runs: dict[str, list] = {name: [] for name in names}
    for seed in range(options.rounds):
        with hosts.Hosts(3, bytes_per_second=BYTES_PER_SECOND, delay=DELAY) as three:
            for name, of_one in counted(runs.items(), f"schemes, seed {seed}"):
                of_one.append(one_run(three, *SCHEMES[name], options.epochs, seed))
                end = of_one[-1]["curve"][-1]
                print(f"{name}, seed {seed}: loss {end[3]:.4f} after {end[0]:.1f} s, {end[2]:.2f} MB", flush=True)
    target = statistics.median(run["curve"][-1][3] for run in runs[BASELINE])
    report = {
        "command": "bash Slow-Links/run.sh",
        "cores": os.cpu_count(),
        "rounds": options.rounds,
        "epochs": options.epochs,
        "parameters": runs[BASELINE][0]["parameters"],
        "loss": round(target, 4),
        "schemes": {name: summary(of_one, target) for name, of_one in runs.items()},
    }
    print(f"\n{table(report)}")
    if not options.schemes:
        (HERE / "until_loss.json").write_text(json.dumps(report) + "\n")
        chart(report, HERE / "until_loss.png")


def one_run(three, script, times, evaluation_secs, epochs, seed):
    """Trains on three hosts.

    Returns the number of parameters, and the curve: a row for each evaluation, seconds since the first update, updates,
    megabytes, loss on the test set.
    """
    words = [*script.split(), *PROBLEM.split()]
    with tempfile.TemporaryDirectory() as folder, Carried(three[0]) as carried:
        words += [f"--run_dir={folder}/run", f"--epochs={epochs * times}", f"--seed={seed}"]
        seldom = "--checkpoint_secs=1e6"  # they would travel, too
        hosts.train(three, *words, f"--evaluation_secs={evaluation_secs}", seldom)
        result = json.loads(Path(folder, "run", "result.json").read_text())
        lines = sorted(read_metrics(f"{folder}/run"), key=lambda line: line["time"])
    began = next(line["time"] for line in lines if line.get("global_step", 0) > 0)
    evaluations = [line for line in lines if line.get("test_loss") is not None]
    times_ = np.array([line["time"] for line in evaluations])
    size = 4 * result["parameters"] / 1e6
    megabytes = carried.at([began, *times_]) / 1e6
    megabytes = megabytes[1:] - megabytes[0] - size * np.array([sum(began < t <= now for t in times_) for now in times_])
    curve = [
        (round(max(0.0, now - began), 2), line["global_step"], round(max(0.0, float(mb)), 4), round(line["test_loss"], 4))
        for now, mb, line in zip(times_, megabytes, evaluations, strict=True)
    ]
    return {"parameters": result["parameters"], "curve": curve}


def simulated(names, rounds, epochs):
    """Returns the report of the same runs in virtual time: of each scheme and seed, the updates and local steps to the loss."""
    runs: dict[str, list] = {name: [] for name in names}
    for seed in range(rounds):
        for name, of_one in runs.items():
            script, times, _ = SCHEMES[name]
            with tempfile.TemporaryDirectory() as folder:
                words = [script.partition("/")[0], *script.split()[1:], *PROBLEM.split()]
                words += ["--num_workers=2", f"--latency_ms={DELAY * 1e3:g}", f"--mbit={BYTES_PER_SECOND * 8 / 1e6:g}"]
                words += [f"--run_dir={folder}/run", f"--epochs={epochs * times}", f"--seed={seed}"]
                program = [sys.executable, "Simulation/simulate.py", *words]
                subprocess.run(program, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                result = json.loads(Path(folder, "run", "result.json").read_text())
                lines = [line for line in read_metrics(f"{folder}/run") if line.get("test_loss") is not None]
            steps = result["samples"] / result["global_steps"] / result["batch_size"] / result["num_workers"]
            curve = [(line["time"], line["global_step"], line["test_loss"]) for line in lines]
            of_one.append([(seconds, updates, steps * updates, loss) for seconds, updates, loss in curve])
            print(f"{name}, seed {seed}: loss {of_one[-1][-1][3]:.4f}", flush=True)
    target = statistics.median(curve[-1][3] for curve in runs[BASELINE])
    report = {"command": "bash Slow-Links/run.sh --simulated", "rounds": rounds, "loss": round(target, 4), "schemes": {}}
    for name, curves in runs.items():
        found = [reached(curve, target) for curve in curves]
        report["schemes"][name] = {
            what: [None if each is None else round(each[i], 2) for each in found] for i, what in ((1, "updates"), (2, "steps"))
        }
    return report


def simulated_table(report):
    """Returns a Markdown table: the updates, and the local steps of a worker, until the loss: median and range of the seeds."""
    head = "updates | local steps of a worker | reached by"
    lines = [f"| until a test loss of {report['loss']:.3f} | {head} |", "|---|---:|---:|---:|"]
    for name, of_one in report["schemes"].items():
        cells = []
        for what in "updates", "steps":
            median, low, high = (f"{value:,.0f}" for value in median_and_range(of_one[what]))
            cells.append(f"{median} ({low} to {high})".replace("inf", "never"))
        known = sum(each is not None for each in of_one["updates"])
        lines.append(f"| {name} | {' | '.join(cells)} | {known} of {report['rounds']} |")
    return "\n".join(lines)


def median_and_range(values):
    """Returns median, minimum and maximum of numbers, of which None stands for infinity."""
    numbers = [float("inf") if value is None else value for value in values]
    return statistics.median(numbers), min(numbers), max(numbers)


class Carried:
    """Counts what the interface of a host carries, both ways, while this context is open."""

    def __init__(self, host):
        self._path = Path(f"/proc/{host.pid}/net/dev")
        self._counted: list[tuple[float, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)

    def _count(self):
        with contextlib.suppress(OSError):  # the host has ended: the run was interrupted, or reports its failure itself
            while not self._ended.wait(0.02):  # how often it is read
                line = next(line for line in self._path.read_text().splitlines() if line.strip().startswith("eth0:"))
                figures = line.partition(":")[2].split()
                self._counted.append((time.time(), int(figures[0]) + int(figures[8])))

    def at(self, times):
        """Returns the bytes up to these times."""
        return np.interp(times, *np.array(self._counted).T)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._ended.set()
        self._thread.join()


def reached(curve, loss):
    """Returns when a run first had that loss, between two evaluations, as (seconds, updates, megabytes); None if never."""
    for before, after in zip([None, *curve], curve, strict=False):
        if after[3] <= loss:
            if before is None:
                return after[:3]
            share = (before[3] - loss) / (before[3] - after[3])
            return tuple(one + share * (other - one) for one, other in zip(before[:3], after[:3], strict=True))
    return None


def summary(runs, loss):
    """Returns the medians of what some runs took until the loss, None if most never had it; and the middle run's curve."""
    found = [reached(run["curve"], loss) for run in runs]
    known = [each for each in found if each is not None]
    middle = {}
    for i, name in enumerate(("seconds", "updates", "megabytes")):
        value = statistics.median(each[i] if each is not None else float("inf") for each in found)
        middle[name] = round(float(value), 3) if value < float("inf") else None
    order = sorted(range(len(runs)), key=lambda i: (found[i] is None, found[i] or ()))
    return {"reached": len(known), **middle, "curve": runs[order[len(order) // 2]]["curve"]}


def table(report):
    """Returns a Markdown table: what each scheme took until the loss, and how many times less than the baseline."""
    first = report["schemes"][BASELINE]
    head = "updates | seconds | times fewer | megabytes | times fewer | reached by"
    lines = [
        f"| until a test loss of {report['loss']:.3f} | {head} |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, of_one in report["schemes"].items():
        cells = ["never"] + [""] * 4
        if of_one["seconds"] is not None:
            cells = [f"{of_one['updates']:,.0f}"]
            for what, form in ("seconds", ".1f"), ("megabytes", ".2f"):
                cells += [f"{of_one[what]:,{form}}", f"{first[what] / of_one[what]:,.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} | {of_one['reached']} of {report['rounds']} |")
    return "\n".join(lines)


def chart(report, path):
    """Draws the loss against seconds and against megabytes, a row of two panels for each scheme, the baseline in gray."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    schemes = report["schemes"]
    names = [name for name in schemes if name != BASELINE]
    figure = Figure(figsize=(9, 1.45 * len(names) + 0.8), layout="constrained")
    panels = figure.subplots(len(names), 2, sharex="col", sharey=True, squeeze=False)
    for row, name in zip(panels, names, strict=True):
        for axes, column in zip(row, (0, 2), strict=True):
            for which, color in (BASELINE, "0.6"), (name, "tab:blue"):
                curve = np.array(schemes[which]["curve"])
                axes.plot(curve[:, column], curve[:, 3], color=color, linewidth=1.4)
            axes.axhline(report["loss"], color="0.5", linewidth=0.8, linestyle=":")
            axes.set(xscale="symlog", ylim=(1.8, 4.2))
            axes.grid(alpha=0.3)
        row[0].set_title(name, loc="left", fontsize=10)
        row[0].set_ylabel("test loss")
    for axes, title in zip(panels[-1], ("seconds", "megabytes"), strict=True):
        axes.set_xlabel(f"{title} since the first update; gray: {BASELINE}")
    FigureCanvasAgg(figure).print_png(path)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
